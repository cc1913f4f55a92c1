"""`octavo bench profile`: where a step goes, part by part, for decode steps of several sizes and for a prompt.

schedule   the scheduler makes the plan            head      hidden states to logits, rows that draw only
prepare    rows, tables, arrays for the kernels    sample    drawing tokens
model      products, attention, KV write, small operations (norms, rotation, activation), and its own Python
update     results into sequences, text, finished requests
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from octavo.bench import drive
from octavo.bench.growth import DECIDED, GOAL_PYTHON, GOAL_SEQUENCES, sizes
from octavo.bench.instrument import ATTENTION, HEAD, KV_WRITE, PRODUCTS, SMALL, StepProfile, build_profiled
from octavo.bench.limits import StepWork, limit_table, measure_limits
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    bar,
    engine_facts,
    machine_facts,
    parse_counts,
    positive,
    publish,
)
from octavo.bench.standing import decode_case, fill_kv, parts_of, python_share
from octavo.bench.workloads import random_ids
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine import Engine

DESCRIPTION = """\
Where a step goes: schedule, prepare, model by part, head, sample, update.

examples:
  octavo bench profile
  octavo bench profile --sequences 1,64 --context 2048 --prompt 512
"""
#: section -> what it is called in the table, in the order of a step
PARTS = {
    "schedule": "schedule",
    "prepare": "prepare",
    PRODUCTS: "model: products",
    ATTENTION: "model: attention",
    KV_WRITE: "model: KV write",
    SMALL: "model: small operations",
    "model": "model: the rest",
    HEAD: "head",
    "sample": "sample",
    "unaccounted": "runner, between sections",
    "update and text": "update and text",
    "total": "total",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("profile", help="where a step goes, part by part", description=DESCRIPTION)
    parser.add_argument("--sequences", type=parse_counts, default=[1, 16, 64], metavar="N,…", help="decoding (1,16,64)")
    parser.add_argument("--context", type=positive, default=512, metavar="N", help="tokens of each of them (512)")
    parser.add_argument("--prompt", type=positive, default=1024, metavar="N", help="tokens of the prompt step (1024)")
    parser.add_argument("--steps", type=positive, default=16, metavar="N", help="decode steps per figure (16)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    drive.refuse_settings(args, DECIDED, "the benchmark sizes the pool for its cases")
    cases = [(n, args.context) for n in args.sequences]
    settings = drive.settings_of(args, enable_prefix_caching=False)
    sized = sizes(settings, [*cases, (1, args.prompt)], args.steps)
    sized["max_num_batched_tokens"] = max(sized["max_num_batched_tokens"], args.prompt)
    engine, profile = build_profiled(settings, **sized)
    report = Report("profile", {**machine_facts(), **engine_facts(engine)})
    fill_kv(engine)
    config = engine.config
    limits = measure_limits(config.dtype, fixed_point=bool(config.fixed_point)) if config.device == "cpu" else None
    work = StepWork.of(engine)
    measured: dict[str, dict[str, Any]] = {}
    with bar(len(cases) + 1, "profile") as tick:
        for sequences, context in cases:
            name = f"decode {sequences}"
            measured[name] = decode_case(engine, profile, sequences, context, args.steps, sized_chunk(sized))
            tick(name)
        measured[f"prompt {args.prompt}"] = prompt_case(engine, profile, args.prompt)
        tick("prompt")
    engine.close()
    report.tables.append(table_of(measured))
    if limits is not None and work is not None:
        report.tables.append(limit_table(limits, work, measured))
        report.notes.append(limits.note())
    at_goal = measured.get(f"decode {GOAL_SEQUENCES}")
    if at_goal is not None:
        report.goals.append(Goal(f"Python share at {GOAL_SEQUENCES} sequences", python_share(at_goal), GOAL_PYTHON))
    watching = max(p["watching"] / p["total"] for p in measured.values())
    report.notes += [
        f"milliseconds per step and share of the step; decode contexts of about {args.context} random tokens",
        f"the sections themselves cost at most {watching:.1%} of a step",
    ]
    return publish(report, args)


def sized_chunk(sized: dict[str, Any]) -> int:
    """Tokens of a step of the sized engine."""
    return int(sized["max_num_batched_tokens"])


def prompt_case(engine: Engine, profile: StepProfile, prompt: int, repeats: int = 3) -> dict[str, Any]:
    """Mean milliseconds of each part of the step that computes a whole prompt and draws its first token."""
    assert engine.spec is not None
    sums: dict[str, float] = {}
    for repeat in range(repeats + 1):
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        engine.add_request(f"prompt-{repeat}", list(random_ids(prompt, repeat, engine.spec.vocab_size)), params)
        profile.reset()
        parts = parts_of(profile, *drive.timed_steps(engine, 1))
        if repeat:  # the first one warms up
            sums = {name: sums.get(name, 0.0) + value / repeats for name, value in parts.items()}
    return {"sequences": 1, "context": prompt, **sums}


def table_of(measured: dict[str, dict[str, Any]]) -> Table:
    """One line per part, one column per case; cells are milliseconds and shares."""
    columns = [Column("part", "part"), *(Column(name, name, _cell) for name in measured)]
    rows: list[dict[str, Any]] = []
    for part, title in PARTS.items():
        row: dict[str, Any] = {"part": title}
        for name, parts in measured.items():
            ms = parts.get(part, 0.0)
            row[name] = {"ms": ms, "share": ms / parts["total"]}
        rows.append(row)
    return Table("a step", columns, rows)


def _cell(value: dict[str, float]) -> str:
    return f"{value['ms']:,.2f} ms {value['share']:6.1%}"
