"""StableLM 1.x and 2: layer norms, a quarter of each head rotated, optionally parallel residuals and normed heads."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import ROTARY, Family, Reader, RotaryForm, words
from octavo.models.tensor_names import ATTENTION, MLP, NORMS, TensorNames

NAMES = TensorNames({
    **ATTENTION, **MLP, **NORMS,
    "self_attn.q_layernorm.norms.#": "heads.#.q_norm", "self_attn.k_layernorm.norms.#": "heads.#.k_norm",
})  # fmt: skip


def _stablelm(read: Reader) -> dict[str, Any]:
    return {
        "norm": "layer",
        "norm_bias": True,
        "qkv_bias": read.flag("use_qkv_bias"),
        "qk_norm": read.flag("qk_layernorm"),
        "qk_norm_kind": "each_head",
        "parallel": "one_norm" if read.flag("use_parallel_residual") else "no",
    }


FAMILIES = {
    "stablelm": Family(
        ("StableLmForCausalLM",),
        ROTARY | words("intermediate_size num_key_value_heads hidden_act layer_norm_eps use_qkv_bias qk_layernorm "
                       "use_parallel_residual partial_rotary_factor"),
        {"vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096, "bos_token_id": 0,
         "eos_token_id": 0, "layer_norm_eps": 1e-5},
        names=NAMES, rotary=RotaryForm(share=0.25), epsilon="layer_norm_eps", settings=_stablelm,
    ),
}  # fmt: skip
