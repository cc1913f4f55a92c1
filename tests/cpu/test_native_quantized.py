"""Products over quantised panels: every format and instruction set against the definition; nothing left unwritten."""

from __future__ import annotations

import mmap
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from cpu.test_native_loading import NUMBER, stored_bytes
from cpu.test_quantized_weights import random_quantized, random_weight
from helpers.native_support import instruction_sets, instructions, threads
from helpers.rounded_inputs import rounded_inputs
from octavo.core.weight_format import WeightFormat, parse_weight_format
from octavo.errors import ConfigError
from octavo.kernels import cpu
from octavo.kernels.cpu.linear import NativeLinear
from octavo.kernels.ops import StoredRows
from octavo.kernels.quantized_weights import JoinedLinear, QuantizedWeight, quantize_rows
from octavo.models.gguf_types import dequantize

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
BLOCKS = ["Q4_0", "Q5_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
#: kind, zeros ("fine": sixteenths), float16 scales: each has panels of its own
FORMATS = [("int8", False, False), ("int8", False, True), ("int8", True, False),
           ("int4", False, False), ("int4", False, True), ("int4", True, False), ("int4", True, True),
           ("int4", "fine", True)]  # fmt: skip


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of the processor."""
    with instructions(request.param):
        yield request.param


def sample(
    kind: str, zeros: bool | str, halves: bool, rows: int, columns: int, group: int, seed: int
) -> QuantizedWeight:
    weight = random_quantized(kind, rows, columns, group, bool(zeros), seed)
    if zeros == "fine":
        assert weight.zeros is not None
        weight = replace(
            weight, zeros=weight.zeros + torch.arange(weight.zeros.numel()).view_as(weight.zeros) % 16 / 16
        )
    scales = weight.scales.half().float() if halves else weight.scales
    return QuantizedWeight(kind, weight.codes, scales, weight.zeros, weight.group_size)


def inputs(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, with outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator) * 10.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    x[:, int(torch.randint(0, columns, (1,), generator=generator))] *= 50
    return x


def close(
    found: torch.Tensor, x: torch.Tensor, values: torch.Tensor, bits: int | None, bias: torch.Tensor | None = None
) -> None:
    """The product with inputs rounded for weights of `bits` bits (None: left as they are), but for float32's rounding:
    of products with codes before zeros are taken off, which may be as large as the largest of 32 for each.
    """
    rounded = x.double() if bits is None else rounded_inputs(x, bits)
    exact = rounded @ values.double().T
    if bias is not None:
        exact = exact + bias
    units = F.pad(values.abs(), (0, -values.shape[1] % 32)).unflatten(1, (-1, 32))
    largest = units.amax(2, keepdim=True).expand_as(units).flatten(1)[:, : values.shape[1]]
    sizes = 2e-6 * values.abs().double() + 5e-7 * largest.double()
    bound = rounded.abs() @ sizes.T + 1e-6 * exact.abs()
    error = (found.double() - exact).abs()
    assert not found.isnan().any()
    assert bool((error <= bound).all()), float((error / bound).max())


def loaded_blocks(kind: str, columns: int, counts: Sequence[int], raws: Sequence[np.ndarray]) -> NativeLinear:
    """Parts of a file, `counts` rows each, in panels."""
    parts = []
    for raw, rows in zip(raws, counts, strict=True):
        area = mmap.mmap(-1, len(raw))
        area.write(raw.tobytes())
        address = np.frombuffer(area, dtype=np.uint8).ctypes.data
        parts.append(StoredRows(address, NUMBER[kind], rows, columns, area))
    ops = cpu.NativeOps(torch.bfloat16, WeightFormat("gguf"))
    queue = ops.load_queue()
    linear = ops.queued_linear(queue, parts)
    queue.run(True)
    queue.check()
    assert isinstance(linear, NativeLinear)
    return linear


@pytest.mark.parametrize(("kind", "zeros", "halves"), FORMATS)
def test_products_rows_and_the_largest(isa: str, kind: str, zeros: bool | str, halves: bool) -> None:
    """Ragged shapes: outputs that end inside a panel, inputs that end inside a unit or a group, one row and many."""
    generator = random.Random(f"{kind}{zeros}{halves}")
    shapes = [(1, 16, 32), (1, 70, 40), (3, 33, 300), (7, 90, 96), (50, 49, 130)]
    for m, n, k in shapes:
        group = generator.choice([32, 64, 128, k])
        weight = sample(kind, zeros, halves, n, k, group, seed=m)
        values = weight.dequantize()
        bias = torch.linspace(-3, 3, n)
        linear = cpu.NativeOps().quantized_linear([weight], bias)
        assert isinstance(linear, NativeLinear)
        x = inputs(m, k, m)
        close(linear(x), x, values, weight.bits, bias)
        assert torch.equal(linear.rows(torch.arange(n)), values)
        ids, best = linear.argmax(x)
        full = linear(x)
        assert torch.equal(ids, full.argmax(1)) and torch.equal(best, full.amax(1))
        with pytest.raises(IndexError):
            linear.rows(torch.tensor([n]))


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_of_a_file_keep_their_numbers_and_their_size(isa: str, kind: str) -> None:
    columns, counts = 512, (40, 7, 70)
    raws = [stored_bytes(kind, (rows, columns), seed) for seed, rows in enumerate(counts)]
    linear = loaded_blocks(kind, columns, counts, raws)
    values = torch.cat(
        [dequantize(raw, NUMBER[kind], (rows, columns), torch.float32) for raw, rows in zip(raws, counts, strict=True)]
    )
    assert torch.equal(linear.rows(torch.arange(sum(counts))), values)
    for m in (1, 6, 20):
        x = inputs(m, columns, m)
        close(linear(x), x, values, 8 if kind == "Q8_0" else 4)
    padded = -(-sum(counts) // 16) * 16 / sum(counts)
    assert linear.nbytes <= 1.03 * padded * sum(len(raw) for raw in raws)


#: Where the codes of a block lie; the rest are scales.
CODES = {"Q4_0": (2, 18), "Q5_0": (2, 22), "Q8_0": (2, 34), "Q4_K": (16, 144), "Q5_K": (16, 176), "Q6_K": (0, 192)}


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_largest_sums_fit(isa: str, kind: str) -> None:
    """Codes at both ends of their range, inputs at both ends of theirs, in every pattern that adds up."""
    columns, fills = 512, (0x00, 0xFF, 0x0F, 0xF0, 0x33, 0x80)
    raw = np.concatenate([stored_bytes(kind, (4, columns), 3) for _ in fills])
    blocks = raw.reshape(len(fills), -1, CODES[kind][1] + (18 if kind == "Q6_K" else 0))
    for fill, rows in zip(fills, blocks, strict=True):
        rows[:, slice(*CODES[kind])] = fill
    values = dequantize(raw, NUMBER[kind], (4 * len(fills), columns), torch.float32)
    linear = loaded_blocks(kind, columns, [4 * len(fills)], [raw])
    signs = [[1], [-1], [1, -1], [1, 1, -1, -1], [1, 1, 1, 1, -1, -1, -1, -1], [1] * 16 + [-1] * 16]
    x = torch.tensor([(row * columns)[:columns] for row in signs]).float() * 127
    for m in (1, len(signs)):
        close(linear(x[:m]), x[:m], values, 8 if kind == "Q8_0" else 4)
    found = torch.cat([linear(row[None]) for row in x])
    assert torch.equal(found, linear(x))


def test_parts_of_different_types_keep_them_side_by_side(isa: str) -> None:
    ops = cpu.NativeOps(torch.float32, WeightFormat("gguf"))
    queue = ops.load_queue()
    parts: list[StoredRows | torch.Tensor] = []
    values: list[torch.Tensor] = []
    for kind in ("Q4_K", "Q4_K", "Q6_K", "F16"):
        raw = stored_bytes(kind, (24, 256), len(parts))
        area = mmap.mmap(-1, len(raw))
        area.write(raw.tobytes())
        parts.append(StoredRows(np.frombuffer(area, dtype=np.uint8).ctypes.data, NUMBER[kind], 24, 256, area))
        values.append(dequantize(raw, NUMBER[kind], (24, 256), torch.float32))
    bias = torch.arange(96.0)
    linear = ops.queued_linear(queue, parts, bias)
    queue.run(True)
    assert isinstance(linear, JoinedLinear)
    x = inputs(3, 256, 1)
    found = linear(x)
    close(found[:, :72], x, torch.cat(values[:3]), 4, bias[:72])
    close(found[:, 72:], x, values[3], None, bias[72:])
    assert linear.nbytes < 24 * 256 * (4 * 2 + 4) * 1.1  # of it 24 x 256 floats


@pytest.mark.parametrize(
    ("text", "columns"), [("int8", 200), ("int8", 64), ("int4", 200), ("int4:64", 200), ("int4:128", 40)]
)
def test_quantising_at_load_is_the_definition(isa: str, text: str, columns: int) -> None:
    format = parse_weight_format(text)
    assert format is not None
    weight = random_weight(37, columns)
    weight[5], weight[6, 3] = 0, 100.0
    linear = cpu.NativeOps(torch.float32, format).linear(weight)
    expected = quantize_rows(weight, format.kind, format.group_size)
    found = linear.rows(torch.arange(37))  # type: ignore[attr-defined]
    assert torch.equal(found, expected.dequantize())
    x = inputs(4, columns, 3)
    close(linear(x), x, found, expected.bits)


def test_numbers_that_are_not_finite_stop_the_load(isa: str) -> None:
    weight = random_weight(20, 64)
    weight[19, 63] = float("nan")
    for text in ("int8", "int4"):
        with pytest.raises(ConfigError, match="not finite"):
            cpu.NativeOps(torch.float32, parse_weight_format(text)).linear(weight)


def test_a_row_has_the_same_bits_alone_among_others_and_on_any_threads(isa: str) -> None:
    for kind, zeros, halves in FORMATS:
        weight = sample(kind, zeros, halves, 83, 200, 64, seed=4)
        linear = cpu.NativeOps().quantized_linear([weight])
        x = inputs(101, 200, 5)
        together = linear(x)
        for rows in (1, 2, 5, 6, 13, 49):
            assert torch.equal(linear(x[:rows]), together[:rows])
        assert torch.equal(linear(x[60:61]), together[60:61])
        with threads(2):
            assert torch.equal(linear(x), together)


def test_tiles_and_vectors_give_the_same_bits() -> None:
    """Sums are exact and what follows takes the same steps; only portable code, which does not fuse, rounds twice."""
    x = inputs(37, 8 * 96, 8)
    linears = [cpu.NativeOps().quantized_linear([sample(*form, 70, 8 * 96, 96, seed=3)]) for form in FORMATS]
    linears += [cpu.NativeOps().quantized_linear([sample(*form, 70, 8 * 96, 8 * 96, seed=5)]) for form in FORMATS]
    for kind in BLOCKS:
        linears.append(loaded_blocks(kind, 8 * 96, [70], [stored_bytes(kind, (70, 8 * 96), 4)]))
    found: list[list[torch.Tensor]] = []
    for name in instruction_sets():
        if name == "portable":
            continue
        with instructions(name):
            found.append([linear(x[:rows]) for linear in linears for rows in (1, 5, 12, 37)])
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_outputs_are_written_whole_and_nothing_beside_them(isa: str) -> None:
    weight = sample("int4", True, True, 21, 96, 32, seed=6)
    linear = cpu.NativeOps().quantized_linear([weight])
    x = inputs(3, 96, 6)
    for m in (1, 3):
        out = torch.full((m + 2, 21), float("nan"))
        linear._packed.run(x.data_ptr(), 0, 96, m, out[1:].data_ptr(), 0, 0)  # type: ignore[attr-defined]
        assert not out[1 : m + 1].isnan().any() and out[0].isnan().all() and out[m + 1].isnan().all()
    assert torch.equal(linear(x.repeat(1, 2)[:, :96]), linear(x))  # rows with a stride


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_and_outputs_in_half_precision(isa: str, dtype: torch.dtype, kind: str) -> None:
    weight = sample(kind, False, False, 40, 64, 64, seed=7)
    linear = cpu.NativeOps().quantized_linear([weight])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(7)).to(dtype)
    assert torch.equal(linear(x), linear(x.float()).to(dtype))


@pytest.mark.parametrize(("kind", "zeros"), [("int8", False), ("int4", False), ("int4", "fine")])
def test_what_is_not_finite_shows_in_its_row_only(isa: str, kind: str, zeros: bool | str) -> None:
    weight = sample(kind, zeros, True, 40, 96, 32, seed=8)
    linear = cpu.NativeOps().quantized_linear([weight])
    x = inputs(4, 96, 8)
    broken = x.clone()
    broken[1, 40], broken[2, 0] = float("inf"), float("nan")
    found = linear(broken)
    assert found[1].isnan().all() and found[2].isnan().all()
    assert torch.equal(found[[0, 3]], linear(x)[[0, 3]])
    assert not linear(torch.zeros(1, 96)).any()
    assert not linear(torch.full((1, 96), 1e-38)).isnan().any()


def test_act_order_and_groups_that_cut_units(isa: str) -> None:
    plain = sample("int4", True, True, 24, 96, 32, seed=9)
    order = torch.randperm(96, generator=torch.Generator().manual_seed(9))
    ordered = QuantizedWeight("int4", plain.codes, plain.scales, plain.zeros, 32, order)
    odd = sample("int4", True, True, 24, 96, 16, seed=10)  # through torch, exactly
    x = inputs(3, 96, 9)
    in_order = x[:, order]  # what the rounding of inputs sees
    linear = cpu.NativeOps().quantized_linear([ordered])
    close(linear(x), in_order, plain.dequantize(), 4)
    close(cpu.NativeOps().quantized_linear([odd])(x), x, odd.dequantize(), None)
    for weight in (ordered, odd):
        linear = cpu.NativeOps().quantized_linear([weight])
        rows = linear.rows(torch.tensor([3, 20]))  # type: ignore[attr-defined]
        assert torch.equal(rows, weight.dequantize()[[3, 20]])
    bias = torch.arange(48.0)
    found = cpu.NativeOps().quantized_linear([plain, ordered], bias)(x)
    close(found[:, :24], x, plain.dequantize(), 4, bias[:24])
    close(found[:, 24:], in_order, plain.dequantize(), 4, bias[24:])
