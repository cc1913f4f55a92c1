"""Several threads on one `LLM`: each gets its own answers, a bad call harms nobody, and everybody gets a turn."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, OctavoError
from octavo.turns import Turns


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("threads")
    write_tiny("qwen3-tied", path)
    return str(path)


def load(model: str, **given: Any) -> LLM:
    return LLM(model, dtype="float32", device="cpu", max_model_len=128, num_blocks=400, debug=True, **given)


def together(*bodies: Any) -> list[BaseException]:
    """Run all at once, to the end; what they raised."""
    raised: list[BaseException] = []

    def guarded(body: Any) -> None:
        try:
            body()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "nobody is left waiting"
    return raised


GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.mark.parametrize("speculative", [None, "ngram"])
def test_each_thread_gets_its_own_answers(tiny: str, speculative: str | None) -> None:
    prompts = [[[10 + i, 20 + j, 30 + i * j] for j in range(3)] for i in range(5)]
    with load(tiny) as alone:
        expected = [[o.outputs[0].token_ids for o in alone.generate(p, GREEDY)] for p in prompts]
    found: dict[int, Any] = {}
    refused: list[OctavoError] = []
    with load(tiny, speculative=speculative, enable_prefix_caching=False) as llm:

        def ask(i: int) -> None:
            for _ in range(3):
                found[i] = [o.outputs[0].token_ids for o in llm.generate(prompts[i], GREEDY)]
                assert found[i] == expected[i]

        def read(i: int) -> None:
            ids: list[int] = []
            for delta in llm.stream(prompts[i][0], GREEDY):
                ids += delta.token_ids
            assert ids == expected[i][0]

        def drop() -> None:
            for _ in range(5):
                stream = llm.stream(prompts[0][0], GREEDY)
                next(stream)
                del stream
                gc.collect()

        def wrong() -> None:
            for bad in ([], [[10**9]], [list(range(500))]):
                try:
                    llm.generate(bad or [[]], GREEDY)
                except OctavoError as error:
                    refused.append(error)

        def look() -> None:
            for _ in range(20):
                llm.audit()
                llm.stats()
                llm.pool_view()

        bodies = [*(lambda i=i: ask(i) for i in range(5)), lambda: read(1), lambda: read(2), drop, wrong, look]
        assert together(*bodies) == []
        assert len(found) == 5 and len(refused) == 3
        gc.collect()
        llm.audit()
        view = llm.pool_view()
        assert view.num_used == 0 and llm.stats().running == llm.stats().waiting == 0
        assert [o.outputs[0].token_ids for o in llm.generate(prompts[4], GREEDY)] == expected[4]


def test_closing_ends_what_other_threads_wait_for(tiny: str) -> None:
    llm = load(tiny)
    long = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    going = threading.Event()
    llm.watch(going.set)

    def ask() -> None:
        llm.generate([[1, 2, 3]] * 8, long)

    def close() -> None:
        assert going.wait(60)
        llm.close()

    raised = together(ask, close)
    assert all(isinstance(error, ConfigError) and "closed" in str(error) for error in raised)


# -- turns ---------------------------------------------------------------------------------------------------------


def test_who_waits_comes_next() -> None:
    """A thread that lets go only to come back at once does not keep the others out."""
    turns, order = Turns(), []

    def greedy() -> None:
        for _ in range(200):
            with turns:
                order.append("greedy")
                time.sleep(0.0005)

    def late() -> None:
        time.sleep(0.02)
        begun = len(order)
        with turns:
            order.append("late")
        assert len(order) - begun <= 10

    assert together(greedy, late) == []
    assert order.index("late") < 190


def test_a_turn_is_one_thread_s_and_may_be_taken_again() -> None:
    turns, inside, most = Turns(), [0], [0]

    def body() -> None:
        for _ in range(300):
            with turns, turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                with turns:
                    inside[0] -= 1

    assert together(*[body] * 4) == []
    assert most[0] == 1 and inside[0] == 0


def test_an_error_gives_the_turn_back() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="mine"), turns:
        raise ValueError("mine")
    done = []

    def body() -> None:
        with turns:
            done.append(1)

    assert together(body) == [] and done
