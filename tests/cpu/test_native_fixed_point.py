"""Products of fixed-point weights: how far from the real ones, the same bits for a row in any company, no overflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from helpers.native_support import instruction_sets, instructions, threads
from octavo.core.weight_format import FIXED, FIXED_SPAN
from octavo.errors import ConfigError
from octavo.kernels import cpu

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
SHAPES = [(1, 1), (16, 32), (17, 33), (48, 128), (100, 129), (250, 640), (33, 300), (640, 2048)]


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set of the processor."""
    with instructions(request.param):
        yield request.param


def fixed(weight: torch.Tensor, bias: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
    from octavo.kernels.cpu.ops import NativeOps

    return NativeOps(torch.bfloat16).linear(weight, bias, FIXED)


def product(linear, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """Through the binding, into an output full of NaN."""
    out = torch.full((x.shape[0], linear.out_features), float("nan"))
    packed, bias = linear.native_parts
    packed.run(x.data_ptr(), 0, x.stride(0), x.shape[0], out.data_ptr(), 0, bias)
    return out


def spans(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x.double(), (0, -x.shape[-1] % FIXED_SPAN)).unflatten(-1, (-1, FIXED_SPAN))


def bound(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How far an output may be off: what inputs and weights of each span are moved by, and float32's own rounding."""
    inputs, weights = spans(x), spans(weight)
    # Half a step each: of inputs the larger of largest / 32767 and sum / 262,000, of weights 2^-13 of the power of two
    # below the largest.
    step_x = torch.maximum(inputs.abs().amax(-1) / 32767, inputs.abs().sum(-1) / 262000) / 2
    step_w = weights.abs().amax(-1).clamp(min=1e-37).log2().floor().exp2() * 2**-13
    moved = torch.einsum("rs,os->ro", step_x, weights.abs().sum(-1))
    moved += torch.einsum("rs,os->ro", inputs.abs().sum(-1), step_w)
    moved += FIXED_SPAN * torch.einsum("rs,os->ro", step_x, step_w)
    return moved + 1e-6 * (x.double().abs() @ weight.double().abs().T) + 1e-30


def hidden_like(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of very different sizes with a few inputs that are far larger than the others."""
    x = torch.randn(rows, columns, generator=generator) * 10.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
    x[:, torch.randperm(columns, generator=generator)[: max(1, columns // 100)]] *= 50
    return x


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("biased", [False, True])
def test_an_output_is_as_near_as_the_steps_allow(biased: bool) -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    for outputs, columns in SHAPES:
        weight = torch.randn(outputs, columns, generator=generator) * torch.rand(outputs, 1, generator=generator)
        weight = weight.bfloat16()
        bias = torch.randn(outputs, generator=generator) if biased else None
        linear = fixed(weight, bias)
        for rows in (1, 2, 4, 5, 6, 23, 49, 130):
            x = hidden_like(rows, columns, generator)
            found = product(linear, x)
            assert not found.isnan().any()
            exact = x.double() @ weight.double().T
            if bias is not None:
                exact = exact + bias
            error = (found.double() - exact).abs()
            allowed = bound(x, weight) + 1e-6 * exact.abs()
            assert bool((error <= allowed).all()), (outputs, columns, rows, float((error / allowed).max()))


@pytest.mark.usefixtures("isa")
def test_it_is_many_times_nearer_than_inputs_rounded_to_bfloat16() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    for outputs, columns in ((250, 640), (640, 2048)):
        weight, x = torch.randn(outputs, columns, generator=generator).bfloat16(), hidden_like(64, columns, generator)
        exact = x.double() @ weight.double().T
        off = (product(fixed(weight), x).double() - exact).norm(dim=1)
        rounded = (x.bfloat16().double() @ weight.double().T - exact).norm(dim=1)
        assert bool((off < rounded / 2).all()), float((off / rounded).max())
        assert float((off / rounded).median()) < 0.1  # a row whose large inputs bfloat16 happens to hold is no measure


@pytest.mark.usefixtures("isa")
def test_a_row_has_the_same_bits_in_any_company() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    for outputs, columns in SHAPES:
        linear = fixed(torch.randn(outputs, columns, generator=generator).bfloat16())
        x = hidden_like(200, columns, generator)
        together = product(linear, x)
        for count in (1, 2, 3, 4, 5, 6, 40, 48, 49, 97):
            first = int(torch.randint(0, 200 - count, (1,), generator=generator))
            assert torch.equal(product(linear, x[first : first + count]), together[first : first + count]), count
        with threads(1):
            assert torch.equal(product(linear, x), together)


def test_instruction_sets_agree_to_the_rounding_of_sums() -> None:
    """Integers and steps are the same everywhere; what differs is whether a product is rounded before it is added."""
    generator = torch.Generator().manual_seed(5)
    weight, x = torch.randn(100, 700, generator=generator).bfloat16(), hidden_like(60, 700, generator)
    results = []
    for name in instruction_sets():
        with instructions(name):
            results.append(product(fixed(weight), x))
    for other in results[1:]:
        assert bool(((other - results[0]).abs() <= 1e-6 * (x.abs() @ weight.float().abs().T)).all())


@pytest.mark.usefixtures("isa")
def test_sums_of_integers_never_overflow() -> None:
    """The largest weights there are, of one sign, times inputs that use up all the room that their sum has."""
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    largest = torch.full((16, 256), 255 / 128).bfloat16()  # the most digits: an integer of 8160
    wider = torch.full((16, 256), 2 - 2**-20)  # becomes 8191
    flat = torch.ones(7, 256)
    one_hot = torch.zeros(7, 256)
    one_hot[:, 3] = 1e5
    steps = 0.5 + torch.rand(7, 256, generator=generator)
    for weight in (largest, -largest, wider):
        for x in (flat, -flat, one_hot, steps, flat * 1e30):
            exact = x.double() @ weight.double().T
            assert bool(((product(fixed(weight), x).double() - exact).abs() <= 3e-4 * exact.abs()).all())


@pytest.mark.usefixtures("isa")
def test_weights_keep_their_digits() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    weight = torch.randn(70, 300, generator=generator).bfloat16()
    back = fixed(weight).rows(torch.arange(70))
    largest = spans(weight).abs().amax(-1, keepdim=True).expand(-1, -1, FIXED_SPAN).flatten(1)[:, :300]
    kept = weight.abs().double() >= largest / 32
    assert torch.equal(back[kept], weight.float()[kept])
    assert bool(((back - weight.float()).abs().double() <= largest * 2**-13).all())
    assert 0.8 < float(kept.float().mean()) < 1  # the rest is not an empty case


@pytest.mark.usefixtures("isa")
def test_what_is_not_a_number_stays_in_its_row_or_output() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    weight, x = torch.randn(40, 200, generator=generator).bfloat16(), torch.randn(60, 200, generator=generator)
    clean = product(fixed(weight), x)
    x[7, 150], x[20, 3] = float("nan"), float("inf")
    found = product(fixed(weight), x)
    poisoned = torch.zeros(60, dtype=torch.bool)
    poisoned[[7, 20]] = True
    assert found[poisoned].isnan().all()
    assert torch.equal(found[~poisoned], clean[~poisoned])
    weight[11, 190] = float("inf")
    found = product(fixed(weight), x[~poisoned])
    assert found[:, 11].isnan().all()
    others = torch.arange(40) != 11
    assert torch.equal(found[:, others], clean[~poisoned][:, others])


@pytest.mark.usefixtures("isa")
def test_the_tiniest_and_the_largest_numbers() -> None:
    weight = torch.full((16, 128), 1e-38).bfloat16()  # its step would be no normal number
    assert not product(fixed(weight), torch.ones(3, 128)).any()
    assert not product(fixed(torch.ones(16, 128)), torch.full((3, 128), 1e-31)).any()  # as in other integer products
    large = product(fixed(torch.full((16, 128), 2.0**95)), torch.full((3, 128), 2.0**-95))
    assert torch.allclose(large, torch.full((3, 16), 128.0), rtol=1e-3)


def test_largest_outputs_are_those_of_the_product() -> None:
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    for outputs, columns in ((1000, 64), (250, 640)):
        linear = fixed(torch.randn(outputs, columns, generator=generator).bfloat16())
        for rows in (1, 5, 6, 20, 48, 49, 100):
            x = hidden_like(rows, columns, generator)
            values, ids = product(linear, x).max(1)
            found, best = linear.argmax(x)
            assert torch.equal(found, ids) and torch.equal(best, values)


# -- in an engine -----------------------------------------------------------------------------------------------------


def test_only_layers_are_kept_so_and_their_bytes_are_known(tmp_path: Path) -> None:
    from helpers.tiny_models import write_tiny
    from octavo.config import make_config
    from octavo.models.load import load_model
    from octavo.models.names import matrices

    write_tiny("llama", tmp_path / "llama")
    sizes = {}
    for asked in (True, False):
        config = make_config(model=str(tmp_path / "llama"), skip_tokenizer_init=True, fixed_point=asked)
        ops = cpu.make_ops(torch.bfloat16, None, asked)
        model = load_model(config, dtype=torch.bfloat16, device="cpu", ops=ops)
        sizes[asked] = model.weight_bytes
        assert model.decoder.fixed_point is asked  # type: ignore[union-attr]
    layers = [shape for name, shape in matrices(model.spec).items() if name.startswith("layers.")]
    more = sum((FIXED.matrix_bytes(*shape) or 0) - 2 * shape[0] * shape[1] for shape in layers)
    assert sizes[True] - sizes[False] == more


def test_an_engine_says_what_it_chose_and_why(tmp_path: Path) -> None:
    from helpers.tiny_models import write_tiny
    from octavo import LLM

    path = tmp_path / "llama"
    write_tiny("llama", path)
    settings = {"max_model_len": 64, "num_blocks": 64, "skip_tokenizer_init": True}
    for dtype, asked, chosen in (
        ("bfloat16", True, True),
        ("bfloat16", False, False),
        ("bfloat16", None, cpu.instruction_set() == "avx2"),
        ("float32", None, False),
    ):
        with LLM(str(path), dtype=dtype, fixed_point=asked, **settings) as llm:
            line = llm.settings()["fixed_point"]
            assert line["chosen"] is chosen and line["why"]
    for refused, why in (
        ({"dtype": "float32"}, "float32 would lose digits"),
        ({"dtype": "bfloat16", "attention_backend": "reference"}, "native CPU kernels"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "no matrix of its layers"),
    ):
        with pytest.raises(ConfigError, match=f"fixed_point=True has no effect: .*{why}"):
            LLM(str(path), fixed_point=True, **settings, **refused)  # type: ignore[arg-type]


def test_requests_in_a_crowd_have_the_log_probabilities_they_have_alone(tmp_path: Path) -> None:
    """Bits and all, though a crowd's steps have fifty rows and more."""
    from helpers.tiny_models import write_tiny
    from octavo import LLM, SamplingParams

    path = tmp_path / "gemma3"
    write_tiny("gemma3", path)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    generator = torch.Generator().manual_seed(torch.seed() % 2**32)
    lengths = torch.randint(1, 60, (60,), generator=generator).tolist()
    prompts = [torch.randint(1, 60, (n,), generator=generator).tolist() for n in lengths]

    def answers(chosen: list[list[int]]) -> list[object]:
        with LLM(
            str(path), dtype="bfloat16", fixed_point=True, max_model_len=96, num_blocks=512, skip_tokenizer_init=True
        ) as llm:
            outputs = llm.generate([{"prompt_token_ids": p} for p in chosen], params, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    crowd = answers(prompts)
    for index in (0, 17, 59):
        assert answers([prompts[index]]) == crowd[index : index + 1]
