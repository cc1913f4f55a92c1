"""The native dense operations against float64 and `TorchOps`, and the same bits whatever the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from helpers.native_support import threads
from octavo.errors import ConfigError
from octavo.kernels import cpu
from octavo.kernels.ops import TorchOps

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new tensor the operations ask for starts as NaN: an element that is not written shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def ops(dtype: torch.dtype = torch.float32) -> cpu.NativeOps:
    return cpu.NativeOps(dtype)


def rounds_inputs(dtype: torch.dtype, in_features: int) -> bool:
    """Tiles multiply bfloat16 by bfloat16: x is rounded first, and rounding is not what the tests are about."""
    return cpu.instruction_set() == "amx" and dtype == torch.bfloat16 and in_features % 32 == 0


def strided(rows: int, width: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[rows, width] inside a wider NaN tensor: reading past a row shows."""
    wide = torch.full((rows, width + 5), float("nan"), dtype=dtype)
    wide[:, :width] = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return wide[:, :width]


# -- linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_rows_than_pass_a_panel_in_one_go(dtype: torch.dtype) -> None:
    """Rows of 2,048 inputs go by 256 at a time on tiles; an odd number of panels, a last block that is cut off."""
    weight = torch.randn((72, 2048), generator=torch.Generator().manual_seed(2)).to(dtype)
    linear, x = ops(dtype).linear(weight), strided(600, 2048, 3)
    for count in (1, 2):
        with threads(count):
            out = linear(x)
            taken = x.to(dtype) if rounds_inputs(dtype, 2048) else x
            torch.testing.assert_close(out.double(), taken.double() @ weight.double().T, rtol=1e-5, atol=2e-4)
            for start, end in ((0, 1), (255, 257), (271, 289), (590, 600)):
                assert torch.equal(linear(x[start:end]), out[start:end])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(640, 320), (33, 1000), (1, 1), (16, 257), (250, 7), (129, 512)])
def test_linear_is_right_and_a_row_never_changes(shape: tuple[int, int], dtype: torch.dtype, bias: bool) -> None:
    out_features, in_features = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    offset = torch.randn(out_features, generator=torch.Generator().manual_seed(2)) if bias else None
    linear = ops(dtype).linear(weight, offset)
    x = strided(200, in_features, seed=3)
    if rounds_inputs(dtype, in_features):
        x = x.bfloat16().float()
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    every = linear(x)
    bound = 2e-6 * (x.abs().double() @ weight.abs().double().T).max()
    assert (every - exact).abs().max() <= bound
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 97, 199):
        for count in (1, 2):
            with threads(count):
                assert torch.equal(linear(x[:rows]), every[:rows]), (rows, count)
                assert torch.equal(linear(x[200 - rows :]), every[200 - rows :]), (rows, count)


@pytest.mark.parametrize("io", HALF)
def test_linear_with_half_precision_activations(io: torch.dtype) -> None:
    weight = torch.randn(70, 96).to(io)
    linear = ops(io).linear(weight, torch.randn(70))
    for rows in (1, 5, 40):
        x = strided(rows, 96, seed=rows, dtype=io)
        out = linear(x)
        assert out.dtype == io
        assert torch.equal(out, linear(x.float()).to(io))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_gives_single_rows_back_exactly(dtype: torch.dtype) -> None:
    weight = torch.randn(100, 37).to(dtype)
    linear = ops(dtype).linear(weight)
    ids = torch.tensor([0, 99, 16, 15, 16])
    assert torch.equal(linear.rows(ids), weight[ids].float())
    assert torch.equal(linear.rows(ids, dtype), weight[ids])
    for bad in (-1, 100):
        with pytest.raises(IndexError, match=f"row {bad} "):
            linear.rows(torch.tensor([bad]))


def test_linear_takes_any_leading_shape_and_no_rows() -> None:
    linear = ops().linear(torch.randn(10, 12))
    x = torch.randn(2, 3, 12)
    assert torch.equal(linear(x).view(6, 10), linear(x.view(6, 12)))
    assert linear(torch.zeros(0, 12)).shape == (0, 10)


def test_linear_refuses_what_does_not_fit() -> None:
    linear = ops().linear(torch.randn(10, 12))
    with pytest.raises(ConfigError, match="12 features"):
        linear(torch.zeros(1, 13))
    with pytest.raises(ConfigError, match="float64"):
        linear(torch.zeros(1, 12, dtype=torch.float64))
    with pytest.raises(ConfigError, match="bias"):
        ops().linear(torch.randn(10, 12), torch.zeros(12))
    with pytest.raises(ConfigError, match="int8"):
        cpu.NativeOps(torch.int8)


# -- norms, rotary, activation -----------------------------------------------------------------------------------------


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 1e-2, "atol": 1e-2}}.get(
        dtype, {"rtol": 2e-3, "atol": 2e-3}
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [640, 37, 8, 3])
def test_norms(dim: int, dtype: torch.dtype) -> None:
    x, residual, weight = strided(70, dim, 1, dtype), strided(70, dim, 2, dtype).contiguous(), torch.randn(dim)
    torch.testing.assert_close(
        ops().rms_norm(x, weight, 1e-6), TorchOps().rms_norm(x, weight, 1e-6), **tolerance(dtype)
    )
    normed, total = ops().add_rms_norm(x, residual.clone(), weight, 1e-6)
    expected, expected_total = TorchOps().add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, **tolerance(dtype))
    alone, _ = ops().add_rms_norm(x[9:10], residual[9:10].clone(), weight, 1e-6)
    assert torch.equal(alone[0], normed[9])


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [256, 64, 36, 8])
def test_rotary(dim: int, dtype: torch.dtype, normed: bool) -> None:
    fused = strided(50, 7 * dim, 1, dtype).unflatten(1, (7, dim))
    q, k, _ = fused.split((4, 2, 1), dim=1)
    angle = torch.randn(50, dim) * 100
    cos, sin = angle.cos(), angle.sin()
    weights = (torch.randn(dim), torch.randn(dim)) if normed else (None, None)
    got = ops().rotary(q, k, cos, sin, *weights, 1e-6)
    expected = TorchOps().rotary(q, k, cos, sin, *weights, 1e-6)
    slack = tolerance(dtype)
    for a, b in zip(got, expected, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=slack["rtol"], atol=slack["atol"] * (8 if dtype != torch.float32 else 2))


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(kind: str, dtype: torch.dtype) -> None:
    gate_up = strided(30, 2 * 53, 1, dtype)
    gate_up[:, :53] *= 4
    torch.testing.assert_close(
        ops().gated_activation(gate_up, kind), TorchOps().gated_activation(gate_up, kind), **tolerance(dtype)
    )


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
def test_activation_over_its_whole_range(kind: str) -> None:
    """Every magnitude, the joints of the approximations, and the ends."""
    x = torch.cat([torch.linspace(-12, 12, 40001), torch.logspace(-30, 30, 601), -torch.logspace(-30, 30, 601)])
    x = torch.cat([x, torch.tensor([0.0, float("inf"), 0.625, -0.625, 1.0, -1.0])])
    gate_up = torch.stack([x, torch.ones_like(x)], dim=1)
    got = ops().gated_activation(gate_up, kind)[:, 0].double()
    expected = TorchOps().gated_activation(gate_up.double(), kind)[:, 0]
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1.2e-6)
    assert ops().gated_activation(torch.tensor([[float("nan"), 1.0]]), kind).isnan().all()


def test_argmax() -> None:
    x = strided(9, 5003, 1)
    x[0] = float("-inf")
    x[1, 4999] = x[1, 17] = 50.0
    x[2, 2048] = 50.0
    x[3, 5002] = 50.0
    x[4, 3000] = float("nan")
    x[4, 4000] = 50.0
    x[5] = -3.0
    for count in (1, 2):
        with threads(count):
            assert torch.equal(ops().argmax(x), x.argmax(-1))
    assert ops().argmax(x)[1] == 17


# -- loading -----------------------------------------------------------------------------------------------------------


def test_importing_the_package_loads_neither_torch_nor_the_module() -> None:
    code = (
        "import sys, octavo.kernels.cpu; "
        "assert not {'torch', 'octavo.kernels.cpu._native'} & set(sys.modules), 'eager import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_openmp_runtime_is_loaded() -> None:
    """Two pools would spin against each other; the module must use torch's."""
    code = (
        "from octavo.kernels import cpu; import torch; cpu.make_ops(torch.float32).linear(torch.randn(512, 512))"
        "(torch.randn(64, 512)); "
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l or 'libomp' in l or 'iomp' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "1"


def test_an_unknown_instruction_set_is_refused() -> None:
    code = (
        "from octavo.kernels import cpu; from octavo.errors import ConfigError\n"
        "try: cpu.instruction_set()\n"
        "except ConfigError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "OCTAVO_ISA": "sse9"}, capture_output=True, text=True
    )
    assert "OCTAVO_ISA='sse9'" in done.stdout and "portable" in done.stdout


# -- the head's argmax ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5000, 64), (33, 300), (1, 1), (129, 512)])
def test_argmax_of_a_product_is_that_of_its_outputs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    out_features, in_features = shape
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    weight[out_features // 2] = weight[-1]  # a tie: the lower index wins
    linear = ops(dtype).linear(weight)
    x = strided(120, in_features, seed=5)
    x[7] = 0.0
    x[8] = weight[-1].float() * 50
    for rows in (1, 2, 5, 6, 7, 13, 120):
        for count in (1, 2):
            with threads(count):
                ids, values = linear.argmax(x[:rows])
                expected = linear(x[:rows])
                assert torch.equal(ids, ops().argmax(expected)), (rows, count)
                assert torch.equal(values, expected.max(-1).values)


@pytest.mark.parametrize("rows", [3, 20])
def test_argmax_of_a_product_with_nan_and_infinities(rows: int) -> None:
    weight = torch.ones(400, 16)
    weight[250, 3] = float("nan")
    weight[100, 5] = float("inf")
    x = torch.ones(rows, 16)
    ids, values = ops().linear(weight).argmax(x)
    assert ids.tolist() == [250] * rows and values.isnan().all()
    weight[250, 3] = 1.0
    ids, values = ops().linear(weight).argmax(x)
    assert ids.tolist() == [100] * rows and (values == float("inf")).all()
    ids, values = ops().linear(torch.full((400, 16), float("-inf"))).argmax(x)
    assert ids.tolist() == [0] * rows and (values == float("-inf")).all()


# -- choosing an instruction set ------------------------------------------------------------------------------------


def test_the_check_at_start_passes_for_what_is_there_and_sees_what_is_wrong() -> None:
    from octavo.kernels.cpu.loader import native
    from octavo.kernels.cpu.self_check import differs

    module, before = native(), native().in_use()
    try:
        for name in module.instruction_sets():
            assert differs(module, name) == ""
            assert module.in_use() == name
        for name in module.instruction_sets():
            if name != "portable":  # which the others are compared with
                assert differs(Broken(module, "norm"), name) == "a norm"
                assert "product of 1 rows" in differs(Broken(module, "PackedWeight"), name)
    finally:
        module.use(before)


def test_an_instruction_set_that_is_wrong_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.kernels.cpu import loader

    module, before = loader.native(), loader.native().in_use()
    try:
        assert loader._settle(module) == ""
        assert module.in_use() == module.instruction_sets()[0]
        monkeypatch.setattr(loader, "UNPROVEN", (module.instruction_sets()[0],))
        problem = loader._settle(Broken(module, "norm"))
        if len(module.instruction_sets()) > 1:
            assert "get a norm wrong" in problem and module.in_use() == module.instruction_sets()[1]
    finally:
        module.use(before)


class Broken:
    """The compiled module, but for one function that leaves its output as it was on all but the portable kernels."""

    def __init__(self, module: Any, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._module, name)
        if name != self._name or self._module.in_use() == "portable":
            return real
        if name == "PackedWeight":
            return lambda *shape: _NoProduct(real(*shape))
        return lambda *arguments: None


class _NoProduct:
    def __init__(self, packed: Any) -> None:
        self._packed = packed

    def pack(self, *arguments: Any) -> None:
        self._packed.pack(*arguments)

    def run(self, *arguments: Any) -> None:
        """Writes nothing."""
