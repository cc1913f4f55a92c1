"""What /metrics says of speculative decoding: nothing without it, counters by vLLM's names with it."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("prometheus_client")

from octavo.engine import EngineStats
from octavo.server.metrics import Reading, families


def samples(**given: Any) -> dict[tuple[str, str], float]:
    values: dict[str, Any] = {
        f.name: {} if f.name == "miss_reasons" else 0 for f in fields(EngineStats) if "spec" not in f.name
    }
    state: Any = SimpleNamespace(model_names=["m"], phase="ready", http_requests={}, shed={})
    found = families(state, None, Reading(EngineStats(**values, **given), {}, 1))
    return {
        (s.name, s.labels.get("position", "")): s.value for f in found for s in f.samples if "spec_decode" in s.name
    }


def test_nothing_without_speculation() -> None:
    assert samples() == {}


def test_counters_and_places() -> None:
    found = samples(
        spec_drafts=4, spec_draft_tokens=8, spec_accepted_tokens=5, spec_draft_tokens_per_pos=(4, 4),
        spec_accepted_tokens_per_pos=(3, 2), spec_left_sequences=1,
    )  # fmt: skip
    assert found == {
        ("octavo:spec_decode_num_drafts_total", ""): 4.0,
        ("octavo:spec_decode_num_draft_tokens_total", ""): 8.0,
        ("octavo:spec_decode_num_accepted_tokens_total", ""): 5.0,
        ("octavo:spec_decode_num_left_sequences_total", ""): 1.0,
        ("octavo:spec_decode_num_accepted_tokens_per_pos_total", "0"): 3.0,
        ("octavo:spec_decode_num_accepted_tokens_per_pos_total", "1"): 2.0,
    }
