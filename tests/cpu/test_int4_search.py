"""The search for int4 grids: never worse than the plain grids it starts from, exact where numbers lie on one, the same
bits in the native kernels as in the definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cpu.test_native_loading import NUMBER, stored_bytes
from helpers.native_support import instruction_sets, instructions
from octavo.kernels import cpu
from octavo.kernels.quantized_weights import quantize_rows
from octavo.models.gguf_types import dequantize

GROUPS = [32, 128]


@pytest.fixture(params=[] if cpu.why_unavailable() else instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with instructions(request.param):
        yield request.param


def samples(columns: int) -> torch.Tensor:
    """Rows of many kinds: bell curves, long tails, uneven halves, one outlier, few values, constants, zeros."""
    generator = torch.Generator().manual_seed(11)
    normal = torch.randn(24, columns, generator=generator)
    tails = normal[:8] ** 3
    uneven = torch.rand(8, columns, generator=generator) * 3 - 0.4
    outlier = normal[8:16] * 0.01
    outlier[:, 5] = torch.linspace(-40, 40, 8)
    few = torch.randint(-3, 9, (8, columns), generator=generator) * 0.37
    rest = torch.zeros(5, columns)
    rest[1], rest[2], rest[3], rest[4, ::2] = 0.7, -1e-3, 1e-30, 1.5
    return torch.cat((normal, tails, uneven, outlier, few, rest))


def errors(found: torch.Tensor, weight: torch.Tensor, group: int) -> torch.Tensor:
    return (found - weight).double().square().unflatten(1, (-1, group)).sum(-1)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("whole", [False, True])
def test_never_worse_than_a_grid_of_the_largest_magnitude(group: int, whole: bool) -> None:
    weight = samples(256)
    groups = weight.unflatten(1, (-1, group))
    found = errors(quantize_rows(weight, "int4", group, whole_zeros=whole).dequantize(), weight, group)
    at = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, at)
    for steps, low, high in ((8, -8, 7), (7, -7, 7)):  # Q4_0's, whose largest becomes -8, and the symmetric one
        scale = (-largest / 8 if steps == 8 else largest.abs() / 7).half().float()
        codes = torch.where(scale != 0, groups / torch.where(scale != 0, scale, 1.0), 0.0).round().clamp(low, high)
        plain = errors((codes * scale).flatten(1), weight, group)
        assert (found <= plain * (1 + 1e-5) + 1e-12).all()
    zeros = quantize_rows(weight, "int4", group, whole_zeros=whole).zeros
    assert zeros is not None and bool((zeros == zeros.round()).all()) == whole


@pytest.mark.parametrize(("group", "share"), [(32, 0.8), (128, 0.95)])
def test_better_than_the_full_range_with_whole_zeros(group: int, share: float) -> None:
    weight = samples(1024)[:24]
    groups = weight.unflatten(1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    plain = ((groups / scale).round() + zero).clamp(0, 15).sub(zero) * scale
    found = quantize_rows(weight, "int4", group).dequantize()
    assert float((found - weight).square().sum()) < share * float((plain.flatten(1) - weight).square().sum())


def test_blocks_of_four_bits_survive() -> None:
    raw = stored_bytes("Q4_0", (40, 256), 3)
    weight = dequantize(raw, NUMBER["Q4_0"], (40, 256), torch.float32)
    assert torch.equal(quantize_rows(weight, "int4").dequantize(), weight)
    again = quantize_rows(quantize_rows(samples(256), "int4", whole_zeros=True).dequantize(), "int4")
    twice = quantize_rows(again.dequantize(), "int4")
    assert torch.allclose(again.dequantize(), twice.dequantize(), rtol=1e-6, atol=0)


def test_blocks_with_an_offset_keep_within_the_step_of_a_zero() -> None:
    """Q4_K's minima are no multiples of a scale: the nearest zero is a thirty-second of a step off at most."""
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (60, 32), generator=generator)
    codes[:, 0], codes[:, 1] = 0, 15
    scale = (torch.rand(60, 1, generator=generator) + 0.1).half().float()
    weight = scale * codes - scale * 15 * torch.rand(60, 1, generator=generator)
    found = quantize_rows(weight, "int4")
    assert torch.equal(found.codes, codes.to(torch.uint8))
    off = (found.dequantize() - weight) / scale
    assert (off.square().mean(1).sqrt() <= 1 / 32).all() and (off.abs() < 1 / 16).all()


def test_zeros_constants_and_one_outlier() -> None:
    weight = torch.zeros(4, 32)
    weight[1], weight[2] = 0.75, -0.3
    weight[3] = torch.linspace(-0.01, 0.01, 32)
    weight[3, 7] = 12.0
    found = quantize_rows(weight, "int4").dequantize()
    assert not found[0].any() and (found[1] == 0.75).all()
    assert torch.allclose(found[2], weight[2], rtol=2**-11, atol=0)
    assert float(found[3, 7]) == pytest.approx(12.0, rel=2**-10)
    assert float((found[3] - weight[3]).abs().max()) <= 0.012


@pytest.mark.parametrize(("group", "columns"), [(32, 256), (32, 200), (64, 96), (128, 200), (128, 40)])
def test_the_native_search_has_the_bits_of_the_definition(isa: str, group: int, columns: int) -> None:
    from octavo.core.weight_format import WeightFormat

    weight = samples(columns)
    expected = quantize_rows(weight, "int4", group).dequantize()
    ops = cpu.NativeOps(torch.float32, WeightFormat("int4", group))
    found = ops.linear(weight).rows(torch.arange(len(weight)))  # type: ignore[attr-defined]
    assert torch.equal(found, expected)
    # eight rows are searched side by side: what stands beside a row does not matter
    part = ops.linear(weight[3:14]).rows(torch.arange(11))  # type: ignore[attr-defined]
    assert torch.equal(part, found[3:14])
