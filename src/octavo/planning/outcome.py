"""What a simulation found: the times of every request, and how the pool was used on the way. It decides nothing."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PERCENTILES = (50, 90, 99)
_FINE = 200  # buckets of the histogram per factor e: half a percent each


class Sample(NamedTuple):
    """The pool and the queue during one step. Shares are of all slots of the pool.

    held: in block tables. filled: of those, with a computed position. cached: of no table, but still findable.
    """

    time: float
    running: int
    waiting: int
    held: float
    filled: float
    cached: float


class Histogram:
    """Durations by weight, in buckets of half a percent: percentiles of billions of gaps in little memory."""

    def __init__(self) -> None:
        self._weights: dict[int, int] = {}

    def add(self, seconds: float, weight: int = 1) -> None:
        if seconds > 0 and weight:
            bucket = round(math.log(seconds) * _FINE)
            self._weights[bucket] = self._weights.get(bucket, 0) + weight

    def percentiles(self) -> dict[str, float] | None:
        """{"p50": seconds, …, "mean": …}; None while empty."""
        total = sum(self._weights.values())
        if not total:
            return None
        ordered = sorted(self._weights.items())
        result = {}
        for p in PERCENTILES:
            seen = 0
            for bucket, weight in ordered:
                seen += weight
                if 100 * seen >= p * total:
                    result[f"p{p}"] = math.exp(bucket / _FINE)
                    break
        result["mean"] = sum(math.exp(b / _FINE) * w for b, w in ordered) / total
        return result


@dataclass
class Outcome:
    """One policy over one trace. Times in seconds of simulated time; one entry per request in the order of the trace.

    first, end: NaN for refused requests. refused: index -> why. computed_tokens: positions through the model, prompts
    and recomputation included. held_seconds, sequence_seconds: integrals over time, for means.
    """

    policy: str
    num_blocks: int
    block_size: int
    arrival: array[float]
    first: array[float]
    end: array[float]
    outputs: array[int]
    seconds: float = 0.0
    steps: int = 0
    computed_tokens: int = 0
    peak_running: int = 0
    peak_waiting: int = 0
    peak_held: float = 0.0
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    copies: int = 0
    evictions: int = 0
    held_seconds: float = 0.0
    sequence_seconds: float = 0.0
    busy_seconds: float = 0.0
    gaps: Histogram = field(default_factory=Histogram)
    samples: list[Sample] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)
    wall_seconds: float = 0.0

    @property
    def output_tokens(self) -> int:
        return sum(n for n, end in zip(self.outputs, self.end) if not math.isnan(end))

    @property
    def output_rate(self) -> float:
        """Output tokens per second of simulated time."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_running(self) -> float:
        """Sequences in the pool, mean over the time in which anything ran."""
        return self.sequence_seconds / self.busy_seconds if self.busy_seconds else 0.0

    @property
    def mean_held(self) -> float:
        """Share of the pool in block tables, mean over the same time."""
        return self.held_seconds / self.busy_seconds if self.busy_seconds else 0.0

    def filled_share(self) -> float:
        """Of what is held, the share that holds a token, over the samples."""
        held = sum(s.held for s in self.samples)
        return sum(s.filled for s in self.samples) / held if held else 0.0

    @property
    def mean_filled(self) -> float:
        """Share of the whole pool that holds tokens."""
        return self.mean_held * self.filled_share()

    @property
    def peak_filled(self) -> float:
        return max((s.filled for s in self.samples), default=0.0)

    @property
    def mean_cached(self) -> float:
        return sum(s.cached for s in self.samples) / len(self.samples) if self.samples else 0.0

    def pressed(self) -> list[Sample]:
        """Samples in which somebody waited for room: what a full engine looks like."""
        return [s for s in self.samples if s.waiting]

    def latencies(self) -> dict[str, dict[str, float] | None]:
        """ttft: arrival to first token. tpot: mean gap of a request after it. itl: every gap. e2e: arrival to end."""
        served = [i for i in range(len(self.end)) if not math.isnan(self.end[i])]
        ttft = [self.first[i] - self.arrival[i] for i in served]
        whole = [self.end[i] - self.arrival[i] for i in served]
        tpot = [(self.end[i] - self.first[i]) / (self.outputs[i] - 1) for i in served if self.outputs[i] > 1]
        return {
            "ttft": percentiles(ttft),
            "tpot": percentiles(tpot),
            "itl": self.gaps.percentiles(),
            "e2e": percentiles(whole),
        }

    def summary(self) -> dict[str, Any]:
        """Plain values, for tables and JSON."""
        pressed = self.pressed()
        return {
            "policy": self.policy,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "requests": len(self.end),
            "refused": len(self.refused),
            "seconds": self.seconds,
            "output_rate": self.output_rate,
            "total_rate": self.computed_tokens / self.seconds if self.seconds else 0.0,
            "peak_running": self.peak_running,
            "mean_running": self.mean_running,
            "mean_running_pressed": _mean([s.running for s in pressed]),
            "peak_waiting": self.peak_waiting,
            "peak_held": self.peak_held,
            "mean_held": self.mean_held,
            "peak_filled": self.peak_filled,
            "mean_filled": self.mean_filled,
            "mean_filled_pressed": _mean([s.filled for s in pressed]),
            "held_but_empty": self.mean_held - self.mean_filled,
            "mean_cached": self.mean_cached,
            "preemptions": self.preemptions,
            "swaps": self.swaps,
            "recomputed_tokens": self.recomputed_tokens,
            "hit_rate": self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0,
            "copies": self.copies,
            "evictions": self.evictions,
            "steps": self.steps,
            "latency": self.latencies(),
            "wall_seconds": self.wall_seconds,
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """{"p50": …, "p90": …, "p99": …, "mean": …} by the nearest rank; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    result = {f"p{p}": ordered[min(last, math.ceil(p / 100 * len(ordered)) - 1)] for p in PERCENTILES}
    result["mean"] = sum(ordered) / len(ordered)
    return result


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
