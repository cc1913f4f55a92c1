"""Quantised keys and values in the kernels: bytes, errors, and the same bits however a step is cut up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_native_attention import Parts, cut_randomly, poisoned_outputs, whole  # noqa: F401

from helpers.native_support import History, Paged, random_history, small_spec, threads
from octavo.core.kv_format import RowFormat, parse_kv_dtype
from octavo.core.kv_layout import build_layout
from octavo.core.step import BlockTransfer, TransferKind
from octavo.errors import ConfigError
from octavo.kernels import cpu
from octavo.kernels.interface import AttentionBackend, KVCache
from octavo.kernels.quantized_kv import decode, encode, quantized_shape
from octavo.kernels.reference import ReferenceAttention
from octavo.runner.kv_store import KVStore

native_only = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
KINDS = ["int8", "int4", "int8,int4", "int4,int8"]
ROWS = {name: RowFormat(name) for name in ("int8", "int4", "fp8")}


@pytest.fixture(params=["avx2", "portable"])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    from octavo.kernels.cpu.loader import native

    before = native().in_use()
    if request.param not in native().instruction_sets():
        pytest.skip(f"no {request.param} here")
    native().use(request.param)
    yield request.param
    native().use(before)


def run_schedule(backend: AttentionBackend, paged: Paged, steps: list[Parts]) -> list[list[torch.Tensor]]:
    """Write and attend step by step; outputs [layer][sequence] in token order."""
    history = paged.history
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


def steps_of(history: History, seed: int) -> list[Parts]:
    return list(cut_randomly(history.lengths, seed))


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("size", [1.0, 50.0, 1e-6, 1e30])
def test_a_row_comes_back_within_half_a_step(name: str, size: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(200, 64, generator=generator) * size
    x[:, 3] *= 30  # a channel that stands out, as keys have them
    back = decode(*encode(x, ROWS[name]), ROWS[name])
    largest = x.abs().amax(1, keepdim=True)
    if name == "fp8":
        assert ((back - x).abs() <= x.abs() / 16 + largest * 2e-5).all()
        return
    if name == "int8":
        step = largest / 127
    else:
        step = x.view(200, 2, 32).abs().amax(-1, keepdim=True).expand(200, 2, 32).reshape(200, 64) / 8
        # The number opposite to the largest may be cut by up to a whole step; multipliers round by 1/254 of the row's.
        step = 2 * step + largest / 127 / 8 * 8
    assert ((back - x).abs() <= 0.5 * step * 1.01).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_scale_is_of_the_row_not_of_the_cache(name: str) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    many = torch.cat([x, x * 50, x * 2.0**-20])
    alone = [decode(*encode(part, ROWS[name]), ROWS[name]) for part in many.split(4)]
    together = decode(*encode(many, ROWS[name]), ROWS[name])
    assert torch.equal(torch.cat(alone), together)
    # A power of two only moves the scale.
    assert torch.equal(together[8:] * 2.0**20, together[:4])
    assert torch.cosine_similarity(together[4:8], x, dim=1).min() > (0.9999 if name == "int8" else 0.99)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_zeros_stay_zeros_and_what_is_not_finite_spoils_its_row_only(name: str) -> None:
    x = torch.ones(5, 64)
    x[0] = 0
    x[1] = 1e-40
    x[2, 7] = float("inf")
    x[3, 7] = float("nan")
    back = decode(*encode(x, ROWS[name]), ROWS[name])
    assert torch.equal(back[:2], torch.zeros(2, 64))
    assert back[2:4].isnan().all()
    assert (back[4] - 1).abs().max() < 0.02


# -- kernels -------------------------------------------------------------------------------------------------------


@native_only
@pytest.mark.parametrize("io", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_native_kernels_follow_the_reference(kv_dtype: str, io: torch.dtype, instructions: str) -> None:
    """The same bytes in every block; answers that differ by the rounding of queries and weights to 16 bits."""
    spec = small_spec(heads=6, kv_heads=2, head_dim=96, windows=(None, 40, 40, None), softcap=30.0)
    history = random_history(spec, [1, 70, 150, 300], seed=5, dtype=io)
    for layer in history.key:
        layer[1][:, :, 5] *= 20
        layer[2][3:9] *= 1e-3
        layer[3][10] = 0
    for layers in (history.query, history.key, history.value):
        layers[:] = [[x.to(io) for x in layer] for layer in layers]
    steps = steps_of(history, seed=len(kv_dtype))
    made = []
    for backend in (cpu.NativeAttention, ReferenceAttention):
        paged = Paged(history, 16, torch.float32, seed=3, kv_dtype=kv_dtype)
        made.append((run_schedule(backend(paged.cache, spec), paged, steps), paged.cache.kv))
    (native, native_kv), (expected, expected_kv) = made
    assert torch.equal(native_kv, expected_kv)
    tolerance = 1e-3 if io == torch.float32 else 3e-2
    for a, b in zip(native, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            assert x.dtype == io
            torch.testing.assert_close(x.float(), y.float(), rtol=tolerance, atol=tolerance)


@native_only
@pytest.mark.parametrize("new", [1, 12])
@pytest.mark.parametrize("kv_dtype", KINDS)
def test_integer_sums_hold_the_largest_they_can_meet(kv_dtype: str, new: int, instructions: str) -> None:
    """Rows of equal numbers: every product of a row is the largest there is, over the longest row that is allowed."""
    spec = small_spec(heads=1, kv_heads=1, head_dim=512, windows=[None])
    history = random_history(spec, [300], 0, torch.float32)
    for parts in (history.query, history.key, history.value):
        parts[0][0][:] = 1.0
    history.key[0][0][150] = -1.0  # the most negative sum too
    paged = Paged(history, 16, torch.float32, 3, kv_dtype)
    out = run_schedule(cpu.NativeAttention(paged.cache, spec), paged, [[(0, 0, 300 - new)], [(0, 300 - new, 300)]])
    torch.testing.assert_close(out[0][0], torch.ones(300, 1, 512), atol=0.02, rtol=0)


@native_only
@pytest.mark.parametrize("heads", [(4, 1), (12, 2), (3, 3), (14, 2)])
def test_instruction_sets_and_groupings_agree(heads: tuple[int, int]) -> None:
    from octavo.kernels.cpu.loader import native

    if "avx2" not in native().instruction_sets():
        pytest.skip("one instruction set only")
    spec = small_spec(heads=heads[0], kv_heads=heads[1], head_dim=64, windows=(None,))
    history = random_history(spec, [130, 300], seed=heads[0], dtype=torch.float32)
    steps = steps_of(history, seed=2)
    before, made = native().in_use(), []
    for name in ("avx2", "portable"):
        native().use(name)
        paged = Paged(history, 16, torch.float32, seed=3, kv_dtype="int8,int4")
        made.append((run_schedule(cpu.NativeAttention(paged.cache, spec), paged, steps), paged.cache.kv))
    native().use(before)
    assert torch.equal(made[0][1], made[1][1])
    for x, y in zip(made[0][0][0], made[1][0][0], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-4, atol=2e-5)  # the portable path rounds a * b + c twice


@native_only
@pytest.mark.parametrize("kv_dtype", KINDS)
@pytest.mark.parametrize("block_size", [1, 8, 128])
def test_bits_do_not_depend_on_block_size_chunks_neighbours_or_threads(kv_dtype: str, block_size: int) -> None:
    spec = small_spec(heads=8, kv_heads=2, head_dim=32, windows=(None, 70))
    history = random_history(spec, [5, 290, 77, 600], seed=3, dtype=torch.float32)
    paged = Paged(history, 16, torch.float32, seed=1, kv_dtype=kv_dtype)
    expected = run_schedule(cpu.NativeAttention(paged.cache, spec), paged, list(whole(history.lengths)))
    for seed, count in ((block_size, 1), (block_size + 1, 2)):
        with threads(count):
            paged = Paged(history, block_size, torch.float32, seed=seed, kv_dtype=kv_dtype)
            out = run_schedule(cpu.NativeAttention(paged.cache, spec), paged, steps_of(history, seed))
        for layer in range(spec.num_layers):
            for sequence in range(len(history.lengths)):
                assert torch.equal(out[layer][sequence], expected[layer][sequence]), (layer, sequence, seed)


@native_only
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_long_row_split_over_threads_has_the_bits_of_an_unsplit_one(kv_dtype: str) -> None:
    spec = small_spec(heads=4, kv_heads=1, head_dim=64, windows=(None,))
    history = random_history(spec, [1500], seed=9, dtype=torch.float32)
    paged = Paged(history, 16, torch.float32, seed=2, kv_dtype=kv_dtype)
    run_schedule(cpu.NativeAttention(paged.cache, spec), paged, [[(0, 0, 1499)]])
    results = []
    for count in (1, 2):
        with threads(count):
            backend = cpu.NativeAttention(paged.cache, spec)
            results.append(run_schedule(backend, paged, [[(0, 1499, 1500)]])[0][0])
            assert backend.num_splits(0) == (1 if count == 2 else 0)
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("backend", "kv_dtype"),
    [pytest.param("native", kind, marks=native_only) for kind in KINDS] + [("reference", k) for k in (*KINDS, "fp8")],
)
def test_blocks_keep_their_answers_when_copied_and_swapped(backend: str, kv_dtype: str) -> None:
    """Everything a block needs is inside it: moved to other places, by way of the host too, it says the same."""
    spec = small_spec(heads=4, kv_heads=2, head_dim=64, windows=(None,))
    history = random_history(spec, [48], seed=4, dtype=torch.float32)
    layout = build_layout(spec.windows, block_size=16, bytes_per_token_layer=1, kv_dtype=kv_dtype)
    store = KVStore.allocate(layout, spec, 8, dtype=torch.float32, num_host_blocks=4)
    make = cpu.NativeAttention if backend == "native" else ReferenceAttention
    attention = make(store.cache, spec)
    paged = Paged(history, 16, torch.float32, seed=1, kv_dtype=kv_dtype)
    parts: Parts = [(0, 47, 48)]

    def answer(blocks: list[int]) -> torch.Tensor:
        paged.blocks[0][0] = blocks
        attention.plan(paged.batch(parts))
        return attention.attend(0, paged.joined(history.query, 0, parts))

    paged.blocks[0][0] = [0, 1, 2]
    run_schedule(attention, paged, [[(0, 0, 48)]])
    expected = answer([0, 1, 2])
    out, back = TransferKind.SWAP_OUT, TransferKind.SWAP_IN
    moves = [BlockTransfer(TransferKind.COPY, 0, 5), BlockTransfer(out, 1, 3), BlockTransfer(out, 2, 0)]
    store.transfer(moves, attention)
    store.cache.kv[[0, 1, 2]] = 255
    store.transfer([BlockTransfer(back, 3, 7), BlockTransfer(back, 0, 4)], attention)
    assert torch.equal(answer([5, 7, 4]), expected)
    assert not torch.equal(answer([5, 4, 7]), expected)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int4,int8"])
def test_the_bytes_of_a_block_are_those_that_are_counted(kv_dtype: str) -> None:
    from octavo.core.kv_format import kv_bytes_per_token_layer

    spec = small_spec(heads=4, kv_heads=2, head_dim=64, windows=(None, 8, 8))
    size = kv_bytes_per_token_layer(kv_dtype, num_kv_heads=2, head_dim=64, itemsize=4)
    layout = build_layout(spec.windows, block_size=4, bytes_per_token_layer=size, kv_dtype=kv_dtype)
    store = KVStore.allocate(layout, spec, 6, dtype=torch.float32, num_host_blocks=2)
    assert store.device_bytes == 6 * layout.bytes_per_block and store.host_bytes == 2 * layout.bytes_per_block


def test_what_the_native_kernels_cannot_read() -> None:
    def cache(kv_dtype: str, head_dim: int) -> tuple[KVCache, object]:
        spec = small_spec(heads=2, kv_heads=1, head_dim=head_dim, windows=(None,))
        layout = build_layout(spec.windows, block_size=4, bytes_per_token_layer=1, kv_dtype=kv_dtype)
        kv_format = parse_kv_dtype(kv_dtype)
        assert kv_format is not None
        return KVCache(
            torch.zeros(3, *quantized_shape(kv_format, layout, 1, head_dim), dtype=torch.uint8), layout
        ), spec

    if not cpu.why_unavailable():
        for kv_dtype, head_dim, reason in (("fp8", 32, "not handled"), ("int8", 24, "multiple of 16"),
                                           ("int4", 544, "at most 512")):  # fmt: skip
            kv, spec = cache(kv_dtype, head_dim)
            assert reason in cpu.why_unavailable(kv, spec)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match=reason):
                cpu.NativeAttention(kv, spec)  # type: ignore[arg-type]
    kv, spec = cache("int8", 32)
    wrong = KVCache(kv.kv[:, :, :-1].contiguous(), kv.layout)
    with pytest.raises(ValueError, match="is not a contiguous uint8"):
        ReferenceAttention(wrong, spec)  # type: ignore[arg-type]
