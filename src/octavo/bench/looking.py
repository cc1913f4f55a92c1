"""`octavo bench looking`: what it costs that a run can be looked at.

The real engine over made-up tokens decodes the same load with and without its journal (the samples and totals that
`octavo doctor` and `octavo top` read), in turns, in processor time of this thread. What the journal adds to a step is
held against the shortest step that a model would take; a report, which is made only when somebody asks, against the
rate at which `octavo top` asks.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    add_report_options,
    bar,
    fixed,
    machine_facts,
    median,
    parse_counts,
    positive,
    publish,
)
from octavo.bench.scripted import answer
from octavo.bench.workloads import random_ids
from octavo.config import EngineConfig, Resolved
from octavo.core.journal import Journal
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.engine import Engine
from octavo.inspect.report import engine_report
from octavo.sampling_params import SamplingParams

DESCRIPTION = """\
Time what an engine keeps of its own run, and a report of it.

example:
  octavo bench looking --sequences 16,256 --steps 400
"""
STEP_MS = 5.0  # a small model on a fast device; a longer step makes every share smaller
ASKED_PER_S = 1.0  # `octavo top`
GOAL_NOBODY, GOAL_WATCHED = 1.0, 3.0
COLUMNS = (
    Column("sequences", "sequences"),
    Column("without", "µs per step without", fixed(1)),
    Column("journal", "µs added", fixed(3)),
    Column("share", "% of a step", fixed(4)),
    Column("report_ms", "ms per report", fixed(2)),
    Column("report_kb", "kB of JSON", fixed(0)),
    Column("watched", "% with octavo top", fixed(3)),
)


class _NoJournal(Journal):
    def stepped(self, scheduler: Scheduler, now: float) -> None: ...


class _Runner:
    """A made-up token for everything that draws."""

    def execute(self, plan: StepPlan) -> StepResult:
        return answer(plan)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "looking",
        help="what it costs that a run can be looked at",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=parse_counts, default=[16, 256], metavar="N,…")
    parser.add_argument("--steps", type=positive, default=400, metavar="N", help="decode steps of one turn (400)")
    parser.add_argument("--turns", type=positive, default=7, metavar="N", help="turns with and without (7)")
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    report = Report("looking", machine_facts())
    rows = []
    with bar(len(args.sequences), "looking") as tick:
        for sequences in args.sequences:
            rows.append(_row(sequences, args.steps, args.turns))
            tick(f"{sequences} sequences")
    title = f"what a run's journal costs, in steps of {STEP_MS:g} ms, and a report every {1 / ASKED_PER_S:g} s"
    report.tables.append(Table(title, COLUMNS, rows))
    report.goals.append(Goal("% of throughput with nobody looking", max(r["share"] for r in rows), GOAL_NOBODY))
    report.goals.append(Goal("% with one octavo top", max(r["watched"] for r in rows), GOAL_WATCHED))
    return publish(report, args)


def _row(sequences: int, steps: int, turns: int) -> dict[str, Any]:
    with_, without = [], []
    for _ in range(turns):
        without.append(_decode(sequences, steps, _NoJournal())[0])
        seconds, engine = _decode(sequences, steps, Journal())
        with_.append(seconds)
    begin = time.thread_time()
    text = json.dumps(engine_report(engine, finished=0, samples=64))
    report_s = time.thread_time() - begin
    added = max(0.0, median(with_) - median(without)) / steps
    share = 100 * added / (STEP_MS / 1000)
    return {
        "sequences": sequences,
        "without": 1e6 * median(without) / steps,
        "journal": 1e6 * added,
        "share": share,
        "report_ms": 1e3 * report_s,
        "report_kb": len(text) / 1000,
        "watched": share + 100 * report_s * ASKED_PER_S,
    }


def _decode(sequences: int, steps: int, journal: Journal) -> tuple[float, Engine]:
    """(seconds of `steps` decode steps, the engine in the middle of its run)."""
    layout = build_layout((None,) * 18, block_size=16, bytes_per_token_layer=1024)
    length = steps + 64
    blocks = sequences * layout.blocks_for(length) + 1
    config = EngineConfig(model="scripted", num_blocks=blocks, max_model_len=length, max_num_seqs=sequences)
    settings = SchedulerSettings(
        num_blocks=blocks,
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(2048, sequences),
        enable_prefix_caching=True,
    )
    engine = Engine(Resolved(config), Scheduler(settings, layout), _Runner(), vocab_size=1 << 20)
    engine.journal = journal
    params = SamplingParams(temperature=0.0, max_tokens=steps + 16, ignore_eos=True)
    for number in range(sequences):
        engine.add_request(f"r{number}", list(random_ids(8, number, 1 << 20)), params)
    while engine.scheduler.waiting or any(not r.forked for r in engine.scheduler.running):
        engine.step()
    begin = time.thread_time()
    for _ in range(steps):
        engine.step()
    return time.thread_time() - begin, engine
