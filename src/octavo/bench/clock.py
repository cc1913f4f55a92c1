"""Options of benchmarks that time kernels alone: threads, how long, and which clock."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from octavo.bench.report import positive, positive_number
from octavo.errors import ConfigError


def add_clock_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """--threads, --seconds (the default given) and --cpu-time."""
    parser.add_argument("--threads", type=positive, metavar="N", help="OpenMP threads (torch's default)")
    parser.add_argument(
        "--seconds", type=positive_number, default=seconds, metavar="S", help=f"spent on each contender ({seconds:g})"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="processor time instead of wall time; needs --threads 1"
    )


def settle_clock(args: argparse.Namespace) -> Callable[[], float]:
    """Sets the threads; the clock to read, in seconds. Raises ConfigError for options that make no sense."""
    import torch

    if args.cpu_time and args.threads != 1:
        raise ConfigError("--cpu-time counts one thread's work only: add --threads 1")
    if args.threads:
        torch.set_num_threads(args.threads)
    return time.thread_time if args.cpu_time else time.perf_counter
