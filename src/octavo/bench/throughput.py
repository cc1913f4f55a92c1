"""`octavo bench throughput`: a load of requests all at once, tokens per second, and the ratio to transformers.

The built-in load has 64 requests with prompts of 32 to 512 tokens and outputs of 32 to 256. Greedy, the end of text
ignored, so every run does exactly the same work.
"""

from __future__ import annotations

import argparse
from typing import Any

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
    mebibytes,
    percent,
    positive,
    publish,
    times,
)
from octavo.bench.workloads import Item
from octavo.errors import ConfigError

DESCRIPTION = """\
Run a load of requests at once and count tokens per second.

examples:
  octavo bench throughput
  octavo bench throughput --requests 16 --baseline transformers --baseline-requests 4
  octavo bench throughput --workload lengths.json --json run.json
"""
BASELINE_GOAL = 3.0  # times transformers `generate` in a loop
COLUMNS = (
    Column("engine", "engine"),
    Column("requests", "requests"),
    Column("seconds", "s", fixed(2)),
    Column("output_rate", "output tok/s", fixed(1)),
    Column("total_rate", "total tok/s", fixed(1)),
    Column("ms_per_token", "ms/token", fixed(2)),
    Column("ms_between_tokens", "ms between tokens", fixed(1)),
    Column("peak_use", "peak KV use", percent),
    Column("peak_held", "KV held", mebibytes),
    Column("peak_sequences", "at once"),
    Column("preemptions", "preempt."),
    Column("ratio", "ratio", times),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("throughput", help="a load at once: tokens per second", description=DESCRIPTION)
    parser.add_argument("--workload", metavar="FILE", help="JSON list of [prompt, output] lengths (mixed load)")
    parser.add_argument("--requests", type=positive, metavar="N", help="the first N of the load (default: all, or 64)")
    parser.add_argument("--repeat", type=positive, default=1, metavar="N", help="runs; the median is shown (1)")
    parser.add_argument("--baseline", choices=("transformers",), help="the same load there, one after the other")
    parser.add_argument(
        "--baseline-requests", type=positive, metavar="K", help="only K requests there, scaled by tokens (default: all)"
    )
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.baseline_requests is not None and args.baseline is None:
        raise ConfigError(f"--baseline-requests {args.baseline_requests} has no effect without --baseline transformers")
    lengths = load_lengths(args.workload, args.requests)
    longest = max(p + o for p, o in lengths)
    engine = drive.build(drive.settings_of(args, max_model_len=max(longest, 64)))
    limit = engine.config.max_model_len
    assert limit is not None and engine.spec is not None
    workloads.check_lengths(lengths, limit)
    facts = {**machine_facts(), **engine_facts(engine), "load": load_facts(lengths)}
    drive.warm_up(engine)
    runs = []
    with bar(len(lengths) * args.repeat, "throughput") as tick:
        for repeat in range(args.repeat):
            items = workloads.items_of(lengths, engine.spec.vocab_size, seed=repeat)
            runs.append(drive.run_load(engine, items, tick=tick))
    row = row_of(sorted(runs, key=lambda r: r.seconds)[len(runs) // 2])
    report = Report("throughput", facts)
    report.notes.append("ms/token: wall time over output tokens; ms between tokens: as one request sees it")
    rows = [row]
    if args.baseline:
        model, dtype = engine.config.model, engine.config.dtype
        load_format, spec = engine.config.load_format, engine.spec
        engine.close()
        items = workloads.items_of(lengths, spec.vocab_size)
        rows.append(_baseline(model, dtype, load_format, items, args.baseline_requests, report))
        row["ratio"] = row["output_rate"] / rows[1]["output_rate"]
        report.goals.append(Goal("output tok/s over transformers", row["ratio"], BASELINE_GOAL, at_least=True))
    else:
        engine.close()
    columns = [c for c in COLUMNS if any(r.get(c.name) is not None for r in rows)]
    report.tables.append(Table(f"{len(lengths)} requests", columns, rows))
    return publish(report, args)


def load_lengths(path: str | None, count: int | None) -> list[tuple[int, int]]:
    """The (prompt, output) lengths of a file or of the mixed load. Raises `ConfigError` for more than a file has."""
    if path is None:
        return workloads.mixed_lengths(count or workloads.MIXED_COUNT)
    lengths = workloads.read_lengths(path)
    if count is not None and count > len(lengths):
        raise ConfigError(f"--requests {count}: {path} has only {len(lengths)}")
    return lengths[:count]


def load_facts(lengths: list[tuple[int, int]]) -> dict[str, int]:
    """Sums that tell whether two runs had the same load."""
    return {
        "requests": len(lengths),
        "prompt_tokens": sum(p for p, _ in lengths),
        "output_tokens": sum(o for _, o in lengths),
    }


def row_of(run: drive.Run) -> dict[str, Any]:
    """One line of the table."""
    return {
        "engine": "octavo",
        "requests": len(run.outputs),
        "seconds": run.seconds,
        "output_rate": run.output_rate,
        "total_rate": run.total_rate,
        "ms_per_token": 1e3 * run.seconds / run.output_tokens,
        "ms_between_tokens": run.ms_between_tokens(),
        "peak_use": run.peak_use,
        "peak_held": run.peak_held,
        "peak_sequences": run.peak_sequences,
        "preemptions": run.preemptions,
        "steps": run.steps,
    }


def _baseline(
    model: str, dtype: str, load_format: str, items: list[Item], count: int | None, report: Report
) -> dict[str, Any]:
    """The same requests through transformers; rates of the subset stand for the whole."""
    from octavo.bench.baseline import transformers_loop

    chosen = items[:count]
    with bar(len(chosen), "transformers") as tick:
        seconds = transformers_loop(model, dtype, load_format, chosen, tick)
    output = sum(i.output for i in chosen)
    total = sum(i.total for i in chosen)
    if len(chosen) < len(items):
        scaled = seconds * sum(i.output for i in items) / output
        report.notes.append(
            f"transformers ran {len(chosen)} of the {len(items)} requests; scaled by output tokens the whole load "
            f"would take {scaled:.1f} s"
        )
    if load_format == "dummy":
        report.notes.append("random weights: same shapes on both sides, not the same numbers")
    return {
        "engine": "transformers generate",
        "requests": len(chosen),
        "seconds": seconds,
        "output_rate": output / seconds,
        "total_rate": total / seconds,
        "ms_per_token": 1e3 * seconds / output,
        "ms_between_tokens": None,
        "peak_use": None,
        "peak_held": None,
        "peak_sequences": 1,
        "preemptions": None,
        "ratio": 1.0,
    }
