"""Beam search through the engine: ids, texts and scores of transformers' generate(num_beams=W), and its memory."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle import Beam, Model, beams, greedy, logprobs_of, random_ids, tiny, transformers_tokenizer
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.beam import BeamSearch
from octavo.core.sequence import Request, Sequence
from octavo.core.step import TokenLogprobs
from octavo.outputs import BeamSearchOutput

END = 257  # of the tiny tokenizer
WIDTHS = (1, 2, 4, 8)
PROMPTS = [random_ids(length, 11) for length in (1, 9, 16, 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("beams"))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("gemma3", tmp_path_factory.mktemp("beams"))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return model.engine()


def search(llm: LLM, prompts: list[list[int]], **params: Any) -> list[BeamSearchOutput]:
    found = llm.beam_search(prompts, BeamSearchParams(**params))
    assert llm.pool_view().num_used == 0
    return found


def assert_equal(found: BeamSearchOutput, expected: list[Beam], end_ids: list[int]) -> None:
    assert [s.token_ids for s in found.sequences][: len(expected)] == [b.token_ids for b in expected]
    for ours, theirs in zip(found.sequences, expected, strict=False):
        assert ours.score == pytest.approx(theirs.score, rel=1e-4, abs=1e-4)
        assert ours.finish_reason == ("stop" if ours.token_ids[-1] in end_ids else "length")


def likely_ends(oracle: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that beams do meet: from the second half of a greedy answer and of the runner-up beam."""
    paths = [greedy(oracle, prompt, 8), *(b.token_ids for b in beams(oracle, prompt, 2, max_tokens=8, end_ids=[]))]
    return list(dict.fromkeys(t for path in paths for t in path[3:]))[:count]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_equal_to_transformers(
    width: int, early_stopping: bool | str, length_penalty: float, model: Model, llm: LLM
) -> None:
    """Three end ids that are met: searches end by rule and by length, at different steps."""
    prompt = PROMPTS[1 + (width + int(2 * length_penalty)) % 3]
    stops = likely_ends(model.oracle, prompt, 2)
    params: dict[str, Any] = {"max_tokens": 12, "length_penalty": length_penalty, "early_stopping": early_stopping}
    (found,) = search(llm, [prompt], beam_width=width, stop_token_ids=stops, **params)
    expected = beams(model.oracle, prompt, width, end_ids=[END, *stops], **params)
    assert len(found.sequences) == len(expected) == width
    assert_equal(found, expected, [END, *stops])


def test_some_searches_end_early(model: Model, llm: LLM) -> None:
    """The tests above would prove little if nothing ever met an end id."""
    reasons, lengths = set(), set()
    for prompt in PROMPTS:
        (found,) = search(
            llm, [prompt], beam_width=4, max_tokens=12, stop_token_ids=likely_ends(model.oracle, prompt, 2)
        )
        reasons |= {s.finish_reason for s in found.sequences}
        lengths |= {len(s.token_ids) for s in found.sequences}
    assert reasons == {"stop", "length"} or len(lengths) > 2


@pytest.mark.parametrize("count", [0, 1, 4])
def test_numbers_of_end_ids(count: int, windowed: Model) -> None:
    """No end id at all (ignore_eos), one, four: the number of candidates looked at depends on it."""
    with windowed.engine(block_size=4) as llm:
        for prompt in PROMPTS[1:]:
            ends = likely_ends(windowed.oracle, prompt, count) if count else []
            found = search(llm, [prompt], beam_width=4, max_tokens=20, stop_token_ids=ends, ignore_eos=True)
            assert_equal(found[0], beams(windowed.oracle, prompt, 4, max_tokens=20, end_ids=ends), ends)


def test_end_ids_that_crowd_out_the_rest(model: Model, llm: LLM) -> None:
    """The likeliest tokens of the first step all end: enough candidates must be looked at to find some that go on."""
    for prompt in PROMPTS[1:]:
        ends = logprobs_of(model.oracle, prompt)[-1].topk(6).indices.tolist()
        for width in (2, 3):
            params: dict[str, Any] = {"max_tokens": 10, "length_penalty": 2.0, "early_stopping": "never"}
            found = search(llm, [prompt], beam_width=width, stop_token_ids=ends, ignore_eos=True, **params)
            assert_equal(found[0], beams(model.oracle, prompt, width, end_ids=ends, **params), ends)


@pytest.mark.parametrize("width", WIDTHS)
def test_one_token(width: int, model: Model, llm: LLM) -> None:
    for prompt in PROMPTS:
        (found,) = search(llm, [prompt], beam_width=width, max_tokens=1)
        assert_equal(found, beams(model.oracle, prompt, width, max_tokens=1, end_ids=[END]), [END])
        assert all(len(s.token_ids) == 1 for s in found.sequences) and len(found.sequences) == width


def test_one_beam_is_greedy(model: Model, llm: LLM) -> None:
    for early_stopping in (True, False, "never"):
        (found,) = search(
            llm, [PROMPTS[3]], beam_width=1, max_tokens=20, early_stopping=early_stopping, ignore_eos=True
        )
        (sampled,) = llm.generate(
            [PROMPTS[3]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0), use_tqdm=False
        )
        assert found.sequences[0].token_ids == sampled.outputs[0].token_ids
        assert found.sequences[0].cumulative_logprob == pytest.approx(sampled.outputs[0].cumulative_logprob, abs=1e-5)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_more_beams_than_tokens(width: int, tmp_path: Path) -> None:
    """A vocabulary of six."""
    small = tiny("llama", tmp_path, vocab_size=6, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    prompt = [0, 3, 4, 5, 3]
    with small.engine(skip_tokenizer_init=True) as llm:
        for count in (1, 2, 6):
            for ends in ([], [4], [1, 3, 5]):
                (found,) = search(
                    llm, [prompt], beam_width=width, max_tokens=count, stop_token_ids=ends, ignore_eos=True
                )
                expected = beams(small.oracle, prompt, width, max_tokens=count, end_ids=ends)
                assert_equal(found, expected, ends)
                # Every beam is real: no more than there are texts.
                assert len({tuple(s.token_ids) for s in found.sequences}) == len(found.sequences) >= len(expected)


def test_texts_scores_and_order(model: Model, llm: LLM) -> None:
    (found,) = search(llm, [PROMPTS[2]], beam_width=4, max_tokens=16, length_penalty=0.5)
    tokenizer = transformers_tokenizer(model.path)
    assert [s.text for s in found.sequences] == [
        tokenizer.decode(s.token_ids, skip_special_tokens=True) for s in found.sequences
    ]
    assert [s.score for s in found.sequences] == sorted((s.score for s in found.sequences), reverse=True)
    for s in found.sequences:
        assert s.score == pytest.approx(s.cumulative_logprob / len(s.token_ids) ** 0.5)


def test_ends_of_one_step_compete_with_older_ones() -> None:
    """early_stopping=True: when the last places are filled, the best of old and new ends are kept, not the first."""
    params = BeamSearchParams(beam_width=2, max_tokens=9, early_stopping=True, length_penalty=0.0)
    request = Request("r", [0], params, arrival=0, number=0, seed=0, max_len=10, end_ids=(5, 6))
    beam = Sequence(0, request, 0, [0])
    state = BeamSearch(params, (5, 6), 9)
    state.offer(0, TokenLogprobs((1, 5, 2), (-0.1, -3.0, -4.0), 0))
    assert [c.token_id for c in state.advance([beam])] == [1, 2]
    beam.token_ids.append(1)
    beam.cumulative_logprob = -0.1
    state.offer(0, TokenLogprobs((5, 6, 1, 2), (-0.2, -0.4, -5.0, -6.0), 0))
    assert state.advance([beam]) == []
    assert [(h.token_ids, round(h.score, 6)) for h in state.finished] == [((1, 5), -0.3), ((1, 6), -0.5)]


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}])
def test_beside_others(settings: dict[str, Any], model: Model) -> None:
    """Searches of different widths at once, with a sampled request in between, equal themselves alone."""
    widths = [1, 2, 4, 8]
    with model.engine(block_size=8, **settings) as llm:
        each = [BeamSearchParams(beam_width=w, max_tokens=14) for w in widths]
        stream = llm.stream(PROMPTS[0], SamplingParams(seed=3, max_tokens=30))
        next(stream)
        found = llm.beam_search(PROMPTS, each)
        stream.close()
        for prompt, width, one in zip(PROMPTS, widths, found, strict=True):
            assert_equal(one, beams(model.oracle, prompt, width, max_tokens=14, end_ids=[END]), [END])
        assert llm.pool_view().num_used == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_after_preemption(family: str, preemption: str, model: Model, windowed: Model) -> None:
    chosen = model if family == "llama" else windowed
    prompts = [random_ids(12, s) for s in range(6)]
    blocks = 26 if family == "llama" else 48
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": blocks, "max_model_len": 48, "preemption": preemption}
    with chosen.engine(enable_prefix_caching=False, **settings) as llm:
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=20))
        stats = llm.stats()
        assert stats.preemptions > 0 and (stats.swaps > 0) == (preemption == "swap")
        assert llm.pool_view().num_used == 0
    for prompt, one in zip(prompts, found, strict=True):
        assert_equal(one, beams(chosen.oracle, prompt, 3, max_tokens=20, end_ids=[END]), [END])


def test_memory_of_eight_beams(tmp_path: Path) -> None:
    """A 1,000-token prompt: its blocks are shared, and a lost beam's own blocks are free in the step that lost it."""
    long = tiny("llama", tmp_path, max_position_embeddings=2048)
    prompt, new, width, size = random_ids(1000, 2), 40, 8, 16
    used: list[int] = []
    with long.engine(enable_prefix_caching=False) as llm:

        def look() -> None:
            view = llm.pool_view()
            held = {b for tables in view.block_tables.values() for table in tables for b in table}
            # What is used is exactly what the beams that are still alive hold.
            assert view.num_used == len(held) and len(view.block_tables) <= width
            used.append(view.num_used)

        llm.watch(look)
        (found,) = search(llm, [prompt], beam_width=width, max_tokens=new)
        view = llm.pool_view()
        stats = llm.stats()
    own = -(-(len(prompt) % size + new) // size)
    prompt_blocks = -(-len(prompt) // size)
    assert view.peak_used <= 1.15 * prompt_blocks + width * own
    assert view.peak_used <= len(prompt) // size + width * own  # exactly: whole prompt blocks are held once
    assert stats.computed_tokens <= len(prompt) + width * new
    assert stats.forks > 0 and any(later < earlier for earlier, later in itertools.pairwise(used))
    assert_equal(found, beams(long.oracle, prompt, width, max_tokens=new, end_ids=[END]), [END])


def test_an_aborted_or_late_search_gives_its_blocks_back(llm: LLM) -> None:
    free = llm.pool_view()
    late = BeamSearchParams(beam_width=4, max_tokens=100, deadline_ms=15.0, ignore_eos=True)
    (found,) = llm.beam_search([PROMPTS[3]], late)
    assert {s.finish_reason for s in found.sequences} <= {"deadline", "length", "stop"}
    after = llm.pool_view()
    assert after.num_used == 0 and after.num_free + after.num_cached == free.num_free + free.num_cached
