"""`octavo plan MODEL --memory 80GiB`: what a model will need and carry, before anything is loaded."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.options import byte_count
from octavo.config import BLOCK_SIZES, DEFAULT_BLOCK_SIZE, EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.planning.shapes import ModelShape

DEFAULT_LENGTHS = "uniform:256-2048"
DRAWN = 1024
EPILOG = """\
examples:
  octavo plan llama-2-7b --memory 80GiB
  octavo plan path/to/config-directory --memory 24GiB --lengths uniform:32-512+32-256
  octavo plan gemma-3-270m --device cpu --memory 4GiB --trace AzureLLMInferenceTrace_conv.csv

lengths: fixed:512+128, uniform:256-2048 (in all), uniform:32-512+32-256 (prompt + output), lognormal:1000+200
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="memory, block size and concurrency of a model, before loading it",
        description="Weights, activations and KV bytes of a model; how many sequences fit, static against paged; "
        "settings for this load, and the single change that buys most. MODEL is a known name (llama-2-7b, …), "
        "a directory with config.json (weights are not needed), a .gguf file or a hub id.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default="gemma-3-270m", metavar="MODEL")
    parser.add_argument("--memory", type=byte_count, metavar="BYTES", help="of the device: 80GiB (CPU: this one's)")
    parser.add_argument("--device", choices=("cuda", "npu", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16; CPU: float32")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="KIND", help="as --dtype (auto), int8, int4, fp8")
    parser.add_argument("--quantization", metavar="KIND", help="of weights: as the files are (default), int8, int4, …")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--trace", metavar="FILE", help="lengths of the requests of a trace (CSV or JSONL)")
    load.add_argument("--lengths", metavar="TEXT", help=f"lengths from a distribution ({DEFAULT_LENGTHS})")
    settings = parser.add_argument_group("settings to plan with (the engine's defaults)")
    settings.add_argument("--block-size", type=int, choices=BLOCK_SIZES, metavar="N", help="16; npu: 128")
    settings.add_argument("--max-model-len", type=int, metavar="N", help="default: the model's own")
    settings.add_argument("--max-num-seqs", type=int, default=64, metavar="N")
    settings.add_argument("--max-num-batched-tokens", type=int, default=2048, metavar="N")
    settings.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="SHARE")
    settings.add_argument("--hybrid-kv", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read sizes and lengths, plan, print."""
    from octavo.planning.plan import Ask, make_plan
    from octavo.planning.plan_text import plan_as_json, plan_lines

    for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.quantization == "gguf" and args.device != "cpu":
        raise ConfigError(
            f"--quantization gguf: only the CPU computes from the blocks of a GGUF file, and this plan is for --device "
            f"{args.device}{' (the default)' if args.device == 'cuda' else ''}; add --device cpu, or plan int8 or int4"
        )
    memory = _memory(args)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    sizes = read_model_sizes(args.model, dtype, args.quantization, args.device)
    lengths, described = _lengths(args)
    plan = make_plan(
        Ask(
            shape=sizes.shape,
            weight_bytes=sizes.weight_bytes,
            quantization=args.quantization,
            quantized_bytes=sizes.quantized_bytes,
            weights_follow_dtype=args.quantization in (None, "auto") and sizes.stored is None,
            memory=memory,
            lengths=lengths,
            device=args.device,
            dtype=dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            utilization=args.gpu_memory_utilization,
            block_size=args.block_size or (128 if args.device == "npu" else DEFAULT_BLOCK_SIZE),
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            hybrid_kv=args.hybrid_kv,
        )
    )
    if args.json:
        print(json.dumps(plan_as_json(plan, args.model)))
    else:
        print("\n".join(plan_lines(plan, args.model, described, by_name=not _can_be_loaded(args.model))))
    return 0


def _can_be_loaded(model: str) -> bool:
    """Is it more than the name of a known shape: files, a hub id, or the model that comes with a package?"""
    return "/" in model or model == EngineConfig.model or Path(model).exists()


#: What a plan proposes for weights.
PROPOSED = ("int8", "int4")


@dataclass(frozen=True)
class ModelSizes:
    """A model for a plan. quantized_bytes: of its weights in each proposed format; empty where they have one already.

    stored: how its files store them quantised, in words.
    """

    shape: ModelShape
    weight_bytes: int
    quantized_bytes: Mapping[str, int]
    stored: str | None = None


def model_sizes(model: str, dtype: str) -> tuple[ModelShape, int]:
    """(shape, bytes of the weights): of files where there are any, else of a model known by name."""
    sizes = read_model_sizes(model, dtype)
    return sizes.shape, sizes.weight_bytes


def read_model_sizes(model: str, dtype: str, quantization: str | None = None, device: str = "cpu") -> ModelSizes:
    """Shape and bytes of the weights, of files where there are any, else of a model known by name."""
    from octavo.core.weight_format import check_weight_format, parse_weight_format
    from octavo.planning.shapes import KNOWN, ModelShape, dtype_bytes, known_shape

    form = check_weight_format(quantization, device)
    proposed = PROPOSED if form is None else ()
    known = known_shape(model)
    if known is not None and not Path(model).exists() and (form is None or form.kind != "gguf"):
        found = {kind: known.weight_bytes(dtype, kind) for kind in proposed}
        return ModelSizes(known, known.weight_bytes(dtype, quantization), found)
    from octavo.errors import ModelError
    from octavo.models.load import read_sizes

    path = Path(model).expanduser()
    bare = path.is_dir() and (path / "config.json").is_file() and not any(path.glob("*.safetensors"))
    try:
        sizes = read_sizes(model, "dummy" if bare else "auto")
    except ModelError as error:
        raise ModelError(f"{error}; known to plan with, without any files: {', '.join(KNOWN)}") from error
    size = dtype_bytes(dtype)
    if sizes.kind is not None or not sizes.quantizable:
        proposed = ()
    found = {kind: sizes.weight_bytes(size, parse_weight_format(kind)) for kind in proposed}
    return ModelSizes(ModelShape.of(sizes.spec, model), sizes.weight_bytes(size, form), found, sizes.kind)


def _memory(args: argparse.Namespace) -> int:
    if args.memory is not None:
        return int(args.memory)
    if args.device != "cpu":
        device = "GPU" if args.device == "cuda" else "NPU"
        raise ConfigError(f"--memory is missing: how much has the {device}? (such as --memory 80GiB)")
    import os

    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _lengths(args: argparse.Namespace) -> tuple[list[tuple[int, int]], str]:
    """Lengths, and the words for them."""
    from octavo.planning.trace import read_trace
    from octavo.planning.trace_synthetic import synthetic

    if args.trace is not None:
        trace = read_trace(args.trace)
        text = f"{len(trace)} requests of {args.trace}"
        if any(r.runs for r in trace.requests):
            text += " (what their prompts share is not counted; `octavo simulate` does)"
    else:
        trace = synthetic(DRAWN, args.lengths or DEFAULT_LENGTHS)
        text = args.lengths or f"{DEFAULT_LENGTHS} tokens (assumed; --trace or --lengths say yours)"
    return [(r.prompt_tokens, max(1, r.output_tokens)) for r in trace.requests], text
