"""The feed: frames decode to exactly what the pool, the tables and the runner hold, and stay small."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.bench.scripted import answer, request
from octavo.bench.workloads import Item
from octavo.core.block_view import BlockView, block_view
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan
from octavo.errors import ConfigError
from octavo.inspect.block_map import BlockMap, Owner
from octavo.inspect.feed import FEED_VERSION, delta_frame, full_frame


def wire(frame: dict[str, Any]) -> dict[str, Any]:
    """As it arrives on the other side."""
    return json.loads(json.dumps(frame))


class Watched:
    """A rig whose feed is decoded after every `every`-th step, and compared with the pool and a fresh full frame."""

    def __init__(self, rig: Rig, every: int = 1) -> None:
        self.rig, self.every = rig, every
        self.view = self.look()
        self.map = BlockMap(wire(full_frame(self.view)))
        self.frames: list[dict[str, Any]] = []

    def look(self) -> BlockView:
        return block_view(self.rig.scheduler, now=self.rig.now)

    def run(self) -> None:
        for number in range(3000):
            if not self.rig.scheduler.has_work:
                break
            self.rig.step()
            if number % self.every == 0:
                self.update()
        self.rig.drain()
        self.update()

    def update(self) -> None:
        view = self.look()
        frame = wire(delta_frame(self.view, view, self.map.frame + 1))
        self.frames.append(frame)
        self.map.apply(frame)
        self.view = view
        self.check()

    def check(self) -> None:
        pool, block_map, fresh = self.rig.pool, self.map, BlockMap(wire(full_frame(self.view)))
        assert block_map.states == fresh.states and block_map.keys == fresh.keys
        assert block_map.sequences == fresh.sequences and block_map.waiting == fresh.waiting
        counts = dict.fromkeys(("free", "cached", "used", "shared", "pending"), 0)
        for block in range(pool.num_blocks):
            assert block_map.count(block) == pool.count(block)
            counts[block_map.state(block)] += 1
        assert counts["used"] + counts["shared"] == pool.num_used == block_map.stats["used"]
        assert counts["shared"] == pool.num_shared
        assert (counts["free"], counts["cached"], counts["pending"]) == (
            pool.num_free,
            pool.num_cached,
            pool.num_pending,
        )


def busy_rig(**settings: Any) -> Rig:
    """Prompts that share a prefix, samples, beams, and too few blocks: everything the memory does happens."""
    blocks = 34 if "windows" in settings else 26
    rig = Rig(blocks, script=never_ends, enable_prefix_caching=True, max_num_batched_tokens=24, **settings)
    for number in range(4):
        rig.add(
            [*prompt(10), *prompt(3 + number, salt=number)], n=1 + number % 3, max_tokens=10 + number, ignore_eos=True
        )
    rig.add(prompt(9, salt=7), beam(3))
    rig.add(prompt(30, salt=8), max_tokens=20, ignore_eos=True)
    return rig


@pytest.mark.parametrize("every", [1, 3, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"windows": (None, 8, 8)},
        {"delay": 1},
        {"num_host_blocks": 40, "preemption": "swap"},
        {"allocation": "static", "enable_prefix_caching": False, "max_model_len": 64},
    ],
    ids=["plain", "windows", "one step late", "swap", "static"],
)
def test_frames_decode_to_what_the_pool_holds(settings: dict[str, Any], every: int) -> None:
    if settings.get("allocation") == "static":
        rig = Rig(80, script=never_ends, **settings)
        for number in range(5):
            rig.add(prompt(6 + number), n=1 + number % 2, max_tokens=9)
    else:
        rig = busy_rig(**settings)
    watched = Watched(rig, every)
    watched.run()
    kinds = {event[2] for frame in watched.frames for event in frame["events"]}
    assert "fork" in kinds and "copy" in kinds
    if "preemption" in settings:
        assert {"swap out", "swap in"} <= kinds
    numbers = [event[0] for frame in watched.frames for event in frame["events"]]
    assert numbers == list(range(1, rig.scheduler.memory.num_events + 1)), "an event is missing or came twice"


@pytest.mark.parametrize("windows", [(None,), (None, 8, 8)], ids=["one group", "windows"])
def test_tables_are_those_the_runner_computed_with(windows: tuple[int | None, ...]) -> None:
    """Plans carry differences; applied in order they give the tables of the kernels. The feed must show the same."""
    rig = busy_rig(windows=windows)
    watched = Watched(rig)
    tables: dict[int, list[list[int]]] = {}
    compared = 0
    while rig.scheduler.has_work:
        plan: StepPlan = rig.step()
        for seq_id in plan.ends:
            tables.pop(seq_id, None)
        for start in plan.starts:
            tables[start.seq_id] = [[] for _ in windows]
        for item in plan.scheduled:
            for update in item.tables:
                table = tables[item.seq_id][update.group]
                table[update.first : update.first + len(update.block_ids)] = update.block_ids
        watched.update()
        for item in plan.scheduled:
            row = watched.map.sequences.get(item.seq_id)
            if row is None:
                continue  # it ended in this step
            for group, window in enumerate(windows):
                end = -(-(item.start + item.num_tokens) // rig.layout.block_size)
                first = max(0, item.start - window + 1) // rig.layout.block_size if window else 0
                # What a kernel reads: from the window's first block to the last position computed.
                assert row.tables[group][first:end] == tables[item.seq_id][group][first:end] != []
                assert rig.runner.block_table(item.seq_id, group)[first:end] == row.tables[group][first:end]
                compared += 1
    assert compared > 100


def test_fill_owners_age_and_parent() -> None:
    rig = Rig(16, block_size=4, enable_prefix_caching=True, script=never_ends)
    first = rig.add(prompt(9), max_tokens=4, ignore_eos=True, name="first")
    watched = Watched(rig)
    rig.step()
    watched.update()
    seq = watched.map.sequences[0]
    a, b, c = seq.tables[0]
    assert (seq.request_id, seq.prompt_len, seq.num_computed, seq.num_tokens) == ("first", 9, 9, 10)
    assert [watched.map.fill(block) for block in (a, b, c)] == [4, 4, 1]
    assert watched.map.owners(b) == [Owner(0, 0, 1)]
    assert watched.map.parent(b) == a and watched.map.parent(a) is None and watched.map.parent(c) is None
    assert watched.map.age(a) == 0 and watched.map.age(seq.tables[0][2] + 1) is None
    watched.run()
    assert first.finished and watched.map.sequences == {}
    steps = watched.map.step
    assert watched.map.state(a) == "cached" and watched.map.fill(a) == 4
    assert watched.map.age(a) == 1, "one more step told the runner that the row is gone"
    rig.add(prompt(4, salt=5), max_tokens=3, ignore_eos=True)
    watched.run()
    assert watched.map.age(a) == 1 + watched.map.step - steps > 1


def test_a_fork_and_a_copy_name_their_blocks() -> None:
    rig = Rig(32, block_size=4, script=never_ends)
    rig.add(prompt(6), n=2, max_tokens=3, ignore_eos=True)
    watched = Watched(rig)
    rig.step()
    watched.update()
    (fork,) = watched.frames[-1]["events"]
    assert fork[2:] == ["fork", 1, 0, 1]
    shared = list(watched.map.sequences[0].tables[0])
    assert shared == watched.map.sequences[1].tables[0]
    assert [watched.map.state(block) for block in shared] == ["shared", "shared"]
    rig.step()
    watched.update()
    (copy,) = watched.frames[-1]["events"]
    writer = watched.map.sequences[copy[3]].tables[0]
    assert copy[2] == "copy" and copy[4] == shared[1] and copy[5] == writer[1] != shared[1]


def test_a_watcher_that_missed_events_is_told_how_many() -> None:
    rig = Rig(600, block_size=4, script=never_ends, max_num_seqs=300)
    watched = Watched(rig)
    for number in range(6):
        rig.add(prompt(6, salt=number), n=40, max_tokens=30, ignore_eos=True)
    watched.every = 10_000
    rig.scheduler.memory.events = type(rig.scheduler.memory.events)(maxlen=16)
    watched.run()
    assert sum(f["missed"] + len(f["events"]) for f in watched.frames) == rig.scheduler.memory.num_events > 100
    assert len(watched.frames[-1]["events"]) == 16 and watched.frames[-1]["missed"] > 0


def test_frames_are_small() -> None:
    """20,000 blocks, almost all in use by 128 sequences; then one step of decoding."""
    layout = build_layout((None,), block_size=16, bytes_per_token_layer=8)
    settings = SchedulerSettings(
        num_blocks=20_000, max_model_len=4096, max_num_seqs=128, max_num_batched_tokens=1 << 19
    )
    scheduler = Scheduler(settings, layout)
    for number in range(128):
        scheduler.add(request(number, Item((5,) * 2400, 64)))
    scheduler.update(answer(scheduler.schedule()))
    view = block_view(scheduler)
    assert view.stats[0] == 128 * 150
    assert len(json.dumps(full_frame(view), separators=(",", ":"))) < 450_000
    scheduler.update(answer(scheduler.schedule()))
    delta = json.dumps(delta_frame(view, block_view(scheduler), 1), separators=(",", ":"))
    assert len(delta) < 10_000


def test_hashes_are_short_and_the_secret_stays_inside() -> None:
    rig = Rig(16, enable_prefix_caching=True)
    rig.add(prompt(9))
    rig.step()
    cache = rig.scheduler.memory.cache
    text = json.dumps(full_frame(block_view(rig.scheduler)))
    assert cache is not None and cache._secret.hex() not in text
    keys = [key.hex() for key in cache._entries]
    assert keys and all(key[:8] in text and key[:12] not in text for key in keys)


def test_frames_out_of_order_and_of_another_version_are_refused() -> None:
    rig = Rig(8)
    view = block_view(rig.scheduler)
    block_map = BlockMap(full_frame(view, 4))
    with pytest.raises(ConfigError, match="frame 6 does not fit on frame 4; ask for a full one"):
        block_map.apply(delta_frame(view, view, 6))
    with pytest.raises(ConfigError, match=f"feed version 99: this Octavo reads version {FEED_VERSION}"):
        BlockMap({**full_frame(view), "v": 99})
