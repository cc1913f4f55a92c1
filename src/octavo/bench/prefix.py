"""`octavo bench prefix`: what the prefix cache saves, what looking things up costs, and swap against recompute.

Four tables: time to first token with a cached prefix against without; many requests that share a prefix, caching on
and off; microseconds of hashing and looking up per block; the time to bring a preempted sequence back by either way.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from octavo.bench import drive, workloads
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
    publish,
)
from octavo.bench.workloads import random_ids
from octavo.core.block_pool import BlockPool
from octavo.core.kv_layout import KVLayout
from octavo.core.prefix_cache import PrefixCache
from octavo.errors import InternalError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine import Engine

DESCRIPTION = """\
The prefix cache: hits, shared prefixes, hashing, and swap against recompute.

examples:
  octavo bench prefix
  octavo bench prefix --prefix 512 --requests 8 --swap-lengths 256,1024
"""
DECIDED = ("enable_prefix_caching", "preemption", "swap_bytes", "allocation", "num_blocks", "max_model_len")
TAIL = 32  # own tokens of each prompt after the shared ones
GOAL_HIT, GOAL_SHARED, GOAL_LOOKUP = 0.10, 0.35, 5.0


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "prefix", help="the prefix cache, and swap against recompute", description=DESCRIPTION
    )
    parser.add_argument("--prefix", type=positive, default=1024, metavar="N", help="shared tokens (1024)")
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="that share them (32)")
    parser.add_argument("--output", type=positive, default=32, metavar="N", help="tokens of each answer (32)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="of the first-token figures (3)")
    parser.add_argument(
        "--swap-lengths", type=parse_counts, default=[256, 512, 1024, 2048, 4096], metavar="N,…",
        help="of the preempted sequence (256,512,1024,2048,4096)",
    )  # fmt: skip
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, DECIDED, "the benchmark sets it")
    report = Report("prefix", machine_facts())
    length = args.prefix + TAIL + args.output
    settings = drive.settings_of(args, max_model_len=length)
    with bar(2 * args.repeat + 2 * args.requests + 2 * len(args.swap_lengths), "prefix") as tick:
        engine = drive.build(settings, enable_prefix_caching=True)
        report.facts.update(engine_facts(engine))
        drive.warm_up(engine)
        layout = engine.scheduler.memory.layout
        first = first_token(engine, args.prefix, args.repeat, tick)
        shared_on = _shared(engine, args, tick)
        engine.close()
        engine = drive.build(settings, enable_prefix_caching=False)
        drive.warm_up(engine)
        shared_off = _shared(engine, args, tick)
        engine.close()
        swapping = swap_rows(settings, args.swap_lengths, tick)
    _first_tables(report, args, first, shared_on, shared_off)
    _cache_table(report, cache_costs(layout))
    _swap_table(report, swapping)
    return publish(report, args)


# -- hits ------------------------------------------------------------------------------------------------------------


def first_token(engine: Engine, prefix: int, repeat: int, tick: Any) -> dict[str, float]:
    """Median seconds to the first token of a prompt whose first `prefix` tokens are not cached, and are."""
    size = engine.config.block_size
    assert engine.spec is not None and size is not None
    found: dict[str, list[float]] = {"miss": [], "hit": []}
    for round_ in range(repeat):
        engine.reset_prefix_cache()
        pair = workloads.shared_prefix(2, prefix, TAIL, 1, engine.spec.vocab_size, seed=round_)
        for kind, item in zip(("miss", "hit"), pair):
            before = engine.stats().prefix_hit_tokens
            run = drive.run_load(engine, [item], sample=False)
            cached = engine.stats().prefix_hit_tokens - before
            expected = prefix // size * size if kind == "hit" else 0
            if cached < expected or (kind == "miss" and cached):
                raise InternalError(f"a {kind} took {cached} tokens from the cache; at least {expected} were expected")
            found[kind].append(run.seconds)
            tick(kind)
    return {kind: median(seconds) for kind, seconds in found.items()}


def _shared(engine: Engine, args: argparse.Namespace, tick: Any) -> drive.Run:
    """All requests at once, on an empty cache."""
    assert engine.spec is not None
    engine.reset_prefix_cache()
    items = workloads.shared_prefix(args.requests, args.prefix, TAIL, args.output, engine.spec.vocab_size, seed=99)
    return drive.run_load(engine, items, sample=False, tick=tick)


def _first_tables(
    report: Report, args: argparse.Namespace, first: dict[str, float], on: drive.Run, off: drive.Run
) -> None:
    ratio = first["hit"] / first["miss"]
    rows = [{"miss": 1e3 * first["miss"], "hit": 1e3 * first["hit"], "ratio": ratio}]
    columns = (
        Column("miss", "miss, ms", fixed(1)),
        Column("hit", "hit, ms", fixed(1)),
        Column("ratio", "hit / miss", percent),
    )
    report.tables.append(Table(f"time to first token, prefix of {args.prefix} tokens", columns, rows))
    report.goals.append(Goal("first token, hit over miss", ratio, GOAL_HIT))
    both = on.seconds / off.seconds
    rows = [{"on": on.seconds, "off": off.seconds, "ratio": both}]
    columns = (Column("on", "on, s", fixed(2)), Column("off", "off, s", fixed(2)), Column("ratio", "on / off", percent))
    report.tables.append(Table(f"{args.requests} requests sharing {args.prefix} tokens, caching", columns, rows))
    report.goals.append(Goal(f"{args.requests} sharing requests, on over off", both, GOAL_SHARED))


# -- hashing and looking up ------------------------------------------------------------------------------------------


def cache_costs(layout: KVLayout, blocks: int = 256, repeat: int = 20) -> dict[str, float]:
    """µs per block of tokens, in processor time: hashing, looking up a chain that is cached, and both."""
    tokens = list(random_ids(blocks * layout.block_size + 1, 5, 1 << 20))
    pool = BlockPool(blocks * layout.num_groups)
    cache = PrefixCache(pool, layout)
    root = cache.root_key(None, None)
    keys: list[bytes] = []
    cache.extend_keys(keys, root, tokens, len(tokens))
    size = layout.block_size
    for i, key in enumerate(keys):
        for group in range(layout.num_groups):
            parent = keys[i - 1] if i else root
            cache.publish(key, parent, tokens[i * size : (i + 1) * size], i, group, pool.take())
    hashing, lookup = [], []
    for _ in range(repeat):
        fresh: list[bytes] = []
        begin = time.thread_time()
        cache.extend_keys(fresh, root, tokens, len(tokens))
        hashed = time.thread_time()
        match = cache.match(fresh, tokens, root, limit=len(tokens) - 1)
        lookup.append(time.thread_time() - hashed)
        hashing.append(hashed - begin)
        if match.num_tokens != blocks * size:
            raise InternalError(f"{match.num_tokens} of {blocks * size} tokens were found")
    per_block = [1e6 * median(seconds) / blocks for seconds in (hashing, lookup)]
    return {"hash": per_block[0], "lookup": per_block[1], "both": sum(per_block)}


def _cache_table(report: Report, costs: dict[str, float]) -> None:
    columns = (
        Column("hash", "hash", fixed(2)),
        Column("lookup", "look up", fixed(2)),
        Column("both", "both", fixed(2)),
    )
    report.tables.append(Table("µs per block of tokens", columns, [costs]))
    report.goals.append(Goal("hash and look-up, µs per block", costs["both"], GOAL_LOOKUP))


# -- swap against recompute ------------------------------------------------------------------------------------------


def swap_rows(settings: dict[str, Any], lengths: list[int], tick: Any) -> list[dict[str, float]]:
    """Per length: the step that pushes a sequence out, and the steps until it has its next token, both ways."""
    longest = {**settings, "max_model_len": max(lengths) + 8, "max_num_seqs": 1, "enable_prefix_caching": False}
    measured: dict[str, list[tuple[float, float]]] = {}
    for way in ("recompute", "swap"):
        engine = drive.build(longest, preemption=way)
        drive.warm_up(engine)
        measured[way] = []
        for length in lengths:
            preempt(engine, length, way)  # touches host memory for the first time
            measured[way].append(preempt(engine, length, way))
            tick(f"{way} {length}")
        engine.close()
    return [
        {
            "length": length,
            "out": 1e3 * max(0.0, swap[0] - plain[0]),
            "in": 1e3 * swap[1],
            "swap": 1e3 * (max(0.0, swap[0] - plain[0]) + swap[1]),
            "recompute": 1e3 * plain[1],
        }
        for length, swap, plain in zip(lengths, measured["swap"], measured["recompute"])
    ]


def preempt(engine: Engine, length: int, way: str) -> tuple[float, float]:
    """Let an urgent request push a sequence of `length` tokens out; seconds of that step, and until it is back."""
    assert engine.spec is not None
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    before = engine.stats()
    engine.add_request("long", list(random_ids(length, length, engine.spec.vocab_size)), params)
    while engine.stats().generated_tokens < before.generated_tokens + 2:
        engine.step()
    urgent = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add_request("urgent", [1], urgent, priority=-1000)
    begin = time.perf_counter()
    engine.step()
    out = time.perf_counter()
    tokens = engine.stats().generated_tokens
    while engine.stats().generated_tokens == tokens:
        engine.step()
    back = time.perf_counter()
    while engine.has_unfinished():
        engine.step()
    after = engine.stats()
    if after.preemptions != before.preemptions + 1 or (after.swaps - before.swaps) != (way == "swap"):
        raise InternalError(f"the sequence of {length} tokens was not preempted by {way}")
    return out - begin, back - out


def crossover(rows: list[dict[str, float]]) -> float | None:
    """The shortest measured length from which on swapping is always faster; None if it never is."""
    found = None
    for row in sorted(rows, key=lambda r: -r["length"]):
        if row["swap"] >= row["recompute"]:
            break
        found = row["length"]
    return found


def _swap_table(report: Report, rows: list[dict[str, float]]) -> None:
    columns = (
        Column("length", "tokens"),
        Column("out", "swap out, ms", fixed(1)),
        Column("in", "swap in, ms", fixed(1)),
        Column("swap", "both", fixed(1)),
        Column("recompute", "recompute, ms", fixed(1)),
    )
    report.tables.append(Table("bringing a preempted sequence back", columns, rows))
    length = crossover(rows)
    report.notes.append(
        "swap out: what the pushing step takes longer; swap in and recompute: until the sequence has its next token"
    )
    report.notes.append(
        "swapping is not faster at the longest length measured"
        if length is None
        else f"crossover: swapping is faster from {length:.0f} tokens on (of the lengths measured)"
    )
