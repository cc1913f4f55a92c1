"""The engine without an engine: the real scheduler and pool, on a trace, in the time that a cost model gives each step.

    arrivals -> Scheduler.schedule -> StepPlan -> CostModel.seconds -> clock -> Scheduler.update -> …

What is simulated is time; what is decided is decided by `Scheduler` itself (through `RestingScheduler`, which decides
the same and spends nothing on sequences about which nothing is to be decided). Requests that arrive during a step join
the next one, as in the engine. Outputs have the lengths that the trace says.

The module knows no devices and no models: blocks, positions and seconds only. One run is one `Simulation`.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from heapq import heappop, heappush
from zlib import crc32

from octavo.core.kv_layout import KVLayout
from octavo.core.resting import RestingScheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.core.step import Drawn, StepPlan, StepResult
from octavo.errors import RequestError
from octavo.planning.cost_model import CostModel, Work, WorkCounter
from octavo.planning.outcome import Outcome, Sample
from octavo.planning.trace import Trace
from octavo.sampling_params import SamplingParams

MOST_SAMPLES = 200
_OWN = 0x40000000  # token ids from here on are of one request only
_NEVER = float("inf")


class Simulation:
    """One trace under one policy.

    on_progress(finished requests, simulated seconds) is called now and then. rest=False runs every sequence through
    the scheduler in every step: the same outcome, slowly (for tests).
    """

    def __init__(
        self,
        trace: Trace,
        settings: SchedulerSettings,
        layout: KVLayout,
        model: CostModel,
        *,
        name: str = "",
        on_progress: Callable[[int, float], None] | None = None,
        rest: bool = True,
    ) -> None:
        self.trace = trace
        self.model = model
        self.scheduler = RestingScheduler(settings, layout, self._script, rest=rest)
        self._counter = WorkCounter(layout)
        self._caching = settings.enable_prefix_caching
        self._on_progress = on_progress
        nothing = array("d", [float("nan")]) * len(trace)
        self.outcome = Outcome(
            name,
            settings.num_blocks,
            layout.block_size,
            arrival=nothing[:],
            first=nothing[:],
            end=nothing[:],
            outputs=array("q", [r.output_tokens for r in trace.requests]),
        )
        self.now = 0.0
        self._independent = [i for i, r in enumerate(trace.requests) if r.after is None]
        self._next = 0  # in `_independent`
        self._followers: dict[int, list[int]] = {}
        for index, request in enumerate(trace.requests):
            if request.after is not None:
                self._followers.setdefault(request.after, []).append(index)
        self._due: list[tuple[float, int]] = []  # followers whose turn is known
        self._params: dict[int, SamplingParams] = {}
        self._interrupted: dict[int, float] = {}  # seq_id -> time of its last token, while it gets none
        self._every = 1  # a sample in so many steps
        self._sampled = 0  # the step sampled last
        self._ended = 0

    def run(self) -> Outcome:
        """Until everything has ended."""
        scheduler, outcome = self.scheduler, self.outcome
        begin = time.perf_counter()
        while True:
            while (at := self._next_arrival()) <= self.now:
                self._arrive()
            if not scheduler.has_unfinished:
                if at == _NEVER:
                    break
                self.now = at
                continue
            self._step()
            if (quiet := scheduler.quiet_steps()) is not None:
                self._pass_quiet(quiet)
        outcome.wall_seconds = time.perf_counter() - begin
        self._take_counters()
        return outcome

    # -- arrivals ----------------------------------------------------------------------------------------------------

    def _next_arrival(self) -> float:
        at = self.trace.requests[self._independent[self._next]].arrival if self._more() else _NEVER
        return min(at, self._due[0][0]) if self._due else at

    def _more(self) -> bool:
        return self._next < len(self._independent)

    def _arrive(self) -> None:
        """Hand the next request over; what the door refuses is noted, and what would follow it never comes."""
        at = self._next_arrival()
        if self._due and self._due[0][0] == at:
            index = heappop(self._due)[1]
        else:
            index = self._independent[self._next]
            self._next += 1
        given = self.trace.requests[index]
        self.outcome.arrival[index] = at
        params = self._params.get(given.output_tokens)
        if params is None:
            params = SamplingParams(temperature=0.0, max_tokens=given.output_tokens, ignore_eos=True)
            self._params[given.output_tokens] = params
        request = Request(
            str(index), self._prompt(index), params, arrival=at, number=index, seed=index, max_len=given.total
        )
        try:
            if given.total > self.scheduler.settings.max_model_len:
                limit = self.scheduler.settings.max_model_len
                raise RequestError(f"{given.total} tokens exceed max_model_len={limit}")
            self.scheduler.add(request)
        except RequestError as error:
            self.outcome.refused[index] = str(error)
            self._ended += 1
            return
        self.outcome.prompt_tokens += given.prompt_tokens
        self.outcome.peak_waiting = max(self.outcome.peak_waiting, len(self.scheduler.waiting))

    def _prompt(self, index: int) -> list[int]:
        """Token ids: equal runs are equal ids. Without a prefix cache nobody looks at them."""
        given = self.trace.requests[index]
        if not self._caching:
            return [1] * given.prompt_tokens
        if not given.runs:
            return [_OWN + index] * given.prompt_tokens
        tokens: list[int] = []
        for name, count in given.runs:
            tokens += named_tokens(name, 0, count)
        return tokens

    def _script(self, request: Request, first: int, end: int) -> list[int]:
        name = self.trace.requests[request.number].output_name
        if name is None or not self._caching:
            return [_OWN + request.number] * (end - first)
        return named_tokens(name, first, end)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        """One step of the scheduler, with whoever is awake."""
        scheduler, begin = self.scheduler, self.now
        plan = scheduler.schedule(begin)
        resting = scheduler.num_resting
        reads = scheduler.resting_reads() if resting else ()
        seconds = self.model.seconds(self._counter.plan(plan, resting, reads))
        self.now = begin + seconds
        self._account(seconds, 1)
        self.outcome.gaps.add(seconds, resting)
        if scheduler.counters.steps >= self._sampled + self._every:
            self._sample(begin)
        for seq in scheduler.stalled:
            self._interrupted.setdefault(seq.seq_id, begin)
        scheduler.update(self._answer(plan, begin), self.now)
        for request in scheduler.take_ended():
            self._end(request)

    def _answer(self, plan: StepPlan, begin: float) -> StepResult:
        """The tokens that the awake sequences draw, and how long each has waited for it."""
        drawn: dict[int, Drawn] = {}
        gaps = self.outcome.gaps
        for item in plan.scheduled:
            for seq_id in item.sample_ids:
                seq = self.scheduler.sequence(seq_id)
                assert seq is not None
                at = seq.num_output
                if at:
                    gaps.add(self.now - self._interrupted.pop(seq_id, begin))
                drawn[seq_id] = Drawn(tuple(self._script(seq.request, at, at + 1)))
        return StepResult(plan.step_id, drawn)

    def _pass_quiet(self, first: int) -> None:
        """Steps in which nobody is awake, until something is to be decided or somebody arrives."""
        scheduler, counter = self.scheduler, self._counter
        seconds_of, add_gap = self.model.seconds, self.outcome.gaps.add
        resting, arrival, now = scheduler.num_resting, self._next_arrival(), self.now
        quiet: int | None = first
        reads = counter.resting(scheduler.resting_reads(1))
        growth = counter.resting(scheduler.resting_reads(2)) - reads
        while quiet is not None and arrival > now:
            begin, steps = now, 0
            while steps < quiet and arrival > now:
                seconds = seconds_of(Work(resting, resting, reads, 0))
                add_gap(seconds, resting)
                now += seconds
                reads += growth
                steps += 1
            if steps:
                scheduler.skip(steps)
                self._account(now - begin, steps)
            if arrival <= now or not scheduler.tend():  # what is due may be only to take blocks
                break
            seconds = seconds_of(Work(resting, resting, reads, 0))
            add_gap(seconds, resting)
            now += seconds
            reads += growth
            self._account(seconds, 1)
            if scheduler.counters.steps >= self._sampled + self._every:
                self._sample(now)
            quiet = scheduler.quiet_steps()
        self.now = now

    def _end(self, request: Request) -> None:
        index, outcome = request.number, self.outcome
        assert request.first_token_at is not None
        outcome.first[index] = request.first_token_at
        outcome.end[index] = self.now
        outcome.cached_tokens += request.num_cached_tokens
        for follower in self._followers.get(index, ()):
            heappush(self._due, (self.now + self.trace.requests[follower].arrival, follower))
        request.sequences = []  # a circle less for the garbage collector
        self._ended += 1
        if self._on_progress is not None and self._ended % 64 == 0:
            self._on_progress(self._ended, self.now)

    # -- measures ----------------------------------------------------------------------------------------------------

    def _account(self, seconds: float, steps: int) -> None:
        if not steps:
            return
        outcome, pool = self.outcome, self.scheduler.memory.pool
        held = pool.num_used / pool.num_blocks
        outcome.held_seconds += held * seconds
        outcome.sequence_seconds += self.scheduler.counters.live * seconds
        outcome.busy_seconds += seconds

    def _sample(self, at: float) -> None:
        scheduler = self.scheduler
        pool, size = scheduler.memory.pool, scheduler.memory.layout.block_size
        slots = pool.num_blocks * size
        tokens = blocks = 0
        scheduler.sync()
        for request in scheduler.running:
            for seq in request.sequences:
                ahead = seq.num_computed + scheduler.is_resting(seq)
                for table in seq.tables:
                    tokens += max(0, ahead - table.first_live * size)
                    blocks += table.num_live
        filled = tokens - (blocks - pool.num_used) * size  # a block in several tables holds its tokens once
        self.outcome.samples.append(
            Sample(
                at,
                len(scheduler.running),
                len(scheduler.waiting),
                pool.num_used / pool.num_blocks,
                filled / slots,
                pool.num_cached / pool.num_blocks,
            )
        )
        self._sampled = scheduler.counters.steps
        if len(self.outcome.samples) >= 2 * MOST_SAMPLES:  # keep every second one, and go on twice as coarsely
            del self.outcome.samples[1::2]
            self._every *= 2

    def _take_counters(self) -> None:
        outcome, memory, counters = self.outcome, self.scheduler.memory, self.scheduler.counters
        outcome.seconds = self.now
        outcome.steps, outcome.computed_tokens = counters.steps, counters.computed_tokens
        outcome.peak_running, outcome.preemptions = counters.peak_running, counters.preemptions
        outcome.swaps, outcome.recomputed_tokens = counters.swaps, counters.recomputed_tokens
        outcome.copies = memory.num_copies
        outcome.peak_held = memory.pool.peak_used / memory.pool.num_blocks
        outcome.evictions = memory.cache.counters.evictions if memory.cache is not None else 0


def named_tokens(name: str, first: int, end: int) -> list[int]:
    """Tokens first..end-1 of the text called `name`: the same for the same name, in every process."""
    base = crc32(name.encode()) % _OWN
    return list(range(base + first, base + end))
