"""Samples through the whole engine: what they share, what they may not share, and the distribution they follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from helpers.oracle import Model, logprobs_of, random_ids, tiny
from octavo import LLM, SamplingParams

LONG = random_ids(1000, 3)
NEW = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("sampling"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return model.engine()


def four(seed: int | None = 1, **more: Any) -> SamplingParams:
    return SamplingParams(n=4, seed=seed, max_tokens=NEW, ignore_eos=True, **more)


def texts(llm: LLM, prompts: list[list[int]], params: Any) -> list[list[list[int]]]:
    """request -> sample -> token ids."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.pool_view().num_used == 0
    assert all([o.index for o in output.outputs] == list(range(len(output.outputs))) for output in outputs)
    return [[o.token_ids for o in output.outputs] for output in outputs]


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_four_samples_of_a_long_prompt(block_size: int, model: Model) -> None:
    """One prefill, and memory for one prompt and four tails."""
    with model.engine(block_size=block_size, enable_prefix_caching=False) as llm:
        (found,) = texts(llm, [LONG], four())
        view, counters = llm.pool_view(), llm.stats()
    assert len({tuple(t) for t in found}) == 4
    # Every prompt token once, every new one but the last of each sample once.
    assert counters.computed_tokens == 1000 + 4 * (NEW - 1)
    own = -(-(1000 % block_size + NEW) // block_size)
    assert view.peak_used <= -(-1000 // block_size) + 4 * own + 4
    assert view.peak_used <= 1000 // block_size + 4 * own
    assert view.forks == 3
    # The last block of the prompt is partly filled (1000 is a multiple of 8): three of the four copy it.
    assert view.copies == (0 if 1000 % block_size == 0 else 3)


def test_the_same_four_again_and_among_others(model: Model, llm: LLM) -> None:
    (alone,) = texts(llm, [LONG], four())
    assert texts(llm, [LONG], four()) == [alone]
    others = [random_ids(5 + 9 * i, i) for i in range(7)]
    mixed = [four(seed=i) if i % 2 else SamplingParams(temperature=0, max_tokens=30) for i in range(7)]
    assert texts(llm, [*others[:3], LONG, *others[3:]], [*mixed[:3], four(), *mixed[3:]])[3] == alone
    with model.engine(max_num_batched_tokens=64, block_size=8) as chunked:
        assert texts(chunked, [LONG, others[0]], [four(), four(2)])[0] == alone
    assert texts(llm, [LONG], four(seed=2))[0] != alone


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_the_same_four_after_preemption(preemption: str, model: Model) -> None:
    prompts = [random_ids(10 + i, 8) for i in range(5)]
    params = [four(seed=i, presence_penalty=0.5, repetition_penalty=1.2) for i in range(5)]
    settings: dict[str, Any] = {"block_size": 4, "max_model_len": 64, "enable_prefix_caching": False}
    with model.engine(**settings) as llm:
        expected = [texts(llm, [p], s)[0] for p, s in zip(prompts, params, strict=True)]
    with model.engine(num_blocks=40, preemption=preemption, **settings) as llm:
        assert texts(llm, prompts, params) == expected
        assert llm.stats().preemptions > 0 and (llm.stats().swaps > 0) == (preemption == "swap")
    assert all(len({tuple(t) for t in four_of_one}) == 4 for four_of_one in expected)


def test_samples_do_not_depend_on_how_many_there_are(llm: LLM) -> None:
    """Sample i of a seed is sample i whatever n is; other indices and other seeds are other texts."""
    prompt = random_ids(20, 4)
    (four_of_one,) = texts(llm, [prompt], four())
    for n in (1, 2, 3, 8):
        (found,) = texts(llm, [prompt], SamplingParams(n=n, seed=1, max_tokens=NEW, ignore_eos=True))
        assert found[:4] == four_of_one[:n]
    assert texts(llm, [prompt, prompt], four()) == [four_of_one, four_of_one]


def test_unseeded_requests_differ(model: Model, llm: LLM) -> None:
    prompt = random_ids(20, 4)
    plain = SamplingParams(max_tokens=NEW, ignore_eos=True)
    found = [tuple(t) for (t,) in texts(llm, [prompt] * 12, plain) + texts(llm, [prompt] * 12, plain)]
    assert len(set(found)) == 24
    with model.engine() as other:
        assert tuple(texts(other, [prompt], plain)[0][0]) not in found


def test_engine_seed_repeats_a_program(model: Model) -> None:
    prompt = random_ids(20, 4)
    plain = SamplingParams(n=2, max_tokens=NEW, ignore_eos=True)
    runs = []
    for seed in (5, 5, 6):
        with model.engine(seed=seed) as llm:
            runs.append(texts(llm, [prompt] * 6, plain))
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(t) for request in runs[0] for t in request}) == 12


@pytest.mark.parametrize(
    "given",
    [{}, {"temperature": 0.6}, {"temperature": 2.0, "top_k": 12}, {"top_p": 0.7}, {"min_p": 0.1}],
    ids=lambda g: "-".join(f"{k}{v}" for k, v in g.items()) or "plain",
)
def test_distribution(given: dict[str, Any], model: Model, llm: LLM) -> None:
    """Chi-square of 2,048 first tokens and of what follows one of them, against the oracle's softmax."""
    prompt = random_ids(13, 9)
    params = [SamplingParams(n=64, seed=seed, max_tokens=2, ignore_eos=True, **given) for seed in range(32)]
    drawn = [sample for request in texts(llm, [prompt] * 32, params) for sample in request]
    assert_follows([t[0] for t in drawn], distribution(model, prompt, **given))
    first = max({t[0] for t in drawn}, key=[t[0] for t in drawn].count)
    assert_follows([t[1] for t in drawn if t[0] == first], distribution(model, [*prompt, first], **given))


def distribution(
    model: Model, ids: list[int], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Probabilities of the next token by the definitions, float64 [V]."""
    p = np.exp(logprobs_of(model.oracle, ids)[-1].double().numpy() / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    if top_p < 1:
        p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    normalised: np.ndarray = p / p.sum()
    return normalised


def assert_follows(tokens: list[int], p: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(p))
    assert counts[p == 0].sum() == 0
    expected = p * len(tokens)
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 1e-9:
        observed, wanted = observed[:-1], wanted[:-1]
    assert len(wanted) > 3
    # Seeds are fixed, so this either always passes or never.
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3


def test_best_of(llm: LLM) -> None:
    """The n likeliest of best_of samples, best first, numbered anew; log-probabilities are shown only if asked for."""
    prompt = random_ids(20, 4)
    given = {"seed": 3, "max_tokens": 8, "ignore_eos": True}
    (all_six,) = llm.generate([prompt], SamplingParams(n=6, logprobs=0, **given), use_tqdm=False)
    ranked = sorted(all_six.outputs, key=lambda o: -(o.cumulative_logprob or 0))
    for n in (1, 2, 5):
        (found,) = llm.generate([prompt], SamplingParams(n=n, best_of=6, **given), use_tqdm=False)
        assert [o.token_ids for o in found.outputs] == [o.token_ids for o in ranked[:n]]
        assert [o.index for o in found.outputs] == list(range(n))
        assert [o.cumulative_logprob for o in found.outputs] == [o.cumulative_logprob for o in ranked[:n]]
        assert all(o.logprobs is None for o in found.outputs)
    # Nothing to choose from: samples in their own order.
    assert texts(llm, [prompt], SamplingParams(n=6, best_of=6, **given))[0] == [o.token_ids for o in all_six.outputs]


def test_greedy_is_the_limit_of_sampling(llm: LLM) -> None:
    prompts = [random_ids(20, seed) for seed in range(4)]
    cold = SamplingParams(temperature=1e-6, seed=1, max_tokens=NEW, ignore_eos=True)
    narrow = SamplingParams(top_k=1, seed=1, max_tokens=NEW, ignore_eos=True)
    greedy = texts(llm, prompts, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    assert texts(llm, prompts, cold) == texts(llm, prompts, narrow) == greedy


def test_windowed_model_with_samples(tmp_path: Path) -> None:
    """Samples over layers with windows: the four alone are the four in a small pool."""
    model = tiny("gemma3", tmp_path)
    prompts = [random_ids(30 + i, 8) for i in range(4)]
    params = [four(seed=i) for i in range(4)]
    with model.engine(block_size=4) as llm:
        expected = [texts(llm, [p], s)[0] for p, s in zip(prompts, params, strict=True)]
    with model.engine(block_size=4, num_blocks=90, max_model_len=64) as llm:
        assert texts(llm, prompts, params) == expected
        assert llm.stats().preemptions > 0
