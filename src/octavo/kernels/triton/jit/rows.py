"""How a row of the KV cache is read and written inside a Triton kernel: floats, int8, fp8 and int4.

A row is the key or the value of one token in one head, as `core/kv_format.py` lays it out; `kernels/quantized_kv.py` is
the definition of the bytes and these functions produce the same ones. All of them run inside other kernels.

int8 and fp8 numbers stay unscaled in registers: both are exact in 16 bits, so a row's scale multiplies a column of
scores (keys) or of weights (values) instead of `head_dim` numbers. int4 rows are unpacked in the order in which their
nibbles lie; `column` says which number of the row stands where, and the queries (or the output) follow that order,
which spares a shuffle of the registers per tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLOAT = 0
INT8 = 1
FP8 = 2
INT4 = 3
KINDS = {"int8": INT8, "fp8": FP8, "int4": INT4}

_FLOAT = tl.constexpr(FLOAT)
_INT8 = tl.constexpr(INT8)
_FP8 = tl.constexpr(FP8)
_INT4 = tl.constexpr(INT4)
_SMALLEST = tl.constexpr(2.0**-120)  # scales below it are zero
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a small float32 to even


@triton.jit
def column(d, KIND: tl.constexpr):
    """Which number of a row the place `d` of a tile holds."""
    where = d
    if KIND == _INT4:
        inside = d % 32
        where = d - inside + ((inside >> 1) & 1) * 16 + (inside & 1) * 8 + (inside >> 2)
    return where


@triton.jit
def data_width(KIND: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Elements of a row's numbers in the pool."""
    return HEAD_DIM // 2 if KIND == _INT4 else HEAD_DIM


@triton.jit
def load_rows(
    kv, slab, offset, valid, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr
):
    """Rows `offset` [N] int32 of slabs that start at element `slab` [N] int64: the numbers [N, D], in the pool's float
    type, or unscaled in float16 (int8, fp8) or float32 (int4). Zeros where `valid` [N] is False and past `HEAD_DIM`."""
    d = tl.arange(0, D)
    at = slab[:, None] + offset[:, None] * HEAD_DIM + d[None, :]
    known = valid[:, None] & (d < HEAD_DIM)[None, :]
    # One return: branches on constants are pruned, code after a return is not.
    if KIND == _INT4:
        half = tl.arange(0, D // 2)
        at = slab[:, None] + offset[:, None] * (HEAD_DIM // 2) + half[None, :]
        packed = tl.load(kv + at, mask=valid[:, None] & (half < HEAD_DIM // 2)[None, :], other=0).to(tl.int32)
        codes = tl.join(((packed & 15) ^ 8) - 8, ((packed >> 4) ^ 8) - 8).reshape(packed.shape[0], D)
        group = tl.arange(0, D // 32)
        first = slab[:, None] + BLOCK_SIZE * (HEAD_DIM // 2 + 2) + offset[:, None] * (HEAD_DIM // 32)
        in_row = valid[:, None] & (group < HEAD_DIM // 32)[None, :]
        multiplier = tl.load(kv + first + group[None, :], mask=in_row, other=0).to(tl.int8, bitcast=True).to(tl.float32)
        spread = tl.broadcast_to(multiplier[:, :, None], (packed.shape[0], D // 32, 32)).reshape(packed.shape[0], D)
        numbers = codes.to(tl.float32) * spread
    elif KIND == _INT8:
        numbers = tl.load(kv + at, mask=known, other=0).to(tl.int8, bitcast=True).to(tl.float16)
    elif KIND == _FP8:
        # e4m3's bits, moved into float16's fields, are the number divided by 256; `load_scales` makes up for it.
        bits = tl.load(kv + at, mask=known, other=0).to(tl.int16)
        numbers = (((bits & 0x7F) << 7) | ((bits & 0x80) << 8)).to(tl.float16, bitcast=True)
    else:
        numbers = tl.load(kv + at, mask=known, other=0.0)
    return numbers


@triton.jit
def load_scales(kv, slab, offset, valid, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """float32 [N]: what the numbers of `load_rows` are multiples of; only for quantised rows."""
    at = slab + BLOCK_SIZE * data_width(KIND, HEAD_DIM) + 2 * offset
    low = tl.load(kv + at, mask=valid, other=0).to(tl.int32)
    high = tl.load(kv + at + 1, mask=valid, other=0).to(tl.int32)
    scale = ((high << 24) | (low << 16)).to(tl.float32, bitcast=True)
    return scale * 256.0 if KIND == _FP8 else scale


@triton.jit
def store_rows(
    kv,
    slab,
    offset,
    x,
    valid,
    KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D: tl.constexpr,
):
    """Store x float32 [N, D], in the order of `column` and zeros past `HEAD_DIM`, as row `offset` (one number for all)
    of slabs `slab` [N] int64."""
    d = tl.arange(0, D)
    known = valid[:, None] & (d < HEAD_DIM)[None, :]
    if KIND == _INT4:
        store_int4(kv, slab, offset, x, valid, BLOCK_SIZE, HEAD_DIM, D)
    elif KIND != _FLOAT:
        largest = 448.0 if KIND == _FP8 else 127.0
        scale, bad = round_scale(tl.div_rn(tl.max(tl.abs(x), 1), tl.full([x.shape[0]], largest, tl.float32)), x)
        scaled = tl.where(bad[:, None], 0.0, x * inverse(scale)[:, None])
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        if KIND == _FP8:
            codes = to_e4m3(scaled)
        else:
            codes = round_even(scaled).to(tl.int32)
        tl.store(kv + slab[:, None] + offset * HEAD_DIM + d[None, :], (codes & 255).to(tl.uint8), mask=known)
        store_scales(kv, slab + BLOCK_SIZE * HEAD_DIM + 2 * offset, scale, valid)
    else:
        tl.store(kv + slab[:, None] + offset * HEAD_DIM + d[None, :], x.to(kv.dtype.element_ty), mask=known)


@triton.jit
def store_int4(kv, slab, offset, x, valid, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, D: tl.constexpr):
    """As `store_rows`. The largest number of a group of 32, sign included, becomes -8."""
    N: tl.constexpr = x.shape[0]
    groups = x.reshape(N, D // 32, 32)
    low, high = tl.min(groups, 2), tl.max(groups, 2)
    extreme = tl.where(-low > high, low, high) * -0.125
    ideal = tl.div_rn(tl.max(tl.abs(extreme), 1), tl.full([N], 127.0, tl.float32))
    scale, bad = round_scale(ideal, x)
    wanted = round_even(tl.minimum(tl.maximum(extreme * inverse(scale)[:, None], -256.0), 256.0))
    least = tl.where(extreme < 0, -1.0, tl.where(extreme > 0, 1.0, 0.0))
    multiplier = tl.minimum(tl.maximum(tl.where(wanted == 0, least, wanted), -127.0), 127.0)
    multiplier = tl.where(bad[:, None] | (scale == 0)[:, None], 0.0, multiplier)
    step = inverse(multiplier * scale[:, None])
    numbers = tl.where(bad[:, None, None], 0.0, groups * step[:, :, None]).reshape(N, D)
    codes = round_even(tl.minimum(tl.maximum(numbers, -8.0), 7.0)).to(tl.int32) & 15
    first, second = tl.split(codes.reshape(N, D // 2, 2))
    half = tl.arange(0, D // 2)
    at = slab[:, None] + offset * (HEAD_DIM // 2) + half[None, :]
    tl.store(kv + at, (first | (second << 4)).to(tl.uint8), mask=valid[:, None] & (half < HEAD_DIM // 2)[None, :])
    store_scales(kv, slab + BLOCK_SIZE * (HEAD_DIM // 2) + 2 * offset, scale, valid)
    group = tl.arange(0, D // 32)
    at = slab[:, None] + BLOCK_SIZE * (HEAD_DIM // 2 + 2) + offset * (HEAD_DIM // 32) + group[None, :]
    bits = (multiplier.to(tl.int32) & 255).to(tl.uint8)
    tl.store(kv + at, bits, mask=valid[:, None] & (group < HEAD_DIM // 32)[None, :])


@triton.jit
def store_scales(kv, at, scale, valid):
    """bfloat16 bits of float32 [N] that are exact in bfloat16, low byte first."""
    bits = scale.to(tl.int32, bitcast=True)
    tl.store(kv + at, ((bits >> 16) & 255).to(tl.uint8), mask=valid)
    tl.store(kv + at + 1, ((bits >> 24) & 255).to(tl.uint8), mask=valid)


@triton.jit
def round_scale(ideal, x):
    """float32 [N] >= 0 -> (scale as stored: rounded up to bfloat16, NaN where a number of x [N, D] is not finite; where
    that is)."""
    # A maximum may drop a NaN, so the numbers themselves are asked.
    bad = tl.max((~(tl.abs(x) < float("inf"))).to(tl.int32), 1) > 0
    bits = ideal.to(tl.int32, bitcast=True)
    up = ((bits + 0xFFFF) & -65536).to(tl.float32, bitcast=True)
    up = tl.where(ideal < _SMALLEST, 0.0, up)
    return tl.where(bad, float("nan"), up), bad


@triton.jit
def inverse(scale):
    """1 / scale, 0 for 0."""
    one = tl.full(scale.shape, 1.0, tl.float32)
    return tl.where(scale == 0.0, 0.0, tl.div_rn(one, tl.where(scale == 0.0, 1.0, scale)))


@triton.jit
def round_even(x):
    """Nearest integer of |x| < 2**22, halves to even."""
    return (x + _MAGIC) - _MAGIC


@triton.jit
def to_e4m3(x):
    """float32 of magnitude at most 448 -> int32 with the bits of its e4m3, rounded to nearest even."""
    magnitude = tl.abs(x)
    bits = magnitude.to(tl.int32, bitcast=True)
    # Normal numbers: drop 20 bits of the fraction with a carry into the exponent, then change the bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = round_even(magnitude * 512.0).to(tl.int32)  # multiples of 2**-9 below 2**-6
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128  # also of zeros
    return tl.where(magnitude < 0.015625, small, normal) | sign
