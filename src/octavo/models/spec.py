"""`ModelSpec`: everything about a decoder that changes its mathematics, in one frozen value.

Read from a Hugging Face config or a GGUF header by `models/config_reader.py` and `models/gguf_reader.py`; the one
decoder in `models/decoder.py` is driven by it. No tensors here, so the planner reads specs without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """Rotary position embedding of one kind of layer.

    kind: "default", "linear", "llama3", "yarn", or "divided" (a divisor per frequency, as GGUF files carry them).
    `parameters` holds what the kind needs (factor, …), checked when read.
    """

    kind: str = "default"
    base: float = 10000.0
    parameters: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only model with rotary positions and RMS norms.

    Shapes: hidden_size D, num_heads Hq, num_kv_heads Hkv (divides Hq), head_dim, intermediate_size.
    windows[i]: sliding window of layer i in tokens (itself included), None for full attention.
    rotary[i]: index into `rotaries` for layer i.
    """

    architecture: str
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]
    rotaries: tuple[RotarySpec, ...]
    rotary: tuple[int, ...]
    activation: Literal["silu", "gelu_tanh", "gelu"] = "silu"
    attention_scale: float | None = None  # None: head_dim ** -0.5
    embedding_scale: float = 1.0
    norm_offset: bool = False  # Gemma: scale by (1 + weight)
    sandwich_norms: bool = False  # Gemma 2/3: norms after attention and after the MLP too
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)

    @property
    def scale(self) -> float:
        return self.attention_scale if self.attention_scale is not None else self.head_dim**-0.5

    def kv_values_per_token_layer(self) -> int:
        """Key and value numbers of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim
