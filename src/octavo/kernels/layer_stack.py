"""What a stack of decoder layers is made of, for operations that can run all of them in one call.

`Ops` may have `layer_stack(parts) -> LayerStack | str`: the stack, or one sentence that says why these layers cannot
be one. The decoder then hands whole steps to it where the attention backend allows; the layers' own operations stay
the definition, whose bits a stack gives. These are plain values: they know neither models nor kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from octavo.kernels.ops import Linear

if TYPE_CHECKING:
    import torch

    from octavo.kernels.interface import AttentionBackend

    #: cos and sin of positions 0, 1, …: float32 [rows, head_dim]
    CosSin = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StackLayer:
    """Weights of RMS norms, float32, None where there is none: without one a product reads the residual as it is.

    gate_up, down: a gated MLP. q_norm, k_norm: of each head [d] or of all heads together [heads · d], see `StackParts`.
    rotary: which of the tables of cos and sin turns queries and keys, None without positions.
    """

    attention_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    rotary: int | None
    out: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class StackParts:
    """All layers and the final norm. eps: of every norm; residual_scale: on what attention and MLP add."""

    layers: tuple[StackLayer, ...]
    final_norm: torch.Tensor
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    activation: str
    residual_scale: float
    whole_norms: bool  # q_norm and k_norm are of all heads together


class LayerStack(Protocol):
    """Runs the layers of one step and the final norm."""

    def serves(self, attention: AttentionBackend) -> bool:
        """Whether `run` may be given this backend."""
        ...

    def run(
        self,
        residual: torch.Tensor,
        positions: torch.Tensor,
        tables: Sequence[CosSin],
        attention: AttentionBackend,
    ) -> torch.Tensor | None:
        """residual [T, D], overwritten -> hidden [T, D], normed; `attention` is planned for these tokens.

        Tokens that the planned batch does not want (`AttentionBatch.wanted`) may hold NaN.
        None, and nothing done, where a position of `positions` int64 [T] lies past the rows of `tables`.
        """
        ...
