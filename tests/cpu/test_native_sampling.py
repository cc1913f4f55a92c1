"""Native sampling against its NumPy definition, on every instruction set: draws, noise, log-probabilities, memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from helpers.native_support import instruction_sets, instructions, threads
from helpers.paged import fresh_seed
from octavo.core.step import SequenceStart
from octavo.kernels import cpu
from octavo.runner import filters, noise
from octavo.runner.sampler import Draw, Sampler
from octavo.runner.sampling_state import SamplingState
from octavo.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
OPTIONS = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"temperature": 1e-6},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 3000, "temperature": 2.0},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 5.0},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"top_p": 0.95, "min_p": 0.001, "temperature": 1.5},
    {"temperature": 0.0},
    {"logprobs": 0},
    {"logprobs": 20, "temperature": 0.0},
    {"logprobs": 5, "top_p": 0.7},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logit_bias": {3: 5.0, 0: -2.0}, "top_k": 10, "logprobs": 2},
]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of the processor."""
    with instructions(request.param):
        yield request.param


def draws_for(vocab: int, rows: int, seed: int, beams: int = 0) -> list[Draw]:
    """One draw per option, dealt over the rows."""
    out = []
    for i, options in enumerate(OPTIONS):
        start = SequenceStart(
            seq_id=i,
            request_id="r",
            sample_index=i,
            params=SamplingParams(**options),  # type: ignore[arg-type]
            token_ids=(1, 2, 3, 2),
            prompt_len=2,
            seed=seed,
            num_candidates=beams if i == 0 else 0,
        )
        out.append(Draw(i % rows, SamplingState(start, vocab), 1000 + i))
    return out


def walled(rows: int, vocab: int, generator: np.random.Generator) -> np.ndarray:
    """[rows, vocab] inside a wider NaN array: reading past a row shows."""
    wide = np.full((rows, vocab + 40), np.nan, dtype=np.float32)
    kinds = [1.0, 8.0, 0.0]
    for row in range(rows):
        wide[row, :vocab] = generator.standard_normal(vocab) * kinds[row % 3]
    if vocab > 60:
        wide[0, 10:50] = -np.inf
        wide[1 % rows, 7:60] = wide[1 % rows, :vocab].max()  # ties at the top
    return wide[:, :vocab]


def clear_of_borders(logits: np.ndarray, draw: Draw, uniform: float, margin: float = 2e-6) -> bool:
    """Whether a slightly different number would draw the same token: only then must two roundings agree."""
    state, vocab = draw.state, len(logits)
    row = logits.copy()
    state.adjust(row)
    scratch = filters.Scratch(vocab)
    ids, weights = filters.keep(row, row.max(), state.temperature, state.top_k, state.top_p, state.min_p, scratch)
    if not state.filters:
        filters.exponentials(row, row.max(), state.temperature, scratch.weights)
        ids, weights = np.arange(vocab), scratch.weights
    return filters.draw_among(ids, weights, max(0.0, uniform - margin)) == filters.draw_among(
        ids, weights, min(1.0 - 1e-12, uniform + margin)
    )


@pytest.mark.parametrize("vocab", [5, 511, 513, 5000, 40_001])
def test_draws_what_numpy_draws(isa: str, vocab: int) -> None:
    seed = fresh_seed()
    generator = np.random.default_rng(seed)
    native, plain = Sampler(vocab), Sampler(vocab, native=False)
    compared = 0
    for attempt in range(4):
        logits = torch.from_numpy(walled(4, vocab, generator))
        draws = draws_for(vocab, 4, seed + attempt, beams=min(4, vocab))
        for i, (a, b) in enumerate(zip(native.sample(logits, draws), plain.sample(logits, draws), strict=True)):
            assert a.error is None and b.error is None
            if a.token_ids != b.token_ids:
                uniform = plain._noise(draws)[i]
                assert not clear_of_borders(logits[draws[i].logit_row].numpy(), draws[i], uniform), (seed, i)
                continue
            compared += 1
            assert len(a.logprobs) == len(b.logprobs)
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert x.token_ids == y.token_ids and x.rank == y.rank, (seed, i)
                np.testing.assert_allclose(x.logprobs, y.logprobs, rtol=0, atol=2e-5)
    assert compared >= 4 * len(OPTIONS) - 2, seed


def test_threads_and_neighbours_change_nothing(isa: str) -> None:
    vocab = 70_000
    logits = torch.from_numpy(walled(5, vocab, np.random.default_rng(3)).copy())
    draws = draws_for(vocab, 5, seed=9)
    sampler = Sampler(vocab)
    with threads(1):
        expected = sampler.sample(logits, draws)
    with threads(3):
        assert sampler.sample(logits, draws) == expected
        for draw, answer in zip(draws, expected, strict=True):
            alone = Draw(0, draw.state, draw.position)
            assert sampler.sample(logits[draw.logit_row : draw.logit_row + 1], [alone]) == [answer]


def test_noise_has_the_same_bits() -> None:
    seeds, samples, positions = [0, -1, 2**63, 12345678901234567890123], [0, 7, 2**32 - 1, 3], [0, 1, 2**32 - 1, 99]
    got = cpu.NativeSampling(8).uniforms(seeds, samples, positions)
    assert got == noise.uniforms(seeds, samples, positions).tolist()


def test_a_nan_and_an_infinity_show_in_the_scan(isa: str) -> None:
    sampling = cpu.NativeSampling(1300)
    rows = np.zeros((4, 1300), dtype=np.float32)
    rows[0, 1299], rows[1, 700], rows[2, 5:9], rows[3] = np.nan, np.inf, 1.0, -np.inf
    best, highest = sampling.scan(list(rows))
    assert best == [1299, 700, 5, 0]
    assert np.isnan(highest[0]) and highest[1:] == [np.inf, 1.0, -np.inf]


def test_borders_are_hit_and_a_token_of_weight_zero_is_never_drawn(isa: str) -> None:
    row = np.full(1500, -np.inf, dtype=np.float32)
    row[[3, 511, 512, 1499]] = 0.0
    sampling = cpu.NativeSampling(1500)
    sampling.scan([row])
    numbers = (0.0, 0.2499, 0.25, 0.5, 0.7499, 0.75, 1 - 2**-53)
    expected = [3, 3, 511, 512, 512, 1499, 1499]
    assert sampling.draw([(0, 1.0, 0, 1.0, 0.0, u) for u in numbers]) == expected
    assert sampling.draw([(0, 1.0, 4, 1.0, 0.0, u) for u in numbers]) == expected
    assert sampling.draw([(0, 1.0, 0, 0.9999, 0.0, u) for u in numbers]) == expected


def test_rows_that_do_not_fit_are_refused() -> None:
    sampling = cpu.NativeSampling(10)
    with pytest.raises(ValueError, match=r"float32 \[10\]"):
        sampling.scan([np.zeros(11, dtype=np.float32)])
    with pytest.raises(ValueError, match=r"float32 \[10\]"):
        sampling.scan([np.zeros(20, dtype=np.float32)[::2]])
    with pytest.raises(IndexError, match="row 0 was not scanned"):
        sampling.draw([(0, 1.0, 0, 1.0, 0.0, 0.5)])
    sampling.scan([np.zeros(10, dtype=np.float32)])
    with pytest.raises(IndexError, match="token 10 is outside"):
        sampling.logprobs([0], [10], [1])
