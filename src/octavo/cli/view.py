"""`octavo view`: the block map of a run that is over, as a page to scrub through.

Replays a recording (`record=`, `--record`) through the scheduler; no model is loaded. The page holds everything in one
file, which is either written (`--html`) or handed to a browser from a port of this machine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.terminal import notice
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.inspect.block_details import TextOf
    from octavo.llm import LLM

EPILOG = """\
examples:
  octavo view --demo                                  a run without a model, at http://127.0.0.1:8010/
  octavo generate "Once" --n 4 --record run.jsonl     record any run …
  octavo view run.jsonl                               … and look at it
  octavo view run.jsonl --html run.html --show-tokens --model gemma-3-270m
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "view",
        help="the block map of a recorded run, in the browser",
        description="Show every block of a recorded run, step by step, in the browser.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a recording (of --record)")
    parser.add_argument("--demo", action="store_true", help="a run without a model instead of a file")
    parser.add_argument("--html", metavar="OUT", help="write one HTML file that needs nothing else, and end")
    parser.add_argument("--show-tokens", action="store_true", help="put the text of the tokens into the page")
    parser.add_argument("--model", "-m", metavar="NAME", help="with --show-tokens: whose tokenizer reads the tokens")
    parser.add_argument("--max-frames", type=int, default=None, metavar="N", help="moments to keep (1500)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8010, help="port to listen on, 0: any (8010)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the page; write it or serve it until Ctrl-C."""
    if args.demo == (args.file is not None):
        raise ConfigError("octavo view: name a recording, or give --demo (one of the two)")
    if args.model is not None and not (args.show_tokens and args.file):
        raise ConfigError("--model: only needed to read the tokens of a file; give --show-tokens too, or leave it out")
    if args.max_frames is not None and args.max_frames < 2:
        raise ConfigError(f"--max-frames {args.max_frames}: must be at least 2")
    if args.html is not None:
        check_writable(args.html)
    page = _demo_page(args) if args.demo else recording_page(args.file, _text_of(args), args.max_frames)
    if args.html is not None:
        write_page(args.html, page)
        return 0
    from octavo.cli.view_server import serve

    return serve(page, args.host, args.port, args.open)


def recording_page(path: str, text_of: TextOf | None = None, max_frames: int | None = None) -> str:
    """The page of a recording. Raises ConfigError for a file that is none."""
    from octavo.inspect.recorded_run import MOST_FRAMES, recorded_run
    from octavo.server.page import page_with_run

    return page_with_run(recorded_run(path, text_of=text_of, max_frames=max_frames or MOST_FRAMES))


def check_writable(path: str) -> None:
    """Before the work that leads to a page is done. Raises ConfigError; what is there stays as it is."""
    file = Path(path).resolve()  # of a link to nothing, what it would make
    try:
        if file.is_dir() or not file.exists():  # pipes and the like are not opened for a trial
            file.open("a").close()
            file.unlink()
        elif file.is_file():
            file.open("a").close()
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: cannot be written ({error.strerror}); name a writable file")


def write_page(path: str, page: str) -> None:
    """Write it and say so. Raises ConfigError where that cannot be."""
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error
    notice(f"{path}: {len(page.encode()) / 1024:.0f} KiB, opens in any browser")


class RunPage:
    """`--view OUT` of a command that runs the engine: records the run, and writes its page when the engine has closed.

    Without --view it does nothing.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        if args.show_tokens and args.view is None:
            raise ConfigError("--show-tokens: no effect without --view; leave it out, or name a file with --view")
        if args.view is not None:
            check_writable(args.view)
        self._args = args
        self._text_of: TextOf | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RunPage:
        if self._args.view is not None and self._args.record is None:
            self._folder = tempfile.TemporaryDirectory()
            self._args.record = str(Path(self._folder.name, "run.jsonl"))
        return self

    def read_with(self, llm: LLM) -> None:
        """The engine that runs, whose tokenizer reads the tokens."""
        if self._args.show_tokens:
            from octavo.inspect.block_details import text_of_tokens

            self._text_of = text_of_tokens(llm.get_tokenizer())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._args.view is not None and kind is None:
                write_page(self._args.view, recording_page(self._args.record, self._text_of))
        finally:
            if self._folder is not None:
                self._folder.cleanup()


def _demo_page(args: argparse.Namespace) -> str:
    from octavo.cli.view_demo import demo_text, record_demo

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "demo.jsonl")
        record_demo(path)
        return recording_page(str(path), demo_text, args.max_frames)


def _text_of(args: argparse.Namespace) -> TextOf | None:
    if not args.show_tokens:
        return None
    from octavo.inspect.block_details import text_of_tokens

    if args.model is None:
        return text_of_tokens(None)  # the ids themselves
    from octavo.models.load import load_tokenizer

    return text_of_tokens(load_tokenizer(args.model))
