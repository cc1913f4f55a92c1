"""Triton kernels for GPUs (NVIDIA first), which also run in Triton's interpreter on CPU tensors.

Importing this package loads neither torch nor Triton; using it does. `attention.py` and `ops.py` stand behind the
interfaces of `kernels/`, `sampling.py` draws tokens; what runs on the device is under `jit/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.weight_format import WeightFormat
    from octavo.kernels.interface import KVCache
    from octavo.kernels.ops import Ops
    from octavo.kernels.triton.attention import TritonAttention as TritonAttention
    from octavo.kernels.triton.ops import TritonOps as TritonOps
    from octavo.models.spec import ModelSpec

__all__ = ["TritonAttention", "TritonOps", "make_ops", "supports", "why_unavailable", "why_unusable"]


def supports(cache: KVCache, spec: ModelSpec) -> bool:
    """Whether `TritonAttention(cache, spec)` can run."""
    return why_unavailable(cache, spec) == ""


def why_unavailable(cache: KVCache, spec: ModelSpec) -> str:
    """Empty when the kernels can serve this cache and model; else one sentence: what is missing."""
    if reason := why_unusable(cache.kv.device.type):
        return reason
    from octavo.kernels.triton.attention import mismatch

    return mismatch(cache, spec)


def why_unusable(device_kind: str) -> str:
    """Why no kernel can run on tensors of a kind of device (cpu, cuda, …); empty when they can."""
    from importlib.util import find_spec

    if find_spec("triton") is None:
        return "triton is not installed; install octavo[cuda]"
    if device_kind not in ("cpu", "cuda"):
        return f"Triton kernels do not run on {device_kind}"
    from octavo.kernels.triton.runtime import interpreting

    if device_kind == "cpu" and not interpreting():
        return "the tensors are on the CPU, where Triton kernels run in its interpreter only (set TRITON_INTERPRET=1)"
    return ""


def make_ops(quantization: WeightFormat | None = None) -> Ops:
    """Dense operations on a GPU. quantization: as `TorchOps` takes it."""
    from octavo.kernels.triton.ops import TritonOps

    return TritonOps(quantization)


def __getattr__(name: str) -> Any:
    if name == "TritonAttention":
        from octavo.kernels.triton.attention import TritonAttention

        return TritonAttention
    if name == "TritonOps":
        from octavo.kernels.triton.ops import TritonOps

        return TritonOps
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
