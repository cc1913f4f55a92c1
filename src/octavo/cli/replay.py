"""`octavo replay FILE`: run a recording again, decision by decision, and say where it first differs."""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="repeat a recorded run step by step and report the first difference",
        epilog="example:\n  octavo generate 'Hello' --record run.jsonl\n  octavo replay run.jsonl",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every step is the same, 1 at the first difference."""
    from octavo.core.record import replay

    report = replay(args.file)
    print(report)
    return 0 if report.same else 1
