"""GPT-2, OPT and GPT-NeoX (Pythia): layer norms with biases and MLPs without a gate."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import ROTARY, Family, Reader, RotaryForm, words
from octavo.models.tensor_names import TensorNames, columns_of_qkv, grouped_qkv

_PLAIN = {"norm": "layer", "norm_bias": True, "gated_mlp": False}

GPT2_NAMES = TensorNames(
    {"ln_1": "attention_norm", "attn.c_attn": columns_of_qkv, "attn.c_proj": "out", "ln_2": "mlp_norm",
     "mlp.c_fc": "up", "mlp.c_proj": "down"},
    embedding="wte", positions="wpe", final_norm="ln_f", layers="h", prefixes=("transformer.", ""),
    transposed=frozenset(("attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
)  # fmt: skip
OPT_NAMES = TensorNames(
    {**{f"self_attn.{name}_proj": name for name in ("q", "k", "v", "out")}, "self_attn_layer_norm": "attention_norm",
     "final_layer_norm": "mlp_norm", "fc1": "up", "fc2": "down"},
    positions="embed_positions", final_norm="final_layer_norm", prefixes=("model.decoder.", "decoder."),
)  # fmt: skip
NEOX_NAMES = TensorNames(
    {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
     "attention.query_key_value": grouped_qkv, "attention.dense": "out", "mlp.dense_h_to_4h": "up",
     "mlp.dense_4h_to_h": "down"},
    embedding="embed_in", final_norm="final_layer_norm", heads=("embed_out", "lm_head"), prefixes=("gpt_neox.", ""),
)  # fmt: skip


def _gpt2(read: Reader) -> dict[str, Any]:
    read.only("scale_attn_by_inverse_layer_idx", False, why="each layer would scale its attention by its own number")
    hidden = read.positive("hidden_size")
    return {
        **_PLAIN,
        "intermediate_size": read.positive("intermediate_size", 4 * hidden),
        "attention_scale": None if read.flag("scale_attn_weights", True) else 1.0,
        "learned_positions": read.positive("max_position_embeddings"),
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True),
    }


def _opt(read: Reader) -> dict[str, Any]:
    hidden = read.positive("hidden_size")
    read.only("do_layer_norm_before", True, why="norms after the sum, as in opt-350m")
    read.only("word_embed_proj_dim", hidden, why="an embedding of another size, as in opt-350m")
    read.only("layer_norm_elementwise_affine", True, why="norms without weights")
    read.only("_remove_final_layer_norm", False, why="no final norm")
    offset = 2  # the first two rows of the table are never used
    return {
        **_PLAIN,
        "learned_positions": read.positive("max_position_embeddings") + offset,
        "position_offset": offset,
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), read.flag("enable_bias", True)),
    }


def _gpt_neox(read: Reader) -> dict[str, Any]:
    bias = read.flag("attention_bias", True)
    return {
        **_PLAIN,
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": True,
        "parallel": "own_norm" if read.flag("use_parallel_residual", True) else "no",
    }


FAMILIES = {
    "gpt2": Family(
        ("GPT2LMHeadModel",),
        words("intermediate_size layer_norm_epsilon activation_function scale_attn_weights "
              "scale_attn_by_inverse_layer_idx"),
        {"vocab_size": 50257, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "max_position_embeddings": 1024, "bos_token_id": 50256, "eos_token_id": 50256,
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        names=GPT2_NAMES, tied=True, rotary=None, epsilon="layer_norm_epsilon", activation="activation_function",
        aliases={"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
                 "n_positions": "max_position_embeddings", "n_inner": "intermediate_size"},
        settings=_gpt2,
    ),
    "opt": Family(
        ("OPTForCausalLM",),
        words("intermediate_size activation_function do_layer_norm_before word_embed_proj_dim enable_bias "
              "layer_norm_elementwise_affine _remove_final_layer_norm"),
        {"vocab_size": 50272, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
         "num_attention_heads": 12, "max_position_embeddings": 2048, "bos_token_id": 2, "eos_token_id": 2,
         "activation_function": "relu", "layer_norm_eps": 1e-5},
        names=OPT_NAMES, tied=True, rotary=None, epsilon="layer_norm_eps", activation="activation_function",
        aliases={"ffn_dim": "intermediate_size"}, settings=_opt,
    ),
    "gpt_neox": Family(
        ("GPTNeoXForCausalLM",),
        ROTARY | words("intermediate_size hidden_act layer_norm_eps rotary_pct rotary_emb_base partial_rotary_factor "
                       "use_parallel_residual attention_bias"),
        {"vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
         "num_attention_heads": 64, "max_position_embeddings": 2048, "bos_token_id": 0, "eos_token_id": 2,
         "hidden_act": "gelu", "layer_norm_eps": 1e-5},
        names=NEOX_NAMES, epsilon="layer_norm_eps", settings=_gpt_neox,
        rotary=RotaryForm(share=0.25, base_key="rotary_emb_base", share_key="rotary_pct"),
    ),
}  # fmt: skip
