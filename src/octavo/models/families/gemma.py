"""Gemma 1, 2 and 3 (text): scaled embeddings, norms that add 1 to their weight, norms on both sides of each part."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import ACTIVATIONS, LLAMA_KEYS, Family, Reader, RotaryForm, biases, words
from octavo.models.tensor_names import ATTENTION, MLP, TensorNames

_KEYS = LLAMA_KEYS | words("attention_bias")
_KEYS2 = _KEYS | words("query_pre_attn_scalar sliding_window layer_types final_logit_softcapping "
                       "attn_logit_softcapping")  # fmt: skip
_ALIASES = {"hidden_activation": "hidden_act"}
_IDS = {"bos_token_id": 2, "eos_token_id": 1, "head_dim": 256}

SANDWICH = TensorNames({
    **ATTENTION, **MLP, "input_layernorm": "attention_norm", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "mlp_norm", "post_feedforward_layernorm": "post_mlp_norm",
})  # fmt: skip


def _gemma(read: Reader) -> dict[str, Any]:
    name = read.get("hidden_act")
    # The first releases said "gelu" and meant the tanh form; no Gemma uses the exact one.
    tanh = name is None or ACTIVATIONS.get(name) in ("gelu", "gelu_tanh")
    return {
        "embedding_scale": read.positive("hidden_size") ** 0.5,
        "norm_offset": True,
        **({"activation": "gelu_tanh"} if tanh else {}),
        **biases(read),
    }


def _gemma2(read: Reader) -> dict[str, Any]:
    scalar = read.real("query_pre_attn_scalar")
    return {
        **_gemma(read),
        "sandwich_norms": True,
        "attention_scale": None if scalar is None else scalar**-0.5,
        "attention_softcap": read.real("attn_logit_softcapping"),
        "logit_softcap": read.real("final_logit_softcapping"),
    }


def _gemma3(read: Reader) -> dict[str, Any]:
    return {**_gemma2(read), "qk_norm": True}


FAMILIES = {
    "gemma": Family(
        ("GemmaForCausalLM",), _KEYS,
        {**_IDS, "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
         "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 8192},
        aliases=_ALIASES, tied=True, settings=_gemma,
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",), _KEYS2,
        {**_IDS, "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
         "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": 30.0,
         "attn_logit_softcapping": 50.0},
        names=SANDWICH, aliases=_ALIASES, tied=True, windows="pattern", pattern=2, settings=_gemma2,
    ),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",), _KEYS2 | {"rope_local_base_freq", "sliding_window_pattern"},
        {**_IDS, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
         "query_pre_attn_scalar": 256, "sliding_window": 4096},
        names=SANDWICH, aliases=_ALIASES, tied=True, windows="pattern", pattern=6, settings=_gemma3,
        rotary=RotaryForm({"full_attention": 1_000_000.0, "sliding_attention": 10000.0}, "rope_local_base_freq"),
    ),
}  # fmt: skip
