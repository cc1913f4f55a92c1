"""All about one block, tokens included: the one view that needs the scheduler itself, so it is asked block by block.

Token ids are content of prompts. Whoever calls this decides whether anybody may see them; without `text_of` they are
left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.core.block_view import block_view
from octavo.errors import RequestError
from octavo.inspect.block_map import BlockMap
from octavo.inspect.feed import full_frame

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler

TextOf = Callable[[int], str]


def block_details(scheduler: Scheduler, block: int, text_of: TextOf | None = None) -> dict[str, Any]:
    """State, count, owners, fill, age, content hash and parent of a block; `tokens` as text with `text_of`.

    Call it between two steps. Raises RequestError for an id outside the pool.
    """
    if not 0 <= block < scheduler.memory.pool.num_blocks:
        last = scheduler.memory.pool.num_blocks - 1
        raise RequestError(f"block {block} is not in the pool; its blocks are 0 to {last}")
    block_map = BlockMap(full_frame(block_view(scheduler)))
    key = block_map.keys.get(block)
    details: dict[str, Any] = {
        "block": block,
        "step": block_map.step,
        "state": block_map.state(block),
        "count": block_map.count(block),
        "owners": [
            {
                "seq_id": owner.seq_id,
                "request_id": block_map.sequences[owner.seq_id].request_id,
                "sample_index": block_map.sequences[owner.seq_id].sample_index,
                "group": owner.group,
                "logical": owner.logical,
            }
            for owner in block_map.owners(block)
        ],
        "fill": block_map.fill(block),
        "block_size": block_map.block_size,
        "age": block_map.age(block),
        "hash": key.hash if key else None,
        "parent_hash": key.parent if key else None,
        "parent_block": block_map.parent(block),
    }
    if text_of is not None:
        details["tokens"] = [text_of(token) for token in tokens_of(scheduler, block, block_map)]
    return details


def tokens_of(scheduler: Scheduler, block: int, block_map: BlockMap) -> tuple[int, ...]:
    """Token ids whose keys and values the block holds; empty where nothing is known to be in it."""
    owners = block_map.owners(block)
    if owners:
        seq = scheduler.sequence(owners[0].seq_id)
        start = owners[0].logical * block_map.block_size
        return tuple(seq.token_ids[start : start + block_map.fill(block)]) if seq is not None else ()
    cache = scheduler.memory.cache
    return cache.tokens(block) if cache is not None else ()


def text_of_tokens(tokenizer: Any) -> TextOf:
    """Text of single tokens; without a tokenizer, or for an id that it does not know, the id itself as `‹17›`."""
    if tokenizer is None:
        return lambda token: f"‹{token}›"

    def text_of(token: int) -> str:
        text: str = tokenizer.decode([token], skip_special_tokens=False)
        return text if text and "\ufffd" not in text else tokenizer.token_text(token) or f"‹{token}›"

    return text_of
