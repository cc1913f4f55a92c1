"""Noise without state: the uniform number behind each drawn token is a function of where the token stands.

`uniforms(seed, sample_index, position)` runs Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) once per token: key = the request's 64-bit seed, counter = (position, sample index,
stream, 0). Nothing is advanced, so two samples never share a number, a preempted sequence draws what it would have
drawn, and neighbours in the batch cannot matter. Only 32-bit integer arithmetic is involved (held in uint64), so any
device gets the same bits.

One number per token, not one per (token, word): drawing by Gumbel noise needs a number for every word of the
vocabulary, 16.8 million for 64 rows of 262,144 words; inverting the cumulative distribution at one uniform number
has the same distribution and the same independence. The numbers are also known before the logits are, so on a GPU
they travel with the step's inputs and a draw needs no synchronisation. Inversion in vocabulary order has a second
virtue: logits that differ by rounding move the borders between words by as little, so two devices draw the same
word unless a border passes the number.

This module does not know logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

STREAM_DRAW = 0  # the number that picks a token from the model's distribution

_U64 = np.uint64
_MASK = _U64(0xFFFFFFFF)
_SHIFT = _U64(32)
_MULTIPLY_0 = _U64(0xD2511F53)
_MULTIPLY_1 = _U64(0xCD9E8D57)
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85

Words = npt.NDArray[np.uint64]


def philox4x32(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words], rounds: int = 10) -> list[Words]:
    """Philox4x32. counter: four, key: two arrays of 32-bit words held in uint64, of one shape -> four such arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(rounds):
        product_0 = c0 * _MULTIPLY_0
        product_1 = c2 * _MULTIPLY_1
        round_0 = (k0 + _U64(number * _WEYL_0 & 0xFFFFFFFF)) & _MASK
        round_1 = (k1 + _U64(number * _WEYL_1 & 0xFFFFFFFF)) & _MASK
        c0 = (product_1 >> _SHIFT) ^ c1 ^ round_0
        c2 = (product_0 >> _SHIFT) ^ c3 ^ round_1
        c1, c3 = product_1 & _MASK, product_0 & _MASK
    return [c0, c1, c2, c3]


def uniforms(
    seeds: Sequence[int], sample_indices: Sequence[int], positions: Sequence[int], stream: int = STREAM_DRAW
) -> npt.NDArray[np.float64]:
    """One float64 in [0, 1) with 53 random bits per (seed, sample index, token position) triple.

    Seeds are taken modulo 2**64 (so a negative seed is its two's complement), sample indices and positions must be
    below 2**32.
    """
    seed = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    counter = (
        np.array(positions, dtype=np.uint64),
        np.array(sample_indices, dtype=np.uint64),
        np.full(len(seed), stream, dtype=np.uint64),
        np.zeros(len(seed), dtype=np.uint64),
    )
    high, low, _, _ = philox4x32(counter, (seed & _MASK, seed >> _SHIFT))
    bits = ((high >> _U64(5)) << _U64(26)) | (low >> _U64(6))
    return bits.astype(np.float64) * 2.0**-53
