"""Weights from a GGUF file, dequantised one tensor at a time into the dtype of the model.

Undoes what the format does to weights: in `llama` files the rows of q and k are interleaved for another rotary layout.
Gemma's norms already include their +1 there, which is the canonical form here (`models/names.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import torch

from octavo.errors import ModelError
from octavo.kernels.ops import StoredRows
from octavo.models.gguf_families import family_of_gguf
from octavo.models.gguf_file import GGUFFile, GGUFTensor
from octavo.models.gguf_reader import OF_SPEC
from octavo.models.gguf_types import dequantize
from octavo.models.names import Shape, is_float32, weight_shapes
from octavo.models.spec import ModelSpec
from octavo.models.tensor_names import Part, parts_of, tensor_of
from octavo.models.weights import Entry, LazyWeights, Progress, check_entries, part_shapes, run_of_rows


def open_gguf(file: GGUFFile, spec: ModelSpec, dtype: torch.dtype, on_progress: Progress | None = None) -> LazyWeights:
    """Lazy canonical weights in `dtype` (norms float32). Raises `ModelError` with every tensor that does not fit."""
    _, family = family_of_gguf(file)
    entries: dict[str, Entry] = {}
    unused: list[str] = []
    for tensor in file.tensors.values():
        if tensor.name in OF_SPEC:
            continue
        parts = parts_of(tensor.name, spec, family.names, "")
        if parts is None:
            unused.append(tensor.name)
            continue
        if family.interleaved:
            parts = tuple(_straightened(part, spec) for part in parts)
        for part, shape in zip(parts, part_shapes(tensor.shape, parts), strict=True):
            size = tensor.num_bytes * prod(shape) // prod(tensor.shape)
            target = torch.float32 if is_float32(part.name) else dtype
            entries[part.name] = Entry(
                tensor.name, shape, size, _reader(file, tensor, part, target), _stored(file, tensor, part)
            )
    check_entries(
        str(file.path), entries, weight_shapes(spec), unused, lambda name: tensor_of(name, spec, family.names, "")
    )
    return LazyWeights(entries, on_progress)


def _straightened(part: Part, spec: ModelSpec) -> Part:
    """q and k of an interleaved file: rows back in halves."""
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(part.name.split(".")[-2])
    return part if heads is None else Part(part.name, part.index, partial(_halves, heads=heads))


def _cut(tensor: GGUFTensor, part: Part) -> tuple[int, int, Shape]:
    """(first byte, bytes, shape) of what the part's index cuts out: whole rows, so whole blocks of any type."""
    run = run_of_rows(tensor.shape, part.index)
    assert run is not None
    first, shape = run
    count = prod(tensor.shape)
    return tensor.num_bytes * first // count, tensor.num_bytes * prod(shape) // count, shape


def _reader(file: GGUFFile, tensor: GGUFTensor, part: Part, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        first, size, shape = _cut(tensor, part)
        try:
            weight = dequantize(file.raw(tensor)[first : first + size], tensor.type_id, shape, dtype)
        except NotImplementedError:
            raise ModelError(
                f"{file.path}: {tensor.name} has type {tensor.type_name}, which cannot be unpacked"
            ) from None
        rearranged: torch.Tensor = part.arranged(weight)
        return rearranged

    return read


def _stored(file: GGUFFile, tensor: GGUFTensor, part: Part) -> Callable[[], StoredRows | None]:
    first, _, shape = _cut(tensor, part)
    if part.change is not None or len(shape) != 2:
        return lambda: None
    return lambda: StoredRows(file.address(tensor) + first, tensor.type_id, shape[0], shape[1], file)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order back to (half, pair): row 2j + h of the file is row h·d/2 + j."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
