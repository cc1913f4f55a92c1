"""Speculation: which sequences check how many guesses in a step, and what comes of it.

A guess is a token put behind a decoding sequence as if it had been drawn. The step computes it like any other position
and the runner draws behind it for as long as each guess is what it drew, so the answer is the one without guesses,
token for token; only the number of steps changes. Guesses live on what a round left over: tokens of the budget and
blocks that nobody was promised. Nobody is preempted and no admission waits for them. What was wrong is taken back in
`settle`, in the update of the same step: positions, blocks, and nothing of it was ever published.

How many: the number that makes the most tokens per second by the costs in the settings. With A tokens expected from a
step of R rows, one guess more (of a sequence whose guesses come true with probability p, behind j others) is worth
p^(j+1) tokens and costs T(R + 1) - T(R). All is judged together, so guesses stop where the batch makes them a loss.
p is learnt per sequence from its latest guesses; n-gram guesses that were not worth checking are compared with what
was drawn anyway, so a sequence that begins to repeat itself is noticed at no cost. A draft model's guesses cost passes
of its own: `following.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.core.chance import Chance
from octavo.core.following import TRUST, Following
from octavo.core.kv_layout import largest
from octavo.core.memory import KVMemory
from octavo.core.proposals import Lookup
from octavo.core.rounds import Round
from octavo.core.row_costs import RowCosts
from octavo.core.sequence import Sequence
from octavo.core.settings import SpeculationSettings
from octavo.core.step import PROPOSED

FORGET = 0.95  # weight of what was learnt before, per guess judged


@dataclass(slots=True)
class SpeculationCounters:
    """Since the start. drafts: rows with guesses; drafted, accepted: guesses; by place: of first, second, … guesses."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)


class Outlook(Chance):
    """How one sequence's guesses have fared."""

    __slots__ = ("idle", "lookup", "shadow")

    def __init__(self, lookup: Lookup | None, chance: float = 0.5, trust: float = 2.0) -> None:
        super().__init__(chance, trust, FORGET)
        self.lookup = lookup
        self.shadow = -1  # the first guess, where none was checked
        self.idle = 0  # steps since the last guess


class Speculator:
    """Adds guesses to a round and takes wrong ones back. One per scheduler."""

    def __init__(self, settings: SpeculationSettings, memory: KVMemory) -> None:
        self.settings = settings
        self.counters = SpeculationCounters(drafted_at=[0] * settings.num_tokens, accepted_at=[0] * settings.num_tokens)
        self._memory = memory
        self._costs = RowCosts(settings.row_costs)
        self.following: Following | None = None
        if settings.method == "draft":
            passes = RowCosts(settings.draft_costs) if settings.draft_costs else None
            self.following = Following(settings.num_tokens, self._costs, passes)

    def stats(self) -> dict[str, Any]:
        """The counters by the names of `EngineStats`."""
        c = self.counters
        return {
            "spec_drafts": c.drafts,
            "spec_draft_tokens": c.drafted,
            "spec_accepted_tokens": c.accepted,
            "spec_draft_tokens_per_pos": tuple(c.drafted_at),
            "spec_accepted_tokens_per_pos": tuple(c.accepted_at),
            "spec_left_sequences": self.following.left if self.following else 0,
        }

    # -- planning ------------------------------------------------------------------------------------------------

    def plan(self, round_: Round, promised: int, crowd: int) -> None:
        """Everything else is decided. promised: blocks that admitted prompts were counted with and have not taken.

        crowd: sequences that there are, or will be, at once.
        """
        if self.following is not None:
            for seq in round_.decided:
                if seq.drafted is None:
                    seq.speculation = Outlook(None, self.following.begin(seq, crowd), TRUST)
        if not round_.budget or not round_.decided:
            return
        rows, drawing = sum(round_.decided.values()), len(round_.decided)
        extra = self._extra(round_)
        worth = self._costs.is_worth(drawing, rows, [1.0], extra(1))
        if not worth and self.following is None:
            return  # not even a certain guess would pay
        found = []
        for seq, count in round_.decided.items():
            if count == 1 and seq.drafted is not False and _may_guess(seq):
                outlook = seq.speculation or self._outlook(seq)
                room = min(self.settings.num_tokens, seq.request.max_len - len(seq.token_ids) - 1, round_.budget)
                if guesses := self._guesses(seq, outlook, room):
                    found.append((seq, outlook, guesses))
        wanted = [0] * len(found)
        if worth and found:
            wanted = self._costs.share_out(drawing, rows, [(o.chance, len(g)) for _, o, g in found], extra)
        for (seq, outlook, guesses), count in zip(found, wanted):
            taken = self._take(seq, min(count, round_.budget), promised) if count else 0
            if taken:
                round_.proposals[seq] = guesses[:taken]
                round_.decided[seq] += taken
                round_.budget -= taken
                outlook.shadow, outlook.idle = -1, 0
            else:
                outlook.shadow = guesses[0]
                outlook.idle += 1
                if self.following is not None:
                    self.following.idle(seq, outlook.chance, outlook.idle)

    def _extra(self, round_: Round) -> Callable[[int], float]:
        """What guessing costs besides rows of the step, by the guesses of the longest row."""
        following = self.following
        if following is None:
            return lambda guesses: 0.0
        followed = sum(count == 1 and seq.drafted is True for seq, count in round_.decided.items())
        return lambda guesses: following.cost(guesses, followed)

    def _outlook(self, seq: Sequence) -> Outlook:
        settings = self.settings
        if self.following is not None:
            outlook = Outlook(None, self.following.all.chance, TRUST)
        else:
            outlook = Outlook(Lookup(settings.lookup_min, settings.lookup_max))
        seq.speculation = outlook
        return outlook

    def _guesses(self, seq: Sequence, outlook: Outlook, count: int) -> tuple[int, ...]:
        """At most `count` guesses, none of them an end: behind an end nothing is drawn."""
        if count < 1:
            return ()
        if outlook.lookup is None:
            return (PROPOSED,) * count
        guesses = outlook.lookup.propose(seq.token_ids, count)
        ends = seq.request.end_ids
        return guesses[: next((i for i, token in enumerate(guesses) if token in ends), len(guesses))]

    def _take(self, seq: Sequence, count: int, promised: int) -> int:
        """Blocks for up to `count` guesses; returns for how many there are."""
        memory, start = self._memory, seq.num_computed
        spare = memory.pool.num_available - promised
        count = largest(count, lambda n: memory.allocation.blocks_needed(seq, start, start + 1 + n) <= spare)
        if count and start + 1 + count > seq.writable_until:
            memory.extend(seq, start, start + 1 + count)
        return count

    # -- results -------------------------------------------------------------------------------------------------

    def settle(self, seq: Sequence, drawn: tuple[int, ...]) -> list[bytes]:
        """`drawn` came for `seq`, and as much of it as counts is in `seq.token_ids`: take back the guesses it refuted.

        Returns the keys of blocks that are complete, and published, now.
        """
        outlook, proposed = seq.speculation, seq.num_proposed
        if not proposed:
            if outlook is not None and outlook.shadow >= 0 and drawn:
                outlook.learn(1, outlook.shadow == drawn[0])
                outlook.shadow = -1
            return []
        seq.num_proposed = 0
        accepted = len(drawn) - 1
        judged = min(accepted + 1, proposed)
        outlook.learn(judged, accepted)
        if self.following is not None:
            self.following.all.learn(judged, accepted)
        counters = self.counters
        counters.drafts += 1
        counters.drafted += proposed
        counters.accepted += accepted
        for place in range(proposed):
            counters.drafted_at[place] += 1
            counters.accepted_at[place] += place < accepted
        self._memory.rewind(seq, len(seq.token_ids) - 1)
        return self._memory.publish(seq)


def _may_guess(seq: Sequence) -> bool:
    """It draws in this step, for itself alone, and everything before is known."""
    request = seq.request
    return (
        request.forked
        and request.beam is None
        and request.pooling is None
        and seq.num_pending == 0
        and seq.num_computed + 1 == len(seq.token_ids)
    )
