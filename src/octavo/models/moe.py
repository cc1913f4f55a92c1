"""Mixture of experts: each token goes through the few experts that its router finds most likely.

The tokens of a step are sorted by expert, so that each expert that has tokens is two products over all of them, however
many tokens there are; there is no loop over tokens. On a CPU every expert is a product of its own (packed or quantised
like any other). Where asking the device for the counts would stall it, all experts are one grouped product.

Sparsely gated experts: Shazeer et al. 2017 (arXiv 1701.06538); in decoders: Jiang et al. 2024 (arXiv 2401.04088).

Invariant: the router works in float32, and a token's outputs are added in the order of its own probabilities, so that
a row depends on no other row of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional as F

from octavo.kernels.ops import Linear, Ops
from octavo.models.layer import MLP


class Experts(Protocol):
    """x [N, D], sorted by expert; ends int64 [E]: where each expert's rows end -> [N, D]."""

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor: ...


class ExpertList:
    """Experts one by one; those without tokens are not touched. Asks the device for the counts."""

    def __init__(self, experts: Sequence[MLP]) -> None:
        self.experts = tuple(experts)

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out, first = torch.empty_like(x), 0
        for expert, last in zip(self.experts, ends.tolist(), strict=True):
            if last > first:
                out[first:last] = expert(x[first:last])
                first = last
        return out


class StackedExperts:
    """All experts as one grouped product each way. gate_up [E, 2 · I, D], down [E, D, I], as they lie in memory."""

    def __init__(self, ops: Ops, gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> None:
        self._ops, self._activation = ops, activation
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        offsets = ends.to(torch.int32)
        inner = F.grouped_mm(x, self._gate_up.transpose(1, 2), offs=offsets)
        inner = self._ops.gated_activation(inner, self._activation)
        return F.grouped_mm(inner, self._down.transpose(1, 2), offs=offsets)

    @staticmethod
    def helps(device: torch.device) -> bool:
        """Whether asking this device for counts would stall it, and it has the grouped product."""
        return device.type == "cuda"

    @staticmethod
    def fits(dtype: torch.dtype, *sizes: int) -> bool:
        """Whether the grouped product takes weights with rows of these lengths: of 16 bytes each, in 16 bits."""
        return hasattr(F, "grouped_mm") and dtype == torch.bfloat16 and all(size % 8 == 0 for size in sizes)


class MixtureOfExperts:
    """See the module. router: [T, D] -> float32 logits [T, E]; shared: an expert for every token, with its gate."""

    def __init__(
        self,
        router: Linear,
        experts: Experts,
        num_experts: int,
        per_token: int,
        normalized: bool,
        shared: MLP | None = None,
        shared_router: Linear | None = None,
    ) -> None:
        self._router, self.experts = router, experts
        self._num_experts, self._per_token, self._normalized = num_experts, per_token, normalized
        self.shared, self._shared_router = shared, shared_router

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.route(x)
        ids, order = chosen.view(-1).sort(stable=True)
        ends = torch.searchsorted(ids, torch.arange(self._num_experts, device=x.device), right=True)
        outputs = self.experts(x[order // self._per_token], ends)
        back = torch.empty_like(outputs)
        back[order] = outputs
        total = _weighted_sum(back.view(len(x), self._per_token, -1), weights.to(x.dtype))
        if self.shared is None or self._shared_router is None:
            return total
        return total + self.shared(x) * _sigmoid(self._shared_router(x.float())).to(x.dtype)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight float32 [T, k] and number int64 [T, k] of each token's experts, most likely first."""
        probabilities = self._router(x.float()).softmax(-1)
        weights, chosen = probabilities.topk(self._per_token, dim=-1)
        if self._normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen


def _weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """outputs [T, k, D], weights [T, k] -> [T, D]. Term by term: a fused sum may round by the place in the batch."""
    total = outputs[:, 0] * weights[:, :1]
    for place in range(1, outputs.shape[1]):
        total = total + outputs[:, place] * weights[:, place : place + 1]
    return total


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """x [T, 1]. As a softmax over (x, 0), which is computed row by row: torch's sigmoid rounds by place in memory."""
    return torch.cat((x, torch.zeros_like(x)), dim=-1).softmax(-1)[:, :1]
