"""`octavo bench sharing`: several answers to one long prompt, with copy-on-write on and off.

With it, n samples (or beams) hold the prompt once and own only what differs; without it each holds a copy of all.
Same engine, same kernels, same tokens: only `copy_on_write` differs.
"""

from __future__ import annotations

import argparse
from typing import Any

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
    parse_counts,
    percent,
    positive,
    publish,
    times,
)
from octavo.bench.workloads import Item, random_ids
from octavo.sampling_params import BeamSearchParams, SamplingParams

DESCRIPTION = """\
KV bytes and time of n samples and of beams over one long prompt, with copy-on-write on and off.

examples:
  octavo bench sharing
  octavo bench sharing --prompt 512 --output 16 --widths 1,4
"""
DECIDED = ("copy_on_write", "enable_prefix_caching", "allocation")
COLUMNS = (
    Column("kind", "what"),
    Column("width", "width"),
    Column("held_on", "KV held, on", mebibytes),
    Column("held_off", "off", mebibytes),
    Column("held_ratio", "on / off", percent),
    Column("seconds_on", "s, on", fixed(2)),
    Column("seconds_off", "off", fixed(2)),
    Column("seconds_ratio", "on / off", percent),
    Column("copies_on", "copies, on"),
    Column("copies_off", "off"),
    Column("grows", "held, of width 1", times),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "sharing", help="n samples and beams, copy-on-write on and off", description=DESCRIPTION
    )
    parser.add_argument("--prompt", type=positive, default=1024, metavar="N", help="tokens of the prompt (1024)")
    parser.add_argument("--output", type=positive, default=32, metavar="N", help="tokens of each answer (32)")
    parser.add_argument(
        "--widths", type=parse_counts, default=[1, 2, 4, 8], metavar="N,…", help="n and beams (1,2,4,8)"
    )
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, DECIDED, "the benchmark switches sharing itself")
    settings = drive.settings_of(args, max_model_len=args.prompt + args.output, enable_prefix_caching=False)
    report = Report("sharing", machine_facts())
    cases = [(kind, width) for kind in ("samples", "beams") for width in args.widths]
    measured: dict[bool, dict[tuple[str, int], dict[str, Any]]] = {}
    with bar(2 * len(cases), "sharing") as tick:
        for shared in (True, False):
            engine = drive.build(settings, copy_on_write=shared)
            report.facts.update(engine_facts(engine))
            assert engine.spec is not None
            drive.warm_up(engine)
            item = Item(random_ids(args.prompt, 3, engine.spec.vocab_size), args.output)
            measured[shared] = {}
            for kind, width in cases:
                measured[shared][kind, width] = _case(engine, item, kind, width)
                tick(f"{kind} {width}")
            engine.close()
    rows = rows_of(measured[True], measured[False])
    report.tables.append(Table(f"a prompt of {args.prompt} tokens, answers of {args.output}", COLUMNS, rows))
    report.notes += [
        "KV held: most bytes of blocks in use in any step; copies: blocks copied before a write",
        "off: every answer has a copy of the whole prompt before its first own step",
    ]
    return publish(report, args)


def _case(engine: Any, item: Item, kind: str, width: int) -> dict[str, Any]:
    """Run one request and take its peak."""
    before = engine.stats().copies
    run = drive.run_load(engine, [item], lambda i: params_of(kind, width, i.output))
    return {"held": run.peak_held, "seconds": run.seconds, "copies": engine.stats().copies - before}


def params_of(kind: str, width: int, output: int) -> SamplingParams | BeamSearchParams:
    """Samples with a fixed seed, or a beam search of the same length."""
    if kind == "beams":
        return BeamSearchParams(beam_width=width, max_tokens=output, ignore_eos=True)
    return SamplingParams(n=width, temperature=1.0, seed=1, max_tokens=output, ignore_eos=True)


def rows_of(
    on: dict[tuple[str, int], dict[str, Any]], off: dict[tuple[str, int], dict[str, Any]]
) -> list[dict[str, Any]]:
    """On and off side by side, with ratios. `grows`: against the narrowest case of the same kind, shared."""
    rows: list[dict[str, Any]] = []
    first: dict[str, int] = {}
    for (kind, width), shared in on.items():
        private = off[kind, width]
        first.setdefault(kind, shared["held"])
        rows.append(
            {
                "kind": kind,
                "width": width,
                **{f"{name}_on": value for name, value in shared.items()},
                **{f"{name}_off": value for name, value in private.items()},
                "held_ratio": shared["held"] / private["held"],
                "seconds_ratio": shared["seconds"] / private["seconds"],
                "grows": shared["held"] / first[kind],
            }
        )
    return rows
