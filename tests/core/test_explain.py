"""Prefix misses in words: every reason that the cache gives, from real look-ups, says what happened and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from helpers.scheduling import Rig, never_ends, prompt
from octavo.core import reasons
from octavo.core.journal import Journal
from octavo.core.reasons import REASONS, report_text
from octavo.core.sequence import CacheReport, Miss
from octavo.inspect.explain import cache_report_as_json, explain_as_json, explain_text, reasons_lines


def second(rig: Rig, tokens: list[int], **given: Any) -> Any:
    """A request after another one has finished; its record."""
    request = rig.add(tokens, **{"max_tokens": 2, **given})
    rig.run()
    return Journal().ended(request)


def cases() -> dict[str, Any]:
    """reason -> the record of a request that missed for it."""
    first = prompt(20)
    found: dict[str, Any] = {}

    def rig(**settings: Any) -> Rig:
        made = Rig(**{"num_blocks": 40, "script": never_ends, "enable_prefix_caching": True, **settings})
        second(made, first)
        return made

    found["none"] = second(rig(), first)
    found["different token"] = second(rig(), [*first[:9], 999, *first[10:]])
    found["salt"] = second(rig(), first, salt="other")
    found["adapter"] = second(rig(), first, adapter="other")
    found["partial block"] = second(rig(), prompt(3, 6))
    found["never seen"] = second(rig(), [500 + t for t in first])
    found["prompt logprobs"] = second(rig(), first, prompt_logprobs=1)
    found["off"] = second(rig(enable_prefix_caching=False), first)
    tight = rig(num_blocks=8, max_model_len=32)
    second(tight, prompt(28, 5))
    found["evicted"] = second(tight, first)
    return found


def test_every_reason_of_the_cache_has_its_words() -> None:
    for reason, record in cases().items():
        assert record.cache_report.miss.kind == reason
        text = explain_text(record)
        happened, remedy = REASONS[reason]
        assert text.startswith(f"{record.request_id}: {record.cache_report.tokens_hit} of {record.prompt_tokens} ")
        assert happened in text and (not remedy or f"To hit: {remedy}." in text)
        facts = explain_as_json(record)
        assert (facts["reason"], facts["remedy"], facts["request_id"]) == (reason, remedy, record.request_id)
        assert text.endswith(facts["text"])


def test_the_sentence_names_block_and_token() -> None:
    record = cases()["different token"]
    assert explain_text(record) == (
        "r1: 9 of 20 prompt tokens came from the cache (3 blocks). Block 2 (from token 9) broke the chain: the text "
        "parts from what is cached. To hit: put what varies (dates, names, ids) behind what is always the same."
    )
    facts = explain_as_json(record)
    assert (facts["block"], facts["position"], facts["blocks_hit"]) == (2, 9, 3)


def test_an_eviction_names_its_step() -> None:
    text = explain_text(cases()["evicted"])
    assert "(evicted in step " in text and "0 of 20 prompt tokens" in text


def test_a_report_speaks_for_itself() -> None:
    report = CacheReport(1, 16, Miss("never seen", 1, 16))
    assert str(report) == report_text(report)
    assert str(report).startswith("16 prompt tokens came from the cache (1 block). Block 1 (from token 16)")
    assert report_text(None, 5) == "the request ended before it began to run"
    assert cache_report_as_json(None, 5)["reason"] == "not admitted"


def test_reasons_are_added_up_most_frequent_first() -> None:
    assert reasons_lines({"none": 1, "evicted": 3, "never seen": 1}) == [
        "     3 ( 60%)  evicted: the block was cached and has been given to somebody else since",
        "     1 ( 20%)  never seen: nobody has computed this before",
        "     1 ( 20%)  none: every token that may come from the cache did",
    ]
    assert reasons_lines({}) == []


def test_the_words_are_complete() -> None:
    core = Path(reasons.__file__).parent
    given = {k for p in core.glob("*.py") for k in re.findall(r'Miss\(\s*"([^"]+)"', p.read_text())}
    assert {"evicted", "never seen"} <= given <= set(REASONS), "a reason without words"
    assert set(cases()) <= set(REASONS)
    for happened, remedy in REASONS.values():
        assert happened and not happened.endswith(".") and not remedy.endswith(".")
