"""The attention kernels: rows with few queries split over their keys, rows with many in tiles, and the merge.

Exact attention with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022): a running maximum, a running sum,
and an accumulator rescaled whenever the maximum moves. Exponentials are taken to base 2, with log2(e) in the scale of
the scores. Splitting one row's keys over programs and joining the parts by their maxima and sums is "flash-decoding"
(Dao et al. 2023). Query heads that share a key head are rows of one matrix, so keys and values are read once for all of
them and tensor cores get the 16 rows they need.

Keys and values are read through the block table, position by position: no block is gathered and any block size fits.
A position outside [low, high) is never read, neither its table entry nor its slot, so what lies there cannot matter.

All lengths come from tensors on the device; grids depend on shapes alone, so a captured graph serves every content.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.jit.rows import column, load_rows, load_scales

LOG2E = 1.4426950408889634

_FLOAT = tl.constexpr(0)
_INT4 = tl.constexpr(3)
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def attend_range(
    query,
    position,
    low,
    high,
    best,
    total,
    sums,
    table,
    kv,
    block_stride,
    key_base,
    value_base,
    scale,
    cap,
    window,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    VALUE_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Go on over keys [low, high): query [M, D] in DOT at `position` [M] (-1: none), running (best, total, sums).

    scale has log2(e) in it unless scores are capped. MASKED=False: every query sees every key of the range, which is
    whole tiles.
    """
    for start in range(low, high, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        valid = n < high
        block = tl.load(table + n // BLOCK_SIZE, mask=valid, other=0).to(tl.int64) * block_stride
        offset = n % BLOCK_SIZE
        key = load_rows(kv, block + key_base, offset, valid, KEY_KIND, BLOCK_SIZE, HEAD_DIM, D)
        scores = tl.dot(query, tl.trans(key.to(DOT)), input_precision=PRECISION) * scale
        if KEY_KIND != _FLOAT:
            factor = load_scales(kv, block + key_base, offset, valid, KEY_KIND, BLOCK_SIZE, HEAD_DIM)
            scores = scores * factor[None, :]
        if CAPPED:
            # cap * tanh(x / cap), by way of an exponential; tanh is 1 in float32 long before that overflows
            grown = tl.exp2(tl.minimum(scores * (2.0 * _LOG2E / cap), 64.0))
            scores = cap * (1.0 - 2.0 / (grown + 1.0)) * _LOG2E
        if MASKED:
            seen = valid[None, :] & (n[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & (n[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A query that has seen nothing yet has a maximum of -inf; measuring from 0 keeps its weights at 0.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(best - base)
        total = total * shrink + tl.sum(weights, 1)
        value = load_rows(kv, block + value_base, offset, valid, VALUE_KIND, BLOCK_SIZE, HEAD_DIM, D)
        if VALUE_KIND != _FLOAT:
            factor = load_scales(kv, block + value_base, offset, valid, VALUE_KIND, BLOCK_SIZE, HEAD_DIM)
            weights = weights * factor[None, :]
        sums = sums * shrink[:, None]
        sums = tl.dot(weights.to(VALUE_DOT), value.to(VALUE_DOT), sums, input_precision=PRECISION)
        best = higher
    return best, total, sums


@triton.jit(do_not_specialize=["window", "splits", "part_length"])
def split_kernel(
    query,
    out,
    parts,
    marks,
    query_start,
    context_len,
    tables,
    kv,
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    key_first,
    key_slab,
    value_first,
    value_slab,
    scale,
    cap,
    window,
    splits,
    part_length,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    VALUE_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (split, key head, row): one part of the keys of a row with 1 to QUERIES queries; others are left alone.

    part_length: keys of a part, or 0: as many whole tiles as deal the row's keys to `splits` programs.
    M rows of a tile: query 0 of each head of the group, query 1, …. Where one part holds all keys the result goes to
    `out`; else unnormalised sums go to parts [T, Hq, splits, HEAD_DIM] and (maximum, sum) to marks [T, Hq, splits, 2].
    """
    split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    if (count < 1) | (count > QUERIES):
        return
    context = tl.load(context_len + row)
    first = context * 0
    if WINDOWED:
        first = tl.maximum(context - count - window + 1, 0)
    length = part_length
    if part_length == 0:
        length = (context - first + splits * BLOCK_N - 1) // (splits * BLOCK_N) * BLOCK_N
    low = first + split * length
    if low >= context:
        return
    high = tl.minimum(low + length, context)

    m = tl.arange(0, M)
    d = tl.arange(0, D)
    which = m // GROUP
    real = which < count
    token = (first_token + which).to(tl.int64)
    query_head = head * GROUP + m % GROUP
    position = tl.where(real, context - count + which, -1)
    asked = column(d, KEY_KIND)
    at = token[:, None] * query_stride + query_head[:, None] * HEAD_DIM + asked[None, :]
    tile = tl.load(query + at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)

    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    best, total, sums = attend_range(
        tile, position, low, high, best, total, sums, tables + row.to(tl.int64) * table_stride, kv, block_stride,
        key_first + head * key_slab, value_first + head * value_slab, scale, cap, window,
        KEY_KIND, VALUE_KIND, WINDOWED, CAPPED, True, BLOCK_SIZE, HEAD_DIM, D, BLOCK_N, DOT, VALUE_DOT,
        PRECISION,
    )  # fmt: skip

    given = column(d, VALUE_KIND)
    stored = real[:, None] & (d < HEAD_DIM)[None, :]
    if length >= context - first:
        at = token[:, None] * out_stride + query_head[:, None] * HEAD_DIM + given[None, :]
        result = sums / tl.where(real, total, 1.0)[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)
    else:
        place = (token * (KV_HEADS * GROUP) + query_head) * splits + split
        tl.store(parts + place[:, None] * HEAD_DIM + given[None, :], sums, mask=stored)
        tl.store(marks + 2 * place, best, mask=real)
        tl.store(marks + 2 * place + 1, total, mask=real)


@triton.jit(do_not_specialize=["window", "splits", "part_length"])
def merge_kernel(
    out,
    parts,
    marks,
    query_start,
    context_len,
    out_stride,
    window,
    splits,
    part_length,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    S: tl.constexpr,
    WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Program (head, query of the row, row): joins the parts that `split_kernel` left. S: a power of two of at least
    `splits`."""
    head, which, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    if (count > QUERIES) | (which >= count):
        return
    context = tl.load(context_len + row)
    span = context
    if WINDOWED:
        span = tl.minimum(context, count + window - 1)
    length = part_length
    if part_length == 0:
        length = (span + splits * BLOCK_N - 1) // (splits * BLOCK_N) * BLOCK_N
    if length >= span:
        return
    used = (span + length - 1) // length
    token = (first_token + which).to(tl.int64)
    place = (token * HEADS + head) * splits
    s = tl.arange(0, S)
    best = tl.load(marks + 2 * (place + s), mask=s < used, other=float("-inf"))
    total = tl.load(marks + 2 * (place + s) + 1, mask=s < used, other=0.0)
    # A later query of a row sees the first key at least, an earlier one may see nothing of the last part.
    weights = tl.exp2(best - tl.max(best, 0))
    whole = tl.sum(weights * total, 0)
    d = tl.arange(0, D)
    known = (s < used)[:, None] & (d < HEAD_DIM)[None, :]
    sums = tl.load(parts + (place + s)[:, None] * HEAD_DIM + d[None, :], mask=known, other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / whole
    tl.store(out + token * out_stride + head * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def row_of_tile(query_start, tile, rows, TILE: tl.constexpr):
    """The last row whose first tile is not after `tile`, where row r's tiles begin at query_start[r] // TILE + r.

    That leaves every row room for its ceil(count / TILE) tiles whatever the counts are.
    """
    low = 0
    high = rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["rows", "window"])
def tile_kernel(
    query,
    out,
    query_start,
    context_len,
    tables,
    kv,
    rows,
    query_stride,
    out_stride,
    table_stride,
    block_stride,
    key_first,
    key_slab,
    value_first,
    value_slab,
    scale,
    cap,
    window,
    GROUP: tl.constexpr,
    SKIP: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
    VALUE_DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (key head, tile): M // GROUP queries of one row against all keys they see. Rows of at most SKIP queries
    are left to `split_kernel`."""
    TILE: tl.constexpr = M // GROUP
    head = tl.program_id(0)
    # Later queries see more keys: the long programs start first, so that none is left running alone.
    tile_number = tl.num_programs(1) - 1 - tl.program_id(1)
    row = row_of_tile(query_start, tile_number, rows, TILE)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    first_query = (tile_number - (first_token // TILE + row)) * TILE
    if (first_query >= count) | (count <= SKIP):
        return
    context = tl.load(context_len + row)

    m = tl.arange(0, M)
    d = tl.arange(0, D)
    which = first_query + m // GROUP
    real = (m < TILE * GROUP) & (which < count)
    token = (first_token + which).to(tl.int64)
    query_head = head * GROUP + m % GROUP
    position = tl.where(real, context - count + which, -1)
    at = token[:, None] * query_stride + query_head[:, None] * HEAD_DIM + column(d, KEY_KIND)[None, :]
    tile = tl.load(query + at, mask=real[:, None] & (d < HEAD_DIM)[None, :], other=0.0).to(DOT)

    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, D], tl.float32)
    lowest = context - count + first_query  # position of the tile's first query
    high = tl.minimum(lowest + TILE, context)
    low = lowest * 0
    table = tables + tl.cast(row, tl.int64) * table_stride
    key_base, value_base = key_first + head * key_slab, value_first + head * value_slab
    if WINDOWED:
        low = tl.maximum(lowest - window + 1, 0)
    else:
        # Keys before the first query are seen by all: most tiles need no mask.
        low = (lowest + 1) // BLOCK_N * BLOCK_N
        best, total, sums = attend_range(
            tile, position, 0, low, best, total, sums, table, kv, block_stride, key_base, value_base, scale, cap,
            window, KEY_KIND, VALUE_KIND, WINDOWED, CAPPED, False, BLOCK_SIZE, HEAD_DIM, D, BLOCK_N, DOT, VALUE_DOT,
        PRECISION,
        )  # fmt: skip
    best, total, sums = attend_range(
        tile, position, low, high, best, total, sums, table, kv, block_stride, key_base, value_base, scale, cap, window,
        KEY_KIND, VALUE_KIND, WINDOWED, CAPPED, True, BLOCK_SIZE, HEAD_DIM, D, BLOCK_N, DOT, VALUE_DOT,
        PRECISION,
    )  # fmt: skip

    at = token[:, None] * out_stride + query_head[:, None] * HEAD_DIM + column(d, VALUE_KIND)[None, :]
    result = sums / tl.where(real, total, 1.0)[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=real[:, None] & (d < HEAD_DIM)[None, :])
