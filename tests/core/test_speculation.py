"""Speculation in the bookkeeping: same answers, nothing left of wrong guesses, nobody pushed out, k by the cost rule.

The scripted runner checks every read and every write, and the rig audits around every step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.scheduling import Rig, beam, expected, never_ends, prompt
from octavo.core.fake_runner import default_script
from octavo.core.following import EXPLORE, PATIENCE
from octavo.core.proposals import Lookup
from octavo.core.record import Recorder, replay
from octavo.core.rounds import Round
from octavo.core.row_costs import RowCosts
from octavo.core.sequence import Request
from octavo.core.settings import SpeculationSettings
from octavo.core.speculation import Outlook, SpeculationCounters
from octavo.errors import CapacityError, SamplingError


def looping(tokens: Seq[int], sample_index: int) -> int:
    """Says the same seven tokens again and again, now and then another: what n-grams are good at."""
    if len(tokens) % 29 == 0:
        return 800 + sample_index + len(tokens) % 50
    return 20 + (len(tokens) + sample_index) % 7


def half_right(script: Any) -> Any:
    """A draft model that is wrong at every third position."""
    return lambda tokens, index: script(tokens, index) if len(tokens) % 3 else 5


def ngram(k: int = 4, **given: Any) -> SpeculationSettings:
    return SpeculationSettings(method="ngram", num_tokens=k, **given)


def draft(k: int = 4, **given: Any) -> SpeculationSettings:
    return SpeculationSettings(method="draft", num_tokens=k, **given)


class SpecRig(Rig):
    """After each result no table holds a block beyond what is computed, and nothing unverified is published."""

    def take(self, result: Any) -> None:
        super().take(result)
        if result is None or self.scheduler.in_flight or self.settings.allocation == "static":
            return
        for request in self.scheduler.running:
            for seq in request.live():
                assert seq.num_proposed == 0 and seq.num_computed <= len(seq.token_ids)
                assert seq.num_published * self.layout.block_size <= len(seq.token_ids)
                for table in seq.tables:
                    assert len(table.ids) <= self.layout.blocks_for(max(seq.num_computed, table.first_live))


def counters_of(rig: Rig) -> SpeculationCounters:
    assert rig.scheduler.speculator is not None
    return rig.scheduler.speculator.counters


def drafting_rig(*args: Any, k: int = 4, wrong: bool = True, script: Any = never_ends, **given: Any) -> SpecRig:
    rig = SpecRig(*args, script=script, speculation=draft(k), **given)
    if wrong:
        rig.runner.draft = half_right(script)
    rig.runner.draft_groups = rig.layout.num_groups // 2
    return rig


# -- proposals -------------------------------------------------------------------------------------------------------


def test_lookup_copies_what_followed() -> None:
    assert Lookup(2, 4).propose([1, 2, 3, 4, 5, 1, 2], 3) == (3, 4, 5)
    assert Lookup(2, 4).propose([1, 2, 3, 4, 5, 9, 2], 3) == ()
    assert Lookup(1, 4).propose([1, 2, 3, 9, 2], 2) == (3, 9)
    assert Lookup(2, 4).propose([1], 3) == Lookup(2, 4).propose([], 3) == ()


def test_lookup_goes_round_in_a_loop() -> None:
    assert Lookup(2, 4).propose([7, 1, 2, 1, 2], 5) == (1, 2, 1, 2, 1)


def test_lookup_prefers_the_longest_agreement_then_the_latest() -> None:
    tokens = [8, 1, 2, 3, 50, 9, 1, 2, 60, 8, 1, 2]
    assert Lookup(2, 4).propose(tokens, 1) == (3,), "8 1 2 agrees in three"
    assert Lookup(2, 2).propose(tokens, 1) == (60,), "of equals the latest"


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 6))
def test_lookup_grows_like_a_new_one(tokens: list[int], shortest: int, more: int, count: int) -> None:
    """Whatever it was asked before, its answer is that of a fresh one; a copied token really followed its n-gram."""
    lookup = Lookup(shortest, shortest + more)
    for end in range(0, len(tokens) + 1, 3):
        lookup.propose(tokens[:end], count)
    found = lookup.propose(tokens, count)
    assert found == Lookup(shortest, shortest + more).propose(tokens, count)
    if found:
        assert len(found) == count
        tail = tokens[len(tokens) - shortest :]
        assert any(tokens[i : i + shortest + 1] == [*tail, found[0]] for i in range(len(tokens) - shortest))


# -- the same answers ------------------------------------------------------------------------------------------------


def test_fewer_steps_for_the_same_tokens() -> None:
    plain = Rig(script=looping)
    alone = plain.add(prompt(9), max_tokens=60, end_ids=())
    steps = plain.run()
    rig = SpecRig(script=looping, speculation=ngram())
    request = rig.add(prompt(9), max_tokens=60, end_ids=())
    assert rig.run() < steps / 2
    assert rig.tokens_of(request) == plain.tokens_of(alone)
    counters = counters_of(rig)
    assert counters.accepted > 30 and counters.drafted >= counters.accepted
    assert sum(counters.drafted_at) == counters.drafted and sum(counters.accepted_at) == counters.accepted
    assert counters.accepted_at == sorted(counters.accepted_at, reverse=True)
    rig.check_empty()


def test_a_right_draft_brings_k_and_one() -> None:
    rig = drafting_rig(k=3, wrong=False)
    request = rig.add(prompt(9), max_tokens=41, end_ids=())
    rig.run()
    assert [p.num_tokens for p in rig.plans if p.scheduled] == [9] + 10 * [4]
    rig.check_answers(request)
    assert counters_of(rig).accepted_at == [10, 10, 10]


@pytest.mark.parametrize("windows", [(None,), (6, None), (5,)])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("delay", [0, 1])
def test_answers_with_samples_caches_and_windows(windows: Any, block_size: int, delay: int) -> None:
    for make in (drafting_rig, lambda *a, **g: SpecRig(*a, script=looping, speculation=ngram(), **g)):
        rig = make(400, block_size=block_size, windows=windows, enable_prefix_caching=True, delay=delay)
        requests = [rig.add(prompt(11), n=1 + i % 3, max_tokens=30, logprobs=0, seed=i) for i in range(4)]
        rig.run()
        rig.check_answers(*requests)
        # A step ahead of the results the last token is not known, so there is nothing to guess behind.
        assert delay or counters_of(rig).accepted
        assert all(len(n.logprobs) == len(n.token_ids) for n in rig.news)
        rig.check_empty()


def test_an_end_token_inside_the_guesses_ends_there() -> None:
    def ending(tokens: Seq[int], index: int) -> int:
        return 3 if len(tokens) == 23 else never_ends(tokens, index)

    rig = drafting_rig(k=6, wrong=False, script=ending)
    request = rig.add(prompt(9), max_tokens=60)
    rig.run()
    assert request.sequences[0].finish_reason == "stop"
    rig.check_answers(request)
    rig.check_empty()


def test_no_guess_beyond_the_length_limit() -> None:
    rig = drafting_rig(k=8, wrong=False, max_model_len=24)
    request = rig.add(prompt(9), max_tokens=None)
    rig.run()
    assert max(s.start + s.num_tokens for p in rig.plans for s in p.scheduled) <= 23
    assert request.sequences[0].finish_reason == "length" and len(request.sequences[0].token_ids) == 24


def test_verified_tokens_are_found_by_the_next_prompt() -> None:
    rig = drafting_rig(k=5, enable_prefix_caching=True)
    first = rig.add(prompt(9), max_tokens=30, end_ids=())
    rig.run()
    again = rig.add(first.sequences[0].token_ids, max_tokens=4, end_ids=())
    rig.run()
    # All but the last token were computed; whole blocks of them are found.
    assert again.num_cached_tokens == (first.max_len - 1) // 4 * 4


# -- a full pool -----------------------------------------------------------------------------------------------------


def test_nobody_is_pushed_out_for_a_guess() -> None:
    """Where the plain run preempts nobody, the speculative one does not either, however tight the pool."""
    for blocks in range(16, 40):
        plain = Rig(blocks, script=never_ends, max_model_len=40)
        guessing = drafting_rig(blocks, k=7, max_model_len=40)
        for rig in (plain, guessing):
            requests = [rig.add(prompt(9, i), max_tokens=20, end_ids=()) for i in range(4)]
            rig.run()
            rig.check_answers(*requests)
            rig.check_empty()
        if not plain.scheduler.counters.preemptions:
            assert not guessing.scheduler.counters.preemptions


def test_guesses_shrink_to_the_blocks_that_are_free() -> None:
    rig = drafting_rig(9, k=8, wrong=False, max_model_len=34, block_size=4)
    request = rig.add(prompt(9), max_tokens=25, end_ids=())
    other = rig.add(prompt(7, 1), max_tokens=2, end_ids=())
    rig.run()
    rig.check_answers(request, other)
    assert rig.scheduler.counters.preemptions == 0


def test_blocks_wanted_while_guesses_are_on_their_way_leave_what_these_may_fall_back_to() -> None:
    """A sweep behind the windows goes by what is known: wrong guesses are taken back, and the window with them."""
    rig = drafting_rig(100, block_size=1, windows=(6, None), k=4, delay=1)
    rig.runner.draft = lambda tokens, index: 5
    request = rig.add(prompt(9), max_tokens=30, end_ids=())
    (seq,) = request.sequences
    for _ in range(6):
        rig.step()
    rig.take(rig.device.collect())  # nothing in flight: the next step may guess
    rig.step()
    assert seq.num_proposed == 4
    known = seq.num_computed - seq.num_proposed
    rig.scheduler._sweep_windows(Round(8))
    table, windowed = next((t, g) for t, g in zip(seq.tables, rig.layout.groups) if g.window)
    assert table.first_live == windowed.first_needed(known) < windowed.first_needed(seq.num_computed)
    rig.run()
    rig.check_answers(request)


def test_preemption_forgets_the_guesses() -> None:
    for delay in (0, 1):
        for host in (0, 40):
            rig = drafting_rig(18, k=5, max_model_len=60, delay=delay, num_host_blocks=host, swap_block_tokens=0.1)
            requests = [rig.add(prompt(9, i), max_tokens=40, end_ids=()) for i in range(3)]
            rig.run()
            assert rig.scheduler.counters.preemptions and bool(rig.scheduler.counters.swaps) == bool(host)
            rig.check_answers(*requests)
            rig.check_empty()


def test_the_budget_is_left_to_the_others() -> None:
    rig = drafting_rig(100, k=8, wrong=False, max_num_batched_tokens=7)
    rig.add(prompt(3), max_tokens=40, end_ids=())
    rig.step()
    rig.add(prompt(20, 1), max_tokens=3, end_ids=())
    plan = rig.step()
    assert [(s.num_tokens, s.num_proposed) for s in plan.scheduled] == [(1, 0), (6, 0)], "the prompt comes first"
    rig.run()
    assert max(p.num_tokens for p in rig.plans) == 7


def test_abort_with_guesses_in_flight() -> None:
    rig = drafting_rig(60, k=4)
    request = rig.add(prompt(9), max_tokens=40, end_ids=())
    rig.step()
    plan = rig.plan()
    assert request.sequences[0].num_proposed == 4
    rig.scheduler.abort(request.request_id)
    rig.check()
    rig.take(rig.runner.execute(plan))
    rig.run()
    rig.check_empty()


# -- how many --------------------------------------------------------------------------------------------------------


def test_costs_are_linear_between_points_and_never_fall() -> None:
    costs = RowCosts(((1, 10.0), (3, 14.0), (5, 13.0), (9, 22.0)))
    assert [costs.time(r) for r in (1, 2, 3, 4, 5, 7, 9, 13)] == [10, 12, 14, 14, 14, 18, 22, 30]


def test_dear_rows_are_not_bought() -> None:
    steep = RowCosts(((1, 1.0), (2, 2.0)))  # a row costs as much as a step
    assert not steep.is_worth(1, 1, [1.0], 0.0)
    cheap = RowCosts(((1, 1.0), (11, 2.0)))
    assert cheap.share_out(1, 1, [(0.9, 5)]) == [5]
    assert cheap.share_out(1, 1, [(0.05, 5)]) == [0]
    assert cheap.share_out(1, 1, [(0.9, 5)], float) == [0], "a pass of the draft model that costs as much as a step"


def test_of_two_the_likelier_gets_more() -> None:
    costs = RowCosts(((1, 1.0), (11, 2.0)))
    likely, unlikely = costs.share_out(2, 2, [(0.9, 6), (0.3, 6)])
    assert likely > unlikely


def test_the_share_is_the_best_there_is() -> None:
    """Against every other way of dealing out two sequences' guesses."""
    costs = RowCosts(((1, 1.0), (2, 1.05), (4, 1.5), (12, 3.0)))
    for a in (0.2, 0.5, 0.8, 0.95):
        for b in (0.1, 0.6, 0.9):

            def rate(x: int, y: int, a: float = a, b: float = b) -> float:
                gain = sum(a**j for j in range(1, x + 1)) + sum(b**j for j in range(1, y + 1))
                return (2 + gain) / costs.time(2 + x + y)

            best = max(rate(x, y) for x in range(6) for y in range(6))
            chosen = rate(*costs.share_out(2, 2, [(a, 5), (b, 5)]))
            assert chosen == pytest.approx(best) or (chosen == rate(0, 0) and best < 1.02 * chosen)


def test_k_follows_the_batch() -> None:
    """The same text alone and in a crowd: alone it is guessed ahead, in the crowd a guess is not worth its row."""
    costs = ((1, 1.0), (4, 1.1), (8, 2.0), (64, 16.0))
    for crowd, guesses in ((1, True), (12, False)):
        rig = SpecRig(600, script=looping, speculation=ngram(row_costs=costs))
        requests = [rig.add(prompt(9, i), max_tokens=40, end_ids=()) for i in range(crowd)]
        rig.run()
        assert bool(counters_of(rig).drafted) == guesses
        rig.check_answers(*requests)


def test_useless_guesses_stop_and_useful_ones_come_back() -> None:
    def turning(tokens: Seq[int], index: int) -> int:
        """Pairs that occur again and go on differently; from token 150 on a loop."""
        at = len(tokens)
        if at < 150:
            return (11, 12, 100 + at)[at % 3]
        return 20 + at % 5

    rig = SpecRig(200, script=turning, max_model_len=260, speculation=ngram(row_costs=((1, 1.0), (11, 3.0))))
    request = rig.add([11, 12, 99], max_tokens=240, end_ids=())
    guessed: list[bool] = []
    while rig.scheduler.has_work:
        plan = rig.step()
        guessed += [any(s.num_proposed for s in plan.scheduled)]
    rig.check_answers(request)
    middle = guessed[60:140]
    assert sum(middle) <= 0.1 * len(middle), "learnt that they do not come true"
    assert sum(guessed[-15:]) > 10, "noticed the loop without checking a guess"


# -- whom a draft follows --------------------------------------------------------------------------------------------


CHEAP_DRAFT: dict[str, Any] = {"row_costs": ((1, 1.0), (11, 2.0)), "draft_costs": ((1, 0.1), (11, 0.2))}


def followed(rig: Rig) -> list[bool]:
    """Of each step with work, whether the draft computed something."""
    return [any(s.drafted for s in plan.scheduled) for plan in rig.plans if plan.scheduled]


def test_a_draft_that_is_wrong_is_left_for_good() -> None:
    rig = SpecRig(200, script=never_ends, speculation=draft(**CHEAP_DRAFT))
    rig.runner.draft = lambda tokens, index: 5
    rig.add(prompt(5), max_tokens=100, end_ids=())
    rig.run()
    counters = counters_of(rig)
    assert counters.accepted == 0 and 1 <= counters.drafts <= 20
    steps = followed(rig)
    end = steps.index(False)
    assert 1 < end < 20 and not any(steps[end:])
    assert rig.scheduler.speculator is not None and rig.scheduler.speculator.stats()["spec_left_sequences"] == 1


def test_a_crowd_that_stays_ends_the_following() -> None:
    """Guesses come true, but there is no room for them: for a few steps nothing happens, then the draft is let go."""
    costs = {"row_costs": ((1, 1.0), (4, 1.1), (8, 2.0), (64, 16.0)), "draft_costs": ((1, 0.1), (64, 2.0))}
    rig = SpecRig(600, script=never_ends, speculation=draft(**costs))
    first = rig.add(prompt(9), max_tokens=100, end_ids=())
    for _ in range(4):
        rig.step()
    assert rig.plans[-1].scheduled[0].num_proposed and followed(rig)[-1]
    rest = [rig.add(prompt(9, i), max_tokens=60, end_ids=()) for i in range(1, 12)]
    begin = len(followed(rig))
    rig.run()
    waited = followed(rig)[begin:].index(False)
    assert PATIENCE - 2 <= waited <= PATIENCE + 2
    rig.check_answers(first, *rest)


def test_what_came_of_others_guesses_decides_on_the_next_and_some_are_tried_all_the_same() -> None:
    """First a draft that is always wrong, then the same draft always right."""
    rig = SpecRig(400, script=never_ends, speculation=draft(**CHEAP_DRAFT))
    rig.runner.draft = lambda tokens, index: 5

    def first_steps(count: int, base: int) -> list[bool]:
        found = []
        for i in range(count):
            begin = len(rig.plans)
            request = rig.add(prompt(5, base + i), max_tokens=40, end_ids=())
            rig.run()
            rig.check_answers(request)
            found.append(any(s.drafted for s in rig.plans[begin].scheduled))
        return found

    wrong = first_steps(2 * EXPLORE + 4, 0)
    assert wrong[0] and sum(wrong[4:]) == 2, "after a few one in many"
    rig.runner.draft = rig.runner.script
    right = first_steps(2 * EXPLORE, 100)
    assert not right[0] and all(right[-4:]), "the load changed, and that is noticed"


def test_nobody_is_followed_in_a_crowd() -> None:
    """Where even certain guesses do not pay, the draft computes nothing: neither prompts nor steps."""
    costs = {"row_costs": ((1, 1.0), (4, 1.1), (8, 2.0), (64, 16.0)), "draft_costs": ((1, 0.1), (64, 2.0))}
    rig = SpecRig(600, script=never_ends, speculation=draft(**costs))
    requests = [rig.add(prompt(9, i), max_tokens=40, end_ids=()) for i in range(12)]
    rig.run()
    assert not any(followed(rig)) and not counters_of(rig).drafted
    alone = rig.add(prompt(9, 99), max_tokens=40, end_ids=())
    rig.run()
    assert counters_of(rig).accepted
    rig.check_answers(*requests, alone)


@pytest.mark.parametrize("windows", [(6, None), (None, 6), (8, 6, None)])
def test_prefixes_that_the_draft_has_not_computed_are_not_its_own(windows: Any) -> None:
    """The runner checks every read: a draft that went on behind an unfollowed prompt would read something else."""
    costs = {"row_costs": ((1, 1.0), (4, 1.1), (8, 2.0), (64, 16.0)), "draft_costs": ((1, 0.1), (64, 2.0))}
    rig = SpecRig(900, windows=windows, script=never_ends, enable_prefix_caching=True, speculation=draft(**costs))
    rig.runner.draft_groups = 1
    crowd = [rig.add(prompt(40, i), max_tokens=9, end_ids=()) for i in range(12)]
    rig.run()
    assert not any(followed(rig))
    begin = len(rig.plans)
    again = rig.add([*crowd[0].prompt_token_ids, 7, 7], max_tokens=9, end_ids=())
    rig.run()
    assert again.num_cached_tokens >= 32
    assert not any(s.drafted for plan in rig.plans[begin:] for s in plan.scheduled)
    begin = len(rig.plans)
    new = [rig.add([*prompt(40, 77), i], max_tokens=9, end_ids=()) for i in (1, 2)]
    rig.run()
    assert all(s.drafted for plan in rig.plans[begin:] for s in plan.scheduled)
    assert new[1].num_cached_tokens >= 32, "and those that it has computed are"
    rig.check_answers(*crowd, again, *new)


def test_a_block_that_was_lost_and_came_back_without_the_draft() -> None:
    """Published by a followed sequence, evicted in one group only, published again by one that is not."""
    rig = SpecRig(8, windows=(6, None), enable_prefix_caching=True, speculation=draft())
    cache, pool = rig.scheduler.memory.cache, rig.scheduler.memory.pool
    assert cache is not None
    root = cache.root_key(None, None)
    tokens = list(range(rig.layout.block_size))
    keys: list[bytes] = []
    cache.extend_keys(keys, root, tokens, len(tokens))
    first, second, third = pool.take(), pool.take(), pool.take()
    assert cache.publish(keys[0], root, tokens, 0, 0, first) and cache.publish(keys[0], root, tokens, 0, 1, second)
    assert cache.match(keys, [*tokens, 1], root, limit=len(tokens)).drafted
    cache._forget_block(second)
    pool.unpublish(second)
    assert cache.publish(keys[0], root, tokens, 0, 1, third, False)
    assert not cache.match(keys, [*tokens, 1], root, limit=len(tokens)).drafted


def test_chances_follow_the_latest_guesses() -> None:
    outlook = Outlook(None)
    assert outlook.chance == 0.5
    for _ in range(50):
        outlook.learn(1, 0)
    assert outlook.chance < 0.1
    for _ in range(30):
        outlook.learn(4, 4)
    assert outlook.chance > 0.9


# -- refusals, records -----------------------------------------------------------------------------------------------


def test_beams_are_refused_with_the_reason() -> None:
    rig = SpecRig(speculation=ngram())
    with pytest.raises(SamplingError, match=r"beam search cannot run with speculative decoding.*leave speculative out"):
        rig.add(prompt(5), beam(2))
    rig.check_empty()


@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_a_recording_is_replayed(tmp_path: Path, kind: str) -> None:
    costs = ((1, 1.0), (4, 1.1), (64, 6.0))
    rig = SpecRig(
        24, script=looping, max_model_len=60, enable_prefix_caching=True,
        speculation=SpeculationSettings(method=kind, num_tokens=4, row_costs=costs, draft_costs=((1, 0.01),)),
    )  # fmt: skip
    rig.runner.draft = half_right(looping)
    recorder = Recorder(str(tmp_path / "run"), rig.settings, rig.layout, {"model": "none"})
    for i in range(4):
        recorder.arrival(rig.add(prompt(9, i), max_tokens=40, n=1 + i % 2, end_ids=()))
    while rig.scheduler.has_work:
        plan = rig.plan()
        result = rig.runner.execute(plan)
        rig.take(result)
        recorder.step(rig.now, plan, result)
    recorder.close()
    assert rig.scheduler.counters.preemptions
    assert counters_of(rig).accepted
    report = replay(tmp_path / "run")
    assert report.same, str(report)


# -- anything --------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(["ngram", "draft"]),
    k=st.integers(1, 7),
    costs=st.sampled_from([{}, CHEAP_DRAFT, {"row_costs": ((1, 1.0), (3, 1.1), (9, 3.0)), "draft_costs": ((1, 0.2),)}]),
    windows=st.sampled_from([(None,), (6, None), (5,), (None, 6, None)]),
    block_size=st.sampled_from([1, 2, 4, 8]),
    delay=st.sampled_from([0, 0, 1, 2]),
    policy=st.sampled_from(["paged", "cached", "static", "copying"]),
    tight=st.integers(0, 2),
)
def test_any_load(
    data: Any, kind: str, k: int, costs: Any, windows: Any, block_size: int, delay: int, policy: str, tight: int
) -> None:
    """Arrivals, aborts and stop strings in any order: every answer is that of the request alone."""

    def script(tokens: Seq[int], index: int) -> int:
        end = default_script(tokens, index, 41) == 3
        return 3 if end else looping(tokens, index)

    longest = 48
    rig = SpecRig(
        -(-longest // block_size) * len(windows) * (1 + tight) + 1, block_size=block_size, windows=windows,
        delay=delay, script=script, max_model_len=longest,
        max_num_batched_tokens=data.draw(st.sampled_from([3, 9, 64])),
        allocation="static" if policy == "static" else "paged", copy_on_write=policy != "copying",
        enable_prefix_caching=policy in ("cached", "copying"), max_num_seqs=6,
        num_host_blocks=0 if policy == "static" else data.draw(st.sampled_from([0, 30])), swap_block_tokens=0.5,
        speculation=SpeculationSettings(method=kind, num_tokens=k, lookup_min=1, **costs),
    )  # fmt: skip
    rig.runner.draft = half_right(script)
    rig.runner.draft_groups = len(windows) // 2 if kind == "draft" else 0
    requests: list[Request] = []
    for _ in range(data.draw(st.integers(3, 9))):
        tokens = prompt(data.draw(st.integers(1, 20)), data.draw(st.integers(0, 2)))
        asked = {"max_tokens": data.draw(st.integers(1, 25)), "n": data.draw(st.sampled_from([1, 1, 2]))}
        with suppress(CapacityError):
            requests.append(rig.add(tokens, priority=data.draw(st.sampled_from([0, 0, -1])), **asked))
        for _ in range(data.draw(st.integers(0, 6))):
            if rig.scheduler.has_work:
                rig.step()
        if requests and data.draw(st.integers(0, 5)) == 0:
            rig.scheduler.abort(data.draw(st.sampled_from(requests)).request_id)
    rig.run()
    rig.check_empty()
    for request in requests:
        for seq in request.sequences:
            assert seq.output_token_ids == expected(seq, script)
