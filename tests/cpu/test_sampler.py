"""The sampler: distribution, filters, adjustments, logprobs, and that rows do not touch each other."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from helpers.paged import fresh_seed
from octavo.core.step import SequenceStart
from octavo.kernels import cpu
from octavo.runner import filters
from octavo.runner.sampler import Draw, Sampler
from octavo.runner.sampling_state import SamplingState
from octavo.sampling_params import SamplingParams

INF = float("inf")


@pytest.fixture(autouse=True, params=["native", "numpy"])
def _implementation(request, monkeypatch):
    """Every test runs on the native kernels and on NumPy, their definition."""
    if request.param == "numpy":
        monkeypatch.setattr(cpu, "make_sampling", lambda vocab_size: None)
    elif cpu.why_unavailable():
        pytest.skip(cpu.why_unavailable())


def state(vocab, tokens=(), prompt_len=None, *, seed=1, sample_index=0, end_ids=(), bad=(), beams=0, **params):
    start = SequenceStart(
        seq_id=0,
        request_id="r",
        sample_index=sample_index,
        params=SamplingParams(**params),
        token_ids=tuple(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        seed=seed,
        end_ids=end_ids,
        bad_word_ids=bad,
        num_candidates=beams,
    )
    return SamplingState(start, vocab)


def one(logits, s, position=0):
    return Sampler(len(logits)).sample(torch.tensor([logits], dtype=torch.float32), [Draw(0, s, position)])[0]


# -- the distribution -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "vocab"),
    [
        ({}, 12),
        ({"temperature": 0.7}, 700),
        ({"temperature": 1.8}, 1024),
        ({"top_k": 5}, 700),
        ({"top_p": 0.8}, 40),
        ({"min_p": 0.05, "temperature": 1.3}, 600),
    ],
)
def test_draws_follow_the_filtered_softmax(params, vocab):
    rng = np.random.default_rng(7)
    logits = (rng.standard_normal(vocab) * 1.5).astype(np.float32)
    n, sampler, s = 20_000, Sampler(vocab), state(vocab, seed=42, **params)
    drawn = sampler.sample(torch.from_numpy(logits)[None], [Draw(0, s, p) for p in range(n)])
    observed = np.bincount([d.token_ids[0] for d in drawn], minlength=vocab)
    expected = naive_distribution(logits, **params) * n
    assert observed[expected == 0].sum() == 0
    rare = expected < 5
    kinds = [(observed[i], expected[i]) for i in np.flatnonzero(~rare)]
    if expected[rare].sum() > 0:
        kinds.append((observed[rare].sum(), expected[rare].sum()))
    statistic = sum((o - e) ** 2 / e for o, e in kinds)
    assert statistic < chi2.ppf(0.999, len(kinds) - 1)  # seeds are fixed: passes always or never


def naive_distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Probabilities after the filters, by sorting everything in float64."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    if top_k and top_k < len(p):
        p[p < np.sort(p)[-top_k]] = 0
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


@pytest.mark.parametrize("vocab", [1, 7, 511, 512, 513, 20_000])
@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 600},
        {"top_p": 0.01},
        {"top_p": 0.6},
        {"top_p": 0.999},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 20, "top_p": 0.7, "min_p": 0.02, "temperature": 0.5},
    ],
)
def test_filters_keep_what_a_plain_reference_keeps(vocab, params):
    rng = np.random.default_rng(fresh_seed())
    logits = (rng.standard_normal(vocab) * 3).astype(np.float32)
    logits[rng.random(vocab) < 0.2] = -INF
    logits[0] = 1.0
    s = state(vocab, **params)
    if not s.filters:
        assert params.get("top_k", 0) >= vocab
        return
    scratch = filters.Scratch(vocab)
    ids, weights = filters.keep(logits, logits.max(), s.temperature, s.top_k, s.top_p, s.min_p, scratch)
    # A token whose border lies within float32 rounding of top_p may fall on either side of it.
    top_p = params.get("top_p", 1.0)
    least, most = (
        set(np.flatnonzero(naive_distribution(logits, **{**params, "top_p": p})).tolist())
        for p in ((top_p - 1e-6, top_p + 1e-6) if top_p < 1 else (1.0, 1.0))
    )
    assert least <= set(ids.tolist()) <= most
    assert ids.tolist() == sorted(ids.tolist())
    plain = naive_distribution(logits, temperature=params.get("temperature", 1.0))[ids]
    np.testing.assert_allclose(weights / weights.sum(), plain / plain.sum(), rtol=2e-5)


def test_ties_with_the_kth_are_kept_and_top_p_takes_lower_ids_first():
    flat = np.zeros(10, dtype=np.float32)
    assert len(filters.keep(flat, flat.max(), 1.0, 3, 1.0, 0.0, filters.Scratch(10))[0]) == 10
    assert filters.keep(flat, flat.max(), 1.0, 0, 0.35, 0.0, filters.Scratch(10))[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("vocab", [3, 512, 1000, 60_000])
def test_largest_equals_a_full_sort(vocab):
    row = np.random.default_rng(fresh_seed()).integers(0, 5000, vocab).astype(np.float32)
    order = np.argsort(-row, kind="stable")
    for k in (1, 2, 40, 128, vocab, vocab + 5):
        assert filters.largest(row, k).tolist() == order[:k].tolist()


def test_inversion_hits_every_border_and_never_a_word_of_weight_zero():
    scratch = filters.Scratch(1500)
    scratch.weights[:] = 0
    scratch.weights[[3, 700, 1400]] = [1, 2, 1]
    got = [filters.draw(scratch, u) for u in (0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53)]
    assert got == [3, 3, 700, 700, 700, 1400, 1400]
    ids, weights = np.array([4, 9]), np.array([1, 0], dtype=np.float32)
    assert filters.draw_among(ids, weights, 1 - 2**-53) == 4


def test_extreme_temperatures_stay_finite():
    logits = [3.0, 3.5, -2.0, -INF]
    for temperature in (1e-35, 1e-4, 100.0):
        drawn = {one(logits, state(4, temperature=temperature), p).token_ids[0] for p in range(200)}
        assert drawn == ({0, 1, 2} if temperature == 100.0 else {1})


# -- seeds ----------------------------------------------------------------------------------------------------------


def test_draws_do_not_depend_on_neighbours_or_order():
    """Failure kinds 14 and 34."""
    vocab = 900
    g = torch.Generator().manual_seed(fresh_seed())
    logits = torch.randn(8, vocab, generator=g)
    kinds = [{}, {"top_k": 9}, {"top_p": 0.5}, {"temperature": 0}, {"logprobs": 3}, {"min_p": 0.1}, {}, {"top_p": 0.9}]
    sampler = Sampler(vocab)
    draws = [Draw(i, state(vocab, seed=i // 2, sample_index=i % 2, **kinds[i]), 17) for i in range(8)]
    together = sampler.sample(logits, draws)
    assert [sampler.sample(logits[i : i + 1], [Draw(0, draws[i].state, 17)])[0] for i in range(8)] == together
    assert sampler.sample(logits, draws[::-1]) == together[::-1]
    changed = torch.randn(8, vocab, generator=g)
    changed[3] = logits[3]
    changed[6] = logits[6]
    again = sampler.sample(changed, draws)
    assert (again[3], again[6]) == (together[3], together[6])


def test_samples_of_one_request_differ_and_repeat():
    logits = torch.zeros(1, 50_000)
    sampler = Sampler(50_000)

    def four(seed):
        draws = [Draw(0, state(50_000, seed=seed, sample_index=i), 5) for i in range(4)]
        return [d.token_ids for d in sampler.sample(logits, draws)]

    assert len(set(four(1))) == 4
    assert four(1) == four(1) != four(2)


def test_a_greedy_batch_takes_each_rows_first_maximum():
    logits = torch.randn(6, 700, generator=torch.Generator().manual_seed(fresh_seed()))
    logits[2, [5, 600]] = 50.0
    order = [3, 0, 2, 2, 5]
    draws = [Draw(i, state(700, temperature=0), 4) for i in order]
    expected = [int(logits[i].argmax()) if i != 2 else 5 for i in order]
    assert [d.token_ids for d in Sampler(700).sample(logits, draws)] == [(t,) for t in expected]
    # One row that is not plain takes the other path; the answers are the same.
    mixed = [*draws, Draw(1, state(700, temperature=0, logprobs=0), 4)]
    assert [d.token_ids[0] for d in Sampler(700).sample(logits, mixed)] == [*expected, int(logits[1].argmax())]
    assert Sampler(700).sample(logits, []) == []


# -- adjustments ----------------------------------------------------------------------------------------------------


def reference_penalties(logits, prompt, output, repetition, presence, frequency):
    out = [float(x) for x in logits]
    for t in set(prompt) | set(output):
        out[t] = out[t] / repetition if out[t] > 0 else out[t] * repetition
    for t in set(output):
        out[t] -= frequency * list(output).count(t) + presence
    return out


def test_penalties_follow_the_sequence_in_every_batch_order():
    """Failure kind 33."""
    vocab, rng = 60, np.random.default_rng(fresh_seed())
    logits = torch.from_numpy(rng.standard_normal((3, vocab)).astype(np.float32))
    settings = [(1.5, 0.0, 0.0), (1.0, 1.9, 0.0), (0.8, -0.5, 1.2)]
    prompts = [tuple(rng.integers(0, vocab, 12).tolist()) for _ in range(3)]
    outputs = [tuple(rng.integers(0, vocab, 20).tolist()) for _ in range(3)]
    adjusted = []
    for i, (repetition, presence, frequency) in enumerate(settings):
        early, late = outputs[i][:7], outputs[i][7:]
        s = state(
            vocab,
            prompts[i] + early,
            12,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        for token in late:
            s.push(token)
        row = logits[i].numpy().copy()
        s.adjust(row)
        expected = reference_penalties(logits[i].tolist(), prompts[i], outputs[i], repetition, presence, frequency)
        np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-5)
        adjusted.append((s, int(row.argmax())))
    sampler = Sampler(vocab)
    for order in permutations(range(3)):
        for s, _ in adjusted:
            s.greedy = True
        drawn = sampler.sample(logits[list(order)], [Draw(j, adjusted[i][0], 0) for j, i in enumerate(order)])
        assert [d.token_ids[0] for d in drawn] == [adjusted[i][1] for i in order]


def test_presence_and_frequency_ignore_the_prompt():
    s = state(5, (0, 1), presence_penalty=2.0, frequency_penalty=2.0)
    row = np.zeros(5, dtype=np.float32)
    s.adjust(row)
    assert row.tolist() == [0] * 5
    s.push(1)
    s.push(1)
    s.adjust(row)
    assert row.tolist() == [0, -6, 0, 0, 0]


def test_bias_allowed_ids_and_end_ids_before_min_tokens():
    logits = [5.0, 4.0, 3.0, 2.0]
    assert one(logits, state(4, temperature=0, logit_bias={2: 10.0})).token_ids == (2,)
    assert one(logits, state(4, temperature=0, allowed_token_ids=[3, 1])).token_ids == (1,)
    s = state(4, temperature=0, min_tokens=2, end_ids=(0,))
    got = []
    for _ in range(3):
        got.append(one(logits, s).token_ids[0])
        s.push(got[-1])
    assert got == [1, 1, 0]
    assert s.plain_greedy, "once min_tokens is reached the row is plain again"


def test_bad_words_are_matched_against_generated_tokens():
    logits = [5.0, 4.0, 3.0, 2.0]
    s = state(4, (1,), temperature=0, bad=((3,), (1, 0), (1, 1, 2)), bad_words=["x"])
    row = np.array(logits, dtype=np.float32)
    s.adjust(row)
    assert row.tolist() == [5, 4, 3, -INF]  # the prompt's 1 does not begin a bad word
    s.push(1)
    assert one(logits, s).token_ids == (1,)
    s.push(1)
    row = np.array(logits, dtype=np.float32)
    s.adjust(row)
    assert row.tolist() == [-INF, 4, -INF, -INF]
    resumed = state(4, (1, 1, 1), 1, temperature=0, bad=((3,), (1, 0), (1, 1, 2)), bad_words=["x"])
    again = np.array(logits, dtype=np.float32)
    resumed.adjust(again)
    assert again.tolist() == row.tolist()


def test_when_nothing_is_left_the_likeliest_allowed_id_is_drawn():
    logits = [5.0, 4.0, 3.0, 2.0]
    assert one(logits, state(4, allowed_token_ids=[2, 1], bad=((1,), (2,)), bad_words=["x"])).token_ids == (1,)
    assert one(logits, state(4, bad=((0,), (1,), (2,), (3,)), bad_words=["x"])).token_ids == (0,)


@pytest.mark.parametrize("token", [-1, 4, 2**31])
def test_ids_outside_the_vocabulary_are_that_sequences_own_error(token):
    """Failure kind 29."""
    bad = [
        state(4, end_ids=(token,)),
        state(4, bad=((1, token),), bad_words=["x"]),
        state(4, (token,), repetition_penalty=2.0),
    ]
    if token >= 0:
        bad += [state(4, logit_bias={token: 1.0}), state(4, allowed_token_ids=[token])]
    good = state(4, temperature=0)
    logits = torch.tensor([[1.0, 2.0, 0.0, 0.0]])
    drawn = Sampler(4).sample(logits, [Draw(0, s, 0) for s in [*bad, good]])
    assert all(d.error and f"{token} is outside the vocabulary; use ids 0 to 3" in d.error for d in drawn[:-1])
    assert drawn[-1].token_ids == (1,) and drawn[-1].error is None


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF])
@pytest.mark.parametrize("kind", [{}, {"temperature": 0}, {"top_k": 2}, {"logprobs": 2}, {"repetition_penalty": 2.0}])
def test_unusable_logits_harm_their_own_row_only(poison, kind):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3))
    draws = [Draw(i, state(40, (1, 2), seed=i, **kind), 3) for i in range(3)]
    clean = Sampler(40).sample(logits, draws)
    poisoned = logits.clone()
    if poison == -INF:
        poisoned[1] = poison
    else:
        poisoned[1, 30] = poison
    drawn = Sampler(40).sample(poisoned, draws)
    assert (drawn[0], drawn[2]) == (clean[0], clean[2])
    assert drawn[1].token_ids == () and "no usable maximum" in (drawn[1].error or "")


def test_the_callers_logits_are_left_alone():
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(3))
    before = logits.clone()
    s = state(30, (1, 2), temperature=0.5, top_k=4, repetition_penalty=2.0, allowed_token_ids=[1, 2, 3], logprobs=2)
    Sampler(30).sample(logits, [Draw(0, s, 0)])
    assert torch.equal(logits, before)


def test_logits_of_another_shape_or_dtype_are_refused():
    with pytest.raises(ValueError, match=r"expected float32 \[N, 4\]"):
        Sampler(4).sample(torch.zeros(1, 5), [Draw(0, state(4), 0)])
    with pytest.raises(ValueError, match="float64"):
        Sampler(4).sample(torch.zeros(1, 4, dtype=torch.float64), [Draw(0, state(4), 0)])


# -- logprobs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [9, 3000])
def test_logprobs_are_raw_float32_with_the_chosen_token_in_front(vocab):
    """Failure kind 32."""
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(fresh_seed())) * 4
    truth = torch.log_softmax(logits[0].double(), -1)
    s = state(vocab, (1,), logprobs=5, temperature=0.3, logit_bias={3: 100.0}, repetition_penalty=1.7)
    drawn = Sampler(vocab).sample(logits, [Draw(0, s, 9)])[0]
    (entry,) = drawn.logprobs
    assert drawn.token_ids == (3,) and entry.token_ids[0] == 3
    assert entry.rank == 1 + int((truth > truth[3]).sum())
    assert list(entry.token_ids[1:]) == truth.topk(5).indices.tolist()
    np.testing.assert_allclose(entry.logprobs, truth[list(entry.token_ids)], atol=1e-5)
    assert all(float(np.float32(x)) == x for x in entry.logprobs)


def test_zero_logprobs_return_the_chosen_token_alone_and_none_returns_nothing():
    assert one([1.0, 2.0], state(2, temperature=0, logprobs=0)).logprobs[0].token_ids == (1,)
    assert one([1.0, 2.0], state(2, temperature=0)).logprobs == ()


def test_a_banned_token_has_logprob_minus_infinity():
    entry = one([1.0, -INF, 0.0], state(3, temperature=0, logprobs=3)).logprobs[0]
    assert entry.logprobs[-1] == -INF and entry.token_ids[-1] == 1
    assert math.isclose(sum(math.exp(x) for x in entry.logprobs[1:]), 1.0, rel_tol=1e-6)


def test_beams_get_the_best_candidates_and_draw_nothing():
    logits = [0.0, 3.0, 1.0, 3.0, -1.0]
    drawn = one(logits, state(5, beams=4))
    truth = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), 0)
    assert drawn.token_ids == ()
    assert drawn.logprobs[0].token_ids == (1, 3, 2, 0) and drawn.logprobs[0].rank == 0
    np.testing.assert_allclose(drawn.logprobs[0].logprobs, truth[[1, 3, 2, 0]], atol=1e-6)
    assert len(one(logits, state(5, beams=10)).logprobs[0].token_ids) == 5  # more beams than words
