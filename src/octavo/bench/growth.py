"""`octavo bench growth`: what a decode step costs as sequences and contexts grow, split into attention, products, rest.

Products should hardly grow with sequences (they are bound by reading the weights) until there are many; attention grows
with sequences x context, less where layers have a window; the rest with sequences only.
"""

from __future__ import annotations

import argparse
from typing import Any

from octavo.bench import drive
from octavo.bench.instrument import build_profiled
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    bar,
    engine_facts,
    fixed,
    machine_facts,
    parse_counts,
    percent,
    positive,
    publish,
)
from octavo.bench.standing import blocks_for, decode_case, fill_kv, length_of, python_share, three_parts
from octavo.config import make_config

DESCRIPTION = """\
Milliseconds of a decode step over sequences and contexts.

examples:
  octavo bench growth
  octavo bench growth --sequences 1,64 --contexts 128,8192 --steps 4
"""
DECIDED = ("num_blocks", "cpu_kv_bytes", "gpu_memory_utilization", "max_model_len", "enable_prefix_caching",
           "max_num_seqs", "max_num_batched_tokens", "allocation", "preemption", "swap_bytes")  # fmt: skip
CHUNK = 2048
GOAL_SEQUENCES, GOAL_PYTHON = 64, 0.05
COLUMNS = (
    Column("sequences", "sequences"),
    Column("context", "context", fixed(0)),
    Column("total", "ms/step", fixed(1)),
    Column("attention", "attention", fixed(1)),
    Column("products", "products", fixed(1)),
    Column("rest", "rest", fixed(1)),
    Column("python", "Python", percent),
    Column("rate", "tok/s", fixed(0)),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("growth", help="a decode step over sequences and contexts", description=DESCRIPTION)
    parser.add_argument("--sequences", type=parse_counts, default=[1, 4, 16, 64], metavar="N,…", help="(1,4,16,64)")
    parser.add_argument(
        "--contexts", type=parse_counts, default=[128, 1024, 4096], metavar="N,…", help="(128,1024,4096)"
    )
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="per figure (8)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, DECIDED, "the benchmark sizes the pool for its cases")
    cases = [(n, c) for n in args.sequences for c in args.contexts]
    settings = drive.settings_of(args, enable_prefix_caching=False)
    engine, profile = build_profiled(settings, **sizes(settings, cases, args.steps))
    report = Report("growth", {**machine_facts(), **engine_facts(engine)})
    fill_kv(engine)
    rows = []
    with bar(len(cases), "growth") as tick:
        for sequences, context in cases:
            parts = decode_case(engine, profile, sequences, context, args.steps, CHUNK)
            rows.append({**parts, **three_parts(parts), "python": python_share(parts), "rate": rate_of(parts)})
            tick(f"{sequences} x {context}")
    engine.close()
    report.tables.append(Table("a decode step", COLUMNS, rows))
    at_goal = [r["python"] for r in rows if r["sequences"] == GOAL_SEQUENCES]
    if at_goal:
        report.goals.append(Goal(f"Python share at {GOAL_SEQUENCES} sequences, worst", max(at_goal), GOAL_PYTHON))
    watching = max(r["watching"] / r["total"] for r in rows)
    report.notes += [
        "attention: reading and writing keys and values; products: all matrix products, the head included; Python: "
        "schedule, prepare, update and text over the step",
        f"contexts are filled with random keys and values; watching costs at most {watching:.1%} of a step",
    ]
    return publish(report, args)


def rate_of(parts: dict[str, Any]) -> float:
    """Tokens per second: one for each sequence in a step."""
    return float(1e3 * parts["sequences"] / parts["total"])


def sizes(settings: dict[str, Any], cases: list[tuple[int, int]], steps: int) -> dict[str, Any]:
    """Settings that make room for the largest case."""
    from octavo.devices import find_device
    from octavo.models.load import pick_dtype, read_spec
    from octavo.sizing import layout_for

    config = make_config(**settings)
    dtype = pick_dtype(config.dtype, find_device(config.device).kind)
    layout = layout_for(config, read_spec(config.model, config.load_format), dtype.itemsize)
    return {
        "num_blocks": blocks_for(layout, cases, steps, CHUNK),
        "max_model_len": max(length_of(n, c, steps, CHUNK) for n, c in cases),
        "max_num_seqs": max(n for n, _ in cases),
        "max_num_batched_tokens": CHUNK,
    }
