"""`Screen`: the largest output of each row of a product, by way of a copy of its weight in six bits.

The output head of a model with a large vocabulary is most of what a small model reads for a token, and a greedy token
needs one of its outputs. The copy says how large each can be at most; the weight itself is read only where that leaves
a doubt (csrc/head_screen.h). How many doubts there are depends on the input, so whether this is quicker than the whole
product is measured as it runs, for each number of rows; the result is the same bits either way.
"""

from __future__ import annotations

import time
from typing import Any

from octavo.kernels.cpu.loader import native

FIRST_GAP, LONGEST_GAP = 32, 1024  # calls between two tries of the slower way, as long as it stays the slower one
FAR = 1.5  # times as slow: not tried again soon
WEIGHT = 0.25  # of the newest time in a mean


class Screen:
    """packed: a weight of floats [out, in]; bias_address: float32 [out], or 0. Both must outlive this.

    The copy is made when a second product is asked for: whoever wants one token does not wait for it, and whoever never
    wants a greedy one has the memory.
    """

    def __init__(self, packed: Any, bias_address: int) -> None:
        self._packed, self._bias = packed, bias_address
        self._native: Any = None  # HeadScreen
        self._calls = 0
        self._ways: dict[int, QuickerWay] = {}

    @property
    def usable(self) -> bool:
        """False: not made yet, or the weight or bias holds a number that is not finite, so nothing can be promised."""
        return self._native is not None and bool(self._native.usable)

    def argmax(self, place: tuple[int, int, int, int, int, int]) -> None:
        """place: the arguments of `PackedWeight.argmax` without the bias: x, its type, stride, rows, ids, values."""
        self._calls += 1
        if self._calls == 2:
            self._native = native().HeadScreen(self._packed, self._bias)
        if not self.usable:
            return self._packed.argmax(*place, self._bias)
        way = self._ways.setdefault((place[3] - 1).bit_length(), QuickerWay())
        screened = way.choose()
        before = time.perf_counter()
        if screened:
            self._native.argmax(*place)
        else:
            self._packed.argmax(*place, self._bias)
        way.took(screened, time.perf_counter() - before)


class QuickerWay:
    """Which of two ways to go, by how long each took lately. The first is tried first, the slower one now and then."""

    def __init__(self) -> None:
        self._means: dict[bool, float] = {}
        self._calls = 0
        self._next, self._gap = 2, FIRST_GAP  # the second call may still be the first to touch its memory

    def choose(self) -> bool:
        """True: the first way."""
        self._calls += 1
        quicker = self._quicker()
        if self._calls <= self._next:
            return quicker
        self._next, self._gap = self._calls + self._gap, min(2 * self._gap, LONGEST_GAP)
        return not quicker

    def took(self, first: bool, seconds: float) -> None:
        """How long it took to go that way."""
        before = self._quicker()
        known = self._means.get(first)
        # What else the machine does can only make a call longer.
        self._means[first] = seconds if known is None or seconds < known else known + WEIGHT * (seconds - known)
        if self._quicker() != before:
            self._gap = FIRST_GAP

    def _quicker(self) -> bool:
        return len(self._means) < 2 or self._means[True] <= self._means[False]
