"""Shared by the native kernel tests: random paged batches, a dense float64 answer, a thread-count switch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.kernels.interface import AttentionBatch
from octavo.models.spec import ModelSpec, RotarySpec
from octavo.runner.kv_store import KVStore


def instruction_sets() -> list[str]:
    """What this build and processor offer, best first; [] when the kernels are not built."""
    from octavo.kernels.cpu.loader import native, problem

    return [] if problem() else list(native().instruction_sets())


@contextlib.contextmanager
def instructions(name: str) -> Iterator[None]:
    """Run on one instruction set."""
    from octavo.kernels.cpu.loader import native

    module, before = native(), native().in_use()
    module.use(name)
    try:
        yield
    finally:
        module.use(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Run with `count` OpenMP threads, which torch and the kernels share."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def small_spec(
    *, heads: int, kv_heads: int, head_dim: int, windows: Sequence[int | None], softcap: float | None = None
) -> ModelSpec:
    return ModelSpec(
        architecture="test",
        vocab_size=32,
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        windows=tuple(windows),
        rotaries=(RotarySpec(),),
        rotary=(0,) * len(windows),
        attention_softcap=softcap,
    )


@dataclass
class History:
    """All tokens of some sequences: per layer, query [n, Hq, d], key and value [n, Hkv, d] of each sequence."""

    spec: ModelSpec
    lengths: list[int]
    query: list[list[torch.Tensor]]  # [layer][sequence]
    key: list[list[torch.Tensor]]
    value: list[list[torch.Tensor]]


def random_history(spec: ModelSpec, lengths: Sequence[int], seed: int, dtype: torch.dtype) -> History:
    """Values are rounded to `dtype` so that storing them loses nothing."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> list[list[torch.Tensor]]:
        return [
            [torch.randn(n, heads, spec.head_dim, generator=generator).to(dtype).float() for n in lengths]
            for _ in range(spec.num_layers)
        ]

    return History(spec, list(lengths), draw(spec.num_heads), draw(spec.num_kv_heads), draw(spec.num_kv_heads))


def dense_answer(history: History, layer: int, sequence: int) -> torch.Tensor:
    """float64 attention of every token over what it may see: [n, Hq, d]."""
    spec = history.spec
    q, k, v = (x[layer][sequence].double() for x in (history.query, history.key, history.value))
    group = spec.num_heads // spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
    if spec.attention_softcap is not None:
        scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
    n = q.shape[0]
    position = torch.arange(n)
    hidden = position[None, :] > position[:, None]
    window = spec.windows[layer]
    if window is not None:
        hidden |= position[None, :] <= position[:, None] - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


class Paged:
    """A pool of shuffled blocks for a history's sequences, NaN wherever nothing was written (quantised: scales too).

    Blocks behind a window are -1 in the tables, as a scheduler that released them would leave them.
    """

    def __init__(
        self, history: History, block_size: int, dtype: torch.dtype, seed: int, kv_dtype: str = "auto"
    ) -> None:
        spec = history.spec
        self.history = history
        per_token = kv_bytes_per_token_layer(
            kv_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=dtype.itemsize
        )
        self.layout: KVLayout = build_layout(
            spec.windows, block_size=block_size, bytes_per_token_layer=per_token, kv_dtype=kv_dtype
        )
        counts = [self.layout.blocks_for(n) for n in history.lengths]
        needed = sum(counts) * self.layout.num_groups
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(needed + 3, generator=generator).tolist()
        self.cache = KVStore.allocate(self.layout, spec, needed + 3, dtype=dtype).cache
        self.cache.kv.fill_(255 if self.cache.kv.dtype == torch.uint8 else float("nan"))
        self.blocks = [[[order.pop() for _ in range(n)] for n in counts] for _ in range(self.layout.num_groups)]

    def batch(self, parts: Sequence[tuple[int, int, int]]) -> AttentionBatch:
        """parts: (sequence, first new position, one past the last) per row."""
        size = self.layout.block_size
        width = max(self.layout.blocks_for(end) for _, _, end in parts) + 1
        tables, slots = [], []
        for group_index, group in enumerate(self.layout.groups):
            table = torch.full((len(parts), width), -1, dtype=torch.int32)
            slot: list[int] = []
            for row, (sequence, first, end) in enumerate(parts):
                blocks = self.blocks[group_index][sequence]
                for logical in range(group.first_needed(first) // size, self.layout.blocks_for(end)):
                    table[row, logical] = blocks[logical]
                slot += [blocks[p // size] * size + p % size for p in range(first, end)]
            tables.append(table)
            slots.append(torch.tensor(slot, dtype=torch.int64))
        starts = [0]
        for _, first, end in parts:
            starts.append(starts[-1] + end - first)
        return AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            block_tables=tables,
            slots=slots,
            max_query=max(end - first for _, first, end in parts),
            max_context=max(end for _, _, end in parts),
        )

    def joined(self, of: list[list[torch.Tensor]], layer: int, parts: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([of[layer][sequence][first:end] for sequence, first, end in parts])
