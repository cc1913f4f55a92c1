"""Native CPU kernels (C++), chosen when they are built and fit the model; else the torch path runs.

Importing this package loads neither torch nor the compiled module; the first question does. It knows no step and no
request. Environment: OCTAVO_ISA = portable | avx2 | avx512 | amx forces an instruction set (default: the best of the
processor that passes a check at start).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.core.weight_format import FIXED

if TYPE_CHECKING:
    import torch

    from octavo.core.weight_format import WeightFormat
    from octavo.host_room import Room
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
    "weights_in",
    "why_not_fixed_point",
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


def make_ops(dtype: torch.dtype, quantization: WeightFormat | None = None, fixed_point: bool | None = None) -> Ops:
    """Dense operations for weights of `dtype` on a CPU: `NativeOps`, or `TorchOps` when the kernels are not built.

    quantization: what the weights become. fixed_point: as `EngineConfig.fixed_point`; True where it cannot be done is
    as False (`why_not_fixed_point` says why).
    """
    from octavo.kernels.cpu.loader import problem

    if problem():
        from octavo.kernels.ops import TorchOps

        return TorchOps(quantization)
    from octavo.kernels.cpu.ops import NativeOps

    layers = FIXED if not why_not_fixed_point(dtype, fixed_point) else None
    return NativeOps(dtype, quantization, layers)


def why_not_fixed_point(dtype: torch.dtype, asked: bool | None = None) -> str:
    """Empty where `make_ops` keeps matrices of layers as fixed-point numbers; else why not.

    Asked for, it can be done wherever the native kernels run; not asked for, it is where it is faster: with AVX2. Wider
    vectors multiply floats as fast, and processors with AMX multiply bfloat16 itself.
    """
    from octavo.kernels.cpu.loader import problem

    if asked is False:
        return "as asked"
    if str(dtype) != "torch.bfloat16":
        return f"weights of {str(dtype).removeprefix('torch.')} would lose digits; it is for bfloat16"
    if problem():
        return "only the native CPU kernels can"
    found = instruction_set()
    return "" if asked or found == "avx2" else f"no faster than floats on {found}"


@contextmanager
def weights_in(room: Room) -> Iterator[None]:
    """Inside, weights that are packed take their memory from `room`; what is left of it is given back."""
    from octavo.kernels.cpu.loader import native, problem

    address, size = (0, 0) if problem() else room.take()
    if not size:
        yield
        return
    native().adopt_room(address, size)
    try:
        yield
    finally:
        native().leave_room()


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
