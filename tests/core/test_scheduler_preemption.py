"""Preemption: who goes, by which way, how often, and that nobody can tell from the answer."""

from __future__ import annotations

import random

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.preemption import prefers_swap, recompute_tokens
from octavo.core.sequence import Request, RequestState
from octavo.errors import CapacityError


def crowded(num_blocks: int = 12, **settings: object) -> tuple[Rig, list[Request]]:
    """Four requests of 10 + 30 tokens, ten blocks each at the end."""
    rig = Rig(num_blocks, script=never_ends, **settings)  # type: ignore[arg-type]
    return rig, [rig.add(prompt(10, salt), max_tokens=30) for salt in range(4)]


@pytest.mark.parametrize("way", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [False, True])
def test_answers_survive_preemption(way: str, caching: bool) -> None:
    rig, requests = crowded(
        preemption=way, num_host_blocks=0 if way == "recompute" else 40, enable_prefix_caching=caching
    )
    rig.run()
    counters = rig.scheduler.counters
    assert counters.preemptions > 2
    assert (counters.swaps > 0) == (way != "recompute")
    if way == "swap":
        assert counters.swaps == counters.preemptions and counters.recomputed_tokens == 0
    rig.check_answers(*requests)
    rig.check_empty()


def test_a_preempted_request_takes_no_place_in_the_queue() -> None:
    """`max_queue` bounds what has not begun; what was admitted once must not turn newcomers away."""
    rig, requests = crowded(max_queue=4)
    rig.until(lambda: any(q.num_preemptions and q in rig.scheduler.waiting for q in requests))
    new = [rig.add(prompt(10, 9), max_tokens=3) for _ in range(4 - rig.scheduler.waiting.num_new)]
    with pytest.raises(CapacityError, match="queue is full: 4 requests wait, max_queue=4"):
        rig.add(prompt(3))
    rig.scheduler.abort(next(q for q in requests if q.num_preemptions).request_id)
    assert rig.scheduler.waiting.num_new == 4
    rig.run()
    rig.check_answers(*new)
    rig.check_empty()


def test_no_token_is_sent_twice() -> None:
    rig, requests = crowded()
    rig.run()
    for request in requests:
        sent = [t for news in rig.news for t in news.token_ids if news.sequence.request is request]
        assert sent == request.sequences[0].output_token_ids


def test_the_newest_goes_first_and_the_oldest_always_advances() -> None:
    rig, requests = crowded()
    while rig.scheduler.has_work:
        computed = {q.request_id: q.num_preemptions for q in requests}
        oldest = next((q for q in requests if not q.finished), None)
        running = list(rig.scheduler.running)
        plan = rig.step()
        victims = [q for q in requests if q.num_preemptions > computed[q.request_id]]
        for victim in victims:
            stay = [q for q in running if q not in victims]
            assert all(q.key < victim.key for q in stay), "somebody newer stayed"
        if oldest is not None:
            assert oldest.sequences[0].seq_id in {s.seq_id for s in plan.scheduled}
    assert requests[0].num_preemptions == 0
    finished = sorted(requests, key=lambda q: q.finished_at or 0)
    assert finished == requests


def test_a_victim_keeps_its_place_in_the_queue() -> None:
    rig, requests = crowded()
    rig.until(lambda: requests[2].num_preemptions)
    late = rig.add(prompt(3, 9), max_tokens=2)
    assert next(iter(rig.scheduler.waiting)) is not late
    rig.run()
    assert (late.admitted_at or 0) > (requests[2].admitted_at or 0)


def test_the_cost_rule() -> None:
    """Swap when the blocks are cheaper to move than the tokens to compute again."""
    for cost, swaps in ((0.5, True), (20.0, False)):
        rig = Rig(20, script=never_ends, num_host_blocks=20, swap_block_tokens=cost)
        request = rig.add(prompt(10), max_tokens=8)
        rig.step()
        assert (recompute_tokens(request), rig.scheduler.memory.swap_size(request)) == (10, 3)
        assert prefers_swap(request, rig.scheduler.memory, rig.settings) is swaps


def test_the_prompt_of_samples_counts_once() -> None:
    rig = Rig(20, script=never_ends, num_host_blocks=20, swap_block_tokens=1.0)
    request = rig.add(prompt(10), n=3, max_tokens=8)
    rig.step()
    rig.step()
    assert (recompute_tokens(request), rig.scheduler.memory.swap_size(request)) == (13, 5)


def test_a_victim_that_does_not_fit_the_host_pool_is_recomputed() -> None:
    rig, requests = crowded(preemption="swap", num_host_blocks=2)
    rig.run()
    assert rig.scheduler.counters.preemptions > 0 and rig.scheduler.counters.swaps == 0
    rig.check_answers(*requests)
    rig.check_empty()


@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize("windows", [(None,), (6, None)])
@pytest.mark.parametrize("kind", ["samples", "beams"])
def test_groups_are_preempted_as_a_whole(way: str, windows: tuple[int | None, ...], kind: str) -> None:
    size = 12 if windows == (None,) else 20
    host = 60 if way == "swap" else 0
    rig = Rig(size, windows=windows, script=never_ends, preemption=way, num_host_blocks=host)
    old = rig.add(prompt(9, 3), max_tokens=30)
    group = rig.add(prompt(9), n=3, max_tokens=9) if kind == "samples" else rig.add(prompt(9), beam(3, 9))
    rig.until(lambda: group.num_preemptions)
    assert group.state is RequestState.WAITING and not any(s.tables for s in group.sequences)
    rig.run()
    if kind == "beams":
        alone = Rig(200, windows=windows, script=never_ends)
        solo = alone.add(prompt(9), beam(3, 9))
        alone.run()
        assert group.beam_state.finished == solo.beam_state.finished
        rig.check_answers(old)
    else:
        rig.check_answers(old, group)
    rig.check_empty()


def test_swapping_keeps_what_is_shared_shared() -> None:
    rig = Rig(11, script=never_ends, preemption="swap", num_host_blocks=40)
    old = rig.add(prompt(9, 3), max_tokens=32)
    group = rig.add(prompt(9), n=3, max_tokens=12)
    rig.until(lambda: group.num_preemptions)
    host = rig.scheduler.memory.host_pool
    assert host is not None and host.num_shared == 2, "two whole prompt blocks, held by three tables"
    rig.until(lambda: group.state is RequestState.RUNNING)
    assert rig.pool.num_shared == 2
    rig.run()
    rig.check_answers(old, group)
    rig.check_empty()


@pytest.mark.parametrize("bound", [1, 2, 8])
@pytest.mark.parametrize("seed", range(6))
def test_preemptions_are_bounded(bound: int, seed: int) -> None:
    """However crowded, and whatever urgent requests come in: no request is pushed out more often than the bound + 1."""
    draw = random.Random(seed)
    rig = Rig(14, script=never_ends, max_preemptions=bound, priority_aging_s=1.0)
    requests = []
    for _ in range(40):
        if draw.random() < 0.6:
            salt, size = draw.randrange(9), draw.randrange(1, 12)
            urgency = draw.choice([0, 0, -1, 2])
            requests.append(rig.add(prompt(size, salt), max_tokens=draw.randrange(1, 36), priority=urgency))
        rig.step()
    rig.run()
    assert max(q.num_preemptions for q in requests) <= bound + 1
    rig.check_answers(*requests)
    rig.check_empty()


def test_no_bound_means_no_bound() -> None:
    """max_preemptions=0: an urgent request may always push a less urgent one out."""
    rig = Rig(script=never_ends, max_num_seqs=1, max_preemptions=0)
    low = rig.add(prompt(5), priority=3, max_tokens=20)
    for i in range(12):
        rig.step()
        rig.add(prompt(4, i), max_tokens=1)
        rig.step()
    rig.run()
    assert low.num_preemptions == 12
    rig.check_answers(low)
    rig.check_empty()


@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_urgent_requests_that_grow_cannot_push_one_out_for_ever(bound: int, way: str) -> None:
    """Each fits when it comes, and takes the blocks of the long one only later."""
    host = 60 if way == "swap" else 0
    rig = Rig(14, script=never_ends, max_preemptions=bound, preemption=way, num_host_blocks=host)
    long = rig.add(prompt(8), max_tokens=40, priority=1)
    rig.step()
    urgent: list[Request] = []
    while not long.finished and len(urgent) < 30:
        urgent.append(rig.add(prompt(4, len(urgent) + 1), max_tokens=28))
        rig.until(lambda: urgent[-1].finished)
        rig.step()
    rig.run()
    assert 1 <= long.num_preemptions <= bound + 1
    rig.check_answers(long, *urgent)
    rig.check_empty()


def test_a_request_preempted_in_the_middle_of_its_prompt() -> None:
    rig = Rig(10, script=never_ends, max_num_batched_tokens=2)
    old = rig.add(prompt(8), max_tokens=30)
    new = rig.add(prompt(20, 1), max_tokens=4)
    rig.until(lambda: new.num_preemptions)
    assert not new.sequences[0].num_output
    rig.run()
    rig.check_answers(old, new)
    rig.check_empty()


def test_a_deadline_ends_a_preempted_request() -> None:
    rig = Rig(12, script=never_ends, preemption="swap", num_host_blocks=30)
    old, new = rig.add(prompt(14), max_tokens=30), rig.add(prompt(14, 1), max_tokens=25, deadline_ms=155)
    rig.run()
    assert new.num_preemptions == 1 and new.sequences[0].finish_reason == "deadline"
    rig.check_answers(old, new)
    rig.check_empty()
