"""`NativeOps`: the dense operations of `kernels/ops.py` in C++, over weights packed once (linear.py).

Activations are float32 by default whatever the weights, because without 16-bit arithmetic units rounding them would
cost time as well as accuracy.

Invariant, bit for bit on one instruction set: a row of a result depends on that row of the input only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from octavo.core.weight_format import WeightFormat
from octavo.errors import ConfigError
from octavo.kernels.cpu.linear import LoadQueue, NativeLinear, as_rows
from octavo.kernels.cpu.loader import dtype_code, native
from octavo.kernels.ops import StoredRows
from octavo.kernels.quantized_weights import QuantizedWeight, SizedLinear

if TYPE_CHECKING:
    from octavo.kernels.layer_stack import LayerStack, StackParts

#: csrc/kernels.h: Activation
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class NativeOps:
    """`Ops` in C++. weight_dtype: what the weights will be; activations are `activation_dtype` (float32).

    layer_format: what matrices of layers become that are not quantised: `FIXED`, or None.
    """

    name = "native"

    def __init__(
        self,
        weight_dtype: torch.dtype = torch.float32,
        quantization: WeightFormat | None = None,
        layer_format: WeightFormat | None = None,
    ) -> None:
        if dtype_code(weight_dtype) is None:
            raise ConfigError(f"weights of {weight_dtype}: the native kernels take float32, bfloat16 or float16")
        self.weight_dtype, self.quantization, self.layer_format = weight_dtype, quantization, layer_format
        self.activation_dtype = torch.float32
        self._native = native()

    def linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, form: WeightFormat | None = None
    ) -> SizedLinear:
        """weight [out, in] is copied into panels; the caller may drop it. bias [out] is kept in float32."""
        if form is None and self.quantization is None:
            return NativeLinear(weight, bias)
        queue = LoadQueue()
        linear = self.queued_linear(queue, [weight], bias, form)
        queue.run(True)
        queue.check()
        return linear

    def quantized_linear(self, parts: Sequence[QuantizedWeight], bias: torch.Tensor | None = None) -> SizedLinear:
        """The product with quantised weights, one below the other."""
        from octavo.kernels.cpu.quantized import quantized_linear

        return quantized_linear(parts, bias)

    def load_queue(self) -> LoadQueue:
        """For `queued_linear`."""
        return LoadQueue()

    def can_load(self, kind: int, columns: int) -> bool:
        """Whether rows of `columns` numbers of GGUF's type `kind` can be packed as they are stored."""
        return bool(self._native.can_load(kind, columns))

    def queued_linear(
        self,
        queue: LoadQueue,
        parts: Sequence[StoredRows | torch.Tensor],
        bias: torch.Tensor | None = None,
        form: WeightFormat | None = None,
    ) -> SizedLinear:
        """As `linear` of the parts one below the other; filled by `queue.run`, straight from the file."""
        form = form or self.quantization
        if form is not None:
            from octavo.kernels.cpu.quantized import queued_linear

            return queued_linear(queue, parts, form, self.weight_dtype, bias)
        return NativeLinear.queued(queue, parts, self.weight_dtype, bias)

    def layer_stack(self, parts: StackParts) -> LayerStack | str:
        """All layers of a step in one call, or why these cannot be."""
        from octavo.kernels.cpu.stack import layer_stack

        return layer_stack(parts)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] * rsqrt(mean(x^2) + eps) * weight [D]; float32 inside, x's dtype out."""
        flat, weight = as_rows(x), _float(weight, x.shape[-1], "norm weight")
        out = torch.empty(x.shape, dtype=x.dtype)
        address, code = out.data_ptr(), _code(x)
        self._native.norm(flat.data_ptr(), flat.stride(0), 0, 0, address, *flat.shape, weight.data_ptr(), eps, code)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, residual + x). The sum replaces `residual` in place when that is contiguous."""
        if x.shape != residual.shape or x.dtype != residual.dtype:
            raise ConfigError(
                f"x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} differ"
            )
        flat, total, weight = as_rows(x), residual.contiguous(), _float(weight, x.shape[-1], "norm weight")
        out = torch.empty(x.shape, dtype=x.dtype)
        where = total.data_ptr()
        self._native.norm(
            flat.data_ptr(), flat.stride(0), where, where, out.data_ptr(), *flat.shape, weight.data_ptr(), eps, _code(x)
        )
        return out, total

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
        """Optional per-head RMS norm, then rotate halves: q [T, Hq, d], k [T, Hkv, d] (any token stride), d even."""
        if cos.shape[-1] < q.shape[-1]:
            return self._partial_rotary(q, k, cos, sin, q_norm, k_norm, eps)
        cos, sin = _float(cos, q.shape[-1], "cos"), _float(sin, q.shape[-1], "sin")
        if q_norm is None or k_norm is None:
            q_norm = k_norm = None
        return self._rotate(q, cos, sin, q_norm, eps), self._rotate(k, cos, sin, k_norm, eps)

    def _partial_rotary(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The first numbers of each head are rotated, the others copied."""
        if q_norm is not None and k_norm is not None:
            q, k = self.rms_norm(q, q_norm, eps), self.rms_norm(k, k_norm, eps)
        dim, turned = cos.shape[-1], []
        cos, sin = _float(cos, dim, "cos"), _float(sin, dim, "sin")
        for x in (q, k):
            part = self._rotate(x[..., :dim].contiguous(), cos, sin, None, eps)
            turned.append(torch.cat((part, x[..., dim:]), dim=-1))
        return turned[0], turned[1]

    def _rotate(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norm: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        tokens, heads, dim = x.shape
        if dim % 2 or cos.shape != (tokens, dim) or sin.shape != (tokens, dim):
            raise ConfigError(
                f"x {tuple(x.shape)} with cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: needed [T, d], d even"
            )
        if x.stride(2) != 1 or (x.stride(1) != dim and heads > 1):
            x = x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        weight = None if norm is None else _float(norm, dim, "norm weight")
        self._native.rotary(
            x.data_ptr(),
            x.stride(0),
            out.data_ptr(),
            tokens,
            heads,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            eps,
            _code(x),
        )
        return out

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """gate_up [..., 2I] -> act(gate) * up [..., I]; kind: silu, gelu_tanh, gelu (about 1e-7 relative)."""
        if kind == "relu":
            gate, up = gate_up.chunk(2, dim=-1)
            return F.relu(gate) * up
        if kind not in ACTIVATIONS:
            raise ConfigError(f"activation {kind!r}: must be one of relu, {', '.join(ACTIVATIONS)}")
        flat = as_rows(gate_up)
        inner = gate_up.shape[-1] // 2
        out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype)
        code = _code(gate_up)
        self._native.gate(
            flat.data_ptr(), flat.stride(0), out.data_ptr(), flat.shape[0], inner, ACTIVATIONS[kind], code
        )
        return out

    def activation(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        """x [..., I] -> act(x); kind: silu, gelu_tanh, gelu, relu.

        Through the gated form against ones: the library's own functions round a number by its place in memory.
        """
        if kind == "relu":
            return F.relu(x)
        wide = x.new_ones((*x.shape[:-1], 2 * x.shape[-1]))
        wide[..., : x.shape[-1]] = x
        return self.gated_activation(wide, kind)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Through torch, in float32, each row on its own; x's dtype out."""
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)

    def add_layer_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(layer norm of the sum, residual + x)."""
        total = residual + x
        return self.layer_norm(total, weight, bias, eps), total

    def dense_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
        """As `linear` of a weight that is never quantised."""
        return NativeLinear(weight, bias)

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [R, V] -> int64 [R]: the first index of each row's largest value (a NaN counts as largest)."""
        if x.dim() != 2 or x.dtype != torch.float32 or x.shape[1] == 0:
            raise ConfigError(f"argmax of {tuple(x.shape)} {x.dtype}: float32 [rows, values] is needed")
        flat = as_rows(x)
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._native.argmax(flat.data_ptr(), flat.stride(0), out.data_ptr(), *flat.shape)
        return out


def _float(x: torch.Tensor, last: int, what: str) -> torch.Tensor:
    if x.shape[-1] != last:
        raise ConfigError(f"{what} of shape {tuple(x.shape)}: its last dimension must be {last}")
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def _code(x: torch.Tensor) -> int:
    code = dtype_code(x.dtype)
    if code is None or x.device.type != "cpu":
        raise ConfigError(f"{x.dtype} on {x.device}: float32, bfloat16 or float16 on the CPU is needed")
    return code
