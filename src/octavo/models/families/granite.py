"""Granite 3 (dense): Llama with multipliers on embedding, attention, residual and logits."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import LLAMA_KEYS, Family, Reader, biases, words
from octavo.models.families.llama import DEFAULTS


def _granite(read: Reader) -> dict[str, Any]:
    def factor(key: str) -> float:
        return read.real(key, 1.0) or 1.0

    return {
        **biases(read),
        "mlp_bias": read.flag("mlp_bias"),
        "embedding_scale": factor("embedding_multiplier"),
        "residual_scale": factor("residual_multiplier"),
        "attention_scale": factor("attention_multiplier"),
        "logit_scale": 1.0 / factor("logits_scaling"),
    }


FAMILIES = {
    "granite": Family(
        ("GraniteForCausalLM",),
        LLAMA_KEYS | words("attention_bias mlp_bias embedding_multiplier residual_multiplier attention_multiplier "
                           "logits_scaling"),
        DEFAULTS, settings=_granite,
    ),
}  # fmt: skip
