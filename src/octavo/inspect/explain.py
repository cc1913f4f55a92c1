"""Prefix misses of finished requests, for people and as JSON, and their reasons added up. Pure functions.

What happened was noted by the core when the request was admitted; the words are in `octavo.core.reasons`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.core.reasons import REASONS, report_text

if TYPE_CHECKING:
    from octavo.core.journal import FinishedRequest
    from octavo.core.sequence import CacheReport


def explain_text(record: FinishedRequest) -> str:
    """`req-7: 48 of 100 prompt tokens came from the cache (3 blocks). Block 3 (from token 52) broke the chain: …`"""
    return str(record)


def explain_as_json(record: FinishedRequest) -> dict[str, Any]:
    """The same as plain values; the sentence is in `text`."""
    return {"request_id": record.request_id, **cache_report_as_json(record.cache_report, record.prompt_tokens)}


def cache_report_as_json(report: CacheReport | None, prompt_tokens: int) -> dict[str, Any]:
    """A `RequestOutput.cache_report`. `block` and `position` say where the chain broke (position: a token's index)."""
    miss = report.miss if report is not None else None
    reason = miss.kind if miss is not None else "not admitted"
    return {
        "prompt_tokens": prompt_tokens,
        "tokens_hit": report.tokens_hit if report is not None else 0,
        "blocks_hit": report.blocks_hit if report is not None else 0,
        "reason": reason,
        "block": miss.block if miss is not None else None,
        "position": miss.position if miss is not None else None,
        "detail": miss.detail if miss is not None else "",
        "remedy": REASONS[reason][1],
        "text": report_text(report, prompt_tokens),
    }


def reasons_lines(miss_reasons: dict[str, int]) -> list[str]:
    """One line per reason, most frequent first: `12 ( 80%)  evicted: the block was cached and …`."""
    total = sum(miss_reasons.values())
    return [
        f"{count:6d} ({count / total:4.0%})  {kind}: {REASONS[kind][0]}"
        for kind, count in sorted(miss_reasons.items(), key=lambda item: (-item[1], item[0]))
    ]
