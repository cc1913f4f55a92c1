"""Triton's norms, rotations, activations and the fused write against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.paged import fresh_seed, make_paged, tiny_spec
from octavo.errors import ConfigError
from octavo.kernels.interface import KVCache
from octavo.kernels.ops import TorchOps
from octavo.kernels.reference import ReferenceAttention

pytest.importorskip("triton")
from octavo.kernels.triton.attention import TritonAttention
from octavo.kernels.triton.ops import TritonOps

#: relative to the largest number
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
#: Triton's interpreter cuts bfloat16 off where hardware rounds: up to 2^-7 each for a norm and for what is stored
INTERPRETED = {**BOUNDS, torch.bfloat16: 2.4e-2}
DTYPES = pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert found.isfinite().all(), "not all was written"
    wrong = (found.float().cpu() - expected.float()).abs().max() / expected.float().abs().max()
    bounds = INTERPRETED if found.device.type == "cpu" else BOUNDS
    assert wrong <= bounds[expected.dtype], wrong


@pytest.fixture
def normal(device):
    generator = torch.Generator().manual_seed(fresh_seed())

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return make


@DTYPES
def test_norms_with_and_without_the_residual(dtype, normal, device):
    x, residual, weight = normal(3, 72, dtype=dtype), normal(3, 72, dtype=dtype), normal(72)
    close(TritonOps().rms_norm(x.to(device), weight.to(device), 1e-6), TorchOps().rms_norm(x, weight, 1e-6))
    expected, expected_sum = TorchOps().add_rms_norm(x, residual, weight, 1e-6)
    # A view with a row stride, and a residual that is replaced in place.
    wide = torch.cat([x, x], 1).to(device)[:, :72]
    there = residual.to(device, copy=True)
    found, total = TritonOps().add_rms_norm(wide, there, weight.to(device), 1e-6)
    close(found, expected)
    close(total, expected_sum)
    assert total.data_ptr() == there.data_ptr()
    strided = torch.cat([residual, residual], 1).to(device)[:, :72]
    close(TritonOps().add_rms_norm(wide, strided, weight.to(device), 1e-6)[1], expected_sum)
    assert TritonOps().rms_norm(torch.empty(0, 72, device=device), weight.to(device), 1e-6).shape == (0, 72)
    with pytest.raises(ConfigError, match="differ"):
        TritonOps().add_rms_norm(wide, there[:2], weight.to(device), 1e-6)


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "relu"])
def test_gated_activations(kind, dtype, normal, device):
    x = 3 * normal(2, 2 * 130)
    x[0, 3], x[1, 5] = -200.0, 200.0  # an exponential of these would overflow
    close(TritonOps().gated_activation(x.to(device, dtype), kind), TorchOps().gated_activation(x.to(dtype), kind))
    with pytest.raises(ConfigError, match="'tanh': must be one of silu"):
        TritonOps().gated_activation(x.to(device), "tanh")


@DTYPES
@pytest.mark.parametrize(("head_dim", "turned", "normed"), [(64, 64, False), (40, 40, True), (64, 32, True)])
def test_rotations_whole_and_partial_with_and_without_norms(head_dim, turned, normed, dtype, normal, device):
    fused = normal(3, 5 + 2 + 2, head_dim, dtype=dtype)
    q, k, _ = fused.split((5, 2, 2), dim=1)
    angles = 5 * normal(3, turned // 2)
    cos, sin = (torch.cat([f(angles)] * 2, 1) for f in (torch.cos, torch.sin))
    norms = [normal(head_dim) if normed else None for _ in range(2)]
    expected = TorchOps().rotary(q, k, cos, sin, *norms, 1e-6)
    on_device = fused.to(device).split((5, 2, 2), dim=1)
    put = [None if n is None else n.to(device) for n in norms]
    found = TritonOps().rotary(on_device[0], on_device[1], cos.to(device), sin.to(device), *put, 1e-6)
    for a, b in zip(found, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "int8,int4"])
def test_rotation_and_write_in_one_launch_leave_the_same_pool(kv_dtype, normal, device):
    spec = tiny_spec([None], 4, 2, 32)
    case = make_paged([(3, 9), (1, 4)], spec, block_size=8, generator=torch.Generator().manual_seed(fresh_seed()))
    layout = replace(case.layout, kv_dtype=kv_dtype)
    fused = normal(4, 8, 32)
    angles = normal(4, 16)
    cos, sin = (torch.cat([f(angles)] * 2, 1) for f in (torch.cos, torch.sin))
    norms = (normal(32).to(device), normal(32).to(device))
    pools, queries = [], []
    for together in (True, False):
        kv = case.cache.kv.clone()
        if kv_dtype != "auto":
            kv = torch.zeros(len(kv), *quantized(layout, spec), dtype=torch.uint8)
        backend = TritonAttention(KVCache(kv := kv.to(device), layout), spec)
        backend.plan(replace(case.batch, **moved(case.batch, device)))
        q, k, v = fused.to(device).split((4, 2, 2), dim=1)
        if together:
            queries.append(backend.rotate_and_write(0, q, k, v, cos.to(device), sin.to(device), *norms, 1e-6))
        else:
            q, k = TritonOps().rotary(q, k, cos.to(device), sin.to(device), *norms, 1e-6)
            backend.write(0, k, v)
            queries.append(q)
        pools.append(kv.cpu().view(torch.uint8))
    assert torch.equal(pools[0], pools[1]) and torch.equal(queries[0], queries[1])
    if kv_dtype == "auto":  # and it is the reference's
        reference = ReferenceAttention(KVCache(kv := case.cache.kv.clone(), layout), spec)
        reference.plan(case.batch)
        _, k, v = fused.split((4, 2, 2), dim=1)
        reference.write(0, TorchOps().rotary(k, k, cos, sin, norms[1].cpu(), norms[1].cpu(), 1e-6)[1], v)
        found = pools[0].view(torch.float32)
        assert torch.equal(found.isnan(), kv.isnan())
        assert (found - kv).nan_to_num().abs().max() <= 2e-6


def quantized(layout, spec):
    from octavo.core.kv_format import parse_kv_dtype
    from octavo.kernels.quantized_kv import quantized_shape

    return quantized_shape(parse_kv_dtype(layout.kv_dtype), layout, spec.num_kv_heads, spec.head_dim)


def moved(batch, device):
    return {
        "query_start": batch.query_start.to(device),
        "context_len": batch.context_len.to(device),
        "block_tables": [t.to(device) for t in batch.block_tables],
        "slots": [s.to(device) for s in batch.slots],
    }
