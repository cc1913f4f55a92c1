"""Who rests in a `RestingScheduler`, when something is due for each, and how much they all read together.

A rest is one number and an alarm: after step s its sequence has `offset + s` tokens, so sums over all of them follow
from the sums of their offsets, and no step costs anything. Alarms are a heap; one of a sequence that was woken early is
dropped when it surfaces. Invariant: every sequence in here has exactly one live alarm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from itertools import count

from octavo.core.kv_layout import KVLayout
from octavo.core.sequence import Sequence


class Why(Enum):
    """What is due. DECISION: its end, or another way of reading; it must be awake."""

    TAKE = "its block is full: it takes another one"
    PUBLISH = "it fills its block"
    DECISION = "anything else"


@dataclass(slots=True, eq=False)
class Rest:
    """After step s the sequence has `offset + s` tokens. In step `wake` something is due for it."""

    seq: Sequence
    offset: int
    full: int  # it is longer than so many of the windows, smallest first
    wake: int = 0
    why: Why = Why.TAKE

    @property
    def age(self) -> tuple[float, int]:
        """Oldest request first."""
        return self.seq.request.key


class Rests:
    """All rests, by sequence; `len`, `in` and iteration are those of the sequences that rest."""

    def __init__(self, layout: KVLayout, *, publishes: bool) -> None:
        self._block_size = layout.block_size
        self._publishes = publishes
        #: Distinct windows of the layers, smallest first, None (sees all) last.
        self.windows: list[int | None] = sorted(
            {g.window for g in layout.groups}, key=lambda w: (w is None, w if w is not None else 0)
        )
        self._rests: dict[Sequence, Rest] = {}
        self._alarms: list[tuple[int, int, Rest]] = []  # (step, ticket, who)
        self._tickets = count()
        self._full = [0] * len(self.windows)  # per window: sequences longer than it
        self._growing = [0] * len(self.windows)  # per window: the others,
        self._offsets = [0] * len(self.windows)  # and the sum of their offsets

    def __len__(self) -> int:
        return len(self._rests)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._rests

    def __iter__(self) -> Iterator[Rest]:
        return iter(self._rests.values())

    def get(self, seq: Sequence) -> Rest | None:
        return self._rests.get(seq)

    def reads(self, step: int) -> list[int]:
        """Per window: positions that all of them read in that step, the token computed in it included."""
        return [
            self._offsets[i] + self._growing[i] * (step - 1) + (window or 0) * self._full[i]
            for i, window in enumerate(self.windows)
        ]

    # -- coming and going --------------------------------------------------------------------------------------------

    def lay_down(self, seq: Sequence, step: int) -> bool:
        """Let it rest after that step, unless it is to be awake in the next; did it lie down?"""
        known = len(seq.token_ids)
        full = 0
        while full < len(self.windows) and (window := self.windows[full]) is not None and known > window:
            full += 1
        rest = Rest(seq, known - step, full)
        self._plan(rest)
        if rest.wake <= step + (rest.why is Why.DECISION):
            return False
        self._rests[seq] = rest
        self._tally(rest, 1)
        self._push(rest)
        return True

    def take_up(self, rest: Rest) -> None:
        """It rests no longer."""
        del self._rests[rest.seq]
        self._tally(rest, -1)

    def _tally(self, rest: Rest, sign: int) -> None:
        for i in range(len(self.windows)):
            if i < rest.full:
                self._full[i] += sign
            else:
                self._growing[i] += sign
                self._offsets[i] += sign * rest.offset

    # -- alarms ------------------------------------------------------------------------------------------------------

    def next_alarm(self) -> int:
        """The step in which something is due next. Somebody must rest."""
        alarms = self._alarms
        while self._rests.get(alarms[0][2].seq) is not alarms[0][2]:
            heappop(alarms)
        return alarms[0][0]

    def due(self, step: int) -> list[Rest]:
        """Everybody for whom something is due up to that step; their alarms are gone."""
        due = []
        while self._alarms and self._alarms[0][0] <= step:
            rest = heappop(self._alarms)[2]
            if self._rests.get(rest.seq) is rest:
                due.append(rest)
        return due

    def put_back(self, due: list[Rest]) -> None:
        """Nothing was done for them: the alarms stand."""
        for rest in due:
            self._push(rest)

    def set_alarm(self, rest: Rest) -> None:
        """What was due is done: when is something due next?"""
        self._plan(rest)
        self._push(rest)

    def _push(self, rest: Rest) -> None:
        heappush(self._alarms, (rest.wake, next(self._tickets), rest))

    def _plan(self, rest: Rest) -> None:
        """When something is due for it, and what. In step s it computes position offset + s - 2."""
        seq, offset = rest.seq, rest.offset
        rest.why, wake = Why.TAKE, seq.writable_until + 2 - offset
        if self._publishes:
            full = (seq.num_published + 1) * self._block_size + 1 - offset
            if full < wake:
                rest.why, wake = Why.PUBLISH, full
        decision = seq.request.max_len - offset
        if rest.full < len(self.windows) and (window := self.windows[rest.full]) is not None:
            decision = min(decision, window + 2 - offset)
        if decision <= wake:
            rest.why, wake = Why.DECISION, decision
        rest.wake = wake
