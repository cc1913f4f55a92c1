"""`LazyWeights`: canonical names mapped onto entries of mapped files, read when asked for.

A loader lists what its files hold; this module checks the list against the spec (missing, left over and mis-shaped
tensors stop the load together, in one message) and hands out tensors one by one. So the files are the only full copy
besides the model being built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch

from octavo.errors import ModelError
from octavo.kernels.ops import StoredRows
from octavo.kernels.quantized_weights import QuantizedWeight
from octavo.models.names import Shape
from octavo.models.tensor_names import Part

#: (bytes read so far, bytes in all)
Progress = Callable[[int, int], None]
LISTED = 12  # names shown per kind of problem


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: what it is called there, its shape, its bytes on disk, and how to read it.

    stored: its rows as they lie in the file, where they mean the weight without further ado; else None. quantized: its
    codes and scales, where the file holds those; `read` then gives the values they stand for, in float32.
    """

    source_name: str
    shape: Shape
    num_bytes: int
    read: Callable[[], torch.Tensor]
    stored: Callable[[], StoredRows | None] = lambda: None
    quantized: Callable[[], QuantizedWeight] | None = None


class LazyWeights(Mapping[str, torch.Tensor]):
    """Read-only mapping canonical name -> tensor. Each access reads anew; `on_progress` counts accesses in bytes."""

    def __init__(self, entries: Mapping[str, Entry], on_progress: Progress | None = None) -> None:
        self._entries = dict(entries)
        self._on_progress = on_progress
        self._total = sum(e.num_bytes for e in self._entries.values())
        self._done = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        tensor = entry.read()
        self._count(entry)
        return tensor

    def _count(self, entry: Entry) -> None:
        self._done = min(self._done + entry.num_bytes, self._total)
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

    def stored(self, name: str) -> StoredRows | None:
        """Rows of `name` as the file holds them, for a consumer that unpacks them itself; None where they differ.

        Their bytes count as read once the consumer says so, see `report`.
        """
        return self._entries[name].stored()

    def quantized(self, name: str) -> QuantizedWeight | None:
        """`name` as a quantised checkpoint holds it; None where it is stored as floats. Counts as reading it."""
        entry = self._entries[name]
        if entry.quantized is None:
            return None
        found = entry.quantized()
        self._count(entry)
        return found

    def is_quantized(self, name: str) -> bool:
        """Would `quantized` give anything? Reads nothing."""
        return self._entries[name].quantized is not None

    def is_matrix(self, name: str) -> bool:
        """Has it rows and columns? (All but norms and biases.)"""
        return len(self._entries[name].shape) == 2

    def shape(self, name: str) -> Shape:
        """Shape of `name`; reads nothing."""
        return self._entries[name].shape

    def num_bytes(self, name: str) -> int:
        """Bytes of `name` in its file."""
        return self._entries[name].num_bytes

    def report(self, stored_bytes: int) -> None:
        """Tell `on_progress` that `stored_bytes` of what `stored` gave out are read by now."""
        if self._on_progress is not None:
            self._on_progress(min(self._done + stored_bytes, self._total), self._total)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def total_bytes(self) -> int:
        """Bytes of the entries in their files."""
        return self._total


def part_shapes(shape: Shape, parts: Sequence[Part]) -> list[Shape]:
    """Shape of each part of a tensor. One that does not divide into them keeps its own shape, which will not fit."""
    whole = torch.empty(shape, device="meta")
    try:
        shapes = [tuple(part.take(whole).shape) for part in parts]
    except (IndexError, RuntimeError):
        return [shape] * len(parts)
    return shapes if sum(map(prod, shapes)) == prod(shape) else [shape] * len(parts)


def run_of_rows(shape: Shape, index: Sequence[int | slice]) -> tuple[int, Shape] | None:
    """(first number, shape) of what numbers and then at most one slice cut out of a tensor; None for another index."""
    first, rest = 0, tuple(shape)
    for place, cut in enumerate(index):
        if isinstance(cut, slice) and place + 1 < len(index):
            return None
        low, high = (cut, cut + 1) if isinstance(cut, int) else cut.indices(rest[0])[:2]
        first += low * prod(rest[1:])
        rest = rest[1:] if isinstance(cut, int) else (high - low, *rest[1:])
    return first, rest


def check_entries(
    where: str,
    entries: Mapping[str, Entry],
    expected: Mapping[str, Shape],
    unused: list[str],
    name_in_file: Callable[[str], str],
    note: str = "",
) -> None:
    """Stop the load unless `entries` are exactly `expected`, with equal shapes, and nothing is `unused`.

    name_in_file: what the files would call a weight. note: what else to say of the problems.
    """
    missing = list(dict.fromkeys(name_in_file(name) for name in expected if name not in entries))
    extra = [f"{e.source_name}" for name, e in entries.items() if name not in expected] + unused
    shaped = [
        f"{entries[name].source_name} is {list(entries[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in entries and tuple(entries[name].shape) != tuple(shape)
    ]
    problems = [
        f"{len(items)} tensor{'s' * (len(items) > 1)} {label}: "
        f"{', '.join(items[:LISTED])}{', …' if len(items) > LISTED else ''}"
        for label, items in (("missing", missing), ("not used by this model", extra), ("with another shape", shaped))
        if items
    ]
    if problems:
        raise ModelError(f"{where}: the weights do not fit the configuration: {'; '.join(problems)}{note}")
