"""A command for the engine's thread: a function, and where its result goes."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.engine import Engine


class Command:
    """A function for the engine's thread and where its result goes. function None: end the thread."""

    __slots__ = ("function", "future")

    def __init__(self, function: Callable[[Engine], Any] | None) -> None:
        self.function = function
        self.future: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def run(self, engine: Engine) -> None:
        assert self.function is not None
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(engine))
        except Exception as error:
            self.future.set_exception(error)

    def refuse(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)
