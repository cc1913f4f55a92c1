"""A torch device "npu" that computes on the CPU, and refuses what an accelerator would refuse.

Torch keeps a place for a device that is no part of it and lets Python fill it. Here a tensor on "npu" is a shell around
a CPU tensor: every operator called on it is done on the inner tensors and its results are put into shells again. So the
engine runs with `torch.device("npu")` from end to end, and

- a tensor of the CPU and one of the device in one operator are an error (copies and 0-d numbers excepted),
- `numpy()` of a device tensor is an error; `tolist()`, `item()` and `cpu()` are the ways back,
- memory that is not written first reads as NaN (`empty`, `empty_like`, `new_empty` of floating types).

The device cannot be taken out of a process again once it is registered, but without the fake torch_npu (see
`ascend_emulation.py`) nothing of the package can see it, and torch is told that it is not there (`visible`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

_EMPTY = {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
_MOVES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::set_"}
_libraries: list[torch.library.Library] = []
visible = False  # what torch is told of the device's presence


class NpuTensor(torch.Tensor):
    """A tensor of the device. `inner`: the same sizes and strides on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> NpuTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="npu:0", requires_grad=False,
        )  # fmt: skip

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"NpuTensor({self.inner})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name
    shells: dict[int, NpuTensor] = {}

    def bare(value: Any) -> Any:
        if isinstance(value, NpuTensor):
            shells[id(value.inner)] = value
            return value.inner
        return value

    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name not in _MOVES:
        for tensor in tensors:
            if not isinstance(tensor, NpuTensor) and tensor.dim():
                raise RuntimeError(f"{name}: a tensor of {tensor.device} {tuple(tensor.shape)} among tensors of npu:0")
    kwargs = dict(kwargs)
    asked = kwargs.get("device")
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    result = func(*tree_map(bare, args), **tree_map(bare, kwargs))
    if name in _EMPTY and result.is_floating_point():
        result.fill_(float("nan"))
    if asked is not None and torch.device(asked).type == "cpu":
        return result
    if name == "aten::copy_":
        return args[0]

    for shell_of in shells.values():
        if shell_of.shape != shell_of.inner.shape:  # a shell's sizes are fixed when it is made
            raise RuntimeError(f"{name}: resizing a tensor of the device is not emulated")

    def shell(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in shells:
            return shells[id(value)]
        with torch.inference_mode(False):  # or a view of a tensor from outside of that mode could not be made inside
            return NpuTensor(value)

    return tree_map(shell, result)


def _run_without_shells(func: Any, *args: Any, **kwargs: Any) -> Any:
    return _run(func, args, kwargs)


_torch_tensor = torch.tensor


def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """`torch.tensor`, which cannot build a shell itself: made on the CPU, then moved."""
    made = _torch_tensor(data, **kwargs)
    return made if device is None else made.to(device)


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return visible

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, device_index: int) -> bool:
        return True


class _Module:
    """What torch asks of `torch.npu` itself. It has no generators: the package draws its noise on the host."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return visible

    def device_count(self) -> int:
        return int(visible)

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None: ...


def register() -> None:
    """Give torch the device "npu", once in a process."""
    if _libraries:
        return
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename="npu", hook=_Hooks(), backend_module=_Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    # Operators without a tensor among their arguments (zeros, …) do not reach __torch_dispatch__.
    every.fallback(_run_without_shells, "PrivateUse1")
    for overload in ("default", "start", "start_step"):  # torch would make an empty tensor and resize it
        name = "arange" if overload == "default" else f"arange.{overload}"
        aten.impl(name, partial(_run_without_shells, getattr(torch.ops.aten.arange, overload)), "PrivateUse1")
    _libraries.extend((every, aten))
