"""Ctrl-C that waits: once at the end of the body, twice at once, nested, and never in the way of others' handlers."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from octavo.interrupts import Uninterrupted


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_waits_for_the_end_of_the_outermost_body() -> None:
    reached = []

    def body() -> None:
        with Uninterrupted():
            with Uninterrupted():
                press()
                reached.append("inner")
            reached.append("outer")
        reached.append("never")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert reached == ["inner", "outer"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_press_does_not_wait() -> None:
    reached = []

    def body() -> None:
        with Uninterrupted():
            press()
            reached.append("first")
            press()
            reached.append("never")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_in_the_body_is_not_hidden() -> None:
    def body() -> None:
        with Uninterrupted():
            press()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        body()


def test_other_handlers_and_other_threads_are_left_alone() -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Uninterrupted():
            press()
            assert seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, previous)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with Uninterrupted():
                pass
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors
