"""`Journal`: what an engine remembers of its own run, so that the past can be looked at without having been watched.

Three bounded records, each O(1) per step or per finished request: samples of the state over time, reports of the
latest finished requests, and sums over all of them. It reads the scheduler, changes nothing and knows no text.

Samples come in two rings: `recent` (every `interval` seconds, the last few minutes) and `whole` (the whole run: when
it is full every second sample is dropped and the distance doubles). A step that is not due for a sample costs one
comparison.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from octavo.core.reasons import report_text
from octavo.core.sequence import CacheReport, Request

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler

#: Block sizes whose losses are counted for the finished sequences, whatever size the pool has.
COMPARED_BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
RECENT_SAMPLES = 600
WHOLE_SAMPLES = 512
FINISHED_KEPT = 256


class Sample(NamedTuple):
    """State of one moment; from `steps` on counters since the start. `time`: seconds on the engine's clock."""

    time: float
    used: int
    shared: int
    cached: int
    free: int
    running: int
    waiting: int
    sequences: int
    steps: int
    computed: int
    generated: int
    queried_tokens: int
    hit_tokens: int
    preemptions: int
    copies: int
    evictions: int
    finished: int


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What is kept of a request that ended. Times are on the engine's clock, None for what it never reached."""

    request_id: str
    prompt_tokens: int
    output_tokens: tuple[int, ...]  # per sequence that was answered
    finish_reasons: tuple[str, ...]
    cached_tokens: int
    cache_report: CacheReport | None
    preemptions: int
    arrival: float
    admitted_at: float | None
    first_token_at: float | None
    finished_at: float | None

    def __str__(self) -> str:
        return f"{self.request_id}: {report_text(self.cache_report, self.prompt_tokens)}"


@dataclass(slots=True)
class Totals:
    """Sums over all finished requests that had begun to write (so no embeddings).

    tail_slots[size]: slots that the last blocks of the finished sequences would have left empty with blocks of that
    size; table_entries[size]: blocks their tables would have had. Both for one group that sees everything.
    """

    requests: int = 0
    sequences: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    longest: int = 0  # prompt plus output of one sequence
    tokens: int = 0  # prompt plus output, summed over the sequences
    cut_by_length: int = 0
    preempted_requests: int = 0
    wait_seconds: float = 0.0  # from arrival to the first admission
    tail_slots: dict[int, int] = field(default_factory=lambda: dict.fromkeys(COMPARED_BLOCK_SIZES, 0))
    table_entries: dict[int, int] = field(default_factory=lambda: dict.fromkeys(COMPARED_BLOCK_SIZES, 0))


class Journal:
    """`stepped` after every step, `ended` for every request that has ended. interval: seconds between samples."""

    def __init__(self, *, interval: float = 0.1, finished: int = FINISHED_KEPT) -> None:
        self.interval = interval
        self.recent: deque[Sample] = deque(maxlen=RECENT_SAMPLES)
        self.whole: list[Sample] = []
        self.whole_interval = interval / 8
        self.totals = Totals()
        self.generated = 0  # tokens drawn for all sequences since the start
        self.samples_taken = 0
        self._finished: dict[str, FinishedRequest] = {}  # oldest first
        self._kept = finished
        self._due_recent = self._due_whole = float("-inf")
        self._due = float("-inf")

    # -- samples ---------------------------------------------------------------------------------------------------

    def stepped(self, scheduler: Scheduler, now: float) -> None:
        """A step is over. Takes a sample if one is due."""
        if now < self._due:
            return
        sample = self.look(scheduler, now)
        self.samples_taken += 1
        if now >= self._due_recent:
            self.recent.append(sample)
            self._due_recent = now + self.interval
        if now >= self._due_whole:
            self._extend_whole(sample)
        self._due = min(self._due_recent, self._due_whole)

    def _extend_whole(self, sample: Sample) -> None:
        if len(self.whole) >= WHOLE_SAMPLES:
            del self.whole[1::2]
            self.whole_interval *= 2
        self.whole.append(sample)
        self._due_whole = sample.time + self.whole_interval

    def look(self, scheduler: Scheduler, now: float) -> Sample:
        """The state of this moment. O(1)."""
        memory, pool, counters = scheduler.memory, scheduler.memory.pool, scheduler.counters
        cache = memory.cache.counters if memory.cache is not None else None
        return Sample(
            now,
            pool.num_used,
            pool.num_shared,
            pool.num_cached,
            pool.num_free,
            len(scheduler.running),
            len(scheduler.waiting),
            counters.live,
            counters.steps,
            counters.computed_tokens,
            self.generated,
            cache.queried_tokens if cache else 0,
            cache.hit_tokens if cache else 0,
            counters.preemptions,
            memory.num_copies,
            cache.evictions if cache else 0,
            counters.finished,
        )

    # -- finished requests -----------------------------------------------------------------------------------------

    def ended(self, request: Request) -> FinishedRequest:
        """Keep the report of a request that has ended and add it to the totals; the oldest kept one is forgotten."""
        answered = [s for s in request.sequences if s.finish_reason != "beam lost"]
        record = FinishedRequest(
            request.request_id,
            request.prompt_len,
            tuple(s.num_output for s in answered),
            tuple(s.finish_reason or "" for s in answered),
            request.num_cached_tokens,
            request.cache_report,
            request.num_preemptions,
            request.arrival,
            request.admitted_at,
            request.first_token_at,
            request.finished_at,
        )
        self._finished.pop(record.request_id, None)
        self._finished[record.request_id] = record
        if len(self._finished) > self._kept:
            del self._finished[next(iter(self._finished))]
        if record.admitted_at is not None and request.pooling is None:  # an embedding writes nothing
            self._add(record)
        return record

    def _add(self, record: FinishedRequest) -> None:
        totals = self.totals
        totals.requests += 1
        totals.prompt_tokens += record.prompt_tokens
        totals.preempted_requests += record.preemptions > 0
        assert record.admitted_at is not None
        totals.wait_seconds += record.admitted_at - record.arrival
        for output, reason in zip(record.output_tokens, record.finish_reasons):
            length = record.prompt_tokens + output
            totals.sequences += 1
            totals.output_tokens += output
            totals.tokens += length
            totals.longest = max(totals.longest, length)
            totals.cut_by_length += reason == "length"
            for size in COMPARED_BLOCK_SIZES:
                totals.tail_slots[size] += -length % size
                totals.table_entries[size] += -(-length // size)

    def find(self, request_id: str) -> FinishedRequest | None:
        """The report of a finished request, if it is still kept."""
        return self._finished.get(request_id)

    def latest(self, count: int = FINISHED_KEPT) -> list[FinishedRequest]:
        """Newest first."""
        return list(reversed(self._finished.values()))[:count]
