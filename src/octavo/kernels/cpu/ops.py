"""`NativeOps`: the dense operations of `kernels/ops.py` in C++, over weights packed once.

Weights keep their dtype (bfloat16 and float16 are widened inside the product, which halves the bytes a token costs);
activations are float32 by default whatever the weights, because without 16-bit arithmetic units rounding them would
cost time as well as accuracy.

Invariant, bit for bit on one instruction set: a row of a result depends on that row of the input only. In `linear`
every output is the sum, in order, of chains of fused multiply-adds over 256 inputs each, whatever the number of rows or
threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from octavo.core.weight_format import WeightFormat
from octavo.errors import ConfigError
from octavo.kernels.cpu.loader import dtype_code, native
from octavo.kernels.ops import StoredRows
from octavo.kernels.quantized_weights import QuantizedWeight, SizedLinear

if TYPE_CHECKING:
    from octavo.kernels.cpu.quantized import Panels
    from octavo.kernels.layer_stack import LayerStack, StackParts

#: GGUF's numbers of the plain types
_KINDS_OF_TENSORS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}
#: csrc/kernels.h: Activation
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}


class NativeLinear:
    """x [..., in] -> [..., out] in x's dtype (float32, bfloat16 or float16); sums in float32.

    Holds a packed copy of the weight and nothing else; `rows` reads single rows back, exactly, so that a tied
    embedding needs no second copy.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        code = dtype_code(weight.dtype)
        if weight.dim() != 2 or code is None or weight.device.type != "cpu" or 0 in weight.shape:
            raise ConfigError(
                f"a weight of shape {tuple(weight.shape)}, {weight.dtype} on {weight.device}: a non-empty [out, in] of "
                "float32, bfloat16 or float16 on the CPU is needed"
            )
        self._prepare(weight.shape[0], weight.shape[1], weight.dtype, bias)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._packed.pack(weight.data_ptr(), weight.stride(0))

    def _prepare(
        self, rows: int, columns: int, dtype: torch.dtype, bias: torch.Tensor | None, panels: Panels | None = None
    ) -> None:
        """Room for the panels: of `dtype`, or quantised ones."""
        if bias is not None and bias.shape != (rows,):
            raise ConfigError(f"a bias of shape {tuple(bias.shape)} for {rows} outputs")
        self.out_features, self.in_features = rows, columns
        self._bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self._packed: Any
        if panels is None:
            self._packed = native().PackedWeight(dtype_code(dtype), rows, columns)
        else:
            self._packed = panels.packed(rows, columns)

    @classmethod
    def queued(
        cls,
        queue: LoadQueue,
        parts: Sequence[StoredRows | torch.Tensor],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        panels: Panels | None = None,
    ) -> NativeLinear:
        """A weight of `parts`, one below the other, that is filled when `queue` runs; not to be used before.

        panels: quantised ones, where it is not to be kept in `dtype`.
        """
        columns = parts[0].columns if isinstance(parts[0], StoredRows) else parts[0].shape[1]
        rows = sum(part.rows if isinstance(part, StoredRows) else part.shape[0] for part in parts)
        linear = cls.__new__(cls)
        linear._prepare(rows, columns, dtype, bias, panels)
        first = 0
        for part in parts:
            first += queue.add(linear._packed, part, first)
        return linear

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return int(self._packed.bytes)

    @property
    def native_parts(self) -> tuple[Any, int]:
        """The packed weight, and the address of the bias (0: none), which lives as long as this object."""
        return self._packed, self._bias_address

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat, code = self._input(x)
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        rows = flat.shape[0]
        if rows:
            self._packed.run(flat.data_ptr(), code, flat.stride(0), rows, out.data_ptr(), code, self._bias_address)
        return out

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, in] -> first index int64 [N] and value float32 [N] of each row's largest output (a NaN is largest).

        The same sums as calling it, but the outputs are never stored: for 64 rows of a vocabulary of 262,144 that is
        64 MiB less to write and to read again.
        """
        flat, code = self._input(x)
        rows = flat.shape[0]
        ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        if rows:
            self._packed.argmax(
                flat.data_ptr(), code, flat.stride(0), rows, ids.data_ptr(), values.data_ptr(), self._bias_address
            )
        return ids, values

    def _input(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        code = dtype_code(x.dtype)
        if x.shape[-1] != self.in_features or code is None or x.device.type != "cpu":
            raise ConfigError(
                f"an input of shape {tuple(x.shape)}, {x.dtype} on {x.device}: {self.in_features} features of float32, "
                "bfloat16 or float16 on the CPU are needed"
            )
        return _as_rows(x), code

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `ids` (int64 [n]) of the weight as [n, in], converted to `dtype`. IndexError outside [0, out)."""
        code = dtype_code(dtype)
        if code is None:
            raise ConfigError(f"rows in {dtype}: float32, bfloat16 or float16 is needed")
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.in_features), dtype=dtype)
        self._packed.rows(ids.data_ptr(), ids.numel(), out.data_ptr(), code)
        return out


class LoadQueue:
    """Weights on their way from files into panels, see csrc/loading.h. Fill it, then run it; several threads may."""

    def __init__(self) -> None:
        self._native = native().LoadQueue()
        self._owners: list[object] = []

    def add(self, packed: object, part: StoredRows | torch.Tensor, first: int) -> int:
        """Put the rows of `part` at row `first` of a packed weight; returns how many rows that is."""
        if isinstance(part, StoredRows):
            self._owners.append(part.owner)
            self._native.add(packed, part.address, part.kind, first, part.rows, True)
            return part.rows
        part = part.contiguous()
        self._owners.append(part)
        self._native.add(packed, part.data_ptr(), _KINDS_OF_TENSORS[part.dtype], first, part.shape[0], False)
        return int(part.shape[0])

    def run(self, threaded: bool, share: float = 1.0) -> None:
        """Until nothing is left to begin, without the interpreter lock. threaded: on all threads, else the caller's.

        share: stop once this part of the bytes is done. What another thread has begun may still be under way when
        this returns.
        """
        self._native.run(threaded, share)

    def check(self) -> None:
        """Raise ConfigError if a weight could not be quantised."""
        if not self._native.finite:
            raise ConfigError(
                "the model's weights hold numbers that are not finite (infinities or NaN); they cannot be quantised"
            )

    @property
    def done(self) -> int:
        """Bytes of the files that are read."""
        return int(self._native.done)


class NativeOps:
    """`Ops` in C++. weight_dtype: what the weights will be; activations are `activation_dtype` (float32)."""

    name = "native"

    def __init__(self, weight_dtype: torch.dtype = torch.float32, quantization: WeightFormat | None = None) -> None:
        if dtype_code(weight_dtype) is None:
            raise ConfigError(f"weights of {weight_dtype}: the native kernels take float32, bfloat16 or float16")
        self.weight_dtype, self.quantization = weight_dtype, quantization
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
        flat, weight = _as_rows(x), _float(weight, x.shape[-1], "norm weight")
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
        flat, total, weight = _as_rows(x), residual.contiguous(), _float(weight, x.shape[-1], "norm weight")
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
        flat = _as_rows(gate_up)
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
        flat = _as_rows(x)
        out = torch.empty(x.shape[0], dtype=torch.int64)
        self._native.argmax(flat.data_ptr(), flat.stride(0), out.data_ptr(), *flat.shape)
        return out


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [rows, D] with contiguous rows; a view where the strides allow one."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _float(x: torch.Tensor, last: int, what: str) -> torch.Tensor:
    if x.shape[-1] != last:
        raise ConfigError(f"{what} of shape {tuple(x.shape)}: its last dimension must be {last}")
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def _code(x: torch.Tensor) -> int:
    code = dtype_code(x.dtype)
    if code is None or x.device.type != "cpu":
        raise ConfigError(f"{x.dtype} on {x.device}: float32, bfloat16 or float16 on the CPU is needed")
    return code
