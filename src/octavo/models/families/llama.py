"""Llama 1 to 3.x and what is built exactly so (SmolLM, Yi, TinyLlama, …); Mistral; SmolLM3."""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelError
from octavo.models.families.base import LLAMA_KEYS, Family, Reader, RotaryForm, biases, both_bases, words

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _llama(read: Reader) -> dict[str, Any]:
    return {**biases(read), "mlp_bias": read.flag("mlp_bias")}


def _smollm3(read: Reader) -> dict[str, Any]:
    """Some layers are told no positions: `no_rope_layers` holds a 1 for those that are, by default three of four."""
    layers = read.positive("num_hidden_layers")
    given = read.get("no_rope_layers")
    if given is None:
        every = read.positive("no_rope_layer_interval")
        given = [int((i + 1) % every != 0) for i in range(layers)]
    if not isinstance(given, list) or len(given) < layers or any(flag not in (0, 1) for flag in given):
        raise ModelError(f"config: no_rope_layers={given!r}: must be a list of {layers} zeros and ones")
    fields = {**_llama(read), "rotary": tuple(0 if flag else None for flag in given[:layers])}
    if read.get("layer_types") is None and read.flag("use_sliding_window") and read.get("sliding_window") is not None:
        raise ModelError(
            "config: use_sliding_window without layer_types is not supported for smollm3; write layer_types out"
        )
    return fields


FAMILIES = {
    "llama": Family(
        ("LlamaForCausalLM",), LLAMA_KEYS | words("attention_bias mlp_bias"), DEFAULTS, settings=_llama
    ),
    "mistral": Family(
        ("MistralForCausalLM",),
        LLAMA_KEYS | words("sliding_window layer_types"),
        {**DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
         "sliding_window": 4096},
        windows="all",
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        LLAMA_KEYS | words("attention_bias mlp_bias no_rope_layers no_rope_layer_interval use_sliding_window "
                           "sliding_window layer_types max_window_layers"),
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
         "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
         "bos_token_id": 128000, "eos_token_id": 128001, "no_rope_layer_interval": 4},
        tied=True, rotary=RotaryForm(both_bases(2_000_000.0)), windows="given", settings=_smollm3,
    ),
}  # fmt: skip
