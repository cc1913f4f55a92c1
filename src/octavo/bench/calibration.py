"""`octavo bench calibration`: how far the simulator is from the engine that it was calibrated on.

One engine runs three loads. The cost model is fitted to the recording of the first; the other two, which are unlike it
and unlike each other, are simulated with that model and compared with what the engine really took:

    calibration   mixed prompts and outputs
    long          few requests with long prompts and long outputs
    short         many requests with short prompts and short outputs
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench import drive, workloads
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    bar,
    engine_facts,
    fixed,
    machine_facts,
    positive,
    publish,
    times,
)
from octavo.errors import ConfigError
from octavo.planning.calibrate import calibrate
from octavo.planning.simulate import Simulation
from octavo.planning.trace import Trace, TraceRequest

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.planning.cost_model import CostModel
    from octavo.planning.outcome import Outcome

DESCRIPTION = """\
Calibrate the simulator on a run and compare it with the engine on two other loads.

examples:
  octavo bench calibration
  octavo bench calibration --scale 4 --keep run.jsonl
  octavo bench calibration --model path/to/model --load-format dummy --max-model-len 1024
"""
GOAL = 0.15  # of the measured value
#: name -> (requests, prompt tokens, output tokens); --scale multiplies the requests.
LOADS: dict[str, tuple[int, tuple[int, int], tuple[int, int]]] = {
    "calibration": (16, (16, 320), (16, 96)),
    "long": (4, (400, 700), (96, 160)),
    "short": (32, (8, 64), (8, 48)),
}
COLUMNS = (
    Column("load", "load"),
    Column("what", "what"),
    Column("measured", "measured", fixed(3)),
    Column("simulated", "simulated", fixed(3)),
    Column("ratio", "simulated / measured", times),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "calibration", help="the simulator against the engine it was calibrated on", description=DESCRIPTION
    )
    parser.add_argument("--scale", type=positive, default=1, metavar="N", help="times as many requests (1)")
    parser.add_argument("--keep", metavar="FILE", help="keep the recording that was calibrated on")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, fit, simulate, compare."""
    drive.refuse_settings(args, ("record",), "the benchmark records by itself; --keep keeps the recording")
    lengths = {name: _lengths(name, args.scale) for name in LOADS}
    longest = max(p + o for pairs in lengths.values() for p, o in pairs)
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "run.jsonl"
        settings = drive.settings_of(args, max_model_len=longest, enable_prefix_caching=False)
        engine = drive.build(settings, record=str(recording))
        try:
            runs, model = _measure(engine, lengths, recording, Path(folder) / "calibration.jsonl", args.keep)
            report = Report("calibration", {**machine_facts(), **engine_facts(engine), "cost_model": model.facts})
            rows = []
            for name, pairs in lengths.items():
                rows += _compare(name, runs[name], _simulate(engine, pairs, model))
        finally:
            engine.close()
    report.tables.append(Table("simulated against measured", COLUMNS, rows))
    for name in ("long", "short"):
        off = max(abs(r["ratio"] - 1.0) for r in rows if r["load"] == name and r["what"].startswith("output tok/s"))
        report.goals.append(Goal(f"{name}: output tok/s off by a share of", off, GOAL))
    report.notes += [
        model.source + f"; its own steps are off by {model.facts['median_error']:.1%} (median), "
        f"{model.facts['p90_error']:.1%} (nine in ten)",
        "seconds, but output tok/s; all requests of a load arrive at once",
    ]
    return publish(report, args)


def _lengths(name: str, scale: int) -> list[tuple[int, int]]:
    import random

    count, prompts, outputs = LOADS[name]
    stream = random.Random(name)
    return [(stream.randint(*prompts), stream.randint(*outputs)) for _ in range(count * scale)]


def _measure(
    engine: Engine, lengths: dict[str, list[tuple[int, int]]], recording: Path, first: Path, keep: str | None
) -> tuple[dict[str, drive.Run], CostModel]:
    """Runs of all loads, and the model fitted to the recording as it stood after the first."""
    assert engine.spec is not None and engine.config.max_model_len is not None
    vocabulary, limit = engine.spec.vocab_size, engine.config.max_model_len
    runs: dict[str, drive.Run] = {}
    drive.warm_up(engine)
    with bar(sum(map(len, lengths.values())), "calibration") as tick:
        for seed, (name, pairs) in enumerate(lengths.items()):
            workloads.check_lengths(pairs, limit)
            items = workloads.items_of(pairs, vocabulary, seed=seed)
            runs[name] = drive.run_load(engine, items, sample=False, tick=tick)
            if not seed:
                shutil.copyfile(recording, first)  # every line is flushed
    if keep is not None:
        try:
            shutil.copyfile(first, keep)
        except OSError as error:
            raise ConfigError(f"--keep {keep}: cannot be written ({error.strerror})") from error
    return runs, calibrate(first)


def _simulate(engine: Engine, pairs: list[tuple[int, int]], model: CostModel) -> Outcome:
    trace = Trace("load", [TraceRequest(0.0, p, o) for p, o in pairs])
    scheduler = engine.scheduler
    settings = replace(scheduler.settings, speculation=None)
    return Simulation(trace, settings, scheduler.memory.layout, model).run()


def _compare(name: str, run: drive.Run, outcome: Outcome) -> list[dict[str, Any]]:
    """Rows of the table."""
    latency = outcome.latencies()
    ttft, whole = latency["ttft"], latency["e2e"]
    assert ttft is not None and whole is not None
    pairs = {
        "the whole load": (run.seconds, outcome.seconds),
        "output tok/s": (run.output_rate, outcome.output_rate),
        "first token, mean": (_mean(run.first_token), ttft["mean"]),
        "whole answer, mean": (_mean(run.finished), whole["mean"]),
        "steps": (float(run.steps), float(outcome.steps)),
    }
    return [
        {"load": name, "what": what, "measured": measured, "simulated": simulated, "ratio": simulated / measured}
        for what, (measured, simulated) in pairs.items()
    ]


def _mean(values: dict[str, float]) -> float:
    return sum(values.values()) / len(values)
