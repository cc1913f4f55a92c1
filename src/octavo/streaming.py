"""`Stream`: one request's answer as an iterator of deltas.

Cumulative outputs come in, differences go out; knows nothing of the engine but how to get the next output and how to
abort. The invariant: for each sample the deltas joined are its final text and ids, and exactly one delta, the last,
has a finish reason.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType

from octavo.outputs import RequestOutput, StreamDelta


class Stream:
    """Iterator of `StreamDelta`. Closing it, leaving its `with`, or dropping it aborts the request.

    next_output() returns the newest cumulative output, or None when a step brought nothing; abort() takes the request
    out of the engine. Neither may refer to the stream itself, or dropping it would have no effect.
    """

    def __init__(self, request_id: str, next_output: Callable[[], RequestOutput | None], abort: Callable[[], None]):
        self.request_id = request_id
        self._next_output = next_output
        self._ready: deque[StreamDelta] = deque()
        self._shown: dict[int, tuple[int, int]] = {}  # sample -> characters and tokens given out
        self._ended: set[int] = set()
        self._over = False
        self._abort = weakref.finalize(self, abort)
        self._abort.atexit = False  # at exit there is nothing left to save

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamDelta:
        while not self._ready:
            if self._over:
                raise StopIteration
            try:
                output = self._next_output()
            except BaseException:
                self.close()
                raise
            if output is not None:
                self._ready.extend(self._difference(output))
                if output.finished:
                    self._over = True
                    self._abort.detach()
        return self._ready.popleft()

    def close(self) -> None:
        """Abort the request if it has not ended; no more deltas come."""
        self._over = True
        self._ready.clear()
        self._abort()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _difference(self, output: RequestOutput) -> list[StreamDelta]:
        deltas = []
        for sample in output.outputs:
            if sample.index in self._ended:
                continue
            characters, tokens = self._shown.get(sample.index, (0, 0))
            text, ids = sample.text[characters:], tuple(sample.token_ids[tokens:])
            if text or ids or sample.finished:
                deltas.append(
                    StreamDelta(self.request_id, sample.index, text, ids, sample.finish_reason, sample.stop_reason)
                )
                self._shown[sample.index] = (len(sample.text), len(sample.token_ids))
            if sample.finished:
                self._ended.add(sample.index)
        return deltas
