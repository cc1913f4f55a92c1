"""Devices: which there are, how much memory they have, and their streams, events, pinned memory and graphs.

The one place that asks `torch.cuda` (or another accelerator's module) anything; everybody else holds a `Device`. On a
CPU work is done when a call returns, so its streams and events are objects that do nothing and its graphs do not exist.
It does not know models, requests or blocks. Nothing here is decided: whoever asks decides.

Importing this module imports torch; the command line does so only inside the functions that need it.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from octavo.errors import ConfigError
from octavo.host_memory import available_cpu_bytes, peak_bytes_of, total_cpu_bytes
from octavo.npu_device import npu_available, open_npu

# Under names of their own: inside the classes below `torch` is a field.
TorchDevice = torch.device
DType = torch.dtype
Tensor = torch.Tensor
KINDS = ("cpu", "cuda", "npu")


class Event(Protocol):
    """A mark in a stream's work."""

    def record(self, stream: Any = None) -> None:
        """Mark what was queued so far (on the current stream, or on `stream`)."""
        ...

    def synchronize(self) -> None:
        """Wait on the host until everything before the mark is done. The interpreter lock is released meanwhile."""
        ...

    def query(self) -> bool:
        """Is everything before the mark done?"""
        ...

    def wait(self, stream: Any = None) -> None:
        """Let the (current) stream go on only when everything before the mark is done; the host does not wait."""
        ...


class Stream(Protocol):
    """A queue of work on a device."""

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class Graph(Protocol):
    """A recorded run of kernels. `replay` queues all of them at once; they read and write the same memory each time."""

    def replay(self) -> None: ...


class Device(Protocol):
    """One device.

    kind: "cpu", "cuda" or "npu". torch: its torch.device. name: as its maker calls it. has_graphs: whether `capture`
    works. is_asynchronous: whether a call may return before its work is done, so that the host can prepare the next
    step meanwhile.
    """

    kind: str
    torch: TorchDevice
    name: str
    has_graphs: bool
    is_asynchronous: bool

    def total_bytes(self) -> int:
        """Memory of the device (of the host, for the CPU)."""
        ...

    def available_bytes(self) -> int:
        """Bytes that can be allocated now, whoever uses the rest."""
        ...

    def held_bytes(self) -> int:
        """Bytes this process holds on it as torch counts them, caches included; 0 on the CPU, where nobody counts."""
        ...

    def supports_bfloat16(self) -> bool:
        """Does it multiply bfloat16 natively?"""
        ...

    def supports_float8(self) -> bool:
        """Does it convert and multiply 8-bit floats natively?"""
        ...

    def synchronize(self) -> None:
        """Wait until all its work is done."""
        ...

    def release_cached(self) -> None:
        """Give memory that the allocator keeps for later back to the device."""
        ...

    def peak_bytes_of(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at its height above what was held before it."""
        ...

    def stream(self) -> Stream:
        """A new stream."""
        ...

    def current_stream(self) -> Stream:
        """The stream that work is queued on at present."""
        ...

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue what is called inside on `stream`."""
        ...

    def event(self) -> Event:
        """A new event without timing."""
        ...

    def pinned(self, shape: tuple[int, ...] | int, dtype: DType) -> Tensor:
        """An uninitialised host tensor that copies to and from the device can read while the host goes on."""
        ...

    def capture(self, run: Callable[[], object], pool: Any = None) -> Graph:
        """Record the kernels that `run` queues. Graphs of one `pool` share scratch memory, so never replay them at
        the same time. Raises RuntimeError where there are no graphs."""
        ...

    def graph_pool(self) -> Any:
        """A handle for `capture`."""
        ...


class _Nothing:
    """Event and stream of a device whose calls return when their work is done."""

    def record(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...


class CpuDevice:
    """The processor torch runs on."""

    kind = "cpu"
    has_graphs = False
    is_asynchronous = False

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self.name = platform.processor() or platform.machine()

    def total_bytes(self) -> int:
        return total_cpu_bytes()

    def available_bytes(self) -> int:
        return available_cpu_bytes()

    def held_bytes(self) -> int:
        return 0

    def supports_bfloat16(self) -> bool:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())

    def supports_float8(self) -> bool:
        return False

    def synchronize(self) -> None: ...

    def release_cached(self) -> None: ...

    def peak_bytes_of(self, run: Callable[[], object]) -> int:
        return peak_bytes_of(run)

    def stream(self) -> Stream:
        return _Nothing()

    def current_stream(self) -> Stream:
        return _Nothing()

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def event(self) -> Event:
        return _Nothing()

    def pinned(self, shape: tuple[int, ...] | int, dtype: DType) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    def capture(self, run: Callable[[], object], pool: Any = None) -> Graph:
        raise RuntimeError("a CPU has no graphs: its calls have run when they return")

    def graph_pool(self) -> Any:
        return None


class CudaDevice:
    """A GPU that torch reaches through its CUDA module (NVIDIA; ROCm builds answer to the same names)."""

    kind = "cuda"
    has_graphs = True
    is_asynchronous = True

    def __init__(self, index: int | None = None) -> None:
        self.torch = torch.device("cuda") if index is None else torch.device("cuda", index)
        self.name = str(torch.cuda.get_device_name(self.torch))

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[1])

    def available_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[0])

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_reserved(self.torch))

    def supports_bfloat16(self) -> bool:
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))

    def supports_float8(self) -> bool:
        return tuple(torch.cuda.get_device_capability(self.torch)) >= (8, 9)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def peak_bytes_of(self, run: Callable[[], object]) -> int:
        """The caching allocator's own high-water mark: what `run` asked for, whatever others do on the device."""
        self.synchronize()
        self.release_cached()
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = int(torch.cuda.memory_allocated(self.torch))
        run()
        self.synchronize()
        return max(0, int(torch.cuda.max_memory_allocated(self.torch)) - before)

    def stream(self) -> Stream:
        stream: Stream = torch.cuda.Stream(self.torch)
        return stream

    def current_stream(self) -> Stream:
        stream: Stream = torch.cuda.current_stream(self.torch)
        return stream

    def use(self, stream: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return context

    def event(self) -> Event:
        # blocking: a waiting thread sleeps and leaves its core to the one that prepares the next step.
        event: Event = torch.cuda.Event(blocking=True)
        return event

    def pinned(self, shape: tuple[int, ...] | int, dtype: DType) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, run: Callable[[], object], pool: Any = None) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may copy and allocate while this one records.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            run()
        captured: Graph = graph
        return captured

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()


def find_device(name: str = "auto") -> Device:
    """A device by name: "auto" (the accelerator there is, else the CPU), "cpu", "cuda", "cuda:1", "npu" or "npu:1".

    Raises `ConfigError` when torch does not see the device that was asked for.
    """
    kind, _, number = name.partition(":")
    if kind not in ("auto", *KINDS) or (number and (kind in ("auto", "cpu") or not number.isdecimal())):
        raise ConfigError(f"device={name!r}: must be auto, cpu, cuda or npu, or cuda:1 for the second of its kind")
    index = int(number) if number else None
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return _cuda(name, index)
    if kind == "npu" or (kind == "auto" and npu_available()):
        return open_npu(name, index)
    return CpuDevice()


def device_of(where: TorchDevice | str | Device) -> Device:
    """The device that a torch.device or a name stands for; a `Device` is itself."""
    if isinstance(where, torch.device):
        return find_device(str(where) if where.index is not None else where.type)
    return find_device(where) if isinstance(where, str) else where


def _cuda(name: str, index: int | None) -> Device:
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={name!r}: torch sees no CUDA device; use device='cpu', or install a CUDA build of torch"
        )
    if index is not None and index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device={name!r}: torch sees {count} CUDA device(s), numbered from 0")
    return CudaDevice(index)
