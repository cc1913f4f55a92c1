"""Launches of jit/write.py: rotation with or without the write into the pool, and the write alone.

It checks nothing but what a launch needs; shapes were checked by `TritonAttention` and `TritonOps`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.kernels.triton.jit.rows import FLOAT
from octavo.kernels.triton.jit.write import write_kernel
from octavo.kernels.triton.tuning import next_power_of_two

TILE_NUMBERS = 1024  # numbers per program: a few heads of one token
LEAST_WIDTH = 32  # a tile of int4 rows holds whole groups


@dataclass(frozen=True, slots=True)
class Pool:
    """Where one layer writes. first, slab: elements from a block's start to head 0's rows, and from head to head."""

    kv: torch.Tensor
    slots: torch.Tensor  # int64 [T]
    key_first: int
    key_slab: int
    value_first: int
    value_slab: int
    key_kind: int
    value_kind: int
    block_size: int


def rotate(
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, Hq, d], key [T, Hkv, d] -> the same, normed and rotated, contiguous."""
    query_out, key_out = _like(query), _like(key)
    _launch(query, key, key, query_out, key_out, cos, sin, q_norm, k_norm, eps, None)
    return query_out, key_out


def rotate_and_store(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pool: Pool,
) -> torch.Tensor:
    """As `rotate`; the keys, and value [T, Hkv, d] as it is, go into the pool."""
    query_out = _like(query)
    _launch(query, key, value, query_out, key, cos, sin, q_norm, k_norm, eps, pool)
    return query_out


def store(key: torch.Tensor, value: torch.Tensor, pool: Pool) -> None:
    """key, value [T, Hkv, d] into the pool."""
    _launch(None, key, value, key, key, None, None, None, None, 0.0, pool)


def _launch(
    query: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    query_out: torch.Tensor,
    key_out: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pool: Pool | None,
) -> None:
    tokens, kv_heads, head_dim = key.shape
    if not tokens:
        return
    normed = q_norm is not None and k_norm is not None
    heads = 0 if query is None else query.shape[1]
    width = max(LEAST_WIDTH, next_power_of_two(head_dim))
    per_program = max(1, min(TILE_NUMBERS // width, next_power_of_two(max(heads, kv_heads))))
    key_parts = -(-kv_heads // per_program)
    parts = -(-heads // per_program) + key_parts * (1 if pool is None else 2)
    # Arguments that a variant does not use still need a pointer.
    unused = key
    write_kernel[(parts, tokens)](
        unused if query is None else query, key, value, query_out, key_out, unused if cos is None else cos.contiguous(),
        unused if sin is None else sin.contiguous(), unused if q_norm is None else q_norm,
        unused if k_norm is None else k_norm,
        unused if pool is None else pool.slots, unused if pool is None else pool.kv,
        0 if query is None else query.stride(0), key.stride(0), value.stride(0), query_out.stride(0), key_out.stride(0),
        0 if pool is None else pool.kv.stride(0), 0 if pool is None else pool.key_first,
        0 if pool is None else pool.key_slab, 0 if pool is None else pool.value_first,
        0 if pool is None else pool.value_slab, eps,
        HEADS=heads, KV_HEADS=kv_heads, ROTARY=0 if cos is None else cos.shape[-1], NORMED=normed,
        STORED=pool is not None, KEY_KIND=FLOAT if pool is None else pool.key_kind,
        VALUE_KIND=FLOAT if pool is None else pool.value_kind, BLOCK_SIZE=1 if pool is None else pool.block_size,
        HEAD_DIM=head_dim, D=width, H=per_program, num_warps=4 if per_program > 1 else 1,
        enable_fp_fusion=False,  # the bytes of quantised rows follow from single roundings
    )  # fmt: skip


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
