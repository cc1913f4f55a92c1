"""Admission: what is refused at the door with the numbers, and the exact count behind it."""

from __future__ import annotations

import random

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.sequence import Request
from octavo.errors import CapacityError, PromptError, RequestError, SamplingError

WINDOWS = [(None,), (8,), (5, None), (8, 8, None), (5, 9, None), (3,)]


def layout_of(windows: tuple[int | None, ...], block_size: int) -> KVLayout:
    return build_layout(windows, block_size=block_size, bytes_per_token_layer=8)


def peak_by_hand(layout: KVLayout, prompt_len: int, positions: int, width: int) -> int:
    """Most blocks that are needed at once, position by position, block by block."""
    most = 0
    for position in range(positions):
        held: set[tuple[int, ...]] = set()
        for number, group in enumerate(layout.groups):
            for block in range(group.first_needed(position) // layout.block_size, position // layout.block_size + 1):
                if position < prompt_len or (block + 1) * layout.block_size <= prompt_len:
                    held.add((number, block))
                else:
                    held |= {(number, block, sample) for sample in range(width)}
        most = max(most, len(held))
    return most


def test_the_worst_case_is_exact() -> None:
    draw = random.Random(1)
    for _ in range(1500):
        layout = layout_of(draw.choice(WINDOWS), draw.choice([1, 2, 4, 8, 16]))
        length, width = draw.randrange(1, 50), draw.randrange(1, 5)
        positions = length + draw.randrange(0, 40)
        counted = PagedAllocation(BlockPool(1), layout).worst_case(length, positions, width)
        assert counted == peak_by_hand(layout, length, positions, width), (layout, length, positions, width)


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_the_longest_length_is_the_longest(windows: tuple[int | None, ...], block_size: int) -> None:
    allocation = PagedAllocation(BlockPool(1), layout_of(windows, block_size))
    groups = allocation.layout.num_groups
    for blocks in (groups, groups + 1, 3 * groups + 2, 20 * groups):
        longest = allocation.longest(blocks)
        if longest < blocks * block_size:  # otherwise the pool is larger than any window: no bound to find
            assert allocation.worst_case(longest, longest, 1) <= blocks if longest else True
            assert allocation.worst_case(longest + 1, longest + 1, 1) > blocks


def exact_fit(seed: int, width_kind: str) -> tuple[Rig, Request, Request]:
    """A pool of exactly what a random request needs; the request; one like it that needs a block more."""
    draw = random.Random(seed)
    windows, size = draw.choice(WINDOWS), draw.choice([1, 2, 4, 8, 16])
    length, new = draw.randrange(1, 40), draw.randrange(2, 30)
    width = 1 if width_kind == "one" else draw.randrange(2, 5)
    layout = layout_of(windows, size)
    positions = length + new - 1
    need = peak_by_hand(layout, length, positions, width)
    rig = Rig(
        need,
        block_size=size,
        windows=windows,
        script=never_ends,
        max_num_batched_tokens=draw.choice([1, 3, 16, 2048]),
        enable_prefix_caching=draw.random() < 0.5,
    )
    more = next((n for n in range(new, 200) if peak_by_hand(layout, length, length + n - 1, width + 1) > need), new)

    def make(count: int, samples: int) -> Request:
        if width_kind == "beams":
            return rig.request(prompt(length), beam(samples, count))
        return rig.request(prompt(length), n=samples, max_tokens=count)

    return rig, make(new, width), make(more, width + 1)


@pytest.mark.parametrize("kind", ["one", "samples", "beams"])
@pytest.mark.parametrize("seed", range(25))
def test_a_request_that_needs_exactly_the_pool_finishes_and_one_block_more_is_refused(seed: int, kind: str) -> None:
    rig, fits, too_large = exact_fit(seed, kind)
    need = peak_by_hand(rig.layout, too_large.prompt_len, too_large.max_len - 1, too_large.width)
    if need > rig.settings.num_blocks:
        with pytest.raises(CapacityError, match=f"need {need} blocks of .* the pool has {rig.settings.num_blocks}"):
            rig.scheduler.add(too_large)
        assert not rig.scheduler.requests and rig.pool.num_used == 0
    rig.scheduler.add(fits)
    again = rig.request(fits.prompt_token_ids, fits.params)
    rig.scheduler.add(again)  # the same once more: with the cache on, its blocks are found while the pool is full
    rig.run()
    if kind != "beams":
        rig.check_answers(fits, again)
    rig.check_empty()


@pytest.mark.parametrize("length", [63, 64, 65])
def test_one_token_either_side_of_the_pool(length: int) -> None:
    """Kind 25: positions written are prompt + output - 1; the last token's KV is never needed."""
    rig = Rig(16, script=never_ends)
    small = rig.request(prompt(5, 1))
    if length <= 64:
        request = rig.add(prompt(length), max_tokens=65 - length)
        rig.scheduler.add(small)
        rig.run()
        rig.check_answers(request, small)
    else:
        with pytest.raises(CapacityError, match="need 17 blocks of 4, the pool has 16"):
            rig.add(prompt(length), max_tokens=1)
        rig.scheduler.add(small)
        rig.run()
        rig.check_answers(small)
    rig.check_empty()


def test_every_refusal_names_value_limit_and_remedy_and_changes_nothing() -> None:
    rig = Rig(16, max_num_seqs=4, max_queue=2)
    with pytest.raises(PromptError, match=r"128 tokens; max_model_len=128 leaves room for a prompt of at most 127"):
        rig.add(prompt(128))
    with pytest.raises(SamplingError, match=r"=5 exceeds max_num_seqs=4; lower it or raise max_num_seqs"):
        rig.add(prompt(3), n=5)
    with pytest.raises(SamplingError, match=r"beam_width.*=8 exceeds max_num_seqs=4"):
        rig.add(prompt(3), beam(8))
    with pytest.raises(CapacityError, match=r"prompt of 60 tokens, up to 30 new .*need 23 blocks.* up to 64 tokens"):
        rig.add(prompt(60), max_tokens=30)
    with pytest.raises(PromptError):
        rig.add([])
    rig.add(prompt(3), name="x")
    with pytest.raises(RequestError, match="'x' is in use"):
        rig.add(prompt(3), name="x")
    rig.add(prompt(3))
    with pytest.raises(CapacityError, match="queue is full: 2 requests wait, max_queue=2"):
        rig.add(prompt(3))
    assert len(rig.scheduler.requests) == 2
    rig.run()
    rig.check_empty()


def test_static_counts_whole_reservations() -> None:
    rig = Rig(30, allocation="static", max_model_len=40)  # ten blocks each
    with pytest.raises(CapacityError, match="need 40 blocks of 4, the pool has 30"):
        rig.add(prompt(3), n=4)
    requests = [rig.add(prompt(3, i), n=3) for i in range(2)]
    rig.run()
    rig.check_answers(*requests)
    rig.check_empty()


def test_long_prompts_do_not_push_each_other_out() -> None:
    """Admission counts the whole prompt, also of those that are still being computed."""
    rig = Rig(20, script=never_ends, max_num_batched_tokens=4)
    requests = [rig.add(prompt(40, salt), max_tokens=3) for salt in range(3)]
    rig.run()
    assert rig.scheduler.counters.preemptions == 0
    rig.check_answers(*requests)


def test_nobody_passes_the_first_that_does_not_fit() -> None:
    rig = Rig(16, script=never_ends)
    rig.add(prompt(30), max_tokens=20)
    rig.step()
    large = rig.add(prompt(40, 1), max_tokens=2)
    small = rig.add(prompt(3, 2), max_tokens=2)
    rig.run()
    assert (large.admitted_at or 0) <= (small.admitted_at or 0)
    rig.check_empty()
