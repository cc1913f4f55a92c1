"""The screen of an output head: index and value of each row's largest output, bit by bit those of the whole product."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.native_support import instruction_sets, instructions, threads
from octavo.core.weight_format import screen_bytes
from octavo.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of the processor."""
    with instructions(request.param):
        yield request.param


def both(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None = None) -> int:
    """Compare the two ways for the rows of x; returns how many rows were left to the whole product."""
    from octavo.kernels.cpu.linear import NativeLinear
    from octavo.kernels.cpu.loader import native

    linear = NativeLinear(weight, bias)
    ids, values = linear.argmax(x)
    screen = native().HeadScreen(linear._packed, linear._bias_address)
    assert screen.usable
    rows = x.shape[0]
    found, best = torch.full((rows,), -7), torch.full((rows,), float("nan"))
    code = DTYPES.index(x.dtype)
    left = screen.argmax(x.data_ptr(), code, x.stride(0), rows, found.data_ptr(), best.data_ptr())
    assert torch.equal(found, ids)
    assert torch.equal(best.view(torch.int32), values.view(torch.int32))  # a NaN is equal to itself this way
    return int(left)


def hidden_like(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Rows with a few inputs that are far larger than the others, as hidden states have them."""
    x = torch.randn(rows, columns, generator=generator)
    x[:, torch.randperm(columns, generator=generator)[: max(1, columns // 100)]] *= 20
    return x


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_largest_output_is_that_of_the_whole_product(dtype: torch.dtype, biased: bool) -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    for outputs, inputs in ((1, 1), (16, 32), (17, 33), (250, 7), (4099, 257), (2500, 640)):
        weight = (torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype)
        bias = torch.randn(outputs, generator=generator) if biased else None
        for rows in (1, 2, 3, 4, 5, 6, 97, 200):
            x = hidden_like(rows, inputs, generator)
            for count in (1, 2):
                with threads(count):
                    both(weight, x, bias)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("io", DTYPES[1:])
def test_inputs_of_half_precision_and_a_stride(io: torch.dtype) -> None:
    wide = torch.full((70, 100), float("nan"), dtype=io)
    wide[:, :96] = torch.randn(70, 96).to(io)
    both(torch.randn(900, 96).to(io), wide[:, :96])


def test_most_panels_of_a_real_looking_head_are_never_read() -> None:
    """Else it would be right and of no use: few rows are left to the whole product."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(20_000, 512, generator=generator) * 0.05
    x = weight[torch.randint(0, 20_000, (64,), generator=generator)] * 8 + hidden_like(64, 512, generator) * 0.3
    assert both(weight, x) == 0


@pytest.mark.usefixtures("isa")
def test_near_ties_and_ties() -> None:
    """Hundreds of outputs within the error of the copy, and equal ones: the first index counts."""
    generator = torch.Generator().manual_seed(5)
    for spread in (1e-2, 1e-4, 1e-6, 0.0):
        base = torch.randn(1, 128, generator=generator)
        weight = torch.randn(6000, 128, generator=generator) * 0.1
        near = torch.randperm(6000, generator=generator)[:400]
        weight[near] = base * (1 + spread * torch.randn(400, 1, generator=generator))
        weight[near[:9]] = base * (1 + 3 * spread)
        for dtype in DTYPES:
            x = base.repeat(5, 1) * torch.tensor([[1.0], [2.0], [-1.0], [1e-3], [1e3]])
            both(weight.to(dtype), x + 0.01 * torch.randn(5, 128, generator=generator))
            both(weight.to(dtype), x)


@pytest.mark.usefixtures("isa")
def test_a_row_with_many_panels_is_looked_into_by_all_threads_and_many_such_rows_go_whole() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    base = torch.randn(1, 96, generator=generator)
    weight = torch.randn(9600, 96, generator=generator) * 0.1
    weight[3200:6400] = base * (1 + 1e-5 * torch.randn(3200, 1, generator=generator))  # a third of the panels
    for count in (1, 2):
        with threads(count):
            assert both(weight, base) == 0
            assert both(weight, torch.cat((base, -base, -3 * base, 2 * base))) == 0
            assert both(weight, base * torch.rand(5, 1, generator=generator)) == 5


@pytest.mark.usefixtures("isa")
def test_rows_that_nothing_can_be_said_of_go_through_the_whole_product() -> None:
    weight = torch.randn(3000, 64)
    x = torch.randn(9, 64)
    x[1, 5], x[3, 0], x[4, 63] = float("nan"), float("inf"), float("-inf")
    x[5], x[6], x[7] = 0, 1e30 * x[6], 1e-38 * x[7]
    assert both(weight, x) >= 4  # not finite (three), all equal (one), and perhaps the huge one
    assert both(weight, x[5:6].contiguous()) == 1


@pytest.mark.usefixtures("isa")
def test_weights_of_every_size() -> None:
    """Rows of zeros, of denormal and of huge numbers beside ordinary ones."""
    weight = torch.randn(2000, 96)
    weight[3], weight[700] = 0, weight[700] * 1e-40
    weight[40], weight[41] = weight[40] * 1e-20, weight[41] * 1e12
    both(weight, torch.randn(7, 96))
    both(torch.zeros(64, 32), torch.randn(3, 32))
    for size in (1e-18, 1e-22, 1e15):
        both(torch.randn(900, 64) * size, torch.randn(4, 64) * size)
    both(-weight.abs(), weight[:5].abs() + 0.1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    outputs=st.integers(1, 700),
    inputs=st.integers(1, 300),
    rows=st.integers(1, 9),
    spread=st.sampled_from([0.0, 0.3, 2.0]),
    type_=st.sampled_from(DTYPES),
    name=st.sampled_from(instruction_sets() or ["none"]),
)
def test_any_shape_and_distribution(
    seed: int, outputs: int, inputs: int, rows: int, spread: float, type_: torch.dtype, name: str
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(outputs, 1, generator=generator))
    columns = torch.exp(spread * torch.randn(inputs, generator=generator))
    weight = (torch.randn(outputs, inputs, generator=generator) * sizes * columns).clamp(-6e4, 6e4)
    with instructions(name):
        both(weight.to(type_), torch.randn(rows, inputs, generator=generator) * columns.flip(0))


def test_a_head_that_is_not_finite_goes_without() -> None:
    from octavo.kernels.cpu.linear import NativeLinear
    from octavo.kernels.cpu.loader import native

    ordinary, zeros = torch.randn(300, 40), torch.zeros(300)
    for bad in (float("nan"), float("inf"), float("-inf")):
        weight, bias = ordinary.clone(), zeros.clone()
        weight[299, 39], bias[5] = bad, bad
        for linear in (NativeLinear(weight), NativeLinear(ordinary, bias), NativeLinear(weight, bias)):
            assert not native().HeadScreen(linear._packed, linear._bias_address).usable
            x = torch.randn(4, 40)
            ids, values = linear.argmax(x)
            assert linear.screen() == ""
            for _ in range(4):
                again, best = linear.argmax(x)
                assert torch.equal(again, ids)
                assert torch.equal(best.view(torch.int32), values.view(torch.int32))


@pytest.mark.usefixtures("isa")
def test_a_product_with_its_screen() -> None:
    from octavo.core.weight_format import WeightFormat
    from octavo.kernels.cpu.linear import NativeLinear
    from octavo.kernels.cpu.loader import native
    from octavo.kernels.cpu.ops import NativeOps

    weight = torch.randn(1000, 72)
    linear, plain = NativeLinear(weight), NativeLinear(weight)
    assert linear.screen() == ""
    copy = linear.nbytes - plain.nbytes
    assert copy == screen_bytes(1000, 72, on_tiles=native().in_use() == "amx")
    assert native().HeadScreen(linear._packed, 0).bytes == pytest.approx(copy, rel=0.01), "what Python counts is taken"
    for rows in (1, 3, 40):
        for _ in range(6):  # screened, and now and then whole
            x = torch.randn(rows, 72)
            assert all(map(torch.equal, linear.argmax(x), plain.argmax(x)))
    assert torch.equal(linear(x), plain(x))
    quantized = NativeOps(torch.float32, WeightFormat("int8")).linear(weight)
    assert "quantised" in quantized.screen()  # type: ignore[attr-defined]


# -- which way to go --------------------------------------------------------------------------------------------------


def walk(first: float, second: float, calls: int) -> list[bool]:
    """The choices of `calls` calls that take so long each way."""
    from octavo.kernels.cpu.screen import QuickerWay

    way, made = QuickerWay(), []
    for _ in range(calls):
        made.append(way.choose())
        way.took(made[-1], first if made[-1] else second)
    return made


def test_the_quicker_way_is_found_and_the_other_tried_ever_more_rarely() -> None:
    for first, second in ((1.0, 3.0), (3.0, 1.0)):
        made = walk(first, second, 20_000)
        quicker = first < second
        assert made[:2] == [True, True] and made[2] is False
        tries = [i for i, choice in enumerate(made) if choice is not quicker]
        assert len(tries) < 30
        assert len([i for i in tries if i >= 3]) > 5  # never given up
        gaps = [b - a for a, b in pairwise(tries[4:])]
        assert gaps == sorted(gaps)


def test_it_turns_when_the_other_way_becomes_quicker() -> None:
    from octavo.kernels.cpu.screen import QuickerWay

    way = QuickerWay()
    for i in range(10_000):
        choice = way.choose()
        way.took(choice, (1.0 if i < 2000 else 5.0) if choice else 2.0)
    assert [way.choose() for _ in range(3)] == [False] * 3


# -- the engine -----------------------------------------------------------------------------------------------------


def test_an_engine_with_a_screen_says_so_and_writes_the_same_text(tmp_path: Path) -> None:
    from helpers.tiny_models import write_tiny
    from octavo import LLM, ConfigError, SamplingParams

    path = tmp_path / "llama"
    write_tiny("llama", path)
    prompts = [list(range(1, n)) for n in (4, 9, 30, 31)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    answers = []
    for asked in (True, False, None):
        settings = {"max_model_len": 64, "num_blocks": 64, "skip_tokenizer_init": True}
        with LLM(str(path), screen_head=asked, **settings) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
            answers.append([o.outputs[0].token_ids for o in outputs])
            line = llm.settings()["screen_head"]
            assert line["chosen"] is (asked is True)
            assert ("MiB" in line["why"]) is (asked is True)
    assert answers[0] == answers[1] == answers[2]
    for refused in ({"quantization": "int8"}, {"attention_backend": "reference"}):
        with pytest.raises(ConfigError, match="screen_head=True has no effect"):
            LLM(str(path), screen_head=True, max_model_len=64, num_blocks=64, skip_tokenizer_init=True, **refused)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="screen_head='yes'"):
        LLM(str(path), screen_head="yes")
