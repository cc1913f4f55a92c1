"""`octavo bench serve`: the HTTP server under load, as its clients see it.

Starts `octavo serve` as a process of its own (or uses one that runs, with --url) and sends streaming completions at
Poisson-distributed moments, rate after rate. With --compare-offline the same load also goes through an engine in this
process, turn by turn, and the time to the first token of a short prompt is measured both ways.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.bench import drive, http_load, workloads
from octavo.bench.http_load import Sent, Target, percentile
from octavo.bench.report import Column, Goal, Report, Table, fixed, machine_facts, median, positive, publish, times
from octavo.bench.server_process import ServerProcess
from octavo.bench.workloads import Item
from octavo.errors import ConfigError, InternalError
from octavo.vllm_names import config_from

if TYPE_CHECKING:
    from octavo.engine import Engine

DESCRIPTION = """\
Measure a server: throughput, and the percentiles of the first token and of the time between tokens.

examples:
  octavo bench serve --rates 1,2,4 --requests 64
  octavo bench serve --compare-offline --requests 64 --repeat 3
  octavo bench serve --url http://127.0.0.1:8000 --rates 8
"""
OFFLINE_SHARE = 0.95  # of the offline throughput
FIRST_TOKEN_MS = 10.0  # that HTTP may add
SHORT_PROMPT, SHORT_OUTPUT = 16, 4
MODEST_VOCABULARY = 1000  # ids that nearly every model has
ms = fixed(1)
RATE_COLUMNS = (
    Column("rate", "req/s asked", fixed(2)),
    Column("requests", "requests"),
    Column("failed", "failed"),
    Column("request_rate", "req/s done", fixed(2)),
    Column("output_rate", "output tok/s", fixed(1)),
    *(Column(f"first_{p}", f"first p{p}", ms) for p in (50, 95, 99)),
    *(Column(f"between_{p}", f"between p{p}", ms) for p in (50, 95, 99)),
)
OFFLINE_COLUMNS = (
    Column("how", "way"),
    Column("seconds", "s", fixed(2)),
    Column("output_rate", "output tok/s", fixed(1)),
    Column("ratio", "of offline", times),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("serve", help="the HTTP server under load", description=DESCRIPTION)
    parser.add_argument("--url", metavar="URL", help="a server that runs already (default: start one)")
    parser.add_argument("--api-key", metavar="KEY", help="of that server")
    parser.add_argument("--rates", metavar="R,R", default="1,2,4", help="requests per second, one run each (1,2,4)")
    parser.add_argument("--requests", type=positive, default=64, metavar="N", help="requests of each run (64)")
    parser.add_argument("--prompt-len", type=positive, metavar="N", help="tokens of every prompt (mixed: 32 to 512)")
    parser.add_argument("--output-len", type=positive, metavar="N", help="tokens of every answer (mixed: 32 to 256)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and moments (0)")
    parser.add_argument(
        "--vocabulary", type=positive, metavar="N", help=f"with --url: prompts are ids below N ({MODEST_VOCABULARY})"
    )
    parser.add_argument("--compare-offline", action="store_true", help="throughput and first token against offline")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="with --compare-offline: turns (3)")
    drive.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    settings = drive.settings_of(args)
    if args.url is not None and (settings or args.compare_offline):
        what = "--compare-offline" if args.compare_offline else ", ".join(settings)
        raise ConfigError(f"{what}: cannot be combined with --url, that server has its own settings")
    lengths = lengths_of(args)
    report = Report("serve", {**machine_facts(), "load": load_facts(lengths)})
    if args.url is not None:
        _rates(report, Target.of(args.url, args.api_key), lengths, args, args.vocabulary or MODEST_VOCABULARY)
        return publish(report, args)
    if args.vocabulary is not None:
        raise ConfigError("--vocabulary: only with --url; the vocabulary of a model that is started here is known")
    longest = max(p + o for p, o in lengths)
    settings.setdefault("max_model_len", max(longest, 64))
    if args.compare_offline:
        _against_offline(report, settings, lengths, args)
        return publish(report, args)
    from octavo.models.load import read_spec

    config = config_from(**settings)
    vocabulary = read_spec(config.model, config.load_format).vocab_size
    with ServerProcess(as_arguments(settings)) as server:
        target = Target.of(server.url)
        _warm(target)
        _rates(report, target, lengths, args, vocabulary)
    return publish(report, args)


def lengths_of(args: argparse.Namespace) -> list[tuple[int, int]]:
    """(prompt, output) lengths: the mixed load, with fixed numbers where they are given."""
    mixed = workloads.mixed_lengths(args.requests)
    return [(args.prompt_len or p, args.output_len or o) for p, o in mixed]


def load_facts(lengths: Sequence[tuple[int, int]]) -> dict[str, int]:
    return {
        "requests": len(lengths),
        "prompt_tokens": sum(p for p, _ in lengths),
        "output_tokens": sum(o for _, o in lengths),
    }


def as_arguments(settings: dict[str, Any]) -> list[str]:
    """Engine settings as options of `octavo serve`."""
    renamed = {"enable_prefix_caching": "prefix_caching", "seed": "engine_seed"}
    arguments = []
    for name, value in settings.items():
        option = "--" + renamed.get(name, name).replace("_", "-")
        if isinstance(value, bool):
            arguments.append(option if value else option.replace("--", "--no-", 1))
        else:
            arguments += [option, str(value)]
    return arguments


# -- rates -----------------------------------------------------------------------------------------------------------


def _rates(
    report: Report, target: Target, lengths: list[tuple[int, int]], args: argparse.Namespace, vocabulary: int
) -> None:
    try:
        rates = [float(part) for part in args.rates.split(",")]
    except ValueError:
        raise ConfigError(f"--rates {args.rates}: must be numbers with commas, such as 1,2,4") from None
    if not all(math.isfinite(rate) and rate > 0 for rate in rates):
        raise ConfigError(f"--rates {args.rates}: every rate must be a finite number above 0")
    rows = []
    for number, rate in enumerate(rates):
        items = workloads.items_of(lengths, vocabulary, seed=args.seed + number)
        seconds, sent = asyncio.run(http_load.poisson(target, items, rate, args.seed + number))
        rows.append(rate_row(rate, seconds, sent))
    report.tables.append(Table(f"{len(lengths)} requests per rate; times in ms", RATE_COLUMNS, rows))
    report.notes.append("first: from sending to the first text; between: two events of one stream, as the client sees")
    for row in rows:
        if row["failed"]:
            report.notes.append(f"at {row['rate']:g} req/s {row['failed']} failed, the first: {row['first_error']}")


def rate_row(rate: float, seconds: float, sent: Sequence[Sent]) -> dict[str, Any]:
    """One line: counts, rates and percentiles in milliseconds."""
    good = [s for s in sent if s.good]
    first = [1e3 * s.events[0] for s in good if s.events]
    between = [1e3 * gap for s in good for gap in s.gaps]
    row: dict[str, Any] = {
        "rate": rate,
        "requests": len(sent),
        "failed": len(sent) - len(good),
        "first_error": next((s.error or f"status {s.status}" for s in sent if not s.good), None),
        "seconds": seconds,
        "request_rate": len(good) / seconds,
        "output_rate": sum(s.output_tokens for s in good) / seconds,
    }
    for share in (50, 95, 99):
        row[f"first_{share}"] = percentile(first, share / 100)
        row[f"between_{share}"] = percentile(between, share / 100)
    return row


def _warm(target: Target) -> None:
    """First-use costs are not the load's."""
    for length in (4, 16):
        sent = asyncio.run(http_load.send(target, http_load.completion(Item((1,) * length, 2))))
        if not sent.good:
            raise InternalError(f"the server does not answer: {sent.error or sent.status}")


# -- against offline -------------------------------------------------------------------------------------------------


def _against_offline(
    report: Report, settings: dict[str, Any], lengths: list[tuple[int, int]], args: argparse.Namespace
) -> None:
    """Turn by turn: the same load offline, streamed and not streamed; the one that waits is idle."""
    engine = drive.build(settings)
    assert engine.spec is not None
    vocabulary = engine.spec.vocab_size
    try:
        drive.warm_up(engine)
        with ServerProcess(as_arguments(settings)) as server:
            target = Target.of(server.url)
            _warm(target)
            runs: dict[str, list[tuple[float, int]]] = {"offline": [], "streamed": [], "whole": []}
            firsts: dict[str, list[float]] = {"offline": [], "streamed": []}
            for turn in range(args.repeat):
                items = workloads.items_of(lengths, vocabulary, seed=args.seed + turn)
                offline = drive.run_load(engine, items, sample=False)
                runs["offline"].append((offline.seconds, offline.output_tokens))
                engine.reset_prefix_cache()
                runs["streamed"].append(_served(target, items, "streamed", stream=True))
                # Another salt: the server's prefix cache must not know the prompts from the turn before.
                runs["whole"].append(_served(target, items, "whole", stream=False))
                for pair in _first_tokens(engine, target, vocabulary, args.seed + turn):
                    firsts["offline"].append(pair[0])
                    firsts["streamed"].append(pair[1])
    finally:
        engine.close()
    _compare(report, runs, firsts)


def _served(target: Target, items: list[Item], salt: str, *, stream: bool) -> tuple[float, int]:
    more: dict[str, Any] = {"cache_salt": salt}
    if not stream:
        more |= {"stream": False, "stream_options": None}
    seconds, sent = asyncio.run(http_load.all_at_once(target, items, **more))
    bad = [s for s in sent if not s.good]
    if bad:
        raise InternalError(f"{len(bad)} of {len(sent)} requests failed: {bad[0].error or bad[0].status}")
    return seconds, sum(s.output_tokens for s in sent)


def _first_tokens(engine: Engine, target: Target, vocabulary: int, seed: int) -> list[tuple[float, float]]:
    """Seconds to the first token of short prompts nobody has seen: offline, and over HTTP; one after the other."""
    pairs = []
    for number in range(12):
        item = Item(workloads.random_ids(SHORT_PROMPT, 900_000 + 100 * seed + number, vocabulary), SHORT_OUTPUT)
        begin = time.perf_counter()
        engine.add_request(f"first-{number}", list(item.token_ids), drive.greedy(item))
        engine.step()
        offline = time.perf_counter() - begin
        while engine.has_unfinished():
            engine.step()
        sent = asyncio.run(http_load.send(target, http_load.completion(item)))
        if not sent.events:
            raise InternalError(f"no token came: {sent.error or sent.status}")
        pairs.append((offline, sent.events[0]))
    return pairs


def _compare(report: Report, runs: dict[str, list[tuple[float, int]]], firsts: dict[str, list[float]]) -> None:
    rates = {way: median([tokens / seconds for seconds, tokens in each]) for way, each in runs.items()}
    rows = [
        {
            "how": {"offline": "offline", "streamed": "HTTP, streamed", "whole": "HTTP, whole answers"}[way],
            "seconds": median([seconds for seconds, _ in each]),
            "output_rate": rates[way],
            "ratio": rates[way] / rates["offline"],
        }
        for way, each in runs.items()
    ]
    report.tables.append(Table("the same load, all requests at once; medians", OFFLINE_COLUMNS, rows))
    added = [1e3 * (b - a) for a, b in zip(firsts["offline"], firsts["streamed"])]
    first = [{"how": way, "ms": 1e3 * median(each)} for way, each in firsts.items()]
    columns = (Column("how", "way"), Column("ms", "first token, ms", fixed(2)))
    report.tables.append(Table(f"a prompt of {SHORT_PROMPT} tokens alone; medians of {len(added)}", columns, first))
    report.goals += [
        Goal("streamed throughput over offline", rates["streamed"] / rates["offline"], OFFLINE_SHARE, at_least=True),
        Goal("ms that HTTP adds to the first token (median)", median(added), FIRST_TOKEN_MS),
    ]
