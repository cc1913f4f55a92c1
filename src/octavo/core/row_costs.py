"""What a step costs by its rows, and how many guesses that makes worth checking."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate

MARGIN = 1.02  # tokens per second must grow by this much before anything is guessed


class RowCosts:
    """T(rows), linear between the measured points and beyond the last; constant without any."""

    def __init__(self, points: tuple[tuple[int, float], ...]) -> None:
        self._margin = MARGIN if points else 1.0
        self._rows = [rows for rows, _ in points]
        self._times = list(accumulate((time for _, time in points), max))  # noise must not make rows cheaper

    def time(self, rows: int) -> float:
        if not self._rows:
            return 1.0
        if len(self._rows) == 1:
            return self._times[0]
        at = min(max(bisect_right(self._rows, rows), 1), len(self._rows) - 1)
        (r0, r1), (t0, t1) = self._rows[at - 1 : at + 1], self._times[at - 1 : at + 1]
        return max(t0 + (t1 - t0) * (rows - r0) / (r1 - r0), 1e-12)

    def is_worth(self, drawing: int, rows: int, gains: list[float], extra: float) -> bool:
        """Do guesses that bring `gains` pay in a step of `rows` rows that brings `drawing` tokens without them?"""
        more = (drawing + sum(gains)) / (self.time(rows + len(gains)) + extra)
        return more >= self._margin * drawing / self.time(rows)

    def share_out(
        self, drawing: int, rows: int, offers: list[tuple[float, int]], extra: Callable[[int], float] = lambda _: 0.0
    ) -> list[int]:
        """Guesses for each offer (chance, most): the number with the most tokens per time, the likeliest first.

        extra(n): what guessing costs in addition, with n guesses in the longest row (passes of a draft model).
        """
        ranked = sorted((-(chance ** (j + 1)), j, i) for i, (chance, most) in enumerate(offers) for j in range(most))
        best_rate, best = self._margin * drawing / self.time(rows), 0
        gain, longest = 0.0, 0
        for count, (minus_gain, j, _) in enumerate(ranked, 1):
            gain -= minus_gain
            longest = max(longest, j + 1)
            rate = (drawing + gain) / (self.time(rows + count) + extra(longest))
            if rate > best_rate:
                best_rate, best = rate, count
        shares = [0] * len(offers)
        for _, _, i in ranked[:best]:
            shares[i] += 1
        return shares
