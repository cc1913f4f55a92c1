"""`--show-blocks`: looks at the pool after every step, shows it live, and keeps the fullest moment for the end.

At the end all sequences are gone and the tables with them, so what is printed then is the last step in which most
blocks were in use.
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

    def __enter__(self) -> BlockWatch:
        if self._live:
            from rich.console import Console
            from rich.live import Live

            self._display = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._display.start()
        self._llm.watch(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.watch(None)
        if self._display is not None:
            self._display.stop()

    def _look(self) -> None:
        view = self._llm.pool_view()
        if view.block_tables and (self.fullest is None or view.num_used >= self.fullest.num_used):
            self.fullest = view
        now = time.monotonic()
        if self._display is not None and now - self._shown >= REFRESH_S:
            from rich.text import Text

            self._shown = now
            self._display.update(Text("\n".join(show_blocks(view, max_sequences=12))), refresh=True)

    def lines(self) -> list[str]:
        """The fullest moment; a request that ends in the step that began it leaves no table to show."""
        if self.fullest is None:
            return ["no block table outlived its step (every sequence began and ended in one)"]
        return show_blocks(self.fullest)
