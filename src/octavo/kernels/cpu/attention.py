"""`NativeAttention`: the paged attention kernels of csrc/attention.h behind the `AttentionBackend` interface.

It checks types, shapes and strides; the compiled side checks lengths, slots and block ids. It holds no tokens.

Invariant, bit for bit on one instruction set: an output row depends only on its own query and on the keys and values
of its own sequence. Not on the other rows of the batch, the block size, which blocks a table names, the number of
threads, nor on whether the tokens came in one chunk or several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from octavo.core.kv_format import KVFormat, parse_kv_dtype
from octavo.errors import BoundsError, ConfigError
from octavo.kernels.cpu.loader import dtype_code, native
from octavo.kernels.cpu.ops import NativeOps
from octavo.kernels.quantized_kv import quantized_shape

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBatch, KVCache
    from octavo.models.spec import ModelSpec

MOST_QUANTIZED_DIM = 512  # kMostQuantizedDim of csrc/kernels.h
MOST_ROTARY_DIM = 1024  # kMostRotaryDim


def mismatch(cache: KVCache, spec: ModelSpec) -> str:
    """Why the kernels cannot serve this cache and model; empty when they can."""
    kv = cache.kv
    if kv.device.type != "cpu":
        return f"the KV cache is on {kv.device}; the native kernels run on a CPU"
    kv_format = parse_kv_dtype(cache.layout.kv_dtype)
    if kv_format is None:
        expected: tuple[int, ...] = (cache.layout.layers_per_group, 2, spec.num_kv_heads)
        expected += (cache.layout.block_size, spec.head_dim)
        if dtype_code(kv.dtype) is None:
            return f"KV dtype {kv.dtype} is not handled by the native kernels (float32, bfloat16, float16 are)"
        if spec.head_dim % 8:
            return f"head_dim={spec.head_dim} is not a multiple of 8, the kernels' vector width"
    else:
        expected = quantized_shape(kv_format, cache.layout, spec.num_kv_heads, spec.head_dim)
        if reason := _quantized_mismatch(cache, kv_format, spec.head_dim):
            return reason
    if tuple(kv.shape[1:]) != expected or not kv.is_contiguous():
        return f"kv of shape {tuple(kv.shape)} is not a contiguous [num_blocks, {', '.join(map(str, expected))}]"
    if spec.num_heads % spec.num_kv_heads:
        return f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}"
    return ""


def _quantized_mismatch(cache: KVCache, kv_format: KVFormat, head_dim: int) -> str:
    asked = f"kv_cache_dtype={cache.layout.kv_dtype}"
    if {kv_format.key.name, kv_format.value.name} - {"int8", "int4"}:
        return f"{asked} is not handled by the native kernels (auto, int8 and int4 are)"
    if cache.kv.dtype != torch.uint8:
        return f"{asked} keeps bytes, and the pool is of {cache.kv.dtype}"
    width = 32 if "int4" in (kv_format.key.name, kv_format.value.name) else 16
    if head_dim % width or head_dim > MOST_QUANTIZED_DIM:
        return f"{asked}: head_dim={head_dim} is not a multiple of {width} of at most {MOST_QUANTIZED_DIM}"
    return ""


class NativeAttention:
    """See the module. Raises ConfigError when `mismatch` has a reason.

    Slots, blocks and lengths outside the pool or the tables raise BoundsError. A block id is checked when it is read;
    an attend that meets a bad one raises and its output is not valid.
    """

    name = "native"

    def __init__(self, cache: KVCache, spec: ModelSpec) -> None:
        reason = mismatch(cache, spec)
        if reason:
            raise ConfigError(f"native attention cannot be used: {reason}")
        layout, kv = cache.layout, cache.kv
        windows = sorted({window or 0 for window in spec.windows})
        self._kv = kv  # keeps the memory alive
        self._layout = layout
        self._query_shape = (spec.num_heads, spec.head_dim)
        self._key_shape = (spec.num_kv_heads, spec.head_dim)
        # layer -> (group, place in the block, index of its window)
        self._places = [(*layout.place(i), windows.index(spec.windows[i] or 0)) for i in range(spec.num_layers)]
        kv_format = parse_kv_dtype(layout.kv_dtype)
        bits = (0, 0) if kv_format is None else (kv_format.key.bits, kv_format.value.bits)
        self._native = native().Attention(
            kv.data_ptr(),
            dtype_code(kv.dtype) or 0,
            kv.shape[0],
            layout.layers_per_group,
            spec.num_kv_heads,
            layout.block_size,
            spec.head_dim,
            spec.num_heads,
            spec.scale,
            spec.attention_softcap or 0.0,
            windows,
            *bits,
        )
        self._native.set_places(self._places)
        #: (layers, query heads, key heads, head_dim) of the model
        self.shape = (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._ops = NativeOps()
        self._tables: list[torch.Tensor] = []
        self._slots: list[torch.Tensor] = []
        self._tokens = 0

    def plan(self, batch: AttentionBatch) -> None:
        """Deal the step's work to threads. O(rows + prompt tokens); tables are not read."""
        start, context = _plain(batch.query_start, torch.int32), _plain(batch.context_len, torch.int32)
        if start.numel() != context.numel() + 1:
            raise BoundsError(f"query_start has {start.numel()} entries for {context.numel()} rows: one more is needed")
        self._tables = [_rows(table) for table in batch.block_tables]
        self._slots = [_plain(slots, torch.int64) for slots in batch.slots]
        rows = context.numel()
        if len(self._tables) != self._layout.num_groups or len(self._slots) != self._layout.num_groups:
            raise BoundsError(
                f"{len(self._tables)} block tables and {len(self._slots)} slot lists for {self._layout.num_groups} "
                f"KV groups: there must be one of each per group"
            )
        if any(table.shape[0] < rows for table in self._tables):
            raise BoundsError(f"a block table has fewer rows than the batch's {rows}")
        wanted = None if batch.wanted is None else _plain(batch.wanted, torch.int32)
        if wanted is not None and wanted.numel() != rows:
            raise BoundsError(f"wanted tokens of {wanted.numel()} rows for {rows}")
        capacity = min(table.shape[1] for table in self._tables) * self._layout.block_size
        try:
            self._native.plan(
                start.data_ptr(), context.data_ptr(), rows, capacity, 0 if wanted is None else wanted.data_ptr()
            )
        except ValueError as error:
            raise BoundsError(str(error)) from None
        self._tokens = self._native.tokens
        groups = []
        for table, slots in zip(self._tables, self._slots, strict=True):
            if slots.numel() != self._tokens:
                raise BoundsError(f"{slots.numel()} slots for a step of {self._tokens} tokens")
            groups.append((table.data_ptr(), table.stride(0), slots.data_ptr()))
        self._native.set_groups(groups)

    @property
    def native(self) -> Any:
        """The compiled pool with the planned step, for a stack of layers."""
        return self._native

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, Hkv, d] (any token stride) in the slots of the layer's group, in the cache's format."""
        group, place, _ = self._places[layer]
        key, value = self._tokenwise(key, self._key_shape, "key"), self._tokenwise(value, self._key_shape, "value")
        if value.dtype != key.dtype:
            value = value.to(key.dtype)
        try:
            self._native.write(
                place,
                self._slots[group].data_ptr(),
                self._tokens,
                key.data_ptr(),
                key.stride(0),
                value.data_ptr(),
                value.stride(0),
                dtype_code(key.dtype),
            )
        except IndexError as error:
            raise BoundsError(f"layer {layer}: {error}") from None

    def rotate_and_write(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """`NativeOps.rotary` and `write` in one pass over the tokens, with their bits; returns the turned query.

        query [T, Hq, d], key and value [T, Hkv, d], any token stride; cos, sin float32 [T, d], less wide where only
        the first numbers of a head turn, which goes the long way.
        """
        dim = self._query_shape[1]
        if cos.shape[-1] != dim or dim > MOST_ROTARY_DIM or not query.dtype == key.dtype == value.dtype:
            query, key = self._ops.rotary(query, key, cos, sin, q_norm, k_norm, eps)
            self.write(layer, key, value)
            return query
        group, place, _ = self._places[layer]
        query = self._tokenwise(query, self._query_shape, "query")
        key, value = self._tokenwise(key, self._key_shape, "key"), self._tokenwise(value, self._key_shape, "value")
        rows = [cos, sin] if q_norm is None or k_norm is None else [cos, sin, q_norm, k_norm]
        rows = [x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous() for x in rows]
        expected = [(self._tokens, dim), (self._tokens, dim), (dim,), (dim,)]
        for x, shape in zip(rows, expected, strict=False):
            if x.shape != shape:
                raise BoundsError(f"cos, sin or a norm of shape {tuple(x.shape)}: the planned step needs {shape}")
        out = torch.empty(query.shape, dtype=query.dtype)
        try:
            self._native.rotary_write(
                place,
                self._slots[group].data_ptr(),
                self._tokens,
                query.data_ptr(),
                query.stride(0),
                key.data_ptr(),
                key.stride(0),
                value.data_ptr(),
                value.stride(0),
                out.data_ptr(),
                rows[0].data_ptr(),
                rows[1].data_ptr(),
                *((0, 0) if len(rows) == 2 else (rows[2].data_ptr(), rows[3].data_ptr())),
                eps,
                dtype_code(query.dtype),
            )
        except IndexError as error:
            raise BoundsError(f"layer {layer}: {error}") from None
        return out

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, d] (any token stride) -> contiguous [T, Hq, d] of the same dtype; arithmetic in float32."""
        group, place, window = self._places[layer]
        query = self._tokenwise(query, self._query_shape, "query")
        out = torch.empty(query.shape, dtype=query.dtype)
        table = self._tables[group]
        try:
            self._native.attend(
                place,
                window,
                table.data_ptr(),
                table.stride(0),
                query.data_ptr(),
                query.stride(0),
                out.data_ptr(),
                dtype_code(query.dtype),
            )
        except IndexError as error:
            raise BoundsError(f"layer {layer}: {error}") from None
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in order, all layers of the block in one move."""
        try:
            self._native.copy_blocks([block for pair in pairs for block in pair])
        except IndexError as error:
            raise BoundsError(str(error)) from None

    def num_splits(self, layer: int) -> int:
        """How many (row, key head, query tile) of the planned step are split over threads in this layer."""
        return int(self._native.split_items(self._places[layer][2]))

    def _tokenwise(self, x: torch.Tensor, shape: tuple[int, int], what: str) -> torch.Tensor:
        """`x` [T, H, d] with each token's [H, d] contiguous; copied only if it is not."""
        if x.shape != (self._tokens, *shape):
            raise BoundsError(f"{what} of shape {tuple(x.shape)}: the planned step needs {(self._tokens, *shape)}")
        if dtype_code(x.dtype) is None or x.device.type != "cpu":
            raise ConfigError(f"{what} is {x.dtype} on {x.device}; needed: float32, bfloat16 or float16 on the CPU")
        if x.stride(2) != 1 or (x.stride(1) != shape[1] and shape[0] > 1):
            return x.contiguous()
        return x


def _plain(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype and x.is_contiguous() else x.to(dtype).contiguous()


def _rows(table: torch.Tensor) -> torch.Tensor:
    """An int32 table whose rows are contiguous; a view with a row stride is fine."""
    table = table if table.dtype == torch.int32 else table.to(torch.int32)
    return table if table.stride(-1) == 1 or table.shape[-1] == 1 else table.contiguous()
