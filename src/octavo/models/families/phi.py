"""Phi-3, 3.5 and 4 (the text models): q, k, v and gate, up in one matrix each, partial rotary, LongRoPE."""

from __future__ import annotations

from octavo.models.families.base import LLAMA_KEYS, Family, RotaryForm, words
from octavo.models.spec import ModelSpec
from octavo.models.tensor_names import ATTENTION, MLP, NORMS, TensorNames, rows


def _query_rows(spec: ModelSpec) -> int:
    return spec.num_heads * spec.head_dim


def _kv_rows(spec: ModelSpec) -> int:
    return spec.num_kv_heads * spec.head_dim


def _inner(spec: ModelSpec) -> int:
    return spec.intermediate_size


NAMES = TensorNames({
    **ATTENTION, **MLP, **NORMS,
    "self_attn.qkv_proj": rows(("q", _query_rows), ("k", _kv_rows), ("v", _kv_rows)),
    "mlp.gate_up_proj": rows(("gate", _inner), ("up", _inner)),
})  # fmt: skip

FAMILIES = {
    "phi3": Family(
        ("Phi3ForCausalLM",),
        LLAMA_KEYS | words("sliding_window partial_rotary_factor original_max_position_embeddings"),
        {"vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
         "num_attention_heads": 32, "max_position_embeddings": 4096, "bos_token_id": 1, "eos_token_id": 32000,
         "rms_norm_eps": 1e-5},
        names=NAMES, windows="all",
        rotary=RotaryForm(share=1.0, kinds={"su": "longrope", "yarn": "longrope"}, original=4096),
    ),
}  # fmt: skip
