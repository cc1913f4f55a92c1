"""Stop strings: the rule of the first ending, whatever the deltas; nothing shown that may still become one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.text.stop import StopChecker


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The rule said in words: the first end at which any stop string ends; the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], StopChecker]:
    checker = StopChecker(stops, include=include)
    shown = []
    for piece in pieces:
        shown.append(checker.push(piece))
        if checker.stop is not None:
            return shown, checker
    shown.append(checker.flush())
    return shown, checker


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


@given(
    st.text("abc", max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(0, 100), max_size=12),
    st.booleans(),
)
def test_any_cut_gives_the_answer_of_the_rule(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    shown, checker = run(pieces_of(text, cuts), stops, include)
    want, stop = expected(text, stops, include)
    assert "".join(shown) == want
    assert checker.stop == stop
    if stop is not None:
        assert checker.cut == len(want)


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_shows_as_much_as_is_certain_and_no_more(text: str, stops: list[str]) -> None:
    checker = StopChecker(stops)
    shown = ""
    for end in range(1, len(text) + 1):
        shown += checker.push(text[end - 1])
        if checker.stop is not None:
            return
        held = next(k for k in range(end, -1, -1) if any(s.startswith(text[end - k : end]) for s in stops) or k == 0)
        assert shown == text[: end - held]


@pytest.mark.parametrize("order", [["world", "hello"], ["hello", "world"]])
def test_list_order_does_not_matter(order: list[str]) -> None:
    shown, checker = run(["say hello world"], order)
    assert ("".join(shown), checker.stop) == ("say ", "hello")


def test_of_two_that_end_together_the_longer_is_the_match() -> None:
    assert "".join(run(["one two three"], ["two", "one two"])[0]) == ""
    assert "".join(run(["one two three"], ["two", "one two"], include=True)[0]) == "one two"


def test_a_shorter_string_inside_a_longer_one_ends_first() -> None:
    shown, checker = run(["Paris is"], ["Paris is", "is"])
    assert ("".join(shown), checker.stop) == ("Par", "is")


def test_unarmed_text_cannot_complete_a_stop_but_can_begin_one() -> None:
    checker = StopChecker(["ab"])
    assert checker.push("xab", armed=False) == "xab"
    assert checker.push("a", armed=False) == ""
    assert checker.push("b") == ""
    assert (checker.stop, checker.cut) == ("ab", 3)


def test_many_long_stop_strings_cost_one_step_per_character() -> None:
    rng = random.Random(1)
    stops = ["".join(rng.choice("xy") for _ in range(500)) for _ in range(64)]
    text = "".join(rng.choice("xy") for _ in range(20_000))
    shown, checker = run(list(text), stops)
    assert checker.stop is None
    assert "".join(shown) == text
