"""RMS norm with or without the residual sum, and the gated activation: one program per row (or per part of one)."""

from __future__ import annotations

import triton
import triton.language as tl

SILU = 0
GELU_TANH = 1
GELU = 2
RELU = 3

_SILU = tl.constexpr(SILU)
_GELU_TANH = tl.constexpr(GELU_TANH)
_GELU = tl.constexpr(GELU)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def norm_kernel(
    x,
    residual,
    total,
    out,
    weight,
    x_stride,
    residual_stride,
    eps,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    ADDED: tl.constexpr,
):
    """Row program_id(0): out = norm(x), or total = residual + x and out = norm(total). `total` may be `residual`.

    The sum is rounded to its type before it is squared, as it will be read again later.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    known = d < WIDTH
    numbers = tl.load(x + row * x_stride + d, mask=known, other=0.0).to(tl.float32)
    if ADDED:
        numbers += tl.load(residual + row * residual_stride + d, mask=known, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + row * residual_stride + d, rounded, mask=known)
        numbers = rounded.to(tl.float32)
    shrink = 1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 0) / WIDTH + eps)
    scaled = numbers * shrink * tl.load(weight + d, mask=known, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + d, scaled.to(out.dtype.element_ty), mask=known)


@triton.jit
def gate_kernel(gate_up, out, stride, INNER: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Program (part of the row, row): out [., INNER] = act(first half) * second half, computed in float32.

    The activation is rounded to the type of the numbers before the product, as two separate operations would.
    """
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = d < INNER
    first = gate_up + row * stride
    gate = tl.load(first + d, mask=known, other=0.0).to(tl.float32)
    up = tl.load(first + INNER + d, mask=known, other=0.0).to(tl.float32)
    if KIND == _SILU:
        active = gate / (1.0 + tl.exp2(tl.minimum(-gate * _LOG2E, 126.0)))
    elif KIND == _GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # (1 + tanh(y)) / 2 is the logistic function of 2 y
        active = gate / (1.0 + tl.exp2(tl.minimum(-2.0 * _LOG2E * inner, 126.0)))
    elif KIND == _GELU:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        active = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
    active = active.to(gate_up.dtype.element_ty).to(tl.float32)
    tl.store(out + row * INNER + d, (active * up).to(out.dtype.element_ty), mask=known)


@triton.jit
def copy_kernel(kv, pairs, block_words, WORDS: tl.constexpr):
    """Program (part, pair): copy a part of block pairs[pair, 0] over the same part of block pairs[pair, 1]."""
    pair = tl.program_id(1)
    source = tl.load(pairs + 2 * pair) * block_words
    destination = tl.load(pairs + 2 * pair + 1) * block_words
    w = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    words = tl.load(kv + source + w, mask=w < block_words)
    tl.store(kv + destination + w, words, mask=w < block_words)
