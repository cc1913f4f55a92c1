"""Stop strings in a stream of text: what may be shown, where to cut, and with which token the answer ends.

The rule, independent of how the text was cut into deltas: the text ends at the first character at which it ends with
any stop string; of several that end there, the longest is the match. So the order of the list never matters, nor does
the size of the deltas, and no token is computed after the first full match.

Text that may still become a stop string (the longest suffix that is a proper prefix of one) is not shown. Matching
is an Aho-Corasick automaton (Aho and Corasick, 1975): one step per character, whatever the number and length of the
strings; its depth *is* the number of characters to hold back.

Knows characters, not tokens; `octavo.text.output` joins the two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache


class StopStrings:
    """The automaton of one set of stop strings; immutable, shared by all sequences that use the set."""

    def __init__(self, strings: Iterable[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.fail: list[int] = [0]
        self.depth: list[int] = [0]
        self.match: list[str | None] = [None]  # longest stop string that is a suffix of this state
        for string in strings:
            self._add(string)
        self._link()

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self.next[state]:
                self.next[state][char] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self.next[state][char]
        self.match[state] = string

    def _link(self) -> None:
        """Breadth first: a state's fail link is its longest proper suffix that is also a state."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                queue.append(child)
                self.fail[child] = self.advance(self.fail[state], char)
                if self.match[child] is None:
                    self.match[child] = self.match[self.fail[child]]

    def advance(self, state: int, char: str) -> int:
        """State after one more character."""
        edges = self.next
        while True:
            child = edges[state].get(char)
            if child is not None:
                return child
            if state == 0:
                return 0
            state = self.fail[state]


@lru_cache(maxsize=256)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of `strings`, built once per set."""
    return StopStrings(strings)


class StopChecker:
    """Stop strings of one sequence.

    push(text) -> text that may be shown. When a string matched, `stop` is that string, `cut` the number of characters
    of the whole text that remain (with the string itself if `include`), and push returns the text up to there; nothing
    may be pushed after that.
    """

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._automaton = stop_strings(tuple(strings))
        self._include = include
        self._state = 0
        self._seen = 0  # characters pushed
        self._held = ""
        self.stop: str | None = None
        self.cut: int | None = None

    def push(self, text: str, *, armed: bool = True) -> str:
        """Show what can be shown of `text`. armed=False: a string that ends in this text does not count (min_tokens),
        one that begins in it and ends in a later one does."""
        advance, match, state = self._automaton.advance, self._automaton.match, self._state
        for offset, char in enumerate(text):
            state = advance(state, char)
            if match[state] is not None and armed:
                return self._stopped(match[state] or "", self._held + text[: offset + 1])
        self._state = state
        self._seen += len(text)
        whole = self._held + text
        hold = self._automaton.depth[self._longest_open(state)]
        shown = len(whole) - hold
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _longest_open(self, state: int) -> int:
        """Longest suffix state that can still grow into a stop string."""
        while state and not self._automaton.next[state]:
            state = self._automaton.fail[state]
        return state

    def _stopped(self, stop: str, unshown: str) -> str:
        """`unshown`: everything not shown yet, ending with the stop string's last character."""
        self.stop = stop
        shown = unshown if self._include else unshown[: len(unshown) - len(stop)]
        self.cut = self._seen - len(self._held) + len(shown)
        self._held = ""
        return shown
