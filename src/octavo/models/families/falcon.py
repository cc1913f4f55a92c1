"""Falcon 7B, 40B and 180B: parallel attention and MLP, one or a few key/value heads, rows grouped by them."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import ROTARY, Family, Reader, words
from octavo.models.tensor_names import TensorNames, grouped_qkv

NAMES = TensorNames(
    {"input_layernorm": "attention_norm", "ln_attn": "attention_norm", "ln_mlp": "mlp_norm",
     "post_attention_layernorm": "mlp_norm", "self_attention.query_key_value": grouped_qkv,
     "self_attention.dense": "out", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"},
    embedding="word_embeddings", final_norm="ln_f", layers="h", prefixes=("transformer.", ""),
)  # fmt: skip


def _falcon(read: Reader) -> dict[str, Any]:
    """The new architecture (40B, 180B) has two norms side by side unless told otherwise; 7B has one, or none beside."""
    read.only("alibi", False, why="positions as attention biases")
    heads, hidden = read.positive("num_attention_heads"), read.positive("hidden_size")
    new, parallel = read.flag("new_decoder_architecture"), read.flag("parallel_attn", True)
    norms = read.count("num_ln_in_parallel_attn", 2 if new else 1)
    if new:
        read.only("parallel_attn", True, why="the new architecture is always parallel")
    read.only("num_ln_in_parallel_attn", *((1, 2) if new else (1,)), why="norms before the two parts")
    kv_heads = read.positive("num_key_value_heads", heads) if new else 1 if read.flag("multi_query", True) else heads
    bias = read.flag("bias")
    return {
        "norm": "layer",
        "norm_bias": True,
        "gated_mlp": False,
        "num_kv_heads": kv_heads,
        "intermediate_size": read.positive("intermediate_size", 4 * hidden),
        "parallel": "no" if not parallel else "own_norm" if norms == 2 else "one_norm",
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), bias),
    }


FAMILIES = {
    "falcon": Family(
        ("FalconForCausalLM",),
        ROTARY | words("intermediate_size num_key_value_heads layer_norm_epsilon activation alibi multi_query bias "
                       "new_decoder_architecture parallel_attn num_ln_in_parallel_attn"),
        {"vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
         "max_position_embeddings": 2048, "bos_token_id": 11, "eos_token_id": 11, "activation": "gelu",
         "layer_norm_epsilon": 1e-5},
        names=NAMES, tied=True, epsilon="layer_norm_epsilon", activation="activation", settings=_falcon,
        aliases={"num_kv_heads": "num_key_value_heads", "n_head_kv": "num_key_value_heads", "n_embed": "hidden_size",
                 "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                 "ffn_hidden_size": "intermediate_size"},
    ),
}  # fmt: skip
