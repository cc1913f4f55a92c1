"""Overlapped steps give the text of steps run one by one, leave no block behind, and say where they had to wait."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle import Model, random_ids, tiny
from octavo import LLM, BeamSearchParams, SamplingParams, StructuredOutputs
from octavo.config import EngineConfig, Resolved
from octavo.core.overlap import OverlappedSteps
from octavo.core.record import replay
from octavo.core.step import StepPlan, StepResult
from octavo.devices import CpuDevice
from octavo.engine import Engine
from octavo.errors import ConfigError, InternalError
from octavo.overlapping import settle_overlap
from octavo.runner.threaded import ThreadedRunner

PROMPTS = [random_ids(9 + 7 * i, i) for i in range(6)]
SMALL: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 100}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "max_tokens": 24, "ignore_eos": True}
LOADS: dict[str, Any] = {
    "greedy": lambda i: SamplingParams(temperature=0, max_tokens=20 + i),
    "seeded": lambda i: SamplingParams(seed=i, top_p=0.9, top_k=30, **SAMPLED),
    "penalties": lambda i: SamplingParams(seed=i, presence_penalty=0.5, repetition_penalty=1.2, **SAMPLED),
    "n": lambda i: SamplingParams(seed=i, n=1 + i % 3, **SAMPLED),
    "best_of": lambda i: SamplingParams(seed=i, n=2, best_of=3, **SAMPLED),
    "stop": lambda i: SamplingParams(seed=i, stop=["e", "th"], stop_token_ids=[i, 90 + i], **SAMPLED),
    "bans": lambda i: SamplingParams(seed=i, bad_words=["a", "qu"], logit_bias={7: 4.0}, min_tokens=5, **SAMPLED),
    "logprobs": lambda i: SamplingParams(temperature=0, logprobs=3, prompt_logprobs=1, max_tokens=6),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("overlap"))


def answers(llm: LLM, make: Any) -> Any:
    outputs = llm.generate(PROMPTS, [make(i) for i in range(len(PROMPTS))], use_tqdm=False)
    view = llm.pool_view()
    assert (view.num_used, view.num_pending, llm._live().scheduler.in_flight) == (0, 0, 0)
    return [
        [(c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs) for c in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize("load", LOADS)
def test_the_text_is_that_of_single_steps(load: str, model: Model) -> None:
    settings: list[dict[str, Any]] = [{}, {"max_num_batched_tokens": 7, "enable_prefix_caching": False}]
    with model.engine(debug=True) as one:
        expected = answers(one, LOADS[load])
        single = one.stats().computed_tokens
        assert one.stats().overlapped_steps == 0
    for more in settings:
        with model.engine(debug=True, overlap=True, **more) as llm:
            assert answers(llm, LOADS[load]) == expected
            stats = llm.stats()
            assert answers(llm, LOADS[load]) == expected, "the same, with what the prefix cache has by now"
            cached = llm.config.enable_prefix_caching and load != "logprobs"
            assert (llm.stats().prefix_hit_tokens > 0) == cached
        assert stats.overlapped_steps == stats.steps and not stats.overlap_waits
        sequences = sum(len(samples) for samples in expected) + len(PROMPTS)
        assert stats.computed_tokens <= single + sequences, "at most one token in vain for each sequence"


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_preemption(way: str, model: Model) -> None:
    def run(**settings: Any) -> Any:
        with model.engine(debug=True, **settings) as llm:
            found = [answers(llm, LOADS["n"]), answers(llm, LOADS["greedy"])]
            return found, llm.stats()

    expected, _ = run()
    found, stats = run(overlap=True, preemption=way, **SMALL)
    assert found == expected
    assert stats.preemptions > 0 and (stats.swaps > 0) == (way == "swap")


def test_a_step_is_begun_before_the_one_before_reports(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    submit, collect = ThreadedRunner.submit, ThreadedRunner.collect

    def watched_submit(self: ThreadedRunner, plan: StepPlan) -> None:
        events.append(f"begin {plan.step_id}")
        submit(self, plan)

    def watched_collect(self: ThreadedRunner) -> StepResult:
        result = collect(self)
        events.append(f"end {result.step_id}")
        return result

    monkeypatch.setattr(ThreadedRunner, "submit", watched_submit)
    monkeypatch.setattr(ThreadedRunner, "collect", watched_collect)
    with model.engine(overlap=True) as llm:
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    # The last plan finds nothing left to compute: the length limit was known in advance.
    begun = "begin 1 begin 2 end 1 begin 3 end 2 begin 4 end 3 begin 5 end 4 end 5"
    assert " ".join(events) == begun


def test_beams_and_grammars_wait_and_say_so(model: Model) -> None:
    search = BeamSearchParams(beam_width=3, max_tokens=8)
    shaped = SamplingParams(structured_outputs=StructuredOutputs(regex="[a-c]{4}"), temperature=0, max_tokens=8)
    free = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)

    def run(llm: LLM) -> Any:
        beams = [[s.token_ids for s in b.sequences] for b in llm.beam_search([PROMPTS[1]], search)]
        mixed = llm.generate(PROMPTS[:2], [shaped, free], use_tqdm=False)
        return beams, [o.outputs[0].token_ids for o in mixed]

    with model.engine() as one:
        expected = run(one)
    with model.engine(overlap=True, debug=True) as llm:
        assert run(llm) == expected
        stats = llm.stats()
    assert stats.overlap_waits["beam search"] == 8, "one for each token of the beams"
    assert 4 <= stats.overlap_waits["grammar"] <= 5
    assert sum(stats.overlap_waits.values()) < stats.overlapped_steps, "the others go on without waiting"


def test_an_abort_leaves_nothing_pending(model: Model) -> None:
    engine = Engine.build(
        EngineConfig(model=str(model.path), dtype="float32", device="cpu", num_blocks=64, overlap=True, debug=True)
    )
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, PROMPTS[0], params)
    for _ in range(5):
        engine.step()
    assert engine.scheduler.in_flight == 1
    assert engine.abort("a")
    assert engine.pool_view().num_pending > 0, "the step in flight still reads them"
    assert [o.request_id for o in engine.step() if o.finished] == ["a"]
    assert engine.abort("b")
    view = engine.pool_view()
    assert (view.num_used, view.num_pending, engine.scheduler.in_flight) == (0, 0, 0)
    assert [o.request_id for o in engine.step()] == ["b"] and not engine.has_unfinished()
    assert engine.reset_prefix_cache()
    engine.close()


def test_a_recording_of_overlapped_steps_replays(model: Model, tmp_path: Path) -> None:
    record = str(tmp_path / "run")
    with model.engine(overlap=True, record=record, **SMALL) as llm:
        answers(llm, LOADS["stop"])
        answers(llm, LOADS["n"])
        steps = llm.stats().steps
    report = replay(record)
    assert report.same and report.steps == steps, str(report)


def test_an_error_of_the_runner_stops_the_engine_and_its_thread(model: Model) -> None:
    before = threading.active_count()
    llm = model.engine(overlap=True)
    engine = llm._live()

    def broken(plan: StepPlan) -> StepResult:
        raise ZeroDivisionError("broken on purpose")

    engine.runner.runner.execute = broken
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=3), use_tqdm=False)
    llm.close()
    assert threading.active_count() == before


def test_an_engine_that_is_dropped_takes_its_thread_along() -> None:
    class Echo:
        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(plan.step_id)

    runner = ThreadedRunner(Echo())
    thread = runner._thread
    assert runner.execute(StepPlan(7, ())).step_id == 7
    del runner
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    closed = ThreadedRunner(Echo())
    closed.close()
    closed.close()
    with pytest.raises(InternalError, match="closed"):
        closed.submit(StepPlan(8, ()))


class _Queue(CpuDevice):
    kind = "cuda"
    is_asynchronous = True


@pytest.mark.parametrize(
    ("given", "device", "chosen", "why"),
    [
        ({}, CpuDevice(), False, "share the cores"),
        ({}, _Queue(), True, "while the device works"),
        ({"speculative": "ngram"}, _Queue(), False, "speculation"),
        ({"overlap": True}, CpuDevice(), True, "as asked"),
        ({"overlap": False}, _Queue(), False, "as asked"),
    ],
)
def test_what_auto_means(given: dict[str, Any], device: Any, chosen: bool, why: str) -> None:
    overlap, resolved = settle_overlap(Resolved(EngineConfig(**given)), device)
    line = resolved.report()["overlap"]
    assert overlap is chosen and line["chosen"] is chosen and why in line["why"]


def test_what_would_have_no_effect_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"overlap=True has no effect with speculative=.*known only when it is done"):
        settle_overlap(Resolved(EngineConfig(overlap=True, speculative="ngram")), CpuDevice())
    with pytest.raises(ConfigError, match="overlap='yes': must be auto, True or False"):
        EngineConfig(overlap="yes")


def test_the_account_of_who_waits_follows_the_plans(model: Model) -> None:
    """A sequence that ended is not waited for any more."""
    with model.engine(overlap=True) as llm:
        steps = llm._live()._overlap
        assert isinstance(steps, OverlappedSteps)
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=3))
        waits = dict(llm.stats().overlap_waits)
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        assert llm.stats().overlap_waits == waits and not steps._waiting_for
