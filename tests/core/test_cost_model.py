"""The time of a step: work is counted as it is done, a roofline is what it says, a fit finds what it was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scheduling import never_ends, prompt
from octavo.core.fake_runner import FakeRunner
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.record import Recorder
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.core.step import BlockTransfer, ScheduledSequence, StepPlan, TransferKind
from octavo.errors import ConfigError
from octavo.planning.calibrate import COEFFICIENTS, Measured, calibrate, fit, read_steps
from octavo.planning.cost_model import CostModel, Work, WorkCounter, pairs_of, roofline
from octavo.planning.devices import DEVICES, device
from octavo.planning.shapes import KNOWN, known_shape
from octavo.sampling_params import SamplingParams

TRUE = CostModel(2e-3, 1e-4, 5e-5, 16.0, 3e-5, 1e-7, 2e-8, 4e-6, 0.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 40), st.none() | st.integers(1, 50))
def test_pairs_are_what_a_mask_has(start: int, count: int, window: int | None) -> None:
    end = start + count
    assert pairs_of(start, end, window) == sum(min(p + 1, window or p + 1) for p in range(start, end))


def test_work_of_a_plan() -> None:
    layout = build_layout((4, None, 4, None), block_size=4, bytes_per_token_layer=8)
    counter = WorkCounter(layout)
    assert counter.layers == [(4, 2), (None, 2)]
    chunk = ScheduledSequence(0, 2, (5,) * 6, (), ())  # positions 2..7
    decode = ScheduledSequence(1, 9, (5,), (), (1,))
    moves = (BlockTransfer(TransferKind.COPY, 1, 2), BlockTransfer(TransferKind.SWAP_IN, 0, 3))
    work = counter.plan(StepPlan(1, (chunk, decode), moves), resting=3, resting_reads=[12, 50])
    reads = 2 * 8 + 2 * 8 + (2 * 4 + 2 * 10) + (2 * 12 + 2 * 50)  # the chunk's queries reach from 0 to 7
    pairs = 2 * pairs_of(2, 8, 4) + 2 * pairs_of(2, 8, None)
    assert work == Work(tokens=6 + 1 + 3, draws=1 + 3, reads=reads, pairs=pairs, copies=1, swaps=1)


def test_seconds_are_the_sum_of_the_parts() -> None:
    work = Work(tokens=20, draws=3, reads=1000, pairs=500, copies=2, swaps=1)
    model = replace(TRUE, swap=1e-3)
    expected = 2e-3 + 16 * 1e-4 + 4 * 5e-5 + 3 * 3e-5 + 1000 * 1e-7 + 500 * 2e-8 + 2 * 4e-6 + 1e-3
    assert model.seconds(work) == pytest.approx(expected, rel=1e-12)
    assert model.seconds(Work(1, 1, 10, 0)) == pytest.approx(2e-3 + 1e-4 + 3e-5 + 1e-6, rel=1e-12)


def test_llama_2_has_its_published_sizes() -> None:
    shape = KNOWN["llama-2-7b"]
    assert shape.num_parameters == pytest.approx(6.738e9, rel=1e-3)
    assert shape.kv_bytes_per_token("float16") == 512 * 1024
    assert KNOWN["llama-3.1-8b"].num_parameters == pytest.approx(8.03e9, rel=1e-3)
    assert known_shape("meta-llama/Llama-2-7b-chat-hf") is shape
    assert known_shape("something-else") is None


def test_a_roofline_is_flat_while_weights_are_read_and_steep_beyond() -> None:
    shape, gpu = KNOWN["llama-2-7b"], DEVICES["a100-80gb"]
    model = roofline(shape, gpu, "float16", block_bytes=8 << 20, overhead=0.001)
    weights = 2 * (shape.layer_parameters + shape.head_parameters) / (0.8 * 2039e9)
    assert model.seconds(Work(1, 0, 0, 0)) == pytest.approx(0.001 + weights)
    assert model.seconds(Work(64, 0, 0, 0)) == pytest.approx(0.001 + weights)  # still bound by memory
    many = 2 * shape.layer_parameters * 4096 / (0.6 * 312e12)
    assert model.seconds(Work(4096, 0, 0, 0)) == pytest.approx(0.001 + many)
    assert many > weights
    one = 32 * 1000  # a sequence of 1,000 positions in every layer
    added = model.seconds(Work(1, 0, one, 0)) - model.seconds(Work(1, 0, 0, 0))
    assert added == pytest.approx(1000 * 512 * 1024 / (0.8 * 2039e9))
    assert model.seconds(Work(1, 0, 0, 0, 0, 3)) - model.seconds(Work(1, 0, 0, 0)) == pytest.approx(
        3 * (8 << 20) / 25e9
    )


def test_devices_are_known_by_name_and_this_cpu_is_measured() -> None:
    assert device("H100").bandwidth == 3350e9
    with pytest.raises(ConfigError, match="known are a100-40gb"):
        device("tpu")
    here = device("cpu")
    assert here.memory > 0 and here.bandwidth > 1e8 and here.flops["float32"] > 1e8


def test_a_model_survives_its_file(tmp_path: Path) -> None:
    model = replace(TRUE, source="a test", facts={"steps": 3})
    model.save(tmp_path / "m.json")
    assert CostModel.load(tmp_path / "m.json") == model
    assert CostModel.load(tmp_path / "m.json").facts == {"steps": 3}


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        CostModel.load(path)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is not one; write it with octavo simulate --save-model"):
        CostModel.load(path)
    TRUE.save(path)
    path.write_text(path.read_text().replace('"step": 0.002', '"step": -1'))
    with pytest.raises(ConfigError, match="step is -1; it must be a number of at least 0"):
        CostModel.load(path)
    path.write_text(path.read_text().replace('"knee"', '"elbow"'))
    with pytest.raises(ConfigError, match="'elbow' is missing or unknown"):
        CostModel.load(path)


def measured(model: CostModel, count: int = 300, noise: float = 0.0) -> list[Measured]:
    """Steps of all sizes, in the time that `model` gives them."""
    random = Random(7)
    steps = []
    for number in range(count):
        draws = random.randint(1, 32)
        extra = random.choice((0, 0, 0, random.randint(2, 300)))
        copies = number % 5 if number % 3 == 0 else 0
        work = Work(draws + extra, draws, draws * random.randint(10, 4000), extra * (extra + 1) // 2, copies)
        steps.append(Measured(work, model.seconds(work) * (1 + noise * random.uniform(-1, 1))))
    return steps


def test_a_fit_finds_the_model_that_made_the_steps() -> None:
    found = fit(measured(TRUE))
    assert found.knee == TRUE.knee
    for name in COEFFICIENTS:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3, abs=1e-12), name


def test_a_fit_bears_noise_and_bursts() -> None:
    steps = measured(TRUE, noise=0.1)
    for number in range(0, 300, 60):  # a neighbour takes the processor away
        steps[number] = Measured(steps[number].work, 30 * steps[number].seconds)
    found = fit(steps)
    assert found.facts["left_out"] >= 5
    assert found.facts["median_error"] < 0.8
    # Everything is scaled to the whole run, so the quiet steps are all off by the same factor.
    total = sum(s.seconds for s in steps) / sum(TRUE.seconds(s.work) for s in steps)
    for work in (Work(1, 1, 100, 0), Work(32, 32, 64000, 0), Work(250, 1, 250, 31000)):
        assert found.seconds(work) / TRUE.seconds(work) == pytest.approx(total, rel=0.1)


def test_no_coefficient_is_ever_negative() -> None:
    random = Random(1)
    for _ in range(5):  # times that have nothing to do with the work
        steps = [Measured(s.work, random.uniform(1e-3, 1e-2)) for s in measured(TRUE, 60)]
        found = fit(steps)
        assert all(getattr(found, name) >= 0 for name in COEFFICIENTS)
        assert sum(found.seconds(s.work) for s in steps) == pytest.approx(sum(s.seconds for s in steps))


def record(path: Path, requests: int, pause: float = 0.0) -> KVLayout:
    """A run whose clock goes by `TRUE`. pause: seconds of idleness between two waves of requests."""
    layout = build_layout((None,) * 3, block_size=8, bytes_per_token_layer=8)
    rules = SchedulerSettings(num_blocks=200, max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    scheduler, runner = Scheduler(rules, layout), FakeRunner(layout, 200, script=never_ends, check=False)
    recorder = Recorder(str(path), rules, layout, {"model": "a test"})
    counter, now = WorkCounter(layout), 10.0
    for wave in range(2):
        for number in range(wave * requests, (wave + 1) * requests):
            tokens = prompt(5 + 7 * number % 60, number)
            params = SamplingParams(max_tokens=3 + number % 20, ignore_eos=True)
            request = Request(
                f"r{number}",
                tokens,
                params,
                arrival=now,
                number=number,
                seed=0,
                max_len=len(tokens) + params.max_tokens,
            )
            scheduler.add(request)
            recorder.arrival(request)
        while scheduler.has_unfinished:
            plan = scheduler.schedule(now)
            result = runner.execute(plan)
            scheduler.update(result, now)
            recorder.step(now, plan, result)
            now += TRUE.seconds(counter.plan(plan))
        now += pause
    recorder.close()
    return layout


def test_a_recording_is_calibrated_on_and_idle_time_is_none_of_it(tmp_path: Path) -> None:
    record(tmp_path / "run.jsonl", 20, pause=1000.0)
    steps, about = read_steps(tmp_path / "run.jsonl")
    assert about == {"model": "a test"}
    for step in steps:
        assert step.seconds == pytest.approx(TRUE.seconds(step.work), rel=1e-6)
    model = calibrate(tmp_path / "run.jsonl")
    assert model.source == f"calibrated on {len(steps)} steps of a test (run.jsonl)"
    assert model.facts["p90_error"] < 1e-6
    for work in (Work(4, 4, 4 * 3 * 100, 0), Work(60, 1, 3 * 60, 3 * 60 * 61 // 2)):
        assert model.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.01)


def test_what_cannot_be_calibrated_on(tmp_path: Path) -> None:
    record(tmp_path / "short.jsonl", 1)
    with pytest.raises(ConfigError, match="steps with a time are too few to calibrate on; record a run of at least 20"):
        calibrate(tmp_path / "short.jsonl")
    (tmp_path / "no.jsonl").write_text("hello\n")
    with pytest.raises(ConfigError, match="not a recording"):
        calibrate(tmp_path / "no.jsonl")
