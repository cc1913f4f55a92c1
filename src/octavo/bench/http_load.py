"""A thin HTTP client for load: sends one streaming completion, notes when each event came, reads as little as it can.

Written on bare sockets so that the client costs a small part of what it measures. Knows only enough of HTTP/1.1 for a
server that answers with chunks.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from octavo.bench.workloads import Item


@dataclass(slots=True)
class Sent:
    """One request as its client saw it. Times in seconds since it was sent; tokens from the usage of the answer."""

    status: int = 0
    events: list[float] = field(default_factory=list)  # when events with text came
    end: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def good(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def gaps(self) -> list[float]:
        """Between two events."""
        return [b - a for a, b in zip(self.events, self.events[1:])]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a server listens."""

    host: str
    port: int
    api_key: str | None = None

    @classmethod
    def of(cls, url: str, api_key: str | None = None) -> Target:
        parts = urlsplit(url)
        return cls(parts.hostname or "127.0.0.1", parts.port or 80, api_key)

    def head(self, path: str, length: int) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"{key}Content-Length: {length}\r\nConnection: close\r\n\r\n"
        ).encode()


def completion(item: Item, **more: Any) -> dict[str, Any]:
    """The body of a streaming completion that produces exactly `item.output` tokens, greedily."""
    return {
        "prompt_token_ids": list(item.token_ids),
        "max_tokens": item.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


async def send(target: Target, body: dict[str, Any], path: str = "/v1/completions") -> Sent:
    """One request on a connection of its own. Never raises for what the server does: see `Sent.error`."""
    sent = Sent()
    data = json.dumps(body).encode()
    begin = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(target.head(path, len(data)) + data)
            await _read(reader, sent, begin, bool(body.get("stream")))
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, ValueError) as error:
        sent.error = sent.error or f"{type(error).__name__}: {error}"
    sent.end = time.perf_counter() - begin
    return sent


async def _read(reader: asyncio.StreamReader, sent: Sent, begin: float, stream: bool) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    sent.status = int(head[9:12])
    tail = b""
    while data := await reader.read(1 << 16):
        if stream and b'"text"' in data:
            sent.events.append(time.perf_counter() - begin)
        tail = (tail + data)[-8192:] if stream else tail + data
    if sent.status != 200:
        sent.error = tail.decode("utf-8", "replace")[-300:]
        return
    if b'"error":{' in tail:
        sent.error = "an error in the stream: " + tail.decode("utf-8", "replace")[-300:]
    elif stream and b"data: [DONE]" not in tail:
        sent.error = "the stream ended early"
    at = tail.rfind(b'"usage":{"prompt_tokens"')
    if at >= 0:
        usage = json.JSONDecoder().raw_decode(tail[at + 8 :].decode("utf-8", "replace"))[0]
        sent.output_tokens, sent.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]


async def all_at_once(target: Target, items: Sequence[Item], **more: Any) -> tuple[float, list[Sent]]:
    """Every request now; seconds until the last has ended."""
    begin = time.perf_counter()
    sent = await asyncio.gather(*(send(target, completion(item, **more)) for item in items))
    return time.perf_counter() - begin, list(sent)


async def poisson(target: Target, items: Sequence[Item], rate: float, seed: int) -> tuple[float, list[Sent]]:
    """Requests at random moments, `rate` a second on average: exponential gaps, the same for the same seed."""
    stream = random.Random(seed)
    tasks = []
    begin = time.perf_counter()
    due = begin
    for item in items:
        due += stream.expovariate(rate)
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.ensure_future(send(target, completion(item))))
    sent = await asyncio.gather(*tasks)
    return time.perf_counter() - begin, list(sent)


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
