"""The outermost layer: reads a request whole, within its limits of bytes, depth and time, before anything looks at it.

An ASGI middleware without a framework, so that a disconnect reaches the route and a stream passes untouched. Also the
place where a request's arrival is noted, its status counted and its access line written.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from octavo.logs import logger
from octavo.server.errors import ApiError, respond
from octavo.server.settings import ServerSettings

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]

_STRINGS_AND_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*(?:"|\Z)|[\[\]{}]', re.DOTALL)


class Limits:
    """Wraps the app. count(route, status) is called once for each request that was answered."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, count: Callable[[str, int], None]) -> None:
        self._app = app
        self._settings = settings
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["octavo.arrived"] = time.monotonic()
        scope["octavo.send"] = send  # for streams: their chunks need not pass every layer above
        status = [0]

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start":
                status[0] = message["status"]
            await send(message)

        try:
            try:
                body = await self._read(scope, receive)
            except ApiError as error:
                error.headers["Connection"] = "close"  # what is left of the request would be read as the next one
                await respond(error)(scope, receive, noting)
                return
            except _GoneError:
                return
            await self._app(scope, _replay(body, receive), noting)
        finally:
            self._note(scope, status[0])

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        """The whole body, or `ApiError`."""
        limit = self._settings.max_body_bytes
        _check_headers(scope, self._settings)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and len(announced) < 20 and int(announced) > limit:
            raise _too_large(int(announced), limit)
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.receive_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limit:
                        raise _too_large(size, limit)
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            seconds = self._settings.receive_seconds
            raise ApiError(408, f"the request did not come in whole within {seconds:g} s (receive_seconds)") from None
        body = b"".join(parts)
        depth = nesting(body, self._settings.max_json_depth)
        if depth > self._settings.max_json_depth:
            message_ = f"the JSON is nested more than {self._settings.max_json_depth} deep (max_json_depth)"
            raise ApiError(400, message_, code="too_deep")
        return body

    def _note(self, scope: Scope, status: int) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._count(route, status)
        if self._settings.access_log:
            client = scope.get("client")
            logger.info(
                '%s key=%s "%s %s" %s %.1fms',
                client[0] if client else "-",
                scope.get("octavo.key", "-"),
                scope["method"],
                scope["path"].encode("unicode_escape").decode(),
                status or "gone",
                (time.monotonic() - scope["octavo.arrived"]) * 1000,
            )


class _GoneError(Exception):
    """The client left before its request was complete."""


def nesting(body: bytes, enough: int) -> int:
    """How deep brackets are nested in a JSON text, or 0 when there are too few of them to matter. Linear in time."""
    if body.count(b"[") + body.count(b"{") <= enough:
        return 0
    depth = deepest = 0
    for match in _STRINGS_AND_BRACKETS.finditer(body):
        first = match[0][0]
        if first in b"[{":
            depth += 1
            if depth > deepest:
                deepest = depth
                if deepest > enough:
                    break
        elif first in b"]}":
            depth -= 1
    return deepest


def _check_headers(scope: Scope, settings: ServerSettings) -> None:
    size = sum(len(name) + len(value) + 4 for name, value in scope["headers"]) + len(scope.get("raw_path") or b"")
    if size > settings.max_header_bytes:
        raise ApiError(
            431, f"the headers have {size} bytes; at most {settings.max_header_bytes} are taken (max_header_bytes)"
        )


def _too_large(size: int, limit: int) -> ApiError:
    return ApiError(413, f"the body has {size} bytes or more; at most {limit} are taken (max_body_bytes)")


def _replay(body: bytes, receive: Receive) -> Receive:
    """First the body, then what comes on the connection: the disconnect."""
    given = [False]

    async def replayed() -> Message:
        if not given[0]:
            given[0] = True
            return {"type": "http.request", "body": body, "more_body": False}
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return message

    return replayed
