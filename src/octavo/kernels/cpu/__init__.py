"""Native CPU kernels (C++), chosen when they are built and fit the model; else the torch path runs.

Importing this package loads neither torch nor the compiled module; the first question does. It knows no step and no
request. Environment: OCTAVO_ISA = portable | avx2 | avx512 | amx forces an instruction set (default: the best of the
processor that passes a check at start).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from octavo.core.weight_format import WeightFormat
    from octavo.kernels.cpu.attention import NativeAttention as NativeAttention
    from octavo.kernels.cpu.ops import NativeOps as NativeOps
    from octavo.kernels.cpu.sampling import NativeSampling as NativeSampling
    from octavo.kernels.interface import KVCache
    from octavo.kernels.ops import Ops
    from octavo.models.spec import ModelSpec

__all__ = [
    "NativeAttention",
    "NativeOps",
    "NativeSampling",
    "advise_huge_pages",
    "instruction_set",
    "make_ops",
    "make_sampling",
    "supports",
    "why_unavailable",
]


def supports(cache: KVCache, spec: ModelSpec) -> bool:
    """Whether `NativeAttention(cache, spec)` can run: built, on a CPU, and a layout the kernels handle."""
    return why_unavailable(cache, spec) == ""


def why_unavailable(cache: KVCache | None = None, spec: ModelSpec | None = None) -> str:
    """Empty when the native kernels can run; else one sentence: what is missing and what that costs.

    Without arguments: whether they are built at all, which is all that `make_ops` needs.
    """
    from octavo.kernels.cpu.loader import problem

    reason = problem()
    if not reason and cache is not None and spec is not None:
        from octavo.kernels.cpu.attention import mismatch

        reason = mismatch(cache, spec)
    return reason


def instruction_set() -> str:
    """The instruction set in use: "amx", "avx512", "avx2" or "portable"; "" when the kernels are not built."""
    from octavo.kernels.cpu.loader import native, problem

    return "" if problem() else str(native().in_use())


def make_ops(dtype: torch.dtype, quantization: WeightFormat | None = None) -> Ops:
    """Dense operations for weights of `dtype` on a CPU: `NativeOps`, or `TorchOps` when the kernels are not built.

    quantization: what the weights become.
    """
    from octavo.kernels.cpu.loader import problem

    if problem():
        from octavo.kernels.ops import TorchOps

        return TorchOps(quantization)
    from octavo.kernels.cpu.ops import NativeOps

    return NativeOps(dtype, quantization)


def make_sampling(vocab_size: int) -> NativeSampling | None:
    """Native sampling from rows of `vocab_size` logits; None when the kernels are not built (NumPy then does it)."""
    from octavo.kernels.cpu.loader import problem

    if problem():
        return None
    from octavo.kernels.cpu.sampling import NativeSampling

    return NativeSampling(vocab_size)


def __getattr__(name: str) -> Any:
    if name == "NativeAttention":
        from octavo.kernels.cpu.attention import NativeAttention

        return NativeAttention
    if name == "NativeOps":
        from octavo.kernels.cpu.ops import NativeOps

        return NativeOps
    if name == "NativeSampling":
        from octavo.kernels.cpu.sampling import NativeSampling

        return NativeSampling
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
