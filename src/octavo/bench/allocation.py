"""`octavo bench allocation`: the same KV bytes, the same load, the same kernels; only the memory policy differs.

    static          max_model_len positions reserved for each sequence when it is admitted
    paged 16        blocks of 16 tokens on demand; layers with a sliding window keep only their window
    paged 16, one table for all layers     the same without window release, so that the two effects can be told apart

Concurrency, use and bytes do not depend on how fast the machine is; times do.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from octavo.bench import drive, workloads
from octavo.bench.drive import Occupancy
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    bar,
    engine_facts,
    fixed,
    machine_facts,
    mebibytes,
    parse_counts,
    percent,
    positive,
    publish,
    times,
)
from octavo.bench.scripted import simulate
from octavo.bench.workloads import Item
from octavo.cli.options import byte_count
from octavo.config import BLOCK_SIZES, make_config
from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec

DESCRIPTION = """\
Compare static and paged allocation of the same KV bytes on one load.

examples:
  octavo bench allocation
  octavo bench allocation --requests 16 --block-sizes 16,32
  octavo bench allocation --kv-bytes 512MiB --json run.json
  octavo bench allocation --count-only      (no model runs: concurrency, use and bytes in seconds)
"""
STATIC_SEQUENCES = 6  # the default KV bytes hold so many static reservations
DECIDED = ("allocation", "hybrid_kv", "block_size", "num_blocks", "cpu_kv_bytes", "enable_prefix_caching", 
           "max_num_seqs", "preemption", "swap_bytes")  # fmt: skip
COLUMNS = (
    Column("policy", "policy"),
    Column("peak_sequences", "most at once"),
    Column("concurrency_ratio", "of static", times),
    Column("ms_per_token", "ms/token", fixed(1)),
    Column("ms_between_tokens", "ms between tokens", fixed(1)),
    Column("peak_use", "peak KV use", percent),
    Column("mean_use", "mean under load", percent),
    Column("output_rate", "output tok/s", fixed(1)),
    Column("rate_ratio", "of static", times),
    Column("preemptions", "preempt."),
)
HELD_COLUMNS = (
    Column("policy", "policy"),
    Column("peak_held", "peak held", mebibytes),
    Column("mean_held", "mean held", mebibytes),
    Column("held_ratio", "mean, of static", percent),
)
GOALS = (
    ("most at once", "concurrency_ratio", 3.0),
    ("output tok/s", "rate_ratio", 2.5),
    ("peak KV use", "peak_use", 0.96),
)


@dataclass(frozen=True)
class Policy:
    """One row of the table."""

    name: str
    settings: dict[str, Any]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("allocation", help="static against paged, same KV bytes", description=DESCRIPTION)
    parser.add_argument("--requests", type=positive, default=64, metavar="N", help="requests of the load (64)")
    parser.add_argument("--kv-bytes", type=byte_count, metavar="BYTES", help="default: 6 static reservations")
    parser.add_argument(
        "--block-sizes", type=parse_counts, default=[8, 16, 32, 64], metavar="N,…", help="paged rows (8,16,32,64)"
    )
    parser.add_argument("--shortest", type=positive, default=256, metavar="N", help="prompt and output, tokens (256)")
    parser.add_argument("--longest", type=positive, metavar="N", help="the same (default: max_model_len)")
    parser.add_argument(
        "--output-share", type=float, default=0.5, metavar="X", help="part of each length that is output (0.5)"
    )
    parser.add_argument("--count-only", action="store_true", help="schedule without computing: no times, exact counts")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, DECIDED, "the benchmark sets it for each row")
    if not 0.0 < args.output_share < 1.0:
        raise ConfigError(f"--output-share {args.output_share}: must lie between 0 and 1")
    unknown = [b for b in args.block_sizes if b not in BLOCK_SIZES]
    if unknown:
        raise ConfigError(f"--block-sizes {unknown[0]}: must be among {', '.join(map(str, BLOCK_SIZES))}")
    settings = drive.settings_of(args, max_model_len=2048, max_num_seqs=256, enable_prefix_caching=False)
    model = _Model.of(settings)
    longest = args.longest or settings["max_model_len"]
    lengths = workloads.spread_lengths(args.requests, args.shortest, longest, output_share=args.output_share)
    workloads.check_lengths(lengths, settings["max_model_len"])
    items = workloads.items_of(lengths, model.spec.vocab_size)
    kv_bytes = args.kv_bytes or STATIC_SEQUENCES * settings["max_model_len"] * model.bytes_per_token
    policies = policies_of(args.block_sizes)
    report = Report("allocation", {**machine_facts(), "kv_bytes": kv_bytes, "lengths": lengths})
    rows = []
    with bar(len(policies) * len(items), "allocation") as tick:
        for policy in policies:
            blocks = model.scheduler(policy, settings, kv_bytes)[0].num_blocks
            if args.count_only:
                rows.append(_count(policy, settings, model, kv_bytes, items))
            else:
                rows.append(_measure(policy, settings, blocks, items, report, tick))
    compare(rows)
    columns = [c for c in COLUMNS if any(r.get(c.name) is not None for r in rows)]
    report.tables.append(Table(f"{len(items)} requests in {mebibytes(kv_bytes)} of KV", columns, rows))
    report.tables.append(_held(policies, settings, model, kv_bytes, items, rows[0]["peak_sequences"]))
    _goals(report, rows)
    report.notes += [
        f"total lengths {args.shortest} to {longest}, {args.output_share:.1%} of each is output; all arrive at once",
        "KV use: bytes that hold keys and values over all bytes of the pool, counted in each step; mean under load: "
        "while requests wait for room",
        "ms/token: arrival to end over output tokens, waiting included",
    ]
    return publish(report, args)


def policies_of(block_sizes: Sequence[int]) -> list[Policy]:
    """Static first: everything else is compared with it."""
    rows = [Policy("static", {"allocation": "static", "block_size": 16})]
    rows += [Policy(f"paged {size}", {"block_size": size}) for size in block_sizes]
    rows.append(Policy("paged 16, one table for all layers", {"block_size": 16, "hybrid_kv": False}))
    return rows


@dataclass(frozen=True)
class _Model:
    """What counting needs of a model."""

    spec: ModelSpec
    itemsize: int
    kv_dtype: str = "auto"

    @classmethod
    def of(cls, settings: dict[str, Any]) -> _Model:
        from octavo.devices import find_device
        from octavo.models.load import pick_dtype, read_spec

        config = make_config(**settings)
        dtype = pick_dtype(config.dtype, find_device(config.device).kind)
        return cls(read_spec(config.model, config.load_format), dtype.itemsize, config.kv_cache_dtype)

    @property
    def bytes_per_token(self) -> int:
        spec = self.spec
        return spec.num_layers * kv_bytes_per_token_layer(
            self.kv_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=self.itemsize
        )

    def scheduler(self, policy: Policy, settings: dict[str, Any], kv_bytes: int) -> tuple[SchedulerSettings, KVLayout]:
        """The scheduler that an engine with this policy has: as many blocks as the KV bytes hold."""
        from octavo.sizing import layout_for

        config = make_config(**{**settings, **policy.settings})
        layout = layout_for(config, self.spec, self.itemsize)
        assert config.max_model_len is not None
        return SchedulerSettings(
            num_blocks=kv_bytes // layout.bytes_per_block,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            allocation=config.allocation,
            preemption="recompute",
        ), layout


def _measure(
    policy: Policy,
    settings: dict[str, Any],
    num_blocks: int,
    items: list[Item],
    report: Report,
    tick: Callable[[str], None],
) -> dict[str, Any]:
    """Run the load on an engine of its own."""
    engine = drive.build(settings, **policy.settings, num_blocks=num_blocks)
    report.facts.update({k: v for k, v in engine_facts(engine).items() if k not in ("block_size", "num_blocks")})
    drive.warm_up(engine)
    run = drive.run_load(engine, items, tick=lambda text: tick(f"{policy.name}: {text}"))
    engine.close()
    return {
        **_counts(policy, run.samples),
        "ms_per_token": run.ms_per_token(),
        "ms_between_tokens": run.ms_between_tokens(),
        "output_rate": run.output_rate,
        "seconds": run.seconds,
        "preemptions": run.preemptions,
    }


def _count(policy: Policy, settings: dict[str, Any], model: _Model, kv_bytes: int, items: list[Item]) -> dict[str, Any]:
    """The same figures, but for times, from the scheduler alone."""
    return _counts(policy, simulate(*model.scheduler(policy, settings, kv_bytes), items))


def _counts(policy: Policy, samples: Sequence[Occupancy]) -> dict[str, Any]:
    run = drive.Run(samples=list(samples))
    return {
        "policy": policy.name,
        "peak_sequences": run.peak_sequences,
        "peak_use": run.peak_use,
        "mean_use": run.mean_use_under_pressure(),
        "pool_bytes": samples[0].pool,
        "steps": len(samples),
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Add the ratios to the first row."""
    first = rows[0]
    for row in rows:
        row["concurrency_ratio"] = row["peak_sequences"] / first["peak_sequences"]
        if "output_rate" in row:
            row["rate_ratio"] = row["output_rate"] / first["output_rate"]


def _held(
    policies: Sequence[Policy],
    settings: dict[str, Any],
    model: _Model,
    kv_bytes: int,
    items: list[Item],
    sequences: int,
) -> Table:
    """Bytes held by the same load when every policy may run only as many sequences as static can."""
    rows: list[dict[str, Any]] = []
    for policy in policies:
        plain, layout = model.scheduler(policy, settings, kv_bytes)
        samples = simulate(replace(plain, max_num_seqs=sequences), layout, items)
        held = [s.held for s in samples]
        rows.append({"policy": policy.name, "peak_held": max(held), "mean_held": sum(held) / len(held)})
    for row in rows:
        row["held_ratio"] = row["mean_held"] / rows[0]["mean_held"]
    return Table(f"memory held with at most {sequences} sequences at once", HELD_COLUMNS, rows)


def _goals(report: Report, rows: Sequence[dict[str, Any]]) -> None:
    paged = next((r for r in rows if r["policy"] == "paged 16"), None)
    for name, key, limit in GOALS:
        if paged is not None and paged.get(key) is not None:
            report.goals.append(Goal(f"paged 16, {name}", paged[key], limit, at_least=True))
    held = next((r for r in report.tables[-1].rows if r["policy"] == "paged 16"), None)
    if held is not None:
        report.goals.append(Goal("paged 16, bytes held at equal concurrency, of static", held["held_ratio"], 0.4))
