"""Triton's paged attention against dense float64 and the reference backend, on ragged random batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from helpers.paged import Paged, dense_attention, fresh_seed, make_paged, tiny_spec
from octavo.core.kv_layout import build_layout
from octavo.errors import BoundsError, ConfigError
from octavo.kernels.interface import AttentionBatch, KVCache, make_backend
from octavo.kernels.reference import ReferenceAttention
from octavo.models.spec import ModelSpec

pytest.importorskip("triton")
from octavo.kernels.triton import attention
from octavo.kernels.triton.attention import TritonAttention
from octavo.kernels.triton.tuning import Tile, Tiles, pick_tiles

SMALL = Tiles(Tile(0, 32, 4, 2), Tile(32, 32, 4, 2), 64)
#: largest error of an output of random normal values, by the type of queries and pool
BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2.5e-2, torch.float16: 4e-3}


def on(device: str, batch: AttentionBatch) -> AttentionBatch:
    return replace(
        batch,
        query_start=batch.query_start.to(device),
        context_len=batch.context_len.to(device),
        block_tables=[table.to(device) for table in batch.block_tables],
        slots=[slots.to(device) for slots in batch.slots],
    )


def answers(
    case: Paged, device: str, dtype: torch.dtype, tiles: Tiles | None = None, **options: object
) -> list[torch.Tensor]:
    """Write and attend through Triton: float32 [T, Hq, d] per layer, on the CPU."""
    cache = KVCache(case.cache.kv.to(device), case.layout)
    backend = TritonAttention(cache, case.spec, tiles=tiles, **options)  # type: ignore[arg-type]
    backend.plan(on(device, case.batch))
    out = []
    for layer in range(case.spec.num_layers):
        key, value = case.new(case.keys[layer]), case.new(case.values[layer])
        backend.write(layer, key.to(device, dtype), value.to(device, dtype))
        out.append(backend.attend(layer, case.queries[layer].to(device, dtype)).float().cpu())
    return out


def check(
    rows: Sequence[tuple[int, int]],
    spec: ModelSpec,
    block_size: int,
    device: str,
    dtype: torch.dtype,
    tiles: Tiles | None = SMALL,
) -> None:
    generator = torch.Generator().manual_seed(fresh_seed())
    case = make_paged(rows, spec, block_size=block_size, generator=generator, dtype=dtype)
    for layer, out in enumerate(answers(case, device, dtype, tiles, splits=3)):
        wrong = (out.double() - dense_attention(case, layer)).abs().max().item()
        assert wrong <= BOUNDS[dtype], f"layer {layer}: {wrong}"


DECODE = [(1, 130), (1, 1), (1, 33)]
VERIFY = [(3, 70), (5, 5), (2, 33)]
MIXED = [(1, 75), (37, 90), (1, 1), (2, 34)]


@pytest.mark.parametrize(
    ("rows", "spec", "block_size"),
    [
        (DECODE, tiny_spec([None, 20], 6, 2, 64), 16),
        (DECODE, tiny_spec([None], 7, 1, 40, cap=4.0), 8),
        (VERIFY, tiny_spec([12, None], 4, 2, 80), 32),
        (VERIFY, tiny_spec([None], 3, 3, 256, cap=20.0), 8),
        (MIXED, tiny_spec([None, 20], 6, 2, 64), 16),
        (MIXED, tiny_spec([9], 5, 1, 96, cap=4.0), 128),
    ],
    ids=["decode", "decode-cap", "verify", "verify-256", "mixed", "mixed-cap"],
)
def test_float32_is_exact_over_ragged_rows(rows, spec, block_size, device):
    check(rows, spec, block_size, device, torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_lose_no_more_than_their_type(dtype, device):
    check([(1, 70), (20, 45), (1, 3)], tiny_spec([None, 16], 8, 2, 64), 16, device, dtype)


def test_the_tiles_of_the_table_work_too(device):
    check([(1, 100), (9, 70), (1, 3)], tiny_spec([None], 4, 2, 128), 16, device, torch.float32, tiles=None)


@pytest.mark.parametrize("splits", [1, 5])
def test_any_number_of_splits_gives_the_answer(splits, device):
    case = make_paged(
        [(1, 200), (1, 5)], tiny_spec([None, 50]), block_size=8, generator=torch.Generator().manual_seed(fresh_seed())
    )
    for layer, out in enumerate(answers(case, device, torch.float32, SMALL, splits=splits)):
        assert (out.double() - dense_attention(case, layer)).abs().max().item() <= BOUNDS[torch.float32]


def test_other_rows_and_block_sizes_change_no_bit_in_float32(device, monkeypatch):
    monkeypatch.setattr(attention, "PART_LENGTH", 40)
    seed = fresh_seed()
    spec = tiny_spec([None, 20])
    row, others = (1, 90), [(1, 133), (1, 1)]

    def answer(neighbours: list[tuple[int, int]], block_size: int, salt: int) -> list[torch.Tensor]:
        gens = [torch.Generator().manual_seed(seed + salt + i) for i in range(len(neighbours))]
        case = make_paged(
            [*neighbours, row], spec, block_size=block_size, generator=torch.Generator().manual_seed(seed + salt),
            contents=[*gens, torch.Generator().manual_seed(seed)],
        )  # fmt: skip
        return [out[-1] for out in answers(case, device, torch.float32, SMALL)]

    alone, among, finer = answer([], 16, 1), answer(others, 16, 100), answer(others, 8, 1000)
    for layer in (0, 1):
        assert torch.equal(alone[layer], among[layer]) and torch.equal(alone[layer], finer[layer])


def test_padding_rows_and_negative_slots_are_skipped(device):
    """A captured graph has more rows than there are sequences."""
    case = make_paged(
        [(1, 40), (1, 17)], tiny_spec([None]), block_size=8, generator=torch.Generator().manual_seed(fresh_seed())
    )
    before = case.cache.kv.clone()
    expected = answers(case, device, torch.float32, SMALL)[0]
    batch, pad = on(device, case.batch), 3
    wide = AttentionBatch(
        query_start=torch.cat([batch.query_start, batch.query_start[-1:].expand(pad)]),
        context_len=torch.cat([batch.context_len, torch.zeros(pad, dtype=torch.int32, device=device)]),
        block_tables=[
            torch.cat([t, torch.full((pad, t.shape[1]), -1, dtype=torch.int32, device=device)])
            for t in batch.block_tables
        ],
        slots=[torch.cat([s, torch.full((pad,), -1, dtype=torch.int64, device=device)]) for s in batch.slots],
        max_query=1,
        max_context=40,
    )
    kv = before.to(device, copy=True)
    backend = TritonAttention(KVCache(kv, case.layout), case.spec, tiles=SMALL)
    backend.plan(wide)

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((pad, *x.shape[1:]), float("nan"))]).to(device)

    backend.write(0, padded(case.new(case.keys[0])), padded(case.new(case.values[0])))
    written = (kv.cpu().isfinite() & ~before.isfinite()).sum().item()
    assert written == 2 * 2 * case.spec.num_kv_heads * case.spec.head_dim
    assert torch.equal(backend.attend(0, padded(case.queries[0]))[:2].cpu(), expected)


KINDS = ["int8,fp8", "fp8,int4", "int4,int8"]


@pytest.mark.parametrize("kv_dtype", KINDS)
def test_a_quantised_pool_gets_the_definitions_bytes_and_is_read_as_it_is(kv_dtype, device):
    seed = fresh_seed()
    generator = torch.Generator().manual_seed(seed)
    spec = tiny_spec([None], 4, 2, 96 if "int4" in kv_dtype else 72)
    case = make_paged([(1, 34), (5, 9)], spec, block_size=8, generator=generator, hybrid=False)
    layout = replace(case.layout, kv_dtype=kv_dtype)
    shape = quantized_shape_of(layout, spec)
    pools = [torch.full((case.cache.kv.shape[0], *shape), 0x7F, dtype=torch.uint8) for _ in range(2)]
    definition = ReferenceAttention(KVCache(pools[0], layout), spec)
    kernels = TritonAttention(KVCache(pool := pools[1].to(device), layout), spec, tiles=SMALL)
    history, whole = chunks(case)
    for batch in (history, whole):
        definition.plan(batch)
        kernels.plan(on(device, batch))
        for layer in range(spec.num_layers):
            # Rows of every size: tiny, huge, zeros.
            key, value = (steep(part(case, x[layer], batch), seed) for x in (case.keys, case.values))
            definition.write(layer, key, value)
            kernels.write(layer, key.to(device), value.to(device))
            assert torch.equal(pool.cpu(), pools[0]), f"layer {layer}: bytes differ"
    for layer in range(spec.num_layers):
        query = case.queries[layer]
        expected = definition.attend(layer, query)
        scale = expected.abs().max().item()
        for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 1e-2)):
            definition_at = definition.attend(layer, query.to(dtype).float())
            out = kernels.attend(layer, query.to(device, dtype)).float().cpu()
            assert (out - definition_at).abs().max().item() <= bound * scale, dtype


def quantized_shape_of(layout, spec):
    from octavo.core.kv_format import parse_kv_dtype
    from octavo.kernels.quantized_kv import quantized_shape

    return quantized_shape(parse_kv_dtype(layout.kv_dtype), layout, spec.num_kv_heads, spec.head_dim)


def chunks(case: Paged) -> tuple[AttentionBatch, AttentionBatch]:
    """The whole history of every row written as one step, and the case's own step."""
    before = [context - new for new, context in case.rows]
    size, table = case.layout.block_size, case.batch.block_tables[0]
    slots = [int(table[r, p // size]) * size + p % size for r, n in enumerate(before) for p in range(n)]
    starts = torch.tensor([0, *before]).cumsum(0).to(torch.int32)
    contexts = torch.tensor(before, dtype=torch.int32)
    return AttentionBatch(starts, contexts, [table], [torch.tensor(slots)], max(before), max(before)), case.batch


def part(case: Paged, rows: list[torch.Tensor], batch: AttentionBatch) -> torch.Tensor:
    """What `batch` writes of per-row tensors."""
    starts, contexts = batch.query_start.tolist(), batch.context_len.tolist()
    return torch.cat(
        [x[c - (starts[i + 1] - starts[i]) : c] for i, (x, c) in enumerate(zip(rows, contexts, strict=True))]
    )


def steep(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Some rows scaled by powers of two, one of zeros, one constant."""
    g = torch.Generator().manual_seed(seed + len(x))
    scale = 2.0 ** torch.randint(-3, 3, (x.shape[0], x.shape[1], 1), generator=g)
    x = x * scale
    x[len(x) // 2, 0] = 0
    x[len(x) // 3, 0] = -1.5
    return x


def test_a_number_that_is_not_finite_spoils_its_own_row_only(device):
    spec = tiny_spec([None], 2, 1, 32)
    layout = replace(build_layout([None], block_size=8, bytes_per_token_layer=1), kv_dtype="int8")
    x = torch.randn(3, 1, 32, generator=torch.Generator().manual_seed(fresh_seed()))
    x[1, 0, 5], x[2, 0, 7] = float("nan"), float("inf")
    pools = []
    for backend_of, where in ((ReferenceAttention, "cpu"), (TritonAttention, device)):
        kv = torch.zeros(1, *quantized_shape_of(layout, spec), dtype=torch.uint8, device=where)
        backend = backend_of(KVCache(kv, layout), spec)
        batch = AttentionBatch(
            torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32),
            [torch.zeros(1, 1, dtype=torch.int32)], [torch.arange(3)], 3, 3,
        )  # fmt: skip
        backend.plan(on(where, batch))
        backend.write(0, x.to(where), x.to(where))
        pools.append(kv.cpu())
    assert torch.equal(pools[0][:, :, : 8 * 32], pools[1][:, :, : 8 * 32])
    scales = [pool[0, 0, 8 * 32 : 8 * 34].view(torch.bfloat16)[:3] for pool in pools]
    assert torch.equal(scales[0][0], scales[1][0])
    assert scales[0].isnan().tolist() == scales[1].isnan().tolist() == [False, True, True]


# -- bounds, copies, choice -----------------------------------------------------------------------------------------


def test_shapes_that_do_not_fit_are_refused(device):
    case = make_paged([(1, 20), (3, 9)], tiny_spec([None]), block_size=4, generator=torch.Generator().manual_seed(0))
    backend = TritonAttention(KVCache(case.cache.kv.to(device), case.layout), case.spec)
    batch = on(device, case.batch)
    with pytest.raises(BoundsError, match="query_start has 2 entries for 2 rows"):
        backend.plan(replace(batch, query_start=batch.query_start[:2]))
    with pytest.raises(BoundsError, match="one of each per group"):
        backend.plan(replace(batch, slots=[]))
    with pytest.raises(BoundsError, match="20 tokens does not fit a table of 4 blocks of 4"):
        backend.plan(replace(batch, block_tables=[batch.block_tables[0][:, :4]]))
    with pytest.raises(BoundsError, match="int32 with 2"):
        backend.plan(replace(batch, block_tables=[batch.block_tables[0].long()]))
    backend.plan(batch)
    with pytest.raises(BoundsError, match=r"key of shape \(3, 2, 16\): the planned step needs \(4, 2, 16\)"):
        backend.write(0, torch.zeros(3, 2, 16, device=device), torch.zeros(4, 2, 16, device=device))
    with pytest.raises(ConfigError, match="float64"):
        backend.attend(0, torch.zeros(4, 4, 16, dtype=torch.float64, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_copies_happen_in_order_also_when_they_chain(dtype, device):
    spec = tiny_spec([None, None], 2, 1, 24)
    layout = build_layout(spec.windows, block_size=8, bytes_per_token_layer=1)
    shape: tuple[int, ...] = (11, 2, 2, 1, 8, 24)
    if dtype == torch.uint8:
        layout = replace(layout, kv_dtype="int8")
        shape = (11, *quantized_shape_of(layout, spec))
    generator = torch.Generator().manual_seed(fresh_seed())
    start = torch.randint(0, 200, shape, generator=generator).to(dtype)
    pairs = [(0, 1), (1, 2), (2, 3), (5, 1), (1, 6), (6, 6)]
    pools = [start.clone(), start.to(device, copy=True)]
    ReferenceAttention(KVCache(pools[0], layout), spec).copy_blocks(pairs)
    backend = make_backend("triton", KVCache(pools[1], layout), spec)
    backend.copy_blocks(pairs)
    assert torch.equal(pools[1].cpu(), pools[0])
    backend.copy_blocks([])
    with pytest.raises(BoundsError, match=r"copy 1 of 2: \(3, 11\)"):
        backend.copy_blocks([(0, 1), (3, 11)])


def test_what_the_kernels_cannot_serve_is_refused_with_the_reason():
    spec = tiny_spec([None], 2, 1, 20)
    layout = build_layout([None], block_size=8, bytes_per_token_layer=1)
    with pytest.raises(ValueError, match="head_dim=20 is not a multiple of 8"):
        make_backend("triton", KVCache(torch.zeros(3, 1, 2, 1, 8, 20), layout), spec)
    with pytest.raises(ValueError, match="not a contiguous"):
        make_backend("triton", KVCache(torch.zeros(3, 1, 2, 1, 4, 16), layout), tiny_spec([None], 2, 1, 16))


def test_splits_follow_the_batch_and_never_more_than_the_context_has_tiles(device):
    case = make_paged([(1, 20)], tiny_spec([None], 4, 2), block_size=8, generator=torch.Generator().manual_seed(0))
    backend = TritonAttention(
        KVCache(case.cache.kv.to(device), case.layout), case.spec, tiles=replace(SMALL, programs=512)
    )
    assert backend.num_splits(1, 131072, 2) == 64 and backend.num_splits(1, 100, 2) == 4
    assert backend.num_splits(64, 131072, 2) == 4 and backend.num_splits(256, 131072, 2) == 1
    assert backend.num_splits(1, 131072, 4) == backend.num_splits(256, 131072, 4) == 128, "nor looks at the batch"


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 192, 256])
def test_the_table_has_tiles_that_fit_shared_memory(capability, head_dim):
    shared = {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 64 if capability < (8, 0) else 99) << 10
    width = 1 << (head_dim - 1).bit_length()
    for operand in (2, 4):
        tiles = pick_tiles(head_dim, operand, capability, 132)
        for tile in (tiles.split, tiles.tile):
            stages = max(1, tile.stages // 2)
            assert (2 * tile.keys * stages + max(tile.rows, 16)) * width * operand <= shared, tile


# -- on a GPU only --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (4, 1, 256), (32, 32, 80)])
def test_real_sizes(heads, kv_heads, head_dim, block_size, dtype):
    rows = [(1, 4097), (1, 1), (512, 2000), (1, 777), (5, 900), (130, 130)]
    spec = tiny_spec([None, 1024], heads, kv_heads, head_dim)
    case = make_paged(
        rows, spec, block_size=block_size, generator=torch.Generator().manual_seed(fresh_seed()), dtype=dtype
    )
    found = answers(case, "cuda", dtype)
    reference = ReferenceAttention(KVCache(case.cache.kv.cuda(), case.layout), spec)
    reference.plan(on("cuda", case.batch))
    for layer, out in enumerate(found):
        reference.write(layer, case.new(case.keys[layer]).cuda(), case.new(case.values[layer]).cuda())
        expected = reference.attend(layer, case.queries[layer].cuda()).cpu()
        assert (out - expected).abs().max().item() <= (2e-5 if dtype == torch.float32 else BOUNDS[dtype])
