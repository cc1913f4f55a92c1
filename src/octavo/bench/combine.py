"""`octavo bench combine`: paging, quantised KV and weights, and speculation in one budget of bytes, alone and together.

Every engine gets the same bytes for weights and KV pool: what its weights leave is its pool. Each runs a crowd that is
larger than most of them can hold at once, and one sequence alone; how many sequences of the load fit is counted, not
measured. The load repeats itself (an edit of a piece of code), so that speculation has something to guess. The prefix
cache is off: it would share the crowd's common text, which is another lever.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench import drive
from octavo.bench.report import (
    Column,
    Report,
    Table,
    bar,
    engine_facts,
    fixed,
    machine_facts,
    mebibytes,
    positive,
    publish,
    times,
)
from octavo.bench.speculative import CODE_EDIT
from octavo.bench.workloads import Item, random_ids
from octavo.cli.options import byte_count
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.models.weight_size import StoredSizes

DESCRIPTION = """\
Sequences, tokens per second, ms per token and memory of each lever alone and of all together, in a fixed budget of
bytes for weights and KV.

examples:
  octavo bench combine
  octavo bench combine --memory 1536MiB --requests 48 --tokens 128 --dtype bfloat16
  octavo bench combine --only paged --only all-int8 --requests 4 --tokens 16      a quick look
"""
DECIDED = {
    "allocation": "it is one of the levers",
    "kv_cache_dtype": "it is one of the levers",
    "quantization": "it is one of the levers",
    "num_blocks": "--memory sizes the pool",
    "cpu_kv_bytes": "--memory sizes the pool",
    "gpu_memory_utilization": "--memory sizes the pool",
    "max_num_seqs": "--requests says it",
    "max_model_len": "--reserve says it",
    "enable_prefix_caching": "it is off here",
    "swap_bytes": "the pool is all there is",
}
DEFAULT_ROOM = 0.25  # of the weights as they are, for the KV pool of the plain engine
COLUMNS = (
    Column("name", "engine"),
    Column("weight_bytes", "weights", mebibytes),
    Column("pool_bytes", "KV pool", mebibytes),
    Column("fits", "sequences", fixed(0)),
    Column("of_static", "of static", times),
    Column("peak", "at once", fixed(0)),
    Column("rate", "tok/s", fixed(1)),
    Column("ms_crowd", "ms/token", fixed(1)),
    Column("ms_one", "ms/token, one", fixed(2)),
)


@dataclass(frozen=True)
class Lever:
    """One engine of the table. settings: those of `EngineConfig` that set it apart."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def quantization(self) -> str | None:
        value = self.settings.get("quantization")
        return None if value is None else str(value)


def levers(speculative: Any = "ngram", kv: str = "int8") -> list[Lever]:
    """The baseline, each lever alone, and all of them. kv: format of quantised keys and values."""
    return [
        Lever("static", {"allocation": "static"}),
        Lever("paged"),
        Lever(f"paged, KV {kv}", {"kv_cache_dtype": kv}),
        Lever("paged, weights int8", {"quantization": "int8"}),
        Lever("paged, weights int4", {"quantization": "int4"}),
        Lever("paged, speculation", {"speculative": speculative}),
        Lever("all, int8", {"kv_cache_dtype": kv, "quantization": "int8", "speculative": speculative}),
        Lever("all, int4", {"kv_cache_dtype": kv, "quantization": "int4", "speculative": speculative}),
    ]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "combine", help="paging, quantised KV and weights, speculation: alone and together", description=DESCRIPTION
    )
    parser.add_argument(
        "--memory", type=byte_count, metavar="BYTES", help="for weights and KV (a quarter more than the plain weights)"
    )
    parser.add_argument("--requests", type=positive, default=32, metavar="N", help="sequences of the crowd (32)")
    parser.add_argument("--tokens", type=positive, default=64, metavar="N", help="output tokens per sequence (64)")
    parser.add_argument("--prompt", type=positive, default=384, metavar="N", help="tokens of each prompt (384)")
    parser.add_argument(
        "--reserve", type=positive, default=1024, metavar="N", help="max_model_len, which static reserves (1024)"
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="one engine of the table (may be repeated)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    from octavo.models.load import read_sizes

    settings = drive.settings_of(args)
    for name, because in DECIDED.items():
        drive.refuse_settings(args, [name], because)
    if args.prompt + args.tokens > args.reserve:
        raise ConfigError(f"--reserve {args.reserve}: the load needs {args.prompt} + {args.tokens} positions; raise it")
    speculative = settings.pop("speculative", "ngram")
    sizes = read_sizes(settings.get("model", "gemma-3-270m"), settings.get("load_format", "auto"))
    chosen = _chosen(levers(speculative, "int8"), args.only)
    itemsize = _itemsize(settings)
    memory = args.memory or int(sizes.weight_bytes(itemsize) * (1 + DEFAULT_ROOM))
    settings.setdefault("block_size", 16)
    settings |= {"max_num_seqs": args.requests, "max_model_len": args.reserve, "enable_prefix_caching": False}
    _refuse_too_little(memory, chosen, settings, sizes, itemsize)
    report = Report("combine", machine_facts())
    rows: list[dict[str, Any]] = []
    with bar(2 * len(chosen), "combine") as tick:
        for lever in chosen:
            rows.append(_measure(lever, settings, sizes, itemsize, memory, args, report, tick))
    base = next((row["fits"] for row in rows if row["name"] == "static"), None)
    for row in rows:
        row["of_static"] = row["fits"] / base if base else None
    title = f"{memory / (1 << 20):,.0f} MiB for weights and KV; prompts of {args.prompt} tokens, {args.tokens} out"
    report.tables.append(Table(title, COLUMNS, rows))
    report.notes += [
        f"sequences: that fit, counted at their full length; static reserves {args.reserve} positions for each",
        f"at once, tok/s, ms/token: {args.requests} requests handed over together; one: a single sequence",
        f"{report.facts.get('dtype')} where nothing is quantised; ms/token: mean time between two tokens of a sequence",
        "activations are not in the budget",
    ]
    return publish(report, args)


def _chosen(all_of_them: list[Lever], only: Sequence[str] | None) -> list[Lever]:
    """The engines asked for, in the order of the table."""
    if not only:
        return all_of_them
    plain = {lever.name.replace(", ", "-").replace(" ", "-"): lever for lever in all_of_them}
    found = []
    for name in only:
        if name not in plain:
            raise ConfigError(f"--only {name}: must be one of {', '.join(plain)}")
        found.append(plain[name])
    return [lever for lever in all_of_them if lever in found]


def _itemsize(settings: dict[str, Any]) -> int:
    from octavo.models.load import pick_dtype

    return pick_dtype(settings.get("dtype", "auto"), settings.get("device", "cpu").replace("auto", "cpu")).itemsize


def _measure(
    lever: Lever,
    settings: dict[str, Any],
    sizes: StoredSizes,
    itemsize: int,
    memory: int,
    args: argparse.Namespace,
    report: Report,
    tick: Any,
) -> dict[str, Any]:
    """One row. An engine whose weights leave no room for one sequence gets a row without times."""
    row: dict[str, Any] = {"name": lever.name, "fits": 0, "settings": lever.settings}
    least = least_memory(lever, settings, sizes, itemsize)
    if least > memory:
        report.notes.append(f"{lever.name}: does not fit: weights and one sequence need {mebibytes(least)}")
        tick(lever.name)
        tick(lever.name)
        return row
    left = memory - weights_of(lever, sizes, itemsize)
    blocks = left // block_bytes_of(lever, settings, sizes, itemsize)
    engine = drive.build(settings, **lever.settings, num_blocks=blocks)
    try:
        if "dtype" not in report.facts or lever.name == "paged":
            report.facts.update(engine_facts(engine))
        row |= _run(engine, args, lever, tick)
    finally:
        engine.close()
    taken = row["weight_bytes"] + row["pool_bytes"]
    if taken > 1.02 * memory:
        report.notes.append(
            f"{lever.name}: takes {taken / memory:.2f} of the budget: its weights are larger than planned"
        )
    return row


def weights_of(lever: Lever, sizes: StoredSizes, itemsize: int) -> int:
    """Bytes of the weights of an engine."""
    from octavo.core.weight_format import parse_weight_format

    return sizes.weight_bytes(itemsize, parse_weight_format(lever.quantization))


def block_bytes_of(lever: Lever, settings: dict[str, Any], sizes: StoredSizes, itemsize: int) -> int:
    """Bytes of one block of an engine's pool (without a draft model's share)."""
    from octavo.config import make_config
    from octavo.sizing import layout_for

    return layout_for(make_config(**{**settings, **lever.settings}), sizes.spec, itemsize).bytes_per_block


def least_memory(lever: Lever, settings: dict[str, Any], sizes: StoredSizes, itemsize: int) -> int:
    """Bytes of an engine's weights and of one sequence of max_model_len."""
    from octavo.config import make_config
    from octavo.sizing import blocks_for_longest, layout_for

    config = make_config(**{**settings, **lever.settings})
    layout = layout_for(config, sizes.spec, itemsize)
    blocks = blocks_for_longest(config, layout, settings["max_model_len"])
    return weights_of(lever, sizes, itemsize) + blocks * layout.bytes_per_block


def _refuse_too_little(
    memory: int, chosen: list[Lever], settings: dict[str, Any], sizes: StoredSizes, itemsize: int
) -> None:
    """Raise `ConfigError` if no engine fits: a table without a figure is no finding."""
    least, name = min((least_memory(lever, settings, sizes, itemsize), lever.name) for lever in chosen)
    if least > memory:
        raise ConfigError(
            f"{memory} bytes ({mebibytes(memory)}) for weights and KV: no engine fits; the smallest ({name}) needs "
            f"{least} bytes ({mebibytes(least)}) for its weights and one sequence of {settings['max_model_len']} "
            "positions; raise --memory or lower --reserve"
        )


def load_items(engine: Engine, count: int, prompt: int, output: int) -> list[Item]:
    """Prompts that repeat themselves and differ from each other, of exactly `prompt` tokens."""
    items = []
    for number in range(count):
        if engine.tokenizer is None:
            assert engine.spec is not None
            ids = random_ids(24, number, engine.spec.vocab_size) * (prompt // 24 + 1)
        else:
            text = f"# File {number}\n{CODE_EDIT}"
            ids = tuple(engine.tokenizer.encode(text))
            ids = ids * (prompt // len(ids) + 1)
        items.append(Item(tuple(ids[-prompt:]), output))
    return items


def _run(engine: Engine, args: argparse.Namespace, lever: Lever, tick: Any) -> dict[str, Any]:
    """One sequence alone, then the crowd."""
    drive.warm_up(engine)
    memory = engine.scheduler.memory
    assert engine.config.num_blocks is not None
    need = memory.allocation.worst_case(args.prompt, args.prompt + args.tokens, 1)
    one = drive.run_load(engine, load_items(engine, 1, args.prompt, args.tokens), sample=False)
    tick(lever.name)
    crowd = drive.run_load(engine, load_items(engine, args.requests, args.prompt, args.tokens))
    tick(lever.name)
    stats = engine.stats()
    return {
        "weight_bytes": engine.hardware["weight_bytes"],
        "pool_bytes": engine.config.num_blocks * memory.layout.bytes_per_block,
        "fits": engine.config.num_blocks // need,
        "peak": crowd.peak_sequences,
        "rate": crowd.output_rate,
        "ms_crowd": crowd.ms_between_tokens(),
        "ms_one": one.ms_between_tokens(),
        "speculation": engine.scheduler.speculator is not None,
        "steps": crowd.steps,
        "preemptions": crowd.preemptions,
        "seconds": crowd.seconds,
        "guesses": stats.spec_draft_tokens,
        "guesses_right": stats.spec_accepted_tokens,
    }
