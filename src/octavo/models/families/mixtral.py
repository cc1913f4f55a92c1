"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import LLAMA_KEYS, Family, Reader, RotaryForm, both_bases, words
from octavo.models.spec import ExpertSpec
from octavo.models.tensor_names import ATTENTION, NORMS, TensorNames, stacked, stacked_gate_up

_MOE = "block_sparse_moe"
NAMES = TensorNames({
    **ATTENTION, **NORMS, f"{_MOE}.gate": "router", "mlp.gate": "router",
    f"{_MOE}.experts.#.w1": "experts.#.gate", f"{_MOE}.experts.#.w3": "experts.#.up",
    f"{_MOE}.experts.#.w2": "experts.#.down",
    "mlp.experts.gate_up_proj": stacked_gate_up, "mlp.experts.down_proj": stacked("down"),
})  # fmt: skip


def _mixtral(read: Reader) -> dict[str, Any]:
    layers = read.positive("num_hidden_layers")
    inner = read.positive("intermediate_size")
    return {"experts": ExpertSpec(read.positive("num_local_experts"), read.positive("num_experts_per_tok"), inner,
                                  tuple(range(layers)))}  # fmt: skip


FAMILIES = {
    "mixtral": Family(
        ("MixtralForCausalLM",),
        LLAMA_KEYS | words("sliding_window num_local_experts num_experts_per_tok"),
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "bos_token_id": 1,
         "eos_token_id": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5},
        names=NAMES, aliases={"num_experts": "num_local_experts"}, rotary=RotaryForm(both_bases(1_000_000.0)),
        windows="all", settings=_mixtral,
    ),
}  # fmt: skip
