"""A scheduler for simulations: sequences about which nothing is to be decided rest, and cost nothing.

A sequence that decodes inside a block of its own takes no block, publishes none and does not end: all that `Scheduler`
does for it is to count one more token. `RestingScheduler` leaves such a sequence alone until the step in which
something is due for it, and then brings its counters up to date. Everything that is decided is decided by the inherited
code, at the same step, in the same order; so queue, blocks, tables, evictions and counters are those of `Scheduler`,
step for step (the tests compare them).

    step      41  42  43  44  45  46  47
    seq 7     B   ·   ·   ·   ·   ·   B       B: takes a block, scheduled as ever; ·: rests, one token a step
    seq 9     ·   ·   E                       E: draws its last token

A plan lists only who is awake; `num_resting` and `resting_reads` tell the cost model of the rest. While nobody is awake
and nobody can be let in, whole runs of steps pass at once (`quiet_steps`, `skip`).

What may rest is the plain case: one sequence, no beam, no deadline, no stop ids, and a length that ends it. Everything
else stays awake. Not for engines: the tokens of resting sequences come from `script`, not from a runner.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from octavo.core.kv_layout import KVLayout
from octavo.core.rounds import Round, SequenceNews, work_of
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, RequestState, Sequence
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.errors import InternalError

#: (request, first, end) -> the output tokens first..end-1 that the request draws.
Script = Callable[[Request, int, int], list[int]]


@dataclass(slots=True, eq=False)
class _Rest:
    """After step s the sequence has `offset + s` tokens, until it is woken for step `wake`."""

    seq: Sequence
    offset: int
    wake: int
    growing: int  # so many of the windows (smallest first) are full already: index of the first that still grows


class RestingScheduler(Scheduler):
    """`Scheduler` whose quiet sequences rest. One step at a time; `script` says what resting sequences draw."""

    def __init__(self, settings: SchedulerSettings, layout: KVLayout, script: Script) -> None:
        super().__init__(settings, layout)
        self._script = script
        self._awake: dict[Request, None] = {}
        self._resting: dict[Sequence, _Rest] = {}
        self._alarms: list[tuple[int, int, _Rest]] = []  # (step, ticket, who)
        self._tickets = count()
        self._completed = 0  # steps that have reported back
        self._quiet = False  # the step being computed has nobody awake
        # Without a token for everybody in each step, who gets one is a decision.
        self._may_rest = settings.max_num_seqs <= settings.max_num_batched_tokens and settings.max_in_flight == 1
        #: Distinct windows of the layers, smallest first, None (sees all) last; the order of `resting_reads`.
        self.windows: list[int | None] = sorted(
            {g.window for g in layout.groups}, key=lambda w: (w is None, w if w is not None else 0)
        )
        self._full = [0] * len(self.windows)  # per window: resting sequences longer than it
        self._growing = [0] * len(self.windows)  # per window: the others,
        self._offsets = [0] * len(self.windows)  # and the sum of their offsets
        self._only_decoding = True
        self._kept_out: Request | None = None  # the head of the queue, judged, and nothing has changed since
        self._shortage: str | None = None  # what counted it
        #: Sequences with output that got no token in the step planned last: no room, or pushed out.
        self.stalled: list[Sequence] = []

    # -- what a cost model asks --------------------------------------------------------------------------------------

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    def resting_reads(self, ahead: int = 0) -> list[int]:
        """Per entry of `windows`: positions that all resting sequences together read in the step planned last.

        ahead: of so many steps later, as far as nobody is woken before.
        """
        step = self._step - 1 + ahead
        return [
            self._offsets[i] + self._growing[i] * step + (window or 0) * self._full[i]
            for i, window in enumerate(self.windows)
        ]

    # -- planning ----------------------------------------------------------------------------------------------------

    def _work(self, round_: Round) -> list[tuple[Sequence, int]]:
        """Of the awake ones, oldest request first; everybody who rests has its token of the budget already."""
        while self._alarms and self._alarms[0][0] <= self._step:
            rest = heappop(self._alarms)[2]
            if self._resting.get(rest.seq) is rest:
                self._wake(rest)
        round_.budget -= len(self._resting)
        awake = sorted(self._awake, key=_key)
        work = [item for request in awake for item in work_of(request)]
        self._only_decoding = all(missing == 1 for _, missing in work)
        self.stalled = [seq for seq, _ in work]  # until `_commit` knows better
        return work

    def _admit(self, round_: Round, now: float) -> None:
        """As ever, but not again where the answer cannot have changed.

        The head of the queue was kept out for want of seats or blocks. While running sequences only take blocks one by
        one, there are never more of them; prompts on their way (whose promises lapse), windows (which give back) and
        everything that `_changed` is told of make it worth asking again.
        """
        head = self.waiting.peek()
        if head is None:
            return
        calm = self._only_decoding and round_.budget > 0 and not (self._has_windows and round_.decided)
        if calm and head is self._kept_out:
            round_.kept_out = head
            self._count_shortage(1)
            return
        self._kept_out = None
        running, counters = len(self.running), self.counters
        before = (counters.short_of_blocks, counters.short_of_seats)
        super()._admit(round_, now)
        if round_.kept_out is not None and round_.kept_out is self.waiting.peek() and not round_.preempted:
            self._shortage = "short_of_blocks" if counters.short_of_blocks > before[0] else "short_of_seats"
            if len(self.running) == running and self._only_decoding:
                self._kept_out = round_.kept_out

    def _count_shortage(self, steps: int) -> None:
        assert self._shortage is not None
        setattr(self.counters, self._shortage, getattr(self.counters, self._shortage) + steps)

    def _start_running(self, request: Request, round_: Round, now: float) -> None:
        super()._start_running(request, round_, now)
        self._awake[request] = None

    def _commit(self, round_: Round) -> StepPlan:
        self.stalled = [s for s in self.stalled if s not in round_.decided and s.num_output > 0]
        if self._resting and not (round_.decided or self._ends or self.memory.has_transfers):
            self._quiet = True
            self.counters.count_step(len(self._resting), self.memory.pool.num_used)
            self.memory.pool.clock = self._step
            return StepPlan(self._step, ())
        self.counters.computed_tokens += len(self._resting)
        return super()._commit(round_)

    def _preempt(self, victim: Request, round_: Round) -> None:
        for seq in victim.live():
            if (rest := self._resting.get(seq)) is not None:
                self._wake(rest)
                round_.budget += 1
                if seq.num_output > 0:
                    self.stalled.append(seq)
        self._kept_out = None
        super()._preempt(victim, round_)

    def _sweep_windows(self, round_: Round) -> None:
        self.sync()
        super()._sweep_windows(round_)

    # -- results -----------------------------------------------------------------------------------------------------

    def update(self, result: StepResult, now: float = 0.0) -> list[SequenceNews]:
        """News of the awake sequences; each resting one gained the next token of its script."""
        if self._quiet:
            if result.step_id != self._step:
                raise InternalError(f"result of step {result.step_id} came out of order")
            self._quiet = False
            news: list[SequenceNews] = []
        else:
            before = self._publications()
            news = super().update(result, now)
            if self._kept_out is not None and any(self._concerns(self._kept_out, seq, n) for seq, n in before):
                self._kept_out = None
        self._completed = self._step
        if self._may_rest:
            for request in [r for r in self._awake if _is_plain(r)]:
                self._lay_down(request)
        return news

    def _publications(self) -> list[tuple[Sequence, int]]:
        """Who may publish in this update, and how many blocks each has published before it."""
        if self._kept_out is None or self.memory.cache is None or not self._flights:
            return []
        return [(seq, seq.num_published) for seq, _, _ in self._flights[0].work]

    def _concerns(self, kept_out: Request, seq: Sequence, before: int) -> bool:
        """Did the sequence publish a block that goes on where the request's own blocks begin or end?"""
        if seq.num_published <= before:
            return False
        if before == 0:
            return True
        ours = kept_out.sequences[0].keys
        return any(parent in ours for parent in seq.keys[before - 1 : seq.num_published - 1])

    # -- departures --------------------------------------------------------------------------------------------------

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        if (rest := self._resting.get(seq)) is not None:
            self._wake(rest)
        self._kept_out = None
        super().finish(seq, reason, stop_reason)

    def _stop_running(self, request: Request) -> None:
        super()._stop_running(request)
        self._awake.pop(request, None)

    # -- resting -----------------------------------------------------------------------------------------------------

    def _lay_down(self, request: Request) -> None:
        """Let the request rest if nothing is due for it in the next step."""
        seq = request.sequences[0]
        known, size = len(seq.token_ids), self.memory.layout.block_size
        if seq.num_computed != known - 1 or seq.num_computed >= seq.writable_until:
            return
        offset = known - self._step
        # In step s it computes position offset + s - 2 and has offset + s tokens afterwards.
        wake = min(seq.writable_until + 2, request.max_len) - offset
        if self.memory.cache is not None:
            wake = min(wake, (seq.num_published + 1) * size + 1 - offset)
        growing = 0
        while growing < len(self.windows) and (window := self.windows[growing]) is not None:
            if known <= window:
                wake = min(wake, window + 2 - offset)
                break
            growing += 1
        if wake <= self._step + 1:
            return
        rest = _Rest(seq, offset, wake, growing)
        del self._awake[request]
        self._resting[seq] = rest
        self._tally(rest, 1)
        heappush(self._alarms, (wake, next(self._tickets), rest))

    def _tally(self, rest: _Rest, sign: int) -> None:
        for i in range(len(self.windows)):
            if i < rest.growing:
                self._full[i] += sign
            else:
                self._growing[i] += sign
                self._offsets[i] += sign * rest.offset

    def _wake(self, rest: _Rest) -> None:
        del self._resting[rest.seq]
        self._tally(rest, -1)
        self._bring_up_to_date(rest)
        self._awake[rest.seq.request] = None

    def _bring_up_to_date(self, rest: _Rest) -> None:
        seq = rest.seq
        known, now = len(seq.token_ids), rest.offset + self._completed
        if now == known:
            return
        prompt = seq.prompt_len
        seq.token_ids += self._script(seq.request, known - prompt, now - prompt)
        seq.num_computed = seq.num_done = now - 1
        seq.last_step = self._completed

    def sync(self) -> None:
        """Bring the counters of everybody who rests up to date, for views, audits and tests."""
        for rest in self._resting.values():
            self._bring_up_to_date(rest)

    # -- many steps at once ------------------------------------------------------------------------------------------

    def quiet_steps(self) -> int:
        """So many of the coming steps decide nothing, unless a request is added or ended before."""
        if self._awake or not self._resting or self._ends or self._flights or self._quiet or self._deadlines:
            return 0
        if len(self.waiting) and (self.waiting.peek() is not self._kept_out or not self._budget_left()):
            return 0
        alarms = self._alarms
        while self._resting.get(alarms[0][2].seq) is not alarms[0][2]:
            heappop(alarms)
        return alarms[0][0] - self._step - 1

    def _budget_left(self) -> bool:
        return len(self._resting) < self.settings.max_num_batched_tokens

    def skip(self, steps: int) -> None:
        """`steps` quiet steps have passed."""
        if not 0 <= steps <= self.quiet_steps():
            raise InternalError(f"{steps} steps cannot be skipped, {self.quiet_steps()} are quiet")
        if not steps:
            return
        self._step += steps
        self._completed = self.memory.pool.clock = self._step
        self.counters.count_step(len(self._resting), self.memory.pool.num_used, steps)
        if len(self.waiting):
            self._count_shortage(steps)


def _key(request: Request) -> tuple[float, int]:
    return request.key


def _is_plain(request: Request) -> bool:
    """One sequence that only its length ends and of which nobody wants to know more than its tokens."""
    params = request.sampling
    return (
        len(request.sequences) == 1
        and request.beam is None
        and request.forked
        and request.state is RequestState.RUNNING
        and not request.end_ids
        and params.logprobs is None
        and request.deadline is None
        and request.constraint is None
        and request.sequences[0].num_pending == 0
    )
