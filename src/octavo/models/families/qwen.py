"""Qwen 2, 2.5 and 3, dense and with experts."""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelError
from octavo.models.families.base import LLAMA_KEYS, Family, Reader, biases, words
from octavo.models.spec import ExpertSpec
from octavo.models.tensor_names import ATTENTION, MLP, NORMS, TensorNames, stacked, stacked_gate_up

_KEYS = LLAMA_KEYS | words("use_sliding_window sliding_window max_window_layers layer_types")
_EXPERT_KEYS = words("moe_intermediate_size num_experts_per_tok num_experts norm_topk_prob decoder_sparse_step "
                     "mlp_only_layers")  # fmt: skip
_DEFAULTS = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
             "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip

MOE_NAMES = TensorNames({
    **ATTENTION, **NORMS, **MLP, "mlp.gate": "router",
    **{f"mlp.experts.#.{name}_proj": f"experts.#.{name}" for name in ("gate", "up", "down")},
    **{f"mlp.shared_expert.{name}_proj": f"shared.{name}" for name in ("gate", "up", "down")},
    "mlp.shared_expert_gate": "shared_router",
    "mlp.experts.gate_up_proj": stacked_gate_up, "mlp.experts.down_proj": stacked("down"),
})  # fmt: skip


def _qwen2(read: Reader) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(read: Reader) -> dict[str, Any]:
    return {"qk_norm": True, **biases(read)}


def _experts(read: Reader, shared: int = 0) -> dict[str, Any]:
    """Every `decoder_sparse_step`-th layer has experts, but those that `mlp_only_layers` names."""
    layers, step = read.positive("num_hidden_layers"), read.positive("decoder_sparse_step")
    dense = read.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in dense):
        raise ModelError(f"config: mlp_only_layers={dense!r}: must be a list of layer numbers")
    sparse = tuple(i for i in range(layers) if (i + 1) % step == 0 and i not in dense)
    count, per_token = read.positive("num_experts"), read.positive("num_experts_per_tok")
    if not sparse:
        return {}
    inner = read.positive("moe_intermediate_size")
    return {"experts": ExpertSpec(count, per_token, inner, sparse, read.flag("norm_topk_prob"), shared)}


def _qwen2_moe(read: Reader) -> dict[str, Any]:
    shared = read.positive("shared_expert_intermediate_size")
    return {"qkv_bias": read.flag("qkv_bias", True), **_experts(read, shared)}


def _qwen3_moe(read: Reader) -> dict[str, Any]:
    return {**_qwen3(read), **_experts(read)}


FAMILIES = {
    "qwen2": Family(("Qwen2ForCausalLM",), _KEYS, _DEFAULTS, windows="qwen", settings=_qwen2),
    "qwen3": Family(
        ("Qwen3ForCausalLM",), _KEYS | {"attention_bias"}, {**_DEFAULTS, "head_dim": 128}, windows="qwen",
        settings=_qwen3,
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        (_KEYS | _EXPERT_KEYS | words("shared_expert_intermediate_size qkv_bias")) - {"head_dim"},
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32768,
         "sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
         "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60},
        names=MOE_NAMES, windows="qwen_moe", settings=_qwen2_moe,
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        # max_window_layers is written by the model's makers and read by nobody.
        (_KEYS | _EXPERT_KEYS | words("attention_bias")) - {"layer_types"},
        {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
         "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32768,
         "sliding_window": 4096, "decoder_sparse_step": 1, "moe_intermediate_size": 768, "num_experts_per_tok": 8,
         "num_experts": 128},
        names=MOE_NAMES, aliases={"num_local_experts": "num_experts"}, windows="all", settings=_qwen3_moe,
    ),
}  # fmt: skip
