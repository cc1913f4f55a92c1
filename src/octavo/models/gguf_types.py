"""GGUF tensor types: sizes, and dequantisation of whole tensors straight into the dtype of the model.

The common types of small models (F32, F16, BF16, Q8_0) are unpacked by torch; every other type goes through the
`gguf` package, a slice of rows at a time, so that no float32 copy of a large tensor exists beside the result. Both give
the same bits: the value of a quantised number is defined by the format (scale times integer, in float32).
"""

from __future__ import annotations

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
    columns = shape[-1]
    rows = 1
    for side in shape[:-1]:
        rows *= side
    result = torch.empty(rows, columns, dtype=dtype)
    row_bytes = len(raw) // max(rows, 1)
    step = max(1, CHUNK // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        part = raw[first * row_bytes : (first + count) * row_bytes]
        target = result[first : first + count]
        if kind == GGMLQuantizationType.Q8_0 and dtype == torch.float32:
            numbers, scales = _q8_0(part)
            torch.mul(numbers, scales, out=target.view(-1, 32))  # one pass, no scratch
        else:
            target.copy_(_unpack(part, kind, count, columns))
    return result.view(shape)


def _unpack(part: np.ndarray, kind: GGMLQuantizationType, rows: int, columns: int) -> torch.Tensor:
    """A few rows, float32 (or the stored float type) [rows, columns]."""
    if kind in _PLAIN:
        return _bytes(part).view(_PLAIN[kind]).view(rows, columns)
    if kind == GGMLQuantizationType.Q8_0:
        numbers, scales = _q8_0(part)
        return (numbers * scales).view(rows, columns)
    if kind in _BLOCKWISE:  # the package's dequantize goes by 16 rows; whole chunks are three times as fast
        blocks = part.reshape(-1, GGML_QUANT_SIZES[kind][1])
        return torch.from_numpy(_BLOCKWISE[kind].dequantize_blocks(blocks).reshape(rows, columns))
    return torch.from_numpy(package_dequantize(part.reshape(rows, -1), kind).reshape(rows, columns))


def _q8_0(part: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Per 32 numbers a float16 scale and 32 int8: int8 [n, 32], float32 [n, 1]."""
    blocks = _bytes(part).view(-1, 34)
    return blocks[:, 2:].view(torch.int8), blocks[:, :2].contiguous().view(torch.float16).float()


_PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
#: Types whose unpacking needs nothing but the blocks (others have tables to set up first).
_BLOCKWISE: dict[GGMLQuantizationType, Any] = {
    GGMLQuantizationType[name]: getattr(quants, name)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
    if hasattr(quants, name)
}


def _bytes(part: np.ndarray) -> torch.Tensor:
    """A copy of at most a chunk: the map is read-only, and torch has no read-only tensors."""
    return torch.from_numpy(part.copy())
