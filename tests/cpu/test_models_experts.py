"""Mixtures of experts: which products run over how many rows, and the grouped form against the one by one."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from helpers.dense_attention import run_chunks
from helpers.oracle import random_ids
from helpers.tiny_models import tiny_config
from octavo.kernels import cpu
from octavo.kernels.ops import Ops, TorchOps
from octavo.models.config_reader import spec_from_config
from octavo.models.decoder import Decoder
from octavo.models.dummy_loader import open_dummy
from octavo.models.layer import GatedMLP
from octavo.models.moe import ExpertList, MixtureOfExperts, StackedExperts

D, INNER, EXPERTS, PER_TOKEN = 32, 48, 6, 2


class Watched(GatedMLP):
    """An expert that notes the rows it is given."""

    def __init__(self, ops: Ops, gate_up: torch.Tensor, down: torch.Tensor, rows: list[int]) -> None:
        super().__init__(ops, ops.linear(gate_up), ops.linear(down), "silu")
        self._rows = rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._rows.append(len(x))
        return super().__call__(x)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to(dtype)

    return normal(EXPERTS, 2 * INNER, D), normal(EXPERTS, D, INNER), normal(EXPERTS, D).float() * 3


def mixture(
    ops: Ops, dtype: torch.dtype = torch.float32, normalized: bool = True
) -> tuple[MixtureOfExperts, dict[int, list[int]]]:
    gate_up, down, router = weights(dtype=dtype)
    rows: dict[int, list[int]] = {e: [] for e in range(EXPERTS)}
    experts = ExpertList([Watched(ops, gate_up[e], down[e], rows[e]) for e in range(EXPERTS)])
    return MixtureOfExperts(ops.dense_linear(router), experts, EXPERTS, PER_TOKEN, normalized), rows


def by_definition(x: torch.Tensor, normalized: bool = True) -> torch.Tensor:
    """One token after the other."""
    gate_up, down, router = weights()
    out = torch.zeros_like(x)
    for t, token in enumerate(x):
        probabilities = (router @ token).softmax(0)
        best = probabilities.topk(PER_TOKEN)
        share = best.values / best.values.sum() if normalized else best.values
        for weight, e in zip(share, best.indices, strict=True):
            gate, up = (gate_up[e] @ token).chunk(2)
            out[t] += weight * (down[e] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("native", [False, True])
def test_equal_to_the_definition(tokens: int, normalized: bool, native: bool) -> None:
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens))
    moe, _ = mixture(cpu.make_ops(torch.float32) if native else TorchOps(), normalized=normalized)
    torch.testing.assert_close(moe(x), by_definition(x, normalized), atol=1e-5, rtol=1e-5)


def test_one_product_for_each_expert_that_has_tokens() -> None:
    moe, rows = mixture(TorchOps())
    x = torch.randn(100, D, generator=torch.Generator().manual_seed(1))
    _, chosen = moe.route(x)
    expected = Counter(chosen.flatten().tolist())
    moe(x)
    assert {e: r for e, r in rows.items() if r} == {e: [count] for e, count in expected.items()}
    for r in rows.values():
        r.clear()
    moe(x[:1])  # a single token touches its own experts only
    assert sorted(e for e, r in rows.items() if r) == sorted(chosen[0].tolist())


def test_the_router_is_not_rounded_to_the_models_dtype() -> None:
    """Two experts a little apart: rounding the logits to bfloat16 would make them equal."""
    moe, _ = mixture(TorchOps(), torch.bfloat16)
    x = torch.randn(64, D, generator=torch.Generator().manual_seed(2)).bfloat16()
    _, _, router = weights(dtype=torch.bfloat16)
    exact = (x.float() @ router.T).softmax(-1).topk(PER_TOKEN)
    weight, chosen = moe.route(x)
    assert weight.dtype == torch.float32 and torch.equal(chosen, exact.indices)


@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_the_grouped_form_equals_the_list(tokens: int) -> None:
    gate_up, down, _ = weights(dtype=torch.bfloat16)
    ops = TorchOps()
    assert StackedExperts.fits(torch.bfloat16, D, INNER) and not StackedExperts.fits(torch.bfloat16, D, 44)
    assert not StackedExperts.fits(torch.float32, D, INNER)
    moe, _ = mixture(ops, torch.bfloat16)
    x = torch.randn(tokens, D, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    expected = moe(x)
    moe.experts = StackedExperts(ops, gate_up, down, "silu")
    torch.testing.assert_close(moe(x), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_experts_are_quantised_and_routers_are_not(kind: str) -> None:
    """Every expert goes through `Ops.linear` like any product; the choice of experts stays exact."""
    from octavo.core.weight_format import parse_weight_format

    ops = TorchOps(parse_weight_format(kind))
    quantised, _ = mixture(ops)
    exact, _ = mixture(TorchOps())
    x = torch.randn(20, D, generator=torch.Generator().manual_seed(4))
    assert torch.equal(quantised.route(x)[1], exact.route(x)[1])
    near, far = quantised(x), exact(x)
    assert not torch.equal(near, far)
    assert torch.nn.functional.cosine_similarity(near, far, dim=-1).min() > 0.95


def test_a_decoder_says_whether_it_asks_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single experts need their counts on the host, so steps with them cannot be recorded as a graph."""

    def decoder(family: str) -> Decoder:
        spec = spec_from_config(tiny_config(family).to_dict() | {"architectures": None})
        return Decoder(spec, open_dummy(spec, torch.bfloat16), TorchOps(), torch.bfloat16)

    assert decoder("llama").graph_safe
    single = decoder("mixtral")
    assert not single.graph_safe
    monkeypatch.setattr(StackedExperts, "helps", lambda device: True)
    stacked = decoder("mixtral")
    assert stacked.graph_safe and stacked.weight_bytes == single.weight_bytes
    ids = random_ids(20, 1)
    near, far = (run_chunks(d, ids, 20) for d in (stacked, single))
    assert torch.nn.functional.cosine_similarity(near, far, dim=-1).min() > 0.99
