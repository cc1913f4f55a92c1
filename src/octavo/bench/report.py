"""What every benchmark says and how: a header that names the conditions, tables, goals, and the same as JSON.

    octavo bench NAME                 header, tables and notes for people
    octavo bench NAME --json FILE     the same run as one JSON object in FILE too ("-": JSON on stdout, nothing else)

It measures nothing. The invariant: no figure is printed without the versions, processor, threads and dtype it was
measured with, and every table is in the JSON under the same names.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine import Engine

PACKAGES = ("torch", "numpy", "transformers")


@dataclass(frozen=True)
class Column:
    """name: key of the value in a row. title: what people read. show: value -> text; None prints "-"."""

    name: str
    title: str
    show: Callable[[Any], str] = str


@dataclass(frozen=True)
class Table:
    """rows: one dict per line, keyed by the columns' names (further keys are kept in the JSON only)."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Goal:
    """A number the design is held to. `limit` is the largest good value, or the smallest with at_least."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{'met   ' if self.met else 'MISSED'}  {self.name}: {self.value:.3g} (goal {sign} {self.limit:g})"


@dataclass
class Report:
    """One run of one benchmark."""

    name: str
    facts: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "benchmark": self.name,
            "facts": self.facts,
            "tables": {t.title: list(t.rows) for t in self.tables},
            "goals": [
                {"name": g.name, "value": g.value, "limit": g.limit, "at_least": g.at_least, "met": g.met}
                for g in self.goals
            ],
            "notes": self.notes,
        }


# -- the conditions ------------------------------------------------------------------------------------------------


def machine_facts(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Versions, processor, load and command line: what a figure needs so that somebody else can run it again."""
    from octavo import __version__

    versions = {"octavo": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "command": " ".join(["octavo", *(sys.argv[1:] if argv is None else argv)]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": versions,
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def engine_facts(engine: Engine) -> dict[str, Any]:
    """What the engine chose: model, dtype, device, threads, kernels and pool."""
    import torch

    from octavo.devices import find_device
    from octavo.kernels import cpu

    config = engine.config
    on_host = config.device == "cpu"
    return {
        "model": config.model,
        "dtype": config.dtype,
        "device": config.device if on_host else find_device(config.device).name,
        "threads": torch.get_num_threads(),
        "attention": config.attention_backend,
        "instruction_set": (cpu.instruction_set() or "torch only") if on_host else "",
        "block_size": config.block_size,
        "num_blocks": config.num_blocks,
        "max_model_len": config.max_model_len,
    }


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def header(facts: dict[str, Any]) -> str:
    """The conditions in a few short lines."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    lines = [f"{facts['date']}  {versions}", f"{facts['cpu']}, {facts['cpus']} CPUs"]
    if "threads" in facts:
        kernels = " ".join(x for x in (facts["attention"], facts["instruction_set"]) if x)
        lines[1] += f", {facts['threads']} threads, {facts['device']}, {facts['dtype']}, {kernels} kernels"
        lines.append(f"{facts['model']}, max_model_len {facts['max_model_len']}")
    lines.append(f"$ {facts['command']}")
    load, cpus = facts["load_average"], facts["cpus"]
    if load is not None and load > 0.5 * cpus + 0.5:
        lines.append(f"other work is running (load average {load} on {cpus} CPUs): times are upper bounds")
    return "\n".join(lines)


# -- output ----------------------------------------------------------------------------------------------------------


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark has."""
    parser.add_argument("--json", metavar="FILE", help='write the run to FILE as JSON ("-": to stdout, and no tables)')


def publish(report: Report, args: argparse.Namespace) -> int:
    """Print the report, write the JSON; 0. A missed goal is a finding, not an error of the command."""
    if args.json != "-":
        print_report(report)
    if args.json is not None:
        text = json.dumps(report.as_json(), indent=1, ensure_ascii=False)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    return 0


def print_report(report: Report) -> None:
    """Tables for people, on stdout; 120 columns when stdout is no terminal, so that files look the same everywhere."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(f"octavo bench {report.name}", style="bold")
    console.print(header(report.facts), markup=False, soft_wrap=True)
    for table in report.tables:
        console.print(f"\n{table.title}", style="bold", markup=False)
        drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(table.columns):
            drawn.add_column(column.title, justify="left" if index == 0 else "right")
        for row in table.rows:
            drawn.add_row(*(_cell(column, row.get(column.name)) for column in table.columns))
        console.print(drawn)
    for goal in report.goals:
        console.print(goal.line(), style="green" if goal.met else "red", markup=False)
    for note in report.notes:
        console.print(f"- {note}", markup=False)


def _cell(column: Column, value: Any) -> str:
    return "-" if value is None else column.show(value)


@contextmanager
def bar(total: int, label: str) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr, if that is a terminal; call the result with a short text after each piece of work."""
    if not sys.stderr.isatty() or total < 1:
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, text="")
        yield lambda text: progress.update(task, advance=1, text=text)


# -- numbers ---------------------------------------------------------------------------------------------------------


def fixed(digits: int, unit: str = "") -> Callable[[Any], str]:
    """A formatter: 1234.5678 -> "1,234.57" with `digits` decimals."""
    return lambda value: f"{value:,.{digits}f}{unit}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def times(value: float) -> str:
    """A ratio: 2.5 -> "2.50x"."""
    return f"{value:.2f}x"


def mebibytes(value: float) -> str:
    return f"{value / (1 << 20):,.1f} MiB"


def median(values: Sequence[float]) -> float:
    """Less moved by a neighbour's burst than the mean."""
    return statistics.median(values)


def parse_counts(text: str) -> list[int]:
    """ "8,16,32" -> [8, 16, 32]: positive whole numbers, for argparse."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas, such as 1,4,16") from None
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: every number must be at least 1")
    return counts


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number of at least 1")
    return int(text)


def positive_number(text: str) -> float:
    """A finite number above 0, for argparse: every comparison with nan is false, so one would slip through others."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a finite number above 0")
    return value
