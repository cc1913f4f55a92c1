"""The feed: a `BlockView` as small JSON frames, for the block map in the browser, `octavo top`, and files.

A *full* frame describes everything; a *delta* frame says what is different from the frame before it. Both have the same
keys, for a full frame is the delta from an empty pool plus a header. Arrays, not objects: a pool of 20,000 blocks in
use is about half a megabyte in full, a step of decoding a few hundred bytes.

    v         version of this format, `FEED_VERSION`
    frame     number of the frame; a delta fits on frame `frame - 1` and on no other
    step      steps planned so far                       time   seconds on the engine's clock
    pool      full only: num_blocks, block_size, bytes_per_block, windows (per group, null: sees all), max_model_len,
              max_num_seqs, stats (the names of `stats`)
    blocks    [ids, states, at]: changed blocks; a string of one letter each: f free, c cached, u used, s shared,
              p pending; the step of their last use, for blocks nobody holds (0 for the others and for never used ones)
    keys      [block, group, hash, parent, block, …]: published content. hash and parent are the first 8 hex digits of
              keyed hashes, parent of the block before it in the chain. group -1: not published any more
    new       [[seq, request_id, sample_index, prompt_len], …]          gone   [seq, …]
    progress  [seq, num_tokens, num_computed, last_step, seq, …]: sequences of which one of these changed
    tables    [[seq, group, first, id, …], …]: the table from logical block `first` on is now these ids; -1: released
              behind a sliding window
    waiting   null: as before; else [[request_id, prompt_len, num_sequences, preemptions], …], the first 200 that wait
    events    [[number, step, kind, sequence, source, destination], …], see `BlockEvent`; missed: how many are not shown
    stats     gauges and counters in the order of `STATS`

Not in the frame because it follows from it (`BlockMap` works it out): the count and the owners of a block are the
tables it occurs in; its fill is what `num_computed` reaches of it, all of it for a cached block; a used block was last
used in the `last_step` of its owners. Token text is in no frame: see `block_details`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from octavo.core.block_view import STATS, BlockView, SequenceRow

FEED_VERSION = 1
HASH_DIGITS = 8
_CHUNK = 64  # blocks that are compared at once

Frame = dict[str, Any]


def full_frame(view: BlockView, number: int = 0) -> Frame:
    """Everything about one moment."""
    frame = delta_frame(_empty(view), view, number)
    frame["pool"] = {
        "num_blocks": view.num_blocks,
        "block_size": view.block_size,
        "bytes_per_block": view.bytes_per_block,
        "windows": list(view.windows),
        "max_model_len": view.max_model_len,
        "max_num_seqs": view.max_num_seqs,
        "stats": list(STATS),
    }
    frame["waiting"] = [list(row) for row in view.waiting]
    frame["missed"] = 0
    return frame


def delta_frame(before: BlockView, after: BlockView, number: int) -> Frame:
    """What changed between two views of one pool."""
    blocks = _changed_blocks(before, after)
    first_seen = after.events[0].number if after.events else 0
    last_known = before.events[-1].number if before.events else 0
    return {
        "v": FEED_VERSION,
        "frame": number,
        "step": after.step,
        "time": round(after.time, 4),
        "blocks": _block_columns(after, blocks),
        "keys": _keys(before, after, blocks),
        "new": [
            [seq_id, row.request_id, row.sample_index, row.prompt_len]
            for seq_id, row in after.sequences.items()
            if seq_id not in before.sequences
        ],
        "gone": [seq_id for seq_id in before.sequences if seq_id not in after.sequences],
        "progress": _progress(before.sequences, after.sequences),
        "tables": _tables(before.sequences, after.sequences),
        "waiting": None if before.waiting == after.waiting else [list(row) for row in after.waiting],
        "events": [list(event) for event in after.events if event.number > last_known],
        "missed": max(0, first_seen - last_known - 1),
        "stats": list(after.stats),
    }


def block_state(view: BlockView, block: int) -> str:
    """f free, c cached, u used, s shared, p pending."""
    count = view.counts[block]
    if count:
        return "s" if count > 1 else "u"
    if block in view.pending:
        return "p"
    return "c" if view.published[block] else "f"


def _empty(view: BlockView) -> BlockView:
    zeros = bytes(4 * view.num_blocks)
    return BlockView(
        step=0,
        time=0.0,
        block_size=view.block_size,
        bytes_per_block=view.bytes_per_block,
        windows=view.windows,
        max_model_len=view.max_model_len,
        max_num_seqs=view.max_num_seqs,
        counts=array("i", zeros),
        released_at=array("i", zeros),
        published=bytes(view.num_blocks),
        pending=frozenset(),
        keys={},
        sequences={},
        waiting=(),
        events=(),
        stats=(),
    )


def _changed_blocks(before: BlockView, after: BlockView) -> list[int]:
    """Blocks whose count, last release, content or pending state differs, ascending.

    Compared as raw bytes and chunk by chunk, so the cost is that of the changes. Content of a block never changes while
    all of the others stay: it must be given back and taken again, or published.
    """
    pairs = [
        (memoryview(a).cast("B"), memoryview(b).cast("B"), _CHUNK * width)
        for a, b, width in (
            (before.counts, after.counts, before.counts.itemsize),
            (before.released_at, after.released_at, before.released_at.itemsize),
            (before.published, after.published, 1),
        )
    ]
    changed = set(before.pending ^ after.pending)
    for chunk in range(-(-after.num_blocks // _CHUNK)):
        if all(a[chunk * size : (chunk + 1) * size] == b[chunk * size : (chunk + 1) * size] for a, b, size in pairs):
            continue
        for block in range(chunk * _CHUNK, min((chunk + 1) * _CHUNK, after.num_blocks)):
            if (
                before.counts[block] != after.counts[block]
                or before.released_at[block] != after.released_at[block]
                or before.published[block] != after.published[block]
            ):
                changed.add(block)
    return sorted(changed)


def _block_columns(view: BlockView, blocks: list[int]) -> list[Any]:
    counts, released_at = view.counts, view.released_at
    states = "".join([block_state(view, block) for block in blocks])
    return [blocks, states, [0 if counts[block] else released_at[block] for block in blocks]]


def _keys(before: BlockView, after: BlockView, blocks: list[int]) -> list[int | str]:
    rows: list[int | str] = []
    for block in blocks:
        place = after.keys.get(block)
        if place == before.keys.get(block):
            continue
        if place is None:
            rows += (block, -1, "", "")
        else:
            key, group, parent = place
            rows += (block, group, key.hex()[:HASH_DIGITS], parent.hex()[:HASH_DIGITS])
    return rows


def _progress(before: Mapping[int, SequenceRow], after: Mapping[int, SequenceRow]) -> list[int]:
    rows: list[int] = []
    for seq_id, row in after.items():
        old = before.get(seq_id)
        now = (row.num_tokens, row.num_computed, row.last_step)
        if old is None or now != (old.num_tokens, old.num_computed, old.last_step):
            rows += (seq_id, *now)
    return rows


def _tables(before: Mapping[int, SequenceRow], after: Mapping[int, SequenceRow]) -> list[list[int]]:
    rows = []
    for seq_id, row in after.items():
        old = before.get(seq_id)
        for group, table in enumerate(row.tables):
            known = old.tables[group] if old is not None else []
            if known != table:
                first = _common(known, table)
                rows.append([seq_id, group, first, *table[first:]])
    return rows


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix; mostly one table has only grown."""
    low = min(len(a), len(b))
    if a[:low] == b[:low]:
        return low
    return next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
