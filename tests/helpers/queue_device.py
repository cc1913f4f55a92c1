"""A CPU that claims to work through a queue: the GPU engine's own path, runner and graphs included, without a GPU.

A recorded graph is the function that was recorded, called again: it must find everything it needs in the memory it was
recorded with, and is refused a look at anything else by `replays_only` (see `StandInGraph`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from octavo import builder, device_setup
from octavo.devices import CpuDevice


class StandInGraph:
    """What was recorded, to be called again. Its arguments were bound when it was recorded, as a GPU's graph binds."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._run()


class QueueDevice(CpuDevice):
    """See the module. total, free: bytes that it claims to have."""

    is_asynchronous = True
    has_graphs = True

    def __init__(self, total: int = 64 << 30, free: int = 60 << 30, fails: bool = False) -> None:
        super().__init__()
        self.total, self.free, self.fails = total, free, fails
        self.graphs: list[StandInGraph] = []
        self.pinned_bytes = 0

    def total_bytes(self) -> int:
        return self.total

    def available_bytes(self) -> int:
        return self.free

    def pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        tensor = super().pinned(shape, dtype)
        self.pinned_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def capture(self, run: Callable[[], object], pool: Any = None) -> StandInGraph:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.graphs.append(StandInGraph(run))
        return self.graphs[-1]

    def graph_pool(self) -> Any:
        return self


@contextmanager
def standing_in(
    device: QueueDevice, record: tuple[str, ...] = ("native", "reference", "triton")
) -> Iterator[QueueDevice]:
    """Engines built inside run on `device`; backends named in `record` may be recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "find_device", lambda name: device)
        patch.setattr(device_setup, "RECORDABLE", record)
        yield device
