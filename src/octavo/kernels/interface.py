"""What an attention backend is: `plan` once per step, then `write` and `attend` per layer.

The KV pool is one tensor, cut into blocks:

    kv : [num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim]
         (2: key, value.) A block is contiguous, so copying, swapping or saving a block is one move.
         Quantised: uint8 [num_blocks, layers_per_group, bytes of a layer], laid out as in `core/kv_format.py`.

A batch is ragged: B rows (one per scheduled sequence), T tokens in all. A row with one token is a decode row, any other
a prompt chunk or a verification row; all of them attend causally to what the row's table already holds and to
themselves. Backends must give a row the same bits whatever the other rows contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from octavo.core.kv_layout import KVLayout
    from octavo.models.spec import ModelSpec

BACKENDS = ("auto", "reference", "native", "triton", "ascend")


@dataclass(frozen=True, slots=True)
class KVCache:
    """The pool's tensor and what is needed to read it.

    kv: [num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim], any float dtype; or, if
    `layout.kv_dtype` is not "auto", uint8 [num_blocks, layers_per_group, bytes of a layer].
    """

    kv: torch.Tensor
    layout: KVLayout


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where each token of a step reads and writes. All tensors live on the KV device.

    query_start : int32 [B + 1]  row b owns tokens query_start[b] : query_start[b + 1]
    context_len : int32 [B]      tokens in the table after this step, the new ones included
    block_tables: per group int32 [B, max_blocks]; entries past a row's length, or behind its window, are never read
    slots       : per group int64 [T]  block_id * block_size + offset where token t's key and value go
    max_query, max_context: the largest row, as plain ints
    wanted      : int32 [B]      of how many of a row's last tokens the model's hidden state is read; None: of all.
                                 The decoder may leave out what only the others' would need; theirs hold nothing then.
    """

    query_start: torch.Tensor
    context_len: torch.Tensor
    block_tables: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    max_query: int
    max_context: int
    wanted: torch.Tensor | None = None


class AttentionBackend(Protocol):
    """Exact attention over blocks. Built as `Backend(cache, spec)`.

    A backend may also have `rotate_and_write(layer, query, key, value, cos, sin, q_norm, k_norm, eps)`: `Ops.rotary`
    and `write` in one, returning the query for `attend`; the decoder then calls that.
    """

    name: str

    def plan(self, batch: AttentionBatch) -> None:
        """Do once what depends on the tables only; the following calls refer to this batch."""
        ...

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, num_kv_heads, head_dim] in the slots of the layer's group."""
        ...

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> output of the same shape and dtype. The step's keys were written before."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination), in order, all layers of the block at once."""
        ...


def make_backend(name: str, cache: KVCache, spec: ModelSpec) -> AttentionBackend:
    """`name`: one of `BACKENDS`: "native" is C++ on a CPU, "triton" for GPUs, "ascend" torch_npu's operators on an NPU.

    "auto" is the fastest that is built and fits. Raises `ConfigError` where the named one cannot be used.
    """
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend={name!r}: must be one of {', '.join(BACKENDS)}")
    if name in ("auto", "native"):
        from octavo.kernels import cpu

        if cpu.supports(cache, spec):
            return cpu.NativeAttention(cache, spec)
        if name == "native":
            raise ConfigError(f"attention_backend='native' cannot be used: {cpu.why_unavailable(cache, spec)}")
    if name == "triton" or (name == "auto" and cache.kv.device.type == "cuda"):
        from octavo.kernels import triton

        if not (reason := triton.why_unavailable(cache, spec)):
            return triton.TritonAttention(cache, spec)
        if name == "triton":
            raise ConfigError(f"attention_backend='triton' cannot be used: {reason}")
    if name == "ascend" or (name == "auto" and cache.kv.device.type == "npu"):
        from octavo.kernels import ascend

        if not (reason := ascend.why_unavailable(cache, spec)):
            return ascend.AscendAttention(cache, spec)
        if name == "ascend":
            raise ConfigError(f"attention_backend='ascend' cannot be used: {reason}")
    from octavo.kernels.reference import ReferenceAttention

    return ReferenceAttention(cache, spec)
