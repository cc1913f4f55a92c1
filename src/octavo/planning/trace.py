"""Traces: who asks when, with how many tokens, and which of those tokens were seen before.

A trace is a list of `TraceRequest`, in order of arrival. Three sources, one shape:

    CSV      TIMESTAMP,ContextTokens,GeneratedTokens       the header of the public Azure LLM inference traces
    JSONL    one conversation a line, with shared prefixes  (`trace_jsonl.py` says how a line looks)
    made up  `trace_synthetic.py`

Texts do not matter, only which tokens are equal. So a prompt is a list of *runs* `(name, tokens)`: runs of one name
are the same tokens wherever they appear. A prompt without runs shares nothing with any other.

Nothing here knows blocks, engines or clocks: arrivals are seconds since the beginning of the trace.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from octavo.errors import ConfigError

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
SYSTEM = "system"  # runs with names that begin so are common to many
MOST_TOKENS = 10_000_000  # of one request; more is a mistake in the file

Run = tuple[str, int]  # (name, number of tokens)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    arrival: seconds since the beginning of the trace; with `after`, seconds after that request (its index in the
    trace) was answered: a person reads and types, so the next turn of a conversation cannot come before.
    runs: what the prompt consists of, adding up to `prompt_tokens`; () shares nothing. output_name: the name under
    which later prompts refer to the answer.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    runs: tuple[Run, ...] = ()
    output_name: str | None = None
    after: int | None = None

    @property
    def total(self) -> int:
        """Tokens that the sequence has when it ends."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival (those with `after` come later than the one that they wait for)."""

    name: str
    requests: list[TraceRequest]

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self.requests)

    @property
    def longest(self) -> int:
        """Most tokens of one request, prompt and output."""
        return max(r.total for r in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(r.prompt_tokens for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(r.output_tokens for r in self.requests)

    def lengths(self) -> list[tuple[int, int]]:
        """(prompt tokens, output tokens) of every request."""
        return [(r.prompt_tokens, r.output_tokens) for r in self.requests]

    def first(self, count: int) -> Trace:
        """Only the first `count` requests. Raises `ConfigError` if there are fewer."""
        if count > len(self.requests):
            raise ConfigError(
                f"{count} requests were asked for, {self.name} has {len(self.requests)}; "
                "ask for fewer, or repeat the trace"
            )
        return Trace(self.name, self.requests[:count])

    def repeated(self, count: int) -> Trace:
        """The trace over and over until there are `count` requests, one copy after the other in time."""
        size = len(self.requests)
        if count <= size:
            return self.first(count)
        span = max((r.arrival for r in self.requests if r.after is None), default=0.0)
        pause = span / max(1, size - 1)
        requests = []
        for number in range(count):
            copy, index = divmod(number, size)
            given = self.requests[index]
            shift = copy * (span + pause) if given.after is None else 0.0
            after = None if given.after is None else given.after + copy * size
            runs, answer = given.runs, given.output_name
            if copy:  # the same people come again with other words; only what all have in common stays the same
                runs = tuple((f"{n}, again {copy}" if not n.startswith(SYSTEM) else n, k) for n, k in runs)
                answer = None if answer is None else f"{answer}, again {copy}"
            arrival = given.arrival + shift
            requests.append(replace(given, arrival=arrival, after=after, runs=runs, output_name=answer))
        return Trace(f"{self.name} x {count / size:.3g}", requests)

    def faster(self, factor: float) -> Trace:
        """Arrivals come `factor` times as fast; thinking times between turns stay."""
        if not (math.isfinite(factor) and factor > 0):
            raise ConfigError(f"a speed of {factor!r}: must be a positive number")
        scaled = [r if r.after is not None else replace(r, arrival=r.arrival / factor) for r in self.requests]
        return Trace(self.name, scaled)

    def describe(self) -> str:
        """One line for people."""
        count = len(self.requests)
        shared = sum(1 for r in self.requests if r.runs)
        span = max((r.arrival for r in self.requests if r.after is None), default=0.0)
        rate = "all at once" if span == 0 else f"{sum(r.after is None for r in self.requests) / span:.3g} arrivals/s"
        text = (
            f"{self.name}: {count:,} requests, {rate}, prompts of {self.prompt_tokens / count:,.0f} tokens and "
            f"outputs of {self.output_tokens / count:,.0f} on average"
        )
        return text + (f", {shared:,} with named prefixes" if shared else "")


def read_trace(path: str | Path) -> Trace:
    """A trace from a .csv or .jsonl file. Raises `ConfigError` that names the line and what to do about it."""
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in (".csv", ".jsonl"):
        raise ConfigError(
            f"trace {path}: the name must end in .csv (header {','.join(HEADER)}) or .jsonl (one conversation a line)"
        )
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            if kind == ".csv":
                requests = list(_csv_requests(path, lines))
            else:
                from octavo.planning.trace_jsonl import jsonl_requests

                requests = jsonl_requests(path, lines)
    except OSError as error:
        raise ConfigError(f"trace {path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: is not UTF-8 text ({error.reason}); save it as UTF-8") from error
    if not requests:
        raise ConfigError(f"trace {path}: holds no request; give at least one line below the header")
    return Trace(path.name, requests)


# -- CSV -------------------------------------------------------------------------------------------------------------


def _csv_requests(path: Path, lines: Iterator[str]) -> Iterator[TraceRequest]:
    """Rows in order of time; the first one arrives at 0."""
    rows = csv.reader(lines)
    header = [name.strip() for name in next(rows, [])]
    places = _columns(path, header)
    found: list[tuple[float, int, int]] = []
    in_order = True
    for row in rows:
        if not row or row == [""]:
            continue
        where = f"trace {path}, line {rows.line_num}"
        if len(row) < len(header):
            raise ConfigError(f"{where}: {len(row)} fields, the header has {len(header)}; complete or remove the line")
        at = _timestamp(row[places[0]].strip(), where)
        in_order = in_order and (not found or at >= found[-1][0])
        prompt, output = (_tokens(row[p].strip(), name, where) for p, name in zip(places[1:], HEADER[1:]))
        found.append((at, prompt, output))
    if not in_order:
        found.sort(key=lambda r: r[0])
    begin = found[0][0] if found else 0.0
    for at, prompt, output in found:
        yield TraceRequest(at - begin, prompt, output)


def _columns(path: Path, header: list[str]) -> list[int]:
    """Places of the three columns, found by name in any case; further columns are of no use to anybody here."""
    known = {name.lower(): place for place, name in enumerate(header)}
    missing = [name for name in HEADER if name.lower() not in known]
    if missing:
        raise ConfigError(
            f"trace {path}, line 1: no column {', '.join(missing)} in the header {','.join(header) or '(empty)'!r}; "
            f"the first line must be {','.join(HEADER)}"
        )
    return [known[name.lower()] for name in HEADER]


def _timestamp(text: str, where: str) -> float:
    """Seconds, from a plain number of seconds or a date with time."""
    try:
        at = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ConfigError(
                f"{where}: TIMESTAMP {text!r} is neither a number of seconds nor a time like 2023-11-16 18:15:46.68"
            ) from None
        # A time without a zone is taken as it is: only differences matter.
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if not math.isfinite(at):
        raise ConfigError(f"{where}: TIMESTAMP {text!r} is not finite")
    return at


def _tokens(text: str, name: str, where: str) -> int:
    try:
        count = int(text)
    except ValueError:
        raise ConfigError(f"{where}: {name} {text!r} is no whole number") from None
    if not 1 <= count <= MOST_TOKENS:
        raise ConfigError(
            f"{where}: {name}={count} must lie between 1 and {MOST_TOKENS}; correct or remove the line "
            "(a request without prompt or output tokens occupies no cache)"
        )
    return count
