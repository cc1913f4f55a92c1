"""`octavo bench quantization`: what formats of the KV cache cost in quality and bring in room and speed.

(What formats of the weights cost is the part in `weight_quality.py`.)

Quality: the model reads a text once per format; perplexity, and its next-token distributions against those over a
float32 cache. Room: sequences that fit the same bytes, counted from layouts. Speed: the decode attention kernel over
long contexts, see `kv_speed.py`. Nothing is drawn, so quality and room are the same at each run.
"""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.clock import add_clock_options, settle_clock
from octavo.bench.kv_formats import FORMATS, Format, bits_per_number
from octavo.bench.kv_speed import add_speed
from octavo.bench.report import (
    Column,
    Goal,
    Report,
    Table,
    add_report_options,
    bar,
    fixed,
    machine_facts,
    percent,
    positive,
    publish,
)
from octavo.bench.report import times as ratio
from octavo.bench.weight_quality import add_weights, weights_text
from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.kv_format import GROUP
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec

DESCRIPTION = """\
Quality, room and speed of KV cache formats; quality of weight formats.

examples:
  octavo bench quantization
  octavo bench quantization --only attention --threads 1 --cpu-time     on a busy machine
  octavo bench quantization --only quality --text book.txt --tokens 4000
  octavo bench quantization --weights               perplexity of float32, bfloat16, int8, int4, …
"""
PARTS = ("quality", "room", "attention", "weights")
POOL_BYTES = 1 << 30
LENGTHS = (512, 2048, 8192)
GOAL_ROOM, GOAL_COSINE = 1.9, 0.999


QUALITY = (
    Column("format", "keys, values"),
    Column("bits", "bits per number", fixed(2)),
    Column("perplexity", "perplexity", fixed(3)),
    Column("change", "against float32", lambda x: f"{100 * x:+.2f} %"),
    Column("mean_cosine", "logit cosine, mean", fixed(5)),
    Column("worst_cosine", "worst", fixed(4)),
    Column("divergence", "KL, nats", fixed(4)),
    Column("agreement", "same first token", percent),
)
ROOM = (
    Column("format", "keys, values"),
    Column("token", "bytes per token", fixed(0)),
    Column("block", "bytes per block", fixed(0)),
    *(Column(f"fits_{n}", f"sequences of {n:,}", fixed(0)) for n in LENGTHS),
    Column("ratio", "of bfloat16", ratio),
)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantization",
        help="formats of KV cache and weights: quality, room, speed",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", "-m", default="gemma-3-270m", metavar="NAME", help="whose quality and room")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part (may be repeated)")
    parser.add_argument("--weights", action="store_true", help="the same as --only weights")
    parser.add_argument("--text", metavar="FILE", help="text to read (default: some pages that ship with Octavo)")
    parser.add_argument("--tokens", type=positive, metavar="N", help="of the text (2000; weights: all of it)")
    parser.add_argument(
        "--layers", type=positive, metavar="N",
        help="attention: layers in rotation (default: as many as keep the smallest format's keys and values out of a "
        "last-level cache of 32 MiB; 1: the same layer again and again, from the caches if it fits them)",
    )  # fmt: skip
    add_clock_options(parser, seconds=0.5)
    add_report_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    import torch

    from octavo.kernels import cpu
    from octavo.models.load import read_spec

    if args.weights and args.only:
        raise ConfigError("--weights is --only weights; give one of them")
    clock = settle_clock(args)
    parts = ["weights"] if args.weights else args.only or PARTS
    spec = read_spec(args.model)
    formats = [f for f in FORMATS if "int4" not in f.kv_dtype or spec.head_dim % GROUP == 0]
    report = Report("quantization", {**machine_facts(), "model": args.model})
    if "quality" in parts:
        _quality(report, args, formats)
    if "room" in parts:
        _room(report, spec, formats)
    if "attention" in parts:
        if cpu.why_unavailable():
            raise ConfigError(cpu.why_unavailable())
        add_speed(report, args.seconds, clock, args.layers)
        what = "processor" if args.cpu_time else "wall"
        report.notes.append(
            f"attention: {torch.get_num_threads()} threads, {cpu.instruction_set()} kernels, shuffled blocks of 16, "
            f"{what} time, best of {args.seconds:g} s each, taking turns; ratios: median over the turns; layers "
            f"are read in rotation{'' if args.layers else ', so that keys and values come from memory'}"
        )
    if "weights" in parts:
        text = weights_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
        add_weights(report, args.model, text, args.tokens)
    del report.facts["model"]  # a header with it would promise an engine's facts too
    return publish(report, args)


def default_text() -> str:
    """A few pages of prose about the engine."""
    return resources.files("octavo.bench").joinpath("prose.txt").read_text(encoding="utf-8")


# -- quality -------------------------------------------------------------------------------------------------------


def _quality(report: Report, args: argparse.Namespace, formats: list[Format]) -> None:
    import torch

    from octavo.bench.quality import Candidate, compare
    from octavo.config import make_config
    from octavo.kernels import cpu
    from octavo.models.load import load_model

    text = default_text() if args.text is None else Path(args.text).read_text(encoding="utf-8")
    ops = cpu.make_ops(torch.float32)
    model = load_model(make_config(model=args.model), dtype=torch.float32, device="cpu", ops=ops)
    assert model.tokenizer is not None
    ids = list(model.tokenizer.encode(text))[: (args.tokens or 2000) + 1]
    if len(ids) < 2:
        raise ConfigError(f"--text {args.text}: at least two tokens are needed")
    candidates = {
        f.name: Candidate(model.decoder, model.spec, len(ids), kv_dtype=f.kv_dtype, dtype=getattr(torch, f.dtype))
        for f in formats
    }
    chunk = 128
    with bar(len(formats) * -(-(len(ids) - 1) // chunk), "quality") as tick:
        found = compare(candidates, ids, chunk=chunk, tick=tick)
    base = found["float32"].perplexity
    rows = [
        {
            "format": f.name,
            "bits": bits_per_number(f, model.spec),
            "perplexity": q.perplexity,
            "change": q.perplexity / base - 1,
            "mean_cosine": q.mean_cosine,
            "worst_cosine": q.worst_cosine,
            "divergence": q.divergence,
            "agreement": q.agreement,
        }
        for f, q in ((f, found[f.name]) for f in formats)
    ]
    report.tables.append(Table(f"quality: {args.model} in float32 over {len(ids) - 1} tokens", QUALITY, rows))
    report.goals.append(Goal("int8 logit cosine, mean", found["int8"].mean_cosine, GOAL_COSINE, at_least=True))
    report.notes.append("quality: logits at every position against those over a float32 cache of the same run")


# -- room ----------------------------------------------------------------------------------------------------------


def _room(report: Report, spec: ModelSpec, formats: list[Format]) -> None:
    rows: list[dict[str, Any]] = []
    for fmt in formats:
        layout = fmt.layout(spec)
        blocks = POOL_BYTES // layout.bytes_per_block
        counter = PagedAllocation(BlockPool(1), layout)
        fits = {f"fits_{n}": blocks // counter.worst_case(n - 1, n, 1) for n in LENGTHS}
        token = spec.num_layers * layout.bytes_per_token_layer
        rows.append({"format": fmt.name, "token": token, "block": layout.bytes_per_block, **fits})
    plain = next(r["block"] for r in rows if r["format"] == "bfloat16")
    for row in rows:
        row["ratio"] = plain / row["block"]
    report.tables.append(Table("room: sequences in 1 GiB of blocks", ROOM, rows))
    int8 = next(r["ratio"] for r in rows if r["format"] == "int8")
    report.goals.append(Goal("int8 sequences in the same bytes, of bfloat16's", int8, GOAL_ROOM, at_least=True))
