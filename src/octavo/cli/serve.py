"""`octavo serve [MODEL]`: the OpenAI-compatible server. Reads flags, environment and file; the server does the rest."""

from __future__ import annotations

import argparse
from typing import Any

from octavo.cli.options import add_engine_options, byte_count, engine_settings
from octavo.errors import ConfigError

EPILOG = """\
Every option can also be set as OCTAVO_<NAME> in the environment (OCTAVO_PORT=9000, OCTAVO_API_KEYS=first-key,next-key)
or in a TOML file (--config). A flag wins over the environment, the environment over the file, the file over the
default; what is in force is printed once at the start. One name is special: OCTAVO_DEBUG=blocks is --debug, and
OCTAVO_DEBUG with any value shows tracebacks of errors.

examples:
  octavo serve                                            the embedded model, for this machine only
  octavo serve path/to/model --max-model-len 4096 --port 9000
  octavo serve --host 0.0.0.0 --api-key-file keys.txt     for others: with keys, one a line
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
"""
LISTS = {"api_keys", "served_model_name", "cors_origins"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="the OpenAI-compatible server",
        usage="octavo serve [MODEL] [options]",
        description="Serve one model over HTTP. It listens on 127.0.0.1 unless told otherwise.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("served", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    _listening(parser)
    _security(parser)
    _load(parser)
    _watching(parser)
    add_engine_options(parser)
    parser.set_defaults(run=run)


def _listening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("serving")
    group.add_argument("--host", metavar="ADDRESS", help="0.0.0.0: other machines too (127.0.0.1)")
    group.add_argument("--port", type=int, metavar="N", help="0: any free one (8000)")
    group.add_argument(
        "--served-model-name", action="append", metavar="NAME", help="what requests call the model (may be repeated)"
    )
    group.add_argument(
        "--chat-template", metavar="FILE", help="Jinja file instead of the model's template; `plain`: for base models"
    )
    group.add_argument(
        "--drain-seconds", type=float, metavar="S", help="at the end, what runs may go on for so long (30)"
    )


def _security(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("who may come in")
    group.add_argument(
        "--api-key", dest="api_keys", action="append", metavar="KEY",
        help="seen in process lists; --api-key-file or OCTAVO_API_KEY is not (may be repeated)",
    )  # fmt: skip
    group.add_argument("--api-key-file", metavar="FILE", help="one key a line")
    group.add_argument(
        "--cors-origin", dest="cors_origins", action="append", metavar="ORIGIN",
        help='pages of this origin may call; "*": all (none)',
    )  # fmt: skip


def _load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--max-waiting", type=int, metavar="N", help="requests that may wait; then 429 (512)")
    group.add_argument("--max-connections", type=int, metavar="N", help="then 503 (2048)")
    group.add_argument("--max-n", type=int, metavar="N", help="samples of one prompt (32)")
    group.add_argument("--max-prompts", type=int, metavar="N", help="prompts in one request (256)")
    group.add_argument("--max-body-bytes", type=byte_count, metavar="BYTES", help="of a request (4MiB)")
    group.add_argument("--max-header-bytes", type=byte_count, metavar="BYTES", help="of a request (32KiB)")
    group.add_argument("--max-schema-bytes", type=byte_count, metavar="BYTES", help="of a structured output (64KiB)")
    group.add_argument("--max-json-depth", type=int, metavar="N", help="of a request (64)")
    group.add_argument("--receive-seconds", type=float, metavar="S", help="a request must be in by then (30)")
    group.add_argument("--stall-seconds", type=float, metavar="S", help="a reader that takes nothing is cut off (60)")
    group.add_argument("--default-deadline-ms", type=float, metavar="MS", help="of requests without one (none)")


def _watching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watching")
    group.add_argument("--access-log", action=argparse.BooleanOptionalAction, help="a line per HTTP request (off)")
    group.add_argument("--request-log", metavar="FILE", help="a JSON line per finished request; - is stderr (off)")
    group.add_argument("--blocks", action=argparse.BooleanOptionalAction, help="the block map at /blocks (on)")
    group.add_argument("--show-tokens", action=argparse.BooleanOptionalAction, help="with the texts in it (off)")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; the exit code is the server's."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"octavo serve needs more packages ({error}): pip install 'octavo[server]'") from None
    from octavo.server.run import serve
    from octavo.server.settings import ServerSettings, load

    flags = engine_settings(args)
    if "max_queue" in flags:
        raise ConfigError("--max-queue: the server turns requests away itself; use --max-waiting")
    if args.served is not None:
        if "model" in flags:
            raise ConfigError(f"two models, {args.served} and --model {flags['model']}; give one")
        flags["model"] = args.served
    for name in ServerSettings.__dataclass_fields__:
        value = getattr(args, name, None)
        if value is not None:
            flags[name] = tuple(value) if name in LISTS else value
    loaded = load(flags, file=args.config)
    _logging(loaded.server.access_log)
    return serve(loaded)


def _logging(access_log: bool) -> None:
    """An access log that was asked for is shown, whatever OCTAVO_LOG says; so are failures."""
    import os

    from octavo import logs

    if "OCTAVO_LOG" not in os.environ:
        logs.setup("info" if access_log else "warning")
