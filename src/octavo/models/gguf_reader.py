"""GGUF header -> `ModelSpec`. What the header does not say comes from what the runtime that defines the format does.

For Gemma 3 that is: every sixth layer is full attention, sliding layers rotate with base 10000, rotary scaling applies
to the full layers only, and the 62-layer model (27B) scales attention by (D / Hq) ** -0.5. The head is tied when there
is no `output.weight`. Keys of the architecture's own namespace that are not known here are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_types import TYPE_NAMES, dequantize
from octavo.models.rope_reader import build_rotary
from octavo.models.spec import ModelSpec, RotarySpec

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
FREQUENCY_FACTORS = "rope_freqs.weight"
#: Number of layers of the one Gemma 3 whose attention scale is not head_dim ** -0.5.
GEMMA3_27B_LAYERS = 62
GEMMA3_PATTERN = 6
#: Keys (after the architecture's name) that are read here.
READ = frozenset(
    (
        "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
        "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length",
        "attention.value_length", "attention.sliding_window", "attention.sliding_window_pattern",
        "rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_log_multiplier", "rope.scale_linear", "vocab_size",
        "final_logit_softcapping", "attn_logit_softcapping", "expert_count", "expert_used_count",
    )
)  # fmt: skip
#: Keys that say how the file came about.
HARMLESS = frozenset(("rope.scaling.finetuned", "tensor_data_layout"))


class _Header:
    """Typed access to `<architecture>.<key>`."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, f"{architecture}."

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.get(self._prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = "is missing" if value is None else f"is {value!r}"
            raise ModelError(f"{self._file.path}: {self._prefix}{key} {what}; it must be an integer of at least 1")
        return value

    def unknown(self) -> list[str]:
        known = READ | HARMLESS
        return [k for k in self._file.keys() if k.startswith(self._prefix) and k[len(self._prefix) :] not in known]  # noqa: SIM118


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """The spec of a GGUF file. Raises `ModelError` for an architecture or setting that is not supported."""
    architecture = file.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported in GGUF; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    header = _Header(file, architecture)
    _refuse(file, header, architecture)
    gemma = architecture == "gemma3"
    layers, hidden, heads = (header.integer(k) for k in ("block_count", "embedding_length", "attention.head_count"))
    head_dim = header.integer("attention.key_length", header.get("rope.dimension_count", hidden // heads))
    _check_head_dim(file, header, head_dim)
    positions = header.integer("context_length")
    windows = _windows(file, header, layers) if gemma else (None,) * layers
    rotaries, rotary = _rotaries(file, header, head_dim, windows if gemma else None)
    scale = (hidden // heads) ** -0.5 if gemma and layers == GEMMA3_27B_LAYERS else None
    return ModelSpec(
        architecture="gemma3_text" if gemma else architecture,
        vocab_size=_vocabulary_rows(file),
        hidden_size=hidden,
        intermediate_size=header.integer("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=header.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=_epsilon(file, header),
        windows=tuple(None if w is None or w >= positions else w for w in windows),
        rotaries=rotaries,
        rotary=rotary,
        activation="gelu_tanh" if gemma else "silu",
        attention_scale=scale,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        norm_offset=gemma,
        sandwich_norms=gemma,
        qk_norm=architecture in ("qwen3", "gemma3"),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        tied_head="output.weight" not in file.tensors,
        attention_softcap=_softcap(header, "attn_logit_softcapping"),
        logit_softcap=_softcap(header, "final_logit_softcapping"),
        bos_token_id=file.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_ids(file),
    )


def end_ids(file: GGUFFile) -> tuple[int, ...]:
    """End-of-text ids of the header: eos, end of turn and end of message, each once."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [file.get(f"tokenizer.ggml.{key}") for key in keys]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _refuse(file: GGUFFile, header: _Header, architecture: str) -> None:
    if unknown := header.unknown():
        raise ModelError(
            f"{file.path}: header keys not known for {architecture}, which may change what the model computes: "
            + ", ".join(f"{key}={file.get(key)!r}" for key in unknown)
        )
    if header.get("expert_count", 0):
        raise ModelError(
            f"{file.path}: {architecture}.expert_count={header.get('expert_count')}: experts are not supported"
        )
    window = header.get("attention.sliding_window", 0)
    if architecture != "gemma3" and window and window < header.integer("context_length"):
        raise ModelError(
            f"{file.path}: {architecture}.attention.sliding_window={window} does not say which layers it is for; "
            "not supported in GGUF for this architecture, use the safetensors"
        )


def _check_head_dim(file: GGUFFile, header: _Header, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.get(key, head_dim) != head_dim:
            raise ModelError(
                f"{file.path}: {key}={header.get(key)} differs from the head size {head_dim}: not supported"
            )


def _epsilon(file: GGUFFile, header: _Header) -> float:
    value = header.get("attention.layer_norm_rms_epsilon")
    if not isinstance(value, float) or value <= 0:
        raise ModelError(f"{file.path}: attention.layer_norm_rms_epsilon={value!r}: must be a positive number")
    # Stored as float32; 1e-6 was meant, not 9.99999997e-07.
    return float(f"{value:.6g}")


def _softcap(header: _Header, key: str) -> float | None:
    value = header.get(key)
    return float(value) if value else None


def _vocabulary_rows(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: tensor token_embd.weight is missing")
    shape = file.tensors["token_embd.weight"].shape
    if len(shape) != 2 or not shape[0]:
        raise ModelError(f"{file.path}: tensor token_embd.weight has shape {list(shape)}, expected [rows, columns]")
    return shape[0]


def _windows(file: GGUFFile, header: _Header, layers: int) -> tuple[int | None, ...]:
    """Gemma 3: sliding window of each layer. The pattern is a period, or one flag per layer."""
    window = header.integer("attention.sliding_window")
    pattern = header.get("attention.sliding_window_pattern", GEMMA3_PATTERN)
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1:
        return tuple(window if (i + 1) % pattern else None for i in range(layers))
    flags = [bool(f) for f in pattern] if hasattr(pattern, "__len__") and not isinstance(pattern, str) else []
    if len(flags) != layers:
        raise ModelError(
            f"{file.path}: attention.sliding_window_pattern={pattern!r}: must be a period or {layers} flags"
        )
    return tuple(window if sliding else None for sliding in flags)


def _rotaries(
    file: GGUFFile, header: _Header, head_dim: int, windows: tuple[int | None, ...] | None
) -> tuple[tuple[RotarySpec, ...], tuple[int, ...]]:
    """windows: of a model whose sliding layers rotate with a base of their own (Gemma 3), else None."""
    base = float(header.get("rope.freq_base", 1_000_000.0 if windows is not None else 10000.0))
    main = _scaled_rotary(file, header, base)
    if FREQUENCY_FACTORS in file.tensors:
        main = _divided_rotary(file, main, head_dim)
    if windows is None:
        return (main,), (0,) * header.integer("block_count")
    local = RotarySpec("default", float(header.get("rope.freq_base_swa", 10000.0)))
    return (main, local), tuple(0 if w is None else 1 for w in windows)


def _scaled_rotary(file: GGUFFile, header: _Header, base: float) -> RotarySpec:
    kind: Literal["default", "linear", "yarn"] | str = header.get("rope.scaling.type", "none")
    old_factor = header.get("rope.scale_linear")
    if kind == "none" and old_factor not in (None, 1.0):
        return build_rotary("linear", base, {"factor": float(old_factor)})
    if kind == "none":
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


def _divided_rotary(file: GGUFFile, main: RotarySpec, head_dim: int) -> RotarySpec:
    """Divisors of the inverse frequencies, one per pair (Llama 3.1 files carry their scaling this way)."""
    if main.kind != "default":
        raise ModelError(f"{file.path}: {FREQUENCY_FACTORS} together with rope scaling {main.kind!r} is not supported")
    tensor = file.tensors[FREQUENCY_FACTORS]
    if tensor.shape != (head_dim // 2,) or tensor.type_name != "F32":
        raise ModelError(
            f"{file.path}: {FREQUENCY_FACTORS} is {list(tensor.shape)} {TYPE_NAMES[tensor.type_id]}, "
            f"expected [{head_dim // 2}] F32"
        )
    import torch

    factors = dequantize(file.raw(tensor), tensor.type_id, tensor.shape, torch.float32).tolist()
    return RotarySpec("divided", main.base, (("factors", tuple(factors)),))
