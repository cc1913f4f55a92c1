"""`ReferenceAttention`: exact attention over blocks in plain torch, on any device. The definition of right.

Every other backend is tested against this one, and it is what runs where nothing faster is built. It gathers the
keys and values that a query may see (for a windowed layer only the window) into one contiguous scratch and applies
a plain softmax in float32: the same value an online softmax over blocks arrives at (Milakov and Gimelshein 2018;
Dao et al. 2022, algorithm 1), without its rescaling.

It does not know sequences, only rows of a batch; nor who owns a block.

Invariants. Positions outside a row's context or window are replaced by that row's own last position before anything
is read and are masked afterwards, so a stale value (even a NaN) in an unused slot cannot leak into a result. Shapes
handed to the matrix products depend on the row alone (lengths are rounded up to a fixed ladder, not to the longest
neighbour), so other rows change no bit of a row. Every slot and table entry is checked in `plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from octavo.core.kv_layout import KVLayout
from octavo.errors import BoundsError
from octavo.kernels.interface import AttentionBatch, KVCache
from octavo.kernels.quantized_kv import QuantizedRows
from octavo.models.spec import ModelSpec

QUERY_TILE = 256  # queries of a prompt row handled at once: bounds the score matrix
_FIRST_RUNG = 64


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """Rows with one query and lengths on the same rung. b rows, n gathered positions."""

    tokens: torch.Tensor  # int64 [b], index into the batch's tokens
    index: torch.Tensor  # int64 [2 * b * Hkv * n], rows of the flat cache, relative to the layer
    hidden: torch.Tensor  # bool [b, 1, 1, n], True where a position must not be seen
    length: int


@dataclass(frozen=True, slots=True)
class _PromptRow:
    """One row with several queries at positions `start`, `start + 1`, …; keys from `first_key` on."""

    first_token: int
    num_queries: int
    start: int
    first_key: int
    index: torch.Tensor  # int64 [2 * Hkv * n]


@dataclass(frozen=True, slots=True)
class _LayerPlan:
    """What layers of one group with one window share in a step."""

    window: int | None
    decode: tuple[_DecodeRows, ...]
    prompts: tuple[_PromptRow, ...]


def rung(length: int) -> int:
    """Smallest of 64, 96, 128, 192, 256, 384, … that is at least `length`."""
    step = _FIRST_RUNG
    while step < length:
        if step + step // 2 >= length:
            return step + step // 2
        step *= 2
    return step


def independent_runs(pairs: Iterable[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut ordered (source, destination) pairs into runs that may each be done at once.

    Inside a run no block is both written and read, and none is written twice, so any order gives the same result.
    """
    runs: list[list[tuple[int, int]]] = []
    sources: set[int] = set()
    destinations: set[int] = set()
    for source, destination in pairs:
        if not runs or source in destinations or destination in sources or destination in destinations:
            runs.append([])
            sources.clear()
            destinations.clear()
        runs[-1].append((source, destination))
        sources.add(source)
        destinations.add(destination)
    return runs


def copy_blocks(kv: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks kv[source] -> kv[destination] in order; `BoundsError` before anything moves."""
    limit = kv.shape[0]
    for number, pair in enumerate(pairs):
        if not all(0 <= block < limit for block in pair):
            raise BoundsError(f"copy {number} of {len(pairs)}: {pair} leaves the pool's blocks 0 to {limit - 1}")
    for run in independent_runs(pairs):
        source, destination = torch.tensor(run, device=kv.device).unbind(1)
        kv.index_copy_(0, destination, kv.index_select(0, source))


class FloatRows:
    """Keys and values kept as floats: one row of `head_dim` per (block, layer, key or value, head, offset)."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout, num_kv_heads: int, head_dim: int) -> None:
        expected = (layout.layers_per_group, 2, num_kv_heads, layout.block_size, head_dim)
        if kv.dim() != 6 or tuple(kv.shape[1:]) != expected or not kv.is_contiguous():
            raise ValueError(
                f"kv of shape {tuple(kv.shape)} does not fit the model: expected a contiguous "
                f"[num_blocks, {', '.join(map(str, expected))}] tensor"
            )
        self._flat = kv.view(-1, head_dim)
        self._stride = num_kv_heads * layout.block_size  # rows from the keys of a layer to its values
        self._scratch = kv.new_empty(0)

    def write(self, place: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [n, head_dim] into rows [n] of the layer at `place` of its group."""
        for half, new in enumerate((key, value)):
            base = (2 * place + half) * self._stride
            self._flat[base:].index_copy_(0, rows, new.to(self._flat.dtype))

    def gather(self, index: torch.Tensor, place: int) -> torch.Tensor:
        """Rows of the layer at `place` in its group -> float32 [len(index), head_dim], in the scratch."""
        head_dim = self._flat.shape[1]
        needed = index.numel() * head_dim
        if self._scratch.numel() < needed:
            # Grown to a power of two: fresh memory for every call costs several times the copy itself.
            self._scratch = self._flat.new_empty(1 << (needed - 1).bit_length())
        out = self._scratch[:needed].view(-1, head_dim)
        torch.index_select(self._flat[2 * place * self._stride :], 0, index, out=out)
        return out.float()


class ReferenceAttention:
    """`AttentionBackend` in plain torch. Built as `ReferenceAttention(cache, spec)`.

    Raises `BoundsError` from `plan` when a row's table is too short, an entry that must be read is not a block of
    the pool, or a slot lies outside it; from `copy_blocks` for a block outside the pool.
    """

    name = "reference"

    def __init__(self, cache: KVCache, spec: ModelSpec) -> None:
        kv = cache.kv
        self._kv = kv
        self._layout: KVLayout = cache.layout
        self._spec = spec
        rows = FloatRows if cache.layout.kv_dtype == "auto" else QuantizedRows
        self._rows: FloatRows | QuantizedRows = rows(kv, cache.layout, spec.num_kv_heads, spec.head_dim)
        self._places = [cache.layout.place(layer) for layer in range(spec.num_layers)]
        self._heads = torch.arange(spec.num_kv_heads, device=kv.device)
        self._plans: dict[tuple[int, int | None], _LayerPlan] = {}
        self._write_rows: list[torch.Tensor] = []

    # -- once per step ---------------------------------------------------------------------------------------------

    def plan(self, batch: AttentionBatch) -> None:
        """Check the batch and turn its tables into gather indices; layers with equal group and window share them."""
        starts = batch.query_start.tolist()
        contexts = batch.context_len.tolist()
        self._check_shapes(batch, starts, contexts)
        self._write_rows = [self._rows_of_slots(group, slots, starts) for group, slots in enumerate(batch.slots)]
        wanted = {(self._places[layer][0], window) for layer, window in enumerate(self._spec.windows)}
        self._plans = {
            key: self._plan_group(key[0], key[1], batch.block_tables[key[0]], starts, contexts) for key in wanted
        }

    def _check_shapes(self, batch: AttentionBatch, starts: list[int], contexts: list[int]) -> None:
        if len(batch.block_tables) != self._layout.num_groups or len(batch.slots) != self._layout.num_groups:
            raise BoundsError(
                f"{len(batch.block_tables)} block tables and {len(batch.slots)} slot lists for "
                f"{self._layout.num_groups} KV groups: there must be one of each per group"
            )
        for row, context in enumerate(contexts):
            queries = starts[row + 1] - starts[row]
            if queries < 0 or context < queries:
                raise BoundsError(f"row {row}: {queries} new tokens do not fit a context of {context}")
            last = (context - 1) // self._layout.block_size
            for group, table in enumerate(batch.block_tables):
                if last >= table.shape[1]:
                    raise BoundsError(
                        f"row {row}, group {group}: a context of {context} tokens reaches logical block {last}, "
                        f"the table has {table.shape[1]}"
                    )
        for group, slots in enumerate(batch.slots):
            if slots.numel() != starts[-1]:
                raise BoundsError(f"group {group}: {slots.numel()} slots for {starts[-1]} tokens")

    def _rows_of_slots(self, group: int, slots: torch.Tensor, starts: list[int]) -> torch.Tensor:
        """Flat cache rows of the keys that will be written, [T * Hkv]; values lie `Hkv * block_size` rows further."""
        size = self._layout.block_size
        limit = self._kv.shape[0] * size
        bad = (slots < 0) | (slots >= limit)
        if bool(bad.any()):
            token = int(bad.nonzero()[0])
            row = next(r for r in range(len(starts) - 1) if starts[r] <= token < starts[r + 1])
            raise BoundsError(
                f"row {row}, group {group}: token {token - starts[row]} would be written to slot {int(slots[token])} "
                f"(block {int(slots[token]) // size}), the pool has slots 0 to {limit - 1}"
            )
        return self._flat_rows(slots // size, slots % size).reshape(-1)

    def _flat_rows(self, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[...] blocks and offsets -> [..., Hkv] rows of the flat cache for keys of layer 0 of the block."""
        per_block = self._layout.layers_per_group * 2 * len(self._heads)
        size = self._layout.block_size
        return (blocks.unsqueeze(-1) * per_block + self._heads) * size + offsets.unsqueeze(-1)

    def _plan_group(
        self, group: int, window: int | None, table: torch.Tensor, starts: list[int], contexts: list[int]
    ) -> _LayerPlan:
        rungs: dict[int, list[int]] = {}
        prompts = []
        for row, context in enumerate(contexts):
            queries = starts[row + 1] - starts[row]
            if queries == 1:
                seen = context if window is None else min(context, window)
                rungs.setdefault(rung(seen), []).append(row)
            elif queries > 1:
                start = context - queries
                first_key = 0 if window is None else max(0, start - window + 1)
                index, _ = self._gather_index(group, table, [row], [first_key], [context], context - first_key)
                prompts.append(_PromptRow(starts[row], queries, start, first_key, index))
        decode = []
        for length, rows in rungs.items():
            ends = [contexts[row] for row in rows]
            firsts = [0 if window is None else max(0, end - window) for end in ends]
            index, hidden = self._gather_index(group, table, rows, firsts, ends, length)
            tokens = torch.tensor([starts[row] for row in rows], device=table.device)
            decode.append(_DecodeRows(tokens, index, hidden[:, None, None, :], length))
        return _LayerPlan(window, tuple(decode), tuple(prompts))

    def _gather_index(
        self, group: int, table: torch.Tensor, rows: list[int], firsts: list[int], ends: list[int], length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where positions [first, end) of each row lie: flat rows [2 * b * Hkv * n], and bool [b, n] of the padding."""
        device = table.device
        end = torch.tensor(ends, device=device)[:, None]
        position = torch.tensor(firsts, device=device)[:, None] + torch.arange(length, device=device)
        padding = position >= end
        position = torch.minimum(position, end - 1)
        logical = position // self._layout.block_size
        blocks = table[torch.tensor(rows, device=device)].long().gather(1, logical)
        bad = (blocks < 0) | (blocks >= self._kv.shape[0])
        if bool(bad.any()):
            i, j = bad.nonzero()[0].tolist()
            raise BoundsError(
                f"row {rows[i]}, group {group}: logical block {int(logical[i, j])} is {int(blocks[i, j])}, "
                f"the pool has blocks 0 to {self._kv.shape[0] - 1}"
            )
        keys = self._flat_rows(blocks, position % self._layout.block_size).transpose(1, 2)
        values = keys + len(self._heads) * self._layout.block_size
        return torch.stack([keys, values]).reshape(-1), padding

    # -- per layer -------------------------------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, Hkv, d] in the slots of the layer's group, converted to the cache's dtype."""
        group, place = self._places[layer]
        head_dim = self._spec.head_dim
        self._rows.write(place, self._write_rows[group], key.reshape(-1, head_dim), value.reshape(-1, head_dim))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, d] -> [T, Hq, d] of the same dtype; scores, softmax and sums in float32."""
        group, place = self._places[layer]
        plan = self._plans[(group, self._spec.windows[layer])]
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for rows in plan.decode:
            out[rows.tokens] = self._attend_decode(rows, place, query[rows.tokens]).to(query.dtype)
        for row in plan.prompts:
            tokens = slice(row.first_token, row.first_token + row.num_queries)
            self._attend_prompt(row, plan.window, place, query[tokens], out[tokens])
        return out

    def _scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(query, key.transpose(-1, -2)).mul_(self._spec.scale)
        cap = self._spec.attention_softcap
        return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)

    def _attend_decode(self, rows: _DecodeRows, place: int, query: torch.Tensor) -> torch.Tensor:
        """query [b, Hq, d] -> float32 [b, Hq, d]."""
        b, heads, head_dim = query.shape
        kv_heads = len(self._heads)
        key, value = self._rows.gather(rows.index, place).view(2, b, kv_heads, rows.length, head_dim)
        scores = self._scores(query.float().view(b, kv_heads, heads // kv_heads, head_dim), key)
        weights = scores.masked_fill_(rows.hidden, float("-inf")).softmax(-1)
        return torch.matmul(weights, value).view(b, heads, head_dim)

    def _attend_prompt(
        self, row: _PromptRow, window: int | None, place: int, query: torch.Tensor, out: torch.Tensor
    ) -> None:
        """query [m, Hq, d] of one row -> out [m, Hq, d], a tile of queries at a time."""
        m, heads, head_dim = query.shape
        kv_heads = len(self._heads)
        keys, values = self._rows.gather(row.index, place).view(2, kv_heads, -1, head_dim)
        for first in range(0, m, QUERY_TILE):
            last = min(first + QUERY_TILE, m)
            position = torch.arange(row.start + first, row.start + last, device=query.device)[:, None]
            low = row.first_key if window is None else max(row.first_key, row.start + first - window + 1)
            high = row.start + last
            key_position = torch.arange(low, high, device=query.device)
            hidden = key_position > position
            if window is not None:
                hidden |= key_position <= position - window
            part = slice(low - row.first_key, high - row.first_key)
            # [m, Hkv, G, d] -> [Hkv, G * m, d]: all query heads of a group against its keys in one product.
            tile = query[first:last].float().view(last - first, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
            scores = self._scores(tile.reshape(kv_heads, -1, head_dim), keys[:, part])
            shaped = scores.view(kv_heads, -1, last - first, high - low).masked_fill_(hidden, float("-inf"))
            weights = shaped.softmax(-1).view(scores.shape)
            result = torch.matmul(weights, values[:, part]).view(kv_heads, -1, last - first, head_dim)
            out[first:last] = result.permute(2, 0, 1, 3).reshape(last - first, heads, head_dim).to(out.dtype)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks in order: a later pair sees what an earlier one wrote."""
        copy_blocks(self._kv, pairs)
