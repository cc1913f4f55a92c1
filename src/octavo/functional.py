"""Paged attention as functions of tensors: no object, no bookkeeping. You own the pool and the block tables.

Two layouts of the pool, told apart by the number of dimensions:

    5  [num_blocks, 2, block_size, num_kv_heads, head_dim]                        "tokens": token by token
    6  [num_blocks, layers of a block, 2, num_kv_heads, block_size, head_dim]     "engine": head by head, all layers

(2: key, value.) The kernels read the second one in place. Of a pool in the first one, `paged_attention` re-arranges the
blocks that the tables name, a copy of the whole context for each call: keep the second if you can choose.

Attention is exact: one softmax over everything a query sees, not one for each block. A softmax for each block whose
results are added up without rescaling by the running maximum and sum (Milakov and Gimelshein 2018, Dao et al. 2022) is
a common mistake and wrong as soon as a context has two blocks.

    kv = torch.zeros(64, 2, 16, 8, 128)
    slots = slot_mapping(block_tables, context_lens, 16)
    write_kv(kv, key, value, slots)
    out = paged_attention(query, kv, block_tables, context_lens, block_size=16)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from octavo.core.kv_layout import build_layout
from octavo.core.whole_numbers import whole, wholes
from octavo.errors import ConfigError, RequestError
from octavo.kernels import reference
from octavo.kernels.interface import AttentionBackend, AttentionBatch, KVCache, make_backend
from octavo.models.spec import ModelSpec
from octavo.paged.rows import check_no_gradient, check_tensor, rows_of
from octavo.paged.spec import at_least_one, attention_spec, check_backend, window_of

LAYOUTS = ("tokens", "engine")
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def paged_attention(
    query: torch.Tensor,
    kv_blocks: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor | Sequence[int],
    block_size: int,
    *,
    query_lens: Sequence[int] | None = None,
    layer: int = 0,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    layout: str | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Exact causal attention of the last tokens of each row to its paged context.

    Parameters
    ----------
    query : Tensor [T, num_heads, head_dim], or [B, S, num_heads, head_dim]
        The last tokens of each context, whose keys and values are in the pool already. [B, …]: one each (decode).
    kv_blocks : Tensor [num_blocks, 2, block_size, num_kv_heads, head_dim], or the engine's six dimensions
        Any float type.
    block_tables : int Tensor [B, M]
        Block ids in logical order. Entries behind a context, or in front of a window, are never read.
    context_lens : int Tensor [B], or ints
        Tokens of each row, the query's included.
    block_size : int
        Checked against the pool's shape.
    query_lens : list of int
        Tokens per row of a ragged query; None: one each, or S each, or all T if there is one row.
    layer : int
        Of the layers that lie in a block (the engine's layout).
    scale, sliding_window, softcap
        As in `octavo.PagedAttention`.
    layout : str
        "tokens" or "engine"; None: by the number of dimensions. A contradiction is an error.

    Returns
    -------
    Tensor
        Shape and dtype of `query`.

    Raises
    ------
    RequestError
        Shapes, block ids or lengths that do not fit together.
    ConfigError
        A backend that cannot be used here; a block size, scale, window or cap that cannot be.
    """
    block_size = at_least_one("block_size", block_size)
    sliding_window = window_of(sliding_window)
    _check_pool(kv_blocks, block_size, layout)
    _check_floats("query", query)
    contexts = wholes("context_lens", context_lens)
    rows = rows_of(query, len(contexts), query_lens, ())
    if min((c - n for c, n in zip(contexts, rows.counts, strict=True)), default=0) < 0:
        raise RequestError(f"context_lens={contexts} do not include the {list(rows.counts)} tokens of the query")
    table = _check_tables(block_tables, contexts, rows.counts, block_size, sliding_window, kv_blocks.shape[0])
    if kv_blocks.dim() == 5:
        kv_blocks, table = _rearranged(kv_blocks, table)
    pool = kv_blocks if kv_blocks.is_contiguous() else kv_blocks.contiguous()
    num_layers = pool.shape[1]
    layer = _layer_of(layer, num_layers)
    if query.shape[-1] != pool.shape[-1] or query.device != pool.device:
        raise RequestError(
            f"query of shape {tuple(query.shape)} on {query.device} and a pool of head_dim {pool.shape[-1]} on "
            f"{pool.device}: heads and devices must be the same"
        )
    spec = attention_spec(
        num_heads=query.shape[-2], num_kv_heads=pool.shape[3], head_dim=pool.shape[-1], num_layers=num_layers,
        scale=scale, sliding_window=sliding_window, softcap=softcap,
    )  # fmt: skip
    check_backend(backend)
    if not contexts:
        return torch.empty_like(query)
    kernels = _kernels(backend, pool, spec, block_size)
    kernels.plan(_batch(rows.counts, contexts, table, block_size))
    return rows.unpack(kernels.attend(layer, rows.pack(query)))


def slot_mapping(
    block_tables: torch.Tensor,
    context_lens: torch.Tensor | Sequence[int],
    block_size: int,
    query_lens: Sequence[int] | None = None,
) -> torch.Tensor:
    """Where the last tokens of each row go: block_id * block_size + offset.

    Parameters
    ----------
    block_tables : int Tensor [B, M]
    context_lens : int Tensor [B], or ints
        The new tokens included.
    query_lens : list of int
        New tokens per row; None: one each.

    Returns
    -------
    int64 Tensor [T]
        Row after row.
    """
    block_size = at_least_one("block_size", block_size)
    contexts = wholes("context_lens", context_lens)
    counts = [1] * len(contexts) if query_lens is None else wholes("query_lens", query_lens)
    if len(counts) != len(contexts) or any(not 0 <= n <= c for n, c in zip(counts, contexts, strict=True)):
        raise RequestError(f"query_lens={counts} do not fit context_lens={contexts}")
    table = _check_tables(block_tables, contexts, counts, block_size, 1, None)
    return _slots(table, counts, contexts, block_size)


def write_kv(
    kv_blocks: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    *,
    layer: int = 0,
    layout: str | None = None,
) -> None:
    """Store new keys and values in the pool, in place.

    Parameters
    ----------
    kv_blocks : Tensor
        Either layout, see the module. Values are converted to its dtype.
    key, value : Tensor [T, num_kv_heads, head_dim]
    slots : int Tensor [T]
        block_id * block_size + offset of each token, none twice; a negative one is padding and is not written.
    layer : int
        Of the layers that lie in a block (the engine's layout).
    """
    heads, size, layers = _check_pool(kv_blocks, None, layout)
    _check_floats("key", key)
    _check_floats("value", value)
    _check_ints("slots", slots)
    shape = (slots.numel(), heads, kv_blocks.shape[-1])
    if tuple(key.shape) != shape or tuple(value.shape) != shape or slots.dim() != 1:
        raise RequestError(
            f"key {tuple(key.shape)}, value {tuple(value.shape)} and {tuple(slots.shape)} slots: needed are "
            f"[T, {heads}, {shape[2]}] twice and [T]"
        )
    if not key.device == value.device == slots.device == kv_blocks.device:
        raise RequestError(
            f"key is on {key.device}, value on {value.device}, slots on {slots.device}, the pool on "
            f"{kv_blocks.device}: one device is needed"
        )
    layer = _layer_of(layer, layers)
    kept = slots >= 0
    places = slots[kept].long()
    if places.numel() and int(places.max()) >= kv_blocks.shape[0] * size:
        raise RequestError(f"slot {int(places.max())}: the pool has slots 0 to {kv_blocks.shape[0] * size - 1}")
    if places.unique().numel() != places.numel():
        raise RequestError("two tokens have the same slot; which of them should stay?")
    blocks, offsets = places // size, places % size
    for half, new in enumerate((key, value)):
        part = new[kept].to(kv_blocks.dtype)
        if kv_blocks.dim() == 5:
            kv_blocks[blocks, half, offsets] = part
        else:
            kv_blocks[blocks, layer, half, :, offsets] = part


def copy_blocks(kv_blocks: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks (source, destination) in order, all layers at once; a later pair sees what an earlier wrote.

    What copy-on-write comes down to. kv_blocks: any tensor whose first dimension counts blocks.
    """
    check_tensor("kv_blocks", kv_blocks)
    check_no_gradient("kv_blocks", kv_blocks)
    if kv_blocks.dim() == 0:
        raise RequestError("kv_blocks has no dimension: the first one counts blocks")
    limit = kv_blocks.shape[0]
    listed: Any = pairs.tolist() if hasattr(pairs, "tolist") else pairs
    if isinstance(listed, str | bytes | dict) or not isinstance(listed, Iterable):
        raise RequestError(f"pairs={pairs!r}: must be a list of (source, destination)")
    copies = []
    for pair in listed:
        two = wholes("pair", pair) if hasattr(pair, "__len__") and len(pair) == 2 else []
        if not two or not all(0 <= block < limit for block in two):
            raise RequestError(f"{pair!r} is not a (source, destination) of blocks 0 to {limit - 1}")
        copies.append((two[0], two[1]))
    reference.copy_blocks(kv_blocks, copies)


def _kernels(backend: str, pool: torch.Tensor, spec: ModelSpec, block_size: int) -> AttentionBackend:
    layout = build_layout(spec.windows, block_size=block_size, bytes_per_token_layer=1)
    try:
        return make_backend(backend, KVCache(pool, layout), spec)
    except ValueError as error:
        raise ConfigError(str(error).replace("attention_backend=", "backend=")) from None


def _check_floats(name: str, x: Any) -> None:
    check_tensor(name, x)
    if not x.is_floating_point():
        raise RequestError(f"{name} is {x.dtype}: a float type is needed")
    check_no_gradient(name, x)


def _check_ints(name: str, x: Any) -> None:
    """Bools and floats would be taken for masks and rounded."""
    check_tensor(name, x)
    if x.dtype not in INTS:
        raise RequestError(f"{name} is {x.dtype}: an int type is needed")


def _layer_of(layer: int, num_layers: int) -> int:
    layer = whole("layer", layer)
    if not 0 <= layer < num_layers:
        raise RequestError(f"layer={layer}: a block of this pool holds {num_layers}, from 0")
    return layer


def _check_pool(kv_blocks: torch.Tensor, block_size: int | None, layout: str | None) -> tuple[int, int, int]:
    """(num_kv_heads, block_size, layers of a block); `RequestError` if the shape is neither layout."""
    check_tensor("kv_blocks", kv_blocks)
    check_no_gradient("kv_blocks", kv_blocks)
    shape = tuple(kv_blocks.shape)
    if layout is not None and layout not in LAYOUTS:
        raise RequestError(f"layout={layout!r}: must be one of {', '.join(LAYOUTS)}")
    found = {5: "tokens", 6: "engine"}.get(len(shape))
    if found is None or (layout is not None and layout != found) or shape[1 if found == "tokens" else 2] != 2:
        raise RequestError(
            f"kv_blocks of shape {shape}{'' if layout is None else f' as {layout!r}'}: needed is [num_blocks, 2, "
            f"block_size, heads, head_dim] (tokens) or [num_blocks, layers, 2, heads, block_size, head_dim] (engine)"
        )
    if not kv_blocks.is_floating_point():
        raise RequestError(f"kv_blocks of {kv_blocks.dtype}: the functions read floats; PagedAttention reads int8 too")
    at, heads = (2, 3) if found == "tokens" else (4, 3)
    if block_size is not None and shape[at] != block_size:
        hint = ""
        if found == "tokens" and shape[3] == block_size:
            hint = "; it looks head by head: give kv_blocks.unsqueeze(1), which is the engine's layout of one layer"
        raise RequestError(f"kv_blocks of shape {shape} has {shape[at]} tokens a block, not {block_size}{hint}")
    return shape[heads], shape[at], 1 if found == "tokens" else shape[1]


def _check_tables(
    block_tables: torch.Tensor,
    contexts: Sequence[int],
    counts: Sequence[int],
    block_size: int,
    window: int | None,
    num_blocks: int | None,
) -> torch.Tensor:
    """int64 [B, M], with 0 where an entry is never read. window: what the first new token sees of the past."""
    _check_ints("block_tables", block_tables)
    if block_tables.dim() != 2 or block_tables.shape[0] != len(contexts):
        raise RequestError(f"block_tables of shape {tuple(block_tables.shape)}: [{len(contexts)}, M] ints are needed")
    if max(contexts, default=0) > block_tables.shape[1] * block_size:
        need = -(-max(contexts) // block_size)
        raise RequestError(
            f"a context of {max(contexts)} tokens needs {need} block{'s' * (need != 1)}, block_tables has "
            f"{block_tables.shape[1]}"
        )
    device = block_tables.device
    end = torch.tensor(contexts, dtype=torch.int64, device=device)[:, None]
    start = end - torch.tensor(counts, dtype=torch.int64, device=device)[:, None]
    first = (start - window + 1).clamp_min(0) // block_size if window is not None else torch.zeros_like(start)
    logical = torch.arange(block_tables.shape[1], device=device)
    read = (logical >= first) & (logical * block_size < end)
    table = block_tables.long()
    bad = read & ((table < 0) | (table >= (2**31 if num_blocks is None else num_blocks)))
    if bool(bad.any()):
        row, at = bad.nonzero()[0].tolist()
        there = "a block id is 0 or more" if num_blocks is None else f"blocks 0 to {num_blocks - 1} are there"
        raise RequestError(f"block_tables[{row}, {at}] is {int(table[row, at])}: {there}")
    return torch.where(read, table, 0)


def _rearranged(kv_blocks: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The named blocks of a "tokens" pool in the engine's layout, and the table over them."""
    ids, renamed = torch.unique(table, return_inverse=True)
    picked = kv_blocks.index_select(0, ids.to(kv_blocks.device))
    return picked.permute(0, 1, 3, 2, 4).contiguous().unsqueeze(1), renamed


def _slots(table: torch.Tensor, counts: Sequence[int], contexts: Sequence[int], block_size: int) -> torch.Tensor:
    device = table.device
    places = []
    for row, (count, context) in enumerate(zip(counts, contexts, strict=True)):
        position = torch.arange(context - count, context, device=device)
        places.append(table[row, position // block_size] * block_size + position % block_size)
    return torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device=device)


def _batch(counts: Sequence[int], contexts: Sequence[int], table: torch.Tensor, block_size: int) -> AttentionBatch:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32, device=table.device),
        context_len=torch.tensor(contexts, dtype=torch.int32, device=table.device),
        block_tables=[table.int()],
        slots=[_slots(table, counts, contexts, block_size)],
        max_query=max(counts),
        max_context=max(contexts),
    )
