"""`StructuredOutputs` and `PoolingParams`: exactly one field, frozen, and what they may not be combined with."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.fake_runner import FakeRunner
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.errors import PromptError, SamplingError
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar; got none"),
        ({"regex": "a", "choice": ["b"]}, "got regex, choice"),
        ({"json": False}, "allows nothing"),
        ({"json_object": 1}, "True or False"),
        ({"choice": []}, "non-empty list"),
        ({"choice": "yes"}, "non-empty list"),
        ({"choice": ["a", ""]}, "non-empty string"),
        ({"choice": [1]}, "non-empty string"),
        ({"regex": ""}, "non-empty string"),
        ({"grammar": 3}, "non-empty string"),
        ({"json": {"a": {1, 2}}}, "not plain JSON"),
    ],
)
def test_exactly_one_and_of_the_right_kind(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        StructuredOutputs(**fields)


def test_a_later_edit_changes_nothing() -> None:
    schema = {"type": "object"}
    asked = StructuredOutputs(json=schema)
    schema["type"] = "integer"
    assert asked.json == '{"type": "object"}' and asked.kind == "json"
    assert StructuredOutputs(choice=["b", "a", "b"]).choice == ("b", "a")
    assert hash(StructuredOutputs(regex="a")) == hash(StructuredOutputs(regex="a"))


def test_a_mapping_is_taken_and_unknown_fields_are_named() -> None:
    assert SamplingParams(structured_outputs={"regex": "a+"}).structured_outputs == StructuredOutputs(regex="a+")
    with pytest.raises(SamplingError, match="unknown schema; known: json"):
        SamplingParams(structured_outputs={"schema": {}})
    with pytest.raises(SamplingError, match="must be StructuredOutputs"):
        SamplingParams(structured_outputs="a+")


@pytest.mark.parametrize(
    "other", [{"min_tokens": 2}, {"ignore_eos": True}, {"allowed_token_ids": [1]}, {"bad_words": ["x"]}], ids=str
)
def test_what_could_leave_no_way_out_is_refused_with_a_reason(other: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=f"{next(iter(other))}: does not go together with structured_outputs: "):
        SamplingParams(structured_outputs={"regex": "a"}, **other)
    SamplingParams(structured_outputs={"regex": "a"}, logit_bias={1: -100.0}, stop=["b"], top_k=3)


def test_beams_have_no_grammar() -> None:
    with pytest.raises(TypeError, match="structured_outputs"):
        BeamSearchParams(beam_width=2, structured_outputs={"regex": "a"})  # type: ignore[call-arg]


@pytest.mark.parametrize("given", [{"pooling": "max"}, {"normalize": 1}, {"deadline_ms": 0}], ids=str)
def test_pooling_parameters_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(given))):
        PoolingParams(**given)


# -- pooling requests in the scheduler ---------------------------------------------------------------------------------


class Bench:
    """A scheduler over a fake runner."""

    def __init__(self, num_blocks: int = 12, **settings: Any) -> None:
        layout = build_layout([None] * 2, block_size=4, bytes_per_token_layer=1, hybrid=False)
        given = {"max_num_batched_tokens": 16, "max_model_len": 40, "max_num_seqs": 8}
        given = {**given, "enable_prefix_caching": True, **settings}
        self.scheduler = Scheduler(SchedulerSettings(num_blocks=num_blocks, **given), layout)
        self.runner = FakeRunner(layout, num_blocks, num_host_blocks=given.get("num_host_blocks", 0))
        self.number = 0

    def add(self, params: Any, tokens: list[int], max_len: int | None = None) -> Request:
        self.number += 1
        request = Request(
            str(self.number), tokens, params, arrival=self.number, number=self.number, seed=1,
            max_len=len(tokens) + 1 if max_len is None else max_len,
        )  # fmt: skip
        self.scheduler.add(request)
        return request

    def run(self) -> int:
        steps = 0
        while self.scheduler.has_unfinished:
            plan = self.scheduler.schedule()
            self.scheduler.update(self.runner.execute(plan))
            self.scheduler.audit()
            steps += 1
            assert steps < 200
        assert self.scheduler.memory.pool.num_used == 0
        return steps


def test_a_pooling_request_draws_nothing_and_gives_its_blocks_back() -> None:
    bench = Bench()
    request = bench.add(PoolingParams(), list(range(1, 31)))
    assert bench.run() == 2  # 30 tokens in chunks of 16
    assert request.embedding is not None and request.sequences[0].finish_reason == "stop"
    assert request.sequences[0].output_token_ids == []


def test_the_mean_reads_no_cache_and_the_last_token_does() -> None:
    bench = Bench()
    tokens = list(range(1, 15))
    bench.add(PoolingParams(pooling="last"), tokens)
    bench.run()
    last, mean = bench.add(PoolingParams(pooling="last"), tokens), bench.add(PoolingParams(), tokens)
    bench.run()
    assert last.num_cached_tokens == 12  # whole blocks, and never the token that is pooled
    assert mean.num_cached_tokens == 0
    assert mean.cache_report is not None and mean.cache_report.miss.kind == "mean pooling"
    assert "every position" in str(mean.cache_report)


def test_a_prompt_may_fill_the_context_and_no_more() -> None:
    bench = Bench()
    bench.add(PoolingParams(), [1] * 40)
    bench.run()
    with pytest.raises(PromptError, match="41 tokens"):
        bench.add(PoolingParams(), [1] * 41)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preempted_pooling_begins_again(preemption: str) -> None:
    """Newer pooling requests give way to an older one that grows, and are computed anew: what is pooled is no KV."""
    host = {"num_host_blocks": 12} if preemption == "swap" else {}
    bench = Bench(num_blocks=10, preemption=preemption, max_num_batched_tokens=2, enable_prefix_caching=False, **host)
    old = bench.add(SamplingParams(max_tokens=24), [5] * 8, max_len=32)
    pooled = [bench.add(PoolingParams(), [9] * 24) for _ in range(2)]
    bench.run()
    assert old.sequences[0].num_output == 24
    assert all(r.embedding is not None for r in pooled)
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler.counters.swaps == 0
