"""Turning requests away before they cost anything: 429 when too many wait, with the numbers and when to come back.

The time to come back is an estimate: what waits, divided by how fast requests have been finishing lately.
"""

from __future__ import annotations

import math
import time
from collections import deque

from octavo.async_engine import AsyncEngine
from octavo.server.errors import ApiError
from octavo.server.state import ServerState

WINDOW = 30.0  # seconds that "lately" means


class FinishRate:
    """Requests finished per second, over the last half minute."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=4096)

    def finished(self, now: float | None = None) -> None:
        self._times.append(time.monotonic() if now is None else now)

    def per_second(self, now: float | None = None) -> float:
        now = time.monotonic() if now is None else now
        while self._times and now - self._times[0] > WINDOW:
            self._times.popleft()
        if len(self._times) < 2:
            return 0.0
        return len(self._times) / max(1.0, now - self._times[0])


def check_room(engine: AsyncEngine, state: ServerState, rate: FinishRate, count: int) -> None:
    """Raise 429 when `count` more requests would make the queue too long."""
    waiting, limit = engine.num_waiting, state.settings.max_waiting
    if waiting + count <= limit:
        return
    state.turned_away("queue")
    speed = rate.per_second()
    wait = min(60, max(1, math.ceil(waiting / speed))) if speed else 5
    raise ApiError(
        429,
        f"{waiting} requests are waiting and {count} more would exceed max_waiting={limit}; try again in {wait} s",
        code="queue_full",
        headers={"Retry-After": str(wait)},
        details={"waiting": waiting, "running": engine.num_live - min(waiting, engine.num_live), "limit": limit},
    )


def missed_deadline(engine: AsyncEngine, state: ServerState, deadline_ms: float | None) -> ApiError:
    """503 for a request that waited until its deadline had passed and never ran."""
    state.turned_away("deadline")
    waiting = engine.num_waiting
    return ApiError(
        503,
        f"the deadline of {deadline_ms:g} ms passed while the request was waiting ({waiting} others wait); "
        "allow more time, or try again later",
        param="deadline_ms",
        code="deadline",
        headers={"Retry-After": "5"},
        details={"waiting": waiting},
    )
