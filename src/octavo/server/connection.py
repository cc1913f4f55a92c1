"""uvicorn's HTTP protocol with two limits more: bytes of headers, and the time a request may take to arrive.

Without them a client could send headers without end, or open connections and say nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.settings import ServerSettings
from octavo.server.wire import dumps


def protocol_for(settings: ServerSettings) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=…)`."""

    class LimitedProtocol(HttpToolsProtocol):
        _header_bytes = 0
        _arrival: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._await_request()

        def connection_lost(self, exc: Exception | None) -> None:
            self._request_came()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            idle = self.timeout_keep_alive_task is not None
            super().data_received(data)
            if idle and self._header_bytes and self._arrival is None:
                self._await_request()  # the next request on a kept connection has begun

        def on_message_begin(self) -> None:
            self._header_bytes = 1
            super().on_message_begin()

        def on_url(self, url: bytes) -> None:
            super().on_url(url)
            self._grow(len(url))

        def on_header(self, name: bytes, value: bytes) -> None:
            super().on_header(name, value)
            self._grow(len(name) + len(value) + 4)

        def on_headers_complete(self) -> None:
            self._request_came()
            self._header_bytes = 0
            if not self.transport.is_closing():
                super().on_headers_complete()

        def _grow(self, size: int) -> None:
            self._header_bytes += size
            if self._header_bytes > settings.max_header_bytes and not self.transport.is_closing():
                limit = settings.max_header_bytes
                self._refuse("431 Request Header Fields Too Large", f"headers over {limit} bytes (max_header_bytes)")

        def _await_request(self) -> None:
            self._arrival = self.loop.call_later(settings.receive_seconds, self._too_slow)

        def _request_came(self) -> None:
            if self._arrival is not None:
                self._arrival.cancel()
                self._arrival = None

        def _too_slow(self) -> None:
            self._arrival = None
            if not self.transport.is_closing():
                self._refuse("408 Request Timeout", f"no request within {settings.receive_seconds:g} s")

        def _refuse(self, status: str, message: str) -> None:
            error: dict[str, Any] = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
            body = dumps({"error": error})
            head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
            self.transport.close()

    return LimitedProtocol
