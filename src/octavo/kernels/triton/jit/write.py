"""Rotation, norms of single heads and the way of new keys and values into the pool, in one kernel.

A program takes one token and a few heads of query, key or value. What it computes is rounded to the activations' type
before it is stored or quantised, so the pool gets the same bytes whether the steps are fused or not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo.kernels.triton.jit.rows import column, store_rows


@triton.jit
def turned(
    x,
    heads,
    valid,
    token,
    stride,
    cos,
    sin,
    norm,
    eps,
    where,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Heads [H] of one token, normed and rotated: float32 [H, D], number `where` [D] of each head at every place."""
    known = valid[:, None] & (where < HEAD_DIM)[None, :]
    first = x + token * stride + heads[:, None] * HEAD_DIM
    own = tl.load(first + where[None, :], mask=known, other=0.0).to(tl.float32)
    if NORMED:
        mean = tl.sum(own * own, 1) / HEAD_DIM
        shrink = 1.0 / tl.sqrt_rn(mean + eps)
        weight = tl.load(norm + where, mask=where < HEAD_DIM, other=0.0).to(tl.float32)
        own = (own * shrink[:, None] * weight[None, :]).to(x.dtype.element_ty).to(tl.float32)
    if ROTARY > 0:
        inside = where < ROTARY
        other = tl.where(where < ROTARY // 2, where + ROTARY // 2, where - ROTARY // 2)
        partner = tl.load(first + other[None, :], mask=known & inside[None, :], other=0.0).to(tl.float32)
        if NORMED:
            weight = tl.load(norm + other, mask=inside, other=0.0).to(tl.float32)
            partner = (partner * shrink[:, None] * weight[None, :]).to(x.dtype.element_ty).to(tl.float32)
        c = tl.load(cos + token * ROTARY + where, mask=inside, other=1.0)
        s = tl.load(sin + token * ROTARY + where, mask=inside, other=0.0)
        s = tl.where(where < ROTARY // 2, -s, s)
        own = own * c[None, :] + partner * s[None, :]
    return own


@triton.jit
def write_kernel(
    query,
    key,
    value,
    query_out,
    key_out,
    cos,
    sin,
    q_norm,
    k_norm,
    slots,
    kv,
    query_stride,
    key_stride,
    value_stride,
    query_out_stride,
    key_out_stride,
    block_stride,
    key_first,
    key_slab,
    value_first,
    value_slab,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMED: tl.constexpr,
    STORED: tl.constexpr,
    KEY_KIND: tl.constexpr,
    VALUE_KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
    H: tl.constexpr,
):
    """Program (part, token). The parts are H query heads each (none if HEADS is 0), then H key heads, then value heads.

    Queries go to `query_out`. STORED: keys and values go into the pool, at slots[token] unless that is negative; else
    keys go to `key_out` and there is no part for values. ROTARY: the first so many numbers of a head are rotated (0:
    none); cos and sin float32 [T, ROTARY]. NORMED: heads of queries and keys are scaled by root mean square first.
    """
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(0)
    d = tl.arange(0, D)
    h = tl.arange(0, H)
    query_parts: tl.constexpr = (HEADS + H - 1) // H
    key_parts: tl.constexpr = (KV_HEADS + H - 1) // H
    if part < query_parts:
        heads = part * H + h
        valid = heads < HEADS
        x = turned(
            query, heads, valid, token, query_stride, cos, sin, q_norm, eps, d, ROTARY, NORMED, HEAD_DIM
        )  # fmt: skip
        at = query_out + token * query_out_stride + heads[:, None] * HEAD_DIM + d[None, :]
        tl.store(at, x.to(query_out.dtype.element_ty), mask=valid[:, None] & (d < HEAD_DIM)[None, :])
    else:
        heads = (part - query_parts) % key_parts * H + h
        valid = heads < KV_HEADS
        is_key = part < query_parts + key_parts
        if STORED:
            slot = tl.load(slots + token)
            if slot >= 0:
                block = slot // BLOCK_SIZE * block_stride
                offset = slot % BLOCK_SIZE
                if is_key:
                    where = column(d, KEY_KIND)
                    x = turned(
                        key, heads, valid, token, key_stride, cos, sin, k_norm, eps, where, ROTARY, NORMED, HEAD_DIM
                    )
                    x = x.to(key.dtype.element_ty).to(tl.float32)
                    slab = block + key_first + heads.to(tl.int64) * key_slab
                    store_rows(kv, slab, offset, x, valid, KEY_KIND, BLOCK_SIZE, HEAD_DIM, D)
                else:
                    where = column(d, VALUE_KIND)
                    x = turned(
                        value, heads, valid, token, value_stride, cos, sin, k_norm, eps, where, 0, False, HEAD_DIM
                    )
                    slab = block + value_first + heads.to(tl.int64) * value_slab
                    store_rows(kv, slab, offset, x, valid, VALUE_KIND, BLOCK_SIZE, HEAD_DIM, D)
        else:
            x = turned(key, heads, valid, token, key_stride, cos, sin, k_norm, eps, d, ROTARY, NORMED, HEAD_DIM)
            at = key_out + token * key_out_stride + heads[:, None] * HEAD_DIM + d[None, :]
            tl.store(at, x.to(key_out.dtype.element_ty), mask=valid[:, None] & (d < HEAD_DIM)[None, :])
