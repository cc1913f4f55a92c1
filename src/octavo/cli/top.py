"""`octavo top [URL]`: a server's block pool in the terminal, refreshed until q is pressed.

Where there is no terminal (a pipe, a log) it prints plain text: one picture with --once, else one every interval.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from octavo.cli.remote import DEFAULT_URL, ServerUnreachable, add_key_option, fetch_json, server_url
from octavo.errors import ConfigError

REPORT = "/blocks/report?samples=64&finished=0"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        help="a server's block pool, live: usage, block tables, queue, rates",
        epilog="example:\n  octavo top http://127.0.0.1:8000 --interval 0.5      q ends it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", nargs="?", metavar="URL", help=f"default: {DEFAULT_URL}")
    parser.add_argument("--once", action="store_true", help="one picture, then end")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between pictures (1)")
    add_key_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show pictures until q, Ctrl-C, or (--once) the first."""
    if not args.interval > 0:
        raise ConfigError(f"--interval {args.interval}: must be more than 0 seconds")
    base = server_url(args.url)

    def picture(size: tuple[int, int]) -> list[str]:
        from octavo.inspect.top import top_lines

        report = fetch_json(base, REPORT, args.api_key)
        return top_lines(report, width=size[0], height=size[1])

    if args.once:
        print("\n".join(picture((1000, 1000) if not sys.stdout.isatty() else _size())))
        return 0
    if sys.stdout.isatty():
        _live(picture, args.interval)
    else:
        _plain(picture, args.interval)
    return 0


def _size() -> tuple[int, int]:
    columns, rows = shutil.get_terminal_size()
    return max(40, columns), max(10, rows - 1)


def _plain(picture: Callable[[tuple[int, int]], list[str]], interval: float) -> None:
    while True:
        print("\n".join(picture((1000, 1000))), end="\n\n", flush=True)
        time.sleep(interval)


def _live(picture: Callable[[tuple[int, int]], list[str]], interval: float) -> None:
    """The picture in place of the one before, on the second screen. A server that goes away is waited for."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    lines = picture(_size())  # the first must succeed: a wrong address or key is an error, not a blank screen
    console = Console(highlight=False)
    with Live(console=console, auto_refresh=False, screen=True) as live, _keys() as pressed:
        while True:
            live.update(Text("\n".join([*lines, "q: quit"]), no_wrap=True, overflow="crop"), refresh=True)
            if "q" in pressed(interval):
                return
            try:
                lines = picture(_size())
            except ServerUnreachable as error:
                lines = [str(error)]


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for keys and returns those pressed; line mode is restored afterwards."""
    try:
        import select
        import termios
        import tty
    except ImportError:  # no such terminals on this system
        yield _sleep
        return
    try:
        saved = termios.tcgetattr(sys.stdin)
    except (termios.error, OSError, ValueError):  # standard input is no terminal
        yield _sleep
        return

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select([sys.stdin], [], [], seconds)
        return sys.stdin.read(1) if ready else ""

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, saved)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""
