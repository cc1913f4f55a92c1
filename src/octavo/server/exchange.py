"""`Exchange`: one HTTP request and the engine requests behind it.

Submits them within the limits, gives their outputs or their stream, and sees to it that nothing is left in the engine
when the client goes, the reader stalls or anything fails. Knows no format of any route: a stream is written by a
`StreamFormat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol, TextIO

from fastapi import Request
from fastapi.responses import Response

from octavo.async_engine import AsyncEngine, Params
from octavo.async_request import AsyncRequest, RequestDelta
from octavo.logs import logger
from octavo.outputs import RequestOutput
from octavo.server.errors import ApiError, as_api_error
from octavo.server.limits import Receive, Scope, Send
from octavo.server.security import Caller
from octavo.server.shedding import check_room, missed_deadline
from octavo.server.state import state_of
from octavo.text.prompts import Prompt


class StreamFormat(Protocol):
    """Turns what the engine gives into the bytes of one route's stream. `place`: which of the prompts."""

    def opening(self) -> bytes: ...

    def deltas(self, place: int, deltas: list[RequestDelta]) -> bytes: ...

    def closing(self, outputs: list[RequestOutput]) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...


class Exchange:
    """Made in a route, used once."""

    def __init__(self, http: Request, engine: AsyncEngine, caller: Caller, route: str) -> None:
        self.http = http
        self.engine = engine
        self.caller = caller
        self.route = route
        self.state = state_of(http)
        self.arrived: float = http.scope.get("octavo.arrived", time.monotonic())
        self.requests: list[AsyncRequest] = []
        self._log: RequestLog = http.app.state.request_log
        self._rate = http.app.state.finish_rate

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        *,
        model: str | None,
        priority: int = 0,
        cache_salt: str | None,
        stream: bool,
    ) -> None:
        """Take all in, or raise: 429 when the queue is full, `RequestError` at the door.

        model: the name that was asked for; that of an adapter makes the requests run with it.
        """
        limit = self.state.settings.max_prompts
        if len(prompts) > limit:
            message = f"{len(prompts)} prompts in one request; at most {limit} are taken (max_prompts)"
            raise ApiError(400, message, param="prompt", code="too_many_prompts")
        check_room(self.engine, self.state, self._rate, len(prompts))
        lora = self.state.adapter_of(model)
        self.requests = await self.engine.submit_all(
            [replace(prompt, lora=lora) for prompt in prompts],
            params,
            priority=priority,
            cache_salt=self.caller.cache_salt(cache_salt),
            arrived=self.arrived,
            stream=stream,
        )

    async def results(self) -> list[RequestOutput]:
        """All outputs. A client that leaves meanwhile aborts its requests."""
        work = asyncio.ensure_future(self._collect())
        gone = asyncio.ensure_future(_until_gone(self.http.receive))
        status = 500
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                status = 499
                raise ApiError(499, "the client has gone")
            outputs = work.result()
            self._check(outputs)
            status = 200
            return outputs
        except ApiError as error:
            status = error.status
            raise
        finally:
            gone.cancel()
            work.cancel()
            self.finish(status)

    async def _collect(self) -> list[RequestOutput]:
        return [await request.result() for request in self.requests]

    def _check(self, outputs: list[RequestOutput]) -> None:
        """An output that is no answer becomes an error."""
        for request, output in zip(self.requests, outputs, strict=True):
            if error := self.failure_of(request, output):
                raise error

    def failure_of(self, request: AsyncRequest, output: RequestOutput) -> ApiError | None:
        """None when the output is an answer, if only a part of one (a deadline that cut it)."""
        reasons = {sample.finish_reason for sample in output.outputs}
        if "error" in reasons:
            cause = next(s.stop_reason for s in output.outputs if s.finish_reason == "error")
            if str(cause).startswith("the grammar"):  # it outgrew its limits, or fits no text of this model
                return ApiError(400, f"structured_outputs: {cause}", param="structured_outputs", code="grammar_failed")
            return ApiError(500, f"drawing a token failed: {cause}", code="sampling_failed")
        if reasons == {"deadline"} and not request.timing.tokens:
            return missed_deadline(self.engine, self.state, getattr(request.params, "deadline_ms", None))
        if "abort" in reasons:
            message = "the request was ended by the server, which is shutting down"
            return ApiError(503, message, code="aborted", headers={"Retry-After": "10"})
        return None

    def stream(self, form: StreamFormat) -> Response:
        """The response that streams these requests."""
        return EventStream(self, form)

    def finish(self, status: int) -> None:
        """Nothing is left in the engine; the log gets its line. Harmless when called again."""
        requests, self.requests = self.requests, []
        for request in requests:
            if request.final is None:
                request.abort()
            else:
                self._rate.finished()
        if requests:
            self._log.write(self, requests, status)


class EventStream(Response):
    """Server-sent events of an exchange. Ends early when the client goes or takes nothing for `stall_seconds`."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, form: StreamFormat) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._exchange = exchange
        self._form = form
        self._sending_since: float | None = None
        self._writers = 0  # of several prompts, each with its own; every write is a whole number of events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._write_all(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        stalled = asyncio.ensure_future(self._until_stalled())
        status = 499
        try:
            await asyncio.wait((work, gone, stalled), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                status = work.result()
            elif stalled.done():
                # Returning with the answer unfinished makes uvicorn close the connection.
                logger.warning("a reader took nothing for %g s; its request ends", self._stall_seconds)
        finally:
            for task in (work, gone, stalled):
                task.cancel()
            self._exchange.finish(status)

    @property
    def _stall_seconds(self) -> float:
        return self._exchange.state.settings.stall_seconds

    async def _until_stalled(self) -> None:
        while self._sending_since is None or time.monotonic() - self._sending_since < self._stall_seconds:
            await asyncio.sleep(min(1.0, self._stall_seconds / 4))

    async def _write_all(self, send: Send) -> int:
        """Returns the status for the log."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        send = self._exchange.http.scope.get("octavo.send", send)
        status, last = 200, b""
        try:
            await self._write(send, self._form.opening())
            requests = self._exchange.requests
            if len(requests) == 1:
                outputs = [await self._one(send, 0, requests[0])]
            else:
                outputs = list(await asyncio.gather(*(self._one(send, i, r) for i, r in enumerate(requests))))
            last = self._form.closing(outputs)
        except Exception as error:
            said = as_api_error(error)
            status, last = said.status, self._form.failure(said)
        await self._write(send, last, more=False)
        return status

    async def _one(self, send: Send, place: int, request: AsyncRequest) -> RequestOutput:
        while deltas := await request.next_deltas():
            if request.final is not None and (error := self._exchange.failure_of(request, request.final)):
                raise error
            if data := self._form.deltas(place, deltas):
                await self._write(send, data)
        assert request.final is not None
        return request.final

    async def _write(self, send: Send, data: bytes, more: bool = True) -> None:
        self._writers += 1
        self._sending_since = self._sending_since or time.monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self._writers -= 1
        self._sending_since = time.monotonic() if self._writers else None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class RequestLog:
    """One JSON line per finished request: who, what, how long, how it ended; no text, no token, no key."""

    def __init__(self, target: str | None) -> None:
        self._file: TextIO | None = None
        if target is not None:
            self._file = sys.stderr if target == "-" else open(target, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, exchange: Exchange, requests: Sequence[AsyncRequest], status: int) -> None:
        if self._file is None:
            return
        for request in requests:
            with contextlib.suppress(ValueError):  # closed meanwhile
                self._file.write(json.dumps(_line(exchange, request, status)) + "\n")

    def close(self) -> None:
        if self._file is not None and self._file is not sys.stderr:
            self._file.close()


def _line(exchange: Exchange, request: AsyncRequest, status: int) -> dict[str, Any]:
    timing, final = request.timing, request.final
    now = time.monotonic()

    def seconds(at: float | None) -> float | None:
        return None if at is None else round(at - timing.arrived, 6)

    return {
        "time": round(time.time(), 3),
        "request_id": request.request_id,
        "route": exchange.route,
        "status": status,
        "key": exchange.caller.key,
        "prompt_tokens": len(request.prompt.token_ids or ()),
        "cached_tokens": final.num_cached_tokens if final is not None else None,
        "output_tokens": timing.tokens,
        "finish_reasons": [s.finish_reason for s in final.outputs] if final is not None else None,
        "queued_s": timing.queued_seconds,
        "first_token_s": seconds(timing.first_token),
        "total_s": seconds(timing.finished or now),
    }
