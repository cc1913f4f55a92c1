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

    kind: "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", or "divided" (a divisor per
    frequency, as GGUF files carry them). `parameters` holds what the kind needs (factor, …), checked when read.
    dim: how many leading numbers of a head are rotated, None for all of them.
    """

    kind: str = "default"
    base: float = 10000.0
    parameters: tuple[tuple[str, float | bool | tuple[float, ...]], ...] = ()
    dim: int | None = None


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The mixture of experts in the layers `layers`; the other layers have one plain or gated MLP.

    A token goes to the `per_token` experts of largest probability; `normalized`: their probabilities are divided by
    their sum. shared_intermediate_size: of an expert that sees every token, behind a sigmoid gate; 0: there is none.
    """

    count: int
    per_token: int
    intermediate_size: int
    layers: tuple[int, ...]
    normalized: bool = True
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with causal attention.

    Shapes: hidden_size D, num_heads Hq, num_kv_heads Hkv (divides Hq), head_dim, intermediate_size.
    windows[i]: sliding window of layer i in tokens (itself included), None for full attention.
    rotary[i]: index into `rotaries` for layer i, None for a layer that is told no positions.
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
    rms_norm_eps: float  # of every norm, layer norms too
    windows: tuple[int | None, ...]
    rotaries: tuple[RotarySpec, ...]
    rotary: tuple[int | None, ...]
    activation: Literal["silu", "gelu_tanh", "gelu", "relu"] = "silu"
    gated_mlp: bool = True  # act(gate) * up; else act(up)
    experts: ExpertSpec | None = None
    attention_scale: float | None = None  # None: head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # on what attention and MLP add to the residual
    logit_scale: float = 1.0  # on the logits
    learned_positions: int = 0  # rows of a table of positions added to the embedding; 0: there is none
    position_offset: int = 0  # row of that table for position 0
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    norm_offset: bool = False  # Gemma: scale by (1 + weight)
    input_norms: bool = True  # norms before attention and MLP; OLMo 2 has only those after
    sandwich_norms: bool = False  # Gemma 2/3, OLMo 2: norms after attention and after the MLP too
    #: The MLP reads what attention reads, not its result: after a norm of its own, or after attention's.
    parallel: Literal["no", "own_norm", "one_norm"] = "no"
    qk_norm: bool = False
    #: One weight for every head; one norm over all heads together; layer norm with a weight for each head.
    qk_norm_kind: Literal["head", "projection", "each_head"] = "head"
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
