"""`AsyncRequest`: one request as its reader sees it, an async iterator of deltas; and the mail that brings them.

The engine's thread cuts cumulative outputs into deltas and posts them; the event loop delivers. Of a reader that does
not keep up at most `buffer` deltas wait, then they are merged into one for each sample, so what waits is bounded by
the text of the request itself. The invariant: for each sample the deltas joined are its final text, ids and
log-probabilities, and exactly one delta, the last, has a finish reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from octavo.latency import Latencies
from octavo.outputs import Logprob, RequestOutput
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from octavo.text.prompts import Prompt

if TYPE_CHECKING:
    from octavo.async_engine import AsyncEngine


@dataclass(slots=True)
class RequestDelta:
    """What is new in one sample. logprobs[i] belongs to token_ids[i]; None when none were asked for."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def extend(self, later: RequestDelta) -> None:
        """Append what came after this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class Timing:
    """Moments on `time.monotonic()`; None where it did not come to that. tokens: given out, all samples."""

    arrived: float
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    queued_seconds: float | None = None
    tokens: int = 0


@dataclass(slots=True)
class _Shown:
    """How much of a sample has been cut into deltas."""

    characters: int = 0
    tokens: int = 0
    ended: bool = False


@dataclass(slots=True)
class _Inbox:
    """What waits for the reader."""

    deltas: deque[RequestDelta] = field(default_factory=deque)
    over: bool = False
    error: BaseException | None = None
    waiter: asyncio.Future[None] | None = None


class AsyncRequest:
    """Made by `AsyncEngine.submit`. Iterate over it, or await `result()`; `abort()` ends it, in any state.

    `final` is None until the request has ended, then its whole output. Leaving the iteration early does not abort:
    whoever stops reading calls `abort`.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        priority: int,
        cache_salt: str | None,
        arrived: float,
        buffer: int,
        stream: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.priority = priority
        self.cache_salt = cache_salt
        self.final: RequestOutput | None = None
        self.beams: Any = None
        self.timing = Timing(arrived)
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._buffer = buffer
        self._stream = stream
        self._shown: dict[int, _Shown] = {}
        self._inbox = _Inbox()

    # -- the reader's side, on the event loop ----------------------------------------------------------------------

    def abort(self) -> None:
        """End the request; harmless when it has ended. What it had comes as its final output."""
        self._engine.abort(self.request_id)

    async def result(self) -> RequestOutput:
        """The whole output. Raises what ended the engine, if that came first."""
        while await self.next_deltas():
            pass
        assert self.final is not None
        return self.final

    async def next_deltas(self) -> list[RequestDelta]:
        """Everything that waits, at least one delta; [] when the request has ended and all has been read."""
        inbox = self._inbox
        while not inbox.deltas:
            if inbox.error is not None:
                raise inbox.error
            if inbox.over:
                return []
            inbox.waiter = self.loop.create_future()
            try:
                await inbox.waiter
            finally:
                inbox.waiter = None
        deltas = list(inbox.deltas)
        inbox.deltas.clear()
        return deltas

    async def __aiter__(self) -> AsyncIterator[RequestDelta]:
        while deltas := await self.next_deltas():
            for delta in deltas:
                yield delta

    @property
    def num_pending(self) -> int:
        """Deltas that wait for the reader."""
        return len(self._inbox.deltas)

    def deliver(self, deltas: list[RequestDelta], final: RequestOutput | None, error: BaseException | None) -> None:
        """Take mail in. On the event loop."""
        inbox = self._inbox
        inbox.deltas.extend(deltas)
        if len(inbox.deltas) > self._buffer:
            inbox.deltas = deque(merged(inbox.deltas))
        if final is not None:
            self.final, inbox.over = final, True
        inbox.error = error
        if inbox.waiter is not None and not inbox.waiter.done():
            inbox.waiter.set_result(None)

    # -- the engine's side, on its thread --------------------------------------------------------------------------

    def remaining_params(self, now: float) -> SamplingParams | BeamSearchParams | PoolingParams:
        """The parameters with what is left of the deadline; the time since the arrival counts."""
        if self.params.deadline_ms is None:
            return self.params
        left = self.params.deadline_ms - (now - self.timing.arrived) * 1000
        return replace(self.params, deadline_ms=max(left, 1e-3))

    def gained(self, output: RequestOutput, now: float, latencies: Latencies) -> list[RequestDelta]:
        """What the output has that was not shown; [] while the reader wants everything at the end."""
        self._measure(output, now, latencies)
        if not self._stream and not output.finished:
            return []
        deltas = []
        for sample in output.outputs:
            shown = self._shown.get(sample.index)
            if shown is None:
                shown = self._shown[sample.index] = _Shown()
            if shown.ended:
                continue
            text, ids = sample.text[shown.characters :], sample.token_ids[shown.tokens :]
            if not text and not ids and not sample.finished:
                continue
            logprobs = None if sample.logprobs is None else sample.logprobs[shown.tokens :]
            deltas.append(RequestDelta(sample.index, text, ids, logprobs, sample.finish_reason, sample.stop_reason))
            shown.characters, shown.tokens, shown.ended = len(sample.text), len(sample.token_ids), sample.finished
        return deltas

    def _measure(self, output: RequestOutput, now: float, latencies: Latencies) -> None:
        timing = self.timing
        tokens = sum(len(sample.token_ids) for sample in output.outputs)
        gained = tokens - timing.tokens
        if gained > 0:
            if timing.last_token is None:
                timing.first_token = now
                latencies.first_token.observe(now - timing.arrived)
            else:
                # Samples advance side by side: the time between two tokens of one of them is that of a step.
                width = max(1, len(output.outputs))
                each = max(1.0, gained / width)
                latencies.between_tokens.observe((now - timing.last_token) / each, gained)
            timing.last_token = now
            timing.tokens = tokens
        if output.finished:
            timing.finished = now
            timing.queued_seconds = output.metrics.get("queued_s")
            latencies.end_to_end.observe(now - timing.arrived)
            if timing.queued_seconds is not None:
                latencies.queue.observe(timing.queued_seconds)
            latencies.prompt_tokens += len(output.prompt_token_ids)
            latencies.cached_tokens += output.num_cached_tokens
            for sample in output.outputs:
                reason = sample.finish_reason or "none"
                latencies.finished[reason] = latencies.finished.get(reason, 0) + 1


def merged(deltas: deque[RequestDelta]) -> list[RequestDelta]:
    """One delta for each sample, in the order of their first."""
    by_sample: dict[int, RequestDelta] = {}
    for delta in deltas:
        first = by_sample.get(delta.index)
        if first is None:
            by_sample[delta.index] = delta
        else:
            first.extend(delta)
    return list(by_sample.values())


Letter = tuple[AsyncRequest, list[RequestDelta], RequestOutput | None, BaseException | None]


class Mail:
    """Collects on the engine's thread what a step brought; `send` hands it to each event loop in one call."""

    def __init__(self) -> None:
        self._letters: dict[asyncio.AbstractEventLoop, list[Letter]] = {}

    def add(self, request: AsyncRequest, deltas: list[RequestDelta], final: RequestOutput | None) -> None:
        self._letters.setdefault(request.loop, []).append((request, deltas, final, None))

    def fail(self, request: AsyncRequest, error: BaseException) -> None:
        """The request ends without an output."""
        self._letters.setdefault(request.loop, []).append((request, [], None, error))

    def send(self) -> None:
        if not self._letters:
            return
        letters, self._letters = self._letters, {}
        for loop, ours in letters.items():
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                loop.call_soon_threadsafe(_deliver, ours)


def _deliver(letters: list[Letter]) -> None:
    for request, deltas, final, error in letters:
        request.deliver(deltas, final, error)
