"""Ragged paged batches over a poisoned pool, and dense float64 attention to compare with.

Written without looking at any backend: positions are placed one by one, in plain loops.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.core.kv_layout import KVLayout, build_layout
from octavo.kernels.interface import AttentionBatch, KVCache
from octavo.models.spec import ModelSpec, RotarySpec


def fresh_seed() -> int:
    """A new seed each run, printed so that a failure can be repeated with OCTAVO_TEST_SEED."""
    seed = int(os.environ.get("OCTAVO_TEST_SEED") or random.SystemRandom().randrange(2**31))
    print(f"OCTAVO_TEST_SEED={seed}")
    return seed


def tiny_spec(
    windows: Sequence[int | None], heads: int = 4, kv_heads: int = 2, head_dim: int = 16, cap: float | None = None
) -> ModelSpec:
    """Only what attention looks at is meaningful."""
    return ModelSpec(
        architecture="test",
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        windows=tuple(windows),
        rotaries=(RotarySpec(),),
        rotary=(0,) * len(windows),
        attention_softcap=cap,
    )


@dataclass
class Paged:
    """`rows[b]` = (new tokens, context). keys/values[layer][b]: float32 [context, Hkv, d], the truth."""

    spec: ModelSpec
    layout: KVLayout
    cache: KVCache
    rows: list[tuple[int, int]]
    keys: list[list[torch.Tensor]]
    values: list[list[torch.Tensor]]
    queries: list[torch.Tensor]  # per layer [T, Hq, d]
    batch: AttentionBatch

    def new(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The part of per-row tensors that the step writes, concatenated: [T, Hkv, d]."""
        return torch.cat([t[context - new :] for t, (new, context) in zip(tensors, self.rows, strict=True)])


def make_paged(
    rows: Sequence[tuple[int, int]],
    spec: ModelSpec,
    *,
    block_size: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    hybrid: bool = True,
    contents: Sequence[torch.Generator] | None = None,
) -> Paged:
    """History is in the pool, new tokens are not; every other slot is NaN and released table entries are -1.

    contents: one generator per row for its keys, values and queries (default: the shared one).
    """
    layout = build_layout(spec.windows, block_size=block_size, bytes_per_token_layer=1, hybrid=hybrid)
    width = max(layout.blocks_for(context) for _, context in rows) + 2
    needed = sum(layout.blocks_for(context) for _, context in rows) * layout.num_groups
    num_blocks = needed + 3
    shape = (num_blocks, layout.layers_per_group, 2, spec.num_kv_heads, block_size, spec.head_dim)
    kv = torch.full(shape, float("nan"), dtype=dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    sources = contents or [generator] * len(rows)

    def normal(*size: int, source: torch.Generator) -> torch.Tensor:
        return torch.randn(*size, generator=source).to(dtype).float()

    kv_shape, q_shape = (spec.num_kv_heads, spec.head_dim), (spec.num_heads, spec.head_dim)
    keys, values, queries = [], [], []
    for _ in range(spec.num_layers):
        keys.append([normal(c, *kv_shape, source=g) for (_, c), g in zip(rows, sources, strict=True)])
        values.append([normal(c, *kv_shape, source=g) for (_, c), g in zip(rows, sources, strict=True)])
        queries.append(torch.cat([normal(n, *q_shape, source=g) for (n, _), g in zip(rows, sources, strict=True)]))
    tables, slots = [], []
    for group in layout.groups:
        table = torch.full((len(rows), width), -1, dtype=torch.int32)
        group_slots = []
        for b, (new, context) in enumerate(rows):
            first_block = group.first_needed(context - new) // block_size
            for logical in range(first_block, layout.blocks_for(context)):
                table[b, logical] = free.pop()
            for position in range(first_block * block_size, context):
                block, offset = int(table[b, position // block_size]), position % block_size
                if position >= context - new:
                    group_slots.append(block * block_size + offset)
                    continue
                if position < group.first_needed(context - new):
                    continue  # behind the window in a block that is still held: stays NaN
                for place, layer in enumerate(group.layers):
                    kv[block, place, 0, :, offset] = keys[layer][b][position].to(dtype)
                    kv[block, place, 1, :, offset] = values[layer][b][position].to(dtype)
        tables.append(table)
        slots.append(torch.tensor(group_slots, dtype=torch.int64))
    starts = [0]
    for new, _ in rows:
        starts.append(starts[-1] + new)
    batch = AttentionBatch(
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([c for _, c in rows], dtype=torch.int32),
        block_tables=tables,
        slots=slots,
        max_query=max(n for n, _ in rows),
        max_context=max(c for _, c in rows),
    )
    return Paged(spec, layout, KVCache(kv, layout), list(rows), keys, values, queries, batch)


def dense_attention(case: Paged, layer: int) -> torch.Tensor:
    """float64 [T, Hq, d], one query at a time."""
    spec = case.spec
    window, per_kv = spec.windows[layer], spec.num_heads // spec.num_kv_heads
    out, token = [], 0
    for b, (new, context) in enumerate(case.rows):
        for position in range(context - new, context):
            low = 0 if window is None else max(0, position - window + 1)
            query = case.queries[layer][token].double()
            token += 1
            heads = []
            for head in range(spec.num_heads):
                key = case.keys[layer][b][low : position + 1, head // per_kv].double()
                value = case.values[layer][b][low : position + 1, head // per_kv].double()
                scores = key @ query[head] * spec.scale
                if spec.attention_softcap is not None:
                    scores = spec.attention_softcap * torch.tanh(scores / spec.attention_softcap)
                heads.append(torch.softmax(scores, 0) @ value)
            out.append(torch.stack(heads))
    return torch.stack(out)
