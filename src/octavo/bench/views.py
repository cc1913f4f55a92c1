"""`octavo bench views`: what being looked at costs an engine.

The same load, in turn: with the records for views muted (no event is noted, no sample taken), as the engine always
runs with nobody watching, and with one watcher of `/blocks/events` in a process of its own. Laps of a round follow each
other at once and in another order each round, and only ratios within a round are used, so that slow drifts of the
machine cancel out. Also: what one snapshot and one frame cost by themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.bench import drive
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    bar,
    engine_facts,
    fixed,
    machine_facts,
    median,
    percent,
    positive,
    publish,
)
from octavo.bench.scripted import answer, request
from octavo.bench.workloads import Item, items_of
from octavo.core.block_view import block_view
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.inspect.feed import delta_frame, full_frame
from octavo.sampling_params import SamplingParams
from octavo.text.prompts import Prompt

if TYPE_CHECKING:
    from octavo.async_engine import AsyncEngine
    from octavo.engine import Engine

DESCRIPTION = """\
What the block map costs: throughput with the records muted, with nobody watching, and with one watcher.

examples:
  octavo bench views
  octavo bench views --num-blocks 20000 --sequences 32 --rounds 9
"""
MODES = ("muted", "nobody", "watched")
WATCHER = """
import sys, urllib.request
with urllib.request.urlopen(sys.argv[1]) as stream:
    while line := stream.readline():
        if line.startswith(b"event: hello"): print("watching", flush=True)
"""
COLUMNS = (
    Column("mode", "views"),
    Column("seconds", "s, median", fixed(3)),
    Column("tokens_per_s", "tokens/s", fixed(1)),
    Column("cost", "cost", percent),
    Column("low", "from", percent),
    Column("high", "to", percent),
    Column("processor", "engine thread, s", fixed(3)),
    Column("processor_cost", "cost", percent),
)
SNAPSHOT_COLUMNS = (
    Column("num_blocks", "blocks", fixed(0)),
    Column("sequences", "sequences"),
    Column("view", "snapshot, µs", fixed(0)),
    Column("full", "full frame, µs", fixed(0)),
    Column("full_bytes", "bytes", fixed(0)),
    Column("delta", "delta, µs", fixed(0)),
    Column("delta_bytes", "bytes", fixed(0)),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "views",
        help="throughput with nobody and with one watcher of the block map",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=positive, default=16, metavar="N", help="requests at once (16)")
    parser.add_argument("--prompt", type=positive, default=64, metavar="N", help="tokens of each prompt (64)")
    parser.add_argument("--output", type=positive, default=96, metavar="N", help="tokens of each answer (96)")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="rounds of three laps (7)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    settings = drive.settings_of(args, max_model_len=args.prompt + args.output, max_num_seqs=max(64, args.sequences))
    engine = drive.build(settings)
    report = Report("views", machine_facts())
    report.facts.update(engine_facts(engine))
    assert engine.spec is not None
    lengths = [(args.prompt, args.output)] * args.sequences
    drive.warm_up(engine)
    laps: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    frames = 0
    with served(engine) as (url, async_engine, app), bar(args.rounds * len(MODES), "views") as tick:
        for round_, order in zip(range(args.rounds), itertools.cycle(itertools.permutations(MODES))):
            for place, mode in enumerate(order):
                # Other prompts in every lap: nothing is found in the prefix cache.
                items = items_of(lengths, engine.spec.vocab_size, seed=10 + round_ * len(MODES) + place)
                with watching(url) if mode == "watched" else muted(async_engine, mode == "muted"):
                    laps[mode].append(lap(async_engine, items))
                tick(mode)
        frames = app.state.block_feed.snapshots if hasattr(app.state, "block_feed") else 0
    tokens = args.sequences * args.output
    rows = [row_of(mode, laps, tokens) for mode in MODES]
    report.tables.append(Table(f"{args.sequences} requests of {args.prompt} + {args.output} tokens", COLUMNS, rows))
    report.tables.append(Table("by themselves", SNAPSHOT_COLUMNS, [snapshot_row(n) for n in (1_000, 20_000)]))
    report.goals += [
        Goal("cost with nobody watching", rows[1]["cost"], 0.01),
        Goal("cost with one watcher", rows[2]["cost"], 0.03),
    ]
    report.notes += [
        f"cost: median over {args.rounds} rounds of time against the muted lap of the same round; from, to: quartiles",
        "engine thread: its processor time alone, which other work disturbs less (OMP_NUM_THREADS=1: all)",
        f"{frames} snapshots were taken for the watcher; it reads in a process of its own, on the same processors",
    ]
    return publish(report, args)


def row_of(mode: str, laps: dict[str, list[tuple[float, float]]], tokens: int) -> dict[str, Any]:
    """One line of the table; costs are relative to the muted lap of the same round."""
    pairs = list(zip(laps[mode], laps["muted"]))
    costs = sorted(this[0] / base[0] - 1 for this, base in pairs)
    seconds = median([lap[0] for lap in laps[mode]])
    quarter = len(costs) // 4
    return {
        "mode": {"muted": "records muted", "nobody": "nobody watching", "watched": "one watcher"}[mode],
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "cost": median(costs),
        "low": costs[quarter],
        "high": costs[-1 - quarter],
        "processor": median([lap[1] for lap in laps[mode]]),
        "processor_cost": median([this[1] / base[1] - 1 for this, base in pairs]),
    }


@contextmanager
def served(engine: Engine) -> Iterator[tuple[str, AsyncEngine, Any]]:
    """The engine behind a real server on a loopback port: (url, engine, app)."""
    import uvicorn

    from octavo.async_engine import AsyncEngine
    from octavo.server.app import create_app
    from octavo.server.settings import ServerSettings

    async_engine = AsyncEngine(engine)
    async_engine.start()
    app = create_app(async_engine, ServerSettings(drain_seconds=0.0))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", async_engine, app
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def watching(url: str) -> Iterator[None]:
    """One watcher in a process of its own."""
    command = [sys.executable, "-c", WATCHER, f"{url}/blocks/events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        try:
            yield
        finally:
            watcher.terminate()


@contextmanager
def muted(engine: AsyncEngine, mute: bool) -> Iterator[None]:
    """Without the engine's records for views: no events of tables, no samples."""

    def silence(inner: Engine) -> None:
        inner.scheduler.memory._note = lambda *_: None  # type: ignore[method-assign]
        inner.journal.stepped = lambda *_: None  # type: ignore[method-assign]

    def speak(inner: Engine) -> None:
        del inner.scheduler.memory._note, inner.journal.stepped

    if mute:
        engine.call(silence).result()
    try:
        yield
    finally:
        if mute:
            engine.call(speak).result()


def lap(engine: AsyncEngine, items: list[Item]) -> tuple[float, float]:
    """Seconds from the first request until the last has ended, and processor time of the engine's thread in them."""

    async def one(item: Item) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=item.output, ignore_eos=True)
        async for _ in await engine.submit(Prompt(None, item.token_ids), params):
            pass

    async def every() -> None:
        await asyncio.gather(*(one(item) for item in items))

    busy = engine.call(lambda _: time.thread_time()).result()
    begin = time.perf_counter()
    asyncio.run(every())
    seconds = time.perf_counter() - begin
    return seconds, engine.call(lambda _: time.thread_time()).result() - busy


def snapshot_row(num_blocks: int, sequences: int = 64) -> dict[str, Any]:
    """What a snapshot and its frames cost for a pool that is almost full, one step apart; no model."""
    from orjson import dumps

    layout = build_layout((None,), block_size=16, bytes_per_token_layer=8)
    length = num_blocks // sequences * 16 - 40
    settings = SchedulerSettings(
        num_blocks=num_blocks, max_model_len=length + 40, max_num_seqs=sequences, max_num_batched_tokens=1 << 20
    )
    scheduler = Scheduler(settings, layout)
    for number in range(sequences):
        scheduler.add(request(number, Item((5,) * length, 32)))
    scheduler.update(answer(scheduler.schedule()))
    before = block_view(scheduler)
    scheduler.update(answer(scheduler.schedule()))
    after = block_view(scheduler)
    return {
        "num_blocks": num_blocks,
        "sequences": sequences,
        "view": micros(lambda: block_view(scheduler)),
        "full": micros(lambda: dumps(full_frame(after))),
        "full_bytes": len(dumps(full_frame(after))),
        "delta": micros(lambda: dumps(delta_frame(before, after, 1))),
        "delta_bytes": len(dumps(delta_frame(before, after, 1))),
    }


def micros(work: Any, repeat: int = 15) -> float:
    """Processor time of one call, the median of some."""
    spent = []
    for _ in range(repeat):
        begin = time.thread_time_ns()
        work()
        spent.append((time.thread_time_ns() - begin) / 1000)
    return median(spent)
