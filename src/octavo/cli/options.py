"""Options that several subcommands share, and their way into `EngineConfig` and `SamplingParams`.

An option that was not given stays None here, so that defaults live in one place: the engine's own.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from octavo.config import BLOCK_SIZES
from octavo.errors import ConfigError, SamplingError

UNITS = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40,
}  # fmt: skip

#: Option of the command line -> setting of the engine, where the two differ.
RENAMED = {"engine_debug": "debug", "engine_seed": "seed", "prefix_caching": "enable_prefix_caching"}
ENGINE_SETTINGS = (
    "model", "tokenizer", "dtype", "kv_cache_dtype", "quantization", "device", "block_size", "num_blocks",
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "cpu_kv_bytes",
    "prefix_caching", "allocation", "hybrid_kv", "load_format", "model_impl", "enforce_eager", "attention_backend",
    "preemption", "swap_bytes", "copy_on_write", "record", "speculative", "lora", "max_loras", "max_preemptions",
    "max_queue", "skip_tokenizer_init", "engine_seed", "engine_debug", "overlap", "screen_head",
    "fixed_point",
)  # fmt: skip
SAMPLING_PARAMETERS = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "max_tokens", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "skip_special_tokens",
    "deadline_ms",
)  # fmt: skip
#: What the text must look like: exactly one of them, see `StructuredOutputs`.
SHAPES = ("json_schema", "json_object", "regex", "choice", "grammar")


def byte_count(text: str) -> int:
    """ "512MiB", "4g", "1000000" -> bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes; write 1000000, 512MiB or 4GiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def token_count(text: str) -> int | str:
    """A number, or "rest": everything the context has room for."""
    if text == "rest":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'{text!r}: must be a number of tokens, or "rest"') from None


def token_bias(text: str) -> tuple[int, float]:
    """ "1234=-5" -> (1234, -5.0)."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write TOKEN_ID=BIAS, such as 1234=-5") from None


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The engine's settings as options."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model", "-m", metavar="NAME", help="gemma-3-270m (default), a directory, a .gguf file, a hub id"
    )
    group.add_argument("--tokenizer", metavar="PATH", help="tokenizer from elsewhere than the model")
    group.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"))
    group.add_argument(
        "--kv-cache-dtype", metavar="KIND", help="auto, int8, int4, fp8 (GPU); or two, for keys and values: int8,int4"
    )
    group.add_argument(
        "--quantization",
        metavar="KIND",
        help="of weights: auto (as the file is), int8, int4 (what loses most in int8), int4:128, int4:pure, gguf, "
        "fp8 (GPU)",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda", "npu"))
    group.add_argument(
        "--block-size", type=int, choices=BLOCK_SIZES, metavar="N", help="tokens per block (16; npu: 128)"
    )
    group.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the pool (default: from memory)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output")
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="most sequences per step (64)")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="N", help="most tokens per step (2048)")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="of the device's memory (0.9)")
    group.add_argument("--cpu-kv-bytes", type=byte_count, metavar="BYTES", help="KV pool on a CPU, such as 512MiB")
    group.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, help="reuse computed prefixes (on)")
    group.add_argument("--allocation", choices=("paged", "static"), help="static: the classic baseline")
    group.add_argument(
        "--hybrid-kv", action=argparse.BooleanOptionalAction, help="windowed layers keep only their window (on)"
    )
    group.add_argument("--copy-on-write", action=argparse.BooleanOptionalAction, help="share blocks among samples (on)")
    group.add_argument("--load-format", choices=("auto", "safetensors", "gguf", "dummy"))
    group.add_argument(
        "--model-impl",
        choices=("auto", "octavo", "transformers"),
        help="whose code computes (auto: Octavo's, else the library's)",
    )
    group.add_argument("--attention-backend", choices=("auto", "reference", "native", "triton", "ascend"))
    group.add_argument("--preemption", choices=("auto", "recompute", "swap"))
    group.add_argument("--swap-bytes", type=byte_count, metavar="BYTES", help="host memory for preempted sequences")
    group.add_argument("--max-preemptions", type=int, metavar="N", help="most times a request is pushed out (8)")
    group.add_argument(
        "--speculative", metavar="HOW", help="guess tokens ahead: ngram, ngram:5, draft:PATH:4, or JSON (off)"
    )
    group.add_argument(
        "--lora", action="append", metavar="NAME=DIR", help="load a LoRA adapter under a name (may be repeated)"
    )
    group.add_argument("--max-loras", type=int, metavar="N", help="most adapters in memory (8)")
    group.add_argument("--max-queue", type=int, metavar="N", help="most requests that may wait (no limit)")
    group.add_argument("--engine-seed", type=int, metavar="N", help="repeatable noise for requests without --seed")
    group.add_argument("--skip-tokenizer-init", action="store_true", default=None, help="token ids in and out only")
    group.add_argument("--enforce-eager", action="store_true", default=None, help="no graphs, no compilation")
    group.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        help="plan a step while the one before runs (auto: on a GPU, without speculation)",
    )
    group.add_argument(
        "--screen-head",
        action=argparse.BooleanOptionalAction,
        help="greedy tokens by a small copy of the output head first (auto: on a CPU, a large head)",
    )
    group.add_argument(
        "--fixed-point",
        action=argparse.BooleanOptionalAction,
        help="bfloat16 matrices as integers of 14 bits (auto: on a CPU with AVX2, where that is faster)",
    )
    group.add_argument("--record", metavar="FILE", help="write every decision to FILE, for `octavo replay`")
    group.add_argument(
        "--debug", dest="engine_debug", action="store_true", default=None, help="audit the pool after every step"
    )


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """What a request may ask for."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--n", type=int, metavar="N", help="samples for each prompt (1)")
    group.add_argument("--best-of", type=int, metavar="N", help="draw so many, keep the n most likely")
    group.add_argument("--max-tokens", type=token_count, metavar="N", help='most tokens (128), or "rest"')
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before so many tokens")
    group.add_argument("--temperature", "-t", type=float, metavar="T", help="0 is greedy (0.7)")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed, the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text (may be repeated)")
    group.add_argument("--stop-token-id", dest="stop_token_ids", type=int, action="append", metavar="ID")
    group.add_argument(
        "--include-stop",
        dest="include_stop_str_in_output",
        action="store_true",
        default=None,
        help="keep the stop text",
    )
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on after the end token")
    group.add_argument("--logprobs", type=int, metavar="K", help="with --json: the K most likely tokens at each place")
    group.add_argument(
        "--prompt-logprobs", type=int, metavar="K", help="with --json: the K most likely tokens at each prompt place"
    )
    group.add_argument(
        "--logit-bias",
        type=token_bias,
        action="append",
        metavar="ID=BIAS",
        help="add BIAS to a logit (may be repeated)",
    )
    group.add_argument("--allowed-token-id", dest="allowed_token_ids", type=int, action="append", metavar="ID")
    group.add_argument("--bad-word", dest="bad_words", action="append", metavar="TEXT", help="never write this text")
    group.add_argument(
        "--skip-special-tokens", action=argparse.BooleanOptionalAction, help="leave special tokens out of the text (on)"
    )
    group.add_argument("--deadline-ms", type=float, metavar="MS", help="end after so many milliseconds")
    shape = parser.add_argument_group("what the text must look like (needs octavo[structured])")
    shape.add_argument("--json-schema", metavar="FILE", help="JSON that fits this schema: a file, or {…} itself")
    shape.add_argument("--json-object", action="store_true", default=None, help="any JSON object")
    shape.add_argument("--regex", metavar="PATTERN", help="the whole text matches this pattern")
    shape.add_argument("--choice", action="append", metavar="TEXT", help="one of these texts (may be repeated)")
    shape.add_argument("--grammar", metavar="FILE", help="a grammar in llguidance's Lark dialect")


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given, by the names of `EngineConfig`."""
    given = {name: getattr(args, name) for name in ENGINE_SETTINGS if getattr(args, name) is not None}
    if "lora" in given:
        pairs = [text.partition("=")[::2] for text in given["lora"]]
        for text, (name, path) in zip(given["lora"], pairs, strict=True):
            if not name.strip() or not path:
                raise ConfigError(f"--lora {text}: write NAME=DIR, such as --lora poet=adapters/poet")
        if len(dict(pairs)) < len(pairs):
            raise ConfigError("--lora: a name is given twice")
        given["lora"] = dict(pairs)
    return {RENAMED.get(name, name): value for name, value in given.items()}


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given; --stop understands \\n and \\t, which a shell does not pass on."""
    given = {name: getattr(args, name) for name in SAMPLING_PARAMETERS if getattr(args, name) is not None}
    if "stop" in given:
        given["stop"] = [s.replace("\\n", "\n").replace("\\t", "\t") for s in given["stop"]]
    if given.get("max_tokens") == "rest":
        given["max_tokens"] = None
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    if shape := _structured_outputs(args):
        given["structured_outputs"] = shape
    return given


def given_shapes(args: argparse.Namespace) -> dict[str, Any]:
    """The options that say what the text must look like, as given."""
    return {name: value for name in SHAPES if (value := getattr(args, name)) is not None}


def _structured_outputs(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of `StructuredOutputs`."""
    given = given_shapes(args)
    if "json_schema" in given:
        schema = given.pop("json_schema")
        given["json"] = schema if schema.lstrip().startswith("{") else _read("--json-schema", schema)
    if "grammar" in given:
        given["grammar"] = _read("--grammar", given["grammar"])
    return given


def _read(option: str, path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise SamplingError(f"{option} {path}: {error}") from error


def refuse(names: dict[str, Any], because: str) -> None:
    """SamplingError that names the given options which contradict another one."""
    if names:
        options = ", ".join("--" + name.replace("_", "-") for name in names)
        raise SamplingError(f"{options}: no effect {because}; leave it out")
