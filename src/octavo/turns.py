"""`Turns`: a lock that threads get in the order in which they come, and that its holder may take again.

Fair, because a thread that steps an engine lets go of it only to ask for it again: with a plain lock nobody else would
get in before it is done. Reentrant, because a garbage collection may drop a stream, which aborts its request, in any
line of a thread, also in those below.
"""

from __future__ import annotations

import threading
from types import TracebackType


class Turns:
    """A context manager. Whoever waits holds the door, so that the one who leaves the room cannot slip in again."""

    def __init__(self) -> None:
        self._door = threading.RLock()
        self._room = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._owner != me:
            with self._door:
                self._room.acquire()
        else:
            self._room.acquire()
        self._owner = me
        self._depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
        self._room.release()
