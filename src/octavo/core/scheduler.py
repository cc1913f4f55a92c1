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

from octavo.core.admission import Admission, Verdict, seats_of
from octavo.core.beam import BeamSearch, advance_beams
from octavo.core.commit import append_drawn, commit_sequence
from octavo.core.kv_layout import KVLayout, largest
from octavo.core.memory import KVMemory
from octavo.core.preemption import choose_victim, prefers_swap, recompute_tokens
from octavo.core.queue import WaitingQueue
from octavo.core.rounds import Counters, Flight, Round, SequenceNews, is_stale, keep_prompt_logprobs, work_of
from octavo.core.sequence import Request, RequestState, Sequence
from octavo.core.settings import SchedulerSettings
from octavo.core.speculation import Speculator
from octavo.core.step import Drawn, SequenceStart, StepPlan, StepResult
from octavo.errors import InternalError

logger = logging.getLogger("octavo.core")


class Scheduler:
    """Queues, the token budget, and the life of sequences. Memory is `KVMemory`'s business."""

    def __init__(self, settings: SchedulerSettings, layout: KVLayout) -> None:
        self.settings = settings
        self.memory = KVMemory(layout, settings)
        self.admission = Admission(self.memory, settings)
        self.speculator = Speculator(settings.speculation, self.memory) if settings.speculation else None
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # sorted by key
        self.requests: dict[str, Request] = {}  # all that have not ended
        self.counters = Counters()
        self._sequences: dict[int, Sequence] = {}
        self._next_seq_id, self._step, self._now = 0, 0, 0.0
        self._flights: deque[Flight] = deque()
        self._ends: list[int] = []
        self._has_windows = any(g.window is not None for g in layout.groups)
        self._deadlines: dict[str, Request] = {}
        self._ended: list[Request] = []

    # -- arrivals and departures -------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a request in, or refuse it with the numbers (`RequestError`). Nothing changes when it is refused."""
        self.admission.check_at_the_door(request, self.requests, self.waiting.num_new)
        request.key = (request.arrival + request.priority * self.settings.priority_aging_s, request.number)
        beam = request.beam
        if beam is not None:
            self.counters.beams += 1
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
        self.counters.live += request.state is RequestState.RUNNING
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
        self.counters.live -= request.state is RequestState.RUNNING
        logger.debug("request %s, sequence %d: %s, freed %d blocks", request.request_id, seq.seq_id, reason, held)
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
        heir = next((s for s in request.live() if s is not leader), None)
        if request.forked or heir is None or heir.tables or not (leader.tables or request.swapped):
            return
        self.memory.hand_over(leader, heir)
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

    def sequence(self, seq_id: int) -> Sequence | None:  # None: it has ended
        return self._sequences.get(seq_id)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    @property
    def has_work(self) -> bool:  # or rows that the runner should forget
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
        round_ = Round(self.settings.max_num_batched_tokens)
        work = self._work(round_)
        for seq, missing in work:
            if missing == 1:
                if seq.num_computed < seq.writable_until and round_.budget and seq.request.forked:
                    round_.decided[seq] = 1  # a place in its own block: nothing to take
                    round_.budget -= 1
                else:
                    self._try(seq, 1, round_)
        for seq, missing in work:
            if missing > 1:
                self._try(seq, missing, round_)
        if round_.preempted:
            self.counters.short_of_blocks += 1
        else:
            self._admit(round_, now)
        if self.speculator is not None:
            crowd = min(len(self._sequences), self.settings.max_num_seqs)
            self.speculator.plan(round_, self.admission.outstanding(), crowd)
        return self._commit(round_)

    def _work(self, round_: Round) -> list[tuple[Sequence, int]]:  # oldest request first
        return [item for request in self.running for item in work_of(request)]

    def _expire(self, now: float) -> None:
        for request in [r for r in self._deadlines.values() if r.deadline is not None and now >= r.deadline]:
            for seq in list(request.live()):
                self.finish(seq, "deadline")
            self.counters.deadlines += 1

    def _try(self, seq: Sequence, missing: int, round_: Round) -> None:
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
            taken = self.memory.extend(seq, seq.num_computed, seq.num_computed + count)
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

    def _make_room(self, seq: Sequence, count: int, round_: Round) -> bool:
        """Preempt newer requests until the blocks are there; False if they are not (yet)."""
        pool = self.memory.pool
        while (need := self._blocks_needed(seq, count)) > pool.num_available:
            if self._has_windows and not round_.swept:
                self._sweep_windows(round_)
                continue
            if need <= pool.num_available + pool.num_pending:
                return False  # they come back when the step in flight is done
            if (victim := choose_victim(self.running, seq.request)) is None:
                return False
            self._preempt(victim, round_)
        return True

    def _sweep_windows(self, round_: Round) -> None:
        """Give back what lies behind the windows of everything that runs, also of beams that wait for each other.

        A long chunk leaves blocks behind that its sequence only gives back when it needs new ones itself. Guesses on
        their way may be taken back: what the positions before them read stays.
        """
        round_.swept = True
        for seq in (s for r in self.running for s in r.live()):
            self.memory.allocation.release_behind_window(seq, seq.num_computed - seq.num_proposed)

    def _affordable(self, seq: Sequence, count: int) -> int:
        """The most positions, at most `count`, for which there are blocks."""
        available = self.memory.pool.num_available
        return largest(count, lambda n: self._blocks_needed(seq, n) <= available)

    def _preempt(self, victim: Request, round_: Round) -> None:
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
                seq.num_computed = seq.num_done = seq.num_published = seq.num_proposed = 0
                victim.forked = False
            self._forget_row(seq)
        self.admission.forget(victim)
        victim.num_preemptions += 1
        self.counters.preemptions += 1
        self.counters.live -= victim.num_live()
        victim.state = RequestState.WAITING
        self._stop_running(victim)
        self.waiting.push(victim)

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit(self, round_: Round, now: float) -> None:
        """Let waiting requests in, in queue order, while there are seats, blocks and budget."""
        passed: list[Request] = []
        self.admission.begin_round()
        seats = sum(seats_of(r) for r in self.running) if self.counters.beams else self.counters.live
        while round_.budget > 0 and (request := self.waiting.peek()) is not None:
            verdict = self.admission.judge(request, self.running, seats)
            if verdict is Verdict.LATER:
                passed.append(self.waiting.pop())
                continue
            if verdict is Verdict.NO_ROOM:
                victim = self.admission.outranked(request, self.running)
                if victim is None:
                    round_.kept_out = request
                    break
                seats -= seats_of(victim)
                self._preempt(victim, round_)
                continue
            seats += seats_of(request)
            self.waiting.pop()
            self._start_running(request, round_, now)
        for request in passed:
            self.waiting.push(request)
        if len(self.waiting):
            short = round_.kept_out
            left = None if short is None else self.settings.max_num_seqs - seats - seats_of(short)
            self.counters.count_shortage(round_, left)

    def _start_running(self, request: Request, round_: Round, now: float) -> None:
        self.admission.admit(request)
        request.state = RequestState.RUNNING
        self.counters.live += request.num_live()
        insort(self.running, request, key=lambda r: r.key)
        if request.admitted_at is None:
            request.admitted_at = now
        for seq, missing in list(work_of(request)):
            self._try(seq, missing, round_)
        self.admission.started(request)

    def _commit(self, round_: Round) -> StepPlan:
        """Turn decisions into a plan; from here on the step counts as computed."""
        starts: list[SequenceStart] = []
        # Copies of the forks below need this step's KV: they go with the next plan.
        transfers = self.memory.take_transfers()
        scheduled = [commit_sequence(self.memory, seq, round_, starts) for seq in round_.decided]
        work = [(seq, seq.num_computed - seq.num_proposed, seq.epoch) for seq in round_.decided]
        ends, self._ends = tuple(self._ends), []
        plan = StepPlan(self._step, tuple(scheduled), transfers, tuple(starts), ends)
        if plan.is_empty and self.requests and not self._flights:
            free = self.memory.pool.num_available
            raise InternalError(f"step {self._step}: no plan for {len(self.requests)} requests, {free} blocks free")
        self._flights.append(Flight(plan, work))
        self.memory.pool.fence(self._step)
        self.counters.count_step(plan.num_tokens, self.memory.pool.num_used)
        return plan

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
                if end // self.memory.layout.block_size > seq.num_published:
                    self.admission.computed(self.memory.publish(seq))
        if result.prompt_logprobs:
            keep_prompt_logprobs(flight, result)
        news: list[SequenceNews] = []
        beams: dict[str, Request] = {}
        for seq_id, drawn in result.drawn.items():
            seq_or_none = self._sequences.get(seq_id)
            if seq_or_none is not None and not (seq_or_none.request.beam_state and is_stale(seq_or_none, flight)):
                self._take_drawn(seq_or_none, drawn, news, beams, now)
        for request in beams.values():
            advance_beams(request, self.memory, self.finish, self._new_sequence)
        return news

    def _take_drawn(
        self, seq: Sequence, drawn: Drawn, news: list[SequenceNews], beams: dict[str, Request], now: float
    ) -> None:
        request = seq.request
        if request.first_token_at is None:
            request.first_token_at = now
        if drawn.error is not None and request.beam is not None:
            for other in list(request.live()):  # one beam less would be another answer
                self.finish(other, "error", drawn.error)
        elif drawn.error is not None:
            seq.num_pending = 0
            news.append(SequenceNews(seq, (), (), drawn.error))
            self.finish(seq, "error", drawn.error)
        elif request.pooling is not None:
            request.embedding = drawn.embedding
            self.finish(seq, "stop")
        elif request.beam_state is not None:
            request.beam_state.offer(seq.seq_id, drawn.logprobs[0])
            beams[request.request_id] = request
        else:
            gained, end = append_drawn(seq, drawn)
            news.append(gained)
            if self.speculator is not None:
                self.admission.computed(self.speculator.settle(seq, drawn.token_ids))
            if end is not None:
                self.finish(seq, *end)

    # -- trust ---------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Raise `AuditError` at the first contradiction. O(pool): for tests, debug and idle moments."""
        self.memory.audit(self.requests.values())
