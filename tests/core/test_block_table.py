"""Block tables: logical to physical, forks, private copies, windows, what the runner is told, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_pool import BlockPool
from octavo.core.block_table import RELEASED, BlockTable
from octavo.core.step import TableUpdate
from octavo.errors import BoundsError, OutOfBlocksError


def table_of(num_tokens: int, *, pool_size: int = 8, block_size: int = 4) -> tuple[BlockPool, BlockTable]:
    pool = BlockPool(pool_size)
    pool.on_evict = lambda block: None
    table = BlockTable(pool, block_size, seq_id=9, group=2)
    table.append(num_tokens)
    return pool, table


def updates(table: BlockTable) -> list[TableUpdate]:
    found: list[TableUpdate] = []
    table.take_updates(found)
    return found


def test_slots() -> None:
    pool = BlockPool(20)
    table = BlockTable(pool, 16, seq_id=1)
    for block in (3, 7, 11):
        pool.take_exactly(block)
        table.adopt(block)
    assert table.slot(37) == 181
    assert table.slots(15, 18) == [3 * 16 + 15, 7 * 16, 7 * 16 + 1]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_at_multiples_of_the_block_size(tokens: int, blocks: int) -> None:
    pool, table = table_of(tokens)
    assert len(table.ids) == blocks == pool.num_used
    assert table.append(tokens) == 0


def test_append_takes_only_what_is_missing() -> None:
    _, table = table_of(5)
    assert (table.num_missing(8), table.append(8)) == (0, 0)
    assert (table.num_missing(9), table.append(9)) == (1, 1)
    assert table.ids == [0, 1, 2]


def test_bounds_errors_name_sequence_logical_block_and_limit() -> None:
    _, table = table_of(9)
    with pytest.raises(BoundsError, match=r"sequence 9, group 2: logical block 3 is outside.*live blocks 0 to 2"):
        table.slot(12)
    table.release_before(8)
    with pytest.raises(BoundsError, match=r"logical block 1 is outside.*live blocks 2 to 2, block_size 4"):
        table.slot(7)
    with pytest.raises(BoundsError, match="logical block -1"):
        table.slot(-1)
    with pytest.raises(BoundsError, match="logical block 5"):
        table.make_private(5)
    with pytest.raises(BoundsError, match="skip on a table with 3 blocks"):
        table.skip(1)


def test_a_fork_shares_every_block_and_takes_none() -> None:
    pool, parent = table_of(10)
    child = parent.fork(11)
    assert child.ids == parent.ids == [0, 1, 2] and child.ids is not parent.ids
    assert (child.seq_id, child.group, pool.num_used, pool.num_shared) == (11, 2, 3, 3)
    assert parent.free() == 3
    assert (pool.num_used, pool.num_shared) == (3, 0)
    assert child.free() == 3 and pool.num_used == 0


def test_only_the_written_block_is_copied() -> None:
    pool, parent = table_of(10)
    child = parent.fork(11)
    assert child.not_private(10, 11) == [2]
    assert child.not_private(0, 12) == [0, 1, 2]
    assert child.not_private(12, 14) == [], "blocks that are not there yet need no copy"
    assert child.make_private(2) == (2, 3)
    assert (parent.ids, child.ids) == ([0, 1, 2], [0, 1, 3])
    assert (pool.count(2), pool.count(3), pool.num_shared) == (1, 1, 2)
    assert parent.not_private(10, 11) == [], "the last owner writes in place"


def test_a_published_block_is_copied_before_it_is_written() -> None:
    pool, table = table_of(4)
    pool.publish(0)
    assert table.not_private(3, 4) == [0]
    assert table.make_private(0) == (0, 1)
    assert pool.num_cached == 1, "its content stays findable"


def test_copying_with_no_block_left_changes_nothing() -> None:
    pool, parent = table_of(4, pool_size=1)
    child = parent.fork(11)
    with pytest.raises(OutOfBlocksError):
        child.make_private(0)
    assert child.ids == [0] and pool.count(0) == 2


def test_truncate_gives_back_from_the_tail() -> None:
    pool, table = table_of(16)
    assert table.truncate(5) == 2
    assert table.ids == [0, 1] and pool.reuse_order()[:2] == [2, 3]
    assert table.truncate(4) == 1
    assert table.truncate(4) == 0
    assert table.truncate(0) == 1 and table.ids == []


def test_truncate_leaves_what_was_released_alone() -> None:
    pool, table = table_of(12)
    table.release_before(8)
    assert table.truncate(2) == 1
    assert table.ids == [RELEASED, RELEASED] and table.num_live == 0 and pool.num_used == 0


def test_blocks_behind_the_window_go_back_when_they_are_wholly_behind() -> None:
    pool, table = table_of(16)
    assert [table.release_before(p) for p in (3, 4, 7, 12)] == [0, 1, 0, 2]
    assert table.ids == [RELEASED, RELEASED, RELEASED, 3] and table.live_ids() == [3]
    assert table.release_before(99) == 1 and pool.num_used == 0
    assert table.free() == 0


def test_a_fork_of_a_windowed_table_shares_the_live_part_only() -> None:
    pool, table = table_of(12)
    table.release_before(4)
    child = table.fork(11)
    assert child.ids == [RELEASED, 1, 2] and (pool.count(0), pool.count(1)) == (0, 2)


def test_the_runner_is_told_differences() -> None:
    _, table = table_of(8)
    assert updates(table) == [TableUpdate(2, 0, (0, 1))]
    assert updates(table) == []
    child = table.fork(11)
    table.append(9)
    table.make_private(1)
    assert updates(table) == [TableUpdate(2, 1, (3,)), TableUpdate(2, 2, (2,))]
    child.make_private(0)
    assert updates(child) == [TableUpdate(2, 0, (4, 1))], "a table the runner has not seen is sent whole"
    table.truncate(4)
    table.append(8)
    assert updates(table) == [TableUpdate(2, 1, (table.ids[1],))]
    table.forget_sent()
    assert updates(table) == [TableUpdate(2, 0, tuple(table.ids))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=40), st.sampled_from([1, 2, 4, 16]))
def test_the_runners_copy_follows_any_edits(edits: list[tuple[int, int]], block_size: int) -> None:
    """Applying the differences gives the table itself wherever it is still read."""
    pool = BlockPool(200)
    pool.on_evict = lambda block: None
    table = BlockTable(pool, block_size, seq_id=0)
    mirror: list[int] = []
    others: list[BlockTable] = []
    for what, number in edits:
        if what == 0:
            table.append(number)
        elif what == 1:
            table.truncate(number)
        elif what == 2:
            table.release_before(number)
        elif what == 3:
            others.append(table.fork(len(others) + 1))
        elif what == 4:
            for logical in table.not_private(0, number):
                table.make_private(logical)
        else:
            for update in updates(table):
                mirror[update.first : update.first + len(update.block_ids)] = update.block_ids
            assert mirror[table.first_live : len(table.ids)] == table.live_ids()
        holders: dict[int, int] = {}
        for held in (table, *others):
            for block in held.live_ids():
                holders[block] = holders.get(block, 0) + 1
        pool.audit(holders)
    for held in (table, *others):
        held.free()
    assert pool.num_free == 200
