"""`octavo bench hf-cache`: bytes that transformers' `generate` keeps, in its own caches and in `PagedCache`.

One model, the same seeds, four loads: one answer, samples, beams, prompts of mixed lengths. Bytes are counted in the
tensors (and blocks) that a cache holds after each step; the peak is kept. A made-up model with random weights is the
default: bytes depend on shapes alone. Whether the tokens are the same is checked and printed with them.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.bench.report import (
    Column,
    Report,
    Table,
    add_report_options,
    bar,
    fixed,
    machine_facts,
    mebibytes,
    percent,
    positive,
    publish,
)
from octavo.errors import ConfigError, ModelError

DESCRIPTION = """\
KV bytes at their peak: DynamicCache, StaticCache and Octavo's PagedCache under transformers' generate.

examples:
  octavo bench hf-cache
  octavo bench hf-cache --prompt 512 --output 32 --samples 8 --beams 4
  octavo bench hf-cache --model ./my-checkpoint
"""
COLUMNS = (
    Column("load", "load"),
    Column("dynamic", "dynamic", mebibytes),
    Column("static", "static", mebibytes),
    Column("gathered", "gathered", mebibytes),
    Column("paged", "in place", mebibytes),
    Column("of_dynamic", "/ dynamic", percent),
    Column("of_static", "/ static", percent),
    Column("same", "same tokens", lambda same: "yes" if same else "NO"),
    Column("dynamic_s", "s, dynamic", fixed(2)),
    Column("paged_s", "s, in place", fixed(2)),
)


@dataclass(frozen=True)
class Load:
    """One call of generate. lengths: tokens of each prompt; the shorter ones are padded on the left."""

    name: str
    lengths: tuple[int, ...]
    settings: dict[str, Any]

    @property
    def rows(self) -> int:
        return len(self.lengths) * max(self.settings.get("num_return_sequences", 1), self.settings.get("num_beams", 1))


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "hf-cache",
        help="bytes of transformers' caches against PagedCache",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", metavar="NAME", help="a checkpoint for transformers (default: made up, random)")
    parser.add_argument("--prompt", type=positive, default=512, metavar="N", help="tokens of a prompt (512)")
    parser.add_argument("--output", type=positive, default=32, metavar="N", help="tokens of an answer (32)")
    parser.add_argument("--samples", type=positive, default=8, metavar="N", help="answers to one prompt (8)")
    parser.add_argument("--beams", type=positive, default=4, metavar="N", help="width of the beam search (4)")
    parser.add_argument("--block-size", type=positive, default=16, metavar="N", help="tokens in a block (16)")
    parser.add_argument("--layers", type=positive, default=8, metavar="N", help="of the made-up model (8)")
    add_report_options(parser)


def loads_of(args: argparse.Namespace) -> list[Load]:
    """The four kinds of load."""
    prompt = args.prompt
    mixed = tuple(max(1, prompt * part // 8) for part in range(1, 9))
    return [
        Load("one answer, greedy", (prompt,), {"do_sample": False}),
        Load(f"{args.samples} samples", (prompt,), {"do_sample": True, "num_return_sequences": args.samples}),
        Load(f"{args.beams} beams", (prompt,), {"do_sample": False, "num_beams": args.beams}),
        Load(f"8 prompts of {mixed[0]} to {prompt}", mixed, {"do_sample": False}),
    ]


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    model = _model(args)
    report = Report("hf-cache", machine_facts())
    report.facts["model"] = args.model or f"made up, {args.layers} layers, random weights"
    rows = []
    loads = loads_of(args)
    with bar(len(loads), "hf-cache") as tick:
        for load in loads:
            rows.append(_measure(model, load, args))
            tick(load.name)
    shape = model.config.get_text_config(decoder=True)
    title = (
        f"KV bytes at the peak; prompts of {args.prompt}, answers of {args.output} tokens; "
        f"{shape.num_hidden_layers} layers, {model.dtype}"
    )
    report.tables.append(Table(title, COLUMNS, rows))
    report.notes += [
        "DynamicCache: storage of its tensors after each step (while it grows, a layer is there twice, not counted)",
        f"StaticCache: made for the longest row; PagedCache: blocks of {args.block_size} tokens in use",
        "gathered: PagedCache under any attention of transformers; a layer at a time is copied out and dropped again",
        "in place: PagedCache with attn_implementation='octavo_paged_cache'; padding is not stored",
    ]
    return publish(report, args)


def _model(args: argparse.Namespace) -> Any:
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError("octavo bench hf-cache needs transformers: pip install 'transformers>=5.0'") from error
    if args.model:
        return _checkpoint(args.model)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1024, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=args.prompt + args.output,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _checkpoint(name: str) -> Any:
    """transformers' own model of these files. Raises `ModelError` for names and files that hold none."""
    from transformers import AutoModelForCausalLM

    from octavo.models.resolve import resolve_model

    files = resolve_model(name)
    if files.kind != "directory":
        raise ModelError(
            f"model {name!r}: {files.path} is a GGUF file; give a directory with config.json and safetensors"
        )
    try:
        return AutoModelForCausalLM.from_pretrained(files.path).eval()
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r}: transformers cannot load {files.path}: {error}") from error


def _measure(model: Any, load: Load, args: argparse.Namespace) -> dict[str, Any]:
    """One load in four ways."""
    from transformers import DynamicCache, StaticCache

    from octavo.integrations.transformers import ATTENTION, PagedCache

    longest = max(load.lengths) + args.output
    usual = model.config._attn_implementation

    def paged() -> Any:
        tokens = load.rows * (longest + args.block_size)
        return PagedCache(model.config, max_tokens=tokens, block_size=args.block_size)

    ways: dict[str, tuple[str, Any, Callable[[Any], int]]] = {
        "dynamic": (usual, DynamicCache(config=model.config), held_bytes),
        "static": (usual, StaticCache(config=model.config, max_cache_len=longest), held_bytes),
        "gathered": (usual, paged(), lambda cache: cache.stats().used_bytes),
        "paged": (ATTENTION, paged(), lambda cache: cache.stats().used_bytes),
    }
    row: dict[str, Any] = {"load": load.name}
    answers = {}
    for way, (attention, cache, held) in ways.items():
        model.set_attn_implementation(attention)
        answers[way], row[way], row[f"{way}_s"] = _generate(model, load, args.output, cache, held)
    model.set_attn_implementation(usual)
    row["same"] = all(bool((answer == answers["dynamic"]).all()) for answer in answers.values())
    row["of_dynamic"], row["of_static"] = row["paged"] / row["dynamic"], row["paged"] / row["static"]
    return row


def _generate(model: Any, load: Load, output: int, cache: Any, held: Callable[[Any], int]) -> tuple[Any, int, float]:
    """(tokens, most bytes held after a step, seconds)."""
    import torch

    torch.manual_seed(1)
    longest = max(load.lengths)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.randint(3, vocabulary, (len(load.lengths), longest))
    mask = torch.arange(longest) >= longest - torch.tensor(load.lengths)[:, None]
    peak = 0

    def watch(_: Any, scores: Any) -> Any:
        nonlocal peak
        peak = max(peak, held(cache))
        return scores

    started = time.perf_counter()
    torch.manual_seed(2)
    with warnings.catch_warnings():  # later releases call the argument `cache`; all of them take the old name
        warnings.filterwarnings("ignore", message=".*past_key_values.*")
        tokens = model.generate(
            ids, attention_mask=mask.long(), past_key_values=cache, max_new_tokens=output, min_new_tokens=output,
            eos_token_id=None, pad_token_id=0, logits_processor=[watch], **load.settings,
        )  # fmt: skip
    return tokens, max(peak, held(cache)), time.perf_counter() - started


def held_bytes(cache: Any) -> int:
    """Bytes of all storages that the layers' keys and values keep alive, each once."""
    storages = {}
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            if tensor is not None:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
