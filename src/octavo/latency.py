"""Histograms of latencies, in seconds: how long requests waited, when text came, how long everything took.

Plain counts in fixed buckets; a writer (the engine's thread) observes, a reader takes a snapshot at any time. Knows no
exporter and no clock. The invariant: a histogram never forgets, so a scraper can take differences.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True, slots=True)
class HistogramView:
    """bounds[i] is the upper end of bucket i (inclusive); counts has one more entry, for everything above."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float  # seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound as text, observations up to it), as Prometheus wants them, "+Inf" last."""
        pairs, seen = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            seen += count
            pairs.append((bound, seen))
        return pairs


class Histogram:
    """Observations in seconds. One writer at a time."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self._counts = [0] * (len(self.bounds) + 1)
        self._total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """The same value `times` times (tokens that came together)."""
        self._counts[bisect_left(self.bounds, seconds)] += times
        self._total += seconds * times

    def view(self) -> HistogramView:
        return HistogramView(self.bounds, tuple(self._counts), self._total)


@dataclass(slots=True)
class Latencies:
    """What the requests of one engine met. finished: finish reason of a sample -> how many."""

    queue: Histogram = field(default_factory=lambda: Histogram(LONG))
    first_token: Histogram = field(default_factory=lambda: Histogram(LONG))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(SHORT))
    end_to_end: Histogram = field(default_factory=lambda: Histogram(LONG))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
