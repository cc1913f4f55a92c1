"""The native attention kernels: right against dense float64, and the same bits however a step is cut up."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from helpers.native_support import Paged, dense_answer, random_history, small_spec, threads
from octavo.errors import BoundsError, ConfigError
from octavo.kernels import cpu
from octavo.kernels.cpu.loader import native

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")

Parts = Sequence[tuple[int, int, int]]
# heads, kv heads, head_dim, windows, softcap
SHAPES = [
    (4, 1, 256, (20, 20, None), None),
    (14, 2, 64, (None,), None),
    (3, 3, 8, (None, 5), None),
    (5, 1, 40, (None,), 3.0),
    (8, 4, 128, (100,), None),
    (4, 2, 64, (None, 30), 5.0),
    (40, 1, 32, (None,), None),
]


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every new tensor the backend asks for starts as NaN: an element that is not written shows."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = empty(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan")) if out.is_floating_point() else out

    monkeypatch.setattr(torch, "empty", poisoned)


def run_schedule(paged: Paged, steps: Sequence[Parts]) -> list[list[torch.Tensor]]:
    """Write and attend step by step; outputs [layer][sequence] in token order."""
    history = paged.history
    backend = cpu.NativeAttention(paged.cache, history.spec)
    out: list[list[list[torch.Tensor]]] = [[[] for _ in history.lengths] for _ in range(history.spec.num_layers)]
    for parts in steps:
        backend.plan(paged.batch(parts))
        for layer in range(history.spec.num_layers):
            key, value, query = (paged.joined(x, layer, parts) for x in (history.key, history.value, history.query))
            backend.write(layer, key, value)
            rows = backend.attend(layer, query).split([end - first for _, first, end in parts])
            for (sequence, _, _), row in zip(parts, rows, strict=True):
                out[layer][sequence].append(row)
    return [[torch.cat(pieces) for pieces in layer] for layer in out]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """Tiles multiply bfloat16: there the weights of the softmax are rounded, by up to 2^-9."""
    tiles = native().in_use() == "amx" and dtype == torch.bfloat16
    return {"rtol": 4e-3, "atol": 4e-3} if tiles else {"rtol": 1e-5, "atol": 2e-6}


def whole(lengths: Sequence[int]) -> list[Parts]:
    return [[(i, 0, n) for i, n in enumerate(lengths)]]


def cut_randomly(lengths: Sequence[int], seed: int) -> list[Parts]:
    """Prompt chunks of any size, decode rows and verification rows side by side; some rows sit steps out."""
    draw = random.Random(seed)
    done = [0] * len(lengths)
    steps = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        parts = []
        for i, n in enumerate(lengths):
            if done[i] == n or draw.random() < 0.2:
                continue
            size = draw.choice((1, 1, 2, 5, draw.randint(1, n), n))
            end = min(n, done[i] + size)
            parts.append((i, done[i], end))
            done[i] = end
        if parts:
            draw.shuffle(parts)
            steps.append(parts)
    return steps


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_dense_attention(shape: tuple, dtype: torch.dtype, count: int) -> None:
    heads, kv_heads, head_dim, windows, softcap = shape
    spec = small_spec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, windows=windows, softcap=softcap)
    history = random_history(spec, [1, 63, 130, 300], seed=heads, dtype=dtype)
    with threads(count):
        out = run_schedule(Paged(history, 16, dtype, seed=1), cut_randomly(history.lengths, seed=head_dim))
    for layer in range(spec.num_layers):
        for sequence in range(len(history.lengths)):
            torch.testing.assert_close(
                out[layer][sequence].double(), dense_answer(history, layer, sequence), **tolerance(dtype)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_bits_do_not_depend_on_block_size_chunks_or_neighbours(block_size: int, dtype: torch.dtype) -> None:
    spec = small_spec(heads=8, kv_heads=2, head_dim=32, windows=(None, 70))
    history = random_history(spec, [5, 290, 77, 600], seed=3, dtype=dtype)
    expected = run_schedule(Paged(history, 16, dtype, seed=1), whole(history.lengths))
    for seed, count in ((block_size, 1), (block_size + 1, 2)):
        with threads(count):
            paged = Paged(history, block_size, dtype, seed=seed)
            out = run_schedule(paged, cut_randomly(history.lengths, seed))
        for layer in range(spec.num_layers):
            for sequence in range(len(history.lengths)):
                assert torch.equal(out[layer][sequence], expected[layer][sequence]), (layer, sequence, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_split_context_has_the_bits_of_an_unsplit_one(dtype: torch.dtype) -> None:
    spec = small_spec(heads=4, kv_heads=1, head_dim=64, windows=(None, 900))
    history = random_history(spec, [1500, 40], seed=9, dtype=dtype)
    paged = Paged(history, 16, dtype, seed=2)
    run_schedule(paged, [[(0, 0, 1499), (1, 0, 39)]])
    results = []
    for count in (1, 2):
        for parts in ([(0, 1499, 1500)], [(1, 39, 40), (0, 1499, 1500)]):
            with threads(count):
                backend = cpu.NativeAttention(paged.cache, spec)
                backend.plan(paged.batch(parts))
                # The test means something only if two threads do split the long row.
                assert backend.num_splits(0) == (1 if count == 2 else 0)
                for layer in range(2):
                    backend.write(layer, *(paged.joined(x, layer, parts) for x in (history.key, history.value)))
                results.append([backend.attend(i, paged.joined(history.query, i, parts))[-1] for i in range(2)])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize("io", [torch.bfloat16, torch.float16])
def test_half_precision_queries_and_strided_views(io: torch.dtype) -> None:
    """A fused q/k/v product hands over views with a row stride, possibly in 16 bits."""
    spec = small_spec(heads=4, kv_heads=2, head_dim=64, windows=(None,))
    history = random_history(spec, [50], seed=4, dtype=io)
    paged = Paged(history, 16, torch.float32, seed=5)
    fused = torch.cat([history.query[0][0], history.key[0][0], history.value[0][0]], dim=1).to(io)
    q, k, v = fused.split((4, 2, 2), dim=1)
    backend = cpu.NativeAttention(paged.cache, spec)
    backend.plan(paged.batch([(0, 0, 50)]))
    backend.write(0, k, v)
    out = backend.attend(0, q)
    assert out.dtype == io and out.is_contiguous()
    torch.testing.assert_close(out.double(), dense_answer(history, 0, 0), rtol=1e-2, atol=1e-2)
    assert torch.equal(out, run_schedule(paged, whole([50]))[0][0].to(io))


def test_large_scores_do_not_overflow() -> None:
    spec = small_spec(heads=2, kv_heads=1, head_dim=64, windows=(None,))
    history = random_history(spec, [200], seed=6, dtype=torch.float32)
    history.query[0][0] *= 1e4
    out = run_schedule(Paged(history, 16, torch.float32, seed=7), cut_randomly([200], 1))
    torch.testing.assert_close(out[0][0].double(), dense_answer(history, 0, 0), rtol=1e-3, atol=1e-3)


def test_copy_blocks_runs_in_order() -> None:
    spec = small_spec(heads=2, kv_heads=1, head_dim=8, windows=(None,))
    paged = Paged(random_history(spec, [64], seed=1, dtype=torch.float32), 16, torch.float32, seed=1)
    kv = paged.cache.kv
    kv.copy_(torch.randn(kv.shape))
    before = kv.clone()
    cpu.NativeAttention(paged.cache, spec).copy_blocks([(0, 1), (1, 2), (3, 0), (4, 4)])
    expected = before.clone()
    expected[1], expected[2], expected[0] = before[0], before[0], before[3]
    assert torch.equal(kv, expected)


def test_refuses_what_would_leave_the_pool() -> None:
    spec = small_spec(heads=2, kv_heads=1, head_dim=8, windows=(None,))
    history = random_history(spec, [40], seed=1, dtype=torch.float32)
    paged = Paged(history, 16, torch.float32, seed=1)
    backend = cpu.NativeAttention(paged.cache, spec)
    parts = [(0, 0, 40)]
    for bad in (-1, paged.cache.kv.shape[0]):
        batch = paged.batch(parts)
        batch.block_tables[0][0, 1] = bad
        backend.plan(batch)
        with pytest.raises(BoundsError, match="row 0 names a block outside the pool"):
            backend.attend(0, history.query[0][0])
        batch = paged.batch(parts)
        batch.slots[0][7] = bad * 16
        backend.plan(batch)
        with pytest.raises(BoundsError, match="token 7"):
            backend.write(0, history.key[0][0], history.value[0][0])
        with pytest.raises(BoundsError, match=f"block {bad} "):
            backend.copy_blocks([(0, bad)])
    with pytest.raises(BoundsError, match="shape"):
        backend.attend(0, history.query[0][0][:3])
    batch = paged.batch(parts)
    batch.context_len[0] = 4000
    with pytest.raises(BoundsError, match="4000"):
        backend.plan(batch)


def test_says_why_a_model_does_not_fit() -> None:
    spec = small_spec(heads=2, kv_heads=1, head_dim=12, windows=(None,))
    paged = Paged(random_history(spec, [16], seed=1, dtype=torch.float32), 16, torch.float32, seed=1)
    assert not cpu.supports(paged.cache, spec)
    assert "head_dim=12" in cpu.why_unavailable(paged.cache, spec)
    with pytest.raises(ConfigError, match="head_dim=12"):
        cpu.NativeAttention(paged.cache, spec)
