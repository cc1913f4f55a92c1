"""GGUF tensor types: sizes, and dequantisation of whole tensors straight into the dtype of the model.

A slice of rows at a time, so that no float32 copy of a large tensor exists beside the result. The types that make up
most of a small model are unpacked here (plain floats, Q8_0, Q5_0), the others by the `gguf` package. Both give the same
bits: the value of a quantised number is defined by the format (scale times integer, in float32). Single-threaded NumPy
on purpose: unpacking runs at the speed of touching fresh memory, and small threaded operations stall on a busy machine.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from gguf.quants import dequantize as package_dequantize

TYPE_NAMES: dict[int, str] = {int(t): t.name for t in GGMLQuantizationType}
#: Values unpacked at a time: bounds the float32 scratch to 4 MiB, which stays in the processor's cache.
CHUNK = 1 << 20


def byte_count(type_id: int, shape: tuple[int, ...]) -> int | None:
    """Bytes of a tensor on disk; None when a row does not divide into the type's blocks."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    columns = shape[-1] if shape else 1
    if columns % block:
        return None
    count = 1
    for side in shape:
        count *= side
    return count // block * size


def dequantize(raw: np.ndarray, type_id: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """uint8 bytes -> tensor of `shape` in `dtype`. Raises NotImplementedError for a type nobody can unpack."""
    kind = GGMLQuantizationType(type_id)
    columns, rows = shape[-1], prod(shape[:-1])
    result = torch.empty(rows, columns, dtype=dtype)
    row_bytes, step = len(raw) // rows, max(1, CHUNK // columns)
    scratch = None if dtype == torch.float32 else np.empty((min(step, rows), columns), dtype=np.float32)
    for first in range(0, rows, step):
        target = result[first : first + step]
        part = raw[first * row_bytes : (first + len(target)) * row_bytes]
        if kind in _PLAIN:
            target.copy_(torch.from_numpy(part.copy()).view(_PLAIN[kind]).view(target.shape))
        elif scratch is None:
            _unpack(part, kind, target.numpy())
        else:
            _unpack(part, kind, scratch[: len(target)])
            target.copy_(torch.from_numpy(scratch[: len(target)]))
    return result.view(shape)


def _unpack(part: np.ndarray, kind: GGMLQuantizationType, out: np.ndarray) -> None:
    """Some rows of a quantised tensor into float32 `out` [rows, columns], contiguous."""
    if kind == GGMLQuantizationType.Q8_0:
        _q8_0(part.reshape(-1, 34), out.reshape(-1, 32))
    elif kind == GGMLQuantizationType.Q5_0:
        _q5_0(part.reshape(-1, 22), out.reshape(-1, 32))
    elif kind in _BLOCKWISE:  # the package's dequantize goes by 16 rows; whole chunks are three times as fast
        blocks = part.reshape(-1, GGML_QUANT_SIZES[kind][1])
        out[:] = _BLOCKWISE[kind].dequantize_blocks(blocks).reshape(out.shape)
    else:
        out[:] = package_dequantize(part.reshape(len(out), -1), kind).reshape(out.shape)


def _scales(blocks: np.ndarray) -> np.ndarray:
    """The float16 scale that starts each block: float32 [n, 1]."""
    return blocks[:, :2].copy().view(np.float16).astype(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Per 32 numbers: scale, 32 int8."""
    np.multiply(blocks[:, 2:].view(np.int8), _scales(blocks), out=out)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """Per 32 numbers: scale, 32 fifth bits, 16 bytes with the low four bits of numbers j and j + 16; minus 16."""
    low = blocks[:, 6:]
    numbers = np.unpackbits(blocks[:, 2:6], axis=-1, bitorder="little")
    numbers <<= 4
    numbers[:, :16] |= low & 15
    numbers[:, 16:] |= low >> 4
    signed = numbers.view(np.int8)
    signed -= 16
    np.multiply(signed, _scales(blocks), out=out)


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
#: Types whose unpacking needs nothing but the blocks (others have tables to set up first).
_BLOCKWISE: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType[name]: getattr(quants, name)
    for name in ("Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    if hasattr(quants, name)
}
