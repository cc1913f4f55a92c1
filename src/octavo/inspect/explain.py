"""Why a prompt was not found further in the prefix cache: which block broke the chain, and what to do about it.

Made from what the core noted when the request was admitted (`CacheReport`); pure functions of a finished request's
report. The reasons and their words live here, so the command line, the block map and the metrics say the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.journal import FinishedRequest
    from octavo.core.sequence import CacheReport, Miss

#: reason -> (what happened, what would make it a hit)
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
    "adapter": ("the same tokens are cached for another adapter", "nothing: another adapter has other keys and values"),
    "evicted": (
        "the block was cached and has been given to somebody else since",
        "give the pool more blocks, or send requests with the same prefix closer together",
    ),
    "partial block": (
        "the rest is less than a whole block, and only whole blocks are kept",
        "nothing to gain, or a smaller block_size when many short prefixes are shared",
    ),
    "never seen": ("nobody has computed this before", "nothing: the first request of a prefix always computes it"),
    "prompt logprobs": (
        "the request asked for logprobs of its prompt, so every position had to be computed",
        "leave prompt_logprobs out where it is not needed",
    ),
    "not admitted": ("the request ended before it began to run", ""),
}


def explain_text(record: FinishedRequest) -> str:
    """One or two lines for people.

    `req-7: 48 of 100 prompt tokens from the cache (3 blocks). Block 3 (token 48): the text parts from what is cached …`
    """
    return f"{record.request_id}: {report_text(record.cache_report, record.prompt_tokens)}"


def report_text(report: CacheReport | None, prompt_tokens: int) -> str:
    """The same for a `RequestOutput.cache_report`, whoever the request is."""
    if report is None:
        return "it ended before its prompt was looked up"
    text = f"{report.tokens_hit} of {prompt_tokens} prompt tokens came from the cache"
    text += f" ({report.blocks_hit} block{'s' * (report.blocks_hit != 1)})"
    happened, remedy = REASONS[report.miss.kind]
    if report.miss.kind == "none":
        return f"{text}: {happened}, the last one is always computed"
    return f"{text}. {_place(report.miss)}{happened}{_detail(report.miss)}." + (f" To hit: {remedy}." if remedy else "")


def _place(miss: Miss) -> str:
    if miss.kind in ("off", "prompt logprobs"):
        return ""
    position = "" if miss.position is None else f" (token {miss.position})"
    return f"Block {miss.block}{position} broke the chain: "


def _detail(miss: Miss) -> str:
    """What the core noted beyond the reason itself: the step of an eviction, a window."""
    return f" ({miss.detail})" if miss.kind == "evicted" and miss.detail else ""


def explain_as_json(record: FinishedRequest) -> dict[str, Any]:
    """The report as plain values, with the sentence in `text`."""
    report = record.cache_report
    miss = report.miss if report is not None else None
    return {
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "tokens_hit": report.tokens_hit if report else 0,
        "blocks_hit": report.blocks_hit if report else 0,
        "reason": miss.kind if miss else "not admitted",
        "block": miss.block if miss else None,
        "position": miss.position if miss else None,
        "detail": miss.detail if miss else "",
        "remedy": REASONS[miss.kind if miss else "not admitted"][1],
        "text": report_text(report, record.prompt_tokens),
    }


def reasons_text(miss_reasons: dict[str, int]) -> list[str]:
    """One line per reason, most frequent first: `  12  evicted: the block was cached …`."""
    total = sum(miss_reasons.values())
    lines = []
    for kind, count in sorted(miss_reasons.items(), key=lambda item: -item[1]):
        lines.append(f"{count:6d}  ({count / total:4.0%})  {kind}: {REASONS[kind][0]}")
    return lines
