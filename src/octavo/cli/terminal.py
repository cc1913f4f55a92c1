"""What a command knows of the terminal: styles that vanish when output goes to a file or NO_COLOR is set."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def styled(stream: TextIO) -> bool:
    """Whether escape codes may be written to `stream`."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def dim(text: str, stream: TextIO | None = None) -> str:
    """Less prominent, where that can be shown."""
    return f"\x1b[2m{text}\x1b[0m" if styled(stream or sys.stdout) else text


def bold(text: str, stream: TextIO | None = None) -> str:
    """More prominent, where that can be shown."""
    return f"\x1b[1m{text}\x1b[0m" if styled(stream or sys.stdout) else text


def notice(text: str) -> None:
    """A remark on stderr that is not part of the answer."""
    print(dim(text, sys.stderr), file=sys.stderr)
