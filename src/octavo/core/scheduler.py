"""The scheduler: `schedule()` makes a plan, `update()` takes what came of it. It knows no tensors and no text.

One rule covers prefill, chunks, prefix hits, decode and recomputation: every running sequence catches `num_computed`
up to `num_tokens`, under one token budget. A round decides in this order: sequences that need one token (decode),
prompt chunks of running requests, then admissions. Decisions are collected first and committed last, so a victim of
preemption can be taken out of the round again.

Who may rely on what: requests run oldest key first; only newer requests are preempted for older ones, so the oldest
always advances; what was admitted finishes, because at the door it was counted to fit the pool alone.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.admission import Admission, Verdict, seats_of
from octavo.core.beam import BeamSearch
from octavo.core.kv_layout import KVLayout
from octavo.core.memory import KVMemory
from octavo.core.preemption import choose_victim, prefers_swap, recompute_tokens
from octavo.core.queue import WaitingQueue
from octavo.core.sequence import Request, RequestState, Sequence
from octavo.core.settings import SchedulerSettings
from octavo.core.step import (
    LAST_SAMPLED,
    Drawn,
    ScheduledSequence,
    SequenceStart,
    StepPlan,
    StepResult,
    TableUpdate,
    TokenLogprobs,
)
from octavo.errors import InternalError

logger = logging.getLogger("octavo.core")


class SequenceNews(NamedTuple):
    """Tokens that a sequence gained in an update. `error`: the runner could not draw for it, the request ends."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    error: str | None = None


@dataclass(slots=True)
class Counters:
    """Since the start."""

    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    deadlines: int = 0
    finished: int = 0
    peak_running: int = 0


@dataclass(slots=True)
class _Round:
    """Decisions of one `schedule()` that are not committed yet."""

    budget: int
    decided: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    swept: bool = False  # windows were swept


@dataclass(slots=True)
class _Flight:
    """A plan that has not reported back."""

    plan: StepPlan
    work: list[tuple[Sequence, int, int]]  # sequence, computed up to, epoch


class Scheduler:
    """Queues, the token budget, and the life of sequences. Memory is `KVMemory`'s business."""

    def __init__(self, settings: SchedulerSettings, layout: KVLayout) -> None:
        self.settings = settings
        self.memory = KVMemory(layout, settings)
        self.admission = Admission(self.memory, settings)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # sorted by key
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.counters = Counters()
        self._sequences: dict[int, Sequence] = {}
        self._next_seq_id = 0
        self._step = 0
        self._now = 0.0
        self._flights: deque[_Flight] = deque()
        self._ends: list[int] = []
        self._has_windows = any(g.window is not None for g in layout.groups)
        self._deadlines: dict[str, Request] = {}
        self._ended: list[Request] = []

    # -- arrivals and departures -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in, or refuse it with the numbers (`RequestError`). Nothing changes when it is refused."""
        self.admission.check_at_the_door(request, self.requests, len(self.waiting))
        request.key = (request.arrival + request.priority * self.settings.priority_aging_s, request.number)
        beam = request.beam
        if beam is not None:
            request.beam_state = BeamSearch(beam, request.end_ids, request.max_len - request.prompt_len)
        for index in range(1 if beam else request.width):
            self._new_sequence(request, index, list(request.prompt_token_ids))
        self.requests[request.request_id] = request
        self.waiting.push(request)
        if request.deadline is not None:
            self._deadlines[request.request_id] = request

    def _new_sequence(self, request: Request, index: int, token_ids: list[int]) -> Sequence:
        seq = Sequence(self._next_seq_id, request, index, token_ids)
        self._next_seq_id += 1
        self._sequences[seq.seq_id] = seq
        request.sequences.append(seq)
        return seq

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """End a request, or one of its samples, in whatever state it is; False if there is nothing (left) to end.

        A beam search has no samples: it ends as a whole or not at all.
        """
        request = self.requests.get(request_id)
        if request is not None and request.beam is not None and index is not None:
            return False
        targets = [s for s in request.live() if index is None or s.index == index] if request else []
        for seq in targets:
            self.finish(seq, "abort")
        self.counters.aborted += bool(targets)
        return bool(targets)

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        """End one sequence; its blocks are free at once (or, with a step in flight, when that step is done)."""
        if seq.finished:
            return
        self._hand_over(seq)
        seq.finish_reason, seq.stop_reason = reason, stop_reason
        held = self.memory.close(seq)
        self._forget_row(seq)
        request = seq.request
        logger.debug(
            "request %s, sequence %d: ends (%s), freed %d blocks", request.request_id, seq.seq_id, reason, held
        )
        if request.num_live():
            return
        request.state = RequestState.FINISHED
        request.finished_at = self._now
        self.admission.forget(request)
        if not self.waiting.remove(request):
            self._stop_running(request)
        del self.requests[request.request_id]
        self._deadlines.pop(request.request_id, None)
        self.counters.finished += 1
        self._ended.append(request)

    def take_ended(self) -> list[Request]:
        """Requests that have ended, for whatever reason, since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _hand_over(self, leader: Sequence) -> None:
        """The sequence that computes the prompt for its siblings leaves: the next one takes its blocks over."""
        request = leader.request
        if request.forked or not (leader.tables or request.swapped):
            return
        heir = next((s for s in request.live() if s is not leader), None)
        if heir is None or heir.tables:
            return
        for table in leader.tables:
            table.seq_id = heir.seq_id
            table.forget_sent()
        heir.tables, leader.tables = leader.tables, []
        heir.num_computed, heir.num_done = leader.num_computed, leader.num_done
        heir.num_published = leader.num_published
        heir.keys = leader.keys[: leader.num_computed // self.memory.layout.block_size]
        if request.swapped is not None and leader.seq_id in request.swapped:
            request.swapped[heir.seq_id] = request.swapped.pop(leader.seq_id)
        for flight in self._flights:
            flight.work = [(heir if s is leader else s, end, epoch) for s, end, epoch in flight.work]

    def _forget_row(self, seq: Sequence) -> None:
        if seq.started:
            self._ends.append(seq.seq_id)
            seq.started = False
        if seq.finished:
            self._sequences.pop(seq.seq_id, None)

    def _stop_running(self, request: Request) -> None:
        at = bisect_left(self.running, request.key, key=lambda r: r.key)
        if at < len(self.running) and self.running[at] is request:
            del self.running[at]

    def sequence(self, seq_id: int) -> Sequence | None:
        """A sequence that has not ended."""
        return self._sequences.get(seq_id)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """Something to plan, or rows the runner should forget."""
        return bool(self.requests or self._ends)

    # -- planning ------------------------------------------------------------------------------------------------

    def schedule(self, now: float = 0.0) -> StepPlan:
        """Decide one step. The plan may be empty while older steps are in flight."""
        if len(self._flights) >= self.settings.max_in_flight:
            raise InternalError(f"{len(self._flights)} steps are in flight; update() must come first")
        self._step += 1
        self._now = now
        if self.memory.cache is not None:
            self.memory.cache.step = self._step
        self._expire(now)
        round_ = _Round(self.settings.max_num_batched_tokens)
        work = list(self._unfinished_work())
        for seq, missing in work:
            if missing == 1:
                self._try(seq, 1, round_)
        for seq, missing in work:
            if missing > 1:
                self._try(seq, missing, round_)
        if not round_.preempted:
            self._admit(round_, now)
        return self._commit(round_)

    def _expire(self, now: float) -> None:
        for request in [r for r in self._deadlines.values() if r.deadline is not None and now >= r.deadline]:
            for seq in list(request.live()):
                self.finish(seq, "deadline")
            self.counters.deadlines += 1

    def _unfinished_work(self) -> Iterator[tuple[Sequence, int]]:
        """(sequence, positions it lacks) of everything that runs, oldest request first."""
        for request in self.running:
            yield from _work_of(request)

    def _try(self, seq: Sequence, missing: int, round_: _Round) -> None:
        """Give the sequence as many of its missing positions as budget and pool allow."""
        if seq.request.state is not RequestState.RUNNING or not round_.budget:
            return
        count = min(missing, round_.budget)
        if seq.num_computed + count > seq.writable_until or not seq.request.forked:
            if self._has_windows:
                self.memory.allocation.release_behind_window(seq, seq.num_computed)
            # A smaller chunk before a victim: in a window it frees as it goes, and nobody is pushed out for speed.
            affordable = self._affordable(seq, count)
            if not affordable and self._make_room(seq, 1, round_):
                affordable = self._affordable(seq, min(missing, round_.budget))
            count = affordable
            if not count:
                return
            before = self.memory.pool.num_available
            self.memory.extend(seq, seq.num_computed, seq.num_computed + count)
            taken = before - self.memory.pool.num_available
            logger.debug("request %s, sequence %d: took %d blocks", seq.request.request_id, seq.seq_id, taken)
        round_.decided[seq] = count
        round_.budget -= count

    def _blocks_needed(self, seq: Sequence, count: int) -> int:
        """Blocks that computing `count` more positions takes, forks at the end of a shared prompt included."""
        upto = seq.num_computed + count
        need = self.memory.allocation.blocks_needed(seq, seq.num_computed, upto)
        request = seq.request
        if not request.forked and upto == request.prompt_len and (live := request.num_live()) > 1:
            need += (live - 1) * self.memory.allocation.fork_cost(seq)
        return need

    def _make_room(self, seq: Sequence, count: int, round_: _Round) -> bool:
        """Preempt newer requests until the blocks are there; False if they are not (yet)."""
        pool = self.memory.pool
        while (need := self._blocks_needed(seq, count)) > pool.num_available:
            if self._has_windows and not round_.swept:
                self._sweep_windows(round_)
                continue
            if need <= pool.num_available + pool.num_pending:
                return False  # they come back when the step in flight is done
            victim = choose_victim(self.running, seq.request)
            if victim is None:
                return False
            self._preempt(victim, round_)
        return True

    def _sweep_windows(self, round_: _Round) -> None:
        """Give back what lies behind the windows of everything that runs, also of beams that wait for each other.

        A long chunk leaves blocks behind that its sequence only gives back when it needs new ones itself.
        """
        round_.swept = True
        for request in self.running:
            for seq in request.live():
                self.memory.allocation.release_behind_window(seq, seq.num_computed)

    def _affordable(self, seq: Sequence, count: int) -> int:
        """The most positions, at most `count`, for which there are blocks."""
        if self._blocks_needed(seq, count) <= self.memory.pool.num_available:
            return count
        low, high = 0, count - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._blocks_needed(seq, middle) <= self.memory.pool.num_available:
                low = middle
            else:
                high = middle - 1
        return low

    def _preempt(self, victim: Request, round_: _Round) -> None:
        """Take all blocks of a running request back; it waits again, at its old place."""
        round_.preempted = True
        for seq in victim.live():
            round_.budget += round_.decided.pop(seq, 0)
            self.memory.truncate(seq)
        swap = prefers_swap(victim, self.memory, self.settings)
        if swap:
            self.memory.swap_out(victim)
            self.counters.swaps += 1
        else:
            self.counters.recomputed_tokens += recompute_tokens(victim)
        for seq in victim.live():
            seq.epoch += 1
            if not swap:
                self.memory.close(seq)
                seq.num_computed = seq.num_done = seq.num_published = 0
                victim.forked = False
            self._forget_row(seq)
        self.admission.forget(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        victim.state = RequestState.WAITING
        self._stop_running(victim)
        self.waiting.push(victim)

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit(self, round_: _Round, now: float) -> None:
        """Let waiting requests in, in queue order, while there are seats, blocks and budget."""
        passed: list[Request] = []
        self.admission.begin_round()
        seats = sum(seats_of(r) for r in self.running) if len(self.waiting) else 0
        while round_.budget > 0 and (request := self.waiting.peek()) is not None:
            verdict = self.admission.judge(request, self.running, seats)
            if verdict is Verdict.LATER:
                passed.append(self.waiting.pop())
                continue
            if verdict is Verdict.NO_ROOM:
                victim = self.admission.outranked(request, self.running)
                if victim is None:
                    break
                seats -= seats_of(victim)
                self._preempt(victim, round_)
                continue
            seats += seats_of(request)
            self.waiting.pop()
            self._start_running(request, round_, now)
        for request in passed:
            self.waiting.push(request)

    def _start_running(self, request: Request, round_: _Round, now: float) -> None:
        self.admission.admit(request)
        request.state = RequestState.RUNNING
        insort(self.running, request, key=lambda r: r.key)
        if request.admitted_at is None:
            request.admitted_at = now
        for seq, missing in list(_work_of(request)):
            self._try(seq, missing, round_)
        self.admission.started(request)

    # -- committing --------------------------------------------------------------------------------------------

    def _commit(self, round_: _Round) -> StepPlan:
        """Turn decisions into a plan; from here on the step counts as computed."""
        starts: list[SequenceStart] = []
        scheduled: list[ScheduledSequence] = []
        work: list[tuple[Sequence, int, int]] = []
        # Copies of the forks below need this step's KV: they go with the next plan.
        transfers = self.memory.take_transfers()
        for seq, count in round_.decided.items():
            scheduled.append(self._commit_one(seq, count, starts))
            work.append((seq, seq.num_computed, seq.epoch))
        ends, self._ends = tuple(self._ends), []
        plan = StepPlan(self._step, tuple(scheduled), transfers, tuple(starts), ends)
        if plan.is_empty and self.requests and not self._flights:
            raise InternalError(
                f"step {self._step}: {len(self.running)} requests run and {len(self.waiting)} wait, but nothing can be "
                f"planned ({self.memory.pool.num_available} of {self.memory.pool.num_blocks} blocks available)"
            )
        self._flights.append(_Flight(plan, work))
        self.memory.pool.fence(self._step)
        self.counters.steps += 1
        self.counters.computed_tokens += plan.num_tokens
        if starts:
            running = sum(r.num_live() for r in self.running)
            self.counters.peak_running = max(self.counters.peak_running, running)
        return plan

    def _commit_one(self, seq: Sequence, count: int, starts: list[SequenceStart]) -> ScheduledSequence:
        request = seq.request
        start, end = seq.num_computed, seq.num_computed + count
        seq.num_computed = end
        known = len(seq.token_ids)
        tokens = tuple(seq.token_ids[start : min(end, known)]) + (LAST_SAMPLED,) * max(0, end - max(known, start))
        self._open_row(seq, starts)
        drawing: list[Sequence] = []
        if end == seq.num_tokens:
            drawing.append(seq)
        if not request.forked and end >= request.prompt_len:
            request.forked = True
            for sibling in [s for s in request.live() if s is not seq and not s.tables]:
                self.memory.fork(seq, sibling)
                if sibling.num_tokens == end:
                    drawing.append(sibling)
                    self._open_row(sibling, starts)
        for s in drawing:
            s.num_pending += request.beam is None
        updates: list[TableUpdate] = []
        for table in seq.tables:
            table.take_updates(updates)
        wanted = request.sampling.prompt_logprobs
        if wanted is not None and start + 1 >= request.prompt_len:
            wanted = None
        return ScheduledSequence(seq.seq_id, start, tokens, tuple(updates), tuple(s.seq_id for s in drawing), wanted)

    def _open_row(self, seq: Sequence, starts: list[SequenceStart]) -> None:
        if seq.started:
            return
        seq.started = True
        for table in seq.tables:
            table.forget_sent()
        request = seq.request
        params = request.runner_params
        starts.append(
            SequenceStart(
                seq.seq_id,
                request.request_id,
                seq.index,
                params,
                tuple(seq.token_ids),
                request.prompt_len,
                request.seed,
                request.end_ids,
                request.bad_word_ids,
                request.beam_state.num_candidates if request.beam else 0,
            )
        )

    # -- results -------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now: float = 0.0) -> list[SequenceNews]:
        """Take the result of the oldest step in flight; sequences that reached an end are finished and freed."""
        if not self._flights or self._flights[0].plan.step_id != result.step_id:
            raise InternalError(f"result of step {result.step_id} came out of order")
        flight = self._flights.popleft()
        self.memory.pool.settle(result.step_id)
        self.memory.pool.fence(self._flights[-1].plan.step_id if self._flights else None)
        for seq, end, epoch in flight.work:
            if seq.finish_reason is None and seq.epoch == epoch:
                seq.num_done = end
                self.admission.computed(self.memory.publish(seq))
        for item, (seq, _, _) in zip(flight.plan.scheduled, flight.work):
            if entries := result.prompt_logprobs.get(item.seq_id):
                _keep_prompt_logprobs(seq.request, item.start, entries)
        news: list[SequenceNews] = []
        beams: dict[str, Request] = {}
        asked = {seq.seq_id: (end, epoch) for seq, end, epoch in flight.work}
        for seq_id, drawn in result.drawn.items():
            seq_or_none = self._sequences.get(seq_id)
            if seq_or_none is not None and not _is_stale(seq_or_none, asked.get(seq_id)):
                self._take_drawn(seq_or_none, drawn, news, beams, now)
        for request in beams.values():
            self._advance_beams(request)
        return news

    def _take_drawn(
        self, seq: Sequence, drawn: Drawn, news: list[SequenceNews], beams: dict[str, Request], now: float
    ) -> None:
        request = seq.request
        if request.first_token_at is None:
            request.first_token_at = now
        if drawn.error is not None:
            seq.num_pending = 0
            news.append(SequenceNews(seq, (), (), drawn.error))
            self.finish(seq, "error", drawn.error)
        elif request.beam is not None:
            request.beam_state.offer(seq.seq_id, drawn.logprobs[0])
            beams[request.request_id] = request
        else:
            seq.num_pending -= 1
            taken = 0
            for token in drawn.token_ids:
                seq.token_ids.append(token)
                taken += 1
                self._check_end(seq, token)
                if seq.finished:
                    break
            seq.cumulative_logprob += sum(p.logprobs[0] for p in drawn.logprobs[:taken])
            news.append(SequenceNews(seq, drawn.token_ids[:taken], drawn.logprobs[:taken]))

    def _check_end(self, seq: Sequence, token: int) -> None:
        """Natural end, stop id, or a length limit. (Stop strings are text: the engine finds them.)"""
        request, params = seq.request, seq.request.sampling
        if token in request.end_ids and seq.num_output > params.min_tokens:
            named = token in (params.stop_token_ids or ())
            self.finish(seq, "stop", token if named else None)
        elif len(seq.token_ids) >= request.max_len:
            self.finish(seq, "length")

    # -- beams -----------------------------------------------------------------------------------------------------

    def _advance_beams(self, request: Request) -> None:
        """When every beam has reported: forks for beams with several continuations, ends for those with none."""
        live = list(request.live())
        if request.finished or not request.beam_state.is_ready(live):
            return
        going = request.beam_state.advance(live)
        if not going:
            for seq in live:
                self.finish(seq, "beam")
            return
        first_use: set[int] = set()
        forks = []
        kept = {c.parent.seq_id for c in going}
        with self.memory.unread_by_steps_in_flight():
            for seq in live:
                if seq.seq_id not in kept:
                    self.finish(seq, "beam lost")
        for c in going:
            if c.parent.seq_id in first_use:
                child = self._new_sequence(request, len(request.sequences), list(c.parent.token_ids))
                self.memory.fork(c.parent, child)
                forks.append((child, c))
            else:
                first_use.add(c.parent.seq_id)
                forks.append((c.parent, c))
        for seq, c in forks:
            seq.token_ids.append(c.token_id)
            seq.cumulative_logprob = c.cumulative_logprob
        request.sequences = [s for s in request.sequences if not s.finished]
        request.forked = True

    # -- trust ---------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raise `AuditError` at the first contradiction. O(pool): for tests, debug and idle moments."""
        self.memory.audit(self.requests.values())


def _is_stale(seq: Sequence, asked: tuple[int, int] | None) -> bool:
    """Do a beam's candidates continue a text that it no longer has, or computed before a preemption?"""
    return seq.request.beam is not None and asked != (len(seq.token_ids), seq.epoch)


def _keep_prompt_logprobs(request: Request, start: int, entries: tuple[TokenLogprobs, ...]) -> None:
    """They are the request's: the sample that computed them may have ended since."""
    store = request.prompt_logprobs
    if not store:
        store.extend([None] * request.prompt_len)
    store[start + 1 : start + 1 + len(entries)] = entries


def _work_of(request: Request) -> Iterator[tuple[Sequence, int]]:
    """(sequence, positions it lacks). While siblings wait to fork, only the prompt is computed, by the first."""
    leads = not request.forked and request.num_live() > 1
    for seq in request.sequences:
        if seq.finish_reason is not None or not seq.tables:
            continue
        missing = (request.prompt_len if leads else seq.num_tokens) - seq.num_computed
        # With a step in flight the last token may be drawn already: nothing reads its KV.
        if missing > 0 and not (seq.num_pending and seq.num_tokens >= request.max_len):
            yield seq, missing
