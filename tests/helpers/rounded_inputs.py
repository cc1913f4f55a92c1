"""What native products over quantised weights do to their inputs, in torch: the definition they are tested against.

csrc/integer_rows.h and csrc/byte_rows.h: weights of eight bits meet inputs of 16 bits, a step per 256, narrower ones
inputs of 8 bits, a step per 32. Products with what this returns differ from the kernels' by float32's rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from octavo.core.weight_format import WeightFormat
from octavo.kernels.ops import DenseLinear, TorchOps
from octavo.kernels.quantized_weights import (
    JoinedLinear,
    QuantizedWeight,
    ReferenceQuantizedLinear,
    SizedLinear,
    concatenate,
    fusible,
)


def rounded_inputs(x: torch.Tensor, bits: int) -> torch.Tensor:
    """float32 x [..., in] -> float64, as it meets weights of `bits` bits."""
    size, levels = (256, 32767) if bits == 8 else (32, 127)
    columns = x.shape[-1]
    spans = F.pad(x.float(), (0, -columns % size)).unflatten(-1, (-1, size))
    largest = spans.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > 1e-30, torch.tensor(float(levels)) / largest, torch.zeros(()))
    codes = (spans * inverse).round()
    return (codes.double() * (largest / levels).double()).flatten(-2)[..., :columns]


class RoundedDense(DenseLinear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int) -> None:
        super().__init__(weight, bias)
        self._bits = bits

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(rounded_inputs(x, self._bits).to(x.dtype))


class RoundedQuantized(ReferenceQuantizedLinear):
    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._bits, self._inputs = weight.bits, weight.input_order

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._inputs is None:
            return super().__call__(rounded_inputs(x, self._bits).to(x.dtype))
        rounded = rounded_inputs(x.index_select(-1, self._inputs), self._bits).to(x.dtype)
        return super().__call__(torch.empty_like(x).index_copy_(-1, self._inputs, rounded))


class RoundedOps(TorchOps):
    """Torch, with inputs of products rounded as the native kernels round them.

    bits: of weights that come as floats here but quantised there; None: they are floats there too.
    """

    def __init__(self, bits: int | None = None) -> None:
        super().__init__()
        self._bits = bits

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, form: WeightFormat | None = None
    ) -> SizedLinear:
        return super().linear(weight, bias, form) if self._bits is None else RoundedDense(weight, bias, self._bits)

    def quantized_linear(self, parts: Sequence[QuantizedWeight], bias: torch.Tensor | None = None) -> SizedLinear:
        if fusible(parts):
            return RoundedQuantized(concatenate(parts), bias)
        offsets = [None] * len(parts) if bias is None else list(bias.split([p.out_features for p in parts]))
        return JoinedLinear([RoundedQuantized(p, b) for p, b in zip(parts, offsets, strict=True)])
