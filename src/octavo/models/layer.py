"""The parts of one decoder layer: norms, MLPs, and the record that holds a layer together.

Which part a layer has is decided once, when it is built; a step calls what is there and asks no flags of the spec.
These classes know operations (`kernels/ops.py`), not where weights come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from octavo.kernels.ops import Linear, Ops

if TYPE_CHECKING:
    from octavo.models.moe import MixtureOfExperts


class Norm(Protocol):
    """x [T, D] -> [T, D]; `add` gives the norm of residual + x and the sum, and may reuse the residual's memory."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...


class RMSNorm:
    """By the root of the mean square. weight: float32 [D], the final multiplier."""

    def __init__(self, ops: Ops, weight: torch.Tensor, eps: float) -> None:
        self._norm, self._add, self._eps = ops.rms_norm, ops.add_rms_norm, eps
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add(x, residual, self.weight, self._eps)


class LayerNorm:
    """By mean and variance. weight, bias: float32 [D]."""

    def __init__(self, ops: Ops, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._norm, self._add = ops.layer_norm, ops.add_layer_norm
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._norm(x, self._weight, self._bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._add(x, residual, self._weight, self._bias, self._eps)


class NoNorm:
    """A layer that reads the residual as it is (OLMo 2)."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return total, total


class ProjectionNorms:
    """One RMS norm over all heads of q, and one over all of k. Weights float32 [heads · d]."""

    def __init__(self, ops: Ops, q: torch.Tensor, k: torch.Tensor, eps: float) -> None:
        self._ops, self._eps = ops, eps
        self.weights = (q, k)

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, Hq, d], k [T, Hkv, d]."""
        return self._normed(q, self.weights[0]), self._normed(k, self.weights[1])

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x.reshape(x.shape[0], -1), weight, self._eps).view(x.shape)


class HeadNorms:
    """Layer norm of each head of q and k with a weight of its own, float32 [heads, d]."""

    def __init__(self, ops: Ops, q: torch.Tensor, k: torch.Tensor, eps: float) -> None:
        self._ops, self._q, self._k, self._eps = ops, q, k, eps
        self._ones = torch.ones(q.shape[-1], device=q.device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, Hq, d], k [T, Hkv, d]."""
        return self._normed(q, self._q), self._normed(k, self._k)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._ops.layer_norm(x, self._ones, None, self._eps) * weight.to(x.dtype)


class GatedMLP:
    """down(act(gate(x)) * up(x)); gate and up are one product."""

    linears = ("gate_up", "down")

    def __init__(self, ops: Ops, gate_up: Linear, down: Linear, activation: str) -> None:
        self.gate_up, self.down = gate_up, down
        self._gated, self._activation = ops.gated_activation, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gated(self.gate_up(x), self._activation))


class PlainMLP:
    """down(act(up(x)))."""

    linears = ("up", "down")

    def __init__(self, ops: Ops, up: Linear, down: Linear, activation: str) -> None:
        self.up, self.down = up, down
        self._act, self._activation = ops.activation, activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._act(self.up(x), self._activation))


MLP = GatedMLP | PlainMLP


@dataclass(slots=True)
class Layer:
    """One layer. rotary: index of its cos and sin, None without positions. head_norms: what `ops.rotary` cannot do.

    mlp_norm is None where the MLP reads what attention reads. parallel: the MLP does not wait for attention.
    """

    attention_norm: Norm
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    head_norms: ProjectionNorms | HeadNorms | None
    rotary: int | None
    out: Linear
    post_attention_norm: Norm | None
    mlp_norm: Norm | None
    mlp: MLP | MixtureOfExperts
    post_mlp_norm: Norm | None
    parallel: bool
