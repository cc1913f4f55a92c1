"""`octavo bench weights`: products over quantised weights alone, against the same weights in bfloat16.

The same matrix in each format, at one row (a single sequence's step, bound by reading the weights) and at several (a
batch, bound by arithmetic), with the share of the bandwidth that a plain loop over memory reaches on this machine in
the same run. The contenders take turns and each keeps its best time. No model.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.bench.clock import add_clock_options, settle_clock
from octavo.bench.kernels import best_times
from octavo.bench.limits import measure_limits
from octavo.bench.report import (
    Column,
    Report,
    Table,
    add_report_options,
    bar,
    fixed,
    machine_facts,
    percent,
    positive,
    publish,
)
from octavo.bench.report import times as ratio
from octavo.errors import ConfigError

DESCRIPTION = """\
Time products over int8 and int4 weights against bfloat16 on the same data.

examples:
  octavo bench weights
  octavo bench weights --threads 1 --cpu-time      on a busy machine: time on the processor, not on the clock
  octavo bench weights --format int8 --rows 1 --rows 64
"""
#: inputs, outputs: Gemma 3 270M's head, its gate/up and its down; Qwen2.5 1.5B's gate/up
SHAPES = ((640, 262144), (640, 4096), (2048, 640), (1536, 17920))
ROWS = (1, 4, 16, 64)
FORMATS = ("bfloat16", "int8", "int4", "int4:128")
COLUMNS = (
    Column("shape", "in x out"),
    Column("rows", "rows"),
    Column("format", "weights"),
    Column("mib", "MiB", fixed(1)),
    Column("ms", "ms", fixed(3)),
    Column("gbs", "GB/s", fixed(1)),
    Column("bandwidth", "of bandwidth", percent),
    Column("gflops", "GFLOP/s", fixed(0)),
    Column("speedup", "bfloat16 / it", ratio),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "weights",
        help="products over quantised weights alone, against bfloat16",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--format", choices=FORMATS[1:], action="append", help="beside bfloat16 (all)")
    parser.add_argument("--rows", type=positive, action="append", metavar="N", help=f"of activations {ROWS}")
    parser.add_argument("--inputs", type=positive, metavar="N", help="one matrix of this many inputs and --outputs")
    parser.add_argument("--outputs", type=positive, metavar="N", help="see --inputs")
    add_clock_options(parser, seconds=0.3)
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from octavo.kernels import cpu

    clock = settle_clock(args)
    if cpu.why_unavailable():
        raise ConfigError(cpu.why_unavailable())
    if (args.inputs is None) != (args.outputs is None):
        raise ConfigError("--inputs and --outputs describe one matrix: give both")
    shapes = SHAPES if args.inputs is None else ((args.inputs, args.outputs),)
    formats = ["bfloat16", *(args.format or FORMATS[1:])]
    report, lines = Report("weights", machine_facts()), []
    counts = args.rows or ROWS
    with bar(len(shapes) * len(counts) + 1, "weights") as tick, torch.inference_mode():
        limits = measure_limits("float32", args.seconds)
        assert limits is not None  # the kernels are built: asked above
        bandwidth = limits.reading[1]
        tick("bandwidth")
        for inputs, outputs in shapes:
            linears = {name: _linear(name, inputs, outputs) for name in formats}
            for rows in counts:
                lines += _measure(linears, inputs, outputs, rows, bandwidth, args.seconds, clock)
                tick(f"{inputs} x {outputs}, {rows} rows")
    report.tables.append(Table("products", COLUMNS, lines))
    report.notes += [
        f"{torch.get_num_threads()} threads, {cpu.instruction_set()} kernels, float32 in and out, "
        f"{'processor' if args.cpu_time else 'wall'} time, best of {args.seconds:g} s each, taking turns",
        limits.note(),
    ]
    return publish(report, args)


def _linear(name: str, inputs: int, outputs: int) -> Any:
    import torch

    from octavo.core.weight_format import parse_weight_format
    from octavo.kernels import cpu

    weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    format = None if name == "bfloat16" else parse_weight_format(name)
    return cpu.make_ops(torch.bfloat16, format).linear(weight)


def _measure(
    linears: dict[str, Any],
    inputs: int,
    outputs: int,
    rows: int,
    bandwidth: float,
    seconds: float,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """One line per format."""
    import torch

    x = torch.randn(rows, inputs)
    times = best_times([partial(linear, x) for linear in linears.values()], seconds, clock)
    return [
        {
            "shape": f"{inputs} x {outputs:,}",
            "rows": rows,
            "format": name,
            "mib": linear.nbytes / (1 << 20),
            "ms": time * 1e3,
            "gbs": linear.nbytes / time / 1e9,
            "bandwidth": linear.nbytes / time / bandwidth,
            "gflops": 2.0 * rows * inputs * outputs / time / 1e9,
            "speedup": times[0] / time,
        }
        for (name, linear), time in zip(linears.items(), times, strict=True)
    ]
