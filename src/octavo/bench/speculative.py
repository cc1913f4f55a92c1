"""`octavo bench speculative`: tokens per second with guesses and without, where they help and where they do not.

One engine for both ways: its speculator is taken out and put back between requests, so model, pool, kernels and
process are the same, and each load is run off, on, on, off, … with the prefix cache emptied before each run. Texts are
compared: on the native kernels a run with guesses that says anything else than one without is an error, not a figure;
elsewhere, where products round by the shape of a step, such runs are counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
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
    times,
)
from octavo.errors import ConfigError, InternalError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine import Engine

DESCRIPTION = """\
Speculative decoding against none, in one process, run by run in turn. Loads:
code edit and extraction repeat their prompt (guesses come true); prose is sampled (they do not);
the crowd is many sequences at once (a row costs as much as a token brings).

examples:
  octavo bench speculative
  octavo bench speculative --speculative ngram:5 --tokens 256 --repeats 5
  octavo bench speculative --speculative draft:PATH:4
  octavo bench speculative --speculative '{"method": "draft", "model": "gemma-3-270m", "quantization": "int4"}'
                                          the model's own int4 copy guesses for it
"""
HELPS, HARMLESS = 1.8, 0.98
COLUMNS = (
    Column("load", "load"),
    Column("sequences", "sequences"),
    Column("off", "tok/s without", fixed(1)),
    Column("on", "tok/s with", fixed(1)),
    Column("ratio", "ratio", times),
    Column("per_step", "tokens a step", fixed(2)),
    Column("proposed", "guesses"),
    Column("accepted", "right", percent),
)

_CODE = """\
class Account:
    def __init__(self, owner, balance):
        self.owner = owner
        self.balance = balance
        self.history = []

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        self.history.append(("deposit", amount))

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        if amount > self.balance:
            raise ValueError("not enough money")
        self.balance = self.balance - amount
        self.history.append(("withdraw", amount))

    def report(self):
        for kind, amount in self.history:
            print(kind, amount)
        print("balance", self.balance)
"""
CODE_EDIT = f"""The original file:
```python
{_CODE}```

The same file, with a comment in front of the class:
```python
# A bank account.
class Account:
    def __init__(self, owner, balance):
"""
_PEOPLE = (
    ("Ada Lovelace", "1815", "London"), ("Grace Hopper", "1906", "New York"), ("Alan Turing", "1912", "London"),
    ("Emmy Noether", "1882", "Erlangen"), ("Carl Gauss", "1777", "Brunswick"), ("Sofia Kovalevskaya", "1850", "Moscow"),
    ("Leonhard Euler", "1707", "Basel"), ("Blaise Pascal", "1623", "Clermont"), ("Kurt Friedrich", "1906", "Brno"),
    ("Mary Somerville", "1780", "Jedburgh"), ("George Boole", "1815", "Lincoln"), ("John Backus", "1924", "Wilmington"),
)  # fmt: skip
EXTRACTION = (
    "Text:\n"
    + " ".join(f"{name} was born in {city} in the year {year}, and became famous." for name, year, city in _PEOPLE)
    + "\n\nSentences of the text, one per line:\n"
    + "".join(f"- {n} was born in {c} in the year {y}, and became famous.\n" for n, y, c in _PEOPLE[:2])
    + "- "
)
PROSE = "The old lighthouse keeper had never told anyone what he saw that winter. One evening, when the storm"


@dataclass(frozen=True)
class Load:
    """Prompts that run at once. goal: the least ratio it is held to."""

    name: str
    prompts: Sequence[str]
    temperature: float
    goal: float


def loads(crowd: int) -> list[Load]:
    """One sequence where guesses help, one where they do not, and a crowd."""
    lines = [line for line in _CODE.splitlines() if line.strip()]
    return [
        Load("code edit", [CODE_EDIT], 0.0, HELPS),
        Load("extraction", [EXTRACTION], 0.0, HELPS),
        Load("prose, sampled", [PROSE], 1.0, HARMLESS),
        Load("crowd, sampled", [f"{PROSE} {lines[i % len(lines)]} {i}" for i in range(crowd)], 1.0, HARMLESS),
    ]


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "speculative", help="speculative decoding where it helps and where not", description=DESCRIPTION
    )
    parser.add_argument("--tokens", type=positive, default=192, metavar="N", help="output tokens per sequence (192)")
    parser.add_argument("--repeats", type=positive, default=5, metavar="N", help="runs of each way and load (5)")
    parser.add_argument("--crowd", type=positive, default=16, metavar="N", help="sequences of the crowd (16)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    settings = drive.settings_of(args, speculative="ngram", max_model_len=2048)
    engine = drive.build(settings)
    try:
        if engine.tokenizer is None:
            raise ConfigError("bench speculative runs texts: the engine needs a tokenizer")
        drive.warm_up(engine)
        report = Report("speculative", {**machine_facts(), **engine_facts(engine)})
        report.facts["speculative"] = engine.config.speculative
        cases = loads(args.crowd)
        rows = []
        with bar(len(cases) * args.repeats * 2, "runs") as tick:
            for load in cases:
                row = compare(engine, load, args.tokens, args.repeats, tick)
                rows.append(row)
                report.goals.append(Goal(f"{load.name}: with guesses / without", row["ratio"], load.goal, True))
        report.tables.append(Table("tokens per second", COLUMNS, rows))
        report.tables.append(_costs(engine))
        differ = sum(row["differ"] for row in rows)
        texts = (
            f"in {differ} runs a text differed (rounding by the shape of a step)" if differ else "all texts were equal"
        )
        report.notes.append(f"ratio: median over the pairs of runs that follow each other; {texts}")
        report.notes.append(str(engine.settings()["speculative"]["why"]))
    finally:
        engine.close()
    return publish(report, args)


def _costs(engine: Engine) -> Table:
    """What the cost rule goes by: the measured time of a step by its rows."""
    settings = engine.scheduler.settings.speculation
    assert settings is not None
    columns = (Column("rows", "rows of a step"), Column("ms", "ms", fixed(2)), Column("each", "ms a row", fixed(2)))
    rows = [{"rows": r, "ms": 1e3 * t, "each": 1e3 * t / r} for r, t in settings.row_costs]
    return Table("cost of a step, measured at start", columns, rows)


def compare(engine: Engine, load: Load, tokens: int, repeats: int, tick: Any = lambda text: None) -> dict[str, Any]:
    """Run `load` both ways in turn; the figures of one row of the table. Raises `InternalError` where texts differ."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    before = engine.stats()
    said: list[list[int]] | None = None
    steps = differ = 0
    for repeat in range(repeats):
        for on in (False, True) if repeat % 2 == 0 else (True, False):
            begin_steps = engine.scheduler.counters.steps
            with nullcontext() if on else _no_guesses(engine):
                taken, answers = _timed(engine, load, tokens)
            steps += (engine.scheduler.counters.steps - begin_steps) * on
            seconds[on].append(taken)
            same = said is None or answers == said
            differ += not same
            if not same and engine.config.attention_backend == "native":  # whose bits do not depend on the batch
                raise InternalError(f"{load.name}: the text with guesses is another than without")
            said = answers
            tick(load.name)
    after = engine.stats()
    produced = sum(map(len, said or []))
    proposed = after.spec_draft_tokens - before.spec_draft_tokens
    accepted = after.spec_accepted_tokens - before.spec_accepted_tokens
    return {
        "load": load.name,
        "sequences": len(load.prompts),
        "off": produced / median(seconds[False]),
        "on": produced / median(seconds[True]),
        "ratio": median([off / on for off, on in zip(seconds[False], seconds[True], strict=True)]),
        "per_step": produced * repeats / len(load.prompts) / steps,
        "proposed": proposed,
        "accepted": accepted / proposed if proposed else None,
        "differ": differ,
        "seconds_off": seconds[False],
        "seconds_on": seconds[True],
    }


@contextmanager
def _no_guesses(engine: Engine) -> Iterator[None]:
    """Neither speculator nor draft model take part; both are back afterwards."""
    scheduler, runner = engine.scheduler, engine.runner
    speculator, scheduler.speculator = scheduler.speculator, None
    try:
        with runner.without_draft():  # type: ignore[attr-defined]
            yield
    finally:
        scheduler.speculator = speculator


def _timed(engine: Engine, load: Load, tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the first output token on, and the tokens of each sequence. Prompts come before the clock."""
    assert engine.tokenizer is not None
    engine.reset_prefix_cache()
    for number, text in enumerate(load.prompts):
        params = SamplingParams(temperature=load.temperature, max_tokens=tokens, ignore_eos=True, seed=number)
        engine.add_request(f"run-{number}", engine.tokenizer.encode(text), params)
    found: dict[str, list[int]] = {}
    waiting = {f"run-{number}" for number in range(len(load.prompts))}
    begin = time.perf_counter()
    while engine.has_unfinished():
        for output in engine.step():
            found[output.request_id] = output.outputs[0].token_ids
            waiting.discard(output.request_id)
        if waiting:
            begin = time.perf_counter()
    return time.perf_counter() - begin, [list(found[name]) for name in sorted(found)]
