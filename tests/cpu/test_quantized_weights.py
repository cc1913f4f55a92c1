"""What a quantised weight means, and what quantising does to numbers: error bounds, exact round trips, odd shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from octavo.core.weight_format import WeightFormat, check_weight_format, parse_weight_format
from octavo.errors import ConfigError
from octavo.kernels.ops import TorchOps
from octavo.kernels.quantized_weights import (
    Fp8Linear,
    JoinedLinear,
    QuantizedWeight,
    ReferenceQuantizedLinear,
    quantize_rows,
    reference_linear,
)

KINDS = [("int8", None), ("int8", 32), ("int4", 32), ("int4", 128)]


def random_weight(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


def random_quantized(kind: str, rows: int, columns: int, group: int, zeros: bool, seed: int = 1) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    groups = -(-columns // group)
    low, high = (-127, 128) if kind == "int8" else (0, 16)
    codes = torch.randint(low, high, (rows, columns), generator=generator)
    scales = torch.rand(rows, groups, generator=generator) + 0.01
    offsets = torch.randint(0, 16, (rows, groups), generator=generator).float() if zeros else None
    return QuantizedWeight(kind, codes.to(torch.int8 if kind == "int8" else torch.uint8), scales, offsets, group)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("columns", [256, 200, 33, 7])
def test_no_number_is_further_off_than_its_step_allows(kind: str, group: int | None, columns: int) -> None:
    weight = random_weight(9, columns)
    found = quantize_rows(weight, kind, group)
    size = found.group_size
    for g in range(found.groups):
        part = weight[:, g * size : (g + 1) * size]
        off = (found.dequantize()[:, g * size : (g + 1) * size] - part).abs().amax(1)
        if kind == "int8":
            assert (off <= part.abs().amax(1) / 127 * 0.501).all()
        else:  # the range is cut by about 30 % at most, where that lowers the squared error
            span = part.amax(1).clamp(min=0) - part.amin(1).clamp(max=0)
            assert (off <= span * (0.3 + 1 / 15)).all()


@pytest.mark.parametrize(("kind", "group", "bound"), [("int8", None, 0.01), ("int4", 32, 0.09), ("int4", 128, 0.11)])
def test_the_relative_error_of_a_normal_matrix(kind: str, group: int | None, bound: float) -> None:
    weight = random_weight(64, 512)
    error = quantize_rows(weight, kind, group).dequantize() - weight
    assert 0.1 * bound < float(error.norm() / weight.norm()) < bound


def test_the_search_is_better_than_the_full_range() -> None:
    weight = random_weight(32, 1024)
    groups = weight.view(32, -1, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    plain = ((groups / scale).round() + zero).clamp(0, 15).sub(zero) * scale
    found = quantize_rows(weight, "int4").dequantize().view_as(groups)
    assert float((found - groups).square().sum()) < 0.97 * float((plain - groups).square().sum())


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_numbers_that_are_codes_already_come_back_exactly(kind: str, group: int | None) -> None:
    size = group or 128
    generator = torch.Generator().manual_seed(2)
    low, high = (-127, 128) if kind == "int8" else (0, 16)
    codes = torch.randint(low, high, (6, 256), generator=generator)
    if kind == "int8":
        codes[:, ::size] = 127  # so that the largest number is a full scale
        weight = codes * 0.25
    else:
        codes[:, ::size], codes[:, 1::size] = 0, 15
        weight = (codes - 5) * 0.25
    again = quantize_rows(weight, kind, group)
    assert torch.equal(again.dequantize(), weight.float())


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_zero_rows_outliers_and_tiny_numbers(kind: str, group: int | None) -> None:
    weight = torch.zeros(4, 96)
    weight[1, 5] = 3.0e4  # one outlier: it is kept, whatever that does to its neighbours
    weight[2] = torch.linspace(-1e-30, 1e-30, 96)
    weight[3] = -2.0
    found = quantize_rows(weight, kind, group).dequantize()
    assert torch.isfinite(found).all() and not found[0].any()
    assert abs(float(found[1, 5]) - 3.0e4) < 3.0e4 * 0.005
    assert not found[1, :5].any()
    assert torch.allclose(found[3], weight[3], rtol=0.005)
    assert float((found[2] - weight[2]).abs().max()) <= 1.01e-30


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_not_finite_is_refused(kind: str, value: float) -> None:
    weight = random_weight(3, 64)
    weight[2, 63] = value
    with pytest.raises(ConfigError, match="not finite"):
        quantize_rows(weight, kind)
    with pytest.raises(ConfigError, match="not finite"):
        Fp8Linear(weight)


def test_values_follow_the_definition_number_by_number() -> None:
    for kind, zeros in (("int8", False), ("int4", True), ("int4", False)):
        weight = random_quantized(kind, 3, 40, 16, zeros)
        values = weight.dequantize()
        for row in range(3):
            for column in range(40):
                group = column // 16
                middle = 8.0 if kind == "int4" else 0.0
                zero = middle if weight.zeros is None else float(weight.zeros[row, group])
                expected = float(weight.scales[row, group]) * (float(weight.codes[row, column]) - zero)
                assert float(values[row, column]) == pytest.approx(expected, rel=1e-6)


def test_an_input_order_is_undone_in_values_products_and_rows() -> None:
    plain = random_quantized("int4", 6, 64, 32, True)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    ordered = replace(plain, input_order=order)
    assert torch.equal(ordered.dequantize()[:, order], plain.dequantize())
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    linear = reference_linear([ordered])
    assert isinstance(linear, ReferenceQuantizedLinear)
    assert torch.allclose(linear(x), x @ ordered.dequantize().T, atol=1e-4)
    assert torch.equal(linear.rows(torch.tensor([4, 0])), ordered.dequantize()[[4, 0]])


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_the_reference_product_is_that_of_the_values(kind: str, group: int | None) -> None:
    weight, bias = quantize_rows(random_weight(21, 100), kind, group), torch.arange(21.0)
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(5))
    linear = reference_linear([weight], bias)
    assert torch.equal(linear(x), F.linear(x, weight.dequantize()) + bias)
    assert linear(x.bfloat16()).dtype == torch.bfloat16
    assert linear.nbytes <= weight.nbytes * 1.5  # int4 codes are packed there too


def test_parts_that_differ_are_multiplied_apart() -> None:
    parts = [random_quantized("int4", 5, 64, 32, True), random_quantized("int4", 7, 64, 64, True)]
    bias, x = torch.arange(12.0), torch.randn(3, 64, generator=torch.Generator().manual_seed(6))
    joined = reference_linear(parts, bias)
    assert isinstance(joined, JoinedLinear)
    expected = F.linear(x, torch.cat([p.dequantize() for p in parts]), bias)
    assert torch.allclose(joined(x), expected, atol=1e-4)
    same = reference_linear([parts[0], parts[0]])
    assert isinstance(same, ReferenceQuantizedLinear) and same.out_features == 10
    with pytest.raises(ConfigError, match="cannot share an input"):
        reference_linear([parts[0], random_quantized("int4", 5, 32, 32, True)])


def test_bytes_are_those_of_a_packed_weight() -> None:
    assert quantize_rows(random_weight(16, 256), "int4").nbytes == 16 * (128 + 8 * 3)
    assert quantize_rows(random_weight(16, 256), "int8").nbytes == 16 * (256 + 4)
    for kind, group in (("int8", None), ("int4", 32), ("int4", 128)):
        expected = quantize_rows(random_weight(16, 256), kind, group).nbytes
        assert WeightFormat(kind, group).matrix_bytes(16, 256) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "int3"}, "one of int8, int4"),
        ({"codes": torch.zeros(4, 64, dtype=torch.int32)}, "int4 codes of torch.int32"),
        ({"codes": torch.zeros(64, dtype=torch.uint8)}, "non-empty"),
        ({"scales": torch.zeros(4, 3)}, r"float32 \[4, 2\] is needed"),
        ({"zeros": torch.zeros(4, 2, dtype=torch.float64)}, "zeros of shape"),
        ({"group_size": 0}, "group_size=0"),
        ({"input_order": torch.arange(63)}, r"int64 \[64\]"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, object], words: str) -> None:
    fine = random_quantized("int4", 4, 64, 32, True)
    with pytest.raises(ConfigError, match=words):
        replace(fine, **change)  # type: ignore[arg-type]


def test_formats_are_parsed_and_refused_with_the_reason() -> None:
    assert parse_weight_format(None) is None and parse_weight_format("auto") is None
    assert parse_weight_format("int4") == WeightFormat("int4", 32, mixed=True)
    assert parse_weight_format("int4:64:pure") == WeightFormat("int4", 64)
    for text in ("int8", "int4", "int4:128", "int4:pure", "int4:64:pure", "gguf", "fp8"):
        assert str(parse_weight_format(text)) == text
    assert str(parse_weight_format("int4:32")) == "int4" and str(parse_weight_format("int4:32:pure")) == "int4:pure"
    for text in ("int2", "int4:48", "int8:32", "int8:pure", "int4:pure:32", "int4:", "int4:64:128", "", "INT8", 8):
        with pytest.raises(ConfigError, match="must be auto, int8"):
            parse_weight_format(text)  # type: ignore[arg-type]
    assert check_weight_format("fp8", "cuda") == WeightFormat("fp8")
    with pytest.raises(ConfigError, match=r"needs a GPU.*int8"):
        check_weight_format("fp8", "cpu")
    with pytest.raises(ConfigError, match=r"gguf.*only the CPU kernels"):
        check_weight_format("gguf", "cuda")
    with pytest.raises(ConfigError, match="needs the native kernels"):
        TorchOps(WeightFormat("gguf"))


def test_torch_operations_quantise_what_they_are_given() -> None:
    weight, x = random_weight(24, 64), torch.randn(3, 64, generator=torch.Generator().manual_seed(7))
    for text in ("int8", "int4"):
        linear = TorchOps(parse_weight_format(text)).linear(weight)
        assert torch.equal(linear(x), F.linear(x, quantize_rows(weight, text).dequantize()))
        assert linear.nbytes < 24 * 64 * 2
    eight = TorchOps(WeightFormat("fp8")).linear(weight)
    exact = x @ weight.T
    assert 1e-3 < float((eight(x) - exact).norm() / exact.norm()) < 0.05 and eight.nbytes == 24 * (64 + 4)
