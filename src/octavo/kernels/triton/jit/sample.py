"""Drawing tokens from rows of logits, by the rules of `runner/filters.py` and with the numbers of `runner/noise.py`.

A row is cut into blocks of BLOCK logits. The blocks' maxima and sums are made by many programs per row; what follows
takes one program per row, because few blocks can hold a candidate: the k-th largest of the maxima bounds the k-th
largest logit from below, and tokens below the mass that top_p cuts are no candidates. Nothing sorts: thresholds are
found bit by bit, and candidates stay in ascending order of their ids, so ties go to the lower id as on the host.

Weights are float32, their sums float64. Scratch memory is written and read by one program, with a barrier in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 512

_BLOCK = tl.constexpr(BLOCK)
_LOWEST = tl.constexpr(-3.4028234663852886e38)
_NEVER = tl.constexpr(1 << 30)


@triton.jit
def scan_kernel(logits, maxima, words, stride, blocks, TURN: tl.constexpr):
    """Program (part, row): maxima [., blocks] of TURN blocks; NaN where a block holds one."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * TURN + tl.arange(0, TURN)
    word = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    x = tl.load(logits + row * stride + word, mask=word < words, other=float("-inf"))
    bad = tl.max((x != x).to(tl.int32), 1) > 0
    highest = tl.max(tl.where(x != x, float("-inf"), x), 1)
    tl.store(maxima + row * blocks + block, tl.where(bad, float("nan"), highest), mask=block < blocks)


@triton.jit
def highest_of(maxima, blocks, NB: tl.constexpr):
    """Largest of a row's maxima, NaN if there is one; first block that has it."""
    b = tl.arange(0, NB)
    m = tl.load(maxima + b, mask=b < blocks, other=float("-inf"))
    bad = tl.max((m != m).to(tl.int32), 0) > 0
    highest = tl.max(tl.where(m != m, float("-inf"), m), 0)
    there = tl.where(bad, m != m, m == highest) & (b < blocks)
    return tl.where(bad, float("nan"), highest), tl.min(tl.where(there, b, _NEVER), 0)


@triton.jit
def weight_of(x, highest, temperature):
    """exp((x - highest) / temperature), with the host's roundings."""
    return tl.exp(tl.div_rn(x - highest, temperature + tl.zeros_like(x)))


@triton.jit
def sums_kernel(
    logits, maxima, sums, temperatures, top_ks, words, stride, blocks, TURN: tl.constexpr, NB: tl.constexpr
):
    """Program (part, row): sums [., blocks] float32 of the weights of TURN blocks. Rows that need none are left out:
    greedy ones, those with a top_k, and those without a finite maximum."""
    row = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperatures + row)
    highest, _ = highest_of(maxima + row * blocks, blocks, NB)
    usable = tl.abs(highest) < float("inf")
    if usable & (temperature > 0) & (tl.load(top_ks + row) == 0):
        block = tl.program_id(0) * TURN + tl.arange(0, TURN)
        word = block[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
        x = tl.load(logits + row * stride + word, mask=word < words, other=float("-inf"))
        tl.store(sums + row * blocks + block, tl.sum(weight_of(x, highest, temperature), 1), mask=block < blocks)


@triton.jit
def pick_kernel(
    logits,
    maxima,
    sums,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    tokens,
    largest,
    words,
    stride,
    blocks,
    RANDOM: tl.constexpr,
    NB: tl.constexpr,
):
    """Program (row): the first index of the largest logit and its value; for rows with a temperature and no filter, the
    token at which the cumulative distribution exceeds the row's uniform number: by block, then inside it."""
    row = tl.program_id(0).to(tl.int64)
    highest, block = highest_of(maxima + row * blocks, blocks, NB)
    i = tl.arange(0, _BLOCK)
    word = block * _BLOCK + i
    x = tl.load(logits + row * stride + word, mask=word < words, other=float("-inf"))
    there = tl.where(highest != highest, x != x, x == highest) & (word < words)
    token = block * _BLOCK + tl.min(tl.where(there, i, _NEVER), 0)
    tl.store(largest + row, highest)
    if RANDOM:
        temperature = tl.load(temperatures + row)
        plain = (tl.load(top_ks + row) == 0) & (tl.load(top_ps + row) >= 1.0) & (tl.load(min_ps + row) <= 0.0)
        if plain & (temperature > 0) & (tl.abs(highest) < float("inf")):
            b = tl.arange(0, NB)
            uniform = tl.load(uniforms + row)
            cumulative = tl.cumsum(tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0).to(tl.float64), 0)
            target = uniform * tl.max(cumulative, 0)
            found = first_above(cumulative, target)
            before = tl.sum(tl.where(b == found - 1, cumulative, 0.0), 0)
            own = tl.sum(tl.where(b == found, cumulative, 0.0), 0) - before
            word = found * _BLOCK + i
            x = tl.load(logits + row * stride + word, mask=word < words, other=float("-inf"))
            inside = tl.cumsum(weight_of(x, highest, temperature).to(tl.float64), 0)
            # The block's own sum is rounded to float32, its running sum is not: the rest is measured on the latter.
            token = found * _BLOCK + first_above(inside, (target - before) / own * tl.max(inside, 0))
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def first_above(cumulative, target):
    """First index whose value exceeds target; where rounding left none, the first that reaches the total."""
    above = tl.sum((cumulative <= target).to(tl.int32), 0)
    last = tl.sum((cumulative < tl.max(cumulative, 0)).to(tl.int32), 0)
    return tl.minimum(above, last)


@triton.jit
def kth_largest(values, count, k, TILE: tl.constexpr):
    """The k-th largest of `count` float32 in memory, 1 <= k <= count, found bit by bit from the top."""
    found = tl.zeros([], tl.int64)
    for bit in range(32):
        trial = found + (tl.full([], 1 << 31, tl.int64) >> bit)
        reached = tl.zeros([], tl.int32)
        for first in range(0, count, TILE):
            i = first + tl.arange(0, TILE)
            bits = tl.load(values + i, mask=i < count, other=float("-inf")).to(tl.int32, bitcast=True)
            # Signed integers in the order of the floats, then moved to 0 .. 2**32 - 1.
            key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + (1 << 31)
            reached += tl.sum(((key >= trial) & (i < count)).to(tl.int32), 0)
        found = tl.where(reached >= k, trial, found)
    key = (found - (1 << 31)).to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def collect(logits, maxima, words, blocks, bound, ids, values, chosen, NB: tl.constexpr):
    """All logits of a row of at least `bound`, ascending by id, into ids and values; how many they are. chosen: scratch
    for the blocks that hold any."""
    b = tl.arange(0, NB)
    holds = (tl.load(maxima + b, mask=b < blocks, other=float("-inf")) >= bound) & (b < blocks)
    tl.store(chosen + tl.cumsum(holds.to(tl.int32), 0) - 1, b, mask=holds)
    tl.debug_barrier()
    i = tl.arange(0, _BLOCK)
    count = tl.zeros([], tl.int32)
    for n in range(tl.sum(holds.to(tl.int32), 0)):
        word = tl.load(chosen + n) * _BLOCK + i
        x = tl.load(logits + word, mask=word < words, other=float("-inf"))
        wanted = (x >= bound) & (word < words)
        place = count + tl.cumsum(wanted.to(tl.int32), 0) - 1
        tl.store(ids + place, word, mask=wanted)
        tl.store(values + place, x, mask=wanted)
        count += tl.sum(wanted.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def heaviest_border(weights, count, limit, TILE: tl.constexpr):
    """(bits of the smallest weight so that all larger ones weigh less than `limit` together, what those weigh)."""
    low = tl.zeros([], tl.int32)
    high = tl.full([], 0x3F800000, tl.int32)  # of 1.0, the largest weight: nothing is above it
    over = tl.zeros([], tl.float64)
    while low < high:
        middle = (low + high) // 2
        mass = tl.zeros([], tl.float64)
        for first in range(0, count, TILE):
            i = first + tl.arange(0, TILE)
            w = tl.load(weights + i, mask=i < count, other=0.0)
            mass += tl.sum(tl.where(w.to(tl.int32, bitcast=True) > middle, w, 0.0).to(tl.float64), 0)
        light = mass < limit
        over = tl.where(light, mass, over)
        high = tl.where(light, middle, high)
        low = tl.where(light, low, middle + 1)
    return high, over


@triton.jit
def filter_kernel(
    logits,
    maxima,
    sums,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    uniforms,
    tokens,
    ids,
    values,
    chosen,
    words,
    stride,
    blocks,
    NB: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row): draw among what top_k, then top_p over what it left, then min_p keep. Other rows are left alone.

    ids int32, values float32 [rows, words], chosen int32 [rows, blocks]: scratch.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row).to(tl.float64)
    min_p = tl.load(min_ps + row).to(tl.float32)
    highest, _ = highest_of(maxima + row * blocks, blocks, NB)
    filtered = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    if filtered & (temperature > 0) & (tl.abs(highest) < float("inf")):
        ids += row * words
        values += row * words
        total = tl.zeros([], tl.float64)
        bound = tl.full([], _LOWEST, tl.float32)
        floor = min_p
        if top_k > 0:
            if top_k <= blocks:
                bound = tl.maximum(kth_largest(maxima + row * blocks, blocks, top_k, NB), _LOWEST)
        else:
            if top_p < 1.0:
                b = tl.arange(0, NB)
                total = tl.sum(tl.load(sums + row * blocks + b, mask=b < blocks, other=0.0).to(tl.float64), 0)
                floor = tl.maximum(floor, (0.5 * (1.0 - top_p) * total / words).to(tl.float32))
            # A logit this far below the highest has a smaller weight; a little further, against rounding. A floor of 0
            # (all of a tiny min_p) admits every finite logit.
            reach = tl.maximum(tl.log(tl.maximum(floor, 1e-38)) * 1.0001 - 0.001, -88.0) * temperature
            bound = tl.where(floor > 1e-38, tl.maximum(highest + reach * 1.0001, _LOWEST), _LOWEST)
        count = collect(
            logits + row * stride, maxima + row * blocks, words, blocks, bound, ids, values, chosen + row * blocks, NB
        )
        kth = tl.full([], _LOWEST, tl.float32)
        if (top_k > 0) & (count > top_k):
            kth = kth_largest(values, count, top_k, TILE)
        mass = tl.zeros([], tl.float64)
        for first in range(0, count, TILE):
            i = first + tl.arange(0, TILE)
            x = tl.load(values + i, mask=i < count, other=float("-inf"))
            w = weight_of(x, highest, temperature)
            w = tl.where((x >= kth) & ((top_k > 0) | (w >= floor)), w, 0.0)
            mass += tl.sum(w.to(tl.float64), 0)
            tl.store(values + i, w, mask=i < count)
        tl.debug_barrier()
        border = tl.zeros([], tl.int32)
        over = tl.zeros([], tl.float64)
        limit = top_p * tl.where(top_k > 0, mass, total)
        if top_p < 1.0:
            border, over = heaviest_border(values, count, limit, TILE)
        token = draw_kept(ids, values, count, border, over, limit, min_p, tl.load(uniforms + row), TILE)
        tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def draw_kept(ids, weights, count, border, over, limit, min_p, uniform, TILE: tl.constexpr):
    """Set the weights that top_p and min_p remove to 0, then invert the cumulative distribution at `uniform`: an id.

    border: bits of the lightest weight that top_p may keep; 0: all. Of those that weigh exactly that, the first are
    kept as long as the mass before them is below `limit`; over: the mass of all heavier ones.
    """
    total = tl.zeros([], tl.float64)
    equal = tl.zeros([], tl.float64)  # how many weights on the border came before
    last = tl.zeros([], tl.int32)  # the last one kept
    for first in range(0, count, TILE):
        i = first + tl.arange(0, TILE)
        w = tl.load(weights + i, mask=i < count, other=0.0)
        bits = w.to(tl.int32, bitcast=True)
        on = (bits == border) & (i < count)
        before = over + (equal + tl.cumsum(on.to(tl.float64), 0) - 1.0) * w.to(tl.float64)
        kept = (bits > border) | (on & (before < limit))
        kept = kept & (w >= min_p) & (w > 0.0)
        equal += tl.sum(on.to(tl.float64), 0)
        w = tl.where(kept, w, 0.0)
        total += tl.sum(w.to(tl.float64), 0)
        last = tl.maximum(last, tl.max(tl.where(kept, i, 0), 0))
        tl.store(weights + i, w, mask=i < count)
    tl.debug_barrier()
    target = uniform * total
    above = tl.zeros([], tl.int32)
    run = tl.zeros([], tl.float64)
    for first in range(0, count, TILE):
        i = first + tl.arange(0, TILE)
        w = tl.load(weights + i, mask=i < count, other=0.0).to(tl.float64)
        above += tl.sum(((run + tl.cumsum(w, 0) <= target) & (i < count)).to(tl.int32), 0)
        run += tl.sum(w, 0)
    return tl.load(ids + tl.minimum(above, last))
