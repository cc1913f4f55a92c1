"""`TritonAttention`: the kernels of attend.py, write.py and blocks.py behind the `AttentionBackend` interface.

It picks sizes, checks shapes and launches; it reads no tensor back, so nothing here waits for the device, and what it
launches depends on shapes alone: `plan`, `write` and `attend` may be recorded in a graph and replayed after the
contents of the same tensors changed. For that, a batch may hold more rows than there are sequences; rows without
queries are skipped, and so are tokens whose slots are negative.

It holds no tokens and does not check tables or slots: whoever builds the batch does (`runner/batch.py`), because a look
at them would cost a synchronisation per step.

Invariant: in float32, or with `splits` given, an output row depends only on its own query, its own context and its own
sequence's keys and values. In 16 bits the number of programs that share a row's keys follows the number of rows in the
batch, which moves roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from octavo.core.kv_format import KVFormat, parse_kv_dtype
from octavo.errors import BoundsError, ConfigError
from octavo.kernels.quantized_kv import quantized_shape
from octavo.kernels.triton import blocks, why_unavailable
from octavo.kernels.triton.jit import attend, rows
from octavo.kernels.triton.runtime import capability, interpreting, processors
from octavo.kernels.triton.tuning import ROWS_AT_LEAST, Tiles, next_power_of_two, pick_tiles
from octavo.kernels.triton.write import Pool, rotate_and_store, store

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBatch, KVCache
    from octavo.models.spec import ModelSpec

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOST_HEAD_DIM = 256
SPLIT_ROWS = 64  # a verification row whose queries and packed heads need no larger tile is split over its keys
MOST_SPLITS = 64
PART_LENGTH = 1024  # keys of a part in float32, whatever the batch


def mismatch(cache: KVCache, spec: ModelSpec) -> str:
    """Why the kernels cannot serve this cache and model; empty when they can. Not asked: whether they run at all."""
    layout, kv = cache.layout, cache.kv
    if spec.head_dim > MOST_HEAD_DIM or spec.head_dim % 8:
        return f"head_dim={spec.head_dim} is not a multiple of 8 of at most {MOST_HEAD_DIM}"
    if spec.num_heads % spec.num_kv_heads:
        return f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}"
    kv_format = parse_kv_dtype(layout.kv_dtype)
    if kv_format is None:
        expected: tuple[int, ...] = (layout.layers_per_group, 2, spec.num_kv_heads, layout.block_size, spec.head_dim)
        if kv.dtype not in FLOATS:
            return f"KV dtype {kv.dtype} is none of float32, bfloat16, float16"
    else:
        expected = quantized_shape(kv_format, layout, spec.num_kv_heads, spec.head_dim)
        if kv.dtype != torch.uint8:
            return f"kv_cache_dtype={layout.kv_dtype} keeps bytes, and the pool is of {kv.dtype}"
        if "int4" in (kv_format.key.name, kv_format.value.name) and spec.head_dim % 32:
            return f"kv_cache_dtype={layout.kv_dtype}: head_dim={spec.head_dim} is not a multiple of 32"
    if tuple(kv.shape[1:]) != expected or not kv.is_contiguous():
        return f"kv of shape {tuple(kv.shape)} is not a contiguous [num_blocks, {', '.join(map(str, expected))}]"
    return ""


class TritonAttention:
    """See the module. Raises ConfigError where `why_unavailable` has a reason.

    tiles: instead of the table's choice. splits: programs that share the keys of a decode row, instead of a choice per
    step.
    """

    name = "triton"

    def __init__(
        self, cache: KVCache, spec: ModelSpec, *, tiles: Tiles | None = None, splits: int | None = None
    ) -> None:
        if reason := why_unavailable(cache, spec):
            raise ConfigError(f"attention_backend='triton' cannot be used: {reason}")
        layout, kv = cache.layout, cache.kv
        self._kv = kv
        self._spec = spec
        self._groups = layout.num_groups
        self._places = [layout.place(layer) for layer in range(spec.num_layers)]
        self._group_size = spec.num_heads // spec.num_kv_heads
        kv_format = parse_kv_dtype(layout.kv_dtype)
        self._layer_stride = kv.stride(1)
        self._starts = _starts(kv_format, cache, spec)
        self._kinds = (
            (rows.FLOAT, rows.FLOAT)
            if kv_format is None
            else (rows.KINDS[kv_format.key.name], rows.KINDS[kv_format.value.name])
        )
        self._block_size = layout.block_size
        self._width = max(ROWS_AT_LEAST, next_power_of_two(spec.head_dim))
        if rows.INT4 in self._kinds:
            self._width = max(32, self._width)
        self._asked_tiles, self._asked_splits = tiles, splits
        self._tiles: dict[int, Tiles] = {}
        self._copier = blocks.BlockCopier(kv)
        self._batch: AttentionBatch | None = None
        self._tokens = 0

    # -- once per step ---------------------------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        """Keep the batch's tensors; nothing is read or launched. Checks shapes: BoundsError."""
        count = batch.context_len.numel()
        if batch.query_start.numel() != count + 1:
            raise BoundsError(
                f"query_start has {batch.query_start.numel()} entries for {count} rows: one more is needed"
            )
        if len(batch.block_tables) != self._groups or len(batch.slots) != self._groups:
            raise BoundsError(
                f"{len(batch.block_tables)} block tables and {len(batch.slots)} slot lists for {self._groups} KV "
                "groups: there must be one of each per group"
            )
        tokens = batch.slots[0].numel()
        for group, (table, slots) in enumerate(zip(batch.block_tables, batch.slots, strict=True)):
            if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] < count or table.stride(1) != 1:
                raise BoundsError(
                    f"group {group}: the block table is {table.dtype} {tuple(table.shape)}; int32 with {count} "
                    "contiguous rows is needed"
                )
            if slots.numel() != tokens or slots.dtype != torch.int64:
                raise BoundsError(f"group {group}: {slots.numel()} slots of {slots.dtype}; int64 [{tokens}] is needed")
            if table.shape[1] * self._block_size < batch.max_context:
                raise BoundsError(
                    f"group {group}: a context of {batch.max_context} tokens does not fit a table of {table.shape[1]} "
                    f"blocks of {self._block_size}"
                )
        self._batch, self._tokens = batch, tokens

    # -- per layer -------------------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, Hkv, d] (any token stride) in the slots of the layer's group; negative: nowhere."""
        key, value = (
            self._tokenwise(key, self._spec.num_kv_heads, "key"),
            self._tokenwise(value, self._spec.num_kv_heads, "value"),
        )
        store(key, value, self._pool(layer))

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
        """`Ops.rotary` of query and key and `write`, in one launch; returns the query [T, Hq, d] for `attend`.

        cos, sin [T, r]: the first r of d numbers are turned, the rest pass.
        """
        spec = self._spec
        query = self._tokenwise(query, spec.num_heads, "query")
        key = self._tokenwise(key, spec.num_kv_heads, "key")
        value = self._tokenwise(value, spec.num_kv_heads, "value")
        return rotate_and_store(query, key, value, cos, sin, q_norm, k_norm, eps, self._pool(layer))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, d] (any token stride) -> contiguous [T, Hq, d] of the same dtype; sums in float32."""
        assert self._batch is not None, "plan comes first"
        query = self._tokenwise(query, self._spec.num_heads, "query")
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        count = self._batch.context_len.numel()
        if not self._tokens or not count:
            return out
        limit = self._split_queries()
        common = self._common(layer, query, out)
        self._split(layer, query, out, common, limit)
        if self._batch.max_query > limit:
            self._tile(query, out, common, limit, count)
        return out

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in order, all layers at once; one launch unless pairs chain."""
        self._copier.copy(pairs)

    # -- launches --------------------------------------------------------------------------------------------------

    def _split_queries(self) -> int:
        """Rows with at most this many queries go to the split kernel: all rows of the step if they fit, else single
        ones. A power of two, so that few variants are compiled."""
        assert self._batch is not None
        most = next_power_of_two(self._batch.max_query)
        return most if most * self._group_size <= SPLIT_ROWS else 1

    def num_splits(self, batch_rows: int, max_context: int, operand_bytes: int) -> int:
        """Programs that share the keys of one row. Never a synchronisation: shapes and host numbers alone."""
        if self._asked_splits is not None:
            return self._asked_splits
        if operand_bytes == 4:
            return -(-max_context // PART_LENGTH)
        tiles = self._tiles_for(operand_bytes)
        wanted = -(-tiles.programs // (batch_rows * self._spec.num_kv_heads))
        useful = -(-max_context // tiles.split.keys)
        return max(1, min(next_power_of_two(wanted), next_power_of_two(useful), MOST_SPLITS))

    def _split(self, layer: int, query: torch.Tensor, out: torch.Tensor, common: dict[str, Any], limit: int) -> None:
        batch, spec = self._batch, self._spec
        assert batch is not None
        count = batch.context_len.numel()
        tile = self._tiles_for(common["operand_bytes"]).split
        window = spec.windows[layer]
        span = batch.max_context if window is None else min(batch.max_context, window + limit - 1)
        splits = self.num_splits(count, span, common["operand_bytes"])
        part_length = PART_LENGTH if self._asked_splits is None and common["operand_bytes"] == 4 else 0
        parts = marks = out  # not used by one split
        if splits > 1:
            shape = (self._tokens, spec.num_heads, splits)
            parts = torch.empty((*shape, spec.head_dim), dtype=torch.float32, device=out.device)
            marks = torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
        m = max(ROWS_AT_LEAST, next_power_of_two(limit * self._group_size))
        attend.split_kernel[(splits, spec.num_kv_heads, count)](
            query, out, parts, marks, batch.query_start, batch.context_len, *common["pool"],
            splits, part_length, KV_HEADS=spec.num_kv_heads, GROUP=self._group_size, QUERIES=limit, M=m,
            BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
            **common["constants"],
        )  # fmt: skip
        if splits > 1:
            attend.merge_kernel[(spec.num_heads, limit, count)](
                out, parts, marks, batch.query_start, batch.context_len, out.stride(0), window or 0,
                splits, part_length, HEADS=spec.num_heads, QUERIES=limit, S=next_power_of_two(splits),
                WINDOWED=window is not None, HEAD_DIM=spec.head_dim, D=self._width, BLOCK_N=tile.keys,
                num_warps=2 if splits <= 16 else 8, enable_fp_fusion=True,
            )  # fmt: skip

    def _tile(self, query: torch.Tensor, out: torch.Tensor, common: dict[str, Any], skip: int, count: int) -> None:
        batch, spec = self._batch, self._spec
        assert batch is not None
        tile = self._tiles_for(common["operand_bytes"]).tile
        m = max(tile.rows, ROWS_AT_LEAST, next_power_of_two(self._group_size))
        # Every row's last tile may be partly empty: row r's tiles begin at query_start[r] // queries + r.
        tiles = self._tokens // (m // self._group_size) + count
        attend.tile_kernel[(spec.num_kv_heads, tiles)](
            query, out, batch.query_start, batch.context_len, *common["pool"][:2], count, *common["pool"][2:],
            GROUP=self._group_size, SKIP=skip, M=m, BLOCK_N=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
            enable_fp_fusion=True, **common["constants"],
        )  # fmt: skip

    def _common(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        """What both kernels take: where the pool lies, and what is fixed when they are compiled."""
        spec, batch = self._spec, self._batch
        assert batch is not None
        group, place = self._places[layer]
        table, window, cap = batch.block_tables[group], spec.windows[layer], spec.attention_softcap
        dot = self._dot(query.dtype)
        (key_first, key_slab), (value_first, value_slab) = self._starts
        base = place * self._layer_stride
        pool = (
            table, self._kv, query.stride(0), out.stride(0), table.stride(0), self._kv.stride(0), base + key_first,
            key_slab, base + value_first, value_slab, spec.scale * (attend.LOG2E if cap is None else 1.0), cap or 1.0,
            window or 0,
        )  # fmt: skip
        # Weights times a row's scale may leave float16's range; bfloat16 has float32's.
        narrow = dot == torch.float16 and self._kinds[1] != rows.FLOAT
        wide = torch.float32 if interpreting() else torch.bfloat16
        constants = {
            "KEY_KIND": self._kinds[0], "VALUE_KIND": self._kinds[1], "WINDOWED": window is not None,
            "CAPPED": cap is not None, "BLOCK_SIZE": self._block_size, "HEAD_DIM": spec.head_dim, "D": self._width,
            "DOT": FLOATS[dot], "VALUE_DOT": FLOATS[wide] if narrow else FLOATS[dot],
            "PRECISION": "ieee" if dot == torch.float32 else "tf32",
        }  # fmt: skip
        return {"pool": pool, "constants": constants, "operand_bytes": dot.itemsize}

    def _dot(self, query: torch.dtype) -> torch.dtype:
        """What products are made in: the query's type where the pool's fits it, float32 where they differ.

        The interpreter keeps bfloat16 as bits in integers and would multiply those.
        """
        fits = self._kv.dtype in (query, torch.uint8) and not (query == torch.bfloat16 and interpreting())
        return query if fits else torch.float32

    def _tiles_for(self, operand_bytes: int) -> Tiles:
        if self._asked_tiles is not None:
            return self._asked_tiles
        if operand_bytes not in self._tiles:
            self._tiles[operand_bytes] = pick_tiles(self._spec.head_dim, operand_bytes, capability(), processors())
        return self._tiles[operand_bytes]

    def _pool(self, layer: int) -> Pool:
        """Where `layer` writes in this step."""
        assert self._batch is not None, "plan comes first"
        group, place = self._places[layer]
        base = place * self._layer_stride
        (key_first, key_slab), (value_first, value_slab) = self._starts
        return Pool(
            self._kv, self._batch.slots[group], base + key_first, key_slab, base + value_first, value_slab,
            *self._kinds, self._block_size,
        )  # fmt: skip

    def _tokenwise(self, x: torch.Tensor, heads: int, what: str) -> torch.Tensor:
        """`x` [T, H, d] with each token's [H, d] contiguous; copied only if it is not."""
        if x.shape != (self._tokens, heads, self._spec.head_dim):
            raise BoundsError(
                f"{what} of shape {tuple(x.shape)}: the planned step needs {(self._tokens, heads, self._spec.head_dim)}"
            )
        if x.dtype not in FLOATS:
            raise ConfigError(f"{what} is {x.dtype}; needed: float32, bfloat16 or float16")
        whole = x.stride(2) == 1 and (heads == 1 or x.stride(1) == x.shape[2])
        return x if whole else x.contiguous()


def _starts(kv_format: KVFormat | None, cache: KVCache, spec: ModelSpec) -> tuple[tuple[int, int], tuple[int, int]]:
    """((first key slab of a layer, slab), the same of values) in elements of the pool from the layer's start."""
    size = cache.layout.block_size
    if kv_format is None:
        slab = size * spec.head_dim
        return (0, slab), (spec.num_kv_heads * slab, slab)
    key, value = kv_format.places(spec.num_kv_heads, size, spec.head_dim)
    return (key.first, key.slab), (value.first, value.slab)
