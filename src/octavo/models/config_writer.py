"""`ModelSpec` -> Hugging Face `config.json`, for the architectures that GGUF files come in.

The reverse of `models/config_reader.py`, and checked by it: a config is only given out if reading it gives the same
model again. What has no key there (a rotary kind of GGUF's own) is refused by that.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.models.config_reader import spec_from_config
from octavo.models.families import FAMILIES
from octavo.models.families.windows import FULL, SLIDING
from octavo.models.rope_reader import SHARE, build_rotary
from octavo.models.rotary import inverse_frequencies
from octavo.models.spec import ModelSpec, RotarySpec

_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh", "gelu": "gelu", "relu": "relu"}
#: Lengths of pretraining that the scaling of Llama 3 may have been written for.
_ORIGINALS = tuple(1 << bits for bits in range(6, 18))
#: Divisors are stored in float32, and were computed in one order or another.
_CLOSE = 1e-5


def config_of(spec: ModelSpec, where: str) -> dict[str, Any]:
    """The config. where: the file the spec is of, for messages. Raises `ModelError` for what a config cannot say."""
    spec = _without_divisors(spec)
    config = _shared(spec) | _of_family(spec) | _windows(spec)
    if spec.rotaries:
        config["rope_parameters"] = _rope(spec)
    if different := _differences(spec, config):
        raise ModelError(
            f"{where}: no config.json can say what its header does ({'; '.join(different)}); load the file itself, "
            "with quantization='gguf' (as it is packed) or quantised anew at each load"
        )
    return config


def _differences(spec: ModelSpec, config: dict[str, Any]) -> list[str]:
    """What would be another model if the config were read."""
    try:
        again = spec_from_config(config, "absent" if spec.tied_head else "own")
    except ModelError as error:
        return [str(error).removeprefix("config: ")]
    ours, theirs = _meaning(spec), _meaning(again)
    names = [field.name for field in fields(ModelSpec) if field.compare]
    return [
        f"{name}: {getattr(ours, name)!r}, not {getattr(theirs, name)!r}"
        for name in names
        if getattr(ours, name) != getattr(theirs, name)
    ]


def _meaning(spec: ModelSpec) -> ModelSpec:
    """The spec with what may be written in several ways in one of them."""
    by_layer = tuple(spec.rotaries[i] for i in spec.rotary if i is not None)
    return replace(spec, attention_scale=spec.scale, rotaries=by_layer, rotary=())


def _shared(spec: ModelSpec) -> dict[str, Any]:
    family = FAMILIES[spec.architecture]
    activation = {shared: key for key, shared in family.aliases.items()}.get("hidden_act", "hidden_act")
    config = {
        "architectures": [family.classes[0]], "model_type": spec.architecture, "dtype": "bfloat16",
        "vocab_size": spec.vocab_size, "hidden_size": spec.hidden_size, "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers, "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads, "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps, activation: _ACTIVATIONS[spec.activation],
        "tie_word_embeddings": spec.tied_head, "bos_token_id": spec.bos_token_id,
        "eos_token_id": list(spec.eos_token_ids) if len(spec.eos_token_ids) != 1 else spec.eos_token_ids[0],
    }  # fmt: skip
    if "head_dim" in family.keys:
        config["head_dim"] = spec.head_dim
    for key, value in (("attention_bias", spec.out_bias), ("mlp_bias", spec.mlp_bias), ("qkv_bias", spec.qkv_bias)):
        if key in family.keys:
            config[key] = value
    return config


def _of_family(spec: ModelSpec) -> dict[str, Any]:
    """What single families have keys for."""
    config: dict[str, Any] = {}
    if "query_pre_attn_scalar" in FAMILIES[spec.architecture].keys:
        scalar = spec.scale**-2
        config["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar
        config["attn_logit_softcapping"] = spec.attention_softcap
        config["final_logit_softcapping"] = spec.logit_softcap
    experts = spec.experts
    if experts is not None:
        config["num_experts_per_tok"] = experts.per_token
    if experts is not None and spec.architecture == "mixtral":
        config |= {"num_local_experts": experts.count, "intermediate_size": experts.intermediate_size}
    elif experts is not None:
        config |= {
            "num_experts": experts.count, "moe_intermediate_size": experts.intermediate_size,
            "norm_topk_prob": experts.normalized, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
        if experts.shared_intermediate_size:
            config["shared_expert_intermediate_size"] = experts.shared_intermediate_size
    return config


def _windows(spec: ModelSpec) -> dict[str, Any]:
    """Window and kinds of layers. One that no sequence outgrows is None in a spec, but its layer may turn otherwise."""
    keys, window = FAMILIES[spec.architecture].keys, next((w for w in spec.windows if w is not None), None)
    if "use_sliding_window" in keys:
        return {"use_sliding_window": False, "sliding_window": None}
    if "layer_types" in keys:
        local = len(spec.rotaries) > 1
        sliding = [bool(i) if local else w is not None for i, w in zip(spec.rotary, spec.windows, strict=True)]
        types = [SLIDING if slides else FULL for slides in sliding]
        return {"sliding_window": window or spec.max_position_embeddings, "layer_types": types}
    return {"sliding_window": window} if "sliding_window" in keys else {}


def _rope(spec: ModelSpec) -> dict[str, Any]:
    family = FAMILIES[spec.architecture]
    written = [_rotary(rotary, spec.head_dim) for rotary in spec.rotaries]
    if family.rotary is not None and family.rotary.local_key is not None:
        return {FULL: written[0], SLIDING: written[-1]}
    return written[0]


def _rotary(rotary: RotarySpec, head_dim: int) -> dict[str, Any]:
    found = {"rope_type": rotary.kind, "rope_theta": rotary.base}
    for name, value in rotary.parameters:
        if name != "long":  # follows from the lengths
            found[name] = list(value) if isinstance(value, tuple) else value
    if rotary.dim is not None:
        found[SHARE] = rotary.dim / head_dim
    return found


def _without_divisors(spec: ModelSpec) -> ModelSpec:
    """The scaling of Llama 3, which GGUF files carry as divisors of the frequencies, in its own words."""
    rotaries = tuple(_llama3(r, spec.head_dim) if r.kind == "divided" else r for r in spec.rotaries)
    return replace(spec, rotaries=rotaries)


def _llama3(divided: RotarySpec, head_dim: int) -> RotarySpec:
    """The settings that give these frequencies; as it is where none do."""
    right, _ = inverse_frequencies(divided, head_dim)
    factors = dict(divided.parameters)["factors"]
    assert isinstance(factors, tuple)
    for original in _ORIGINALS:
        words = {
            "factor": float(round(max(factors))), "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }  # fmt: skip
        found = build_rotary("llama3", divided.base, words, dim=divided.dim)
        if torch.allclose(inverse_frequencies(found, head_dim)[0], right, rtol=_CLOSE, atol=0):
            return found
    return divided
