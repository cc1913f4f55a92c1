"""Who is let in: the check at the door (can it ever fit?) and the check before running (does it fit now?).

Refused at the door, with the numbers: what could not finish even with the whole pool for itself. What passes the door
can always be admitted once nothing older runs. Admission counts the whole prompt, not only its first chunk, and what
prompts that are still being computed will need, so that long prompts do not push each other out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from octavo.core.memory import KVMemory
from octavo.core.prefix_cache import Match
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.errors import CapacityError, PromptError, RequestError, SamplingError


class Verdict(Enum):
    """YES: admit. LATER: others may pass (its prefix is being computed). NO_ROOM: wait, nobody passes."""

    YES = "yes"
    LATER = "later"
    NO_ROOM = "no room"


class Admission:
    """Counts; changes nothing but the list of prefixes being computed, until `admit`."""

    def __init__(self, memory: KVMemory, settings: SchedulerSettings) -> None:
        self._memory = memory
        self._settings = settings
        self._computing: dict[bytes, str] = {}  # block key -> request that is computing it
        self._promised: dict[Request, int] = {}  # blocks its prompt was counted with, until it is computed
        self._match: tuple[str, Match] | None = None  # of the last positive verdict
        self._owed: int | None = None  # what `outstanding` found in this round of admissions
        self._any_protected = False  # has any request reached max_preemptions?

    # -- at the door ---------------------------------------------------------------------------------------------

    def check_at_the_door(self, request: Request, known: Mapping[str, Request], num_waiting: int) -> None:
        """Raise `RequestError` for what can never finish; pure."""
        settings, layout = self._settings, self._memory.layout
        if request.request_id in known:
            raise RequestError(f"request_id {request.request_id!r} is in use; give every request its own")
        if not request.prompt_len:
            raise PromptError("the prompt is empty: give at least one token")
        new, more = (1, " and one new token") if request.pooling is None else (0, "")  # a pooled prompt may fill it all
        if request.prompt_len + new > settings.max_model_len:
            raise PromptError(
                f"the prompt has {request.prompt_len} tokens; max_model_len={settings.max_model_len} leaves room for a "
                f"prompt of at most {settings.max_model_len - new}{more}. Shorten it or raise max_model_len"
            )
        if request.beam is not None and settings.speculation is not None:
            raise SamplingError(
                "beam search cannot run with speculative decoding: beams are chosen among the candidates of all beams "
                "at every position, so no beam has a next token to guess. Use n samples, or leave speculative out"
            )
        if request.width > settings.max_num_seqs:
            raise SamplingError(
                f"n (or best_of, or beam_width)={request.width} exceeds max_num_seqs={settings.max_num_seqs}; "
                "lower it or raise max_num_seqs"
            )
        if request.max_len <= request.prompt_len:
            raise PromptError(f"max_tokens leaves no token to generate after a prompt of {request.prompt_len}")
        if settings.max_queue is not None and num_waiting >= settings.max_queue:
            raise CapacityError(f"the queue is full: {num_waiting} requests wait, max_queue={settings.max_queue}")
        allocation = self._memory.allocation
        need = allocation.worst_case(request.prompt_len, request.max_len - 1, request.width)
        if need > settings.num_blocks:
            raise CapacityError(
                f"the request can never fit the KV pool: a prompt of {request.prompt_len} tokens, up to "
                f"{request.max_len - request.prompt_len} new ones and {request.width} sequence(s) need {need} blocks "
                f"of {layout.block_size}, the pool has {settings.num_blocks}. One sequence fits up to "
                f"{allocation.longest(settings.num_blocks)} tokens; lower max_tokens or n, or raise num_blocks"
            )

    # -- before running ------------------------------------------------------------------------------------------

    def judge(self, request: Request, running: list[Request], seats: int) -> Verdict:
        """May it start now, with `seats` of max_num_seqs taken? Remembers the prefix match for `admit`."""
        if any(s.num_pending for s in request.live()):
            return Verdict.LATER  # a token of it is still in flight
        if seats + seats_of(request) > self._settings.max_num_seqs:
            return Verdict.NO_ROOM
        if request.swapped is not None:
            return self._judge_swapped(request, running)
        leader = next(request.live())
        for partial in (True, False):
            match = self._memory.find(leader, partial=partial)
            key = self._memory.next_key(leader, match)
            if key is not None and self._computing.get(key, request.request_id) != request.request_id:
                return Verdict.LATER
            if self._fits(request, match, running):
                self._match = (request.request_id, match)
                return Verdict.YES
            if not match.partial:
                break
        return Verdict.NO_ROOM

    def _fits(self, request: Request, match: Match, running: list[Request]) -> bool:
        pool, allocation = self._memory.pool, self._memory.allocation
        taken = match.blocks()
        revived = sum(1 for b in taken if pool.count(b) == 0 and not pool.is_pending(b))
        copies = self._memory.layout.num_groups if match.partial else 0
        need = max(0, self._prompt_need(request, running) - len(taken)) + copies + revived
        return allocation.can_admit(need + self.outstanding())

    def _prompt_need(self, request: Request, running: list[Request]) -> int:
        """Blocks for what is known of the request and one more token of each sequence.

        A request that was pushed out `max_preemptions` times waits until nothing older can push it out again: its whole
        life is counted, and what everything older may still take. For the same reason an older request does not start
        while that could take blocks from such a one: its whole life is counted then, too.
        """
        whole = self._whole_need(request, running)
        return self._start_need(request) if whole is None else whole

    def _whole_need(self, request: Request, running: list[Request]) -> int | None:
        """Its whole life and what may come before it; None where nobody is protected from being pushed out again."""
        if not self._any_protected:
            return None
        newest = max((r.key for r in running if self._is_protected(r)), default=request.key)
        if not self._is_protected(request) and newest <= request.key:
            return None
        others = sum(self._may_still_take(r) for r in running if r.key <= max(newest, request.key))
        return self._memory.allocation.worst_case(request.prompt_len, request.max_len - 1, seats_of(request)) + others

    def _is_protected(self, request: Request) -> bool:
        return request.num_preemptions >= self._settings.max_preemptions > 0

    def _start_need(self, request: Request) -> int:
        known = max(len(s.token_ids) for s in request.live())
        positions = max(known, min(known + 1, request.max_len - 1))
        return self._memory.allocation.worst_case(request.prompt_len, positions, seats_of(request))

    def _may_still_take(self, request: Request) -> int:
        whole = self._memory.allocation.worst_case(request.prompt_len, request.max_len - 1, seats_of(request))
        return max(0, whole - _held(request))

    def outstanding(self) -> int:
        """Blocks that admitted prompts were counted with and have not taken yet; summed once per round."""
        if self._owed is not None:
            return self._owed
        static = self._settings.allocation == "static"  # beams fork whole reservations at any time
        for request in [r for r in self._promised if _prompt_done(r) and not (static and r.beam)]:
            del self._promised[request]
        self._owed = sum(max(0, promised - _held(request)) for request, promised in self._promised.items())
        return self._owed

    def _judge_swapped(self, request: Request, running: list[Request]) -> Verdict:
        groups = self._memory.layout.num_groups
        need = self._memory.swapped_size(request) + groups * request.num_live()
        need = max(need, self._whole_need(request, running) or 0)
        # Alone in the pool it always fits: the margin for the next token must not keep it out for ever.
        need = min(need, self._settings.num_blocks) if not running else need
        fits = self._memory.allocation.can_admit(need + self.outstanding())
        return Verdict.YES if fits else Verdict.NO_ROOM

    def outranked(self, request: Request, running: list[Request]) -> Request | None:
        """A running request of a lower priority class that must give way to this one; None if there is none."""
        victim = running[-1] if running else None
        if victim is None or victim.priority <= request.priority or victim.key <= request.key:
            return None
        if self._settings.allocation == "static" or self._is_protected(victim):
            return None
        return victim

    # -- acts ----------------------------------------------------------------------------------------------------

    def begin_round(self) -> None:
        """Admissions of another step begin: what is still to be taken has changed."""
        self._owed = None

    def started(self, request: Request) -> None:
        """An admitted request has taken the blocks of its first chunk."""
        if self._owed is not None:
            self._owed += max(0, self._promised.get(request, 0) - _held(request))

    def admit(self, request: Request) -> None:
        """Carry out the last positive verdict: bring swapped blocks back, or take the prefix match over."""
        memory = self._memory
        if request.swapped is not None:
            memory.swap_in(request)
            return
        leader = next(request.live())
        assert self._match is not None and self._match[0] == request.request_id
        match, self._match = self._match[1], None
        report = memory.report(leader, match)
        if request.num_preemptions == 0:
            request.cache_report = report
            request.num_cached_tokens = min(match.num_tokens, request.prompt_len)
        self._promised[request] = self._start_need(request)
        memory.acquire(leader, match)
        request.forked = request.num_live() == 1
        if memory.cache is not None:
            full = request.prompt_len // memory.layout.block_size
            for key in leader.keys[match.num_tokens // memory.layout.block_size : full]:
                self._computing.setdefault(key, request.request_id)

    def computed(self, keys: Iterable[bytes]) -> None:
        """These blocks are published: nobody needs to wait for them any more."""
        for key in keys:
            self._computing.pop(key, None)

    def forget(self, request: Request) -> None:
        """The request stopped running: it computes nothing and holds no promise."""
        self._promised.pop(request, None)
        self._owed = None
        self._any_protected |= request.num_preemptions + 1 >= self._settings.max_preemptions > 0
        if self._computing:
            for seq in request.sequences:
                for key in seq.keys:
                    if self._computing.get(key) == request.request_id:
                        del self._computing[key]


def seats_of(request: Request) -> int:
    """Places of `max_num_seqs` it takes: beams may fork up to their width, samples only become fewer."""
    return request.width if request.beam is not None else request.num_live()


def _held(request: Request) -> int:
    return sum(t.num_live for s in request.sequences for t in s.tables)


def _prompt_done(request: Request) -> bool:
    return request.forked and all(s.num_computed >= request.prompt_len for s in request.live())
