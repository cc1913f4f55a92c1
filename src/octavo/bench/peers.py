"""`octavo bench peers`: the same loads on Octavo and on the engines that are installed beside it, in one run.

Each engine runs alone, in a process of its own, with the same threads, dtype and token-id prompts; generation ignores
the end of text, so all do the same work. Nothing is installed: what is not there is named, with how to get it. Machines
are noisy, so what to keep of a run are the ratios, and on a machine shared with others those of several rounds: each
engine then meets quick minutes and slow ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.bench import peer_engines
from octavo.bench.limits import measure_limits
from octavo.bench.peer_engines import HOW_TO_GET, Peer, PeerError, Request, Running
from octavo.bench.report import Column, Goal, Report, Table, add_report_options, bar, machine_facts, positive, publish
from octavo.bench.workloads import mixed_lengths, random_ids
from octavo.core.weight_format import check_weight_format
from octavo.errors import ConfigError

DESCRIPTION = """\
Octavo and other engines side by side, the same loads in one run. Nothing is installed; what is missing is named.

rows
  a  one sequence: ms per token, 128 tokens after a prompt of 128
  b  a prompt of 1,024 tokens to its first token, ms
  c  64 requests at once, prompts of 32 to 512 tokens, outputs of 32 to 256: output tokens per second
  d  a prompt of 512 tokens, 64 sampled tokens: seconds for one sample, and for 8
  e  32 requests that share 1,024 tokens and have 32 of their own, 32 tokens out: seconds, prefix caching on and off
  f  process start to the first token of a 16-token prompt, s; peak memory
  g  64 requests of the same length, 128 in and 64 out: tokens per second while all decode, prompts not counted
     (llama.cpp: by llama-batched-bench, without server or sampling, where it lies beside llama-server)

Engines run the files they are given. To compare quantised weights, give each engine its own and Octavo --quantization.

examples:
  octavo bench peers --hf-model DIR --transformers-python .venv/bin/python
  octavo bench peers --rows ab --llama-server build/bin/llama-server --llama-model model-bf16.gguf
  octavo bench peers --rows ag --model q8_0.gguf --quantization gguf --llama-model q8_0.gguf --llama-server PATH
environment, where an option is not given:
  OCTAVO_PEERS_HF_MODEL, _TRANSFORMERS_PYTHON, _VLLM_PYTHON, _OPENVINO_PYTHON, _OPENVINO_MODEL, _LLAMA_SERVER,
  _LLAMA_MODEL
"""
ROWS = "abcdefg"
MAX_LEN = 2048
OPTIONS = {
    "hf_model": "directory of safetensors, for transformers and vLLM",
    "transformers_python": "interpreter that has transformers",
    "vllm_python": "interpreter that has vLLM",
    "openvino_python": "interpreter that has openvino-genai",
    "openvino_model": "directory exported for OpenVINO",
    "llama_server": "llama.cpp's llama-server",
    "llama_model": "GGUF file for it",
}
#: row -> (what is better: lower or higher, goal as a ratio to the best peer)
GOALS = {
    "a": ("lower", 0.6),
    "b": ("lower", 0.67),
    "c": ("higher", 2.4),
    "d8": ("lower", 0.6),
    "e_on": ("lower", 0.5),
    "f": ("lower", 1.3),
    "g": ("higher", 1.0),
}
TITLES = {
    "a": "a: ms/token",
    "b": "b: first token, ms",
    "c": "c: output tok/s",
    "d1": "d: n=1, s",
    "d8": "d: n=8, s",
    "e_on": "e: cache on, s",
    "e_off": "e: off, s",
    "f": "f: start, s",
    "memory": "f: peak MiB",
    "g": "g: decode tok/s",
}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "peers",
        help="the same loads on other engines, side by side",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="gemma-3-270m", metavar="NAME", help="what Octavo runs (gemma-3-270m)")
    parser.add_argument(
        "--quantization", metavar="KIND", help="Octavo's weights: int8, int4, gguf … (none: as --dtype says)"
    )
    for name, text in OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar="PATH", help=text)
    parser.add_argument("--rows", default=ROWS, metavar="LETTERS", help=f"which rows ({ROWS})")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "float16"], help="(bfloat16)")
    parser.add_argument("--threads", type=positive, default=os.cpu_count() or 1, metavar="N", help="per engine (all)")
    parser.add_argument("--repeat", type=positive, default=3, metavar="N", help="times each is measured (3)")
    parser.add_argument(
        "--rounds", type=positive, default=1, metavar="N",
        help="start the engines in turn N times and take the median of the rounds' ratios (1)",
    )  # fmt: skip
    parser.add_argument(
        "--shrink", type=positive, default=1, metavar="N", help="divide lengths and counts by N, to try it out (1)"
    )
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    wrong = set(args.rows) - set(ROWS)
    if wrong or not args.rows:
        raise ConfigError(f"--rows {args.rows!r}: letters out of {ROWS}")
    check_weight_format(args.quantization, "cpu")
    given = {name: peer_engines.setting(getattr(args, name), f"OCTAVO_PEERS_{name.upper()}") for name in OPTIONS}
    peers = peer_engines.find_peers(model=args.model, quantization=args.quantization, **given)
    loads = Loads(_vocabulary(args.model), args.shrink)
    about = {"dtype": args.dtype, "quantization": args.quantization or "none", "peer_threads": args.threads}
    report = Report("peers", {**machine_facts(), **about})
    rounds: list[list[dict[str, Any]]] = []
    with bar(len(peers) * args.rounds, "peers") as tick:
        for number in range(args.rounds):
            found = {}
            for peer in list(peers.values())[:: -1 if number % 2 else 1]:  # there and back, against a drift
                rate = _reading(args.threads)
                found[peer.kind] = measure(peer, args, loads, report.notes)
                found[peer.kind] |= {} if rate is None else {"reading": rate}
                tick(peer.kind)
            rounds.append([found[peer.kind] for peer in peers.values()])
    rows = [typical_of(of_peer) for of_peer in zip(*rounds, strict=True)]
    columns = [Column("engine", "engine"), *(Column(key, TITLES[key], _number) for key in _keys(args.rows))]
    if any("reading" in row for row in rows):
        columns.append(Column("reading", "memory read before it, GB/s", _number))
    weights = f", Octavo's weights {args.quantization}" if args.quantization else ""
    turns = f", medians of {args.rounds} rounds" if args.rounds > 1 else ""
    report.tables.append(Table(f"{args.dtype}{weights}, {args.threads} threads{turns}", columns, rows))
    if args.shrink == 1:
        report.goals += goals(rounds)
        report.notes += _ratios_in_words(rounds)
    report.notes += [f"{kind} was not run; to have it: {how}" for kind, how in HOW_TO_GET.items() if kind not in peers]
    return publish(report, args)


def _reading(threads: int) -> float | None:
    """GB/s that a plain loop reads just now, which bounds a decode step: it varies with the machine's other guests."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        limits = measure_limits("float32", 0.4)
    finally:
        torch.set_num_threads(before)
    return None if limits is None else limits.reading[1] / 1e9


def _vocabulary(model: str) -> int:
    """Size of the vocabulary prompts are drawn from."""
    from octavo.models.load import read_spec

    return read_spec(model, os.environ.get("OCTAVO_PEERS_LOAD_FORMAT", "auto")).vocab_size


def _keys(rows: str) -> list[str]:
    parts = {"d": ["d1", "d8"], "e": ["e_on", "e_off"], "f": ["f", "memory"]}
    return [key for row in ROWS if row in rows for key in parts.get(row, [row])]


def _number(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,.1f}" if value >= 100 else f"{value:.2f}"


class Loads:
    """The requests of each row. Everything is drawn from seeds, and differs between repetitions."""

    def __init__(self, vocab_size: int, shrink: int) -> None:
        self._vocab_size, self._shrink = vocab_size, shrink

    def _less(self, count: int) -> int:
        return max(1, count // self._shrink)

    def _request(self, prompt: int, output: int, seed: int, samples: int = 1, temperature: float = 0.0) -> Request:
        ids = random_ids(self._less(prompt), seed, self._vocab_size)
        return Request(ids, self._less(output), samples, temperature)

    def warm_up(self) -> list[Request]:
        return [self._request(64, 8, 900 + i) for i in range(8)]

    def one(self, output: int, repetition: int) -> list[Request]:
        """Row a: one sequence. A single token is never less."""
        return [self._request(128, output, 10 * output + repetition)]

    def first(self, prompt: int, repetition: int) -> list[Request]:
        """Rows b and f: a prompt and one token."""
        return [self._request(prompt, 1, 30 + prompt + repetition)]

    def mixed(self, repetition: int) -> list[Request]:
        lengths = mixed_lengths(self._less(64))
        return [self._request(p, o, 10_000 * (repetition + 1) + i) for i, (p, o) in enumerate(lengths)]

    def samples(self, count: int, repetition: int) -> list[Request]:
        return [self._request(512, 64, 500 + 10 * count + repetition, count, 1.0)]

    def together(self, output: int, repetition: int) -> list[Request]:
        """Row g: equal lengths, so that all decode at the same time. A single token is never less."""
        return [self._request(128, output, 200_000 + 1000 * repetition + i) for i in range(self._less(64))]

    def sharing(self, repetition: int) -> list[Request]:
        head = random_ids(self._less(1024), 70 + repetition, self._vocab_size)
        tails = [random_ids(self._less(32), 100_000 + 1000 * repetition + i, self._vocab_size) for i in range(32)]
        return [Request(head + tail, self._less(32)) for tail in tails[: self._less(32)]]


def measure(peer: Peer, args: argparse.Namespace, loads: Loads, notes: list[str]) -> dict[str, Any]:
    """All asked rows on one engine. What it cannot do is "failed", with the reason in the notes."""
    row: dict[str, Any] = {"engine": peer.kind}
    if "f" in args.rows:
        row.update(_guarded(peer, "f", notes, partial(_start_up, peer, args, loads)))
    for prefix, slots, letters in ((False, 1, "ab"), (False, 64, "cdg"), (False, 32, "e"), (True, 32, "e")):
        asked = [letter for letter in letters if letter in args.rows]
        if asked and (peer.shares_prefixes or not prefix):
            act = partial(_rows, peer, args, loads, prefix, slots, asked)
            row.update(_guarded(peer, "".join(asked), notes, act))
    return row


def _guarded(peer: Peer, what: str, notes: list[str], act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return act()
    except PeerError as error:
        notes.append(f"{peer.kind}, {what}: {error}")
        return dict.fromkeys(_keys(what), "failed")


def _start(peer: Peer, args: argparse.Namespace, prefix: bool, slots: int) -> Running:
    return peer_engines.start(
        peer, dtype=args.dtype, threads=args.threads, prefix=prefix, max_len=MAX_LEN // args.shrink, slots=slots
    )


def _start_up(peer: Peer, args: argparse.Namespace, loads: Loads) -> dict[str, Any]:
    seconds, memory = [], []
    for repetition in range(args.repeat):
        begin = time.perf_counter()
        engine = _start(peer, args, prefix=False, slots=1)
        engine.run(loads.first(16, repetition))
        seconds.append(time.perf_counter() - begin)
        memory.append(engine.stop() / (1 << 20))
    return {"f": statistics.median(seconds), "memory": statistics.median(memory)}


def _rows(
    peer: Peer, args: argparse.Namespace, loads: Loads, prefix: bool, slots: int, letters: Sequence[str]
) -> dict[str, Any]:
    """The rows `letters` on one start of the engine."""
    engine = _start(peer, args, prefix, slots)
    found: dict[str, Any] = {"version": engine.version}

    def typical(make: Callable[[int], list[Request]]) -> float:
        return statistics.median(engine.run(make(repetition)) for repetition in range(args.repeat))

    try:
        engine.run(loads.warm_up()[:slots])
        if "a" in letters:
            short, long = typical(lambda k: loads.one(1, k)), typical(lambda k: loads.one(128, k))
            found["a"] = 1000 * (long - short) / max(1, loads.one(128, 0)[0].output - 1)
        if "b" in letters:
            found["b"] = 1000 * typical(lambda k: loads.first(1024, k))
        if "c" in letters:
            found["c"] = sum(r.output for r in loads.mixed(0)) / typical(loads.mixed)
        if "d" in letters:
            found["d1"] = typical(lambda k: loads.samples(1, k))
            found["d8"] = typical(lambda k: loads.samples(8, k))
        if "g" in letters:
            found["g"] = _decode_rate(peer, args, loads, typical)
        if "e" in letters:
            found["e_on" if prefix else "e_off"] = typical(loads.sharing)
    finally:
        engine.stop()
    return found


def _decode_rate(
    peer: Peer, args: argparse.Namespace, loads: Loads, typical: Callable[[Callable[[int], list[Request]]], float]
) -> float:
    """Tokens per second of equal sequences beyond their first token."""
    many = loads.together(64, 0)
    bench = peer_engines.batched_bench(peer)
    if bench is not None:
        return statistics.median(
            bench(args.threads, len(many), len(many[0].ids), many[0].output) for _ in range(args.repeat)
        )
    extra = typical(lambda k: loads.together(64, k)) - typical(lambda k: loads.together(1, k))
    return len(many) * (many[0].output - 1) / extra if extra > 0 else float("nan")


def typical_of(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One engine's row of several rounds: medians of numbers; what failed once has failed."""
    keys = list(dict.fromkeys(key for row in found for key in row))
    return {key: _typical([row[key] for row in found if key in row]) for key in keys}


def _typical(values: list[Any]) -> Any:
    words = [value for value in values if isinstance(value, str)]
    return words[0] if words else statistics.median(values)


def ratios(rounds: Sequence[Sequence[dict[str, Any]]], key: str) -> list[float]:
    """Octavo, the first of each round, to the best peer of that round; rounds in which both have the row."""
    better, _ = GOALS[key]
    found = []
    for own, *others in rounds:
        peers = [row[key] for row in others if isinstance(row.get(key), float)]
        if peers and isinstance(own.get(key), float):
            found.append(own[key] / (min(peers) if better == "lower" else max(peers)))
    return found


def goals(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[Goal]:
    """Octavo against the best peer, per row that both have: the median of the rounds' ratios."""
    return [
        Goal(f"{TITLES[key]}, to the best peer's", statistics.median(found), limit, better == "higher")
        for key, (better, limit) in GOALS.items()
        if (found := ratios(rounds, key))
    ]


def _ratios_in_words(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[str]:
    if len(rounds) == 1:
        return []
    found = {key: ratios(rounds, key) for key in GOALS}
    return [
        f"{TITLES[key]}: ratios of the rounds {', '.join(f'{r:.2f}' for r in of)}" for key, of in found.items() if of
    ]
