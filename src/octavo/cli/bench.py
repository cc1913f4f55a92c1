"""`octavo bench NAME`: one subcommand per module of `octavo.bench` that has `add_parser` and `run`."""

from __future__ import annotations

import argparse
import pkgutil
from importlib import import_module
from typing import Any


def add_parser(subparsers: Any, *, full: bool) -> None:
    """full=False: only the name, without importing any benchmark."""
    parser = subparsers.add_parser("bench", help="measure: throughput, allocation, prefix cache, scheduler, …")
    parser.set_defaults(run=lambda args: _help(parser))
    if not full:
        return
    inner = parser.add_subparsers(title="benchmarks", metavar="NAME", dest="benchmark")
    for name in benchmark_names():
        module = import_module(f"octavo.bench.{name}")
        if hasattr(module, "add_parser") and hasattr(module, "run"):
            known = set(inner.choices)
            module.add_parser(inner)
            for added in set(inner.choices) - known:
                inner.choices[added].set_defaults(run=module.run)


def benchmark_names() -> list[str]:
    """Modules of octavo.bench, by name."""
    import octavo.bench

    return sorted(m.name for m in pkgutil.iter_modules(octavo.bench.__path__) if not m.name.startswith("_"))


def _help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2
