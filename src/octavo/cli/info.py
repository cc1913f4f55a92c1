"""`octavo info MODEL`: what a model is and what it will cost, from its headers alone (no weights are read)."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from octavo.config import BLOCK_SIZES
from octavo.core.kv_format import check_kv_dtype, kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.weight_format import parse_weight_format
from octavo.inspect.terminal import format_bytes

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec
    from octavo.models.weight_size import StoredSizes

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
IMPLEMENTATIONS = {
    "octavo": "Octavo's own decoder",
    "transformers": "transformers (its code around Octavo's paged attention), slower than the own decoder",
}
LENGTHS = (256, 1024, 4096, 16384, 65536)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="what a model is: shapes, bytes of weights, KV bytes per token and block",
        epilog="example:\n  octavo info gemma-3-270m --dtype bfloat16 --block-size 32",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", default="gemma-3-270m", metavar="MODEL")
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES), default="bfloat16", help="of weights and KV (bfloat16)")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", metavar="KIND", help="auto (as --dtype), int8, int4, or two: int8,int4"
    )
    parser.add_argument(
        "--quantization",
        metavar="KIND",
        help="bytes of the weights in one more format: int8, int4:128, int4:pure, gguf, …",
    )
    parser.add_argument("--block-size", type=int, choices=BLOCK_SIZES, default=16, metavar="N")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "gguf", "dummy"), default="auto")
    parser.add_argument("--model-impl", choices=("auto", "octavo", "transformers"), default="auto")
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the spec and print the tables."""
    from octavo.models.load import read_sizes

    sizes = read_sizes(args.model, args.load_format, args.model_impl)
    spec = sizes.spec
    check_kv_dtype(args.kv_cache_dtype, "any", spec.head_dim)
    facts = describe(spec, args.dtype, args.block_size, args.kv_cache_dtype)
    facts["weight_bytes"] |= quantized_weight_bytes(sizes, args.dtype, args.quantization)
    facts["stored"] = sizes.kind
    if args.json:
        print(json.dumps({"model": args.model, **facts}))
        return 0
    for title, rows in tables(args.model, spec, facts):
        print(title)
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            print(f"  {name:<{width}}  {value}")
    return 0


def num_parameters(spec: ModelSpec) -> int:
    """Weights of the model; a tied head counts once."""
    if "num_parameters" in spec.extra:  # counted by transformers, whose layers need not be of the shape below
        return int(spec.extra["num_parameters"])
    from octavo.models import names

    return names.num_parameters(spec)


def active_parameters(spec: ModelSpec) -> int:
    """Weights that one token is multiplied with: of experts, those that it goes to."""
    from octavo.models import names

    return num_parameters(spec) if spec.experts is None else names.active_parameters(spec)


def quantized_weight_bytes(sizes: StoredSizes, dtype: str, asked: str | None = None) -> dict[str, int]:
    """format -> bytes of the weights, with what stays a float in `dtype`. asked: one more format, or a ConfigError.

    A quantised checkpoint has its own format, and others only apply to what it leaves as floats.
    """
    size = DTYPE_BYTES[dtype]
    kinds = ["int8", "int4"] if sizes.kind is None and sizes.quantizable else []
    kinds += ["gguf"] if sizes.gguf else []
    form = parse_weight_format(asked)
    if form is not None and str(form) not in kinds:
        kinds.append(str(form))
    own = {} if sizes.kind is None else {"as stored": sizes.weight_bytes(size)}
    return own | {kind: sizes.weight_bytes(size, parse_weight_format(kind)) for kind in kinds}


def layout_of(spec: ModelSpec, dtype: str, block_size: int, kv_dtype: str = "auto", *, hybrid: bool = True) -> KVLayout:
    """How the model's layers share a pool."""
    size = kv_bytes_per_token_layer(
        kv_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=DTYPE_BYTES[dtype]
    )
    return build_layout(
        spec.windows, block_size=block_size, bytes_per_token_layer=size, hybrid=hybrid, kv_dtype=kv_dtype
    )


def sequence_bytes(layout: KVLayout, length: int) -> int:
    """Bytes of the blocks that one sequence of `length` tokens holds while its next token is computed."""
    blocks = 0
    for group in layout.groups:
        first = group.first_needed(max(0, length - 1)) // layout.block_size
        blocks += layout.blocks_for(length) - first
    return blocks * layout.bytes_per_block


def describe(spec: ModelSpec, dtype: str, block_size: int, kv_dtype: str = "auto") -> dict[str, Any]:
    """Everything `octavo info` says, as plain values; bytes are whole numbers."""
    layout = layout_of(spec, dtype, block_size, kv_dtype)
    whole = layout_of(spec, dtype, block_size, kv_dtype, hybrid=False)
    lengths = sorted({n for n in LENGTHS if n <= spec.max_position_embeddings} | {spec.max_position_embeddings})
    parameters = num_parameters(spec)
    return {
        "architecture": spec.architecture,
        "model_impl": spec.extra.get("model_impl", "octavo"),
        "num_parameters": parameters,
        "active_parameters": active_parameters(spec),
        "weight_bytes": {name: parameters * size for name, size in DTYPE_BYTES.items()},
        "dtype": dtype,
        "kv_cache_dtype": kv_dtype,
        "block_size": block_size,
        "kv_bytes_per_token": spec.num_layers * layout.bytes_per_token_layer,
        "bytes_per_block": layout.bytes_per_block,
        "groups": [{"layers": list(g.layers), "window": g.window} for g in layout.groups],
        "sequence_bytes": {
            str(n): {"paged": sequence_bytes(layout, n), "all_layers": sequence_bytes(whole, n)} for n in lengths
        },
    }


def tables(model: str, spec: ModelSpec, facts: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """(title, rows of name and value) for people."""
    windows = sorted({w for w in spec.windows if w is not None})
    windowed = sum(w is not None for w in spec.windows)
    attention = f"{spec.num_heads} query heads, {spec.num_kv_heads} key/value heads of {spec.head_dim}"
    shape = [
        ("architecture", spec.architecture),
        ("runs through", IMPLEMENTATIONS[spec.extra.get("model_impl", "octavo")]),
        ("layers", f"{spec.num_layers}" + (f" ({windowed} with a window of {windows[0]})" if windows else "")),
        ("hidden / mlp", f"{spec.hidden_size} / {spec.intermediate_size}" + ("" if spec.gated_mlp else ", no gate")),
        *_experts(spec),
        ("attention", attention + (", normed" if spec.qk_norm else "")),
        ("vocabulary", f"{spec.vocab_size}" + (", head tied to the embedding" if spec.tied_head else "")),
        ("positions", str(spec.max_position_embeddings) + (", learned" if spec.learned_positions else "")),
        *_rotary(spec),
    ]
    shape = [row for row in shape if row[1]]
    weights = [("parameters", f"{facts['num_parameters'] / 1e6:.1f} million")]
    if facts["active_parameters"] != facts["num_parameters"]:
        weights[0] = ("parameters", f"{weights[0][1]}, {facts['active_parameters'] / 1e6:.1f} million for a token")
    weights += [(name, format_bytes(size)) for name, size in facts["weight_bytes"].items()]
    if facts.get("stored"):
        weights.append(("stored", facts["stored"]))
    cache = [
        ("per token, all layers", format_bytes(facts["kv_bytes_per_token"])),
        ("per block", f"{format_bytes(facts['bytes_per_block'])} ({facts['block_size']} tokens of one group)"),
    ]
    cache += [(f"group {i}", _group(group)) for i, group in enumerate(facts["groups"])]
    sizes = [(f"{n} tokens", _sequence(size)) for n, size in facts["sequence_bytes"].items()]
    return [
        (model, shape),
        ("weights in memory", weights),
        (f"KV cache, {facts['dtype' if facts['kv_cache_dtype'] == 'auto' else 'kv_cache_dtype']}", cache),
        ("KV of one sequence", sizes),
    ]


def _experts(spec: ModelSpec) -> list[tuple[str, str]]:
    experts = spec.experts
    if experts is None:
        return []
    where = "every layer" if len(experts.layers) == spec.num_layers else f"{len(experts.layers)} layers"
    shared = f", and one of {experts.shared_intermediate_size} for all" if experts.shared_intermediate_size else ""
    return [("experts", f"{experts.per_token} of {experts.count} in {where}, of {experts.intermediate_size}{shared}")]


def _rotary(spec: ModelSpec) -> list[tuple[str, str]]:
    if not spec.rotaries:
        return []
    kinds = []
    for rotary in spec.rotaries:
        part = "" if rotary.dim is None else f", {rotary.dim} of {spec.head_dim} numbers of a head"
        kinds.append(f"{rotary.kind}, base {rotary.base:g}{part}")
    without = sum(index is None for index in spec.rotary)
    return [("rotary", "; ".join(kinds) + (f"; {without} layers without" if without else ""))]


def _group(group: dict[str, Any]) -> str:
    layers = group["layers"]
    text = ", ".join(map(str, layers)) if len(layers) <= 8 else f"{layers[0]}-{layers[-1]}"
    window = "full attention" if group["window"] is None else f"window {group['window']}"
    return f"{window}, layer{'s' * (len(layers) > 1)} {text}"


def _sequence(size: dict[str, int]) -> str:
    text = format_bytes(size["paged"])
    if size["paged"] < size["all_layers"]:
        text += f" ({size['paged'] / size['all_layers']:.0%} of {format_bytes(size['all_layers'])} without windows)"
    return text
