"""A GGUF container, read through a map of the file: metadata values, tensor descriptions, raw tensor bytes.

Written for start-up time: the vocabulary arrays (hundreds of thousands of strings) are only located at first and
decoded when asked for. It knows the container (version 2 and 3, little endian), not what the keys mean. Every offset
is checked against the file's size, so a truncated file is an error that names it, never a crash later.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import ModelError
from octavo.models.gguf_types import TYPE_NAMES, byte_count

_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_SIZES = {code: struct.calcsize(letter) for code, letter in _NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor. shape is outermost first (rows, columns); offset is absolute in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TYPE_NAMES[self.type_id]


@dataclass(frozen=True, slots=True)
class _Array:
    """Where an array's elements start; decoded on demand."""

    item: int
    length: int
    start: int


class GGUFFile:
    """Metadata by `get`, tensors by name in `tensors`, their bytes by `raw`. Keep it while tensors are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelError(f"{path}: no such file") from None
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise ModelError(f"{path}: broken or truncated GGUF header: {error}") from error

    # Container

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (starts with {bytes(self._map[:4])!r})")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._map, 4)
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}; supported: 2 and 3, little endian")
        position = 24
        for _ in range(num_values):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._map, position)
            self._values[key], position = self._value(kind, position + 4)
        described = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (dimensions,) = struct.unpack_from("<I", self._map, position)
            sides = struct.unpack_from(f"<{dimensions}Q", self._map, position + 4)
            kind, offset = struct.unpack_from("<IQ", self._map, position + 4 + 8 * dimensions)
            position += 16 + 8 * dimensions
            described.append((name, sides[::-1], kind, offset))
        self._header_end = position
        alignment = self.get("general.alignment", 32)
        start = -(-position // alignment) * alignment
        for name, shape, kind, offset in described:
            self._add_tensor(name, shape, kind, start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> None:
        if kind not in TYPE_NAMES:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind}")
        if name in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} appears twice")
        size = byte_count(kind, shape)
        if size is None:
            raise ModelError(
                f"{self.path}: tensor {name} of shape {list(shape)} does not divide into {TYPE_NAMES[kind]} blocks"
            )
        if offset + size > len(self._map):
            raise ModelError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + size}, the file has {len(self._map)}; "
                "download it again"
            )
        self.tensors[name] = GGUFTensor(name, shape, kind, offset, size)

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._map, position)
        end = position + 8 + length
        if end > len(self._map):
            raise IndexError(f"a string at byte {position} ends beyond the file")
        return self._map[position + 8 : end].decode("utf-8"), end

    def _value(self, kind: int, position: int) -> tuple[Any, int]:
        if kind in _NUMBERS:
            (value,) = struct.unpack_from("<" + _NUMBERS[kind], self._map, position)
            return value, position + _SIZES[kind]
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            item, length = struct.unpack_from("<IQ", self._map, position)
            start = position + 12
            return _Array(item, length, start), self._skip(item, length, start)
        raise IndexError(f"unknown value type {kind} at byte {position}")

    def _skip(self, item: int, length: int, position: int) -> int:
        """End of an array's elements."""
        if item in _SIZES:
            end = position + length * _SIZES[item]
            if end > len(self._map):
                raise IndexError(f"an array at byte {position} ends beyond the file")
            return end
        if item != _STRING:
            raise IndexError(f"array of type {item} at byte {position}")
        unpack, view = struct.Struct("<Q").unpack_from, self._map
        for _ in range(length):
            position += 8 + unpack(view, position)[0]
        if position > len(view):
            raise IndexError("a string array ends beyond the file")
        return position

    # Use

    def keys(self) -> list[str]:
        return list(self._values)

    def header(self) -> memoryview:
        """All bytes before the tensors' own: metadata and descriptions, as they lie in the file."""
        return memoryview(self._map)[: self._header_end]

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays come as lists (strings) or numpy arrays (numbers)."""
        value = self._values.get(key, default)
        try:
            return self._decode(value) if isinstance(value, _Array) else value
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {key} holds text that is not UTF-8: {error}") from error

    def array_length(self, key: str) -> int | None:
        """Length of an array without decoding it; None when the key holds none."""
        value = self._values.get(key)
        return value.length if isinstance(value, _Array) else None

    def _decode(self, array: _Array) -> Any:
        if array.item == _STRING:
            unpack, view, position = struct.Struct("<Q").unpack_from, self._map, array.start
            strings = []
            for _ in range(array.length):
                begin = position + 8
                position = begin + unpack(view, position)[0]
                strings.append(view[begin:position].decode("utf-8"))
            return strings
        letter = "?" if array.item == 7 else "<" + _NUMBERS[array.item]
        return np.frombuffer(self._map, dtype=np.dtype(letter), count=array.length, offset=array.start)

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The tensor's bytes, uint8 [num_bytes], a read-only view of the map."""
        return np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.offset)

    def address(self, tensor: GGUFTensor) -> int:
        """Where the tensor's bytes lie in memory while this file is open."""
        return int(self.raw(tensor).ctypes.data)
