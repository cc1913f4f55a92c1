"""`octavo bench scheduler`: what bookkeeping costs, without any model.

A step of the scheduler (`schedule` and `update`) for 1 to 4,096 decoding sequences over pools of ten thousand and a
million blocks, and the pool's own operations. Plans are answered with a made-up token each, so nothing but scheduling
is timed: in processor time of this thread, which neighbours on the machine disturb least.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    add_report_options,
    bar,
    fixed,
    machine_facts,
    median,
    parse_counts,
    positive,
    publish,
)
from octavo.bench.scripted import answer, request
from octavo.bench.workloads import Item, random_ids
from octavo.core.block_pool import BlockPool
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError

DESCRIPTION = """\
Time the scheduler and the block pool alone, in microseconds.

examples:
  octavo bench scheduler
  octavo bench scheduler --sequences 1,64 --pools 10000,100000 --steps 64
"""
PROMPT = 2  # tokens of each sequence: with 8 + 1 + 16 steps it fills one block of 16 and begins a second
GROUPS = 8  # steps in which the sequences are let in
LAYOUTS: dict[str, tuple[int | None, ...]] = {
    "one table": (None,) * 18,
    "Gemma 3 270M, 6 tables": ((512,) * 5 + (None,)) * 3,
}
GOAL_SEQUENCE, GOAL_POOL = 15.0, 2.0
COLUMNS = (
    Column("layout", "layers"),
    Column("sequences", "sequences"),
    Column("num_blocks", "pool, blocks", fixed(0)),
    Column("step", "µs per step", fixed(1)),
    Column("schedule", "schedule", fixed(1)),
    Column("update", "update", fixed(1)),
    Column("per_sequence", "µs per sequence", fixed(2)),
    Column("admission", "µs to admit one", fixed(1)),
)
POOL_COLUMNS = (
    Column("operation", "operation"),
    Column("num_blocks", "pool, blocks", fixed(0)),
    Column("micros", "µs each", fixed(3)),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "scheduler",
        help="microseconds of bookkeeping per step and per block",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=parse_counts, default=[1, 64, 512, 4096], metavar="N,…")
    parser.add_argument("--pools", type=parse_counts, default=[10_000, 1_000_000], metavar="BLOCKS,…")
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="decode steps per figure (16)")
    parser.add_argument("--operations", type=positive, default=100_000, metavar="N", help="of the pool (100000)")
    parser.add_argument("--no-prefix-caching", action="store_true", help="do not hash and publish full blocks")
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    if args.operations > max(args.pools):
        raise ConfigError(f"--operations {args.operations}: the largest pool has only {max(args.pools)} blocks")
    report = Report("scheduler", machine_facts())
    cases = [(name, n, blocks) for name in LAYOUTS for n in args.sequences for blocks in args.pools]
    rows, pool_rows = [], []
    with bar(len(cases) + len(args.pools), "scheduler") as tick:
        for name, sequences, blocks in cases:
            rows.append(_case(name, sequences, blocks, args.steps, not args.no_prefix_caching))
            tick(f"{sequences} sequences")
        for blocks in args.pools:
            times = pool_operations(blocks, min(args.operations, blocks))
            pool_rows += [{"operation": op, "num_blocks": blocks, "micros": us} for op, us in times.items()]
            tick(f"{blocks} blocks")
        pool_rows.append({"operation": "a tensor per block from the allocator", "micros": tensor_per_block()})
    caching = "off" if args.no_prefix_caching else "on"
    report.tables.append(Table(f"a step, all sequences decoding, prefix caching {caching}", COLUMNS, rows))
    report.tables.append(Table("the pool", POOL_COLUMNS, pool_rows))
    _judge(report, rows, pool_rows)
    return publish(report, args)


def _judge(report: Report, rows: Sequence[dict[str, Any]], pool_rows: Sequence[dict[str, Any]]) -> None:
    for name in LAYOUTS:
        measured = [r["per_sequence"] for r in rows if r["layout"] == name and r["sequences"] >= 64 and r["step"]]
        if measured:
            goal = Goal(f"{name}: µs per step and sequence, worst of 64 and more", max(measured), GOAL_SEQUENCE)
            report.goals.append(goal)
    worst = max(r["micros"] for r in pool_rows if "num_blocks" in r)
    report.goals.append(Goal("µs per pool operation, worst", worst, GOAL_POOL))
    report.notes += [
        "median of the steps; the mean per sequence also counts the step in which every sequence begins a block",
        "a step of one sequence is the fixed cost of a step",
    ]
    if any(r["step"] is None for r in rows):
        report.notes.append("-: the sequences do not fit the pool")


def _case(name: str, sequences: int, num_blocks: int, steps: int, caching: bool) -> dict[str, Any]:
    """One line of the table."""
    layout = build_layout(LAYOUTS[name], block_size=16, bytes_per_token_layer=1)
    row: dict[str, Any] = {"layout": name, "sequences": sequences, "num_blocks": num_blocks}
    needed = sequences * layout.num_groups * layout.blocks_for(_length(steps))
    if needed > num_blocks:
        return {**row, "step": None, "schedule": None, "update": None, "per_sequence": None, "admission": None}
    admission, schedule, update = decode_times(layout, sequences, num_blocks, steps, caching)
    both = [s + u for s, u in zip(schedule, update)]
    return {
        **row,
        "step": 1e6 * median(both),
        "schedule": 1e6 * median(schedule),
        "update": 1e6 * median(update),
        "per_sequence": 1e6 * sum(both) / len(both) / sequences,
        "admission": 1e6 * admission / sequences,
    }


def _length(steps: int) -> int:
    """Positions of the longest sequence of a case."""
    return PROMPT + GROUPS + 1 + steps + 1


def decode_times(
    layout: KVLayout, sequences: int, num_blocks: int, steps: int, caching: bool
) -> tuple[float, list[float], list[float]]:
    """Seconds to let all in, and of `schedule` and `update` in each of `steps` steps with one token for every sequence.

    The sequences come in groups, as a server sees them; the time of the decode share in those steps is not taken off.
    """
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        max_model_len=_length(steps) + 1,
        max_num_seqs=sequences,
        max_num_batched_tokens=sequences * PROMPT,
        enable_prefix_caching=caching,
    )
    scheduler = Scheduler(settings, layout)
    numbers = range(sequences)
    admission = 0.0
    for group in range(GROUPS):
        for number in numbers[group::GROUPS]:
            scheduler.add(request(number, Item(random_ids(PROMPT, number, 1 << 20), _length(steps) - PROMPT)))
        if scheduler.has_unfinished:
            begin = time.thread_time()
            plan = scheduler.schedule()
            admission += time.thread_time() - begin
            scheduler.update(answer(plan))
    scheduler.update(answer(scheduler.schedule()))
    schedule, update = [], []
    for _ in range(steps):
        begin = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        assert plan.num_tokens == sequences
        result = answer(plan)
        answered = time.thread_time()
        scheduler.update(result)
        update.append(time.thread_time() - answered)
        schedule.append(planned - begin)
    return admission, schedule, update


def pool_operations(num_blocks: int, count: int) -> dict[str, float]:
    """µs of each operation on `count` blocks of a pool: take, share, release of a shared and of the last, revive."""
    pool = BlockPool(num_blocks)
    pool.on_evict = lambda block: None
    blocks: list[int] = []
    take, share, release = pool.take, pool.share, pool.release

    def each(act: Callable[[int], object]) -> float:
        begin = time.thread_time()
        for block in blocks:
            act(block)
        return 1e6 * (time.thread_time() - begin) / count

    begin = time.thread_time()
    for _ in range(count):
        blocks.append(take())
    result = {"take": 1e6 * (time.thread_time() - begin) / count}
    result["share"] = each(share)
    result["release, still shared"] = each(release)
    for block in blocks:
        pool.publish(block)
    result["release, becomes cached"] = each(release)
    result["revive a cached block"] = each(share)
    for block in blocks:
        pool.unpublish(block)
    result["release, becomes free"] = each(release)
    return result


def tensor_per_block(count: int = 2000, numbers: int = 16 * 3 * 512) -> float:
    """µs to ask torch's allocator for a tensor of a block's size and to give it back: what a pool saves."""
    import torch

    tensors: list[torch.Tensor] = []
    begin = time.thread_time()
    for _ in range(count):
        tensors.append(torch.empty(numbers))
    tensors.clear()
    return 1e6 * (time.thread_time() - begin) / count
