"""What a format says about one linear module: which tensors hold it, of what shape they must be, how they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from octavo.kernels.quantized_weights import QuantizedWeight

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}
FLOATS = ("F32", "F16", "BF16")


class Tensors(Protocol):
    """The files of a checkpoint, see `SafetensorsFiles`."""

    def names(self) -> list[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]: ...

    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Found:
    """One module's tensors by the ends of their names ("qweight", …): full name, dtype and shape from the headers."""

    module: str
    names: Mapping[str, str]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def num_bytes(self) -> int:
        return sum(prod(shape) * ITEM_BYTES.get(self.dtypes[end], 1) for end, shape in self.shapes.items())

    def problem(self, end: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
        """What is wrong with a tensor that must be there with this shape and one of these dtypes; None if nothing."""
        if end not in self.names:
            return f"{self.module}.{end} is missing"
        if self.shapes[end] != shape:
            return f"{self.names[end]} is {list(self.shapes[end])}, expected {list(shape)}"
        if self.dtypes[end] not in dtypes:
            return f"{self.names[end]} is {self.dtypes[end]}, expected {' or '.join(dtypes)}"
        return None


@dataclass(frozen=True)
class PackedModule:
    """A module that can be read. shape: (out, in). problems: what does not fit, in words; read only without any."""

    found: Found
    shape: tuple[int, int]
    problems: tuple[str, ...]
    read: Callable[[], QuantizedWeight]


class Scheme(Protocol):
    """One format with the settings of one checkpoint."""

    @property
    def ends(self) -> frozenset[str]:
        """Ends of the names of tensors that belong to packed modules."""
        ...

    def is_packed(self, found: Found) -> bool:
        """Do these tensors hold a packed module? (Some ends, such as "weight", belong to plain ones as well.)"""
        ...

    def must_be_packed(self, module: str) -> bool | None:
        """What the settings say of a module: packed, plain, or nothing."""
        ...

    def open(self, found: Found, files: Tensors) -> PackedModule: ...

    def describe(self) -> str:
        """For people: "AWQ, 4 bits, groups of 128"."""
        ...


def group_count(inputs: int, group_size: int) -> int:
    """Scales of an output; the last group may be shorter. group_size below 1: one."""
    return 1 if group_size < 1 else -(-inputs // group_size)


def group_words(group_size: int) -> str:
    """For people."""
    return f"groups of {group_size}" if group_size > 0 else "a scale per output"


def find_packed(files: Tensors, scheme: Scheme) -> dict[str, PackedModule]:
    """Every packed module of a checkpoint, by its name."""
    grouped: dict[str, dict[str, str]] = {}
    for name in files.names():
        module, _, end = name.rpartition(".")
        if end in scheme.ends:
            grouped.setdefault(module, {})[end] = name
    packed = {}
    for module, names in grouped.items():
        headers = {end: files.describe(name) for end, name in names.items()}
        found = Found(module, names, {e: h[0] for e, h in headers.items()}, {e: h[1] for e, h in headers.items()})
        if scheme.is_packed(found):
            packed[module] = scheme.open(found, files)
    return packed


def damaged(found: Found, why: str) -> PackedModule:
    """A module of which not even the shape is known."""

    def read() -> QuantizedWeight:
        raise AssertionError("a module with problems is never read")

    return PackedModule(found, (0, 0), (why,), read)


def no_problems(*found: str | None) -> tuple[str, ...]:
    return tuple(problem for problem in found if problem is not None)
