"""Weights on their way to a device: through two page-locked buffers, one being filled while the other is copied.

A mapped file's pages are ordinary memory, from which a device copies only through a hidden buffer and with the host
waiting. Here reading the file and the copy overlap, and no tensor exists on the host as a whole. The dtype is changed
on the device. Knows neither models nor names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from octavo.devices import Device

CHUNK_BYTES = 64 << 20
BUFFERS = 2


class StagedWeights(Mapping[str, torch.Tensor]):
    """`weights` with every tensor on `device`. What else they offer (`stored`, `quantized`, …) is passed through."""

    def __init__(self, weights: Mapping[str, torch.Tensor], device: Device, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._weights = weights
        self._device = device
        self._chunk = chunk_bytes
        self._buffers: list[torch.Tensor] = []  # made when the first tensor comes
        self._copied = [device.event() for _ in range(BUFFERS)]
        self._turn = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.move(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __getattr__(self, name: str) -> Any:
        if name == "_weights":
            raise AttributeError(name)
        return getattr(self._weights, name)

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device, in its own dtype; the copy may still be under way there."""
        where = self._device.torch
        if tensor.device.type == where.type and where.type != "cpu":
            return tensor
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=where)
        flat, source = target.view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        if not self._buffers:
            self._buffers = [self._device.pinned(self._chunk, torch.uint8) for _ in range(BUFFERS)]
        for first in range(0, source.numel(), self._chunk):
            part = source[first : first + self._chunk]
            turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
            self._copied[turn].synchronize()
            staged = self._buffers[turn][: part.numel()]
            staged.copy_(part)
            flat[first : first + part.numel()].copy_(staged, non_blocking=True)
            self._copied[turn].record()
        return target
