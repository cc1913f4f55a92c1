"""`TritonOps`: the dense operations of `kernels/ops.py` on a GPU: products by torch (cuBLAS), what lies between them by
the kernels of jit/. What is not overridden here is `TorchOps`.

Invariant: a row of a norm, a rotation or an activation depends on that row alone.
"""

from __future__ import annotations

import torch

from octavo.errors import ConfigError
from octavo.kernels.ops import TorchOps
from octavo.kernels.triton import write
from octavo.kernels.triton.jit.dense import GELU, GELU_TANH, RELU, SILU, gate_kernel, norm_kernel
from octavo.kernels.triton.tuning import next_power_of_two

GATE_BLOCK = 1024
KINDS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu": GELU, "relu": RELU}


class TritonOps(TorchOps):
    """See the module. Tensors lie on a GPU, or on the CPU in the interpreter."""

    name = "triton"

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] * rsqrt(mean(x^2) + eps) * weight [D]; float32 inside, x's dtype out."""
        flat = _as_rows(x)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self._norm(flat, flat, flat, out, weight, eps, added=False)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of the sum, residual + x). The sum replaces `residual` in place when that is contiguous."""
        if x.shape != residual.shape or x.dtype != residual.dtype:
            raise ConfigError(
                f"x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} differ"
            )
        total = residual.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows = _as_rows(total)
        self._norm(_as_rows(x), rows, rows, out, weight, eps, added=True)
        return out, total

    def _norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        total: torch.Tensor,
        out: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        added: bool,
    ) -> None:
        count, width = x.shape
        if not count:
            return
        block = next_power_of_two(width)
        norm_kernel[(count,)](
            x, residual, total, out, weight, x.stride(0), residual.stride(0), eps,
            WIDTH=width, D=block, ADDED=added, num_warps=min(16, max(1, block // 512)),
            enable_fp_fusion=True,
        )  # fmt: skip

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
        """Optional per-head RMS norm, then rotate halves of the first cos.shape[-1] numbers of each head."""
        return write.rotate(_headwise(q), _headwise(k), cos, sin, q_norm, k_norm, eps)

    def gated_activation(self, gate_up: torch.Tensor, kind: str) -> torch.Tensor:
        """gate_up [..., 2I] -> act(gate) * up [..., I]; kind: silu, gelu_tanh, gelu, relu."""
        if kind not in KINDS:
            raise ConfigError(f"activation {kind!r}: must be one of {', '.join(KINDS)}")
        flat, inner = _as_rows(gate_up), gate_up.shape[-1] // 2
        out = torch.empty((*gate_up.shape[:-1], inner), dtype=gate_up.dtype, device=gate_up.device)
        if len(flat):
            gate_kernel[(-(-inner // GATE_BLOCK), len(flat))](
                flat,
                out,
                flat.stride(0),
                INNER=inner,
                KIND=KINDS[kind],
                BLOCK=GATE_BLOCK,
                num_warps=4,
                enable_fp_fusion=True,
            )
        return out


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [rows, D] with contiguous rows; a view where the strides allow one."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _headwise(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, d] with each token's [H, d] contiguous; copied only if it is not."""
    return x if x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2]) else x.contiguous()
