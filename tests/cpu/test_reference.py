"""`ReferenceAttention` against dense float64 attention over poisoned pools, its windows, its bounds, its bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.paged import dense_attention, fresh_seed, make_paged, tiny_spec
from octavo.core.kv_layout import build_layout
from octavo.errors import BoundsError
from octavo.kernels.interface import KVCache, make_backend
from octavo.kernels.reference import QUERY_TILE, ReferenceAttention, independent_runs, rung


def run(case, layer: int) -> torch.Tensor:
    backend = ReferenceAttention(case.cache, case.spec)
    backend.plan(case.batch)
    backend.write(layer, case.new(case.keys[layer]), case.new(case.values[layer]))
    return backend.attend(layer, case.queries[layer])


@pytest.mark.parametrize(
    ("block_size", "heads", "kv_heads", "cap"),
    [(1, 4, 2, None), (2, 2, 2, 5.0), (8, 4, 1, None), (16, 4, 2, 5.0), (32, 3, 3, None), (64, 4, 1, 5.0)],
)
def test_equals_dense_attention_on_ragged_rows(block_size, heads, kv_heads, cap):
    g = torch.Generator().manual_seed(fresh_seed())
    rows = [(1, 1), (1, 65), (5, 5), (7, 40), (1, 130), (33, 33), (2, 64)]
    rows += [(n := int(torch.randint(1, 20, (), generator=g)), n + int(torch.randint(0, 90, (), generator=g)))]
    spec = tiny_spec([None, 8, 24, None], heads, kv_heads, cap=cap)
    case = make_paged(rows, spec, block_size=block_size, generator=g)
    for layer in range(spec.num_layers):
        torch.testing.assert_close(run(case, layer).double(), dense_attention(case, layer), atol=2e-5, rtol=2e-5)


def test_one_table_for_all_layers_still_applies_each_layers_window():
    g = torch.Generator().manual_seed(fresh_seed())
    case = make_paged([(1, 50), (9, 30)], tiny_spec([None, 8]), block_size=4, generator=g, hybrid=False)
    assert case.layout.num_groups == 1
    for layer in (0, 1):
        torch.testing.assert_close(run(case, layer).double(), dense_attention(case, layer), atol=2e-5, rtol=2e-5)


def test_prompt_longer_than_a_query_tile():
    g = torch.Generator().manual_seed(fresh_seed())
    spec = tiny_spec([None, 40], 2, 1, 8)
    case = make_paged([(QUERY_TILE + 50, QUERY_TILE + 90), (1, 3)], spec, block_size=16, generator=g)
    for layer in (0, 1):
        torch.testing.assert_close(run(case, layer).double(), dense_attention(case, layer), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_cache_is_read_exactly_and_output_keeps_the_query_dtype(dtype):
    g = torch.Generator().manual_seed(fresh_seed())
    case = make_paged([(1, 40), (6, 20)], tiny_spec([None, 8]), block_size=8, generator=g, dtype=dtype)
    for layer in (0, 1):
        # Keys and values were rounded to the dtype before; with float32 queries nothing else is.
        torch.testing.assert_close(run(case, layer).double(), dense_attention(case, layer), atol=2e-5, rtol=2e-5)
    case.queries = [q.to(dtype) for q in case.queries]
    assert run(case, 0).dtype == dtype


@pytest.mark.parametrize("position", [7, 8, 9, 40])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_window_of_8_is_the_token_itself_and_the_7_before_it(position, new, block_size):
    g = torch.Generator().manual_seed(1)
    spec = tiny_spec([8], 1, 1, 64)
    case = make_paged([(new, position + 1)], spec, block_size=block_size, generator=g)
    # Zero queries weigh every visible token alike; value p is the unit vector p, so the output lists who was seen.
    case.queries[0].zero_()
    case.values[0][0] = torch.eye(64)[: position + 1].unsqueeze(1)
    group = case.layout.groups[0]
    for p in range(group.first_needed(position + 1 - new), position + 1 - new):
        block = int(case.batch.block_tables[0][0, p // block_size])
        case.cache.kv[block, 0, 1, :, p % block_size] = case.values[0][0][p]
    seen = (run(case, 0)[-1, 0] > 0).nonzero().flatten().tolist()
    assert seen == list(range(max(0, position - 7), position + 1))


def test_attending_twice_and_replanning_leave_no_trace():
    g = torch.Generator().manual_seed(fresh_seed())
    case = make_paged([(1, 90), (4, 12)], tiny_spec([None]), block_size=8, generator=g)
    other = make_paged([(1, 200)], tiny_spec([None]), block_size=8, generator=g)
    backend = ReferenceAttention(case.cache, case.spec)
    backend.plan(case.batch)
    backend.write(0, case.new(case.keys[0]), case.new(case.values[0]))
    first = backend.attend(0, case.queries[0])
    kept = first.clone()
    backend.attend(0, case.queries[0] * 3)
    assert torch.equal(first, kept), "a returned tensor must not be scratch memory"
    run(other, 0)
    assert torch.equal(backend.attend(0, case.queries[0]), kept)


@pytest.mark.parametrize("row", [(1, 70), (5, 33), (1, 9)])
def test_other_rows_change_no_bit(row):
    """Failure kind 34: alone, among seven others, and with the others' contents changed."""
    seed = fresh_seed()
    spec = tiny_spec([None, 8])
    others = [(1, 300), (20, 20), (1, 1), (3, 60), (1, 64), (1, 66), (7, 40)]

    def answer(neighbours, salt):
        gens = [torch.Generator().manual_seed(seed + salt + i) for i in range(len(neighbours))]
        mine = torch.Generator().manual_seed(seed)
        layout_gen = torch.Generator().manual_seed(seed + salt)
        rows = [*neighbours[:3], row, *neighbours[3:]]
        case = make_paged(rows, spec, block_size=8, generator=layout_gen, contents=[*gens[:3], mine, *gens[3:]])
        first = sum(n for n, _ in neighbours[:3])
        return [run(case, layer)[first : first + row[0]] for layer in (0, 1)]

    alone, among, changed = answer([], 1), answer(others, 100), answer(others, 1000)
    for layer in (0, 1):
        assert torch.equal(among[layer], changed[layer])
        assert torch.equal(alone[layer], among[layer])


def test_lengths_are_rounded_up_to_a_ladder():
    assert [rung(n) for n in (1, 64, 65, 96, 97, 128, 129, 200, 4000)] == [64, 64, 96, 96, 128, 128, 192, 256, 4096]


# -- bounds ---------------------------------------------------------------------------------------------------------


def good_case():
    return make_paged([(1, 20), (3, 9)], tiny_spec([None]), block_size=4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("entry", [-1, 11, 2**31 - 1])
def test_a_table_entry_outside_the_pool_names_row_block_and_limit(entry):
    case = good_case()
    assert case.cache.kv.shape[0] == 11
    case.batch.block_tables[0][1, 1] = entry
    with pytest.raises(BoundsError, match=rf"row 1, group 0: logical block 1 is {entry}, .* 0 to 10"):
        ReferenceAttention(case.cache, case.spec).plan(case.batch)


@pytest.mark.parametrize("slot", [-1, 44, 2**40])
def test_a_slot_outside_the_pool_names_row_token_and_limit(slot):
    case = good_case()
    case.batch.slots[0][2] = slot
    with pytest.raises(BoundsError, match=rf"row 1, group 0: token 1 .* slot {slot} .* 0 to 43"):
        ReferenceAttention(case.cache, case.spec).plan(case.batch)


def test_a_table_that_is_too_short_is_refused():
    case = good_case()
    batch = replace(case.batch, block_tables=[case.batch.block_tables[0][:, :4]])
    with pytest.raises(BoundsError, match=r"row 0, group 0: a context of 20 tokens reaches logical block 4, .* has 4"):
        ReferenceAttention(case.cache, case.spec).plan(batch)


def test_inconsistent_lengths_are_refused():
    case = good_case()
    with pytest.raises(BoundsError, match="row 1: 3 new tokens do not fit a context of 2"):
        ReferenceAttention(case.cache, case.spec).plan(replace(case.batch, context_len=torch.tensor([20, 2])))
    with pytest.raises(BoundsError, match="3 slots for 4 tokens"):
        ReferenceAttention(case.cache, case.spec).plan(replace(case.batch, slots=[case.batch.slots[0][:3]]))
    with pytest.raises(BoundsError, match="KV groups"):
        ReferenceAttention(case.cache, case.spec).plan(replace(case.batch, slots=[]))


def test_a_cache_of_another_shape_is_refused():
    spec = tiny_spec([None])
    layout = build_layout(spec.windows, block_size=4, bytes_per_token_layer=1)
    with pytest.raises(ValueError, match="does not fit the model"):
        ReferenceAttention(KVCache(torch.zeros(3, 1, 2, 2, 8, 16), layout), spec)


# -- copies ---------------------------------------------------------------------------------------------------------


def test_copies_happen_in_order_also_when_they_chain():
    case = good_case()
    kv = case.cache.kv
    kv[:] = torch.arange(kv.shape[0]).view(-1, 1, 1, 1, 1, 1).float().expand_as(kv)
    backend = make_backend("reference", case.cache, case.spec)
    backend.copy_blocks([(0, 1), (1, 2), (2, 3), (5, 1), (1, 6), (6, 6)])
    assert kv[:, 0, 0, 0, 0, 0].tolist() == [0, 5, 0, 0, 4, 5, 5, 7, 8, 9, 10]
    assert bool((kv == kv[:, :1, :1, :1, :1, :1]).all()), "whole blocks move"
    backend.copy_blocks([])
    with pytest.raises(BoundsError, match=r"copy 1 of 2: \(3, 11\)"):
        backend.copy_blocks([(0, 1), (3, 11)])


def test_runs_are_cut_only_where_order_matters():
    assert independent_runs([(0, 1), (0, 2), (3, 4)]) == [[(0, 1), (0, 2), (3, 4)]]
    assert independent_runs([(0, 1), (1, 2)]) == [[(0, 1)], [(1, 2)]]  # reads what was written
    assert independent_runs([(0, 1), (2, 0)]) == [[(0, 1)], [(2, 0)]]  # overwrites what was read
    assert independent_runs([(0, 1), (2, 1)]) == [[(0, 1)], [(2, 1)]]  # written twice
    assert independent_runs([]) == []
