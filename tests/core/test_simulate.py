"""The simulator: the same outcome with and without resting, times that can be worked out by hand, every policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.core.kv_layout import build_layout
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError
from octavo.planning.cost_model import CostModel, roofline
from octavo.planning.devices import DEVICES
from octavo.planning.outcome import Histogram, Outcome, Sample, percentiles
from octavo.planning.policies import Setup, kv_budget, parse_policy, settings_of
from octavo.planning.reference import expected_use, findings, implied_tokens, reference_text, simulate_reference
from octavo.planning.shapes import KNOWN
from octavo.planning.simulate import Simulation, named_tokens
from octavo.planning.simulation_report import report_text, seconds_text, spark, timeline_text
from octavo.planning.trace import Trace, TraceRequest, read_trace
from octavo.planning.trace_synthetic import synthetic

SECOND = CostModel(1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # every step takes one second
REAL = CostModel(5e-3, 2e-4, 1e-4, 16.0, 1e-4, 2e-6, 3e-7, 1e-4, 5e-4)


def simulate(
    trace: Trace,
    model: CostModel = SECOND,
    *,
    windows: Any = (None,),
    block_size: int = 4,
    rest: bool = True,
    **given: Any,
) -> Outcome:
    """A pool of 64 blocks of 4, unless something else is given."""
    layout = build_layout(windows, block_size=block_size, bytes_per_token_layer=8)
    rules = SchedulerSettings(**{"num_blocks": 64, "max_model_len": 128, "max_num_seqs": 8, **given})
    return Simulation(trace, rules, layout, model, rest=rest).run()


def requests(*given: tuple[float, int, int]) -> Trace:
    return Trace("test", [TraceRequest(at, prompt, output) for at, prompt, output in given])


# -- times that can be worked out by hand ----------------------------------------------------------------------------


def test_one_request_alone() -> None:
    outcome = simulate(requests((0.0, 10, 30)))
    assert (outcome.first[0], outcome.end[0], outcome.steps) == (1.0, 30.0, 30)
    assert outcome.computed_tokens == 10 + 29
    assert outcome.latencies()["itl"] == pytest.approx({"p50": 1, "p90": 1, "p99": 1, "mean": 1}, rel=0.01)
    assert outcome.output_rate == 1.0
    assert outcome.peak_running == 1
    assert outcome.peak_held == 10 / 64  # 39 positions in blocks of 4; the last token is never computed


def test_who_arrives_during_a_step_joins_the_next() -> None:
    outcome = simulate(requests((0.0, 4, 20), (5.5, 4, 3), (100.0, 4, 1)))
    assert list(outcome.first) == [1.0, 7.0, 101.0]
    assert list(outcome.end) == [20.0, 9.0, 101.0]
    assert outcome.busy_seconds == pytest.approx(21.0)  # nothing ran from 20 to 100
    assert outcome.mean_running == pytest.approx((20 + 3 + 1) / 21)


def test_a_prompt_longer_than_the_budget_comes_in_chunks() -> None:
    assert simulate(requests((0.0, 100, 2)), max_num_batched_tokens=40).first[0] == 3.0


def test_the_time_of_a_step_grows_with_what_is_read() -> None:
    model = CostModel(0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0)  # a second per position read and layer
    outcome = simulate(requests((0.0, 3, 4)), model)
    assert list(outcome.end) == [3 + 4 + 5 + 6]


def test_seats_and_queue() -> None:
    outcome = simulate(requests(*[(0.0, 4, 10)] * 5), max_num_seqs=2)
    assert outcome.peak_running == 2
    assert list(outcome.end) == [10.0, 10.0, 20.0, 20.0, 30.0]
    assert outcome.peak_waiting == 5


def test_static_allocation_holds_what_it_reserves() -> None:
    trace = requests(*[(0.0, 8, 8)] * 12)
    static = simulate(trace, allocation="static", max_model_len=32, max_num_seqs=12)
    paged = simulate(trace, max_model_len=32, max_num_seqs=12)
    assert (static.peak_running, paged.peak_running) == (8, 12)  # 64 blocks of 4 are 8 reservations of 32
    assert static.peak_held == 1.0
    assert static.peak_filled == pytest.approx(8 * 15 / 256)
    assert static.seconds > paged.seconds


def test_a_follower_comes_after_the_answer() -> None:
    first = TraceRequest(0.0, 4, 10)
    trace = Trace("talk", [first, TraceRequest(2.5, 20, 3, after=0), TraceRequest(0.5, 30, 3, after=1)])
    outcome = simulate(trace)
    assert list(outcome.arrival) == [0.0, 12.5, 16.0]
    assert list(outcome.end) == [10.0, 15.5, 19.0]


def test_what_can_never_fit_is_refused_and_so_is_what_would_follow() -> None:
    trace = Trace("t", [TraceRequest(0.0, 100, 100), TraceRequest(1.0, 5, 5, after=0), TraceRequest(0.0, 5, 5)])
    outcome = simulate(trace)
    assert outcome.refused == {0: "200 tokens exceed max_model_len=128"}
    assert math.isnan(outcome.end[0]) and math.isnan(outcome.end[1]) and outcome.end[2] == 5.0
    assert outcome.output_tokens == 5
    assert "1 of 3 requests were refused; request 0: 200 tokens exceed" in report_text([outcome])


# -- the same with everybody awake -----------------------------------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "plenty": {"num_blocks": 400},
    "tight": {"num_blocks": 40},
    "swapping": {"num_blocks": 40, "preemption": "swap", "num_host_blocks": 60},
    "static": {"allocation": "static", "num_blocks": 130},
    "caching": {"enable_prefix_caching": True, "num_blocks": 90},
    "windows": {"windows": (8, None), "num_blocks": 100},
    "few seats": {"max_num_seqs": 2, "num_blocks": 100},
}


@pytest.mark.parametrize("arrivals", ["all", "poisson:12"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_resting_changes_no_time_and_no_count(kind: str, arrivals: str) -> None:
    trace = synthetic(60, "uniform:2-60+1-50", arrivals, shared_prefix=20, seed=5)
    quick, slow = (simulate(trace, REAL, rest=rest, **SETTINGS[kind]) for rest in (True, False))
    assert (quick.first, quick.end, quick.arrival) == (slow.first, slow.end, slow.arrival)
    ours, theirs = quick.summary(), slow.summary()
    sampled = ("peak_filled", "mean_filled", "mean_filled_pressed", "mean_running_pressed", "held_but_empty")
    for name in (*sampled, "mean_cached", "wall_seconds"):  # samples are taken at other steps
        del ours[name], theirs[name]
    assert ours.pop("latency") == theirs.pop("latency")
    assert ours == pytest.approx(theirs)
    assert quick.preemptions > 0 or kind not in ("tight", "swapping")
    assert (quick.swaps > 0) == (kind == "swapping")
    assert (quick.cached_tokens > 0) == (kind == "caching")


def test_every_gap_is_counted_and_preemption_makes_long_ones() -> None:
    trace = synthetic(40, "uniform:2-60+2-50", seed=2)
    outcome = simulate(trace, REAL, num_blocks=40)
    assert outcome.preemptions > 0
    assert sum(outcome.gaps._weights.values()) == trace.output_tokens - len(trace)
    total = sum(outcome.end[i] - outcome.first[i] for i in range(len(trace)))
    found = outcome.gaps.percentiles()
    assert found is not None
    assert found["mean"] * (trace.output_tokens - len(trace)) == pytest.approx(total, rel=0.01)


def test_conversations_find_their_history(tmp_path: Path) -> None:
    turn = {"user": 6, "assistant": 10}
    path = tmp_path / "c.jsonl"
    line = {"system": {"name": "s", "tokens": 20}, "turns": [turn, {**turn, "wait": 1.0}]}
    path.write_text("".join(json.dumps({"arrival": 50.0 * i, **line}) + "\n" for i in range(3)))
    outcome = simulate(read_trace(path), enable_prefix_caching=True)
    # Later conversations find the system prompt; every second turn the full blocks of the 35 positions of the first.
    first, turns = 20 * 2, 3 * 32
    assert outcome.cached_tokens == first + turns
    assert outcome.prompt_tokens == 3 * (26 + 42)
    assert simulate(read_trace(path)).cached_tokens == 0


def test_names_are_texts() -> None:
    assert named_tokens("a", 0, 10)[3:7] == named_tokens("a", 3, 7)
    assert named_tokens("a", 0, 4) != named_tokens("b", 0, 4)


# -- policies --------------------------------------------------------------------------------------------------------


def test_policies_share_the_bytes() -> None:
    setup = Setup(KNOWN["llama-2-7b"], 24 << 30, 4096, "float16")
    rows = {name: settings_of(parse_policy(name), setup)[0] for name in ("static", "paged:8", "paged", "paged:64")}
    assert [r.num_blocks for r in rows.values()] == [3072, 6144, 3072, 768]
    assert rows["static"].allocation == "static"
    model = roofline(setup.shape, DEVICES["a100-80gb"], "float16", block_bytes=8 << 20)
    auto, _ = settings_of(parse_policy("paged:16+prefix+auto"), setup, model)
    assert (auto.preemption, auto.enable_prefix_caching, auto.num_host_blocks) == ("auto", True, 3072)
    assert auto.swap_block_tokens == pytest.approx(2 * model.swap / model.above)
    assert settings_of(parse_policy("paged:16"), setup)[0].num_host_blocks == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("buddy", "'buddy' is unknown; write static, paged:BLOCK_SIZE"),
        ("paged:17", "block size '17' must be one of"),
        ("static+prefix", "static has no block size, shares nothing"),
        ("paged+swap+auto", "exclude each other"),
        ("paged+cow", "'cow' is unknown"),
    ],
)
def test_unknown_policies_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_policy(text)
    assert message in str(error.value)


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    setup = Setup(KNOWN["llama-2-7b"], 1 << 30, 4096, "float16")
    with pytest.raises(ConfigError, match=r"policy static: 1073741824 bytes hold 128 blocks of .* needs at least 256"):
        settings_of(parse_policy("static"), setup)
    left = kv_budget(KNOWN["llama-2-7b"], DEVICES["a100-80gb"], "float16")
    assert 55 << 30 < left < 60 << 30
    with pytest.raises(ConfigError, match=r"llama-2-70b in float16 needs .* of weights"):
        kv_budget(KNOWN["llama-2-70b"], DEVICES["a100-80gb"], "float16")


# -- measures and pictures -------------------------------------------------------------------------------------------


def test_percentiles_are_ranks() -> None:
    assert percentiles([]) is None
    assert percentiles(list(range(1, 101))) == {"p50": 50, "p90": 90, "p99": 99, "mean": 50.5}
    assert percentiles([3.0]) == {"p50": 3, "p90": 3, "p99": 3, "mean": 3}
    histogram = Histogram()
    assert histogram.percentiles() is None
    for value in range(1, 101):
        histogram.add(float(value))
    histogram.add(1000.0, 0)
    assert histogram.percentiles() == pytest.approx({"p50": 50, "p90": 90, "p99": 99, "mean": 50.5}, rel=0.006)


def test_times_are_written_as_people_read_them() -> None:
    texts = [seconds_text(t) for t in (None, 0.00123, 0.12345, 0.9999, 12.345, 123.4, 3600, 360000)]
    assert texts == ["-", "1.23 ms", "123 ms", "1 s", "12.3 s", "123 s", "60 min", "6,000 min"]


def test_a_line_of_columns() -> None:
    samples = [Sample(t, t, 0, 0.0, 0.0, 0.0) for t in range(8)]
    assert spark(samples, lambda s: float(s.running), 8.0, 8.0, 8) == " ▁▂▃▄▅▆▇"
    assert spark(samples[:2], lambda s: 8.0, 8.0, 8.0, 4) == "█   "
    assert spark([], lambda s: 1.0, 1.0, 1.0, 3) == "   "


def test_the_timeline_has_a_line_for_every_policy() -> None:
    outcomes = [simulate(synthetic(20, "uniform:2-60+1-50"), num_blocks=n) for n in (40, 100)]
    outcomes[0].policy, outcomes[1].policy = "small", "large"
    text = timeline_text(outcomes)
    assert text.count("  small │") == text.count("  large │") == 3
    assert "KV use (a full column is 100 %)" in text and "waiting" in text
    assert timeline_text([]) == ""


def test_samples_stay_few_however_long_the_run() -> None:
    outcome = simulate(synthetic(200, "uniform:2-60+20-50", "poisson:0.2"), rest=False)
    assert outcome.steps > 1500
    assert 100 < len(outcome.samples) < 400
    assert [s.time for s in outcome.samples] == sorted(s.time for s in outcome.samples)


# -- the published tables --------------------------------------------------------------------------------------------


def test_half_a_block_is_lost_per_sequence() -> None:
    assert expected_use(16, 92.5 * 0.75) == pytest.approx(implied := 0.902, abs=0.002), implied
    for block_size, use in ((8, 0.95), (16, 0.92), (32, 0.88), (64, 0.80)):
        assert expected_use(block_size, implied_tokens(block_size, use)) == pytest.approx(use)


def test_the_published_tables() -> None:
    found = simulate_reference(requests=150)
    static, paged, wide = (o.summary() for o in found.long)
    assert static["peak_running"] == 12
    assert paged["mean_running_pressed"] == pytest.approx(38, rel=0.1)
    assert static["output_rate"] == pytest.approx(285, rel=0.1)
    assert paged["output_rate"] > 2 * static["output_rate"]
    assert wide["output_rate"] < paged["output_rate"]
    uses = [o.summary()["mean_filled_pressed"] for o in found.short]
    assert uses == sorted(uses, reverse=True)
    for use, published in zip(uses, (0.95, 0.92, 0.88, 0.80)):
        assert use == pytest.approx(published, abs=0.03)
    text = reference_text(found)
    assert " (12) " in text and all(f[:60] in text for f in findings(found))
    assert json.loads(json.dumps(found.as_json()))["table_a"]["static"]["published"][0] == 12


# -- the command -----------------------------------------------------------------------------------------------------


def test_the_command_compares_policies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["simulate", "--requests", "30", "--policies", "static,paged:16", "--json", str(path)]
    assert main([*arguments, "--save-model", str(tmp_path / "m.json")]) == 0
    text = capsys.readouterr().out
    assert "roofline of a100-80gb for llama-2-7b in bfloat16" in text
    assert "static" in text and "paged:16" in text and "first token p50" in text and "running (a full" in text
    rows = json.loads(path.read_text())["policies"]
    assert [r["policy"] for r in rows] == ["static", "paged:16"]
    again = ["simulate", "--requests", "30", "--policies", "paged:16", "--json", "-", "--kv-bytes", "24GiB"]
    assert main([*again, "--cost-model", str(tmp_path / "m.json")]) == 0
    assert json.loads(capsys.readouterr().out)["policies"][0]["requests"] == 30


def test_the_command_reads_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n1,200,20\n")
    command = ["simulate", str(path), "--requests", "7", "--speed", "2", "--no-timeline", "--policies", "paged:16"]
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("t.csv x 3.5: 7 requests, 2.33 arrivals/s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speed", "2"], "--speed has no effect without a trace"),
        (["--requests", "0"], "--requests 0: at least one is needed"),
        (["--policies", "paged:16,paged"], "one of them is there twice"),
        (["--plot", "x.gif"], "the name must end in .svg"),
        (["--device", "abacus"], "device 'abacus': known are"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: must be at least 1"),
        (["--kv-bytes", "1GiB", "--gpu-memory-utilization", "0.5"], "both size the cache; give one"),
        (["--cost-model", "m.json", "--device", "h100", "--kv-bytes", "1GiB"], "give one of them"),
        (["--calibrate", "run.jsonl"], "--kv-bytes is needed with a calibrated cost model"),
        (["--max-model-len", "5000"], "--max-model-len 5000 exceeds the 4096 positions of llama-2-7b"),
        (["--overhead-ms", "-1"], "--overhead-ms -1.0: must be at least 0"),
        (["--reference", "--policies", "static"], "--reference has its own load and policies"),
    ],
)
def test_options_that_say_nothing_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_plots_are_the_same_for_the_same_run(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    files = [tmp_path / f"{name}.{kind}" for name in "ab"]
    for file in files:
        arguments = ["--requests", "10", "--policies", "static,paged:16", "--json", "-", "--plot", str(file)]
        assert main(["simulate", *arguments]) == 0
    first, second = (file.read_bytes() for file in files)
    assert first == second and len(first) > 10_000
    if kind == "svg":
        assert b"output tokens per second" in first
