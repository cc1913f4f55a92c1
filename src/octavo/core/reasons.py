"""The words for why a prompt was not found further in the prefix cache: what happened, and what would make it a hit.

One table for every place that says it: outputs, the command line, the block map, the metrics, the doctor. The reasons
themselves are found in `prefix_cache.py`; nothing is looked up here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.sequence import CacheReport, Miss

#: reason -> (what happened, what would make it a hit; "" where nothing would)
REASONS: dict[str, tuple[str, str]] = {
    "none": ("every token that may come from the cache did", ""),
    "off": ("the prefix cache is off", "turn it on (enable_prefix_caching=True)"),
    "different token": (
        "the text parts from what is cached",
        "put what varies (dates, names, ids) behind what is always the same",
    ),
    "salt": (
        "the same tokens are cached under another cache_salt",
        "give requests that may share a prefix the same cache_salt",
    ),
    "adapter": ("the same tokens are cached for another adapter, whose keys and values differ", ""),
    "evicted": (
        "the block was cached and has been given to somebody else since",
        "give the pool more blocks, or send requests with the same prefix closer together",
    ),
    "partial block": ("what is left is less than a block, and only whole blocks are kept", ""),
    "never seen": ("nobody has computed this before", ""),
    "prompt logprobs": (
        "the request asked for logprobs of its prompt, so every position had to be computed",
        "leave prompt_logprobs out where it is not needed",
    ),
    "mean pooling": ("the mean is taken over every position, so every one had to be computed", ""),
    "not admitted": ("the request ended before it began to run", ""),
}


def report_text(report: CacheReport | None, prompt_tokens: int | None = None) -> str:
    """One sentence or three: how much was found, which block broke the chain and why, what to do.

    `48 of 100 prompt tokens came from the cache (3 blocks). Block 3 (from token 52) broke the chain: the text parts …`
    """
    if report is None:
        return REASONS["not admitted"][0]
    miss = report.miss
    of = "" if prompt_tokens is None else f" of {prompt_tokens}"
    blocks = f"{report.blocks_hit} block{'s' * (report.blocks_hit != 1)}"
    text = f"{report.tokens_hit}{of} prompt tokens came from the cache ({blocks})"
    happened, remedy = REASONS[miss.kind]
    if miss.kind == "none":
        return f"{text}: {happened}; the last token is always computed"
    return f"{text}. {_place(miss)}{happened}{_detail(miss)}." + (f" To hit: {remedy}." if remedy else "")


def _place(miss: Miss) -> str:
    if miss.kind in ("off", "prompt logprobs", "mean pooling"):
        return ""
    position = "" if miss.position is None else f" (from token {miss.position})"
    return f"Block {miss.block}{position} broke the chain: "


def _detail(miss: Miss) -> str:
    """What was noted beyond the reason itself: the step of an eviction, a window."""
    return f" ({miss.detail})" if miss.kind == "evicted" and miss.detail else ""
