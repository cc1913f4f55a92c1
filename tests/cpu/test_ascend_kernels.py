"""The Ascend backend over the emulated operators: against the reference and dense attention, and its limits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import ascend_emulation
from helpers.ascend_emulation import OperatorError
from helpers.npu_device import NpuTensor
from helpers.paged import Paged, dense_attention, fresh_seed, make_paged, tiny_spec
from octavo.errors import BoundsError, ConfigError
from octavo.kernels import ascend
from octavo.kernels.interface import AttentionBatch, KVCache, make_backend
from octavo.kernels.reference import ReferenceAttention

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    return ascend_emulation.install(monkeypatch)


def on_npu(batch: AttentionBatch) -> AttentionBatch:
    return replace(
        batch,
        query_start=batch.query_start.to("npu"),
        context_len=batch.context_len.to("npu"),
        block_tables=[t.to("npu") for t in batch.block_tables],
        slots=[s.to("npu") for s in batch.slots],
    )


def case_of(rows: list[tuple[int, int]], windows: list[int | None], **kwargs: Any) -> Paged:
    """A ragged case in blocks of 128 whose held blocks hold large numbers, not NaN, behind the window.

    A masked key meets its value with weight 0, so what lies behind a mask must be finite; everything past a row's
    context, and every block no table names, stays NaN.
    """
    spec = tiny_spec(windows, **{"head_dim": 32, **kwargs.pop("spec", {})})
    kwargs.setdefault("dtype", torch.float16)
    case = make_paged(rows, spec, block_size=kwargs.pop("block_size", 128), **kwargs)
    size = case.layout.block_size
    for group, table in zip(case.layout.groups, case.batch.block_tables, strict=True):
        for b, (new, context) in enumerate(case.rows):
            old = group.first_needed(context - new)
            if old % size:
                case.cache.kv[table[b, old // size], :, :, :, : old % size] = 1000.0
    return case


def run(case: Paged) -> tuple[list[torch.Tensor], torch.Tensor, ascend.AscendAttention]:
    """(outputs per layer on the CPU, the pool afterwards, the backend)"""
    cache = KVCache(case.cache.kv.to("npu"), case.layout)
    backend = make_backend("auto", cache, case.spec)
    assert isinstance(backend, ascend.AscendAttention)
    backend.plan(on_npu(case.batch))
    outputs = []
    for layer, queries in enumerate(case.queries):
        dtype = case.cache.kv.dtype
        backend.write(layer, *(case.new(t[layer]).to(dtype).to("npu") for t in (case.keys, case.values)))
        outputs.append(backend.attend(layer, queries.to(dtype).to("npu")).cpu())
    return outputs, cache.kv.cpu(), backend


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "windows"),
    [
        ([(1, 1), (1, 128), (1, 129), (1, 300)], [None, None]),  # decode rows only: one call
        ([(5, 5)], [None]),
        ([(140, 140), (1, 7), (3, 131), (1, 256), (3, 3)], [None, None, None]),  # chunks, decode, verification rows
        ([(130, 400), (1, 500), (1, 20), (4, 260), (4, 131)], [None, 40, 40]),
        # Windows that start inside a block, on its first and on its last token.
        ([(1, 129), (1, 167), (1, 168), (1, 170), (2, 168), (2, 297)], [40, None, 150, None]),
    ],
    ids=["decode", "prompt", "mixed", "window", "two-windows"],
)
def test_agrees_with_dense_attention(
    rows: list[tuple[int, int]], windows: list[int | None], dtype: torch.dtype
) -> None:
    case = case_of(rows, windows, generator=torch.Generator().manual_seed(1), dtype=dtype)
    outputs, kv, _ = run(case)
    for layer, output in enumerate(outputs):
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), dense_attention(case, layer), rtol=0, atol=TOLERANCE[dtype])
    reference = ReferenceAttention(case.cache, case.spec)
    reference.plan(case.batch)
    for layer in range(case.spec.num_layers):
        reference.write(layer, case.new(case.keys[layer]), case.new(case.values[layer]))
    assert torch.equal(kv.nan_to_num(-9), case.cache.kv.nan_to_num(-9))  # written where the reference writes, only


def test_agrees_on_random_ragged_batches() -> None:
    seed = fresh_seed()
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for _ in range(6):
        rows = [(rng.choice([1, 1, 1, 2, 5, 33]), 0) for _ in range(rng.randint(1, 7))]
        rows = [(new, new + rng.choice([0, 1, 94, 126, 127, 128, 250])) for new, _ in rows]
        windows = [rng.choice([None, 17, 128, 200]) for _ in range(rng.randint(1, 4))]
        shape = rng.choice([(4, 2, 32), (6, 1, 16), (3, 3, 48)])
        case = case_of(
            rows,
            windows,
            generator=generator,
            hybrid=rng.random() < 0.7,
            spec={"heads": shape[0], "kv_heads": shape[1], "head_dim": shape[2]},
            block_size=rng.choice([128, 256]),
        )
        for layer, output in enumerate(run(case)[0]):
            torch.testing.assert_close(output.double(), dense_attention(case, layer), rtol=0, atol=4e-3)


def test_many_rows_over_the_same_blocks_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([(1, 600)], [None], generator=torch.Generator().manual_seed(2))
    copies = 9  # nine samples of one prompt: 45 table entries over 8 blocks of one layer, 15 in a view
    many = replace(
        case.batch,
        query_start=torch.arange(copies + 1, dtype=torch.int32),
        context_len=case.batch.context_len.repeat(copies),
        block_tables=[case.batch.block_tables[0].repeat(copies, 1)],
        slots=[case.batch.slots[0]],
    )
    backend = ascend.AscendAttention(KVCache(case.cache.kv.to("npu"), case.layout), case.spec)
    backend.plan(on_npu(case.batch))
    backend.write(0, *(case.new(t[0]).half().to("npu") for t in (case.keys, case.values)))
    query = case.queries[0].half().to("npu")
    alone = backend.attend(0, query).cpu()
    sizes = []
    inner = torch.ops.npu.npu_fused_infer_attention_score
    monkeypatch.setattr(
        backend._ops, "npu_fused_infer_attention_score", lambda *a, **k: sizes.append(len(a[0])) or inner(*a, **k)
    )
    spread = replace(many, slots=[torch.arange(copies) + 128 * int(case.batch.block_tables[0][0, 4]) + 90])
    backend.plan(on_npu(spread))
    out = backend.attend(0, query.expand(copies, -1, -1).contiguous()).cpu()
    assert sizes == [3, 3, 3]
    assert torch.equal(out, alone.expand(copies, -1, -1))


def test_a_row_has_the_same_bits_whoever_its_neighbours_are() -> None:
    rows = [(1, 200), (40, 170), (3, 130)]
    seeds = [torch.Generator().manual_seed(s) for s in range(3)]
    together = run(case_of(rows, [None, 60], generator=torch.Generator().manual_seed(3), contents=seeds))[0]
    token = 0
    for b, (new, context) in enumerate(rows):
        own = [torch.Generator().manual_seed(b)]
        alone = run(case_of([(new, context)], [None, 60], generator=torch.Generator().manual_seed(4), contents=own))[0]
        for layer in range(2):
            assert torch.equal(together[layer][token : token + new], alone[layer])
        token += new


def test_blocks_are_copied_in_order() -> None:
    kv = torch.randn(6, 2, 2, 2, 128, 16, generator=torch.Generator().manual_seed(5)).half()
    spec = tiny_spec([None, None])
    layout = make_paged([(1, 1)], spec, block_size=128, generator=torch.Generator()).layout
    pairs = [(0, 1), (1, 2), (3, 1), (5, 0)]
    device, host = KVCache(kv.clone().to("npu"), layout), KVCache(kv.clone(), layout)
    backend, reference = ascend.AscendAttention(device, spec), ReferenceAttention(host, spec)
    backend.copy_blocks(pairs)
    reference.copy_blocks(pairs)
    assert torch.equal(device.kv.cpu(), host.kv)
    with pytest.raises(BoundsError, match=r"copy 1 of 2: \(0, 6\) leaves the pool's blocks 0 to 5"):
        backend.copy_blocks([(0, 1), (0, 6)])


def test_a_batch_outside_the_pool_is_refused() -> None:
    def changed(**fields: Any) -> AttentionBatch:
        return on_npu(replace(case.batch, **fields))

    case = case_of([(2, 300), (1, 10)], [None], generator=torch.Generator().manual_seed(6))
    backend = ascend.AscendAttention(KVCache(case.cache.kv.to("npu"), case.layout), case.spec)
    blocks = case.cache.kv.shape[0]
    for entry in (-1, blocks):
        table = case.batch.block_tables[0].clone()
        table[0, 2] = entry
        with pytest.raises(BoundsError, match=f"an entry of group 0's table lies outside the pool of {blocks} blocks"):
            backend.plan(changed(block_tables=[table]))
    for slot in (-1, blocks * 128):
        with pytest.raises(BoundsError, match="a slot of group 0 lies outside"):
            backend.plan(changed(slots=[torch.tensor([0, 1, slot])]))
    with pytest.raises(BoundsError, match="2 slots for 3 tokens"):
        backend.plan(changed(slots=[torch.tensor([0, 1])]))
    with pytest.raises(BoundsError, match="row 0: a context of 1000 tokens needs 8 blocks, the table has 5"):
        backend.plan(changed(context_len=torch.tensor([1000, 10], dtype=torch.int32)))
    with pytest.raises(BoundsError, match="row 1: 1 new tokens do not fit a context of 0"):
        backend.plan(changed(context_len=torch.tensor([300, 0], dtype=torch.int32)))
    with pytest.raises(BoundsError, match="0 block tables and 1 slot lists for 1 KV groups"):
        backend.plan(changed(block_tables=[]))
    wide = torch.zeros(2, 2060, dtype=torch.int32)
    with pytest.raises(BoundsError, match="row 1: a context of 262145 tokens; the operator reads up to 262144"):
        backend.plan(changed(block_tables=[wide], context_len=torch.tensor([300, 262145], dtype=torch.int32)))


@pytest.mark.parametrize(
    ("spec", "dtype", "kv_dtype", "reason"),
    [
        ({}, torch.float32, "auto", "takes float16 and bfloat16, not float32"),
        ({}, torch.float16, "int8", "for single queries only, not kv_cache_dtype='int8'"),
        ({"cap": 50.0}, torch.float16, "auto", "no soft cap on scores; this model caps at 50"),
        ({"head_dim": 24}, torch.float16, "auto", "a multiple of 16 numbers up to 512, this model has 24"),
        ({"head_dim": 528}, torch.float16, "auto", "this model has 528"),
        ({"heads": 260, "kv_heads": 20}, torch.float16, "auto", "this model has 260 query heads on 20 key heads"),
        ({"heads": 65, "kv_heads": 1}, torch.float16, "auto", "up to 256 heads, 64 on one key head"),
    ],
)
def test_what_the_operator_cannot_do_is_said(
    spec: dict[str, Any], dtype: torch.dtype, kv_dtype: str, reason: str
) -> None:
    assert reason in ascend.model_mismatch(tiny_spec([None], **spec), dtype, kv_dtype)
    assert ascend.model_mismatch(tiny_spec([None, 8]), torch.bfloat16) == ""


def test_block_sizes_and_chips() -> None:
    assert [size for size in (1, 16, 32, 64, 128, 256) if not ascend.block_size_mismatch(size)] == [128, 256]
    said = ascend.block_size_mismatch(16)
    assert "block_size=16" in said and "128 or 256" in said and "attention_backend='reference'" in said
    assert ascend.chip_mismatch("Ascend910B4") == ascend.chip_mismatch("Ascend910_9382") == ""
    assert "this one is Ascend310P3" in ascend.chip_mismatch("Ascend310P3")


def test_backends_are_chosen_by_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of([(1, 1)], [None], generator=torch.Generator().manual_seed(7))
    cache = KVCache(case.cache.kv.to("npu"), case.layout)
    assert make_backend("ascend", cache, case.spec).name == "ascend"
    capped = replace(case.spec, attention_softcap=30.0)
    assert make_backend("auto", cache, capped).name == "reference"
    with pytest.raises(
        ValueError, match="attention_backend='ascend' cannot be used: torch_npu's fused attention has no"
    ):
        make_backend("ascend", cache, capped)
    with pytest.raises(ValueError, match="it runs on an NPU, the KV blocks are on cpu"):
        make_backend("ascend", case.cache, case.spec)
    ascend_emulation.install(monkeypatch, name="Ascend310P3")
    assert make_backend("auto", cache, case.spec).name == "reference"


def test_the_reference_runs_on_the_device_too() -> None:
    case = case_of([(5, 40), (1, 9)], [None, 8], generator=torch.Generator().manual_seed(8), block_size=16)
    backend = make_backend("reference", KVCache(case.cache.kv.to("npu"), case.layout), case.spec)
    backend.plan(on_npu(case.batch))
    for layer in range(2):
        backend.write(layer, *(case.new(t[layer]).half().to("npu") for t in (case.keys, case.values)))
        out = backend.attend(layer, case.queries[layer].half().to("npu")).cpu()
        torch.testing.assert_close(out.double(), dense_attention(case, layer), rtol=0, atol=4e-3)


# -- the emulation itself: a call the documentation forbids must fail, or passing proves nothing ----------------------


def good_call() -> dict[str, Any]:
    """Two prompt rows of three queries over blocks of 128."""
    pool = torch.randn(5, 2, 128, 16).half()
    return {
        "query": torch.randn(2, 4, 3, 16).half().to("npu"),
        "key": pool.to("npu"),
        "value": pool.clone().to("npu"),
        "atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1).to("npu"),
        "actual_seq_lengths": [3, 3],
        "actual_seq_lengths_kv": [10, 200],
        "block_table": torch.tensor([[0, 0], [3, 1]], dtype=torch.int32).to("npu"),
        "num_heads": 4,
        "num_key_value_heads": 2,
        "scale": 0.25,
        "input_layout": "BNSD",
        "sparse_mode": 3,
        "block_size": 128,
    }


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"input_layout": "BNDS"}, "does not exist"),
        ({"input_layout": "BSH"}, "emulated: BNSD"),
        ({"sparse_mode": 5}, "does not exist"),
        ({"sparse_mode": 4}, "not emulated"),
        ({"pre_tokens": 7}, "not emulated: pre_tokens"),
        ({"inner_precise": 1}, "not emulated: inner_precise"),
        ({"num_heads": 2}, "query has 4"),
        ({"num_key_value_heads": 0}, "key: shape"),
        ({"scale": "1"}, "scale"),
        ({"sparse_mode": 3.0}, "sparse_mode"),
        ({"block_size": 64}, "key: shape"),
        ({"actual_seq_lengths_kv": None}, "a list is needed"),
        ({"actual_seq_lengths_kv": [10, 257]}, "2 columns, 3 are needed"),
        ({"actual_seq_lengths_kv": [10, 200, 3][:0]}, "for B = 2"),
        ({"actual_seq_lengths": [4, 3]}, "for S = 3"),
        ({"atten_mask": None}, "for sparse_mode=3"),
        ({"query": lambda v: v.float()}, "is not among"),
        ({"query": lambda v: v.to(torch.bfloat16)}, "one dtype"),
        ({"query": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2)}, "non-contiguous"),
        ({"key": lambda v: v[1:]}, "one shape"),
        ({"block_table": lambda v: v.long()}, "is not among"),
        ({"block_table": lambda v: v[:1]}, "B is 2"),
        ({"block_table": lambda v: v + 4}, "leaves the cache"),
        ({"block_table": lambda v: v.cpu()}, "a tensor of cpu"),
        ({"atten_mask": lambda v: ~v}, "a triangle"),
        ({"atten_mask": lambda v: v[:1024, :1024].contiguous()}, "for sparse_mode=3"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_the_emulation_refuses_what_the_documentation_does(change: dict[str, Any], refusal: str) -> None:
    call = good_call()
    torch.ops.npu.npu_fused_infer_attention_score(**call)
    for name, value in change.items():
        call[name] = value(call[name]) if callable(value) else value
    with pytest.raises(RuntimeError, match=refusal):
        torch.ops.npu.npu_fused_infer_attention_score(**call)


def test_the_emulation_knows_its_arguments() -> None:
    with pytest.raises(RuntimeError, match="scale_value"):
        torch.ops.npu.npu_fused_infer_attention_score(**good_call(), scale_value=1.0)
    call = good_call()
    with pytest.raises(OperatorError, match="the batch's lengths need 6"):  # blocks shared by rows count for each
        torch.ops.npu.npu_fused_infer_attention_score(
            **{**call, "query": torch.randn(6, 4, 3, 16).half().to("npu"), "actual_seq_lengths": [3],
               "actual_seq_lengths_kv": [9], "block_table": torch.zeros(6, 1, dtype=torch.int32).to("npu")}
        )  # fmt: skip


def test_the_emulated_scatter_refuses_what_it_must() -> None:
    scatter = torch.ops.npu.npu_scatter_nd_update_
    pool, index = torch.zeros(4, 3).half().to("npu"), torch.tensor([[1], [2]]).to("npu")
    new = torch.ones(2, 3).half().to("npu")
    assert scatter(pool, index, new) is pool and pool.tolist() == [[0] * 3, [1] * 3, [1] * 3, [0] * 3]
    for bad, refusal in (
        ((pool, index, new.float()), "they must be equal"),
        ((pool, index[:, 0], new), "at least two dimensions"),
        ((pool, index + 2, new), "outside of input"),
        ((pool, index, new[:1]), r"must be \(2, 3\)"),
        ((pool, index.cpu(), new), "a tensor of cpu"),
    ):
        with pytest.raises(RuntimeError, match=refusal):
            scatter(*bad)
    scatter(pool, index * 0, new)
    assert pool[0].isnan().all() and not pool[1:].isnan().any()


def test_the_emulated_device_does_not_mix_with_the_host() -> None:
    there = torch.zeros(3, device="npu")
    assert isinstance(there, NpuTensor) and there.device.type == "npu"
    with pytest.raises(RuntimeError, match="among tensors of npu"):
        there + torch.ones(3)
    with pytest.raises(RuntimeError):
        there.numpy()
    assert torch.empty(2, device="npu").isnan().all()
    assert (there + 1).cpu().tolist() == [1.0] * 3


def test_without_torch_npu_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from octavo import npu_device
    from octavo.devices import find_device

    assert find_device("npu").name == "Ascend910B3"
    assert find_device("auto").kind == "npu"
    with pytest.raises(ConfigError, match=r"torch_npu sees 1 NPU\(s\), numbered from 0"):
        find_device("npu:3")
    ascend_emulation.install(monkeypatch, count=0)
    with pytest.raises(ConfigError, match="torch_npu sees no NPU"):
        find_device("npu")
    assert find_device("auto").kind == "cpu"

    def broken(name: str) -> Any:
        raise OSError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr(npu_device.importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"cannot be loaded \(libhccl.so.*set_env.sh"):
        find_device("npu")
    assert find_device("auto").kind == "cpu"
    monkeypatch.undo()
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    with pytest.raises(ConfigError, match=r"torch_npu is not installed; pip install 'octavo\[ascend\]'"):
        find_device("npu")


def test_the_device_answers_for_its_memory_and_streams(npu: Any) -> None:
    from octavo.devices import find_device

    device = find_device("npu:0")
    assert (device.total_bytes(), device.available_bytes(), device.held_bytes()) == (4 << 30, 2 << 30, 3 << 20)
    assert device.peak_bytes_of(lambda: None) == 8 << 20
    assert device.supports_bfloat16() and not device.supports_float8() and device.is_asynchronous
    assert not device.has_graphs and device.graph_pool() is None
    with pytest.raises(RuntimeError, match="graphs are not used on an NPU"):
        device.capture(lambda: None)
    with device.use(device.stream()):
        device.event().record(device.current_stream())
    device.synchronize()
