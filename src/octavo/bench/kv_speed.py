"""The decode attention kernel over each format of the KV cache, all formats in turns in one process.

Layers are read in rotation, as many as keep their keys and values out of the caches: a decode step reads a layer's
once, and all other layers' and all weights before it comes back to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from octavo.bench.kernels import ATTENTION as KERNEL_SHAPES
from octavo.bench.kernels import Shape, attention_spec
from octavo.bench.kv_formats import FORMATS, Format
from octavo.bench.report import Column, Goal, Report, Table, bar, fixed, median
from octavo.bench.report import times as ratio

if TYPE_CHECKING:
    import torch


COLD_BYTES = 64 << 20  # of keys and values in rotation, at least: twice the last cache of most processors
GOAL_SPEED = 1.5
SPEED = (
    Column("shape", "sequences x context"),
    Column("layers", "layers", fixed(0)),
    *(Column(f.name, f"{f.name}, ms", fixed(3)) for f in FORMATS),
    Column("int8_ratio", "bf16 / int8", ratio),
    Column("int4_ratio", "bf16 / int4", ratio),
)
SHAPES = (
    Shape(1, 16384, 1, 4, 1, 256),
    Shape(16, 4096, 1, 4, 1, 256),
    *(s for s in KERNEL_SHAPES if s.new == 1 and s.head_dim == 128),
    Shape(16, 4096, 1, 8, 8, 64),
)


def add_speed(report: Report, seconds: float, clock: Callable[[], float], layers: int | None) -> None:
    """Add the table and its goal to the report. layers: in rotation; None: as many as come from memory."""
    import torch

    rows = []
    with bar(len(SHAPES), "attention") as tick, torch.inference_mode():
        for shape in SHAPES:
            query = torch.randn(shape.rows, shape.heads, shape.head_dim)
            count = layers or _cold_layers(shape)
            ready = [_ready(fmt, shape, count) for fmt in FORMATS]
            spent = _in_turns(ready, query, count, seconds, clock)
            row: dict[str, Any] = {name: 1e3 * min(times) for name, times in spent.items()}
            for name in ("int8", "int4"):
                # Of each turn, so that a neighbour's burst, which hits both, does not decide.
                pairs = zip(spent["bfloat16"], spent[name], strict=True)
                row[f"{name}_ratio"] = median([plain / quantised for plain, quantised in pairs])
            rows.append({"shape": str(shape), "layers": count, **row})
            tick(str(shape))
    report.tables.append(Table("attention of a decode step", SPEED, rows))
    longest = rows[0]["int8_ratio"]
    report.goals.append(Goal(f"int8 decode attention, {SHAPES[0]}, bf16 / int8", longest, GOAL_SPEED, at_least=True))


def _cold_layers(shape: Shape) -> int:
    """Layers whose keys and values together exceed `COLD_BYTES` in every format."""
    tokens = shape.rows * shape.context
    least = min(f.bytes_per_token_layer(attention_spec(shape)) for f in FORMATS) * tokens
    return -(-COLD_BYTES // least)


def _in_turns(
    ready: list[Any], query: torch.Tensor, layers: int, seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of every call, by format; at least three turns, until `seconds` have passed for each format."""
    spent: dict[str, list[float]] = {f.name: [] for f in FORMATS}
    end = time.perf_counter() + seconds * len(ready)
    while (turn := len(spent["int8"])) < 3 or time.perf_counter() < end:
        for times, backend in zip(spent.values(), ready, strict=True):
            start = clock()
            backend.attend(turn % layers, query)
            times.append(clock() - start)
    return spent


def _ready(fmt: Format, shape: Shape, layers: int) -> Any:
    """A backend over filled, shuffled blocks, planned for one decode step."""
    import torch

    from octavo.kernels import cpu
    from octavo.kernels.interface import AttentionBatch
    from octavo.runner.kv_store import KVStore

    assert shape.new == 1
    spec = attention_spec(shape, layers)
    layout = fmt.layout(spec)
    blocks = shape.rows * layout.blocks_for(shape.context)
    store = KVStore.allocate(layout, spec, blocks, dtype=getattr(torch, fmt.dtype))
    backend = cpu.NativeAttention(store.cache, spec)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(shape.rows, -1)

    def batch(new: int, slots: torch.Tensor, rows: torch.Tensor) -> AttentionBatch:
        return AttentionBatch(
            query_start=torch.arange(len(rows) + 1, dtype=torch.int32) * new,
            context_len=torch.full((len(rows),), shape.context, dtype=torch.int32),
            block_tables=[rows],
            slots=[slots],
            max_query=new,
            max_context=shape.context,
        )

    positions = torch.arange(shape.context)
    generator = torch.Generator().manual_seed(1)
    for row in table:
        slots = row.long()[positions // layout.block_size] * layout.block_size + positions % layout.block_size
        backend.plan(batch(shape.context, slots, row[None]))
        keys, values = torch.randn(2, shape.context, shape.kv_heads, shape.head_dim, generator=generator)
        for layer in range(layers):
            backend.write(layer, keys, values)
    backend.plan(batch(1, torch.zeros(shape.rows, dtype=torch.int64), table))
    return backend
