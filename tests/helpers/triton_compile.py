"""Compile Triton kernels for GPUs that need not be there; a program of its own, because it must not interpret them.

python triton_compile.py few | all: prints one line per kernel, with its shared memory, and ends with "fine". A kernel
that does not compile, or needs more shared memory than the device has, ends it with an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.triton.jit import adjust, attend, dense, sample, write
from octavo.kernels.triton.jit.rows import FLOAT, FP8, INT4, INT8
from octavo.kernels.triton.tuning import next_power_of_two, pick_tiles

SHARED = {80: 163, 86: 99, 89: 99, 90: 227}  # KiB that one program may have
FLOATS = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
_SHARED_POINTERS = {
    "query_start": "*i32", "context_len": "*i32", "tables": "*i32", "parts": "*fp32", "marks": "*fp32", "cos": "*fp32",
    "sin": "*fp32", "q_norm": "*fp32", "k_norm": "*fp32", "slots": "*i64", "weight": "*fp32", "pairs": "*i64",
    "logits": "*fp32", "maxima": "*fp32", "sums": "*fp32", "temperatures": "*fp32", "top_ks": "*i32", "top_ps": "*fp32",
    "min_ps": "*fp32", "uniforms": "*fp64", "tokens": "*i64", "largest": "*fp32", "ids": "*i32", "values": "*fp32",
    "chosen": "*i32", "counts": "*fp32", "sizes": "*i32", "repetitions": "*fp32", "frequencies": "*fp32",
    "presences": "*fp32", "rows": "*i64", "seeds": "*i64", "samples": "*i64", "positions": "*i64", "ranks": "*i32",
    "out_ids": "*i64", "out_values": "*fp32", "scale": "fp32", "cap": "fp32", "eps": "fp32",
}  # fmt: skip


def build(kernel: Any, device: int, types: dict[str, str], warps: int, stages: int, **constants: Any) -> int:
    """Compile one variant; bytes of shared memory. Numbers that are no constants are int32, pointers aligned."""
    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    known = {**_SHARED_POINTERS, **types}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in names}
    aligned = [name for name in names if signature[name][0] == "*" or name.endswith(("stride", "slab", "first"))]
    compiled = triton.compile(
        ASTSource(
            kernel,
            signature,
            {(names.index(name),): value for name, value in constants.items()},
            {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
        ),
        target=GPUTarget("cuda", device, 32),
        options={"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True},
    )
    return int(compiled.metadata.shared)


def attention(
    device: int,
    dtype: str,
    head_dim: int,
    kinds: tuple[int, int] = (FLOAT, FLOAT),
    windowed: bool = False,
    group: int = 4,
) -> Iterator[tuple[str, int]]:
    """Both attention kernels with the tiles of the table."""
    tiles = pick_tiles(head_dim, 4 if dtype == "fp32" else 2, divmod(device, 10), 132)
    pool = dtype if kinds == (FLOAT, FLOAT) else "u8"
    types = {"query": f"*{dtype}", "out": f"*{dtype}", "kv": f"*{pool}", "rows": "i32"}
    common = {
        "KV_HEADS": 8, "GROUP": group, "QUERIES": 1, "SKIP": 1, "KEY_KIND": kinds[0], "VALUE_KIND": kinds[1],
        "WINDOWED": windowed, "CAPPED": windowed, "BLOCK_SIZE": 16, "HEAD_DIM": head_dim,
        "D": next_power_of_two(head_dim), "DOT": FLOATS[dtype], "VALUE_DOT": FLOATS[dtype],
        "PRECISION": "ieee" if dtype == "fp32" else "tf32",
    }  # fmt: skip
    for kernel, tile in ((attend.split_kernel, tiles.split), (attend.tile_kernel, tiles.tile)):
        shared = build(
            kernel, device, types, tile.warps, tile.stages, M=max(16, tile.rows), BLOCK_N=tile.keys, **common
        )  # fmt: skip
        yield f"{kernel.__name__} {dtype} head_dim={head_dim} kinds={kinds} on {device}", shared


def writes(device: int, dtype: str, kinds: tuple[int, int], **more: Any) -> tuple[str, int]:
    pool = dtype if kinds == (FLOAT, FLOAT) else "u8"
    types = dict.fromkeys(("query", "key", "value", "query_out", "key_out"), f"*{dtype}") | {"kv": f"*{pool}"}
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "ROTARY": 128, "NORMED": True, "STORED": True, "KEY_KIND": kinds[0],
        "VALUE_KIND": kinds[1], "BLOCK_SIZE": 16, "HEAD_DIM": 128, "D": 128, "H": 8, **more,
    }  # fmt: skip
    return f"write_kernel {dtype} {kinds} {more}", build(write.write_kernel, device, types, 4, 3, **constants)


def rest(device: int) -> Iterator[tuple[str, int]]:
    """Everything else, once."""
    bf16 = dict.fromkeys(("x", "residual", "total", "out", "gate_up"), "*bf16")
    sizes = {"TURN": 4, "NB": 512, "TILE": 1024, "RANDOM": True, "LISTED": 5}
    yield "norm", build(dense.norm_kernel, device, bf16, 8, 3, WIDTH=4096, D=4096, ADDED=True)
    for kind in range(4):
        yield f"gate {kind}", build(dense.gate_kernel, device, bf16, 4, 3, INNER=14336, KIND=kind, BLOCK=1024)
    yield "copy", build(dense.copy_kernel, device, {"kv": "*i64"}, 4, 3, WORDS=2048)
    merge = {"HEADS": 32, "QUERIES": 1, "S": 8, "WINDOWED": True, "HEAD_DIM": 128, "D": 128, "BLOCK_N": 64}
    yield "merge", build(attend.merge_kernel, device, {"out": "*bf16"}, 2, 3, **merge)
    for kernel in (sample.scan_kernel, sample.sums_kernel, sample.pick_kernel, sample.filter_kernel):
        yield kernel.__name__, build(kernel, device, {}, 4, 3, **sizes)
    for kernel in (adjust.penalise_kernel, adjust.count_kernel, adjust.rank_kernel, adjust.list_kernel):
        yield kernel.__name__, build(kernel, device, {}, 4, 3, **sizes)
    yield "copy_rows", build(adjust.copy_rows_kernel, device, {"out": "*fp32"}, 4, 3, **sizes)
    yield "edit", build(adjust.edit_kernel, device, {"ids": "*i64", "count": "i32"}, 4, 3, **sizes)
    yield "uniform", build(adjust.uniform_kernel, device, {"out": "*fp64", "count": "i32"}, 4, 3, **sizes)


def few() -> Iterator[tuple[str, int, int]]:
    """What decides: decode and prompts in bfloat16 on Hopper, a quantised write, filters."""
    yield from ((name, shared, 90) for name, shared in attention(90, "bf16", 128))
    yield (*writes(90, "bf16", (INT8, INT8)), 90)
    yield "filter", build(sample.filter_kernel, 90, {}, 4, 3, TURN=4, NB=512, TILE=1024), 90


def everything() -> Iterator[tuple[str, int, int]]:
    for device in SHARED:
        for dtype in ("bf16", "fp32"):
            for head_dim in (64, 128, 256):
                yield from ((n, s, device) for n, s in attention(device, dtype, head_dim, windowed=head_dim == 64))
    for kinds in ((INT8, INT8), (FP8, FP8), (INT4, INT4), (INT8, INT4)):
        yield from ((n, s, 90) for n, s in attention(90, "bf16", 128, kinds))
        yield (*writes(90, "fp16", kinds), 90)
    yield from ((n, s, 90) for n, s in attention(90, "fp16", 80, group=7))
    yield (*writes(90, "bf16", (FLOAT, FLOAT)), 90)
    yield (*writes(90, "bf16", (FLOAT, FLOAT), STORED=False), 90)
    yield (*writes(90, "bf16", (FLOAT, FLOAT), HEADS=0, ROTARY=0, NORMED=False), 90)
    yield from ((n, s, 90) for n, s in rest(90))


if __name__ == "__main__":
    for name, shared, device in few() if sys.argv[1:] == ["few"] else everything():
        print(f"{name}: {shared} bytes of shared memory", flush=True)
        assert shared <= SHARED[device] << 10, f"{name}: {device} has {SHARED[device]} KiB"
    print("fine")
