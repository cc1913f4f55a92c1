"""Quantised rows of keys and values in plain torch, on any device: the definition that the native kernels follow.

`encode` and `decode` turn rows of `head_dim` numbers into bytes and back; `QuantizedRows` keeps them in a pool of
blocks. The formats and where their parts lie in a block: `core/kv_format.py`.

Invariant: a row's bytes depend on its own numbers only, and are the same in the native kernels.
A row with a number that is not finite is stored as not-a-number, all of it; a row of zeros (or of numbers so small that
their reciprocals overflow) as zeros.

int4 follows llama.cpp's Q4_0 in letting the largest number of a group, sign included, become -8, and its K-quants in
storing the scales of groups as multiples of one scale of the row.
"""

from __future__ import annotations

import torch

from octavo.core.kv_format import GROUP, KVFormat, RowFormat, SlabPlaces, parse_kv_dtype
from octavo.core.kv_layout import KVLayout

FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
MULTIPLIER = 127.0  # largest multiplier of an int4 group
_SMALLEST = 2.0**-120  # scales below it are zero
_EIGHTH = GROUP // 4  # numbers whose four quarters of a 16-bit word lie side by side

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # uint8: data [n, bytes], scale [n, 2], multipliers [n, groups]


def encode(x: torch.Tensor, row: RowFormat) -> Parts:
    """x [n, head_dim] of any float type -> the bytes of its rows."""
    x = x.float()
    if row.name == "int4":
        return _encode_int4(x)
    largest = FP8_LARGEST if row.name == "fp8" else 127.0
    scale, bad = _scale(x.abs().amax(1, keepdim=True) / largest)
    scaled = torch.where(bad, 0.0, x * _inverse(scale))
    if row.name == "fp8":
        data = scaled.clamp(-largest, largest).to(FP8).view(torch.uint8)
    else:
        data = scaled.round().clamp(-largest, largest).to(torch.int8).view(torch.uint8)
    return data, _scale_bytes(scale), data.new_empty(len(x), 0)


def decode(data: torch.Tensor, scale: torch.Tensor, multipliers: torch.Tensor, row: RowFormat) -> torch.Tensor:
    """The bytes of rows (see `encode`; any strides) -> float32 [n, head_dim]."""
    factor = scale.contiguous().view(torch.bfloat16).float()
    if row.name == "int4":
        numbers = _unpack(data).view(len(data), -1, GROUP)
        numbers = numbers * multipliers.contiguous().view(torch.int8).float().unsqueeze(-1)
        return numbers.flatten(1).mul_(factor)
    return data.contiguous().view(FP8 if row.name == "fp8" else torch.int8).float().mul_(factor)


def _scale(ideal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, 1] of at least 0 -> (the scale as stored: bfloat16's range and bits, rounded up; where it is bad)."""
    bad = ~torch.isfinite(ideal)
    bits = ideal.view(torch.int32)
    up = ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)
    up = torch.where(ideal < _SMALLEST, 0.0, up)
    return torch.where(bad, float("nan"), up), bad


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0.0, 0.0, 1.0 / scale)


def _scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.bfloat16).view(torch.uint8)


def _encode_int4(x: torch.Tensor) -> Parts:
    n = len(x)
    groups = x.view(n, -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    extreme = torch.where(-low > high, low, high) / -8.0  # this number becomes -8
    scale, bad = _scale(extreme.abs().amax(1, keepdim=True) / MULTIPLIER)
    wanted = (extreme * _inverse(scale)).round()
    # A group far below the row's largest still gets the finest step there is, not zeros.
    least = torch.where(extreme < 0, -1.0, torch.where(extreme > 0, 1.0, 0.0))
    multiplier = torch.where(wanted == 0, least, wanted).clamp(-MULTIPLIER, MULTIPLIER)
    multiplier = torch.where(bad | (scale == 0), 0.0, multiplier)
    step = _inverse(multiplier * scale)
    numbers = torch.where(bad, 0.0, (groups * step.unsqueeze(-1)).flatten(1)).round().clamp(-8, 7)
    return _pack(numbers.to(torch.int32)), _scale_bytes(scale), multiplier.to(torch.int8).view(torch.uint8)


def _pack(numbers: torch.Tensor) -> torch.Tensor:
    """int32 [n, d] in -8..7 -> uint8 [n, d / 2].

    Of 32 numbers, 16-bit word i (low byte first) holds numbers i, i + 8, i + 16 and i + 24, from its low bits up.
    """
    quarters = (numbers & 15).view(len(numbers), -1, 4, _EIGHTH)
    low, high = quarters[:, :, 0] | quarters[:, :, 1] << 4, quarters[:, :, 2] | quarters[:, :, 3] << 4
    return torch.stack([low, high], -1).to(torch.uint8).flatten(1)


def _unpack(data: torch.Tensor) -> torch.Tensor:
    """uint8 [n, d / 2] -> float32 [n, d]."""
    words = data.contiguous().view(len(data), -1, _EIGHTH, 2).to(torch.int32)
    low, high = words.unbind(-1)
    quarters = torch.stack([low & 15, low >> 4, high & 15, high >> 4], 2)
    return ((quarters ^ 8) - 8).float().flatten(1)


class QuantizedRows:
    """Rows in a quantised pool, uint8 [num_blocks, layers_per_group, bytes of a layer]."""

    def __init__(self, kv: torch.Tensor, layout: KVLayout, num_kv_heads: int, head_dim: int) -> None:
        kv_format = parse_kv_dtype(layout.kv_dtype)
        assert kv_format is not None
        expected = quantized_shape(kv_format, layout, num_kv_heads, head_dim)
        if kv.dtype != torch.uint8 or tuple(kv.shape[1:]) != expected or not kv.is_contiguous():
            raise ValueError(
                f"kv of shape {tuple(kv.shape)} and {kv.dtype} is not a contiguous uint8 "
                f"[num_blocks, {', '.join(map(str, expected))}], as kv_cache_dtype={layout.kv_dtype} needs"
            )
        self._size, self._heads = layout.block_size, num_kv_heads
        self._per_block = layout.layers_per_group * 2 * num_kv_heads  # rows' first indices count keys and values
        places = kv_format.places(num_kv_heads, layout.block_size, head_dim)
        self._halves = [
            (row, [self._view(kv, at, *part) for part in _parts(at)])
            for row, at in zip((kv_format.key, kv_format.value), places, strict=True)
        ]

    def _view(self, kv: torch.Tensor, at: SlabPlaces, offset: int, width: int) -> torch.Tensor:
        """One part of every row as [num_blocks, layers, heads, block_size, width]; `offset` from the slab's start."""
        layers, layer_bytes = kv.shape[1:]
        shape = (kv.shape[0], layers, self._heads, self._size, width)
        strides = (layers * layer_bytes, layer_bytes, at.slab, width, 1)
        return kv.as_strided(shape, strides, kv.storage_offset() + at.first + offset)

    def write(self, place: int, rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [n, head_dim] into rows [n] of the layer at `place` of its group, as in `FloatRows`."""
        where = self._where(rows)
        for (row, views), new in zip(self._halves, (key, value), strict=True):
            for view, part in zip(views, encode(new, row), strict=True):
                view[where[0], place, where[1], where[2]] = part

    def gather(self, index: torch.Tensor, place: int) -> torch.Tensor:
        """Rows -> float32 [len(index), head_dim]. The first half of `index` names keys, the second values."""
        found = []
        for (row, views), part in zip(self._halves, index.chunk(2), strict=True):
            block, head, offset = self._where(part)
            data, scale, multipliers = (view[block, place, head, offset] for view in views)
            found.append(decode(data, scale, multipliers, row))
        return torch.cat(found)

    def _where(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(block, head, offset) of rows, whether they count keys or values."""
        slab = rows // self._size
        return slab // self._per_block, slab % self._per_block % self._heads, rows % self._size


def _parts(at: SlabPlaces) -> list[tuple[int, int]]:
    """(offset, width) of data, scales and multipliers in a slab."""
    return [(0, at.data), (at.scales, 2), (at.multipliers, at.groups)]


def quantized_shape(kv_format: KVFormat, layout: KVLayout, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Shape of one quantised block, in bytes: (layers_per_group, bytes of a layer)."""
    return layout.layers_per_group, layout.block_size * kv_format.bytes_per_token_layer(num_kv_heads, head_dim)
