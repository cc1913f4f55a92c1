"""The command line: finds the subcommand, runs it, and turns errors into one clear line and an exit code.

Exit codes: 0 done, 2 bad input (a setting, a prompt, a model name), 1 anything else, 130 Ctrl-C.
OCTAVO_DEBUG in the environment shows tracebacks. NO_COLOR is honoured.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence

from octavo.cli import (
    bench,
    chat,
    doctor,
    generate,
    info,
    plan,
    quantize,
    replay,
    serve,
    simulate,
    top,
    version,
    view,
)
from octavo.errors import ConfigError, OctavoError, RequestError

DESCRIPTION = """\
Octavo: a PagedAttention inference engine you can read, trust and watch.

examples:
  octavo generate "The capital of France is" --temperature 0 --show-blocks
  octavo generate "Once upon a time" --n 4 --seed 1 --max-tokens 64
  octavo chat --model path/to/model
  octavo serve --port 8000
  octavo info gemma-3-270m
"""


def build_parser(full_bench: bool = True) -> argparse.ArgumentParser:
    """The whole parser. full_bench: import the benchmarks too (only `octavo bench` needs their options)."""
    parser = argparse.ArgumentParser(
        prog="octavo", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command")
    for module in (generate, chat, serve, info, plan, quantize, simulate, replay, view, doctor, top):
        module.add_parser(subparsers)
    bench.add_parser(subparsers, full=full_bench)
    version.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = build_parser(full_bench="bench" in arguments[:1])
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        from octavo import logs

        logs.setup()
        # A step makes thousands of short-lived tuples; this process is ours, so collect garbage less often.
        gc.set_threshold(50_000, 20, 100)
        code: int = args.run(args) or 0
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone: not an error of ours; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("OCTAVO_DEBUG"):
            raise
        print(f"octavo: {_describe(error)}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, RequestError)) else 1


def _describe(error: Exception) -> str:
    """One line: the message for errors raised on purpose, the kind as well for others."""
    message = " ".join(str(error).split())
    if isinstance(error, (ConfigError, RequestError)):
        return message
    if isinstance(error, OctavoError):
        return f"internal error: {message} (a bug in Octavo; OCTAVO_DEBUG=1 shows where)"
    if isinstance(error, OSError):
        return message
    return f"{type(error).__name__}: {message} (OCTAVO_DEBUG=1 shows where)"
