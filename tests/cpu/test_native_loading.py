"""Weights unpacked straight into panels: the bits of the gguf package, any split into parts, memory given back."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.native_support import instruction_sets, instructions
from octavo.errors import ConfigError
from octavo.kernels import cpu
from octavo.kernels.ops import StoredRows
from octavo.models.gguf_types import TYPE_NAMES, byte_count, dequantize

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
TYPES = ["F32", "F16", "BF16", "Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
NUMBER = {name: number for number, name in TYPE_NAMES.items()}
#: bytes of a block that hold float16 scales
SCALES = {"Q4_0": [0], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of the processor."""
    with instructions(request.param):
        yield request.param


def stored_bytes(kind: str, shape: tuple[int, int], seed: int) -> np.ndarray:
    """Random content of a tensor, with scales that are ordinary numbers."""
    generator = np.random.default_rng(seed)
    size = byte_count(NUMBER[kind], shape)
    assert size is not None
    if kind in ("F32", "F16", "BF16"):
        values = torch.from_numpy(generator.standard_normal(shape).astype(np.float32))
        types = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        return values.to(types[kind]).view(torch.uint8).numpy().reshape(-1).copy()
    raw = generator.integers(0, 256, size, dtype=np.uint8)
    block = byte_count(NUMBER[kind], (1, 256 if kind.endswith("K") else 32))
    blocks = raw.reshape(-1, block)  # type: ignore[arg-type]
    for place in SCALES[kind]:
        scales = generator.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", TYPES)
def test_rows_have_the_bits_of_the_package(isa: str, kind: str, dtype: torch.dtype) -> None:
    ops = cpu.NativeOps(dtype)
    columns, counts = 512, (40, 7, 130)  # parts that begin and end inside panels
    raws = [stored_bytes(kind, (rows, columns), seed) for seed, rows in enumerate(counts)]
    queue = ops.load_queue()
    assert ops.can_load(NUMBER[kind], columns)
    maps = [mmap.mmap(-1, len(raw)) for raw in raws]  # shared: pages that are given back keep their content
    for held, raw in zip(maps, raws, strict=True):
        held.write(raw.tobytes())
    tensors = [dequantize(raw, NUMBER[kind], (rows, columns), dtype) for raw, rows in zip(raws, counts, strict=True)]
    views = [np.frombuffer(held, dtype=np.uint8) for held in maps]
    linear = ops.queued_linear(
        queue,
        [
            StoredRows(view.ctypes.data, NUMBER[kind], rows, columns, view)
            for view, rows in zip(views, counts, strict=True)
        ],
    )
    queue.run(True)
    assert queue.done == sum(len(raw) for raw in raws)
    got = linear.rows(torch.arange(sum(counts)), dtype)
    assert torch.equal(got, torch.cat(tensors))


def test_two_threads_empty_one_queue_and_tensors_mix_with_files(tmp_path: Path) -> None:
    ops, columns = cpu.NativeOps(torch.bfloat16), 256
    raw = stored_bytes("Q8_0", (5000, columns), 3)
    path = tmp_path / "weights"
    path.write_bytes(raw.tobytes())
    with path.open("rb") as stream:
        held = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(held, dtype=np.uint8)
    tensor = torch.randn(333, columns).to(torch.bfloat16)
    queue = ops.load_queue()
    bias = torch.randn(5333)
    linear = ops.queued_linear(queue, [tensor, StoredRows(view.ctypes.data, NUMBER["Q8_0"], 5000, columns, view)], bias)
    helper = threading.Thread(target=queue.run, args=(False,))
    helper.start()
    queue.run(True)
    helper.join()
    weight = torch.cat([tensor, dequantize(raw, NUMBER["Q8_0"], (5000, columns), torch.bfloat16)])
    assert torch.equal(linear.rows(torch.arange(5333), torch.bfloat16), weight)
    x = torch.randn(3, columns)
    assert torch.equal(linear(x), ops.linear(weight, bias)(x))
    assert view.tobytes() == raw.tobytes()  # pages that were given back come back from the file


def test_what_cannot_be_unpacked_is_said() -> None:
    ops = cpu.NativeOps(torch.float32)
    assert not ops.can_load(NUMBER["Q4_K"], 320)
    assert not ops.can_load(NUMBER["Q2_K"], 256)
    with pytest.raises(ValueError, match="rows of 320 numbers of type 12"):
        ops.queued_linear(ops.load_queue(), [StoredRows(0, NUMBER["Q4_K"], 4, 320, None)])
    with pytest.raises(ConfigError, match="bias of shape"):
        ops.queued_linear(ops.load_queue(), [torch.zeros(4, 8)], torch.zeros(5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 8), (16, 16), (48, 64), (40, 70), (33, 71), (150, 129), (5, 3)])
def test_rows_come_back_as_they_went_in(isa: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = shape
    wide = torch.randn(rows, columns + 5).to(dtype)
    for weight in (wide[:, :columns], wide[:, 5:].contiguous()):
        linear = cpu.NativeOps(dtype).linear(weight)
        ids = torch.randperm(rows)
        assert torch.equal(linear.rows(ids, dtype), weight[ids])
