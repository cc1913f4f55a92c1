"""What sets the architectures of GGUF files apart: names of tensors, layout of rows, flags of `ModelSpec`.

What a header does not say comes from what the runtime that defines the format does: every sixth layer of Gemma 3 and
every second of Gemma 2 is full attention, the largest of each scales attention by (D / Hq) ** -0.5, Mixtral and Qwen 3
divide the weights of a token's experts by their sum and Qwen 2 does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.errors import ModelError
from octavo.models.families.phi import NAMES as PHI3
from octavo.models.gguf_file import GGUFFile
from octavo.models.spec import ExpertSpec, ModelSpec
from octavo.models.tensor_names import Cut, Part, TensorNames, stacked

GEMMA3_PATTERN, GEMMA2_PATTERN = 6, 2
#: Number of layers of the one model of each kind whose attention scale is not head_dim ** -0.5.
GEMMA3_27B_LAYERS, GEMMA2_27B_LAYERS = 62, 46


class Header:
    """Typed access to `<architecture>.<key>`; remembers which keys were asked for."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file, self._prefix = file, f"{architecture}."
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._asked.add(key)
        return self.file.get(self._prefix + key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            what = "is missing" if value is None else f"is {value!r}"
            raise ModelError(f"{self.file.path}: {self._prefix}{key} {what}; it must be an integer of at least 1")
        return value

    def unread(self, harmless: frozenset[str]) -> list[str]:
        """Full names of the architecture's keys that nobody asked for."""
        own = [key for key in self.file.keys() if key.startswith(self._prefix)]  # noqa: SIM118
        return [key for key in own if key[len(self._prefix) :] not in self._asked | harmless]


_ATTENTION: dict[str, str | Cut] = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "out", "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm", "attn_norm": "attention_norm", "ffn_norm": "mlp_norm",
    "post_attention_norm": "post_attention_norm", "post_ffw_norm": "post_mlp_norm",
}  # fmt: skip


def _names(**modules: str | Cut) -> TensorNames:
    return TensorNames({**_ATTENTION, **modules}, embedding="token_embd", final_norm="output_norm", layers="blk",
                       heads=("output",), prefixes=("",))  # fmt: skip


def _as_row(vector: Any) -> Any:
    return vector.reshape(1, -1)


def _shared_router(spec: ModelSpec, kind: str) -> tuple[Part, ...]:
    """Kept as a vector [D] there."""
    return (Part(f"shared_router.{kind}", (), _as_row),)


_MLP: dict[str, str | Cut] = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down"}
PLAIN = _names(**_MLP)
EXPERTS = _names(
    **_MLP,
    ffn_gate_inp="router",
    **{f"ffn_{name}.#": f"experts.#.{name}" for name in ("gate", "up", "down")},
    **{f"ffn_{name}_exps": stacked(name) for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": f"shared.{name}" for name in ("gate", "up", "down")},
    ffn_gate_inp_shexp=_shared_router,
)
FUSED = _names(
    ffn_down="down",
    attn_qkv=PHI3.modules["self_attn.qkv_proj"],
    ffn_up=PHI3.modules["mlp.gate_up_proj"],
)


@dataclass(frozen=True)
class GGUFFamily:
    """family: its name in `families.FAMILIES`. interleaved: rows of q and k stand in pairs for another rotary layout.

    pattern: each such layer is full attention, the others slide; 0: no windows; 1: all layers slide.
    """

    family: str
    settings: Callable[[Header], dict[str, Any]] = lambda header: {}
    names: TensorNames = PLAIN
    interleaved: bool = False
    pattern: int = 0
    base: float = 10000.0
    local_base: float | None = None  # of the sliding layers, if they have one of their own


def _gemma(header: Header) -> dict[str, Any]:
    hidden = header.integer("embedding_length")
    return {"activation": "gelu_tanh", "embedding_scale": hidden**0.5, "norm_offset": True}


def _gemma2(header: Header) -> dict[str, Any]:
    return {
        **_gemma(header),
        "sandwich_norms": True,
        "attention_scale": _large_scale(header, GEMMA2_27B_LAYERS),
        "attention_softcap": header.get("attn_logit_softcapping", 50.0) or None,
        "logit_softcap": header.get("final_logit_softcapping", 30.0) or None,
    }


def _gemma3(header: Header) -> dict[str, Any]:
    return {
        **_gemma(header),
        "sandwich_norms": True,
        "qk_norm": True,
        "attention_scale": _large_scale(header, GEMMA3_27B_LAYERS),
        "attention_softcap": header.get("attn_logit_softcapping") or None,
        "logit_softcap": header.get("final_logit_softcapping") or None,
    }


def _large_scale(header: Header, layers: int) -> float | None:
    if header.integer("block_count") != layers:
        return None
    return (header.integer("embedding_length") // header.integer("attention.head_count")) ** -0.5


def _experts(header: Header, size_key: str, normalized: bool, shared_key: str | None = None) -> dict[str, Any]:
    layers = tuple(range(header.integer("block_count")))
    count, used = header.integer("expert_count"), header.integer("expert_used_count")
    if used > count:
        raise ModelError(f"{header.file.path}: expert_used_count={used} exceeds the {count} experts there are")
    shared = 0 if shared_key is None else header.integer(shared_key)
    return {"experts": ExpertSpec(count, used, header.integer(size_key), layers, normalized, shared)}


def _mixtral(header: Header) -> dict[str, Any]:
    return _experts(header, "feed_forward_length", True)


def _qwen2moe(header: Header) -> dict[str, Any]:
    return _experts(header, "expert_feed_forward_length", False, "expert_shared_feed_forward_length")


def _qwen3(header: Header) -> dict[str, Any]:
    return {"qk_norm": True}


def _qwen3moe(header: Header) -> dict[str, Any]:
    return {**_qwen3(header), **_experts(header, "expert_feed_forward_length", True)}


FAMILIES: dict[str, GGUFFamily] = {
    "llama": GGUFFamily("llama", interleaved=True),
    "qwen2": GGUFFamily("qwen2"),
    "qwen3": GGUFFamily("qwen3", _qwen3),
    "gemma": GGUFFamily("gemma", _gemma),
    "gemma2": GGUFFamily("gemma2", _gemma2, pattern=GEMMA2_PATTERN),
    "gemma3": GGUFFamily("gemma3_text", _gemma3, pattern=GEMMA3_PATTERN, base=1_000_000.0, local_base=10000.0),
    "phi3": GGUFFamily("phi3", names=FUSED, pattern=1),
    "qwen2moe": GGUFFamily("qwen2_moe", _qwen2moe, EXPERTS),
    "qwen3moe": GGUFFamily("qwen3_moe", _qwen3moe, EXPERTS),
}
MIXTRAL = GGUFFamily("mixtral", _mixtral, EXPERTS, interleaved=True)


def family_of_gguf(file: GGUFFile) -> tuple[str, GGUFFamily]:
    """The header's architecture and what it means here. A `llama` file with experts is Mixtral."""
    architecture = file.get("general.architecture")
    if architecture not in FAMILIES:
        raise ModelError(
            f"{file.path}: architecture {architecture!r} is not supported in GGUF; supported: {', '.join(FAMILIES)}"
        )
    if architecture == "llama" and file.get("llama.expert_count", 0):
        return architecture, MIXTRAL
    return architecture, FAMILIES[architecture]
