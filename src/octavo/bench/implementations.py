"""`octavo bench implementations`: the same model by Octavo's own decoder and through transformers; what adapters cost.

Both engines are there at once and take turns, run by run, so that a noisy machine is as unkind to one as to the other.
With `--lora` the own decoder also runs the load with the adapter in every second request, and in all of them.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from octavo.bench import drive, workloads
from octavo.bench.report import (
    Column,
    Report,
    Table,
    bar,
    engine_facts,
    fixed,
    machine_facts,
    positive,
    publish,
    times,
)
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.workloads import Item
    from octavo.engine import Engine

DESCRIPTION = """\
Run one load by Octavo's own decoder and through transformers, in turns.

examples:
  octavo bench implementations --model path/to/model --dtype float32
  octavo bench implementations --model path/to/model --lora poet=path/to/adapter --requests 8
"""
SHORTEST_LIMIT = 32  # a request has two tokens then at the least
COLUMNS = (
    Column("what", "what"),
    Column("seconds", "s", fixed(2)),
    Column("output_rate", "output tok/s", fixed(1)),
    Column("ms_between_tokens", "ms between tokens", fixed(1)),
    Column("ratio", "of the own decoder's rate", times),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "implementations", help="the own decoder against transformers; adapters", description=DESCRIPTION
    )
    parser.add_argument("--requests", type=positive, default=16, metavar="N", help="of the mixed load (16)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="runs of each; medians are shown (3)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, ("model_impl",), "both are measured")
    settings = drive.settings_of(args, enable_prefix_caching=False)
    whole = workloads.mixed_lengths(args.requests)
    lengths = shortened(whole, _limit(settings))
    settings.setdefault("max_model_len", max(p + o for p, o in lengths))
    own = drive.build(settings, model_impl="octavo")
    engines = {"octavo": own, "transformers": drive.build(settings, model_impl="transformers", lora=None)}
    kinds: list[tuple[str, str, str | None, int]] = [(name, name, None, 1) for name in engines]
    for loaded in own.adapters:
        kinds.append((f"octavo, {loaded.name} in every second request", "octavo", loaded.name, 2))
        kinds.append((f"octavo, {loaded.name} in every request", "octavo", loaded.name, 1))
    report = Report("implementations", {**machine_facts(), **engine_facts(own)})
    assert own.spec is not None
    runs: dict[str, list[drive.Run]] = {kind[0]: [] for kind in kinds}
    try:
        for engine in engines.values():
            drive.warm_up(engine)
        with bar(args.repeat * len(kinds) * len(lengths), "implementations") as tick:
            for repeat in range(args.repeat):
                items = workloads.items_of(lengths, own.spec.vocab_size, seed=repeat)
                for what, name, adapter, every in kinds:
                    given = [replace(x, lora=adapter if not i % every else None) for i, x in enumerate(items)]
                    runs[what].append(_run(engines[name], given, tick))
    finally:
        for engine in engines.values():
            engine.close()
    rows = [_row(what, found) for what, found in runs.items()]
    for row in rows:
        row["ratio"] = row["output_rate"] / rows[0]["output_rate"]
    report.tables.append(Table(f"{len(lengths)} requests, medians of {args.repeat} runs in turns", COLUMNS, rows))
    if lengths != whole:
        report.notes.append(
            f"all lengths are shortened alike, for a longest request of {max(p + o for p, o in lengths)} tokens "
            f"instead of {max(p + o for p, o in whole)}"
        )
    return publish(report, args)


def shortened(lengths: list[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """The load for a model of `limit` positions: where a request is longer, all lengths shrink by one factor.

    Raises `ConfigError` for a limit that leaves nothing to measure.
    """
    longest = max(p + o for p, o in lengths)
    if longest <= limit:
        return lengths
    if limit < SHORTEST_LIMIT:
        raise ConfigError(
            f"max_model_len={limit}: too short for the load, whose longest request has {longest} tokens and can be "
            f"shortened to {SHORTEST_LIMIT}; raise max_model_len or measure a model with more positions"
        )
    return [(max(1, p * limit // longest), max(1, o * limit // longest)) for p, o in lengths]


def _limit(settings: dict[str, Any]) -> int:
    """Positions that a request may have: the setting, else the model's own limit."""
    from octavo.config import EngineConfig
    from octavo.models.load import read_spec

    spec = read_spec(settings.get("model", EngineConfig.model), settings.get("load_format", "auto"), "octavo")
    return int(settings.get("max_model_len") or spec.max_position_embeddings)


def _run(engine: Engine, items: list[Item], tick: Any) -> drive.Run:
    return drive.run_load(engine, items, sample=False, tick=tick)


def _row(what: str, runs: list[drive.Run]) -> dict[str, Any]:
    gaps = [gap for run in runs if (gap := run.ms_between_tokens()) is not None]
    return {
        "what": what,
        "seconds": median(run.seconds for run in runs),
        "output_rate": median(run.output_rate for run in runs),
        "ms_between_tokens": median(gaps) if gaps else None,
    }
