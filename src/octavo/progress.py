"""Progress bars: for many prompts and for loading. Only on a terminal; elsewhere every method is free and silent.

Drawn on stderr, so that stdout stays the answer. Knows nothing of what it counts.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class RequestProgress:
    """`with RequestProgress(count, wanted) as bar: bar.finished(); bar.tokens(total)`.

    total: requests to come. show: False switches it off; it is off by itself when stderr is no terminal.
    """

    def __init__(self, total: int, show: bool = True) -> None:
        self._total = total
        self._show = show and total > 1 and sys.stderr.isatty()
        self._bar: Any = None
        self._begin = time.perf_counter()
        self._done = 0
        self._tokens = 0

    def __enter__(self) -> RequestProgress:
        if self._show:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[speed]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("prompts", total=self._total, speed="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def finished(self, output_tokens: int) -> None:
        """One more request is done, with so many output tokens."""
        self._done += 1
        self._tokens += output_tokens
        if self._bar is not None:
            speed = self._tokens / max(1e-9, time.perf_counter() - self._begin)
            self._bar.update(self._task, completed=self._done, speed=f"{speed:.0f} output tok/s")


class LoadProgress:
    """The `on_progress(stage, done, total)` of `Engine.build`, drawn as one bar per stage."""

    def __init__(self, show: bool = True) -> None:
        self._show = show and sys.stderr.isatty()
        self._bar: Any = None
        self._tasks: dict[str, Any] = {}

    def __call__(self, stage: str, done: int, total: int) -> None:
        if not self._show:
            return
        if self._bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
        self._bar.update(self._tasks[stage], completed=done, total=total)

    def close(self) -> None:
        """Remove the bars."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks = {}
