"""Philox against its published vectors, and what the noise of a token depends on."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.runner.noise import philox4x32, uniforms

# Salmon et al., Random123's known-answer file: philox4x32, 10 rounds.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def words(values):
    return tuple(np.array([v], dtype=np.uint64) for v in values)


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter, key, expected):
    assert [int(w[0]) for w in philox4x32(words(counter), words(key))] == list(expected)


def test_a_number_depends_on_its_own_triple_only():
    together = uniforms([5, 5, 6, 5], [0, 1, 0, 0], [10, 10, 10, 11])
    alone = [uniforms([s], [i], [p])[0] for s, i, p in ((5, 0, 10), (5, 1, 10), (6, 0, 10), (5, 0, 11))]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_all_64_bits_of_the_seed_count_and_negative_seeds_work():
    seeds = [1, 1 + 2**32, 1 + 2**63, -1, 2**64 - 1]
    numbers = uniforms(seeds, [0] * 5, [0] * 5)
    assert len(set(numbers.tolist())) == 4
    assert numbers[3] == numbers[4]


def test_numbers_are_uniform_in_positions_samples_and_seeds():
    n = 20_000
    for triple in (([9] * n, [0] * n, range(n)), ([9] * n, range(n), [4] * n), (range(n), [0] * n, [4] * n)):
        numbers = uniforms(*triple)
        assert numbers.min() >= 0.0 and numbers.max() < 1.0
        observed = np.bincount((numbers * 50).astype(int), minlength=50)
        chi_square = ((observed - n / 50) ** 2 / (n / 50)).sum()
        assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001; the numbers are fixed, so this is no lottery
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.02


def test_another_stream_is_other_noise():
    assert uniforms([1], [0], [0], stream=1)[0] != uniforms([1], [0], [0])[0]
