"""Which sequences a draft model follows.

To guess for a sequence the draft must have computed all of it, so following costs a pass in every step and one over the
prompt, whether it guesses or not. A sequence is followed from its first position to the first step at which that has
stopped paying, and not again: what the draft missed may lie behind its windows. Whether it pays is foretold, by the
costs in the settings, from what came of the latest guesses of all sequences; now and then one is followed against the
forecast, as else nothing would be learnt when the load changes.

`Sequence.drafted` says it of a sequence, `ScheduledSequence.drafted` of a step, and the prefix cache of a block: who
takes over positions that the draft has not computed cannot be followed.
"""

from __future__ import annotations

from octavo.core.chance import LIKELIEST, Chance
from octavo.core.row_costs import MARGIN, RowCosts
from octavo.core.sequence import Sequence

PATIENCE = 8  # steps in which the load leaves no room for a guess, after which a sequence is left
EXPLORE = 16  # of so many sequences that the forecast is against, one is followed
FORGET = 0.98  # weight of what was learnt before, per guess judged
TRUST = 6.0  # guesses that the forecast counts as, for a new sequence


class Following:
    """Decides for one scheduler. costs: of the model's steps; passes: of the draft's, None: they cost nothing."""

    def __init__(self, num_tokens: int, costs: RowCosts, passes: RowCosts | None) -> None:
        self._num_tokens = num_tokens
        self._costs = costs
        self._passes = passes
        self.all = Chance(LIKELIEST, TRUST, FORGET)  # of all sequences' guesses; before anything is known: hope
        self._against = 0
        self.left = 0  # sequences that the draft does not follow, or not any more, since the start

    def begin(self, seq: Sequence, crowd: int) -> float:
        """Decide on a new sequence, one of `crowd` at once; returns the chance that its guesses start with."""
        chance = self.all.chance
        seq.drafted = self._pays(crowd, chance)
        if not seq.drafted and self._pays(crowd, LIKELIEST):
            self._against += 1
            if self._against % EXPLORE == 0:
                seq.drafted, chance = True, LIKELIEST
        self.left += not seq.drafted
        return chance

    def idle(self, seq: Sequence, chance: float, steps: int) -> None:
        """It got no guess, for so many steps by now. Hopeless even alone: it goes on without the draft at once."""
        if steps >= PATIENCE or not self._pays(1, chance):
            seq.drafted = False
            self.left += 1

    def cost(self, guesses: int, followed: int) -> float:
        """Of the draft in a step: `guesses` passes and the one over what is left, over `followed` rows each."""
        return 0.0 if self._passes is None or not followed else (guesses + 1) * self._passes.time(followed)

    def _pays(self, crowd: int, chance: float) -> bool:
        """Would `crowd` sequences that all are guessed for have more tokens per second than without?"""
        least = MARGIN * crowd / self._costs.time(crowd)
        tokens = 1.0
        for guesses in range(1, self._num_tokens + 1):
            tokens += chance**guesses
            time = self._costs.time(crowd * (1 + guesses)) + self.cost(guesses, crowd)
            if crowd * tokens / time >= least:
                return True
        return False
