"""Guesses without a model: what followed the last time that the sequence said the same.

`Lookup` finds earlier places where the last few tokens stood already and copies what came next, as a compressor copies
from its window (prompt lookup, or n-gram, decoding). It knows one sequence's tokens and nothing else; its answer is a
function of them, so a replayed run proposes the same.

    tokens   … a b c d e … a b c        the tail "a b c" stood before: propose "d e …"
"""

from __future__ import annotations

from collections.abc import Sequence

CANDIDATES = 8  # earlier places that are compared, latest first


class Lookup:
    """Grows with its sequence: O(1) per token to learn, a few comparisons to propose.

    shortest, longest: the tail must agree in at least `shortest` tokens; agreement beyond `longest` counts for nothing.
    Of the places looked at the longest agreement wins, of equals the latest.
    """

    __slots__ = ("_before", "_last", "_longest", "_shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> where the token after it stands, latest
        self._before: list[int] = []  # the same n-gram's place before that one, -1: none; by place

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """Up to `count` tokens that may follow `tokens`; empty where nothing agrees. `tokens` only ever grows."""
        known = len(tokens)
        self._learn(tokens, known)
        if known <= self._shortest:
            return ()
        place = self._find(tokens, known)
        if place < 0:
            return ()
        copied = list(tokens[place : place + count])
        while len(copied) < count:  # the copy runs into its own beginning: a loop
            copied.append(copied[len(copied) - (known - place)])
        return tuple(copied)

    def _learn(self, tokens: Sequence[int], known: int) -> None:
        size, last, before = self._shortest, self._last, self._before
        for place in range(len(before), known):
            gram = tuple(tokens[place - size : place]) if place >= size else ()
            before.append(last.get(gram, -1) if gram else -1)
            if gram:
                last[gram] = place

    def _find(self, tokens: Sequence[int], known: int) -> int:
        size = self._shortest
        place = self._last.get(tuple(tokens[known - size : known]), -1)
        best, best_length = -1, 0
        for _ in range(CANDIDATES):
            if place < 0:
                break
            length = size
            while length < min(self._longest, place) and tokens[place - length - 1] == tokens[known - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if length == self._longest:
                break
            place = self._before[place]
        return best
