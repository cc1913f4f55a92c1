"""What sets one model family apart, as data, and typed reading of its config.

`Family` holds what most families differ in as plain values; the rest comes from its function `settings`, which reads
further keys and returns fields of `ModelSpec`. Nothing here knows tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.tensor_names import LLAMA, TensorNames

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu": "gelu", "relu": "relu",
}  # fmt: skip


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keys every family reads.
SHARED = words("""
    vocab_size hidden_size num_hidden_layers num_attention_heads max_position_embeddings bos_token_id eos_token_id
    tie_word_embeddings""")
ROTARY = words("rope_theta rope_scaling rope_parameters")
#: What the families built like Llama read besides.
LLAMA_KEYS = ROTARY | words("intermediate_size num_key_value_heads head_dim rms_norm_eps hidden_act")


@dataclass(frozen=True)
class RotaryForm:
    """How a family writes its rotary settings.

    bases: of each layer type, when the config gives none. local_key: the flat key with the base of sliding layers,
    which then take no scaling (Gemma 3). share: part of each head that is rotated when the config does not say; None:
    whole heads only. kinds: other names of kinds. original: default of the flat key original_max_position_embeddings,
    which then wins over the nested one (Phi-3); None: there is no such key. names: the flat keys of base and share.
    """

    bases: Mapping[str, float] = field(
        default_factory=lambda: {"full_attention": 10000.0, "sliding_attention": 10000.0}
    )
    local_key: str | None = None
    share: float | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    original: int | None = None
    base_key: str = "rope_theta"
    share_key: str = "partial_rotary_factor"


def both_bases(base: float) -> dict[str, float]:
    return {"full_attention": base, "sliding_attention": base}


@dataclass(frozen=True)
class Family:
    """One `model_type`. defaults: its configuration class's values for absent keys, under the shared names.

    keys: those it reads besides `SHARED`. aliases: its own spelling of a key -> the shared one. rotary: None for a
    family without. epsilon: the key of the norms' epsilon. activation: the key of the activation.
    """

    classes: tuple[str, ...]
    keys: frozenset[str]
    defaults: Mapping[str, Any]
    names: TensorNames = LLAMA
    aliases: Mapping[str, str] = field(default_factory=dict)
    tied: bool = False
    rotary: RotaryForm | None = field(default_factory=RotaryForm)
    epsilon: str = "rms_norm_eps"
    activation: str = "hidden_act"
    windows: Literal["none", "given", "all", "qwen", "qwen_moe", "pattern"] = "none"
    pattern: int = 1
    settings: Callable[[Reader], dict[str, Any]] = lambda read: {}


class Reader:
    """Typed access to one config with the family's defaults; errors name the key and the value."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        own = {
            shared: key
            for key, shared in family.aliases.items()
            if key in config and (config[key] is not None or shared not in config)
        }
        self._spelled = own
        self.config = {**config, **{shared: config[key] for shared, key in own.items()}}
        self.family = family

    def get(self, key: str, default: Any = None) -> Any:
        """The config's value (also a null), or the class default when the key is absent."""
        return self.config[key] if key in self.config else self.family.defaults.get(key, default)

    def refused(self, key: str, value: Any, must: str) -> ModelError:
        return ModelError(f"config: {self._spelled.get(key, key)}={value!r}: must be {must}")

    def positive(self, key: str, fallback: int | None = None) -> int:
        value = self.get(key)
        value = fallback if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refused(key, value, "an integer of at least 1")
        return value

    def count(self, key: str, default: int = 0) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refused(key, value, "an integer of at least 0")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.refused(key, value, "true or false")
        return value

    def real(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None when the value is null (softcaps: off)."""
        value = self.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise self.refused(key, value, "a positive number or null")
        return None if value is None else float(value)

    def only(self, key: str, *allowed: Any, why: str) -> None:
        """Refuse any value of `key` but these (or an absent one)."""
        value = self.get(key)
        if value is not None and value not in allowed:
            listed = " or ".join(repr(v) for v in allowed)
            raise ModelError(
                f"config: {self._spelled.get(key, key)}={value!r} is not supported ({why}); only {listed} is; "
                "model_impl='transformers' may run it"
            )


def biases(read: Reader) -> dict[str, Any]:
    """The key attention_bias decides for q, k, v and the output projection alike."""
    bias = read.flag("attention_bias")
    return {"qkv_bias": bias, "out_bias": bias}
