"""`octavo doctor [URL | FILE]`: what is wrong with a run, with evidence and one remedy for each finding."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from octavo.cli.remote import DEFAULT_URL, add_key_option, fetch_json, server_url
from octavo.cli.terminal import bold
from octavo.errors import ConfigError

EPILOG = """\
examples:
  octavo doctor                              a server on this machine
  octavo doctor https://host:8000 --api-key KEY
  octavo generate --prompts-file prompts.txt --record run.jsonl && octavo doctor run.jsonl
  octavo doctor --demo preemption-thrash     a prepared trouble; --demo list names them

exit code: 0 no finding but information, 1 a warning or an error, 2 nothing to look at
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what is wrong with a run, and one remedy for each finding",
        description="Look at the settings, counters, past and hardware of a running server, of a recorded run "
        "(--record FILE), or of a saved /blocks/report.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", nargs="?", metavar="URL | FILE", help=f"default: {DEFAULT_URL}")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument(
        "--demo",
        nargs="?",
        const="list",
        metavar="NAME",
        help="run a prepared trouble instead; `all` runs all; without a name (or `list`) it names them",
    )
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; 1 if a finding is more than information."""
    if args.demo is not None:
        if args.target is not None:
            raise ConfigError(f"--demo makes its own run; leave {args.target!r} out")
        return _demo(args.demo, args.json)
    return _show(load_report(args.target, args.api_key), args.json)


def load_report(target: str | None, api_key: str | None) -> dict[str, Any]:
    """A report from a server, a recording, or a file with a report. Raises ConfigError."""
    from octavo.inspect.report import VERSION, recording_report

    if target is not None and "://" not in target:
        path = Path(target)
        if path.is_file():
            report = _saved(path)
            return report if report is not None else recording_report(path)
        if path.suffix in (".json", ".jsonl") or "/" in target:
            raise ConfigError(f"{target}: no such file; give a recording (record=FILE) or the URL of a server")
    report = fetch_json(server_url(target), "/blocks/report", api_key)
    if not isinstance(report, dict) or report.get("version") != VERSION:
        raise ConfigError(f"{target}: the server's report is of another version; use the `octavo` that runs it")
    return report


def _saved(path: Path) -> dict[str, Any] | None:
    """A report that was saved as JSON; None if the file is something else (a recording has several lines)."""
    try:
        with path.open(encoding="utf-8") as file:
            first = json.loads(file.readline() if path.stat().st_size > 1 << 20 else file.read())
    except (OSError, ValueError):
        return None
    return first if isinstance(first, dict) and "stats" in first and "overall" in first else None


def _show(report: dict[str, Any], as_json: bool) -> int:
    from octavo.inspect.doctor import diagnose, diagnosis_lines

    diagnosis = diagnose(report)
    if as_json:
        print(json.dumps(diagnosis.as_json(), ensure_ascii=False))
    else:
        titles = {f"{f.severity}: {f.title}  [{f.code}]" for f in diagnosis.findings}
        for line in diagnosis_lines(diagnosis):
            print(bold(line) if line in titles else line)
    return int(any(f.severity != "info" for f in diagnosis.findings))


def _demo(name: str, as_json: bool) -> int:
    from octavo.bench.troubles import TROUBLES, record_trouble
    from octavo.inspect.report import recording_report

    if name == "list":
        for trouble in TROUBLES.values():
            print(f"{trouble.name:22s} {trouble.about}")
        return 0
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        for chosen in TROUBLES if name == "all" else [name]:
            path = Path(folder) / f"{chosen}.jsonl"
            trouble = record_trouble(chosen, path)
            if not as_json:
                print(bold(f"── {trouble.name}: {trouble.about}"))
            code |= _show(recording_report(path), as_json)
            if not as_json and name == "all":
                print()
    return code
