"""The collector rests while an engine is built, and is afterwards as it was before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from octavo.starting import without_collecting


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    enabled = gc.isenabled()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


class Node:
    """Something that can be in a circle."""

    def __init__(self) -> None:
        self.other: Node = self


def test_it_rests_and_then_goes_on() -> None:
    gc.enable()
    with without_collecting():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(ValueError, match="x"), without_collecting():
        raise ValueError("x")
    assert gc.isenabled()


def test_one_that_was_off_stays_off() -> None:
    gc.disable()
    with without_collecting():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_nested_ones_begin_again_only_at_the_end() -> None:
    gc.enable()
    with without_collecting():
        with without_collecting():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_circles_of_the_body_are_collected_later_but_not_at_once() -> None:
    gc.enable()
    gc.collect()
    with without_collecting():
        gone = weakref.ref(Node())
    gc.collect(1)
    assert gone() is not None  # old now: young collections do not look at it
    gc.collect()
    assert gone() is None


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.enable()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with without_collecting():
        kept = [Node() for _ in range(10)]
    # Frozen objects can still go by their reference counts.
    assert 0 < gc.get_freeze_count() <= frozen and kept
