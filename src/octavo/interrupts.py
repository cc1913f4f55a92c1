"""Ctrl-C that waits for a safe moment. Knows nothing of engines."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Uninterrupted:
    """`with Uninterrupted():` Ctrl-C takes effect at the end of the body, so that nothing is left half-way.

    A second Ctrl-C does not wait. Works in the main thread and where Python's own handler is in place (elsewhere it
    does nothing: someone else decides what Ctrl-C means); may be nested, the outermost one counts.
    """

    def __enter__(self) -> None:
        self._pressed = False
        self._installed = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        )
        if self._installed:
            signal.signal(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._pressed:
            signal.default_int_handler(number, frame)
        self._pressed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._pressed and error is None:
            raise KeyboardInterrupt
