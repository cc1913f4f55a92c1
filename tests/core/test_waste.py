"""Where every byte of the pool is, and what static allocation would have taken: against counting slot by slot."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.sequence import RequestState
from octavo.core.view import PoolView, counters_of, pool_view
from octavo.errors import CapacityError
from octavo.inspect.waste import counterfactual_of, waste_as_json, waste_of


def slots_of(rig: Rig) -> dict[str, int]:
    """Every slot of the pool, put into its place one by one, from the tables and the states of the blocks alone."""
    layout, pool = rig.layout, rig.pool
    holds: dict[int, set[int]] = {}
    for request in rig.scheduler.requests.values():
        for seq in request.live():
            for table in seq.tables:
                for logical in range(table.first_live, len(table.ids)):
                    slots = holds.setdefault(table.ids[logical], set())
                    for offset in range(layout.block_size):
                        if logical * layout.block_size + offset < seq.num_computed:
                            slots.add(offset)
    places = dict.fromkeys(("filled", "fragmented", "reserved_unused", "cached_idle", "pending", "empty"), 0)
    for block in range(pool.num_blocks):
        for offset in range(layout.block_size):
            if block in holds:
                part = "reserved_unused" if not holds[block] else "fragmented"
                places["filled" if offset in holds[block] else part] += 1
            elif pool.is_pending(block):
                places["pending"] += 1
            else:
                places["cached_idle" if pool.is_published(block) else "empty"] += 1
    return places


def check(rig: Rig) -> PoolView:
    view = pool_view(rig.scheduler)
    waste = waste_of(view)
    slot = rig.layout.bytes_per_block // rig.layout.block_size
    found = {name: getattr(waste, name) for name in slots_of(rig)}
    assert found == {name: count * slot for name, count in slots_of(rig).items()}
    assert sum(found.values()) == view.num_blocks * view.bytes_per_block
    tables = [b for ids in view.block_tables.values() for table in ids for b in table if b >= 0]
    assert waste.shared_saved == (len(tables) - len(set(tables))) * view.bytes_per_block
    running = [r for r in rig.scheduler.requests.values() if r.state is RequestState.RUNNING]
    assert rig.scheduler.counters.live == sum(r.num_live() for r in running)
    return view


loads = st.lists(
    st.tuples(st.integers(1, 24), st.integers(1, 14), st.integers(1, 3), st.integers(0, 3), st.booleans()),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    loads=loads, blocks=st.integers(24, 48), delay=st.integers(0, 1), windowed=st.booleans(), aborts=st.integers(0, 9)
)
def test_every_slot_is_in_one_place(loads: Any, blocks: int, delay: int, windowed: bool, aborts: int) -> None:
    rig = Rig(
        blocks, delay=delay, windows=(8, None) if windowed else (None,), script=never_ends, enable_prefix_caching=True,
        max_num_batched_tokens=13, max_model_len=48, max_num_seqs=9,
    )  # fmt: skip
    requests = []
    for length, tokens, width, name, beams in loads:
        params = beam(width, tokens) if beams else None
        given = {} if beams else {"max_tokens": tokens, "n": width}
        with suppress(CapacityError):  # too wide for this pool: refused at the door
            requests.append(rig.add(prompt(length, name), params, **given))
    view = check(rig)
    live = peak = steps = total = used = 0
    while rig.scheduler.has_work and steps < 2000:
        plan = rig.plan()
        steps += 1
        live = sum(r.num_live() for r in rig.scheduler.running)
        peak, total, used = max(peak, live), total + live, used + rig.pool.num_used
        check(rig)
        rig.take(rig.device.submit(plan))
        view = check(rig)
        if steps == aborts and requests:
            rig.scheduler.abort(requests[0].request_id)
            check(rig)
    rig.drain()
    stats = counters_of(rig.scheduler)
    assert (stats["peak_sequences"], stats["sequences"]) == (peak, 0)
    assert stats["mean_sequences"] * stats["steps"] == pytest.approx(total)
    assert stats["mean_used_blocks"] * stats["steps"] == pytest.approx(used)
    assert view.peak_sequences == peak


def test_the_static_counterfactual_is_what_static_allocation_takes() -> None:
    """The same load under static allocation: its reservations are what the counterfactual says."""
    paged, static = Rig(200, script=never_ends), Rig(200, script=never_ends, allocation="static")
    for rig in (paged, static):
        for i in range(3):
            rig.add(prompt(9 + i, i), max_tokens=20)
        for _ in range(5):
            rig.step()
    other = pool_view(static.scheduler)
    c = counterfactual_of(pool_view(paged.scheduler))
    assert c.static_peak_bytes == other.num_used * other.bytes_per_block == 3 * c.bytes_per_sequence
    assert c.static_sequences == static.scheduler.memory.allocation.num_reservations == 6  # type: ignore[attr-defined]
    assert c.ratio == 0.5 and c.paged_peak_bytes < c.static_peak_bytes / 4
    assert c.saved_bytes == c.static_peak_bytes - c.paged_peak_bytes
    waste = waste_of(other)
    assert (
        waste.reserved_unused == (3 * 32 - sum(-(-n // 4) for n in other.num_computed.values())) * other.bytes_per_block
    )
    assert 0.8 < waste.wasted < 0.95


def test_a_pool_too_small_for_one_reservation_has_no_ratio() -> None:
    rig = Rig(8, script=never_ends, max_model_len=64)
    rig.add(prompt(5), max_tokens=4)
    rig.run()
    c = counterfactual_of(pool_view(rig.scheduler))
    assert (c.static_sequences, c.ratio, c.peak_sequences) == (0, None, 1)


@pytest.mark.parametrize("width", [1, 3])
def test_blocks_behind_windows(width: int) -> None:
    """With one window of 8 in blocks of 4: what a run without windows holds, minus what this one holds."""
    windowed, whole = Rig(300, windows=(8, None), script=never_ends), Rig(300, windows=(None, None), script=never_ends)
    for rig in (windowed, whole):
        rig.add(prompt(30), max_tokens=30, n=width)
        for _ in range(25):
            rig.step()
    view, other = pool_view(windowed.scheduler), pool_view(whole.scheduler)
    # Two layers of one kind share a block; of two kinds, each has its own half.
    held_without = 2 * other.num_used
    waste = waste_of(view)
    assert view.num_used + sum(view.released_blocks) == held_without
    assert waste.window_saved == (held_without - view.num_used) * view.bytes_per_block > 0
    assert [(g.window, bool(g.released_blocks)) for g in waste.groups] == [(None, False), (8, True)]


def test_why_requests_wait() -> None:
    seats = Rig(200, script=never_ends, max_num_seqs=2)
    blocks = Rig(24, script=never_ends, max_num_seqs=16, max_model_len=64)
    budget = Rig(200, script=never_ends, max_num_batched_tokens=8)
    for rig in (seats, blocks, budget):
        for i in range(6):
            rig.add(prompt(24, i), max_tokens=6)
        rig.run()
    short = [
        tuple(counters_of(r.scheduler)[f"steps_short_of_{w}"] > 0 for w in ("blocks", "seats", "budget"))
        for r in (seats, blocks, budget)
    ]
    assert short == [(False, True, False), (True, False, False), (False, False, True)]


def test_as_json_names_every_place() -> None:
    rig = Rig(20, script=never_ends, enable_prefix_caching=True)
    rig.add(prompt(10), max_tokens=4)
    rig.step()
    found = waste_as_json(pool_view(rig.scheduler))
    places = [v for k, v in found["waste"].items() if k.endswith("_bytes") and "saved" not in k]
    assert sum(places) == found["counterfactual"]["pool_bytes"] == 20 * rig.layout.bytes_per_block
    assert found["waste"]["groups"] == [{"window": None, "released_blocks": 0, "released_bytes": 0}]
