"""`--show-blocks`: looks at the pool in every step, shows it live, and keeps the fullest moment for the end.

At the end all sequences are gone and the tables with them, so what is printed then is the last step in which most
blocks were in use, as it was before the sequences that end in it gave their blocks back.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from octavo.inspect.terminal import show_blocks

if TYPE_CHECKING:
    from octavo.llm import LLM

REFRESH_S = 0.1


class BlockWatch:
    """`with BlockWatch(llm, live=True) as watch: …; watch.lines()`."""

    def __init__(self, llm: LLM, *, live: bool) -> None:
        self._llm = llm
        self._live = live and sys.stderr.isatty()
        self._display: Any = None
        self._shown = 0.0
        self.fullest: Any = None
        self._latest: Any = None

    def __enter__(self) -> BlockWatch:
        if self._live:
            from rich.console import Console
            from rich.live import Live

            self._display = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._display.start()
        self._llm.watch(self._look, before_update=self._keep_fullest)
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.watch(None)
        if self._display is not None:
            self._display.stop()

    def _keep_fullest(self) -> Any:
        view = self._llm.pool_view()
        if view.block_tables and (self.fullest is None or _size(view) >= _size(self.fullest)):
            self.fullest = view
        return view

    def _look(self) -> None:
        view = self._latest = self._keep_fullest()
        now = time.monotonic()
        if self._display is not None and now - self._shown >= REFRESH_S:
            from rich.text import Text

            self._shown = now
            self._display.update(Text("\n".join(show_blocks(view, max_sequences=12))), refresh=True)

    def lines(self) -> list[str]:
        """The fullest moment, with the counters of the whole run."""
        if self.fullest is None:
            return ["no block was used (no step was run)"]
        return show_blocks(self.fullest, totals=self._latest)


def _size(view: Any) -> tuple[int, int]:
    """Of two moments with as many blocks the one with more tables is the fuller: its sequences share."""
    return view.num_used, len(view.block_tables)
