"""What a step brings to its device: one pinned buffer, one copy, and block tables that are only told what changed.

`Staging` packs arrays into page-locked host memory and queues one copy; the views it returns lie at places that follow
from the arrays' sizes alone, so a recorded graph finds the next step's inputs where it found the last one's. The host
buffers take turns: one is written while the copy from another may still be under way.

`DeviceTables` holds every live sequence's block tables, and the token it drew last, in a slot that the sequence keeps
for life. Entries arrive as differences; nothing is ever rebuilt. Order makes all of it safe: everything is queued on
one stream, so an update overtakes no step that still reads the old entries. Neither class waits for the device, except
for a copy that was queued several steps ago.

They do not know requests, models or who owns a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.devices import Device
from octavo.errors import InternalError

ALIGNMENT = 16  # bytes: what any kernel may want of a pointer
CHANGES = 1 << 15  # table entries that travel with one step's inputs; more go ahead in copies of their own
BUFFERS = 3  # host buffers that take turns: one being written, up to two being copied

Array = npt.NDArray[Any]


def packed_bytes(arrays: Sequence[tuple[int, int]]) -> int:
    """Bytes that arrays of (count, item size) take together."""
    return sum(_aligned(count * size) for count, size in arrays)


def input_bytes(max_tokens: int, max_rows: int, groups: int) -> int:
    """The most that the inputs of a step can take; a graph may pad rows to the next bucket."""
    tokens = [(max_tokens + max_rows, 8)] * (2 + groups)
    rows = [(2 * max_rows + 1, 8)] * 14
    return packed_bytes([*tokens, *rows, (CHANGES, 8), (CHANGES, 4)])


def padded(array: npt.NDArray[Any], size: int, value: int) -> npt.NDArray[Any]:
    """`array` and as many times `value` behind it as make `size`."""
    out = np.full(size, value, dtype=array.dtype)
    out[: len(array)] = array
    return out


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Staging:
    """Sends arrays of at most `capacity` bytes together to `device`, one copy per `send`."""

    def __init__(self, device: Device, capacity: int) -> None:
        self.capacity = _aligned(capacity)
        self.num_copies = 0
        self._device = device
        self._host = [device.pinned(self.capacity, torch.uint8) for _ in range(BUFFERS)]
        self._bytes: list[npt.NDArray[np.uint8]] = [buffer.numpy() for buffer in self._host]
        self._copied = [device.event() for _ in range(BUFFERS)]
        self._buffer = torch.empty(self.capacity, dtype=torch.uint8, device=device.torch)
        self._turn = 0

    def send(self, arrays: Sequence[Array]) -> list[torch.Tensor]:
        """Views on the device, valid until the next `send` takes effect there. Raises `InternalError` if too large."""
        turn, self._turn = self._turn, (self._turn + 1) % BUFFERS
        self._copied[turn].synchronize()  # queued BUFFERS sends ago: in a running engine this has long happened
        places, end = [], 0
        target = self._bytes[turn]
        for array in arrays:
            size = array.nbytes
            if end + size > self.capacity:
                raise InternalError(f"the inputs of a step take more than the {self.capacity} bytes kept for them")
            target[end : end + size] = array.reshape(-1).view(np.uint8)
            places.append((end, size, array.dtype))
            end += _aligned(size)
        self._buffer[:end].copy_(self._host[turn][:end], non_blocking=True)
        self._copied[turn].record()
        self.num_copies += 1
        return [self._view(first, size, kind) for first, size, kind in places]

    def _view(self, first: int, size: int, kind: np.dtype[Any]) -> torch.Tensor:
        return self._buffer[first : first + size].view(_TORCH[kind.name])


_TORCH = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float64": torch.float64,
    "float32": torch.float32,
    "uint8": torch.uint8,
}


class DeviceTables:
    """Slots for `capacity` sequences: block tables of `num_groups` groups, and last tokens.

    tables: int32 [num_groups, capacity + 1, max_blocks]. last_tokens: int64 [capacity + 1]. The last slot belongs to
    nobody: rows that only fill a batch up to a graph's size read and write it; its table holds `spare_block`.
    """

    def __init__(self, device: Device, num_groups: int, capacity: int, max_blocks: int, spare_block: int) -> None:
        self.capacity = capacity
        self.max_blocks = max_blocks
        self.spare_block = spare_block
        self.generation = 0  # raised when the tensors are replaced: whoever holds on to the old ones must let go
        self._device = device
        self._groups = num_groups
        self.tables, self.last_tokens = self._allocate(capacity)
        self._free = list(range(capacity - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._places: list[npt.NDArray[np.int64]] = []
        self._values: list[npt.NDArray[np.int32]] = []
        self.pending = 0  # entries not sent yet

    def _allocate(self, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self._groups, capacity + 1, self.max_blocks)
        tables = torch.zeros(shape, dtype=torch.int32, device=self._device.torch)
        tables[:, capacity] = self.spare_block
        return tables, torch.zeros(capacity + 1, dtype=torch.int64, device=self._device.torch)

    @property
    def spare_slot(self) -> int:
        """The slot that belongs to nobody."""
        return self.capacity

    def open(self, seq_id: int) -> int:
        """A slot for a new sequence. Its entries are whatever was there; only what it writes is ever read."""
        if not self._free:
            self._grow()
        slot = self._slots[seq_id] = self._free.pop()
        return slot

    def close(self, seq_id: int) -> None:
        """The sequence's slot can be had again; harmless for one that has none."""
        slot = self._slots.pop(seq_id, None)
        if slot is not None:
            self._free.append(slot)

    def slot(self, seq_id: int) -> int:
        return self._slots[seq_id]

    def __len__(self) -> int:
        return len(self._slots)

    def note(self, seq_id: int, group: int, first: int, block_ids: Sequence[int]) -> None:
        """Entries `first`, `first + 1`, … of a table have changed; they travel with the next step's inputs."""
        begin = (group * (self.capacity + 1) + self._slots[seq_id]) * self.max_blocks + first
        self._places.append(np.arange(begin, begin + len(block_ids), dtype=np.int64))
        self._values.append(np.asarray(block_ids, dtype=np.int32))
        self.pending += len(block_ids)

    def take_changes(self, most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """(place in the flattened tables, block id) of the oldest changes, at most `most`."""
        if not self._places:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        places, values = np.concatenate(self._places), np.concatenate(self._values)
        self._places, self._values = ([places[most:]], [values[most:]]) if len(places) > most else ([], [])
        self.pending = max(0, len(places) - most)
        return _latest(places[:most], values[:most])

    def apply(self, places: torch.Tensor, values: torch.Tensor) -> None:
        """Write changes that `take_changes` gave out and that have been sent."""
        if places.numel():
            self.tables.view(-1).index_copy_(0, places, values)

    def _grow(self) -> None:
        """Twice the slots. Nothing may be noted and not sent: its places would be others."""
        if self.pending:
            raise InternalError("block tables grow while changes are on the way")
        old, capacity = self.capacity, 2 * self.capacity
        tables, last = self._allocate(capacity)
        tables[:, :old] = self.tables[:, :old]
        last[:old] = self.last_tokens[:old]
        self.tables, self.last_tokens, self.capacity = tables, last, capacity
        self._free = list(range(capacity - 1, old - 1, -1))
        self.generation += 1


def _latest(
    places: npt.NDArray[np.int64], values: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Of several values for one place only the last: parallel writes have no order."""
    if len(places) < 2:
        return places, values
    kept, first = np.unique(places[::-1], return_index=True)
    return (places, values) if len(kept) == len(places) else (kept, values[::-1][first])
