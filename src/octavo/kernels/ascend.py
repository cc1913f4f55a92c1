"""`AscendAttention`: attention over blocks with torch_npu's operators, on an Ascend NPU.

Three operators of the public documentation (Ascend Extension for PyTorch, custom APIs) are called:

    npu_fused_infer_attention_score   attention through a block table, `input_layout="BNSD"`
    npu_scatter_nd_update_            keys and values into their slots, and copies of whole blocks
    (index_select of torch)           the blocks that are copied

The engine's pool is [num_blocks, layers, 2, Hkv, block_size, d]; the operator wants the keys of one layer as a
contiguous [blocks, Hkv, block_size, d] (its faster layout, "BnNBsD") and the values in the same shape. No second
layout is needed: seen flat, the pool is [num_blocks * layers * 2, Hkv, block_size, d], and the keys of layer place p of
block b are number (2 * layers) * b + 2 * p of it. So each layer reads a contiguous view that starts at its own place,
keys at 2p and values one further, and the step's table, multiplied by 2 * layers once, serves all layers of a group.

Rows of a step with equally many new tokens share one call: all decode rows, all verification rows of a length, usually
each prompt chunk by itself. Full attention with several queries uses the operator's right-aligned causal mode
(`sparse_mode=3`). Layers with a window get a table that starts at the first block in sight and an explicit mask: with
one query the operator ignores its window arguments, and whether its band mode counts the query itself the
documentation does not say.

It does not know sequences or who owns a block. What the operator cannot do is said by `why_unavailable` before anything
is allocated. Invariants: ids and slots are checked in `plan`, because the operators do not; a block's unwritten or
forgotten positions are cut off by the lengths or, inside a window's first block, masked. These last must be finite
numbers (a masked weight of 0 times a NaN is a NaN): they hold the row's own older tokens.

Written to the documentation and tested against an emulation of it; not yet run on a device (docs/hardware.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.kv_layout import KVLayout
from octavo.devices import device_of
from octavo.errors import BoundsError
from octavo.kernels.interface import AttentionBatch, KVCache
from octavo.kernels.reference import independent_runs
from octavo.models.spec import ModelSpec
from octavo.npu_device import load_torch_npu

#: What the fused operator takes where prompts and decode rows read one pool: multiples of 128 up to 512.
BLOCK_SIZES = (128, 256)
DEFAULT_BLOCK_SIZE = 128  # what the documentation advises
DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 512
MAX_HEADS, MAX_HEADS_PER_KV = 256, 64
MAX_CONTEXT = 262144  # keys that a row with one query may see
CHIPS = ("Ascend910B", "Ascend910_93", "Ascend910_95", "Ascend950")  # Atlas A2, A3 and the 950 series
_MASK = 2048  # side of the triangular mask that sparse_mode=3 wants, whatever the lengths
_CAUSAL, _WHOLE_MASK = 3, 1  # sparse modes


def model_mismatch(spec: ModelSpec, dtype: torch.dtype, kv_dtype: str = "auto") -> str:
    """Why the fused operator cannot run this model with these number formats; empty when it can.

    Says nothing about the block size, which can be chosen: see `block_size_mismatch`.
    """
    heads = f"{spec.num_heads} query heads on {spec.num_kv_heads} key heads"
    if dtype not in DTYPES:
        return f"torch_npu's fused attention takes float16 and bfloat16, not {str(dtype).removeprefix('torch.')}"
    if kv_dtype != "auto":
        return (
            f"torch_npu's fused attention reads quantised keys for single queries only, not kv_cache_dtype={kv_dtype!r}"
        )
    if spec.attention_softcap is not None:
        return f"torch_npu's fused attention has no soft cap on scores; this model caps at {spec.attention_softcap:g}"
    if spec.head_dim % HEAD_DIM_STEP or spec.head_dim > MAX_HEAD_DIM:
        return (
            f"torch_npu's fused attention takes heads of a multiple of {HEAD_DIM_STEP} numbers up to {MAX_HEAD_DIM}, "
            f"this model has {spec.head_dim}"
        )
    if spec.num_heads > MAX_HEADS or spec.num_heads > MAX_HEADS_PER_KV * spec.num_kv_heads:
        return (
            f"torch_npu's fused attention takes up to {MAX_HEADS} heads, {MAX_HEADS_PER_KV} on one key head; "
            f"this model has {heads}"
        )
    return ""


def block_size_mismatch(block_size: int) -> str:
    """Why the fused operator cannot read blocks of this size; empty when it can."""
    if block_size in BLOCK_SIZES:
        return ""
    allowed = " or ".join(map(str, BLOCK_SIZES))
    return (
        f"block_size={block_size}: torch_npu's fused attention reads blocks of {allowed} tokens. Leave block_size out "
        f"({DEFAULT_BLOCK_SIZE} is chosen), or ask for attention_backend='reference' (plain torch operations, much "
        "slower, any block size)"
    )


def chip_mismatch(name: str) -> str:
    """Why a device of this name does not have the operator, as the documentation lists products; empty when it has."""
    if name.startswith(CHIPS):
        return ""
    return f"torch_npu's fused attention is documented for {', '.join(CHIPS)} devices, this one is {name}"


def why_unavailable(cache: KVCache, spec: ModelSpec) -> str:
    """Empty when `AscendAttention(cache, spec)` can run; else one sentence that says what stands against it."""
    if cache.kv.device.type != "npu":
        return f"it runs on an NPU, the KV blocks are on {cache.kv.device.type}"
    return (
        chip_mismatch(device_of(cache.kv.device).name)
        or model_mismatch(spec, cache.kv.dtype, cache.layout.kv_dtype)
        or block_size_mismatch(cache.layout.block_size)
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows with equally many new tokens. index: of the rows in the batch; tokens: [b * queries], of the batch's."""

    index: torch.Tensor  # int64 [b] on the device
    tokens: torch.Tensor | None  # None: this is the only call, all tokens in order
    queries: int
    contexts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Reach:
    """What some rows see under one window: from block `firsts[i]` on, `lengths[i]` positions, `width` blocks."""

    columns: torch.Tensor | None  # int64 [b, width] of the table; None: from the first on
    width: int
    lengths: list[int]
    mask: torch.Tensor | None  # bool [b, 1, queries, width * block_size], True where it must not be seen
    sparse_mode: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the operator for layers of one group and window."""

    rows: _Rows
    reach: _Reach
    table: torch.Tensor  # int32 [b, width], numbers of the layers' views


class AscendAttention:
    """`AttentionBackend` on an NPU. Built as `AscendAttention(cache, spec)` where `why_unavailable` has nothing to say.

    Raises `BoundsError` from `plan` for a table that is too short, a block or slot outside the pool, or a context
    longer than the operator reads; from `copy_blocks` for a block outside the pool.
    """

    name = "ascend"

    def __init__(self, cache: KVCache, spec: ModelSpec) -> None:
        self._ops: Any = load_torch_npu()
        self._kv = kv = cache.kv
        self._layout: KVLayout = cache.layout
        self._spec = spec
        layout = cache.layout
        expected = (layout.layers_per_group, 2, spec.num_kv_heads, layout.block_size, spec.head_dim)
        if tuple(kv.shape[1:]) != expected or not kv.is_contiguous():
            raise ValueError(
                f"kv of shape {tuple(kv.shape)} does not fit the model: expected a contiguous "
                f"[num_blocks, {', '.join(map(str, expected))}] tensor"
            )
        self._stride = 2 * layout.layers_per_group  # numbers of the flat pool from a block to the next
        self._places = [layout.place(layer) for layer in range(spec.num_layers)]
        flat = kv.view(-1, *expected[2:])
        self._count = flat.shape[0] - self._stride + 1
        # views[n]: from number n of the first block on, so that every block's number n is stride apart in it.
        self._views = [flat.narrow(0, n, self._count) for n in range(self._stride)]
        self._heads = torch.arange(spec.num_kv_heads, device=kv.device)
        # For sparse_mode=3: True above the diagonal, that is, where a key must not be seen.
        self._triangle = torch.ones(_MASK, _MASK, dtype=torch.bool, device=kv.device).triu(1)
        self._plans: dict[tuple[int, int | None], list[_Call]] = {}
        self._write_rows: list[torch.Tensor] = []

    # -- once per step ---------------------------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        """Check the batch, sort its rows by new tokens, and make the tables and masks that layers share."""
        starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
        self._check_shapes(batch, starts, contexts)
        rows = self._sort_rows(starts, contexts)
        reaches: dict[int | None, list[_Reach]] = {}
        wanted = {(self._places[layer][0], window) for layer, window in enumerate(self._spec.windows)}
        plans: dict[tuple[int, int | None], list[_Call]] = {}
        for group, window in wanted:
            if window not in reaches:
                reaches[window] = [self._reach(one, window) for one in rows]
            table = batch.block_tables[group]
            plans[group, window] = [
                _Call(one, reach, self._table(table, one, reach))
                for one, reach in zip(rows, reaches[window], strict=True)
            ]
        self._check_ids(batch, plans)
        self._plans = plans
        self._write_rows = [self._slot_rows(slots) for slots in batch.slots]

    def _check_shapes(self, batch: AttentionBatch, starts: list[int], contexts: list[int]) -> None:
        groups = self._layout.num_groups
        if len(batch.block_tables) != groups or len(batch.slots) != groups:
            raise BoundsError(
                f"{len(batch.block_tables)} block tables and {len(batch.slots)} slot lists for {groups} KV groups: "
                "there must be one of each per group"
            )
        width = min(table.shape[1] for table in batch.block_tables)
        for row, context in enumerate(contexts):
            queries = starts[row + 1] - starts[row]
            if queries < 0 or context < queries:
                raise BoundsError(f"row {row}: {queries} new tokens do not fit a context of {context}")
            if context > width * self._layout.block_size:
                raise BoundsError(
                    f"row {row}: a context of {context} tokens needs {self._layout.blocks_for(context)} blocks, "
                    f"the table has {width}"
                )
            if queries == 1 and context > MAX_CONTEXT:
                raise BoundsError(f"row {row}: a context of {context} tokens; the operator reads up to {MAX_CONTEXT}")
        for group, slots in enumerate(batch.slots):
            if slots.numel() != starts[-1]:
                raise BoundsError(f"group {group}: {slots.numel()} slots for {starts[-1]} tokens")

    def _sort_rows(self, starts: list[int], contexts: list[int]) -> list[_Rows]:
        """Rows by number of new tokens, as many in a call as the operator takes.

        It wants at least as many blocks in a view as all rows of a call have in their tables, shared ones counted for
        each: many samples of one long prompt can have more.
        """
        calls: list[list[int]] = []
        latest: dict[int, tuple[list[int], int]] = {}  # queries -> the last call's rows, blocks in their tables
        for row, context in enumerate(contexts):
            queries, blocks = starts[row + 1] - starts[row], self._layout.blocks_for(context)
            members, used = latest.get(queries, ([], 0))
            if not members or used + blocks > self._count:
                members, used = [], 0
                if queries:
                    calls.append(members)
            members.append(row)
            latest[queries] = members, used + blocks
        device, found = self._kv.device, []
        for members in calls:
            tokens = None
            if len(calls) > 1:
                places = [t for row in members for t in range(starts[row], starts[row + 1])]
                tokens = torch.tensor(places, device=device)
            queries = starts[members[0] + 1] - starts[members[0]]
            index = torch.tensor(members, device=device)
            found.append(_Rows(index, tokens, queries, tuple(contexts[row] for row in members)))
        return found

    def _reach(self, rows: _Rows, window: int | None) -> _Reach:
        """Which blocks rows see through `window`, and the mask for what of these they must not."""
        size, queries = self._layout.block_size, rows.queries
        width = self._layout.blocks_for(max(rows.contexts))
        if window is None or max(rows.contexts) <= window:
            causal = queries > 1
            mask = self._triangle if causal else None
            return _Reach(None, width, list(rows.contexts), mask, _CAUSAL if causal else 0)
        firsts = [max(0, context - queries - window + 1) // size for context in rows.contexts]
        lengths = [context - first * size for context, first in zip(rows.contexts, firsts, strict=True)]
        width = self._layout.blocks_for(max(lengths))
        device = self._kv.device
        first, length = torch.tensor(firsts, device=device), torch.tensor(lengths, device=device)
        columns = first[:, None] + torch.arange(width, device=device)
        # Positions from the first block in sight on; the last query is at length - 1.
        key = torch.arange(width * size, device=device)
        query = length[:, None] - queries + torch.arange(queries, device=device)
        distance = query[:, :, None] - key
        mask = ((distance < 0) | (distance >= window)).unsqueeze(1)
        return _Reach(columns, width, lengths, mask, _WHOLE_MASK if queries > 1 else 0)

    def _table(self, table: torch.Tensor, rows: _Rows, reach: _Reach) -> torch.Tensor:
        """Block ids of the rows in sight, int32 [b, width]; entries past a row's length may be anything."""
        part = table.index_select(0, rows.index)
        if reach.columns is None:
            return part[:, : reach.width].contiguous()
        # A shorter row's last columns may lie past the table: they are never read.
        return part.gather(1, reach.columns.clamp(max=table.shape[1] - 1))

    def _check_ids(self, batch: AttentionBatch, plans: dict[tuple[int, int | None], list[_Call]]) -> None:
        """Every id that will be read and every slot lies in the pool; then ids become numbers of the layers' views."""
        blocks, size = self._kv.shape[0], self._layout.block_size
        bad = [((slots < 0) | (slots >= blocks * size)).any() for slots in batch.slots]
        names = [f"a slot of group {group}" for group in range(len(batch.slots))]
        for (group, _), calls in plans.items():
            for call in calls:
                needed = torch.tensor([self._layout.blocks_for(n) for n in call.reach.lengths], device=self._kv.device)
                read = torch.arange(call.reach.width, device=self._kv.device) < needed[:, None]
                bad.append((((call.table < 0) | (call.table >= blocks)) & read).any())
                names.append(f"an entry of group {group}'s table")
                # Unread entries too: nothing then can make the operator look outside.
                call.table.clamp_(0, blocks - 1).mul_(self._stride)
        for name, wrong in zip(names, torch.stack(bad).tolist(), strict=True):  # one wait for the device, not many
            if wrong:
                raise BoundsError(f"{name} lies outside the pool of {blocks} blocks of {size} tokens")

    def _slot_rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows [T * Hkv, 1] of a layer's view, seen as [rows, d], that tokens in `slots` are written to."""
        size = self._layout.block_size
        block, offset = slots // size, slots % size
        rows = (block[:, None] * (self._stride * len(self._heads)) + self._heads) * size + offset[:, None]
        return rows.reshape(-1, 1)

    # -- per layer -------------------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, Hkv, d] in the slots of the layer's group, converted to the cache's dtype."""
        group, place = self._places[layer]
        head_dim = self._spec.head_dim
        for half, new in enumerate((key, value)):
            rows = self._views[2 * place + half].view(-1, head_dim)
            self._ops.npu_scatter_nd_update_(rows, self._write_rows[group], new.reshape(-1, head_dim).to(rows.dtype))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, d] -> [T, Hq, d] of the same dtype."""
        group, place = self._places[layer]
        keys, values = self._views[2 * place], self._views[2 * place + 1]
        calls = self._plans[group, self._spec.windows[layer]]
        if len(calls) == 1:
            return self._call(calls[0], keys, values, query).to(query.dtype)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for call in calls:
            assert call.rows.tokens is not None
            found = self._call(call, keys, values, query.index_select(0, call.rows.tokens))
            out.index_copy_(0, call.rows.tokens, found.to(query.dtype))
        return out

    def _call(self, call: _Call, keys: torch.Tensor, values: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """query [b * queries, Hq, d] -> the same shape, in the cache's dtype."""
        heads, head_dim = query.shape[1:]
        queries = call.rows.queries
        # [b, queries, Hq, d] -> [b, Hq, queries, d]; nothing moves where there is one query.
        rows = query.to(keys.dtype).reshape(-1, queries, heads, head_dim).transpose(1, 2).contiguous()
        found, _ = self._ops.npu_fused_infer_attention_score(
            rows,
            keys,
            values,
            atten_mask=call.reach.mask,
            actual_seq_lengths=[queries] * rows.shape[0],
            actual_seq_lengths_kv=call.reach.lengths,
            block_table=call.table,
            num_heads=heads,
            scale=self._spec.scale,
            input_layout="BNSD",
            num_key_value_heads=self._spec.num_kv_heads,
            sparse_mode=call.reach.sparse_mode,
            block_size=self._layout.block_size,
        )
        result: torch.Tensor = found.transpose(1, 2).reshape(-1, heads, head_dim)
        return result

    # -- blocks ----------------------------------------------------------------------------------------------------

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in order: a later pair sees what an earlier one wrote."""
        limit = self._kv.shape[0]
        for number, pair in enumerate(pairs):
            if not all(0 <= block < limit for block in pair):
                raise BoundsError(f"copy {number} of {len(pairs)}: {pair} leaves the pool's blocks 0 to {limit - 1}")
        blocks = self._kv.view(limit, -1)
        for run in independent_runs(pairs):
            source, destination = torch.tensor(run, device=self._kv.device).unbind(1)
            self._ops.npu_scatter_nd_update_(blocks, destination.unsqueeze(1), blocks.index_select(0, source))
