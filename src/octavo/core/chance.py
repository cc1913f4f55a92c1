"""`Chance`: how likely a guess is to come true, learnt from the latest."""

from __future__ import annotations

LIKELIEST = 0.97  # nobody is trusted more


class Chance:
    """Starts at `chance`, which counts as `trust` guesses; each guess judged weighs `memory` of the next."""

    __slots__ = ("_hits", "_memory", "_tried")

    def __init__(self, chance: float, trust: float, memory: float) -> None:
        self._tried, self._hits, self._memory = trust, trust * chance, memory

    @property
    def chance(self) -> float:
        """Probability that a guess behind right ones is right."""
        return min(LIKELIEST, self._hits / self._tried)

    def learn(self, tried: int, hits: int) -> None:
        """Of `tried` guesses that could be judged `hits` came true."""
        for i in range(tried):
            self._tried = self._tried * self._memory + 1.0
            self._hits = self._hits * self._memory + (i < hits)
