"""The kernel part of `octavo bench gpu`: Triton's kernels alone, against bandwidth and products of the same run.

Attention is timed over several layers of a pool larger than any cache, so every key and value comes from memory. What
paging costs is the time over shuffled blocks against the same kernel over contiguous keys and values: a pool whose one
block per row holds its whole context, so that the table says nothing. Runs are recorded as graphs where the device has
them: the host's launches are no part of a kernel's time.

On a CPU (small=True) everything runs once, tiny, in Triton's interpreter, which shows that it works and is no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.bench import kernels
from octavo.bench.report import Column, Table, fixed, percent
from octavo.bench.report import times as ratio

if TYPE_CHECKING:
    import torch

    from octavo.devices import Device
    from octavo.kernels.triton import TritonAttention
    from octavo.kernels.triton.tuning import Tiles

Once = Callable[[str, Callable[[], dict[str, Any]]], dict[str, Any]]
BLOCK_SIZES = (8, 16, 32, 64, 128)
POOL_BYTES = 2 << 30  # several times what caches hold
SECONDS = 0.3  # of repetitions


@dataclass(frozen=True)
class Shape(kernels.Shape):
    """One case of attention, with the bytes it reads."""

    def layer_bytes(self, itemsize: int) -> int:
        """Keys and values of all rows in one layer."""
        return 2 * self.rows * self.context * self.kv_heads * self.head_dim * itemsize


# Llama 3.1 8B, Qwen3 0.6B, Llama 2 7B, Gemma 3
DECODE = (
    Shape(1, 1024, 1, 32, 8, 128),
    Shape(1, 8192, 1, 32, 8, 128),
    Shape(16, 2048, 1, 32, 8, 128),
    Shape(64, 1024, 1, 32, 8, 128),
    Shape(256, 1024, 1, 32, 8, 128),
    Shape(16, 2048, 1, 16, 8, 128),
    Shape(64, 1024, 1, 32, 32, 128),
    Shape(64, 1024, 1, 4, 1, 256),
)
PROMPTS = (
    Shape(1, 8192, 8192, 32, 8, 128),
    Shape(8, 2048, 2048, 32, 8, 128),
    Shape(1, 8192, 1024, 32, 8, 128),
    Shape(16, 4160, 64, 32, 8, 128),
    Shape(16, 2048, 5, 32, 8, 128),
)
TINY_DECODE = (Shape(2, 48, 1, 4, 2, 16),)
TINY_PROMPTS = (Shape(1, 24, 24, 4, 2, 16),)


def tables(once: Once, device: str = "cuda", small: bool = False) -> list[Table]:
    """All tables; every row goes through `once(key, measure)`. Raises ConfigError where there is no such device."""
    import torch

    from octavo.devices import find_device

    where = find_device(device)
    with torch.inference_mode():
        peak = once("kernels/peak", lambda: _peak(where, small))
        return [
            _decode_table(once, where, peak, small),
            _prompt_table(once, where, peak, small),
            _block_size_table(once, where, small),
            _tiles_table(once, where, small),
            _small_table(once, where, peak, small),
        ]


def seconds_of(device: Device, run: Callable[[], object]) -> float:
    """Seconds of one `run`, from as many as fill SECONDS; recorded as a graph where the device has graphs."""
    run()  # compiles
    device.synchronize()
    if not device.has_graphs:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    graph = device.capture(run)
    for _ in range(3):
        graph.replay()
    device.synchronize()
    best, count, end = float("inf"), 1, time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(count):
            graph.replay()
        device.synchronize()
        spent = time.perf_counter() - start
        best = min(best, spent / count)
        count = max(count, min(1000, int(0.02 / best)))  # one wait per 20 ms
    return best


def _peak(device: Device, small: bool) -> dict[str, Any]:
    """What a copy and a product of bfloat16 reach in the same run: bytes and operations per second."""
    import torch

    size, side = (1 << 16, 64) if small else (1 << 30, 8192)
    x = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    y = torch.empty_like(x)
    a = torch.randn(side, side, dtype=torch.bfloat16, device=device.torch)
    return {
        "bytes_per_s": 2 * size / seconds_of(device, lambda: y.copy_(x)),
        "flops": 2 * side**3 / seconds_of(device, lambda: a @ a),
    }


# -- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A planned backend over `layers` layers and queries for it."""

    backend: TritonAttention
    query: torch.Tensor
    layers: int

    def attend(self) -> None:
        for layer in range(self.layers):
            self.backend.attend(layer, self.query)


def _case(
    device: Device, shape: Shape, block_size: int, small: bool, shuffled: bool = True, tiles: Tiles | None = None
) -> _Case:
    """A pool of random numbers whose blocks belong to the rows in random order (or in theirs)."""
    import torch

    from octavo.core.kv_layout import build_layout
    from octavo.kernels.interface import AttentionBatch, KVCache
    from octavo.kernels.triton import TritonAttention

    dtype = torch.float32 if small else torch.bfloat16
    layers = 1 if small else max(1, min(32, POOL_BYTES // shape.layer_bytes(dtype.itemsize)))
    spec = kernels.attention_spec(shape, layers)
    layout = build_layout(spec.windows, block_size=block_size, bytes_per_token_layer=1)
    per_row = layout.blocks_for(shape.context)
    blocks = shape.rows * per_row
    kv = torch.empty(
        blocks, layers, 2, shape.kv_heads, block_size, shape.head_dim, dtype=dtype, device=device.torch
    ).normal_()
    order = torch.randperm(blocks) if shuffled else torch.arange(blocks)
    tokens = shape.rows * shape.new
    backend = TritonAttention(KVCache(kv, layout), spec, tiles=tiles)
    backend.plan(
        AttentionBatch(
            query_start=(torch.arange(shape.rows + 1, dtype=torch.int32) * shape.new).to(device.torch),
            context_len=torch.full((shape.rows,), shape.context, dtype=torch.int32, device=device.torch),
            block_tables=[order.to(device.torch, torch.int32).view(shape.rows, per_row)],
            slots=[torch.zeros(tokens, dtype=torch.int64, device=device.torch)],
            max_query=shape.new,
            max_context=shape.context,
        )
    )
    query = torch.randn(tokens, shape.heads, shape.head_dim, dtype=dtype, device=device.torch)
    return _Case(backend, query, layers)


def _attention_seconds(device: Device, shape: Shape, block_size: int, small: bool, shuffled: bool = True) -> float:
    """Of one layer."""
    case = _case(device, shape, block_size, small, shuffled)
    return seconds_of(device, case.attend) / case.layers


def _decode_table(once: Once, device: Device, peak: dict[str, Any], small: bool) -> Table:
    def measure(shape: Shape) -> dict[str, Any]:
        paged = _attention_seconds(device, shape, 16, small)
        # One block per row: the table has nothing to say, keys and values lie one after the other.
        whole = _attention_seconds(device, shape, shape.context, small, shuffled=False)
        return {"seconds": paged, "contiguous_seconds": whole}

    rows = []
    for shape in TINY_DECODE if small else DECODE:
        found = once(f"kernels/decode/{shape}", lambda shape=shape: measure(shape))  # type: ignore[misc]
        rate = shape.layer_bytes(4 if small else 2) / found["seconds"]
        rows.append(
            {
                "shape": str(shape),
                "us": found["seconds"] * 1e6,
                "gbs": rate / 1e9,
                "share": rate / peak["bytes_per_s"],
                "addressing": found["seconds"] / found["contiguous_seconds"],
            }
        )
    columns = [
        Column("shape", "sequences x context"), Column("us", "µs per layer", fixed(1)), Column("gbs", "GB/s", fixed(0)),
        Column("share", "of a copy's rate", percent), Column("addressing", "paged / contiguous", ratio),
    ]  # fmt: skip
    return Table("Kernels: decode attention, blocks of 16", columns, rows)


def _prompt_table(once: Once, device: Device, peak: dict[str, Any], small: bool) -> Table:
    rows = []
    for shape in TINY_PROMPTS if small else PROMPTS:
        found = once(
            f"kernels/prompt/{shape}",
            lambda shape=shape: {"seconds": _attention_seconds(device, shape, 16, small)},  # type: ignore[misc]
        )
        rate = shape.operations / found["seconds"]
        rows.append(
            {"shape": str(shape), "us": found["seconds"] * 1e6, "tflops": rate / 1e12, "share": rate / peak["flops"]}
        )
    columns = [
        Column("shape", "sequences x context"), Column("us", "µs per layer", fixed(1)),
        Column("tflops", "TFLOP/s", fixed(1)), Column("share", "of a product's rate", percent),
    ]  # fmt: skip
    return Table("Kernels: prompt and verification attention, blocks of 16", columns, rows)


def _block_size_table(once: Once, device: Device, small: bool) -> Table:
    shapes = (*TINY_DECODE, *TINY_PROMPTS) if small else (DECODE[3], DECODE[4], PROMPTS[0])
    sizes = BLOCK_SIZES[:1] if small else BLOCK_SIZES
    rows = []
    for shape in shapes:
        row: dict[str, Any] = {"shape": str(shape)}
        for size in sizes:
            found = once(
                f"kernels/blocks/{size}/{shape}",
                lambda size=size, shape=shape: {"seconds": _attention_seconds(device, shape, size, small)},  # type: ignore[misc]
            )
            row[f"us_{size}"] = found["seconds"] * 1e6
        rows.append(row)
    columns = [Column("shape", "µs per layer by block size"), *(Column(f"us_{s}", str(s), fixed(1)) for s in sizes)]
    return Table("Kernels: block size", columns, rows)


def _tiles_table(once: Once, device: Device, small: bool) -> Table:
    """Other tiles than those of `kernels/triton/tuning.py`, so that its table can be mended where one is faster."""
    rows = []
    shapes = (*TINY_DECODE, *TINY_PROMPTS) if small else (DECODE[1], DECODE[4], DECODE[7], PROMPTS[0], PROMPTS[3])
    for shape in shapes:
        for name, tiles in _other_tiles(shape, small).items():
            found = once(
                f"kernels/tiles/{name}/{shape}",
                lambda shape=shape, tiles=tiles: _tile_seconds(device, shape, tiles, small),  # type: ignore[misc]
            )
            rows.append({"shape": str(shape), "tiles": name, **found})
    columns = [
        Column("shape", "sequences x context"), Column("tiles", "rows x keys, warps, stages"),
        Column("us", "µs per layer", fixed(1)),
    ]  # fmt: skip
    return Table("Kernels: tiles (the first of each shape is the table's)", columns, rows)


def _other_tiles(shape: Shape, small: bool) -> dict[str, Tiles]:
    """Name -> tiles; the table's own first."""
    from octavo.kernels.triton.runtime import capability, processors
    from octavo.kernels.triton.tuning import Tile, pick_tiles

    own = pick_tiles(shape.head_dim, 4 if small else 2, capability(), processors())
    decode = shape.new == 1
    current = own.split if decode else own.tile
    found = [current]
    for keys in (current.keys // 2, current.keys, 2 * current.keys):
        for warps in (4, 8):
            for stages in (3, 5) if decode else (2, 3):
                found.append(Tile(current.rows, keys, warps, stages))
    if not decode:
        found.append(Tile(current.rows // 2, current.keys, 4, current.stages))
    if small:
        del found[1:]
    named = {f"{t.rows or 'heads'} x {t.keys}, {t.warps}, {t.stages}": t for t in found}
    return {name: replace(own, split=t) if decode else replace(own, tile=t) for name, t in named.items()}


def _tile_seconds(device: Device, shape: Shape, tiles: Tiles, small: bool) -> dict[str, Any]:
    """{"us": of one layer}, or None where the tiles do not fit the device."""
    case = _case(device, shape, 16, small, tiles=tiles)
    try:
        return {"us": seconds_of(device, case.attend) / case.layers * 1e6}
    except Exception as error:
        # The compiler's own class, which cannot be named without importing it: too much shared memory.
        if type(error).__name__ != "OutOfResources":
            raise
        return {"us": None}


# -- the rest --------------------------------------------------------------------------------------------------------


def _small_table(once: Once, device: Device, peak: dict[str, Any], small: bool) -> Table:
    rows = []
    for tokens in (2,) if small else (1, 64, 256, 8192):
        for name, measure in _operations(device, tokens, small).items():
            found = once(f"kernels/{name}/{tokens}", measure)
            rate = found["bytes"] / found["seconds"]
            rows.append(
                {
                    "name": name,
                    "tokens": tokens,
                    "us": found["seconds"] * 1e6,
                    "gbs": rate / 1e9,
                    "share": rate / peak["bytes_per_s"],
                }
            )
    columns = [
        Column("name", "kernel"), Column("tokens", "tokens"), Column("us", "µs", fixed(1)),
        Column("gbs", "GB/s", fixed(0)), Column("share", "of a copy's rate", percent),
    ]  # fmt: skip
    return Table("Kernels: between the products (Llama 3.1 8B's sizes)", columns, rows)


def _operations(device: Device, tokens: int, small: bool) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> measurement. Bytes: what has to be read and written, once."""
    import torch

    from octavo.kernels.triton import TritonOps, sampling

    ops, dtype = TritonOps(), torch.float32 if small else torch.bfloat16
    hidden, inner, words = (64, 96, 600) if small else (4096, 14336, 128256)
    shape = Shape(tokens, 16, 1, 4, 2, 16) if small else Shape(tokens, 1024, 1, 32, 8, 128)

    def normal(*size: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*size, dtype=kind, device=device.torch)

    def timed(run: Callable[[], object], numbers: float, itemsize: int = dtype.itemsize) -> dict[str, Any]:
        return {"seconds": seconds_of(device, run), "bytes": numbers * itemsize}

    def norm() -> dict[str, Any]:
        x, residual, weight = normal(tokens, hidden), normal(tokens, hidden), normal(hidden, kind=torch.float32)
        return timed(lambda: ops.add_rms_norm(x, residual, weight, 1e-6), 4 * tokens * hidden)

    def gate() -> dict[str, Any]:
        x = normal(tokens, 2 * inner)
        return timed(lambda: ops.gated_activation(x, "silu"), 3 * tokens * inner)

    def rotate() -> dict[str, Any]:
        case = _case(device, replace(shape, rows=1, context=max(tokens, 16), new=tokens), 16, small=small)
        q, k = case.query, normal(tokens, shape.kv_heads, shape.head_dim)
        angles = normal(tokens, shape.head_dim, kind=torch.float32)
        run = case.backend.rotate_and_write
        numbers = 2 * tokens * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return timed(lambda: run(0, q, k, k, angles, angles, None, None, 1e-6), numbers)

    def draw() -> dict[str, Any]:
        logits = normal(tokens, words, kind=torch.float32)
        numbers = sampling.Numbers.same(tokens, temperature=0.8, top_k=40, top_p=0.95, device=device.torch)
        return timed(lambda: sampling.draw(logits, numbers, 2), tokens * words, 4)

    found = {"add and norm": norm, "gate": gate, "rotate and write": rotate}
    return found if tokens > 256 else {**found, "draw (top-k 40, top-p 0.95)": draw}
