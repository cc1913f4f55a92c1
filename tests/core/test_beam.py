"""Beam search as bookkeeping: which beams go on, which end, scores, when it stops; and the blocks it holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.beam import BeamSearch
from octavo.core.fake_runner import FakeRunner
from octavo.core.sequence import Sequence
from octavo.core.step import TokenLogprobs
from octavo.sampling_params import BeamSearchParams


def candidates(pairs: dict[int, float]) -> TokenLogprobs:
    best = sorted(pairs.items(), key=lambda p: -p[1])
    return TokenLogprobs(tuple(t for t, _ in best), tuple(v for _, v in best), 0)


def table_of(known: Seq[int], vocabulary: int) -> dict[int, float]:
    """A made-up model: log-probabilities that depend on the last two tokens."""
    state = sum((i + 3) * t for i, t in enumerate(known[-2:]))
    return {t: -0.1 - ((state * 7 + t * 13) % 29) / 10 for t in range(vocabulary)}


def searched(params: BeamSearchParams, ends: tuple[int, ...], vocabulary: int, prompt_ids: list[int]) -> BeamSearch:
    """Run the bookkeeping alone against `table_of`."""
    search = BeamSearch(params, ends, params.max_tokens)
    request = Rig().request(prompt_ids, params)
    live = [Sequence(0, request, 0, list(prompt_ids))]
    numbers = itertools.count(1)
    for _ in range(params.max_tokens + 1):
        for seq in live:
            best = sorted(table_of(seq.token_ids, vocabulary).items(), key=lambda p: -p[1])[: search.num_candidates]
            search.offer(seq.seq_id, candidates(dict(best)))
        assert search.is_ready(live)
        going = search.advance(live)
        if not going:
            return search
        following = []
        for c in going:
            seq = Sequence(next(numbers), request, 0, [*c.parent.token_ids, c.token_id])
            seq.cumulative_logprob = c.cumulative_logprob
            following.append(seq)
        live = following
    raise AssertionError("it never ends")


def best_by_hand(vocabulary: int, ends: tuple[int, ...], length: int, prompt_ids: list[int], penalty: float) -> float:
    """The best score of all texts of up to `length` tokens."""
    best = float("-inf")
    open_texts = [(list(prompt_ids), 0.0)]
    for n in range(1, length + 1):
        following = []
        for tokens, total in open_texts:
            for token, value in table_of(tokens, vocabulary).items():
                if token in ends or n == length:
                    best = max(best, (total + value) / n**penalty)
                else:
                    following.append(([*tokens, token], total + value))
        open_texts = following
    return best


@pytest.mark.parametrize("ends", [(), (2,), (1, 3)])
@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_beams_as_wide_as_the_tree_find_the_best_text(ends: tuple[int, ...], penalty: float) -> None:
    params = beam(64, 3, length_penalty=penalty, early_stopping="never")
    search = searched(params, ends, 4, [1, 2])
    assert search.finished[0].score == pytest.approx(best_by_hand(4, ends, 3, [1, 2], penalty))
    assert search.finished == sorted(search.finished, key=lambda h: -h.score)


def test_one_beam_is_greedy() -> None:
    search = searched(beam(1, 6), (), 9, [4])
    tokens = [4]
    for _ in range(6):
        tokens.append(max(table_of(tokens, 9).items(), key=lambda p: p[1])[0])
    assert search.finished[0].token_ids == tuple(tokens[1:])


@pytest.mark.parametrize("width", [1, 2, 4])
def test_finished_texts_number_at_most_the_width_and_end_where_they_should(width: int) -> None:
    search = searched(beam(width, 7), (2, 5), 9, [4])
    assert 1 <= len(search.finished) <= width
    for found in search.finished:
        assert (found.finish_reason == "stop") == (found.token_ids[-1] in (2, 5))
        assert not set(found.token_ids[:-1]) & {2, 5}
        assert found.finish_reason == "stop" or len(found.token_ids) == 7
        assert found.score == pytest.approx(found.cumulative_logprob / len(found.token_ids))


def test_the_length_penalty_is_used_once_and_prefers_long_or_short_texts() -> None:
    lengths = {}
    for penalty in (-2.0, 3.0):
        search = searched(beam(4, 8, length_penalty=penalty, early_stopping="never"), (2,), 9, [4])
        top = search.finished[0]
        assert top.score == pytest.approx(top.cumulative_logprob / len(top.token_ids) ** penalty)
        lengths[penalty] = len(top.token_ids)
    assert lengths[-2.0] <= lengths[3.0]


def test_candidates_suffice_for_several_end_tokens() -> None:
    for ends in ((), (1,), (1, 2, 3)):
        assert BeamSearch(beam(5), ends, 9).num_candidates == 5 * max(2, 1 + len(ends))


def test_an_end_token_beyond_the_best_width_candidates_does_not_count() -> None:
    search = BeamSearch(beam(1, 5), (7,), 5)
    live = [Sequence(0, Rig().request([1], beam(1, 5)), 0, [1])]
    search.offer(0, candidates({4: -0.1, 7: -0.2}))
    going = search.advance(live)
    assert [c.token_id for c in going] == [4] and not search.finished


@pytest.mark.parametrize(("mode", "goes_on"), [(True, (False, False)), (False, (False, True)), ("never", (True, True))])
def test_when_each_mode_stops(mode: bool | str, goes_on: tuple[bool, bool]) -> None:
    """Two texts are finished. First a running one is behind by the usual estimate, then one is ahead."""
    params = beam(2, 9, early_stopping=mode)
    behind, ahead = BeamSearch(params, (7, 8), 9), BeamSearch(params, (7, 8), 9)
    first = Sequence(0, Rig().request([1], params), 0, [1])
    behind.offer(0, candidates({7: -3.0, 8: -3.05, 4: -3.1}))
    assert bool(behind.advance([first])) is goes_on[0]
    ahead.offer(0, candidates({4: -0.1, 7: -1.0}))
    assert [c.token_id for c in ahead.advance([first])] == [4]
    first.token_ids.append(4)
    first.cumulative_logprob = -0.1
    ahead.offer(0, candidates({4: -0.05, 8: -0.4}))
    assert bool(ahead.advance([first])) is goes_on[1]
    assert [h.score for h in ahead.finished] == pytest.approx([-0.25, -1.0])


# -- blocks ------------------------------------------------------------------------------------------------------


def test_beams_share_their_prompt_and_lost_ones_free_their_blocks_in_the_same_step() -> None:
    rig = Rig(200, script=never_ends)
    request = rig.add(prompt(80), beam(8, 24))
    while not request.finished:
        rig.step()
        tables = {b for s in request.sequences for t in s.tables for b in t.ids}
        assert rig.pool.num_used == len(tables) and request.num_live() in (0, 8)
    own = -(-(80 + 23) // 4) - 20
    assert rig.pool.peak_used <= 20 + 8 * own
    rig.check_empty()


def test_only_written_tail_blocks_are_copied() -> None:
    rig = Rig(200, script=never_ends)
    rig.add(prompt(40), beam(4, 20))
    rig.run()
    # At most all but one of the beams copy their tail block in a step.
    assert 0 < rig.scheduler.memory.num_copies <= 3 * 20


@pytest.mark.parametrize("limit", [1, 3, 2048])
@pytest.mark.parametrize("settings", [{}, {"enable_prefix_caching": True}, {"copy_on_write": False}])
def test_a_search_whose_steps_are_split_by_the_budget(limit: int, settings: dict[str, Any]) -> None:
    found = []
    for tokens in (limit, 2048):
        rig = Rig(100, max_num_batched_tokens=tokens, **(settings if tokens == limit else {}))
        request = rig.add(prompt(7), beam(4, 9))
        other = rig.add(prompt(7), max_tokens=9)
        rig.run()
        found.append(request.beam_state.finished)
        rig.check_answers(other)
        rig.check_empty()
    assert found[0] == found[1]


def test_more_beams_than_words() -> None:
    rig = Rig(vocab_size=4)
    request = rig.add(prompt(5), beam(8, 4), end_ids=())
    rig.run()
    assert 1 <= len(request.beam_state.finished) <= 8
    rig.check_empty()


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_shortest_searches(max_tokens: int) -> None:
    rig = Rig()
    request = rig.add(prompt(5), beam(3, max_tokens), end_ids=())
    rig.run()
    assert [len(h.token_ids) for h in request.beam_state.finished] == [max_tokens] * 3
    assert isinstance(rig.runner, FakeRunner)
    rig.check_empty()
