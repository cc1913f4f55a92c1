"""OLMo 2: norms after attention and MLP instead of before, and one norm over all heads of q and of k."""

from __future__ import annotations

from typing import Any

from octavo.models.families.base import LLAMA_KEYS, Family, Reader, biases, words
from octavo.models.families.llama import DEFAULTS
from octavo.models.tensor_names import ATTENTION, MLP, TensorNames

NAMES = TensorNames({
    **ATTENTION, **MLP, "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_mlp_norm",
})  # fmt: skip


def _olmo2(read: Reader) -> dict[str, Any]:
    return {
        **biases(read),
        "qk_norm": True,
        "qk_norm_kind": "projection",
        "input_norms": False,
        "sandwich_norms": True,
    }


FAMILIES = {
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        LLAMA_KEYS | words("attention_bias"),
        {**DEFAULTS, "vocab_size": 50304, "bos_token_id": None, "eos_token_id": 50279, "rms_norm_eps": 1e-5},
        names=NAMES, settings=_olmo2,
    ),
}  # fmt: skip
