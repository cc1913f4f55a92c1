"""Changes to logits before a draw, the noise behind it, and what is told about it afterwards.

Penalties touch the tokens a sequence has seen, kept as short lists on the device (`TokenHistory`), not the vocabulary.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.jit.sample import collect, highest_of, kth_largest

_NEVER = tl.constexpr(1 << 30)


@triton.jit
def penalise_kernel(
    logits,
    slots,
    ids,
    counts,
    sizes,
    repetitions,
    frequencies,
    presences,
    stride,
    room,
    TILE: tl.constexpr,
):
    """Program (part, row): penalties of the TILE-th part of the tokens in the row's history, in place.

    ids int32, counts float32 [slots, room], sizes int32 [slots]; a negative slot: nothing. In this order: repetition
    divides a positive logit and multiplies a negative one, frequency times the count is taken off, presence once.
    """
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot >= 0:
        size = tl.load(sizes + slot)
        i = tl.program_id(0) * TILE + tl.arange(0, TILE)
        known = i < size
        token = tl.load(ids + slot * room + i, mask=known, other=0)
        count = tl.load(counts + slot * room + i, mask=known, other=0.0)
        at = logits + row * stride + token
        x = tl.load(at, mask=known, other=0.0)
        repetition = tl.load(repetitions + row) + tl.zeros_like(x)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = x - tl.load(frequencies + row) * count
        x = x - tl.load(presences + row) * (count > 0).to(tl.float32)
        tl.store(at, x, mask=known)


@triton.jit
def count_kernel(slots, tokens, ids, counts, sizes, room, TILE: tl.constexpr):
    """Program (row): one more `tokens[row]` in the history `slots[row]`; nothing where either is negative."""
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    token = tl.load(tokens + row)
    if (slot >= 0) & (token >= 0):
        size = tl.load(sizes + slot)
        place = tl.full([], _NEVER, tl.int32)
        for first in range(0, size, TILE):
            i = first + tl.arange(0, TILE)
            same = (tl.load(ids + slot * room + i, mask=i < size, other=-1) == token) & (i < size)
            place = tl.minimum(place, tl.min(tl.where(same, i, _NEVER), 0))
        if place < size:
            tl.store(counts + slot * room + place, tl.load(counts + slot * room + place) + 1.0)
        elif size < room:
            tl.store(ids + slot * room + size, token.to(tl.int32))
            tl.store(counts + slot * room + size, 1.0)
            tl.store(sizes + slot, size + 1)


@triton.jit(do_not_specialize=["count"])
def edit_kernel(logits, rows, ids, values, count, stride, TILE: tl.constexpr):
    """Add values [count] to single logits: a bias, or -inf for a ban, which no bias undoes."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = i < count
    row = tl.load(rows + i, mask=known, other=0).to(tl.int64)
    token = tl.load(ids + i, mask=known, other=0)
    tl.atomic_add(logits + row * stride + token, tl.load(values + i, mask=known, other=0.0), mask=known)


@triton.jit
def copy_rows_kernel(logits, rows, out, words, stride, out_stride, TILE: tl.constexpr):
    """Program (part, row): out[row] = logits[rows[row]]."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    source = tl.load(rows + row).to(tl.int64)
    x = tl.load(logits + source * stride + i, mask=i < words)
    tl.store(out + row * out_stride + i, x, mask=i < words)


@triton.jit(do_not_specialize=["count"])
def uniform_kernel(seeds, samples, positions, out, count, TILE: tl.constexpr):
    """Philox4x32-10 (Salmon et al. 2011) with key = seed, counter = (position, sample, 0, 0): float64 in [0, 1)."""
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    known = i < count
    seed = tl.load(seeds + i, mask=known, other=0).to(tl.uint64)
    mask = tl.full([TILE], 0xFFFFFFFF, tl.uint64)
    k0, k1 = seed & mask, seed >> 32
    c0 = tl.load(positions + i, mask=known, other=0).to(tl.uint64)
    c1 = tl.load(samples + i, mask=known, other=0).to(tl.uint64)
    c2 = tl.zeros([TILE], tl.uint64)
    c3 = tl.zeros([TILE], tl.uint64)
    for _ in tl.static_range(10):
        first = c0 * tl.full([TILE], 0xD2511F53, tl.uint64)
        second = c2 * tl.full([TILE], 0xCD9E8D57, tl.uint64)
        c0 = (second >> 32) ^ c1 ^ k0
        c2 = (first >> 32) ^ c3 ^ k1
        c1 = second & mask
        c3 = first & mask
        k0 = (k0 + tl.full([TILE], 0x9E3779B9, tl.uint64)) & mask
        k1 = (k1 + tl.full([TILE], 0xBB67AE85, tl.uint64)) & mask
    bits = ((c0 >> 5) << 26) | (c1 >> 6)
    tl.store(out + i, bits.to(tl.int64).to(tl.float64) * 1.1102230246251565e-16, mask=known)


@triton.jit
def rank_kernel(logits, tokens, ranks, words, stride, TILE: tl.constexpr):
    """Program (part, row): add how many logits of the part are larger than the token's. ranks start at 1."""
    row = tl.program_id(1).to(tl.int64)
    token = tl.load(tokens + row)
    if token >= 0:
        i = tl.program_id(0) * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + i, mask=i < words, other=float("-inf"))
        larger = tl.sum((x > tl.load(logits + row * stride + token)).to(tl.int32), 0)
        if larger > 0:
            tl.atomic_add(ranks + row, larger)


@triton.jit
def list_kernel(
    logits,
    maxima,
    sums,
    tokens,
    out_ids,
    out_values,
    ids,
    values,
    chosen,
    words,
    stride,
    blocks,
    LISTED: tl.constexpr,
    NB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row): the token in front and then the LISTED likeliest, best first: ids int64 and raw log-probabilities
    [rows, 1 + LISTED]. A negative token leaves its place out; so does a row without a finite maximum everything."""
    row = tl.program_id(0).to(tl.int64)
    highest, _ = highest_of(maxima + row * blocks, blocks, NB)
    if tl.abs(highest) < float("inf"):
        b = tl.arange(0, NB)
        total = tl.sum(tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0).to(tl.float64), 0)
        normaliser = highest.to(tl.float64) + tl.log(total)
        token = tl.load(tokens + row)
        at = row * (1 + LISTED)
        if token >= 0:
            tl.store(out_ids + at, token.to(tl.int64))
            own = tl.load(logits + row * stride + token).to(tl.float64)
            tl.store(out_values + at, (own - normaliser).to(tl.float32))
        if LISTED > 0:
            ids += row * words
            values += row * words
            bound = tl.full([], float("-inf"), tl.float32)
            if blocks >= LISTED:
                bound = kth_largest(maxima + row * blocks, blocks, LISTED, NB)
            count = collect(
                logits + row * stride,
                maxima + row * blocks,
                words,
                blocks,
                bound,
                ids,
                values,
                chosen + row * blocks,
                NB,
            )
            value = tl.full([], float("inf"), tl.float32)
            place = tl.full([], -1, tl.int32)  # among the candidates, which ascend by id
            for n in range(LISTED):
                best = tl.full([], float("-inf"), tl.float32)
                where = tl.full([], _NEVER, tl.int32)
                for first in range(0, count, TILE):
                    i = first + tl.arange(0, TILE)
                    x = tl.load(values + i, mask=i < count, other=float("-inf"))
                    later = ((x < value) | ((x == value) & (i > place))) & (i < count)
                    top = tl.max(tl.where(later, x, float("-inf")), 0)
                    own_place = tl.min(tl.where(later & (x == top), i, _NEVER), 0)
                    where = tl.where((top > best) | (where == _NEVER), own_place, where)
                    best = tl.maximum(best, top)
                value = best
                place = where
                if place < count:
                    tl.store(out_ids + at + 1 + n, tl.load(ids + place).to(tl.int64))
                    tl.store(out_values + at + 1 + n, (value.to(tl.float64) - normaliser).to(tl.float32))
