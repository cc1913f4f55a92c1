"""Norm, rotation and KV write in one pass: the bits of the three calls one after the other, whatever the formats."""

from __future__ import annotations

import pytest
import torch

from helpers.native_support import Paged, instruction_sets, instructions, random_history, small_spec, threads
from octavo.errors import BoundsError
from octavo.kernels import cpu
from octavo.kernels.cpu import NativeOps

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")

EPS = 1e-6


def inputs(backend: cpu.NativeAttention, tokens: int, dtype: torch.dtype, norms: bool) -> tuple[torch.Tensor, ...]:
    heads, dim = backend._query_shape
    count = heads + 2 * backend._key_shape[0]
    fused = torch.randn(tokens, count, dim).to(dtype)
    angle = torch.rand(tokens, dim // 2).repeat(1, 2) * 6
    weights = tuple(torch.rand(2, dim) + 0.5) if norms else (None, None)
    return fused, angle.cos(), angle.sin(), *weights


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(
    ("kv_dtype", "stored"),
    [
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("auto", torch.float16),
        ("int8", torch.float32),
        ("int4", torch.float32),
        ("int8,int4", torch.float32),
    ],
)
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16])
def test_one_pass_has_the_bits_of_three(isa: str, kv_dtype: str, stored: torch.dtype, io: torch.dtype) -> None:
    shapes = ((4, 2, 32), (6, 1, 64)) if kv_dtype != "auto" else ((4, 2, 40), (3, 3, 8), (6, 1, 64))
    ops = NativeOps()
    for heads, kv_heads, dim in shapes:
        spec = small_spec(heads=heads, kv_heads=kv_heads, head_dim=dim, windows=(None, 7))
        history = random_history(spec, [13, 40, 1], seed=dim, dtype=torch.float32)
        for norms in (False, True):
            one, three = (Paged(history, 8, stored, seed=3, kv_dtype=kv_dtype) for _ in range(2))
            parts = [(1, 0, 40), (2, 0, 1), (0, 0, 13)]
            with instructions(isa), threads(2):
                backends = [cpu.NativeAttention(paged.cache, spec) for paged in (one, three)]
                for backend, paged in zip(backends, (one, three), strict=True):
                    backend.plan(paged.batch(parts))
                for layer in range(2):
                    fused, cos, sin, q_norm, k_norm = inputs(backends[0], 54, io, norms)
                    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
                    query = backends[0].rotate_and_write(layer, q, k, v, cos, sin, q_norm, k_norm, EPS)
                    q, k = ops.rotary(q, k, cos, sin, q_norm, k_norm, EPS)
                    backends[1].write(layer, k, v)
                    assert torch.equal(query, q)
                    same = torch.equal(backends[0].attend(layer, query), backends[1].attend(layer, q))
                    assert same
            # Byte for byte, the poison of what was not written included.
            assert torch.equal(one.cache.kv.view(torch.uint8), three.cache.kv.view(torch.uint8))


def test_partial_rotation_goes_the_long_way_and_what_does_not_fit_is_refused() -> None:
    spec = small_spec(heads=4, kv_heads=2, head_dim=32, windows=(None,))
    one, three = (Paged(random_history(spec, [5], seed=1, dtype=torch.float32), 8, torch.float32, seed=3) for _ in "ab")
    backend, other = (cpu.NativeAttention(paged.cache, spec) for paged in (one, three))
    backend.plan(one.batch([(0, 0, 5)]))
    other.plan(three.batch([(0, 0, 5)]))
    fused, cos, sin, q_norm, k_norm = inputs(backend, 5, torch.float32, True)
    q, k, v = fused.split((4, 2, 2), dim=1)
    few = backend.rotate_and_write(0, q, k, v, cos[:, :16], sin[:, :16], q_norm, k_norm, EPS)
    turned, keys = NativeOps().rotary(q, k, cos[:, :16], sin[:, :16], q_norm, k_norm, EPS)
    other.write(0, keys, v)
    assert torch.equal(few, turned)
    assert torch.equal(one.cache.kv.view(torch.uint8), three.cache.kv.view(torch.uint8))
    for wrong in ((q[:4], k, v, cos, sin), (q, k[:, :1], v, cos, sin), (q, k, v, cos[:4], sin)):
        with pytest.raises(BoundsError, match="the planned step needs"):
            backend.rotate_and_write(0, *wrong, q_norm, k_norm, EPS)
    backend._slots[0][2] = one.cache.kv.shape[0] * 8
    with pytest.raises(BoundsError, match="slot 32 of token 2 lies outside"):
        backend.rotate_and_write(0, q, k, v, cos, sin, q_norm, k_norm, EPS)
