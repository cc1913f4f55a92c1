"""The benchmarks on a tiny model with random weights: that each runs, and that its arithmetic is right. Never times."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_models import tiny_config
from octavo.bench import allocation, drive, instrument, prefix, profile, report, sharing, standing, workloads
from octavo.bench.drive import Occupancy, Run
from octavo.bench.workloads import Item
from octavo.cli.bench import benchmark_names
from octavo.cli.main import main
from octavo.errors import ConfigError, InternalError

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration of two layers, one of them windowed; weights are drawn when it is loaded."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_config("gemma3", num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(path)
    return path


@pytest.fixture
def bench(model: Path, tmp_path: Path) -> Bench:
    """Run `octavo bench …` on the tiny model; the JSON it wrote."""

    def run(name: str, *given: str) -> dict[str, Any]:
        file = tmp_path / f"{name}.json"
        common = ["--model", str(model), "--load-format", "dummy", "--dtype", "float32", "--json", str(file)]
        assert main(["bench", name, *given, *common]) == 0
        said: dict[str, Any] = json.loads(file.read_text())
        assert said["benchmark"] == name and said["facts"]["dtype"] == "float32"
        assert said["facts"]["threads"] == torch.get_num_threads()
        return said

    return run


def only_table(said: dict[str, Any]) -> list[dict[str, Any]]:
    (rows,) = said["tables"].values()
    return list(rows)


# -- each command --------------------------------------------------------------------------------------------------


def test_every_benchmark_is_registered() -> None:
    expected = {"throughput", "allocation", "prefix", "scheduler", "sharing", "profile", "growth"}
    assert expected <= set(benchmark_names())


def test_throughput_of_a_file_with_the_baseline(bench: Bench, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"mixed": [[30, 6], [5, 3], [17, 4]]}))
    said = bench("throughput", "--workload", str(file), "--baseline", "transformers", "--baseline-requests", "2")
    ours, theirs = only_table(said)
    assert said["facts"]["load"] == {"requests": 3, "prompt_tokens": 52, "output_tokens": 13}
    assert ours["output_rate"] == pytest.approx(13 / ours["seconds"])
    assert ours["total_rate"] == pytest.approx(65 / ours["seconds"])
    assert ours["ms_per_token"] == pytest.approx(1000 * ours["seconds"] / 13)
    assert ours["peak_sequences"] == 3 and ours["preemptions"] == 0
    assert theirs["requests"] == 2 and theirs["output_rate"] == pytest.approx(9 / theirs["seconds"])
    assert ours["ratio"] == pytest.approx(ours["output_rate"] / theirs["output_rate"])
    assert any("2 of the 3 requests" in note for note in said["notes"])


def test_throughput_repeats_show_the_median_run(bench: Bench) -> None:
    (row,) = only_table(bench("throughput", "--requests", "2", "--repeat", "3", "--max-model-len", "1024"))
    assert row["requests"] == 2


def test_allocation_counts_what_the_engine_does(bench: Bench, model: Path) -> None:
    given = (
        "--requests",
        "8",
        "--shortest",
        "32",
        "--longest",
        "128",
        "--max-model-len",
        "128",
        "--kv-bytes",
        "196608",
    )
    measured = bench("allocation", *given, "--block-sizes", "16,32")
    counts = _count_only(model, given)
    rows, held = measured["tables"].values()
    assert [r["policy"] for r in rows] == [
        "static", "paged 16", "paged 32", "paged 16, one table for all layers"
    ]  # fmt: skip
    # 128 positions of two layers, 2 heads of 32, keys and values, float32: 131,072 bytes; only one reservation fits.
    assert rows[0]["peak_sequences"] == 1
    assert rows[1]["concurrency_ratio"] == rows[1]["peak_sequences"] >= 2
    for row, counted in zip(rows, counts, strict=True):
        assert row["pool_bytes"] <= 196608
        assert {k: row[k] for k in ("peak_sequences", "peak_use", "mean_use", "steps")} == {
            k: counted[k] for k in ("peak_sequences", "peak_use", "mean_use", "steps")
        }
        assert row["rate_ratio"] == pytest.approx(row["output_rate"] / rows[0]["output_rate"])
    assert held[0]["held_ratio"] == 1 and all(r["held_ratio"] < 1 for r in held[1:])


def _count_only(model: Path, given: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of the same comparison without a model."""
    parser = ArgumentParser()
    allocation.add_parser(parser.add_subparsers())
    args = parser.parse_args(
        ["allocation", *given, "--model", str(model), "--load-format", "dummy", "--dtype", "float32"]
    )
    settings = drive.settings_of(args, max_model_len=2048, max_num_seqs=256, enable_prefix_caching=False)
    known = allocation._Model.of(settings)
    lengths = workloads.spread_lengths(args.requests, args.shortest, args.longest, output_share=args.output_share)
    items = workloads.items_of(lengths, known.spec.vocab_size)
    policies = allocation.policies_of([16, 32])
    return [allocation._count(p, settings, known, args.kv_bytes, items) for p in policies]


def test_prefix(bench: Bench) -> None:
    said = bench("prefix", "--prefix", "64", "--requests", "3", "--output", "2", "--repeat", "1",
                 "--swap-lengths", "48,80")  # fmt: skip
    first, shared, cache, swapping = said["tables"].values()
    assert first[0]["ratio"] == pytest.approx(first[0]["hit"] / first[0]["miss"])
    assert shared[0]["ratio"] == pytest.approx(shared[0]["on"] / shared[0]["off"])
    assert cache[0]["both"] == pytest.approx(cache[0]["hash"] + cache[0]["lookup"])
    assert [r["length"] for r in swapping] == [48, 80]
    assert all(r["swap"] == pytest.approx(r["out"] + r["in"]) and r["recompute"] > 0 for r in swapping)
    assert len(said["goals"]) == 3


def test_sharing_holds_the_prompt_once(bench: Bench) -> None:
    said = bench("sharing", "--prompt", "64", "--output", "8", "--widths", "1,4")
    rows = only_table(said)
    assert [(r["kind"], r["width"]) for r in rows] == [("samples", 1), ("samples", 4), ("beams", 1), ("beams", 4)]
    block = 16 * 2 * 2 * 32 * 4  # tokens, keys and values, heads, head_dim, bytes: one layer of a group
    one, four = rows[0], rows[1]
    # The full layer holds 64 + 7 written positions in 5 blocks. The windowed one holds at most the whole prompt once.
    assert one["held_on"] == one["held_off"] and one["copies_on"] == 0
    assert four["held_on"] < four["held_off"] and four["held_ratio"] == pytest.approx(
        four["held_on"] / four["held_off"]
    )
    assert four["held_off"] >= 4 * 5 * block  # four private copies of the full layer's table
    assert four["held_on"] <= 2 * (4 + 4) * block  # the prompt's 4 blocks once, and one own block each, per table
    assert rows[3]["copies_on"] > 0


def test_profile_parts_add_up(bench: Bench) -> None:
    said = bench("profile", "--sequences", "1,3", "--context", "40", "--prompt", "24", "--steps", "2")
    rows = next(iter(said["tables"].values()))
    assert [r["part"] for r in rows] == list(profile.PARTS.values())
    for name in ("decode 1", "decode 3", "prompt 24"):
        parts = [r[name]["ms"] for r in rows]
        assert sum(parts[:-1]) == pytest.approx(parts[-1])
        assert all(r[name]["ms"] > 0 for r in rows if r["part"] in ("schedule", "model: products", "model: attention"))


def test_growth_splits_the_whole_step(bench: Bench) -> None:
    said = bench("growth", "--sequences", "1,4", "--contexts", "20,70", "--steps", "2")
    rows = only_table(said)
    assert [r["sequences"] for r in rows] == [1, 1, 4, 4]
    for row, context in zip(rows, (20, 70, 20, 70)):
        assert context < row["context"] <= context + 20
        assert row["attention"] + row["products"] + row["rest"] == pytest.approx(row["total"])
        assert row["rate"] == pytest.approx(1000 * row["sequences"] / row["total"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("throughput", "--baseline-requests", "3"), "--baseline-requests"),
        (("throughput", "--workload", "/nowhere.json"), "/nowhere.json"),
        (("throughput", "--max-model-len", "100"), "max_model_len is 100"),
        (("allocation", "--block-size", "8"), "block_size"),
        (("allocation", "--block-sizes", "12"), "12"),
        (("allocation", "--output-share", "1"), "--output-share"),
        (("growth", "--num-blocks", "8"), "num_blocks"),
        (("profile", "--max-num-seqs", "8"), "max_num_seqs"),
        (("sharing", "--no-copy-on-write"), "copy_on_write"),
        (("prefix", "--preemption", "swap"), "preemption"),
        (("scheduler", "--operations", "99", "--pools", "50"), "--operations"),
    ],
)
def test_refusals_name_the_option(
    model: Path, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = () if given[0] == "scheduler" else ("--model", str(model), "--load-format", "dummy")
    assert main(["bench", *given, *common]) == 2
    assert said in capsys.readouterr().err


def test_json_to_stdout_is_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--sequences", "1", "--pools", "20", "--steps", "1", "--operations", "5", "--json", "-"]
    assert main(["bench", "scheduler", *given]) == 0
    assert json.loads(capsys.readouterr().out)["benchmark"] == "scheduler"


# -- loads -----------------------------------------------------------------------------------------------------------


def test_mixed_load_is_the_one_that_peers_were_measured_with() -> None:
    lengths = workloads.mixed_lengths()
    assert lengths[:3] == [(464, 130), (420, 139), (52, 98)] and len(lengths) == 64
    assert (sum(p for p, _ in lengths), sum(o for _, o in lengths)) == (19900, 8801)
    assert workloads.mixed_lengths(5) == lengths[:5]


def test_spread_lengths_cover_the_range_evenly() -> None:
    lengths = workloads.spread_lengths(8, 256, 2048, output_share=0.25)
    totals = sorted(p + o for p, o in lengths)
    assert totals == [256 + 256 * i for i in range(8)] and [p + o for p, o in lengths] != totals
    assert all(o == (p + o) // 4 for p, o in lengths)
    with pytest.raises(ConfigError, match="lengths from 9 to 8"):
        workloads.spread_lengths(4, 9, 8)


def test_prompts_differ_and_stay_in_the_vocabulary() -> None:
    items = workloads.items_of([(50, 2)] * 4, vocab_size=60)
    assert len({i.token_ids for i in items}) == 4 and all(0 < t < 60 for i in items for t in i.token_ids)
    large = workloads.random_ids(500, 1, 262_144)
    assert min(large) >= 1000 and max(large) < 100_000
    first, second = workloads.shared_prefix(2, 20, 5, 1, 320)
    assert first.token_ids[:20] == second.token_ids[:20] and first.token_ids[20:] != second.token_ids[20:]


@pytest.mark.parametrize("text", ["[]", "{}", "[[1]]", "[[1, 0]]", "[[true, 1]]", "no json", '{"mixed": [[1.5, 2]]}'])
def test_broken_workloads_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"load\.json"):
        workloads.read_lengths(str(file))


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_rates_of_a_run() -> None:
    run = Run(
        seconds=4.0,
        prompt_tokens=20,
        output_tokens=12,
        first_token={"a": 1.0, "b": 2.0},
        finished={"a": 2.0, "b": 4.0},
        outputs={"a": [5], "b": [3, 4]},
        samples=[Occupancy(100, 50, 40, 2, 1), Occupancy(100, 80, 60, 3, 1), Occupancy(100, 90, 90, 1, 0)],
    )
    assert (run.output_rate, run.total_rate) == (3.0, 8.0)
    assert (run.peak_sequences, run.peak_use, run.peak_held) == (3, 0.9, 90)
    assert run.mean_use_under_pressure() == pytest.approx(0.5)  # the last sample had nobody waiting
    assert run.ms_per_token() == pytest.approx(1000 * (2 / 5 + 4 / 7) / 2)
    assert run.ms_between_tokens() == pytest.approx(1000 * (1 / 4 + 2 / 3) / 2)


def test_a_load_that_fails_gives_no_figure(model: Path) -> None:
    engine = drive.build(drive_settings(model))
    stops = lambda item: drive.SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=list(range(320)))  # noqa: E731
    with pytest.raises(InternalError, match="ended with 'stop'"):
        drive.run_load(engine, [Item((1, 2, 3), 50)], stops)
    engine.close()


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_watching_changes_no_answer(model: Path, quantization: str | None) -> None:
    """The same tokens from a plain engine and from one that is watched from inside, and the runner is back after."""
    item = Item(workloads.random_ids(40, 3, 320), 12)
    answers = []
    settings = {**drive_settings(model), "quantization": quantization}
    stacks = []
    for engine in (drive.build(settings), instrument.build_profiled(settings)[0]):
        inner, seen = engine.runner, []
        engine.add_request("x", list(item.token_ids), drive.greedy(item))
        while engine.has_unfinished():
            seen = [o.outputs[0].token_ids for o in engine.step()] or seen
        answers.append(list(seen[0]))
        drive.run_load(engine, [item])
        assert engine.runner is inner
        stacks.append(engine.runner._decoder._layer_stack())  # type: ignore[attr-defined]
        engine.close()
    assert isinstance(stacks[0], str) == isinstance(stacks[1], str)  # watched, it takes the same way
    assert answers[0] == answers[1] and len(answers[0]) == 12


def test_standing_sequences_leave_nothing_behind(model: Path) -> None:
    engine, watch = instrument.build_profiled(drive_settings(model), num_blocks=200, max_num_seqs=4)
    standing.fill_kv(engine)
    kv = engine.runner.store.cache.kv  # type: ignore[attr-defined]
    assert torch.equal(kv[0], kv[-1]) and kv[0].std() > 0.5
    for _ in range(2):
        parts = standing.decode_case(engine, watch, 3, 50, 2, 2048)
        assert parts["sequences"] == 3 and not engine.has_unfinished() and engine.runner.num_rows == 0  # type: ignore[attr-defined]
        engine.audit()
        assert engine.pool_view().num_used == 0
    engine.close()


def drive_settings(model: Path) -> dict[str, Any]:
    return {
        "model": str(model), "load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 256, "num_blocks": 64, "enable_prefix_caching": False,
    }  # fmt: skip


def test_sections_count_each_moment_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 10.0])
    monkeypatch.setattr(instrument.time, "perf_counter", lambda: next(clock))
    watch = instrument.StepProfile()
    product = watch.timed(instrument.PRODUCTS, lambda x: x + 1)
    with watch.section("model"):  # 0 to 10
        assert product(1) == 2  # 1 to 3
        assert product(2) == 3  # 4 to 5
    assert watch.seconds == {"model": 7.0, instrument.PRODUCTS: 3.0} and watch.entries == 3
    clock = iter([0.0, 5.0])
    watch.reset()
    with watch.section(instrument.HEAD):
        product(1)  # the head's product is the head's
    assert watch.seconds == {instrument.HEAD: 5.0}


def test_parts_of_steps_are_means_in_milliseconds() -> None:
    watch = instrument.StepProfile()
    watch.seconds.update({instrument.PRODUCTS: 0.4, instrument.ATTENTION: 0.2, instrument.HEAD: 0.2, "prepare": 0.1})
    parts = standing.parts_of(watch, [0.1, 0.1], [0.5, 0.5], [0.0, 0.2])
    assert (parts["products"], parts["schedule"], parts["update and text"]) == pytest.approx((200, 100, 100))
    assert parts["unaccounted"] == pytest.approx(50) and parts["total"] == pytest.approx(700)
    assert standing.three_parts(parts) == pytest.approx({"attention": 100, "products": 300, "rest": 300})
    assert standing.python_share(parts) == pytest.approx((100 + 50 + 100) / 700)


def test_crossover_is_where_swapping_stays_faster() -> None:
    rows = [{"length": n, "swap": s, "recompute": r} for n, s, r in ((1, 1, 2), (2, 3, 2), (4, 3, 5), (8, 4, 9))]
    assert prefix.crossover(rows) == 4
    assert prefix.crossover(rows[:2]) is None


def test_sharing_rows_set_on_beside_off() -> None:
    on = {
        ("samples", 1): {"held": 10, "seconds": 1.0, "copies": 0},
        ("samples", 4): {"held": 12, "seconds": 2.0, "copies": 3},
    }
    off = {
        ("samples", 1): {"held": 10, "seconds": 1.0, "copies": 0},
        ("samples", 4): {"held": 40, "seconds": 4.0, "copies": 9},
    }
    last = sharing.rows_of(on, off)[1]
    assert (last["held_ratio"], last["seconds_ratio"], last["grows"]) == pytest.approx((0.3, 0.5, 1.2))
    assert (last["copies_on"], last["copies_off"]) == (3, 9)


def test_comparison_is_with_the_first_row() -> None:
    rows: list[dict[str, Any]] = [
        {"peak_sequences": 4, "output_rate": 10.0}, {"peak_sequences": 14, "output_rate": 35.0}, {"peak_sequences": 8}
    ]  # fmt: skip
    allocation.compare(rows)
    assert [r["concurrency_ratio"] for r in rows] == [1, 3.5, 2]
    assert rows[1]["rate_ratio"] == 3.5 and "rate_ratio" not in rows[2]


def test_goals_and_formats() -> None:
    assert report.Goal("x", 3.0, 2.5, at_least=True).met and not report.Goal("x", 3.0, 2.5).met
    assert report.Goal("x", 0.123, 0.1).line() == "MISSED  x: 0.123 (goal ≤ 0.1)"
    assert report.fixed(2)(1234.567) == "1,234.57" and report.percent(0.345) == "34.5 %"
    assert report.times(2.5) == "2.50x" and report.mebibytes(3 << 20) == "3.0 MiB"
    assert report.parse_counts("1,2,30") == [1, 2, 30]
    for text in ("", "1,x", "0", "-3"):
        with pytest.raises(ArgumentTypeError, match="must be"):
            report.parse_counts(text)
    with pytest.raises(ArgumentTypeError):
        report.positive("0")


def test_header_says_when_the_machine_is_busy() -> None:
    facts = {**report.machine_facts(["bench", "x"]), "load_average": 9.0, "cpus": 2}
    assert "other work is running" in report.header(facts) and "$ octavo bench x" in report.header(facts)
    assert "other work" not in report.header({**facts, "load_average": 0.1})
