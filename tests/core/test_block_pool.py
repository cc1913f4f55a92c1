"""Block pool: exact ids, counts and order of reuse on tiny pools; each refusal; each kind of planted corruption."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.core.block_pool import BlockPool
from octavo.errors import AuditError, InternalError, OutOfBlocksError


def pool_of(size: int) -> BlockPool:
    pool = BlockPool(size)
    pool.on_evict = lambda block: None
    return pool


def figures(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.num_free, pool.num_cached, pool.num_used, pool.num_pending


def test_blocks_are_handed_out_in_order_and_the_last_one_back_goes_first() -> None:
    pool = pool_of(4)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert figures(pool) == (1, 0, 3, 0)
    pool.release(1)
    pool.release(0)
    assert pool.reuse_order() == [0, 1, 3]
    assert pool.take() == 0


def test_blocks_without_content_are_reused_before_cached_ones_and_those_oldest_first() -> None:
    pool = pool_of(6)
    evicted: list[int] = []
    pool.on_evict = evicted.append
    for _ in range(5):
        pool.take()
    for block in (1, 3, 4):
        pool.publish(block)
    for block in (3, 0, 4, 1, 2):
        pool.release(block)
    assert pool.reuse_order() == [2, 0, 5, 3, 4, 1]
    assert figures(pool) == (3, 3, 0, 0)
    assert [pool.take() for _ in range(5)] == [2, 0, 5, 3, 4]
    assert evicted == [3, 4] and pool.num_cached == 1


def test_a_chain_is_evicted_from_its_end() -> None:
    """Tables are given back tail first, so the shared beginning of a prompt outlives its continuation."""
    pool = pool_of(3)
    chain = [pool.take() for _ in range(3)]
    for block in chain:
        pool.publish(block)
    pool.release_all(reversed(chain))
    assert [pool.take() for _ in range(3)] == [2, 1, 0]


def test_a_revived_block_moves_to_the_young_end_when_it_is_released_again() -> None:
    pool = pool_of(3)
    for _ in range(3):
        pool.publish(pool.take())
    pool.release_all([0, 1, 2])
    pool.share(0)
    assert (pool.count(0), pool.num_cached, pool.num_used) == (1, 2, 1)
    pool.release(0)
    assert pool.reuse_order() == [1, 2, 0]


def test_counts_of_a_shared_block() -> None:
    pool = pool_of(2)
    block = pool.take()
    pool.share(block)
    pool.share(block)
    assert (pool.count(block), pool.num_shared, pool.is_private(block)) == (3, 1, False)
    pool.release(block)
    assert (pool.num_shared, pool.num_used) == (1, 1)
    pool.release(block)
    assert (pool.num_shared, pool.is_private(block)) == (0, True)
    pool.publish(block)
    assert not pool.is_private(block), "a block that can be found by its hash is not written in place"


def test_forgetting_the_content_of_a_cached_block_makes_it_the_next_one() -> None:
    pool = pool_of(3)
    for _ in range(3):
        pool.publish(pool.take())
    pool.release_all([0, 1, 2])
    pool.unpublish(1)
    assert figures(pool) == (1, 2, 0, 0) and pool.reuse_order() == [1, 0, 2]
    pool.unpublish(1)
    assert figures(pool) == (1, 2, 0, 0)


def test_released_blocks_wait_for_the_last_step_that_may_read_them() -> None:
    pool = pool_of(3)
    pool.take()
    pool.take()
    pool.publish(1)
    pool.fence(7)
    pool.release_all([0, 1])
    assert figures(pool) == (1, 0, 0, 2) and pool.num_available == 1 and pool.is_pending(0)
    pool.fence(None)
    pool.settle(6)
    assert figures(pool) == (1, 0, 0, 2)
    pool.share(1)  # still findable: revived out of waiting
    assert figures(pool) == (1, 0, 1, 1)
    pool.settle(7)
    assert figures(pool) == (2, 0, 1, 0)
    pool.release(1)
    assert pool.reuse_order() == [0, 2, 1]


def test_a_waiting_block_whose_content_is_forgotten_still_waits() -> None:
    pool = pool_of(1)
    pool.publish(pool.take())
    pool.fence(1)
    pool.release(0)
    pool.unpublish(0)
    assert figures(pool) == (0, 0, 0, 1)
    pool.settle(1)
    assert figures(pool) == (1, 0, 0, 0)


def test_peak_counts_revived_and_reserved_blocks() -> None:
    pool = pool_of(4)
    pool.publish(pool.take())
    pool.release(0)
    pool.take_exactly(2)
    pool.share(0)
    assert pool.peak_used == 2 and pool.reuse_order() == [1, 3]


def test_what_the_pool_refuses() -> None:
    pool = pool_of(2)
    with pytest.raises(InternalError, match="at least one block, got 0"):
        BlockPool(0)
    with pytest.raises(InternalError, match="block 1 is empty"):
        pool.share(1)
    with pytest.raises(InternalError, match="block 1 is not in use"):
        pool.count_up(1)
    with pytest.raises(InternalError, match="block 0 was released more often"):
        pool.release(0)
    with pytest.raises(InternalError, match=r"block 0 cannot be published \(count 0\)"):
        pool.publish(0)
    block = pool.take()
    pool.publish(block)
    with pytest.raises(InternalError, match=r"cannot be published \(count 1\)"):
        pool.publish(block)
    with pytest.raises(InternalError, match="block 0 is not free"):
        pool.take_exactly(block)
    pool.take()
    with pytest.raises(OutOfBlocksError, match="all 2 blocks are in use"):
        pool.take()
    pool.audit({0: 1, 1: 1})


def test_eviction_without_a_listener_is_an_error() -> None:
    pool = BlockPool(1)
    pool.publish(pool.take())
    pool.release(0)
    with pytest.raises(InternalError, match="no prefix cache listens"):
        pool.take()


# -- corruption ------------------------------------------------------------------------------------------------


def used_pool() -> tuple[BlockPool, dict[int, int]]:
    """Six blocks: 0 shared by two, 1 used, 2 cached, 3 to 5 free."""
    pool = pool_of(6)
    for _ in range(3):
        pool.take()
    pool.share(0)
    pool.publish(2)
    pool.release(2)
    return pool, {0: 2, 1: 1}


def test_a_sound_pool_passes() -> None:
    pool, holders = used_pool()
    pool.audit(holders)
    assert pool.repair(holders) == []


def corrupt_count(pool: BlockPool) -> None:
    pool._counts[1] = 2


def corrupt_lost(pool: BlockPool) -> None:
    pool._unlink(4)


def corrupt_double(pool: BlockPool) -> None:
    pool._list(1)


def corrupt_pending(pool: BlockPool) -> None:
    pool._pending[4] = 3


def corrupt_loop(pool: BlockPool) -> None:
    pool._next[4] = 3


def corrupt_self_loop(pool: BlockPool) -> None:
    pool._next[4] = 4


def corrupt_tail(pool: BlockPool) -> None:
    pool._prev[pool._end] = 3


def corrupt_link_outside(pool: BlockPool) -> None:
    pool._next[4] = 77


def corrupt_cached_figure(pool: BlockPool) -> None:
    pool.num_cached += 1


def corrupt_shared_figure(pool: BlockPool) -> None:
    pool.num_shared -= 1


def corrupt_listed_figure(pool: BlockPool) -> None:
    pool._listed += 1


CORRUPTIONS = [
    (corrupt_count, "block 1: count is 2, but 1 tables hold it"),
    (corrupt_lost, "block 4: count 0, neither free nor pending"),
    (corrupt_double, "block 1: count 1, free or pending more than once, or while in use"),
    (corrupt_pending, "block 4: count 0, free or pending more than once, or while in use"),
    (corrupt_loop, "broken behind block 4"),
    (corrupt_self_loop, "broken behind block 4"),
    (corrupt_tail, "broken behind block 2"),
    (corrupt_link_outside, "broken behind block 4"),
    (corrupt_cached_figure, "counted 1 cached and 1 shared blocks, the pool says 2 and 1"),
    (corrupt_shared_figure, "counted 1 cached and 1 shared blocks, the pool says 1 and 0"),
    (corrupt_listed_figure, "the free list has 4 blocks, 5 were counted"),
]


@pytest.mark.parametrize(("corrupt", "message"), CORRUPTIONS, ids=lambda x: getattr(x, "__name__", ""))
def test_audit_names_the_first_bad_block(corrupt, message) -> None:  # type: ignore[no-untyped-def]
    pool, holders = used_pool()
    corrupt(pool)
    with pytest.raises(AuditError, match=message):
        pool.audit(holders)


def test_audit_names_a_block_that_tables_hold_but_the_pool_has_given_up() -> None:
    pool, holders = used_pool()
    pool.release(1)
    with pytest.raises(AuditError, match="block 1: count is 0, but 1 tables hold it"):
        pool.audit(holders)


@pytest.mark.parametrize(
    ("corrupt", "leaked"),
    [(corrupt_count, [1]), (corrupt_lost, [4]), (corrupt_double, [1]), (corrupt_loop, [2, 5]), (corrupt_pending, [4])],
)
def test_repair_makes_any_of_these_sound_and_names_the_blocks(corrupt, leaked) -> None:  # type: ignore[no-untyped-def]
    pool, holders = used_pool()
    corrupt(pool)
    assert pool.repair(holders) == leaked
    pool.audit(holders)
    assert figures(pool) == (3, 1, 2, 0) and pool.num_shared == 1
    assert pool.reuse_order()[-1] == 2, "the cached block keeps its content and comes last"


def test_repair_takes_leaked_blocks_back() -> None:
    pool, _ = used_pool()
    assert pool.repair({}) == [0, 1]
    pool.audit({})
    assert figures(pool) == (5, 1, 0, 0)


# -- any sequence of calls --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 6)), max_size=60))
def test_states_add_up_and_audit_passes_after_every_call(size: int, calls: list[tuple[int, int]]) -> None:
    pool = pool_of(size)
    held: dict[int, int] = {}
    step = 0
    for what, where in calls:
        block = where % size
        if what == 0 and pool.num_available:
            held[pool.take()] = 1
        elif what == 1 and (held.get(block) or pool.is_published(block)):
            pool.share(block)
            held[block] = held.get(block, 0) + 1
        elif what in (2, 3) and held.get(block):
            pool.release(block)
            held[block] -= 1
        elif what == 4 and held.get(block) and not pool.is_published(block):
            pool.publish(block)
        elif what == 5:
            pool.unpublish(block)
        elif what == 6:
            step += 1
            pool.fence(step)
        elif what == 7:
            pool.fence(None)
            pool.settle(step)
        assert sum(figures(pool)) == size and min(figures(pool)) >= 0
        assert pool.num_used == sum(count > 0 for count in held.values())
        pool.audit({b: n for b, n in held.items() if n})
