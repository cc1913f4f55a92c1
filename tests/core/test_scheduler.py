"""Scheduler over the scripted runner: batching, chunks, samples, priorities, deadlines, aborts, shared prefixes."""

from __future__ import annotations

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.kv_layout import build_layout
from octavo.core.sequence import Request, RequestState
from octavo.core.step import StepPlan, StepResult
from octavo.errors import InternalError


def rows(plan: StepPlan) -> dict[int, int]:
    """sequence -> tokens in the step."""
    return {s.seq_id: s.num_tokens for s in plan.scheduled}


# -- batching and chunks -----------------------------------------------------------------------------------------


def test_requests_join_and_leave_between_steps() -> None:
    rig = Rig(script=never_ends)
    first = rig.add(prompt(5), max_tokens=3)
    assert rows(rig.step()) == {0: 5}
    rig.add(prompt(6, 1), max_tokens=5)
    assert rows(rig.step()) == {0: 1, 1: 6}
    rig.add(prompt(7, 2), max_tokens=2)
    assert rows(rig.step()) == {0: 1, 1: 1, 2: 7}
    assert first.finished and rig.pool.num_used == 2 + 2
    assert rows(rig.step()) == {1: 1, 2: 1}
    rig.run()
    rig.check_empty()


def test_decodes_come_before_prompt_chunks() -> None:
    rig = Rig(script=never_ends, max_num_batched_tokens=6)
    rig.add(prompt(4), max_tokens=9)
    rig.step()
    rig.add(prompt(20, 1), max_tokens=9)
    assert rows(rig.step()) == {0: 1, 1: 5}
    rig.add(prompt(4, 2), max_tokens=9)
    assert rows(rig.step()) == {0: 1, 1: 5}
    assert rows(rig.step()) == {0: 1, 1: 5}
    assert rows(rig.step()) == {0: 1, 1: 5}
    assert rows(rig.step()) == {0: 1, 1: 1, 2: 4}


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 2048])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_chunked_prefill(limit: int, length: int) -> None:
    rig = Rig(64, block_size=16, max_num_batched_tokens=limit)
    request = rig.add(prompt(length), max_tokens=20)
    other = rig.add(prompt(16, 1), max_tokens=20)
    rig.run()
    chunks = [s.num_tokens for plan in rig.plans for s in plan.scheduled if s.seq_id == 0]
    assert sum(chunks[: -(-length // limit)]) == length and max(chunks) == min(limit, length)
    assert all(plan.num_tokens <= limit for plan in rig.plans)
    first_draw = next(i for i, p in enumerate(rig.plans) for s in p.scheduled if s.seq_id == 0 and s.sample_ids)
    assert first_draw == -(-length // limit) - 1, "no token is drawn before the whole prompt is computed"
    rig.check_answers(request, other)
    rig.check_empty()


def test_max_num_seqs_counts_sequences() -> None:
    rig = Rig(script=never_ends, max_num_seqs=4)
    for salt, n in enumerate((2, 1, 2, 1)):
        rig.add(prompt(5, salt), n=n, max_tokens=6)
    rig.step()
    assert [r.request_id for r in rig.scheduler.running] == ["r0", "r1"], "r2 has no seats, and nobody passes it"
    rig.run()
    assert rig.scheduler.counters.peak_running == 3
    rig.check_empty()


def test_a_beam_search_takes_the_seats_of_its_full_width() -> None:
    rig = Rig(max_num_seqs=4)
    rig.add(prompt(5), beam(3))
    rig.add(prompt(5, 1))
    rig.add(prompt(5, 2))
    rig.step()
    assert len(rig.scheduler.running) == 2
    rig.run()
    rig.check_empty()


def test_a_step_of_nothing() -> None:
    rig = Rig()
    assert rig.step().is_empty and not rig.scheduler.has_work


def test_a_result_out_of_order_is_an_error() -> None:
    rig = Rig(delay=1)
    rig.add(prompt(5))
    rig.plan()
    rig.plan()
    with pytest.raises(InternalError, match="result of step 2 came out of order"):
        rig.scheduler.update(StepResult(2))
    with pytest.raises(InternalError, match=r"2 steps are in flight; update\(\) must come first"):
        rig.scheduler.schedule()


def test_a_runner_error_ends_that_sequence_only() -> None:
    rig = Rig(script=never_ends)
    bad, good = rig.add(prompt(5), max_tokens=4), rig.add(prompt(5, 1), max_tokens=4)
    plan = rig.plan()
    result = rig.runner.execute(plan)
    drawn = {**result.drawn, 0: type(result.drawn[0])((), error="logits hold a NaN")}
    rig.take(StepResult(plan.step_id, drawn))
    assert bad.sequences[0].finish_reason == "error" and bad.sequences[0].stop_reason == "logits hold a NaN"
    rig.run()
    rig.check_answers(good)
    rig.check_empty()


@pytest.mark.parametrize("limit", [1, 2, 2048])
def test_an_error_in_one_beam_ends_the_search(limit: int) -> None:
    """Also when the beam in error is the last to report, or the others have not yet."""
    for step in range(2, 12):
        rig = Rig(max_num_batched_tokens=limit)
        search, other = rig.add(prompt(3), beam(3, 6)), rig.add(prompt(3, 1), max_tokens=6)
        while rig.scheduler.has_work:
            plan = rig.plan()
            result = rig.runner.execute(plan)
            drawn = dict(result.drawn)
            if plan.step_id >= step:
                ids = {s.seq_id for s in search.sequences}
                drawn |= {i: type(d)((), error="a NaN") for i, d in drawn.items() if i in ids and i == max(drawn)}
            rig.take(StepResult(plan.step_id, drawn))
        reasons = {(s.finish_reason, s.stop_reason) for s in search.sequences}
        assert reasons in ({("error", "a NaN")}, {("beam", None)})
        rig.check_answers(other)
        rig.check_empty()


def test_finish_reasons_and_limits() -> None:
    rig = Rig(script=lambda tokens, index: 3 if len(tokens) == 8 else 50)
    ends, cut = rig.add(prompt(5), max_tokens=9), rig.add(prompt(5, 1), max_tokens=3)
    ignores = rig.add(prompt(5, 2), max_tokens=6, min_tokens=4)
    full = rig.add(prompt(127, 3), max_tokens=9)
    named = rig.add(prompt(5, 4), max_tokens=9, stop_token_ids=[50], end_ids=(3, 50))
    rig.run()
    reasons = [(q.sequences[0].finish_reason, q.sequences[0].num_output) for q in (ends, cut, ignores, full, named)]
    assert reasons == [("stop", 4), ("length", 3), ("length", 6), ("length", 1), ("stop", 1)]
    assert (ends.sequences[0].stop_reason, named.sequences[0].stop_reason) == (None, 50)


# -- samples of one prompt ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [60, 61, 63, 64])
@pytest.mark.parametrize("limit", [16, 2048])
def test_samples_share_the_prompt(length: int, limit: int) -> None:
    rig = Rig(100, script=never_ends, max_num_batched_tokens=limit)
    request = rig.add(prompt(length), n=4, max_tokens=20)
    rig.run()
    prefilled = sum(s.num_tokens for p in rig.plans for s in p.scheduled if s.start < length)
    assert prefilled == length, "one prefill for all samples"
    own = -(-(length + 19) // 4) - length // 4
    assert rig.pool.peak_used <= -(-length // 4) + 4 * own + 4
    assert rig.scheduler.memory.num_forks == 3
    # The tail block is copied by all but the one that writes last; none where the prompt ends at a block's edge.
    assert rig.scheduler.memory.num_copies == (0 if length % 4 == 0 else 3)
    assert len({tuple(t) for t in rig.tokens_of(request)}) == 4
    rig.check_answers(request)
    rig.check_empty()


def test_samples_without_copy_on_write_copy_the_prompt() -> None:
    rig = Rig(100, script=never_ends, copy_on_write=False)
    request = rig.add(prompt(40), n=4, max_tokens=8)
    rig.run()
    assert rig.scheduler.memory.num_copies == 30 and rig.pool.peak_used == 4 * 12
    rig.check_answers(request)
    rig.check_empty()


def test_static_allocation_reserves_and_never_shares() -> None:
    rig = Rig(40, script=never_ends, allocation="static", max_model_len=40)  # four reservations of ten blocks
    requests = [rig.add(prompt(9, salt), max_tokens=6) for salt in range(3)]
    group = rig.add(prompt(9, 5), n=2, max_tokens=6)
    rig.step()
    assert rig.pool.num_used == 30 and len(rig.scheduler.running) == 3, "the group of two waits as a whole"
    tables = [q.sequences[0].tables[0].ids for q in requests]
    assert [ids == list(range(ids[0], ids[0] + 10)) for ids in tables] == [True] * 3
    rig.run()
    assert rig.scheduler.counters.preemptions == 0 and rig.scheduler.memory.num_copies == 3
    rig.check_answers(*requests, group)
    rig.check_empty()


def test_a_group_is_admitted_as_a_whole() -> None:
    rig = Rig(16, script=never_ends)
    holder = rig.add(prompt(40), max_tokens=3)
    rig.step()
    group = rig.add(prompt(8, 1), n=4, max_tokens=4)  # 2 + 4 blocks, 5 are left
    rig.step()
    assert group.state is RequestState.WAITING and not any(s.tables for s in group.sequences)
    rig.run()
    assert rig.scheduler.counters.preemptions == 0
    rig.check_answers(holder, group)


# -- equal prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [8, 2048])
def test_two_equal_prompts_arriving_together_compute_the_prefix_once(limit: int) -> None:
    rig = Rig(64, enable_prefix_caching=True, max_num_batched_tokens=limit)
    first, second = rig.add(prompt(30)), rig.add([*prompt(28), 1, 2])
    third = rig.add(prompt(9, 1))  # nothing in common: passes the one that waits
    rig.step()
    assert second.state is RequestState.WAITING
    assert third.state is (RequestState.RUNNING if limit > 30 else RequestState.WAITING)
    rig.run()
    prefilled = sum(s.num_tokens for p in rig.plans for s in p.scheduled if s.start < 28 and s.seq_id in (0, 1))
    assert prefilled == 30
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 28, 0)
    rig.check_answers(first, second, third)
    rig.check_empty()


def test_waiting_for_a_prefix_ends_with_its_computer() -> None:
    rig = Rig(64, enable_prefix_caching=True, max_num_batched_tokens=8)
    first, second = rig.add(prompt(30)), rig.add(prompt(30))
    rig.step()
    rig.scheduler.abort(first.request_id)
    rig.run()
    assert second.num_cached_tokens == 8, "the blocks that were done are used"
    rig.check_answers(second)
    rig.check_empty()


def test_a_leader_that_leaves_hands_the_prompt_over() -> None:
    rig = Rig(64, enable_prefix_caching=True, max_num_batched_tokens=8, script=never_ends)
    request = rig.add(prompt(30), n=3)
    rig.step()
    held = rig.pool.num_used
    assert rig.scheduler.abort(request.request_id, 0) and rig.pool.num_used == held
    rig.run()
    prefilled = sum(s.num_tokens for p in rig.plans for s in p.scheduled if s.start < 30)
    assert prefilled == 30, "nothing is computed twice"
    assert [s.finish_reason for s in request.sequences] == ["abort", "length", "length"]
    rig.check_answers(request)
    rig.check_empty()


# -- priorities --------------------------------------------------------------------------------------------------


def order_of_admission(requests: list[Request]) -> list[str]:
    return [r.request_id for r in sorted(requests, key=lambda r: r.admitted_at or 0.0)]


def test_urgent_requests_come_first_and_equals_in_order() -> None:
    rig = Rig(max_num_seqs=1)
    requests = [rig.add(prompt(5, i), priority=p, max_tokens=2) for i, p in enumerate((0, 5, -1, 0, -1))]
    rig.run()
    assert order_of_admission(requests) == ["r2", "r4", "r0", "r3", "r1"]


def test_an_urgent_request_pushes_a_less_urgent_one_out_but_not_its_equals() -> None:
    rig = Rig(max_num_seqs=2, script=never_ends)
    rig.add(prompt(5), priority=0, max_tokens=20)
    low = rig.add(prompt(5, 1), priority=3, max_tokens=20)
    rig.step()
    urgent = rig.add(prompt(5, 2), priority=0, max_tokens=20)
    rig.step()
    assert [r.request_id for r in rig.scheduler.running] == ["r0", "r2"] and low.num_preemptions == 1
    equal = rig.add(prompt(5, 3), priority=0, max_tokens=20)
    rig.step()
    assert equal.state is RequestState.WAITING and urgent.num_preemptions == 0
    rig.run()
    assert order_of_admission([low, urgent, equal]) == ["r1", "r2", "r3"]
    rig.check_empty()


def test_a_less_urgent_request_never_takes_blocks_from_an_urgent_one() -> None:
    rig = Rig(14, script=never_ends, max_num_seqs=4)
    low = rig.add(prompt(8), priority=5, max_tokens=40)
    rig.step()
    high = rig.add(prompt(8, 1), priority=0, max_tokens=40)
    rig.run()
    assert high.num_preemptions == 0 and low.num_preemptions >= 1
    assert (high.finished_at or 0) < (low.finished_at or 0)
    rig.check_answers(low, high)


def test_no_request_is_starved_by_a_stream_of_urgent_ones() -> None:
    rig = Rig(max_num_seqs=1, priority_aging_s=0.05)
    low = rig.add(prompt(5), priority=3, max_tokens=2)
    others: list[Request] = []
    for i in range(60):
        others.append(rig.add(prompt(5, i + 1), priority=0, max_tokens=2))
        rig.step()
        if low.finished:
            break
    # Three levels are worth 0.15 s: whoever came by then goes first, and no one later.
    before = [q for q in others if q.admitted_at is not None and q.admitted_at < (low.admitted_at or 0)]
    assert low.finished and all(q.arrival <= 0.15 + 1e-9 for q in before) and len(before) < 20


# -- deadlines ---------------------------------------------------------------------------------------------------


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    rig = Rig(16, script=never_ends, max_num_seqs=2)  # one step takes 10 ms
    running = rig.add(prompt(5), max_tokens=40, deadline_ms=95)
    partner = rig.add(prompt(5, 1), n=1, max_tokens=20)
    waiting = rig.add(prompt(5, 2), max_tokens=5, deadline_ms=40)
    rig.run()
    assert [q.sequences[0].finish_reason for q in (running, partner, waiting)] == ["deadline", "length", "deadline"]
    assert (running.sequences[0].num_output, waiting.sequences[0].num_output) == (9, 0)
    assert rig.scheduler.counters.deadlines == 2
    rig.check_answers(running, partner)
    rig.check_empty()


def test_a_deadline_in_time_changes_nothing() -> None:
    rig = Rig(script=never_ends)
    request = rig.add(prompt(5), max_tokens=5, deadline_ms=60)
    rig.run()
    assert request.sequences[0].finish_reason == "length" and rig.scheduler.counters.deadlines == 0


def test_a_beam_search_past_its_deadline() -> None:
    rig = Rig()
    request = rig.add(prompt(5), beam(4, 40, deadline_ms=50))
    rig.run()
    assert {s.finish_reason for s in request.sequences} == {"deadline"} and len(request.sequences) == 4
    rig.check_empty()


# -- aborts ------------------------------------------------------------------------------------------------------


def test_abort_while_queued() -> None:
    rig = Rig(max_num_seqs=1)
    rig.add(prompt(5))
    queued = rig.add(prompt(5, 1))
    rig.step()
    assert rig.scheduler.abort(queued.request_id) and queued.finished
    assert not rig.scheduler.abort(queued.request_id)
    rig.run()
    rig.check_empty()


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
def test_abort_in_any_state_frees_everything(steps: int, delay: int, n: int) -> None:
    rig = Rig(64, script=never_ends, delay=delay, max_num_batched_tokens=8, enable_prefix_caching=True)
    request = rig.add(prompt(20), n=n, max_tokens=4)
    for _ in range(steps):
        if rig.scheduler.has_work:
            rig.step()
    alive = not request.finished
    assert rig.scheduler.abort(request.request_id) is alive
    assert not rig.scheduler.abort(request.request_id), "twice is harmless"
    assert rig.pool.num_used == 0
    rig.run()
    rig.check_empty()


@pytest.mark.parametrize("way", ["recompute", "swap"])
def test_abort_while_preempted(way: str) -> None:
    rig = Rig(12, script=never_ends, preemption=way, num_host_blocks=30 if way == "swap" else 0)
    old, new = rig.add(prompt(14), max_tokens=25), rig.add(prompt(14, 1), n=2, max_tokens=12)
    rig.until(lambda: new.num_preemptions)
    assert (new.swapped is not None) == (way == "swap")
    assert rig.scheduler.abort(new.request_id, 1) and rig.scheduler.abort(new.request_id)
    host = rig.scheduler.memory.host_pool
    assert host is None or host.num_used == 0
    rig.run()
    rig.check_answers(old, new)
    rig.check_empty()


def test_abort_of_one_sample() -> None:
    rig = Rig(script=never_ends)
    request = rig.add(prompt(6), n=3, max_tokens=8)
    rig.step()
    rig.step()
    used = rig.pool.num_used
    assert rig.scheduler.abort(request.request_id, 1) and rig.pool.num_used < used
    assert not rig.scheduler.abort(request.request_id, 1) and not rig.scheduler.abort(request.request_id, 9)
    rig.run()
    assert [s.finish_reason for s in request.sequences] == ["length", "abort", "length"]
    rig.check_answers(request)


def test_a_beam_search_has_no_samples_to_abort() -> None:
    """One beam less would change the answer, and with steps split by the budget the search would never go on."""
    rig = Rig(max_num_batched_tokens=2)
    request = rig.add(prompt(6), beam(3, 6))
    for _ in range(6):
        rig.step()
    assert not rig.scheduler.abort(request.request_id, 0) and request.num_live() == 3
    assert rig.scheduler.abort(request.request_id)
    rig.run()
    rig.check_empty()


def test_requests_that_leave_the_queue_leave_nothing_behind() -> None:
    rig = Rig(max_num_seqs=1)
    first = rig.add(prompt(5), max_tokens=9)
    rig.step()
    for i in range(600):
        rig.scheduler.abort(rig.add(prompt(3, i)).request_id)
    assert len(rig.scheduler.waiting) == 0 and len(rig.scheduler.waiting._heap) < 100
    last = [rig.add(prompt(4, i), priority=-i) for i in range(3)]
    assert [r.request_id for r in rig.scheduler.waiting] == [r.request_id for r in reversed(last)]
    assert all(r in rig.scheduler.waiting for r in last) and first not in rig.scheduler.waiting
    rig.run()
    rig.check_answers(first, *last)
    rig.check_empty()


def test_abort_of_the_unknown() -> None:
    assert not Rig().scheduler.abort("nobody")


# -- windows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [8, 2048])
def test_blocks_behind_the_window_go_back_while_it_runs(limit: int) -> None:
    rig = Rig(64, windows=(8,), script=never_ends, max_num_batched_tokens=limit)
    request = rig.add(prompt(20), max_tokens=60)
    held = []
    while not request.finished:
        rig.step()
        held.append(rig.pool.num_used)
    assert max(held[-50:]) == 3, "eight tokens touch at most three blocks of four"
    rig.check_answers(request)
    rig.check_empty()


def test_gemma_like_layers_hold_a_fraction_of_the_all_layers_table() -> None:
    """15 layers see 512 tokens, 3 see all: a sequence of 4,096 tokens holds at most 40 % of the bytes."""
    windows = [None if i % 6 == 5 else 512 for i in range(18)]
    held = {}
    for hybrid in (True, False):
        layout = build_layout(windows, block_size=16, bytes_per_token_layer=1024, hybrid=hybrid)
        rig = Rig(2000, block_size=16, max_model_len=4200, max_num_batched_tokens=2048)
        rig.layout = layout
        rig.scheduler = type(rig.scheduler)(rig.settings, layout)
        runner = type(rig.runner)(layout, 2000, check=False, script=never_ends)
        rig.add(prompt(4000), max_tokens=97)
        for _ in range(98):
            rig.scheduler.update(runner.execute(rig.scheduler.schedule()))
            if rig.scheduler.running and rig.scheduler.running[0].sequences[0].num_tokens == 4096:
                held[hybrid] = rig.pool.num_used * layout.bytes_per_block
    assert held[False] == 256 * 16 * 18 * 1024
    assert held[True] <= 0.40 * held[False]
