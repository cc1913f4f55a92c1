"""Who waits, in which order.

The key of a request is `(arrival + priority * aging, number)`: more urgent (smaller priority) first, then first come,
first served. Waiting `aging` seconds is worth one level of priority, so an urgent request passes everything that came
recently, yet no request is starved by an endless stream of later, more urgent ones. The key never changes: a
preempted request keeps its place, in front of everything that came later.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from octavo.core.sequence import Request


class WaitingQueue:
    """A heap of waiting requests. A removed request leaves a dead ticket behind, dropped when it surfaces."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], int, Request]] = []
        self._tickets: dict[str, int] = {}  # request_id -> its live ticket
        self._preempted: set[str] = set()  # those that ran before: they do not count against `max_queue`
        self._issued = 0

    @property
    def num_new(self) -> int:
        """Waiting requests that have never run."""
        return len(self._tickets) - len(self._preempted)

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._tickets

    def __iter__(self) -> Iterator[Request]:
        """In queue order; O(n log n), for views and tests."""
        return (r for _, ticket, r in sorted(self._heap) if self._tickets.get(r.request_id) == ticket)

    def push(self, request: Request) -> None:
        if request.request_id in self._tickets:
            return
        self._issued += 1
        self._tickets[request.request_id] = self._issued
        if request.num_preemptions:
            self._preempted.add(request.request_id)
        heappush(self._heap, (request.key, self._issued, request))

    def peek(self) -> Request | None:
        heap = self._heap
        while heap and self._tickets.get(heap[0][2].request_id) != heap[0][1]:
            heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("the waiting queue is empty")
        heappop(self._heap)
        del self._tickets[request.request_id]
        self._preempted.discard(request.request_id)
        return request

    def remove(self, request: Request) -> bool:
        """Take a request out from anywhere; False if it is not waiting."""
        if self._tickets.pop(request.request_id, None) is None:
            return False
        self._preempted.discard(request.request_id)
        if len(self._heap) > 64 + 2 * len(self._tickets):  # mostly dead tickets
            self._heap = [item for item in self._heap if self._tickets.get(item[2].request_id) == item[1]]
            heapify(self._heap)
        return True
