"""The dense operations of a decoder layer, behind one small interface.

`TorchOps` is the definition of right and runs anywhere; `kernels.cpu.NativeOps` is the same in C++. Weights are handed
over once, at load (`linear`), so that an implementation may repack them. Shapes: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from octavo.core.weight_format import WeightFormat
from octavo.errors import ConfigError
from octavo.kernels.quantized_weights import (
    Fp8Linear,
    QuantizedWeight,
    SizedLinear,
    quantize_rows,
    reference_linear,
)

__all__ = ["DenseLinear", "Linear", "Ops", "SizedLinear", "StoredRows", "TorchOps"]

Linear = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of a weight as a file holds them. kind: GGUF's type number; address: of the first row's first byte, in a map
    of the file that lives as long as `owner`. The pages may be dropped once they are read."""

    address: int
    kind: int
    rows: int
    columns: int
    owner: object


class Ops(Protocol):
    """Every method returns the dtype it was given unless stated; norms and activations compute in float32."""

    name: str

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, form: WeightFormat | None = None
    ) -> SizedLinear:
        """weight [out, in] (may be repacked or quantised; the caller drops its own reference), bias [out].

        form: what it is quantised to; None: as these operations do it for every weight, if they do.
        """
        ...

    def quantized_linear(self, parts: Sequence[QuantizedWeight], bias: torch.Tensor | None = None) -> SizedLinear:
        """The product with quantised weights, one below the other; bias [all outputs]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] * rsqrt(mean(x^2) + eps) * weight [D] (any offset is already in the weight)."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + x, and its norm: returns (norm, sum). May reuse `residual`'s memory."""
        ...

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Optional per-head RMS norm, then rotate halves. q [T, Hq, d], k [T, Hkv, d], cos/sin float32 [T, r].

        r is even and at most d: the first r numbers of a head are rotated, their halves against each other.
        """
        ...

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """gate_up [T, 2I] -> act(gate) * up [T, I]; kind: silu, gelu_tanh, gelu, relu."""
        ...

    def activation(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x [T, I] -> act(x); kind: silu, gelu_tanh, gelu, relu."""
        ...

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """(x - mean) * rsqrt(variance + eps) * weight + bias over the last dimension of x [..., D]."""
        ...

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """residual + x, and its layer norm: returns (norm, sum). May reuse `residual`'s memory."""
        ...

    def dense_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> SizedLinear:
        """As `linear`, but never quantised: for the few weights whose rounding decides something (routers)."""
        ...


class DenseLinear:
    """x [T, in] -> [T, out] by a weight as it is."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    @property
    def nbytes(self) -> int:
        """Bytes of the weight."""
        return self._weight.numel() * self._weight.element_size()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class TorchOps:
    """Plain torch; rounding follows the transformers implementations so that float32 greedy text is equal.

    quantization: what weights become when they are handed over; they are then dequantised at each product, some rows at
    a time, which saves memory and costs time.
    """

    name = "torch"

    def __init__(self, quantization: WeightFormat | None = None) -> None:
        if quantization is not None and quantization.kind == "gguf":
            raise ConfigError(
                "quantization='gguf' needs the native kernels (this run goes through torch): use "
                "attention_backend='auto' where they are built, or quantization='int8' or 'int4'"
            )
        self.quantization = quantization

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, form: WeightFormat | None = None
    ) -> SizedLinear:
        form = form or self.quantization
        if form is None:
            return DenseLinear(weight, bias)
        if form.kind == "fp8":
            return Fp8Linear(weight, bias)
        return reference_linear([quantize_rows(weight, form.kind, form.group_size)], bias)

    def quantized_linear(self, parts: Sequence[QuantizedWeight], bias: torch.Tensor | None = None) -> SizedLinear:
        return reference_linear(parts, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * weight.float()).to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activation(gate, kind) * up

    def activation(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "silu":
            return F.silu(x)
        if kind == "relu":
            return F.relu(x)
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight.float(), wide_bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.layer_norm(total, weight, bias, eps), total

    def dense_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> SizedLinear:
        return DenseLinear(weight, bias)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, d] * cos + rotate_half(x) * sin, cos/sin [T, r], r <= d (Su et al. 2021, half-split layout)."""
    rotated = cos.shape[-1]
    if rotated < x.shape[-1]:
        return torch.cat((_rotate(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)
    half = rotated // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None].to(x.dtype) + turned * sin[:, None].to(x.dtype)
