"""`NpuDevice`: an Ascend NPU, reached through torch_npu (Ascend Extension for PyTorch), torch's device "npu".

`torch_npu.npu` offers the names of `torch.cuda` for memory, streams and events. Importing torch_npu takes seconds and
needs the CANN libraries, so it happens at the first question for such a device; every way that can fail becomes a
`ConfigError` with the remedy. It does not know attention: the operators are called in `kernels/ascend.py`.

Written to the documentation of torch_npu; never run on a device so far (docs/hardware.md).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.devices import Event, Graph, Stream

# Under names of their own: inside the class `torch` is a field.
DType = torch.dtype
Tensor = torch.Tensor

INSTALL = "pip install 'octavo[ascend]', with the torch_npu release that belongs to your torch and CANN"


def has_torch_npu() -> bool:
    """Is torch_npu installed? (It is not imported for that.)"""
    return "torch_npu" in sys.modules or importlib.util.find_spec("torch_npu") is not None


def load_torch_npu() -> Any:
    """The module torch_npu. Raises `ConfigError` when it is missing or its libraries cannot be loaded."""
    if not has_torch_npu():
        raise ConfigError(f"device='npu': torch_npu is not installed; {INSTALL}, or use device='cpu'")
    try:
        return importlib.import_module("torch_npu")
    # A wrong release pair ends in ImportError, missing CANN libraries in OSError or RuntimeError.
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"device='npu': torch_npu is installed but cannot be loaded ({error}); run CANN's set_env.sh in this "
            f"shell, and check that torch {torch.__version__} and torch_npu are releases of the same number"
        ) from error


def npu_available() -> bool:
    """Is there an NPU that "auto" may choose? False where torch_npu is missing, broken or sees none."""
    if not has_torch_npu():
        return False
    try:
        return bool(load_torch_npu().npu.is_available())
    except ConfigError:
        return False


def open_npu(name: str, index: int | None) -> NpuDevice:
    """The NPU called `name` ("npu", or "npu:1" with index 1). Raises `ConfigError` where there is none."""
    npu = load_torch_npu().npu
    if not npu.is_available():
        raise ConfigError(
            f"device={name!r}: torch_npu sees no NPU (npu-smi info lists those of the driver; "
            "ASCEND_RT_VISIBLE_DEVICES hides the others); use device='cpu'"
        )
    if index is not None and index >= (count := npu.device_count()):
        raise ConfigError(f"device={name!r}: torch_npu sees {count} NPU(s), numbered from 0")
    return NpuDevice(index)


class NpuDevice:
    """An Ascend NPU. No graphs: the attention operator takes the lengths of a step as numbers of the host."""

    kind = "npu"
    has_graphs = False
    is_asynchronous = True

    def __init__(self, index: int | None = None) -> None:
        self._npu = load_torch_npu().npu
        self.torch = torch.device("npu") if index is None else torch.device("npu", index)
        self.name = str(self._npu.get_device_name(self.torch))

    def total_bytes(self) -> int:
        return int(self._npu.mem_get_info(self.torch)[1])

    def available_bytes(self) -> int:
        return int(self._npu.mem_get_info(self.torch)[0])

    def held_bytes(self) -> int:
        return int(self._npu.memory_reserved(self.torch))

    def supports_bfloat16(self) -> bool:
        return bool(self._npu.is_bf16_supported())

    def supports_float8(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._npu.synchronize(self.torch)

    def release_cached(self) -> None:
        self._npu.empty_cache()

    def peak_bytes_of(self, run: Callable[[], object]) -> int:
        """The caching allocator's own high-water mark, as on a GPU."""
        self.synchronize()
        self.release_cached()
        self._npu.reset_peak_memory_stats(self.torch)
        before = int(self._npu.memory_allocated(self.torch))
        run()
        self.synchronize()
        return max(0, int(self._npu.max_memory_allocated(self.torch)) - before)

    def stream(self) -> Stream:
        stream: Stream = self._npu.Stream(self.torch)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = self._npu.current_stream(self.torch)
        return stream

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._npu.stream(stream)
        return context

    def event(self) -> Event:
        event: Event = self._npu.Event()
        return event

    def pinned(self, shape: tuple[int, ...] | int, dtype: DType) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, run: Callable[[], object], pool: Any = None) -> Graph:
        raise RuntimeError("graphs are not used on an NPU: the attention operator takes the lengths from the host")

    def graph_pool(self) -> Any:
        return None
