"""`octavo bench blocks`: what paging itself costs a decode step, and what a block size changes.

Addressing: the same steps of one engine, in turn, with the blocks of every sequence side by side in order and with all
blocks of the pool shuffled. Block sizes: the attention kernel over shuffled blocks of each size against the same kernel
over one block that holds the whole context, which is contiguous memory; beside it what tables cost and what is wasted.
"""

from __future__ import annotations

import argparse
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from octavo.bench import drive
from octavo.bench.growth import CHUNK, DECIDED, sizes
from octavo.bench.instrument import build_profiled
from octavo.bench.kernels import Shape, best_times, planned_backend
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
    parse_counts,
    percent,
    positive,
    positive_number,
    publish,
)
from octavo.bench.standing import decode_case, fill_kv
from octavo.core.block_pool import BlockPool
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine import Engine

DESCRIPTION = """\
What block tables cost: a decode step with scattered blocks, and attention, tables and waste by block size.

examples:
  octavo bench blocks
  octavo bench blocks --sequences 1,64 --contexts 1024,8192 --rounds 9
  octavo bench blocks --sizes 8,16,32,64,128 --dtype bfloat16
"""
GOAL = 1.02  # of a step with blocks in order
STEP_COLUMNS = (
    Column("sequences", "sequences"),
    Column("context", "context", fixed(0)),
    Column("in_order", "ms/step, in order", fixed(2)),
    Column("scattered", "scattered", fixed(2)),
    Column("ratio", "ratio", fixed(3)),
)
SIZE_COLUMNS = (
    Column("size", "block size"),
    Column("attention", "attention, ms", fixed(3)),
    Column("ratio", "of one block", fixed(3)),
    Column("pool", "pool, µs per 1,000 tokens", fixed(1)),
    Column("table", "table, bytes per 1,000 tokens", fixed(0)),
    Column("waste", "waste", percent),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "blocks",
        help="what block tables cost a step; block sizes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sequences", type=parse_counts, default=[1, 16], metavar="N,…", help="(1,16)")
    parser.add_argument("--contexts", type=parse_counts, default=[1024, 4096], metavar="N,…", help="(1024,4096)")
    parser.add_argument(
        "--sizes", type=parse_counts, default=[8, 16, 32, 64, 128], metavar="N,…", help="(8,16,32,64,128)"
    )
    parser.add_argument("--rounds", type=positive, default=5, metavar="N", help="turns of each arrangement (5)")
    parser.add_argument("--steps", type=positive, default=8, metavar="N", help="per turn (8)")
    parser.add_argument(
        "--seconds", type=positive_number, default=0.3, metavar="S", help="spent on each block size (0.3)"
    )
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, DECIDED, "the benchmark sizes the pool for its cases")
    cases = [(n, c) for n in args.sequences for c in args.contexts]
    settings = drive.settings_of(args, enable_prefix_caching=False)
    engine, profile = build_profiled(settings, **sizes(settings, cases, args.steps))
    if engine.config.attention_backend != "native" or engine.config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"bench blocks times the native kernels over float blocks; this engine has attention_backend="
            f"{engine.config.attention_backend!r} and kv_cache_dtype={engine.config.kv_cache_dtype!r}"
        )
    report = Report("blocks", {**machine_facts(), **engine_facts(engine)})
    fill_kv(engine)
    steps = []
    with bar(len(cases) + len(args.sizes), "blocks") as tick:
        for sequences, context in cases:
            steps.append(addressing(engine, profile, sequences, context, args))
            tick(f"{sequences} x {context}")
        by_size = block_sizes(engine, args, lambda size: tick(f"blocks of {size}"))
    engine.close()
    report.tables.append(Table("a decode step, blocks in order and scattered", STEP_COLUMNS, steps))
    longest = max(args.contexts)
    report.tables.append(Table(f"block sizes, one sequence of {longest} tokens, one layer", SIZE_COLUMNS, by_size))
    report.goals.append(Goal("a step with scattered blocks, worst", max(r["ratio"] for r in steps), GOAL))
    report.notes += [
        "in order and scattered take turns on one engine; the ratio is the median of the pairs",
        "of one block: the same kernel over a single block as long as the context, which is contiguous memory",
        "waste: slots of partly filled blocks, of all held, one table, total lengths evenly over 256 to 2,048",
    ]
    return publish(report, args)


def arrange(pool: BlockPool, seed: int | None) -> None:
    """Put an idle pool's blocks into an order of reuse: ascending, or shuffled by `seed`."""
    blocks = sorted(pool.take_many(pool.num_available))
    if seed is not None:
        random.Random(seed).shuffle(blocks)
    for block in reversed(blocks):  # what is released last is taken first
        pool.release(block)


def addressing(
    engine: Engine, profile: Any, sequences: int, context: int, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of a decode step in both arrangements, in turn."""
    pool = engine.scheduler.memory.pool
    pairs = []
    for turn in range(args.rounds + 1):
        pair = []
        for seed in (None, turn) if turn % 2 else (turn, None):
            arrange(pool, seed)
            total = decode_case(engine, profile, sequences, context, args.steps, CHUNK)["total"]
            pair.append((seed is not None, total))
        if turn:  # the first warms up
            pairs.append([total for _, total in sorted(pair)])
    return {
        "sequences": sequences,
        "context": context,
        "in_order": median([pair[0] for pair in pairs]),
        "scattered": median([pair[1] for pair in pairs]),
        "ratio": median([pair[1] / pair[0] for pair in pairs]),
    }


def block_sizes(engine: Engine, args: argparse.Namespace, tick: Any) -> list[dict[str, Any]]:
    """One row per block size, and one for a single block."""
    import torch

    from octavo.kernels import cpu
    from octavo.models.load import pick_dtype
    from octavo.runner.memory import advise_huge_pages

    spec = engine.spec
    assert spec is not None
    context = max(args.contexts)
    shape = Shape(1, context, 1, spec.num_heads, spec.num_kv_heads, spec.head_dim)
    dtype = pick_dtype(engine.config.dtype, "cpu")
    query = torch.randn(1, shape.heads, shape.head_dim)

    def attention(size: int) -> Any:
        blocks = -(-context // size)
        kv = torch.empty(blocks, 1, 2, shape.kv_heads, size, shape.head_dim, dtype=dtype)
        advise_huge_pages(kv)
        kv.normal_()
        return planned_backend(cpu, kv, shape, torch.randperm(blocks))

    straight = attention(context)
    rows = []
    for size in args.sizes:
        paged = attention(size)
        mine, contiguous = best_times(
            [partial(paged.attend, 0, query), partial(straight.attend, 0, query)], args.seconds, time.perf_counter
        )
        rows.append(
            {
                "size": size,
                "attention": 1e3 * mine,
                "ratio": mine / contiguous,
                "pool": pool_time(size),
                "table": 4 * -(-1000 // size),
                "waste": waste(size),
            }
        )
        tick(size)
    return rows


def pool_time(size: int) -> float:
    """Microseconds to take the blocks of 1,000 tokens one by one, as decoding does, and to give them back."""
    count = -(-1000 // size)
    pool = BlockPool(1 << 17)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        blocks = [pool.take() for _ in range(count)]
        for block in blocks:
            pool.release(block)
        best = min(best, time.perf_counter() - start)
    return 1e6 * best


def waste(size: int) -> float:
    """Slots that hold nothing, of all slots held by sequences of 256 to 2,048 tokens; one table."""
    lengths = range(256, 2049)
    held = sum(-(-n // size) * size for n in lengths)
    return 1 - sum(lengths) / held
