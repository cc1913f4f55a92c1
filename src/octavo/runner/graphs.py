"""Recorded decode steps: which batch sizes there are, when one is recorded, and when recording stops.

A step of B sequences that draw one token each runs as a step of the next larger *bucket*; the rows beyond B belong to
nobody. For each (bucket, variant) all kernels are recorded once and then queued with one call, which takes the host a
fraction of queueing them one by one. Nothing is recorded at start: a shape runs kernel by kernel the first time (which
also compiles what must be compiled, and that cannot be recorded) and is recorded the second time it comes, until the
time or the memory set aside is spent. What is not recorded runs kernel by kernel, with the same result.

It knows neither models nor batches: whoever asks brings a function that queues the step and reads and writes the same
memory every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

from octavo.devices import Graph
from octavo.logs import logger

SECONDS = 20.0  # for all recordings of an engine together
MARGIN_BYTES = 256 << 20  # recording stops when less is free on the device
ALLOWANCE = 8 << 20  # bytes set aside per graph, beside the scratch memory that all of them share


class GraphDevice(Protocol):
    """What recording needs of a device."""

    @property
    def has_graphs(self) -> bool: ...

    def capture(self, run: Callable[[], object], pool: Any = None) -> Graph: ...

    def graph_pool(self) -> Any: ...

    def available_bytes(self) -> int: ...


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes to record: 1, 2, 4, then every 8th up to 128, every 16th up to 512, every 64th; `most` included."""
    sizes = [s for s in (1, 2, 4, *range(8, 129, 8), *range(144, 513, 16), *range(576, most + 64, 64)) if s < most]
    return (*sizes, most)


@dataclass(slots=True)
class GraphCounters:
    """Steps by how they ran, and what was recorded."""

    replayed: int = 0
    eager: int = 0
    recorded: int = 0
    seconds: float = 0.0
    stopped: str = ""  # why nothing more is recorded
    by_bucket: dict[int, int] = field(default_factory=dict)  # bucket -> replays


class GraphStore:
    """Graphs by shape. device: one with graphs; clock: seconds, for the time limit."""

    def __init__(
        self,
        device: GraphDevice,
        most: int,
        *,
        seconds: float = SECONDS,
        margin_bytes: int = MARGIN_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.buckets = buckets_up_to(most)
        self.counters = GraphCounters()
        self._device = device
        self._seconds = seconds
        self._margin = margin_bytes
        self._clock = clock
        self._pool: Any = None
        self._graphs: dict[tuple[int, Hashable], Graph] = {}
        self._seen: set[tuple[int, Hashable]] = set()

    def bucket(self, rows: int) -> int | None:
        """The size a batch of so many rows is padded to; None if it is larger than any."""
        return next((size for size in self.buckets if size >= rows), None)

    def run(self, bucket: int, variant: Hashable, queue: Callable[[], object]) -> None:
        """Queue one step: by its graph, or by calling `queue`, which may be recorded on the way."""
        key = (bucket, variant)
        graph = self._graphs.get(key)
        if graph is None and key in self._seen and not self.counters.stopped:
            graph = self._record(key, queue)
        if graph is None:
            self._seen.add(key)
            self.counters.eager += 1
            queue()
            return
        self.counters.replayed += 1
        self.counters.by_bucket[bucket] = self.counters.by_bucket.get(bucket, 0) + 1
        graph.replay()

    def forget(self) -> None:
        """The memory that the graphs read or write has been replaced: record anew."""
        self._graphs.clear()

    def _record(self, key: tuple[int, Hashable], queue: Callable[[], object]) -> Graph | None:
        counters = self.counters
        if counters.seconds >= self._seconds:
            self._stop(f"{counters.seconds:.1f} s were spent on recording, {self._seconds:g} are the limit")
            return None
        if (free := self._device.available_bytes()) < self._margin:
            self._stop(f"{free >> 20} MiB are free on the device, {self._margin >> 20} are kept")
            return None
        begin = self._clock()
        try:
            if self._pool is None:
                self._pool = self._device.graph_pool()
            graph = self._device.capture(queue, self._pool)
        except RuntimeError as error:
            self._stop(f"a step cannot be recorded ({error})")
            return None
        counters.seconds += self._clock() - begin
        counters.recorded += 1
        self._graphs[key] = graph
        return graph

    def _stop(self, why: str) -> None:
        self.counters.stopped = why
        logger.warning("no more steps are recorded as graphs: %s; other batch sizes run kernel by kernel", why)
