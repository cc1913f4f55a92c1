"""The user's cache directory, and writing into it so that a reader never sees half a file.

`OCTAVO_CACHE` names it outright; else `$XDG_CACHE_HOME/octavo`; else `~/.cache/octavo`.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def cache_dir() -> Path:
    """The directory (not yet created)."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "octavo"
    return Path.home() / ".cache" / "octavo"


def write_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a temporary file beside `target`, which is then renamed over it. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_leftovers(target: Path) -> None:
    """Half-written files of runs that were killed: older than an hour, so that no writer of today is disturbed."""
    for path in target.parent.glob(f".{target.name}.*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()
