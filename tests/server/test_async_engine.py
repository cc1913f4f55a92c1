"""The engine on its own thread: deltas, bounded buffers, aborts in every state, refusals, failure, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from helpers.serving import scripted_engine
from octavo.async_engine import AsyncEngine
from octavo.errors import PromptError, RequestError, SamplingError, UnavailableError
from octavo.llm import LLM
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.text.prompts import Prompt


def run(work: Callable[[AsyncEngine], Awaitable[Any]], *, buffer: int = 256, **settings: Any) -> Any:
    """`work` with a started engine; afterwards every block is free again and the books are right."""

    async def whole() -> Any:
        engine = AsyncEngine(scripted_engine(**settings), buffer=buffer)
        engine.start()
        try:
            result = await work(engine)
            if engine.failure is None:
                used = await asyncio.wrap_future(engine.call(check_books))
                assert used == 0
        finally:
            await engine.shutdown(0)
        return result

    return asyncio.run(whole())


def check_books(engine: Any) -> int:
    while engine.has_unfinished():
        engine.step()
    engine.audit()
    return int(engine.scheduler.memory.pool.num_used)


def params(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "seed": 1, **given})


def test_deltas_joined_are_the_answer_of_the_offline_engine() -> None:
    async def work(engine: AsyncEngine) -> Any:
        request = await engine.submit(Prompt("Once upon a time"), params(n=3, logprobs=1))
        texts, ids, logprobs, ends = ["", "", ""], [[], [], []], [[], [], []], [0, 0, 0]
        async for delta in request:
            assert not ends[delta.index], "a delta after the last"
            texts[delta.index] += delta.text
            ids[delta.index] += delta.token_ids
            logprobs[delta.index] += delta.logprobs
            ends[delta.index] += delta.finish_reason is not None
        assert ends == [1, 1, 1]
        assert [o.text for o in request.final.outputs] == texts
        assert [o.token_ids for o in request.final.outputs] == ids
        assert [o.logprobs for o in request.final.outputs] == logprobs
        return texts

    offline = LLM.from_engine(scripted_engine()).generate("Once upon a time", params(n=3, logprobs=1))[0]
    assert run(work) == [o.text for o in offline.outputs]


def test_a_reader_that_is_late_gets_merged_deltas_and_the_whole_text() -> None:
    async def work(engine: AsyncEngine) -> None:
        late = await engine.submit(Prompt("abc"), params(max_tokens=200, n=2, logprobs=0))
        prompt = await engine.submit(Prompt("xyz"), params(max_tokens=200))
        await prompt.result()  # the other one runs beside it and is read by nobody
        while late.final is None:
            assert late.num_pending <= 5 + 2
            await asyncio.sleep(0.001)
        assert late.num_pending <= 5
        texts, count = ["", ""], 0
        async for delta in late:
            texts[delta.index] += delta.text
            assert len(delta.logprobs) == len(delta.token_ids)
            count += 1
        assert count <= 7
        assert texts == [o.text for o in late.final.outputs]

    run(work, buffer=5)


def test_best_of_gives_only_the_kept_samples_and_beams_their_result() -> None:
    async def work(engine: AsyncEngine) -> None:
        best = await engine.submit(Prompt("abc"), params(n=2, best_of=4))
        deltas = [delta async for delta in best]
        assert [d.index for d in deltas] == [0, 1]
        assert [d.text for d in deltas] == [o.text for o in best.final.outputs]
        beams = await engine.submit(Prompt("abc"), BeamSearchParams(beam_width=2, max_tokens=4))
        await beams.result()
        assert len(beams.beams.sequences) == 2

    run(work)


def in_state(engine: Any, request_id: str, when: str) -> bool:
    """Has the request come as far as `when` says?"""
    found = engine.scheduler.requests.get(request_id)
    if found is None or when == "after the end":
        return False
    if when == "preempted":
        return found.state.value == "waiting" and found.num_preemptions > 0
    return when == "at once" or any(sequence.num_tokens > found.prompt_len for sequence in found.sequences)


@pytest.mark.parametrize("when", ["at once", "running", "twice", "after the end", "preempted"])
def test_an_abort_frees_the_blocks_in_every_state(when: str) -> None:
    """The engine stands still in the state that is meant, so the abort meets it however busy the machine is."""
    reached, aborted = threading.Event(), threading.Event()

    def stand_still(engine: Any) -> None:
        if not reached.is_set() and in_state(engine, "victim", when):
            reached.set()
            assert aborted.wait(60)

    async def work(engine: AsyncEngine) -> None:
        engine.on_step(stand_still)
        requests = [await engine.submit(Prompt(f"{i} hello"), params(max_tokens=150)) for i in range(5)]
        victim = await engine.submit(Prompt("5 hello"), params(max_tokens=150), request_id="victim")
        if when == "after the end":
            await victim.result()
        else:
            assert await asyncio.to_thread(reached.wait, 60), f"it was never {when}"
        for _ in range(2 if when == "twice" else 1):
            victim.abort()
        aborted.set()
        output = await victim.result()
        assert output.outputs[0].finish_reason == ("length" if when == "after the end" else "abort")
        for other in requests:
            assert (await other.result()).outputs[0].finish_reason == "length"

    run(work, **({"num_blocks": 24, "seconds": 0.0005} if when == "preempted" else {}))


def test_a_refusal_is_raised_at_the_door_and_leaves_nothing() -> None:
    async def work(engine: AsyncEngine) -> None:
        cases: list[tuple[Prompt, SamplingParams, type[Exception], str]] = [
            (Prompt(""), params(), PromptError, "empty"),
            (Prompt(token_ids=(9999,)), params(), PromptError, "outside the vocabulary"),
            (Prompt("x" * 600), params(), PromptError, "max_model_len=512"),
            (Prompt("x"), params(logit_bias={99999: 1.0}), SamplingError, "outside the vocabulary"),
        ]
        for prompt, given, kind, words in cases:
            with pytest.raises(kind, match=words):
                await engine.submit(prompt, given)
        with pytest.raises(PromptError, match="prompt 1: "):
            await engine.submit_all([Prompt("good"), Prompt(token_ids=(9999,)), Prompt("good")], params())
        assert engine.num_live == 0
        assert engine.num_waiting == 0
        gate = threading.Event()
        engine.call(lambda _: gate.wait())  # so that the second comes before the first has run
        both = [asyncio.create_task(engine.submit(Prompt("good"), params(), request_id="a")) for _ in range(2)]
        await asyncio.sleep(0.05)
        gate.set()
        with pytest.raises(RequestError, match="'a' is in use"):
            await both[1]
        assert (await (await both[0]).result()).finished

    run(work)


def test_an_error_in_taking_a_request_in_is_that_requests_alone() -> None:
    async def work(engine: AsyncEngine) -> None:
        other = await engine.submit(Prompt("abc"), params(max_tokens=100))

        def breaks(*args: Any, **given: Any) -> None:
            raise ZeroDivisionError("a bug")

        real = engine.engine.add_request
        engine.engine.add_request = breaks  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await engine.submit(Prompt("abc"), params())
        engine.engine.add_request = real  # type: ignore[method-assign]
        assert len((await other.result()).outputs[0].token_ids) == 100
        assert engine.failure is None

    run(work)


def test_a_caller_cancelled_while_it_hands_over_leaves_nothing() -> None:
    async def work(engine: AsyncEngine) -> None:
        blocked = threading.Event()
        engine.call(lambda _: blocked.wait(10))
        task = asyncio.ensure_future(engine.submit(Prompt("abc"), params(max_tokens=300)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        blocked.set()
        await asyncio.wrap_future(engine.call(lambda _: None))
        while engine.num_live:
            await asyncio.sleep(0.001)
        assert engine.num_waiting == 0

    run(work)


def test_deadlines_count_from_the_arrival() -> None:
    async def work(engine: AsyncEngine) -> None:
        cut = await engine.submit(Prompt("abc"), params(max_tokens=400), deadline_ms=400)
        output = (await cut.result()).outputs[0]
        assert output.finish_reason == "deadline"
        assert 0 < len(output.token_ids) < 400
        late = await engine.submit(Prompt("abc"), params(deadline_ms=1000), arrived=time.monotonic() - 5)
        output = (await late.result()).outputs[0]
        assert (output.finish_reason, output.token_ids) == ("deadline", [])

    run(work, seconds=0.005)


def test_idle_means_no_steps_and_work_goes_on_at_once() -> None:
    async def work(engine: AsyncEngine) -> None:
        before = await asyncio.wrap_future(engine.call(lambda e: e.stats().steps))
        await asyncio.sleep(0.05)
        assert await asyncio.wrap_future(engine.call(lambda e: e.stats().steps)) == before
        await (await engine.submit(Prompt("abc"), params(max_tokens=5))).result()
        assert await asyncio.wrap_future(engine.call(lambda e: e.stats().steps)) == before + 5

    run(work)


def test_calls_and_watchers_run_on_the_engines_thread() -> None:
    async def work(engine: AsyncEngine) -> None:
        names: list[str] = []
        remove = engine.on_step(lambda e: names.append(threading.current_thread().name))

        def broken(_: Any) -> None:
            raise ValueError("no")

        engine.on_step(broken)
        await (await engine.submit(Prompt("abc"), params(max_tokens=5))).result()
        await asyncio.wrap_future(engine.call(lambda _: None))
        assert names == ["octavo-engine"] * 5
        remove()
        await (await engine.submit(Prompt("abc"), params(max_tokens=5))).result()
        assert len(names) == 5
        with pytest.raises(ValueError, match="no"):
            await asyncio.wrap_future(engine.call(broken))

    run(work)


def test_a_failing_engine_ends_every_request_with_an_error_and_says_so() -> None:
    async def work(engine: AsyncEngine) -> None:
        seen: list[BaseException] = []
        engine.on_failure(seen.append)
        fault = RuntimeError("the device is gone")

        def breaks_with_all_of_them(inner: Any) -> None:
            if len(inner.scheduler.running) == 5:
                inner.runner.fault = fault

        engine.on_step(breaks_with_all_of_them)
        requests = [await engine.submit(Prompt("abc"), params(max_tokens=400)) for _ in range(5)]
        for request in requests:
            with pytest.raises(UnavailableError, match="the device is gone"):
                await request.result()
        assert engine.failure is fault
        with pytest.raises(UnavailableError, match="has stopped"):
            await engine.submit(Prompt("abc"), params())
        with pytest.raises(UnavailableError):
            engine.call(lambda _: 1).result(5)
        while not seen:
            await asyncio.sleep(0.001)
        assert seen == [fault]

    run(work, seconds=0.001)


@pytest.mark.parametrize("patience", [0.0, 10.0])
def test_shutdown_lets_requests_finish_or_ends_them(patience: float) -> None:
    async def work() -> None:
        engine = AsyncEngine(scripted_engine(seconds=0.002))
        engine.start()
        request = await engine.submit(Prompt("abc"), params(max_tokens=60 if patience else 480))
        ending = asyncio.ensure_future(engine.shutdown(patience))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            await engine.submit(Prompt("abc"), params())
        await ending
        output = await asyncio.wait_for(request.result(), 5)
        assert output.outputs[0].finish_reason == ("length" if patience else "abort")

    asyncio.run(work())


def test_long_texts_are_encoded_off_the_event_loop() -> None:
    async def work(engine: AsyncEngine) -> None:
        threads: list[str] = []
        tokenizer = engine.engine.tokenizer
        assert tokenizer is not None
        real = type(tokenizer).encode

        class Noting(type(tokenizer)):  # type: ignore[misc]
            def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
                threads.append(threading.current_thread().name)
                return real(self, text, add_special_tokens)

        object.__setattr__(tokenizer, "__class__", Noting)
        await (await engine.submit(Prompt("short"), params())).result()
        await (await engine.submit(Prompt("long " * 500), params(max_tokens=2))).result()
        assert threads[0] == threading.main_thread().name
        assert threads[1].startswith("octavo-text")

    run(work, max_model_len=4000, num_blocks=300)


def test_latencies_are_counted_once_per_request_and_token() -> None:
    async def work(engine: AsyncEngine) -> None:
        for _ in range(3):
            await (await engine.submit(Prompt("abc"), params(max_tokens=10), stream=False)).result()
        found = engine.latencies
        assert found.first_token.view().count == found.end_to_end.view().count == found.queue.view().count == 3
        assert found.between_tokens.view().count == 3 * 9
        assert found.finished == {"length": 3}
        assert found.prompt_tokens == 3 * 4

    run(work)
