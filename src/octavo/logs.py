"""The logger of the engine, set up by `OCTAVO_LOG`.

As a library Octavo prints nothing: its logger "octavo" goes wherever the program's logging sends it. With
`OCTAVO_LOG=info` (or debug, warning, error) in the environment, lines go to stderr as well. At debug: the blocks taken
and freed by each request, and each step (running, waiting, tokens, num_free_gpu_blocks, gpu_cache_usage).
"""

from __future__ import annotations

import logging
import os

from octavo.errors import ConfigError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}

logger = logging.getLogger("octavo")
logger.addHandler(logging.NullHandler())


class _StderrHandler(logging.StreamHandler):
    """Marks the one handler that `setup` adds, so that a second call replaces it."""


def setup(level: str | None = None) -> None:
    """Send the log to stderr from `level` on; None reads OCTAVO_LOG, and an unset or empty one changes nothing.

    Raises ConfigError for a word that is no level. Calling it again only changes the level.
    """
    chosen = (os.environ.get("OCTAVO_LOG", "") if level is None else level).strip().lower()
    if not chosen:
        return
    if chosen not in LEVELS:
        where = "OCTAVO_LOG" if level is None else "log level"
        raise ConfigError(f"{where}={chosen!r}: must be one of {', '.join(LEVELS)}")
    for handler in [h for h in logger.handlers if isinstance(h, _StderrHandler)]:
        logger.removeHandler(handler)
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(LEVELS[chosen])
