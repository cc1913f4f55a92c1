"""Steps in flight: plans made before the last result is known, and blocks that wait until no step reads them."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.block_pool import BlockPool
from octavo.core.step import LAST_SAMPLED
from octavo.errors import InternalError


def answers(rig: Rig) -> list[list[list[int]]]:
    requests = [rig.add(prompt(10 + salt, salt), max_tokens=12, n=1 + salt % 2) for salt in range(5)]
    rig.run()
    rig.check_answers(*requests)
    rig.check_empty()
    return [rig.tokens_of(q) for q in requests]


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_step_is_planned_before_the_previous_token_is_known(delay: int) -> None:
    rig = Rig(delay=delay, script=never_ends)
    request = rig.add(prompt(5), max_tokens=6)
    plans = [rig.step() for _ in range(delay + 2)]
    assert [p.scheduled[0].token_ids for p in plans[1:]] == [(LAST_SAMPLED,)] * (delay + 1)
    assert request.sequences[0].num_pending == delay
    rig.run()
    rig.check_answers(request)
    assert sum(p.num_tokens for p in rig.plans) == 5 + 5, "nothing is computed past the length limit"


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("blocks", [16, 64])
@pytest.mark.parametrize("caching", [False, True])
def test_answers_are_those_of_a_runner_without_delay(delay: int, blocks: int, caching: bool) -> None:
    now = Rig(blocks, script=never_ends, enable_prefix_caching=caching)
    late = Rig(blocks, delay=delay, script=never_ends, enable_prefix_caching=caching)
    assert answers(late) == answers(now)


def test_a_sequence_that_ends_unseen_computes_at_most_the_delay_more() -> None:
    rig = Rig(delay=1, script=lambda tokens, index: 3 if len(tokens) == 9 else 50)
    request = rig.add(prompt(5), max_tokens=50)
    rig.run()
    assert rig.tokens_of(request) == [[50, 50, 50, 50, 3]]
    assert sum(p.num_tokens for p in rig.plans) == 5 + 4 + 1
    rig.check_empty()


@pytest.mark.parametrize("delay", [1, 2])
def test_blocks_wait_for_the_last_step_that_reads_them(delay: int) -> None:
    rig = Rig(16, delay=delay, script=never_ends)
    request = rig.add(prompt(10), max_tokens=20)
    for _ in range(delay + 1):
        rig.step()
    held = [*request.sequences[0].tables[0].ids]
    assert rig.scheduler.in_flight == delay
    rig.scheduler.abort(request.request_id)
    assert (rig.pool.num_used, rig.pool.num_pending) == (0, len(held))
    follower = rig.add(prompt(5, 1), max_tokens=3)
    for _ in range(delay):
        plan = rig.step()
        taken = {b for s in plan.scheduled for u in s.tables for b in u.block_ids}
        assert not taken & set(held) or not rig.pool.num_pending
    assert rig.pool.num_pending == 0
    rig.run()
    rig.check_answers(follower)


def test_waiting_blocks_are_awaited_not_taken_from_others() -> None:
    """A pool full of blocks that come back with the step in flight is no reason to preempt."""
    rig = Rig(8, delay=1, script=never_ends)
    first = rig.add(prompt(14), max_tokens=4)
    rig.step()
    rig.step()
    rig.scheduler.abort(first.request_id)
    second, third = rig.add(prompt(12, 1), max_tokens=5), rig.add(prompt(9, 2), max_tokens=3)
    rig.run()
    assert rig.scheduler.counters.preemptions == 0
    rig.check_answers(second, third)
    rig.check_empty()


def test_a_cached_block_that_waits_can_be_found() -> None:
    rig = Rig(16, delay=1, script=never_ends, enable_prefix_caching=True)
    first = rig.add(prompt(10), max_tokens=20)
    rig.step()
    rig.step()
    rig.step()
    rig.scheduler.abort(first.request_id)
    assert rig.pool.num_pending
    second = rig.add(prompt(10), max_tokens=4)
    rig.step()
    assert second.num_cached_tokens >= 8
    rig.run()
    rig.check_answers(second)
    rig.check_empty()


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("limit", [5, 2048])
def test_preemption_with_steps_in_flight(delay: int, way: str, limit: int) -> None:
    host = 40 if way == "swap" else 0
    rig = Rig(14, delay=delay, script=never_ends, preemption=way, num_host_blocks=host, max_num_batched_tokens=limit)
    requests = [rig.add(prompt(10, salt), max_tokens=26, n=1 + (salt == 1)) for salt in range(4) if salt != 1]
    group = rig.add(prompt(10, 1), n=3, max_tokens=8)
    rig.run()
    assert rig.scheduler.counters.preemptions > 0
    sent = [t for news in rig.news for t in news.token_ids if news.sequence.request is requests[1]]
    assert sent == requests[1].sequences[0].output_token_ids, "a token in flight during preemption is sent once"
    rig.check_answers(*requests, group)
    rig.check_empty()


@pytest.mark.parametrize("delay", [1, 2])
@pytest.mark.parametrize("limit", [2, 5, 2048])
@pytest.mark.parametrize("static", [False, True])
def test_beams_with_steps_in_flight(delay: int, limit: int, static: bool) -> None:
    """Also pushed out and resumed while candidates of theirs are on the way, and in exactly fitting reservations."""
    settings: dict[str, Any] = {"allocation": "static", "max_model_len": 40} if static else {}
    rig = Rig(30 if static else 15, delay=delay, script=never_ends, max_num_batched_tokens=limit, **settings)
    old = rig.add(prompt(9, 3), max_tokens=30)
    searches = [rig.add(prompt(9, salt), beam(3, 9)) for salt in range(2)]
    rig.run()
    assert static or rig.scheduler.counters.preemptions > 0
    for salt, search in enumerate(searches):
        alone = Rig(200, script=never_ends)
        solo = alone.add(prompt(9, salt), beam(3, 9))
        alone.run()
        assert search.beam_state.finished == solo.beam_state.finished
    rig.check_answers(old)
    rig.check_empty()


def test_prompt_logprobs_of_a_sample_that_left_in_flight_are_kept() -> None:
    rig = Rig(delay=1, script=never_ends, max_num_batched_tokens=8)
    request = rig.add(prompt(20), n=2, max_tokens=4, prompt_logprobs=1)
    rig.step()
    rig.step()
    rig.scheduler.abort(request.request_id, 0)
    rig.run()
    assert [p and p.token_ids[0] for p in request.prompt_logprobs] == [None, *prompt(20)[1:]]
    rig.check_answers(request)
    rig.check_empty()


def test_a_block_handed_out_too_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof that the tests above can fail: without the fence the content check of the runner objects."""
    monkeypatch.setattr(BlockPool, "fence", lambda self, step: None)
    rig = Rig(8, delay=1, script=never_ends)
    first = rig.add(prompt(20), max_tokens=9)
    rig.step()
    rig.step()
    rig.scheduler.abort(first.request_id)
    rig.add(prompt(20, 1), max_tokens=9)
    with pytest.raises(InternalError, match="holds another content: step 2 was still in flight when step 3 wrote it"):
        rig.run()


def test_the_runner_notices_a_missing_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "is_private", lambda self, block: True)
    rig = Rig(script=never_ends)
    rig.add(prompt(6), n=2, max_tokens=6)
    with pytest.raises(InternalError, match="holds another content"):
        rig.run()
