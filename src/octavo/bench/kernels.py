"""`octavo bench kernels`: the native attention and products alone, against torch on the same data.

Products: `ops.linear` against `torch.nn.functional.linear`. Attention: the paged kernel over shuffled blocks against
the same kernel over blocks in order (what addressing costs) and `scaled_dot_product_attention` over contiguous keys.
The contenders take turns and each keeps its best time, so a busy neighbour disturbs all of them alike. No model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.bench.clock import add_clock_options, settle_clock
from octavo.bench.report import Column, Report, Table, add_report_options, bar, fixed, machine_facts, publish
from octavo.bench.report import times as ratio
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec

DESCRIPTION = """\
Time the native kernels and torch's on the same data: milliseconds, GB/s of weights or keys and values, GFLOP/s.

examples:
  octavo bench kernels
  octavo bench kernels --threads 1 --cpu-time      on a busy machine: time on the processor, not on the clock
  octavo bench kernels --only attention --seconds 1
"""
# rows, inputs, outputs: Gemma 3 270M's products and head, then Qwen2.5 1.5B's gate/up
PRODUCTS = (
    (1, 640, 262144),
    (4, 640, 262144),
    (64, 640, 262144),
    (1, 640, 2048),
    (1, 2048, 640),
    (8, 640, 2048),
    (16, 640, 2048),
    (64, 640, 2048),
    (512, 640, 2048),
    (512, 2048, 640),
    (1, 1536, 17920),
    (64, 1536, 17920),
    (512, 1536, 8960),
)


@dataclass(frozen=True)
class Shape:
    """rows sequences of `context` tokens, the last `new` of them queries."""

    rows: int
    context: int
    new: int
    heads: int
    kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        what = "decode" if self.new == 1 else f"{self.new} new"
        return f"{self.rows} x {self.context:,}, {what}, {self.heads}/{self.kv_heads} heads of {self.head_dim}"

    @property
    def operations(self) -> float:
        seen = self.context - (self.new - 1) / 2
        return 4.0 * self.rows * self.heads * self.head_dim * self.new * seen


ATTENTION = (
    Shape(1, 4096, 1, 4, 1, 256),
    Shape(16, 1024, 1, 4, 1, 256),
    Shape(64, 1024, 1, 4, 1, 256),
    Shape(16, 2048, 1, 12, 2, 128),
    Shape(16, 1024, 1, 32, 8, 128),
    Shape(1, 1024, 1024, 4, 1, 256),
    Shape(1, 2048, 512, 12, 2, 128),
    Shape(1, 1024, 512, 14, 2, 64),
)
PRODUCT_COLUMNS = (
    Column("shape", "rows x in x out"),
    Column("dtype", "weights"),
    Column("native_ms", "native, ms", fixed(3)),
    Column("native_gbs", "GB/s", fixed(1)),
    Column("native_gflops", "GFLOP/s", fixed(1)),
    Column("torch_ms", "torch, ms", fixed(3)),
    Column("torch_gflops", "GFLOP/s", fixed(1)),
    Column("speedup", "torch / native", ratio),
)
ATTENTION_COLUMNS = (
    Column("shape", "sequences x context"),
    Column("dtype", "KV"),
    Column("native_ms", "paged, ms", fixed(3)),
    Column("native_gbs", "GB/s", fixed(1)),
    Column("native_gflops", "GFLOP/s", fixed(1)),
    Column("addressing", "paged / in order", ratio),
    Column("torch_ms", "torch, ms", fixed(3)),
    Column("speedup", "torch / paged", ratio),
)
DTYPES = ("float32", "bfloat16", "float16")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "kernels",
        help="the native kernels alone, against torch",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=("products", "attention"), help="one half")
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="of weights and KV (float32 and bfloat16)")
    add_clock_options(parser, seconds=0.3)
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from octavo.kernels import cpu

    clock = settle_clock(args)
    if cpu.why_unavailable():
        raise ConfigError(cpu.why_unavailable())
    report = Report("kernels", machine_facts())
    cases: list[tuple[str, Callable[[], dict[str, Any]]]] = []
    for dtype in args.dtype or ["float32", "bfloat16"]:
        if args.only != "attention":
            cases += [("products", partial(_product, shape, dtype, args.seconds, clock)) for shape in PRODUCTS]
        if args.only != "products":
            cases += [("attention", partial(_attention, shape, dtype, args.seconds, clock)) for shape in ATTENTION]
    rows: dict[str, list[dict[str, Any]]] = {"products": [], "attention": []}
    with bar(len(cases), "kernels") as tick, torch.inference_mode():
        for kind, measure in cases:
            rows[kind].append(measure())
            tick(rows[kind][-1]["shape"])
    columns = {"products": PRODUCT_COLUMNS, "attention": ATTENTION_COLUMNS}
    report.tables += [Table(kind, columns[kind], lines) for kind, lines in rows.items() if lines]
    report.notes += [
        f"{torch.get_num_threads()} threads, {cpu.instruction_set()} kernels, activations float32, blocks of 16, "
        f"{'processor' if args.cpu_time else 'wall'} time, best of {args.seconds:g} s each, taking turns",
        "GB/s: bytes of weights, or of the keys and values in view, over time; what fits the caches exceeds memory",
        "torch multiplies and attends in the weights' or KV's dtype, over contiguous memory",
    ]
    return publish(report, args)


def best_times(contenders: Sequence[Callable[[], Any]], seconds: float, clock: Callable[[], float]) -> list[float]:
    """Best time of each, in seconds; they take turns until `seconds` have passed for each, at least three times."""
    best = [float("inf")] * len(contenders)
    end = time.perf_counter() + seconds * len(contenders)
    turns = 0
    while turns < 3 or time.perf_counter() < end:
        for index, contender in enumerate(contenders):
            start = clock()
            contender()
            best[index] = min(best[index], clock() - start)
        turns += 1
    return best


def _product(
    shape: tuple[int, int, int], dtype_name: str, seconds: float, clock: Callable[[], float]
) -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    from octavo.kernels import cpu

    rows, inputs, outputs = shape
    dtype: torch.dtype = getattr(torch, dtype_name)
    weight = torch.randn(outputs, inputs).to(dtype)
    linear = cpu.NativeOps(dtype).linear(weight)
    x = torch.randn(rows, inputs)
    same = x.to(dtype)
    native, peer = best_times([lambda: linear(x), lambda: F.linear(same, weight)], seconds, clock)
    work = 2.0 * rows * inputs * outputs
    return {
        "shape": f"{rows} x {inputs} x {outputs:,}",
        "dtype": dtype_name,
        "native_ms": native * 1e3,
        "native_gbs": linear.nbytes / native / 1e9,
        "native_gflops": work / native / 1e9,
        "torch_ms": peer * 1e3,
        "torch_gflops": work / peer / 1e9,
        "speedup": peer / native,
    }


def _attention(shape: Shape, dtype_name: str, seconds: float, clock: Callable[[], float]) -> dict[str, Any]:
    import torch
    from torch.nn import functional as F

    from octavo.kernels import cpu
    from octavo.runner.memory import advise_huge_pages

    dtype: torch.dtype = getattr(torch, dtype_name)
    blocks = shape.rows * -(-shape.context // _BLOCK)
    kv = torch.empty(blocks, 1, 2, shape.kv_heads, _BLOCK, shape.head_dim, dtype=dtype)
    advise_huge_pages(kv)
    kv.normal_()
    query = torch.randn(shape.rows * shape.new, shape.heads, shape.head_dim)
    shuffled = planned_backend(cpu, kv, shape, torch.randperm(blocks))
    in_order = planned_backend(cpu, kv, shape, torch.arange(blocks))
    key, value = torch.randn(2, shape.rows, shape.kv_heads, shape.context, shape.head_dim).to(dtype)
    q = torch.randn(shape.rows, shape.heads, shape.new, shape.head_dim).to(dtype)
    mask = torch.ones(shape.new, shape.context, dtype=torch.bool).tril(shape.context - shape.new)

    def peer() -> Any:
        return F.scaled_dot_product_attention(
            q, key, value, attn_mask=mask if shape.new > 1 else None, enable_gqa=shape.heads != shape.kv_heads
        )

    paged, straight, torch_time = best_times(
        [lambda: shuffled.attend(0, query), lambda: in_order.attend(0, query), peer], seconds, clock
    )
    return {
        "shape": str(shape),
        "dtype": dtype_name,
        "native_ms": paged * 1e3,
        "native_gbs": kv.numel() * kv.element_size() / paged / 1e9,
        "native_gflops": shape.operations / paged / 1e9,
        "addressing": paged / straight,
        "torch_ms": torch_time * 1e3,
        "speedup": torch_time / paged,
    }


_BLOCK = 16


def attention_spec(shape: Shape, layers: int = 1) -> ModelSpec:
    """A model of nothing but `layers` times the attention of `shape`."""
    from octavo.models.spec import ModelSpec, RotarySpec

    return ModelSpec(
        architecture="bench", vocab_size=1, hidden_size=shape.heads * shape.head_dim, intermediate_size=1,
        num_layers=layers, num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=shape.context, rms_norm_eps=1e-6, windows=(None,) * layers,
        rotaries=(RotarySpec(),), rotary=(0,) * layers,
    )  # fmt: skip


def planned_backend(cpu: Any, kv: Any, shape: Shape, order: Any) -> Any:
    """A planned backend whose rows own the pool's blocks in the given order. kv: one layer, see `KVCache`."""
    import torch

    from octavo.core.kv_layout import build_layout
    from octavo.kernels.interface import AttentionBatch, KVCache

    spec = attention_spec(shape)
    per_token = spec.kv_values_per_token_layer() * kv.element_size()
    layout = build_layout(spec.windows, block_size=kv.shape[4], bytes_per_token_layer=per_token)
    backend = cpu.NativeAttention(KVCache(kv, layout), spec)
    tokens = shape.rows * shape.new
    backend.plan(
        AttentionBatch(
            query_start=torch.arange(shape.rows + 1, dtype=torch.int32) * shape.new,
            context_len=torch.full((shape.rows,), shape.context, dtype=torch.int32),
            block_tables=[order.to(torch.int32).view(shape.rows, -1)],
            slots=[torch.zeros(tokens, dtype=torch.int64)],
            max_query=shape.new,
            max_context=shape.context,
        )
    )
    return backend
