"""GGUF header -> `ModelSpec`.

What the architectures differ in is in `models/gguf_families.py`. The head is tied when there is no `output.weight`;
biases are there when their tensors are. Keys of the architecture's own namespace that are not known here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.gguf_families import GGUFFamily, Header, family_of_gguf
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_types import TYPE_NAMES, dequantize
from octavo.models.rope_reader import build_rotary
from octavo.models.spec import ModelSpec, RotarySpec

FREQUENCY_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
#: Tensors that belong to the spec.
OF_SPEC = (FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS)
#: Keys that say how the file came about, repeat a tensor's shape, or are read from tensors.
HARMLESS = frozenset(("rope.scaling.finetuned", "tensor_data_layout", "vocab_size", "expert_used_count"))


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The spec of a GGUF file. Raises `ModelError` for an architecture or setting that is not supported."""
    architecture, family = family_of_gguf(file)
    header = Header(file, architecture)
    layers, hidden, heads = (header.integer(k) for k in ("block_count", "embedding_length", "attention.head_count"))
    head_dim, rotated = _head_sizes(file, header, family, hidden // heads)
    positions = header.integer("context_length")
    windows = _windows(file, header, family, layers)
    rotaries, rotary = _rotaries(file, header, family, rotated, windows)
    if rotated != head_dim:
        rotaries = tuple(replace(r, dim=rotated) for r in rotaries)
    mlp_bias = {f"blk.0.{name}.bias" in file.tensors for name in ("ffn_gate", "ffn_up")}
    fields: dict[str, Any] = {
        "architecture": family.family,
        "vocab_size": _vocabulary_rows(file),
        "hidden_size": hidden,
        "intermediate_size": header.integer("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": header.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "rms_norm_eps": _epsilon(file, header),
        "windows": tuple(None if w is None or w >= positions else w for w in windows),
        "rotaries": rotaries,
        "rotary": rotary,
        "qkv_bias": "blk.0.attn_q.bias" in file.tensors,
        "out_bias": "blk.0.attn_output.bias" in file.tensors,
        "mlp_bias": True in mlp_bias,
        "tied_head": "output.weight" not in file.tensors,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_ids": end_ids(file),
    }
    spec = ModelSpec(**{**fields, **family.settings(header)})
    _refuse(file, header, architecture, spec)
    return spec


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """End-of-text ids of the header: eos, end of turn and end of message, each once."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _refuse(file: GGUFFile, header: Header, architecture: str, spec: ModelSpec) -> None:
    if spec.experts is None and header.get("expert_count", 0):
        raise ModelError(
            f"{file.path}: {architecture}.expert_count={header.get('expert_count')}: experts are not supported for "
            "this architecture"
        )
    window = header.get("attention.sliding_window", 0)
    if not any(spec.windows) and window and window < spec.max_position_embeddings:
        raise ModelError(
            f"{file.path}: {architecture}.attention.sliding_window={window} does not say which layers it is for; "
            "not supported in GGUF for this architecture, use the safetensors"
        )
    if unknown := header.unread(HARMLESS):
        raise ModelError(
            f"{file.path}: header keys not known for {architecture}, which may change what the model computes: "
            + ", ".join(f"{key}={file.get(key)!r}" for key in unknown)
        )


def _head_sizes(file: GGUFFile, header: Header, family: GGUFFamily, divided: int) -> tuple[int, int]:
    """(size of a head, how many of its numbers are rotated). Only Phi-3 may rotate a part."""
    rotated = header.get("rope.dimension_count")
    head_dim = header.integer("attention.key_length", divided if family.family == "phi3" else rotated or divided)
    if header.get("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"{file.path}: attention.value_length={header.get('attention.value_length')} differs from the head size "
            f"{head_dim}: not supported"
        )
    rotated = head_dim if rotated is None else rotated
    if rotated != head_dim and (family.family != "phi3" or not 2 <= rotated < head_dim or rotated % 2):
        raise ModelError(
            f"{file.path}: rope.dimension_count={rotated} differs from the head size {head_dim}: not supported"
        )
    return head_dim, rotated


def _epsilon(file: GGUFFile, header: Header) -> float:
    value = header.get("attention.layer_norm_rms_epsilon")
    if not isinstance(value, float) or value <= 0:
        raise ModelError(f"{file.path}: attention.layer_norm_rms_epsilon={value!r}: must be a positive number")
    # Stored as float32; 1e-6 was meant, not 9.99999997e-07.
    return float(f"{value:.6g}")


def _vocabulary_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2 or not shape[0]:
        raise ModelError(f"{file.path}: tensor token_embd.weight has shape {list(shape)}, expected [rows, columns]")
    return shape[0]


def _windows(file: GGUFFile, header: Header, family: GGUFFamily, layers: int) -> tuple[int | None, ...]:
    """Sliding window of each layer. The pattern is a period, or one flag per layer."""
    if family.pattern == 0:
        return (None,) * layers
    if family.pattern == 1:  # all layers alike; 0 is written where there is none
        window = header.get("attention.sliding_window", 0)
        return (header.integer("attention.sliding_window") if window else None,) * layers
    window = header.integer("attention.sliding_window")
    pattern = header.get("attention.sliding_window_pattern", family.pattern)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1:
        return tuple(window if (i + 1) % pattern else None for i in range(layers))
    flags = [bool(f) for f in pattern] if hasattr(pattern, "__len__") and not isinstance(pattern, str) else []
    if len(flags) != layers:
        raise ModelError(
            f"{file.path}: attention.sliding_window_pattern={pattern!r}: must be a period or {layers} flags"
        )
    return tuple(window if sliding else None for sliding in flags)


def _rotaries(
    file: GGUFFile, header: Header, family: GGUFFamily, rotated: int, windows: tuple[int | None, ...]
) -> tuple[tuple[RotarySpec, ...], tuple[int, ...]]:
    base = float(header.get("rope.freq_base", family.base))
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        main = _longrope(file, header, base, rotated)
    else:
        main = _scaled_rotary(file, header, base)
        if FREQUENCY_FACTORS in file.tensors:
            main = _divided_rotary(file, main, rotated)
    if family.local_base is None:
        return (main,), (0,) * len(windows)
    local = RotarySpec("default", float(header.get("rope.freq_base_swa", family.local_base)))
    return (main, local), tuple(0 if w is None else 1 for w in windows)


def _longrope(file: GGUFFile, header: Header, base: float, rotated: int) -> RotarySpec:
    """Phi-3: two tensors of divisors; the factor on cos and sin is in the header."""
    kind = header.get("rope.scaling.type", "longrope")
    if kind not in ("longrope", "none"):
        raise ModelError(f"{file.path}: rope.scaling.type={kind!r} together with {LONG_FACTORS} is not supported")
    original = header.integer("rope.scaling.original_context_length")
    fields = {
        "short_factor": _vector(file, SHORT_FACTORS, rotated // 2),
        "long_factor": _vector(file, LONG_FACTORS, rotated // 2),
        "original_max_position_embeddings": original,
        "attention_factor": header.get("rope.scaling.attn_factor", 1.0),
        "long": header.integer("context_length") > original,
    }
    return build_rotary("longrope", base, fields, head_dim=rotated)


def _scaled_rotary(file: GGUFFile, header: Header, base: float) -> RotarySpec:
    kind: Literal["default", "linear", "yarn"] | str = header.get("rope.scaling.type", "none")
    old_factor = header.get("rope.scale_linear")
    if kind == "none" and old_factor not in (None, 1.0):
        return build_rotary("linear", base, {"factor": float(old_factor)})
    if kind == "none":
        # Written without a kind they mean nothing, as to the runtime that defines the format.
        for key in ("factor", "original_context_length", "attn_factor"):
            header.get(f"rope.scaling.{key}")
        return RotarySpec("default", base)
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: rope.scaling.type={kind!r} is not supported; known: none, linear, yarn")
    if header.get("rope.scaling.yarn_log_multiplier"):
        raise ModelError(f"{file.path}: rope.scaling.yarn_log_multiplier is not supported")
    fields: Mapping[str, Any] = {"factor": header.get("rope.scaling.factor")}
    if kind == "yarn":
        fields = {
            **fields,
            "original_max_position_embeddings": header.get("rope.scaling.original_context_length"),
            "beta_fast": header.get("rope.scaling.yarn_beta_fast"),
            "beta_slow": header.get("rope.scaling.yarn_beta_slow"),
        }
        spec = build_rotary("yarn", base, fields)
        return _times_attention_factor(spec, header.get("rope.scaling.attn_factor"))
    header.get("rope.scaling.original_context_length")  # linear scaling does not depend on it
    return build_rotary("linear", base, fields)


def _times_attention_factor(spec: RotarySpec, factor: float | None) -> RotarySpec:
    """In GGUF `attn_factor` multiplies YaRN's own factor; in a Hugging Face config it replaces it."""
    if factor is None:
        return spec
    parameters = dict(spec.parameters)
    own = parameters["attention_factor"]
    assert not isinstance(own, tuple)
    parameters["attention_factor"] = own * float(factor)
    return RotarySpec(spec.kind, spec.base, tuple(sorted(parameters.items())))


def _divided_rotary(file: GGUFFile, main: RotarySpec, rotated: int) -> RotarySpec:
    """Divisors of the inverse frequencies, one per pair (Llama 3.1 files carry their scaling this way)."""
    if main.kind != "default":
        raise ModelError(f"{file.path}: {FREQUENCY_FACTORS} together with rope scaling {main.kind!r} is not supported")
    return RotarySpec("divided", main.base, (("factors", _vector(file, FREQUENCY_FACTORS, rotated // 2)),))


def _vector(file: GGUFFile, name: str, length: int) -> tuple[float, ...]:
    """A small float32 tensor that belongs to the spec."""
    import torch

    tensor = file.tensors.get(name)
    if tensor is None:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    if tensor.shape != (length,) or tensor.type_name != "F32":
        raise ModelError(
            f"{file.path}: {name} is {list(tensor.shape)} {TYPE_NAMES[tensor.type_id]}, expected [{length}] F32"
        )
    return tuple(dequantize(file.raw(tensor), tensor.type_id, tensor.shape, torch.float32).tolist())
