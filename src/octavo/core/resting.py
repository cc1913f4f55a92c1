"""A scheduler for simulations: sequences about which nothing is to be decided rest, and cost nothing.

A sequence that decodes inside a block of its own takes no block, publishes none and does not end: all that `Scheduler`
does for it is to count one more token. `RestingScheduler` leaves such a sequence alone until the step in which
something is due for it, and then brings its counters up to date. Everything that is decided is decided by the inherited
code, at the same step, in the same order; so queue, blocks, tables, evictions and counters are those of `Scheduler`,
step for step (the tests compare them).

    step      41  42  43  44  45  46  47
    seq 7     B   ·   ·   ·   ·   ·   B       B: takes a block; ·: rests, one token a step
    seq 9     ·   ·   E                       E: awake, draws its last token

A plan lists only who is awake; `num_resting` and `resting_reads` tell the cost model of the rest. While nobody is awake
and nobody can be let in, whole runs of steps pass at once (`quiet_steps`, `skip`). To take a block that is there, or to
publish a full one, nobody needs to be woken either (`tend`): nothing about it is decided.

What may rest is the plain case: one sequence, no beam, no deadline, no stop ids, and a length that ends it. Everything
else stays awake. Not for engines: the tokens of resting sequences come from `script`, not from a runner.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.kv_layout import KVLayout
from octavo.core.rests import Rest, Rests, Why
from octavo.core.rounds import Round, SequenceNews, work_of
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request, RequestState, Sequence
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.errors import InternalError

#: (request, first, end) -> the output tokens first..end-1 that the request draws.
Script = Callable[[Request, int, int], list[int]]


class RestingScheduler(Scheduler):
    """`Scheduler` whose quiet sequences rest. `script` says what resting sequences draw; rest=False: nobody rests."""

    def __init__(self, settings: SchedulerSettings, layout: KVLayout, script: Script, *, rest: bool = True) -> None:
        super().__init__(settings, layout)
        self._script = script
        self._awake: dict[Request, None] = {}
        self._rests = Rests(layout, publishes=settings.enable_prefix_caching)
        self._completed = 0  # steps that have reported back
        self._quiet = False  # the step being computed has nobody awake
        # Without a token for everybody in each step, who gets one is a decision.
        budget_for_all = settings.max_num_seqs <= settings.max_num_batched_tokens
        alone = settings.max_in_flight == 1 and settings.speculation is None
        self._may_rest = rest and budget_for_all and alone
        #: Distinct windows of the layers, smallest first, None (sees all) last; the order of `resting_reads`.
        self.windows = self._rests.windows
        self._only_decoding = True
        self._kept_out: Request | None = None  # the head of the queue, judged, and nothing has changed since
        self._shortage: str | None = None  # what counted it
        #: Sequences with output that got no token in the step planned last: no room, or pushed out.
        self.stalled: list[Sequence] = []

    # -- what a cost model asks --------------------------------------------------------------------------------------

    @property
    def num_resting(self) -> int:
        return len(self._rests)

    def is_resting(self, seq: Sequence) -> bool:
        return seq in self._rests

    def resting_reads(self, ahead: int = 0) -> list[int]:
        """Per entry of `windows`: positions that all resting sequences together read in the step planned last.

        ahead: of so many steps later, as far as nobody is woken before.
        """
        return self._rests.reads(self._step + ahead)

    # -- planning ----------------------------------------------------------------------------------------------------

    def _work(self, round_: Round) -> list[tuple[Sequence, int]]:
        """Of the awake ones, oldest request first; everybody who rests has its token of the budget already."""
        due = self._rests.due(self._step)
        if due and not self._take_asleep(due):
            for rest in due:
                self._wake(rest)
        round_.budget -= len(self._rests)
        awake = sorted(self._awake, key=_key)
        work = [item for request in awake for item in work_of(request)]
        self._only_decoding = all(missing == 1 and s.num_computed >= s.prompt_len for s, missing in work)
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
        if self._rests and not (round_.decided or self._ends or self.memory.has_transfers):
            self._quiet = True
            self.counters.count_step(len(self._rests), self.memory.pool.num_used)
            self.memory.pool.clock = self._step
            return StepPlan(self._step, ())
        self.counters.computed_tokens += len(self._rests)
        return super()._commit(round_)

    def _preempt(self, victim: Request, round_: Round) -> None:
        for seq in victim.live():
            if (rest := self._rests.get(seq)) is not None:
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
            for item in news:  # who drew nothing is not decoding yet, or not again
                seq = item.sequence
                if _is_plain(seq.request) and self._rests.lay_down(seq, self._step):
                    del self._awake[seq.request]
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
        if (rest := self._rests.get(seq)) is not None:
            self._wake(rest)
        self._kept_out = None
        super().finish(seq, reason, stop_reason)

    def _stop_running(self, request: Request) -> None:
        super()._stop_running(request)
        self._awake.pop(request, None)

    # -- resting -----------------------------------------------------------------------------------------------------

    def _wake(self, rest: Rest) -> None:
        self._rests.take_up(rest)
        self._bring_up_to_date(rest)
        self._awake[rest.seq.request] = None

    def _bring_up_to_date(self, rest: Rest) -> None:
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
        for rest in self._rests:
            self._bring_up_to_date(rest)

    # -- what happens asleep -----------------------------------------------------------------------------------------

    def _take_asleep(self, due: list[Rest]) -> bool:
        """Let all that are due take their next block where they lie, if that is all and needs no decision.

        Blocks are there for all of them, and no awake sequence takes one before them in this step.
        """
        if self._has_windows or any(rest.why is not Why.TAKE for rest in due):
            return False
        if len(due) > self.memory.pool.num_available or any(self._takes_first(request) for request in self._awake):
            return False
        for rest in sorted(due, key=_age):
            self._take(rest)
        return True

    @staticmethod
    def _takes_first(request: Request) -> bool:
        """Might the request take a block in the same pass as those who decode?"""
        return any(missing == 1 and s.num_computed >= s.writable_until for s, missing in work_of(request))

    def _take(self, rest: Rest) -> None:
        """Its next block, as `Scheduler._try` and the plan would have done: a new one, so nothing can be shared."""
        seq = rest.seq
        for table in seq.tables:
            table.append_known()
        seq.writable_until += self.memory.layout.block_size
        self._rests.set_alarm(rest)

    def tend(self) -> bool:
        """Pass the next step, in which blocks are taken or published and nothing else is due; False if there is more.

        Only after all `quiet_steps` have passed.
        """
        step = self._step + 1
        if self._has_windows or self._rests.next_alarm() != step:
            return False
        due = self._rests.due(step)
        due.sort(key=_age)
        takers = [rest for rest in due if rest.why is Why.TAKE]
        publishers = [rest for rest in due if rest.why is Why.PUBLISH]
        if len(takers) + len(publishers) < len(due) or len(takers) > self.memory.pool.num_available:
            self._rests.put_back(due)
            return False
        if self.memory.cache is not None:
            self.memory.cache.step = step
        for rest in takers:
            self._take(rest)
        self._pass(1)
        for rest in publishers:
            seq, before = rest.seq, rest.seq.num_published
            self._bring_up_to_date(rest)
            self.admission.computed(self.memory.publish(seq))
            if self._kept_out is not None and self._concerns(self._kept_out, seq, before):
                self._kept_out = None
            self._rests.set_alarm(rest)
        return True

    # -- many steps at once ------------------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Nobody is awake, on the way, or to be let in. (Rows that a runner should forget do not matter here.)"""
        if self._awake or not self._rests or self._flights or self._quiet:
            return False
        if self._deadlines or self.memory.has_transfers:
            return False
        if not len(self.waiting):
            return True
        return self.waiting.peek() is self._kept_out and len(self._rests) < self.settings.max_num_batched_tokens

    def quiet_steps(self) -> int | None:
        """In so many of the coming steps nothing is due, unless a request is added or ended before; None: not quiet."""
        return self._rests.next_alarm() - self._step - 1 if self.is_quiet() else None

    def skip(self, steps: int) -> None:
        """So many of the `quiet_steps` have passed."""
        quiet = self._rests.next_alarm() - self._step - 1
        if not 0 <= steps <= quiet:
            raise InternalError(f"{steps} steps cannot be skipped, {quiet} are quiet")
        if steps:
            self._pass(steps)

    def _pass(self, steps: int) -> None:
        self._step += steps
        self._completed = self.memory.pool.clock = self._step
        self.counters.count_step(len(self._rests), self.memory.pool.num_used, steps)
        if len(self.waiting):
            self._count_shortage(steps)
        self._ends.clear()


def _key(request: Request) -> tuple[float, int]:
    return request.key


def _age(rest: Rest) -> tuple[float, int]:
    return rest.age


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
