"""`octavo bench gpu`: checks, the table against the reference figures, and the paging experiment, on one GPU.

    octavo bench gpu --json run.json                 everything; what run.json has already is not measured again
    octavo bench gpu --models qwen3-0.6b --workloads single,b16
    octavo bench gpu --small                         tiny models on this CPU: shows that the command works, no figures

Models are random weights of real shapes (configs/), so nothing is downloaded. Every row is written to the JSON file as
soon as it is there. Without a GPU it says so and ends with exit code 2; it never puts a figure where none was measured.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench import gpu_work
from octavo.bench.drive import run_load, warm_up
from octavo.bench.gpu_checks import CHECKS, check_rows
from octavo.bench.gpu_paging import block_sizes_table, paging_table
from octavo.bench.gpu_session import Session, earlier_rows, median_run, params_of, running
from octavo.bench.gpu_work import ABOUT, ROWS, START, Card, Row, Workload, floor, workload
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    add_report_options,
    fixed,
    machine_facts,
    percent,
    publish,
    times,
)
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.devices import Device
    from octavo.engine import Engine

REFERENCE = "vLLM, H200"
PARTS = ("checks", "table", "paging", "blocks", "kernels")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "gpu",
        help="checks, throughput against vLLM's figures and the paging experiment, on one GPU",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PARTS", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--models", metavar="NAMES", help="of the table, with commas (default: all)")
    parser.add_argument("--workloads", metavar="NAMES", help=f"of {','.join(ABOUT)} (default: all)")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU, to see that the command works")
    parser.add_argument("--fresh", action="store_true", help="measure again what the JSON file has already")
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    parts = _chosen("--only", args.only, PARTS)
    models = _chosen("--models", args.models, tuple(dict.fromkeys(r.model for r in ROWS)))
    loads = _chosen("--workloads", args.workloads, tuple(ABOUT))
    device = _device(args)
    report = Report("gpu", {**machine_facts(), "device": device.name, "dry_run": args.small})
    path = None if args.json in (None, "-") else Path(args.json)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(device, Path(folder), args.small, path, facts=report.facts)
        if not args.fresh:
            session.known = earlier_rows(session)
        earlier = len(session.known)
        if "checks" in parts:
            report.tables.append(check_rows(session.once, session.settings, small=args.small))
        if "table" in parts:
            report.tables += _table(session, report, [r for r in ROWS if r.model in models and r.workload in loads])
        if "paging" in parts:
            report.tables.append(paging_table(session))
        if "blocks" in parts:
            report.tables.append(block_sizes_table(session))
        if "kernels" in parts:
            report.tables += _kernels(session)
    _notes(report, session, earlier)
    if args.json == "-":
        return publish(report, args)
    args.json = None  # the file is written row by row
    publish(report, args)
    failed = any(row["result"] == "FAILED" for t in report.tables if t.title == CHECKS for row in t.rows)
    return 1 if failed else 0


def _chosen(option: str, text: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    names = known if text is None else tuple(text.split(","))
    wrong = [name for name in names if name not in known]
    if wrong:
        raise ConfigError(f"{option} {', '.join(wrong)}: must be of {', '.join(known)}")
    return names


def _device(args: argparse.Namespace) -> Device:
    from octavo.devices import find_device

    if args.small:
        return find_device("cpu")
    try:
        return find_device("cuda")
    except ConfigError as error:
        raise ConfigError(
            f"octavo bench gpu measures a GPU, and there is none to be had ({error}). Nothing was measured. "
            "--small runs the same on tiny models and this CPU, to see that the command works"
        ) from error


# -- the table -------------------------------------------------------------------------------------------------------


def _table(session: Session, report: Report, rows: list[Row]) -> list[Table]:
    """Each model is loaded once for the rows that are still missing."""
    card = _card(session)
    lines: list[dict[str, Any]] = []
    starts: list[dict[str, Any]] = []
    groups = dict.fromkeys((r.model, r.kv_blocks) for r in rows)
    for model, blocks in groups:
        wanted = [r for r in rows if (r.model, r.kv_blocks) == (model, blocks)]
        _measure_missing(session, model, blocks, wanted)
        lines += [_line(session, row, card) for row in wanted]
        if blocks is None and (start := session.known.get(f"start/{model}")) is not None:
            theirs, goal = (None, None) if session.small else START[model]
            starts.append({"model": model, **start, "theirs": theirs, "goal": goal})
    for line in lines:
        if line["goal"] is not None and line["value"] is not None:
            in_seconds = line["unit"] == "ms"
            report.goals.append(
                Goal(
                    f"{line['model']} {line['workload']} ({line['unit']})", line["value"], line["goal"], not in_seconds
                )
            )
    columns = [
        Column("model", "model"), Column("workload", "workload"), Column("unit", "unit"),
        Column("value", "octavo", fixed(1)), Column("theirs", REFERENCE, fixed(1)),
        Column("ratio", "times as fast", times), Column("goal", "goal", fixed(1)),
        Column("share_of_floor", "of the floor", percent), Column("bound", "floor set by"),
        Column("graphs", "steps by graph", percent), Column("waits", "steps that waited", percent),
    ]  # fmt: skip
    start_columns = [
        Column("model", "model"), Column("seconds", "start to ready, s", fixed(1)),
        Column("theirs", REFERENCE, fixed(1)), Column("goal", "goal", fixed(1)),
    ]  # fmt: skip
    return [Table("Throughput", columns, lines), Table("Start", start_columns, starts)]


def _measure_missing(session: Session, model: str, blocks: int | None, rows: list[Row]) -> None:
    missing = [row for row in rows if row.key not in session.known]
    if not missing:
        return
    more = {} if blocks is None or session.small else {"num_blocks": blocks}
    with running(session.settings(model, **more)) as (engine, ready):
        if blocks is None:
            session.once(f"start/{model}", lambda: {"seconds": ready})
        warm_up(engine)
        for row in missing:
            load = workload(row.workload, session.scale())
            run_load(engine, load.items[:8], params_of(load), sample=False)  # compiles and records what it needs
            session.once(row.key, lambda load=load: _measure(engine, load))  # type: ignore[misc]


def _measure(engine: Engine, load: Workload) -> dict[str, Any]:
    before = _counts(engine)
    middle, seconds = median_run(engine, load)
    after = _counts(engine)
    steps = max(1, after["steps"] - before["steps"])
    return {
        "seconds": middle.seconds,
        "all_seconds": seconds,
        "output_tokens": middle.output_tokens,
        "steps": steps,
        "graphs": (after["graphs"] - before["graphs"]) / steps,
        "waits": (after["waits"] - before["waits"]) / steps,
        "preemptions": middle.preemptions,
    }


def _counts(engine: Engine) -> dict[str, int]:
    stats, graphs = engine.stats(), getattr(engine.runner, "graphs", None)
    return {
        "steps": stats.steps,
        "graphs": 0 if graphs is None else graphs.counters.replayed,
        "waits": sum(stats.overlap_waits.values()),
    }


def _line(session: Session, row: Row, card: Card | None) -> dict[str, Any]:
    """A row as it is shown; reference figures stand beside full-size runs only."""
    found = session.known[row.key]
    load = workload(row.workload, session.scale())
    rate = found["output_tokens"] / found["seconds"]
    value = 1e3 * found["seconds"] if row.in_seconds else rate
    theirs = goal = ratio = share = bound = None
    if not session.small:
        theirs, goal = ((1e3 * x if x and row.in_seconds else x) for x in (row.figure, row.goal))
        ratio = None if theirs is None else theirs / value if row.in_seconds else value / theirs
        if card is not None:
            least = floor(load, gpu_work.model_config(row.model), card, 2)
            share, bound = least.seconds / found["seconds"], least.by
    name = row.workload + (f", {row.kv_blocks} blocks" if row.kv_blocks else "")
    return {
        "model": row.model, "workload": name, "unit": "ms" if row.in_seconds else "tok/s", "value": value,
        "theirs": theirs, "ratio": ratio, "goal": goal, "share_of_floor": share, "bound": bound, **found,
    }  # fmt: skip


def _card(session: Session) -> Card | None:
    """Ceilings of the card; a CPU has none that would mean anything here."""
    if session.small:
        return None
    from octavo.bench.gpu_card import measure_card

    found = session.once("card", lambda: measure_card(session.device))
    return Card(found["copy_bytes_per_s"], found["flops"])


def _kernels(session: Session) -> list[Table]:
    """Times of the kernels themselves, on a GPU."""
    if session.small:
        return []
    from octavo.bench import gpu_kernels

    return gpu_kernels.tables(session.once, str(session.device.torch))


def _notes(report: Report, session: Session, earlier: int) -> None:
    report.facts["rows_from_earlier_runs"] = earlier
    report.notes += [f"{name}: {about}" for name, about in ABOUT.items()]
    if session.small:
        report.notes.append("dry run: tiny models on a CPU; the figures are comparable with nothing")
    else:
        report.notes.append(
            f"{gpu_work.REFERENCE_ENGINE}: another run on another day; the same workloads and dummy weights in bfloat16"
        )
        report.notes.append(
            "kernels under compute-sanitizer: compute-sanitizer --tool memcheck python -m pytest tests/gpu"
        )
    if earlier:
        report.notes.append(
            f"{earlier} rows are from earlier runs of the same file, {session.measured} were measured now"
        )
