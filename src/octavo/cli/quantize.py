"""`octavo quantize MODEL OUT`: a copy of a model with quantised weights, which loads as fast as it is small."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.cli.options import byte_count
from octavo.core.weight_format import parse_weight_format
from octavo.errors import ConfigError
from octavo.inspect.terminal import format_bytes

EPILOG = """\
examples:
  octavo quantize path/to/model path/to/model-int8 --quantization int8
  octavo quantize Qwen/Qwen3-0.6B qwen3-int4 --quantization int4:128 --keep-embeddings

The copy is in the compressed-tensors format (pack-quantized). Octavo loads it as it is, with the very numbers that
--quantization makes at load. Other engines read it too if the embedding and the output head stay as they are:
--keep-embeddings; those that fuse q, k and v want one format for the three: int8, int4:pure.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "quantize",
        help="write a copy of a model with int8 or int4 weights",
        description="Quantise the weights of a directory of safetensors, a GGUF file, or a hub id, and write them with "
        "the tokenizer and the settings to the new directory OUT.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a directory with config.json, a GGUF file, or a hub id")
    parser.add_argument("out", metavar="OUT", help="the new directory; it must not exist yet")
    parser.add_argument(
        "--quantization",
        "-q",
        required=True,
        metavar="KIND",
        help="int8, int4 (groups of 32; what loses most by 4 bits in 8), int4:GROUP (64, 128, 256), "
        "int4:pure or int4:GROUP:pure (nothing in 8 bits)",
    )
    parser.add_argument(
        "--keep-embeddings", action="store_true", help="leave embedding and output head as they are (for other engines)"
    )
    parser.add_argument(
        "--shard-bytes", type=byte_count, metavar="BYTES", help="largest file (4GiB); more than one get an index"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Quantise, write, and say what came of it."""
    from octavo.models.quantized_files.writer import SHARD_BYTES, quantize_checkpoint
    from octavo.models.resolve import resolve_model
    from octavo.progress import LoadProgress

    form = parse_weight_format(args.quantization)
    if form is None:
        raise ConfigError(f"--quantization {args.quantization}: say int8, int4, int4:GROUP, or either with :pure")
    if args.shard_bytes == 0:
        raise ConfigError("--shard-bytes 0: must be at least 1")
    if Path(args.out).exists():
        raise ConfigError(f"{args.out}: exists already; name a directory that does not")
    files = resolve_model(args.model)
    progress = LoadProgress()
    try:
        written = quantize_checkpoint(
            files.path,
            Path(args.out),
            form,
            keep_embeddings=args.keep_embeddings,
            shard_bytes=args.shard_bytes or SHARD_BYTES,
            on_progress=lambda done, total: progress("quantise", done, total),
        )
    finally:
        progress.close()
    parts = f" in {written.shards} files" if written.shards > 1 else ""
    print(
        f"{written.path}: {form}, {written.quantised} weights quantised, {format_bytes(written.after)}{parts} "
        f"(before: {format_bytes(written.before)})"
    )
    return 0
