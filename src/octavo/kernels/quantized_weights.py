"""Quantised weights in torch: what a `QuantizedWeight` means, how one is made, and the product by it.

The definition that native kernels are tested against; it runs on any device. A row (output) of a weight is cut into
groups of inputs, each with its own scale: value = scale * (code - zero). Codes here are one byte each, unpacked; how a
kernel packs them is the kernel's business. It knows no files and no model.

Invariant: `dequantize` is the one meaning of a weight. Every product, packed or not, computes with
exactly those numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch.nn import functional as F

from octavo.errors import ConfigError
from octavo.kernels.grid_search import ZERO_STEPS, int4_groups, inverse

#: kind -> bits of a code
BITS = {"int8": 8, "int4": 4}
#: Codes of an int4 weight without zeros are signed numbers plus this.
INT4_MIDDLE = 8
#: numbers of a weight that are in float32 at the same time, while it is quantised or multiplied
ROWS_AT_A_TIME = 1 << 21


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] as codes: value = scale * (code - zero).

    kind: "int8" or "int4". codes: one byte per number, [out, in]; int8 codes are int8 (or uint8 with zeros), int4 codes
    uint8 in 0 … 15. scales: float32 [out, groups], groups = ceil(in / group_size); the last group may be shorter.
    zeros: float32 [out, groups]; None: 0 for int8, 8 for int4. group_size: inputs per scale (in_features: one scale per
    output). input_order: int64 [in] or None: column j of `codes` belongs to input input_order[j] (GPTQ's act-order).
    Raises ConfigError when these do not fit together.
    """

    kind: str
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in BITS:
            raise ConfigError(f"kind={self.kind!r}: a quantised weight is one of {', '.join(BITS)}")
        if self.codes.dim() != 2 or 0 in self.codes.shape:
            raise ConfigError(f"codes of shape {tuple(self.codes.shape)}: a non-empty [out, in] is needed")
        unsigned = self.kind == "int4" or (self.affine and self.codes.dtype == torch.uint8)
        if self.codes.dtype != (torch.uint8 if unsigned else torch.int8):
            raise ConfigError(
                f"{self.kind} codes of {self.codes.dtype}: uint8 for int4, int8 for int8 (uint8 with zeros)"
            )
        if self.group_size < 1:
            raise ConfigError(f"group_size={self.group_size}: must be at least 1")
        expected = (self.out_features, self.groups)
        for name, values in (("scales", self.scales), ("zeros", self.zeros)):
            if values is not None and (tuple(values.shape) != expected or values.dtype != torch.float32):
                raise ConfigError(
                    f"{name} of shape {tuple(values.shape)}, {values.dtype}: float32 {list(expected)} is needed "
                    f"({self.out_features} outputs, {self.in_features} inputs in groups of {self.group_size})"
                )
        order = self.input_order
        if order is not None and (order.dtype != torch.int64 or tuple(order.shape) != (self.in_features,)):
            raise ConfigError(f"input_order {tuple(order.shape)}, {order.dtype}: int64 [{self.in_features}] is needed")

    def to(self, device: torch.device | str) -> QuantizedWeight:
        """The same on another device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        order = None if self.input_order is None else self.input_order.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=zeros, input_order=order)

    @property
    def out_features(self) -> int:
        return int(self.codes.shape[0])

    @property
    def in_features(self) -> int:
        return int(self.codes.shape[1])

    @property
    def groups(self) -> int:
        """Groups of a row; the last one may hold fewer inputs than `group_size`."""
        return -(-self.in_features // self.group_size)

    @property
    def affine(self) -> bool:
        """Whether each group has a zero of its own."""
        return self.zeros is not None

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return BITS[self.kind]

    @property
    def nbytes(self) -> int:
        """Bytes of it packed without loss: codes at `bits` each, scales in 16 bits where that is exact, zeros in 8."""
        scale_bytes = 2 if halves_exactly(self.scales) else 4
        zero_bytes = 0 if self.zeros is None else 1 if is_small_integer(self.zeros) or are_sixteenths(self.zeros) else 4
        packed = self.out_features * -(-self.in_features * self.bits // 8)
        order = 0 if self.input_order is None else 8 * self.in_features
        return packed + self.scales.numel() * (scale_bytes + zero_bytes) + order

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in], inputs in their own order."""
        out = torch.empty(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        step = max(1, ROWS_AT_A_TIME // self.in_features)
        for first in range(0, self.out_features, step):
            rows = slice(first, first + step)
            zeros = None if self.zeros is None else self.zeros[rows]
            values = _values(self.kind, self.codes[rows], self.scales[rows], zeros, self.group_size)
            if self.input_order is None:
                out[rows] = values
            else:
                out[rows, self.input_order] = values
        return out


def halves_exactly(values: torch.Tensor) -> bool:
    """Whether every value is a float16 number."""
    return bool((values.half().float() == values).all())


def is_small_integer(values: torch.Tensor) -> bool:
    """Whether every value is an integer that fits a byte."""
    return bool(((values == values.round()) & (values >= 0) & (values <= 255)).all())


def are_sixteenths(zeros: torch.Tensor) -> bool:
    """Whether every zero is a multiple of 1 / ZERO_STEPS that fits a byte."""
    steps = zeros * ZERO_STEPS
    return bool(((steps == steps.round()) & (steps >= 0) & (steps <= 255)).all())


def _values(
    kind: str, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """float32 values of codes [rows, in], in the order of the codes."""
    columns = codes.shape[1]

    def spread(values: torch.Tensor) -> torch.Tensor:
        if values.shape[1] == 1:
            return values
        return values.repeat_interleave(group_size, dim=1)[:, :columns]

    numbers = codes.to(torch.float32)
    if zeros is not None:
        numbers = numbers - spread(zeros)
    elif kind == "int4":
        numbers = numbers - INT4_MIDDLE
    return numbers * spread(scales)


# Quantising


def quantize_rows(
    weight: torch.Tensor, kind: str, group_size: int | None = None, *, whole_zeros: bool = False
) -> QuantizedWeight:
    """weight [out, in] of any float dtype -> its nearest `QuantizedWeight` of `kind`.

    int8: symmetric, one scale per output unless a group_size is given: largest magnitude / 127, round to nearest.
    int4: groups of 32 unless told otherwise, scales that are float16 numbers, zeros that are sixteenths (whole_zeros:
    integers, as other libraries store them); per group the grid with the least squared error that a search finds, see
    `int4_groups`. A group of zeros has scale 0. group_size may exceed or not divide in_features. Raises ConfigError for
    another kind, and for numbers that are not finite.
    """
    if kind not in BITS:
        raise ConfigError(f"kind={kind!r}: weights can be quantised to {', '.join(BITS)}")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ConfigError(f"a weight of shape {tuple(weight.shape)}: a non-empty [out, in] is needed")
    if group_size is not None and (isinstance(group_size, bool) or group_size < 1):
        raise ConfigError(f"group_size={group_size!r}: must be an integer of at least 1")
    columns = weight.shape[1]
    size = min(group_size or (columns if kind == "int8" else 32), columns)
    zero_steps = 1 if whole_zeros else ZERO_STEPS
    # A device other than the CPU wants fewer, larger operations.
    step = max(1, (ROWS_AT_A_TIME << (0 if weight.device.type == "cpu" else 3)) // columns)
    parts = []
    for first in range(0, weight.shape[0], step):
        rows = weight[first : first + step].float()
        if not bool(torch.isfinite(rows).all()):
            raise ConfigError("the weight holds numbers that are not finite; it cannot be quantised")
        whole = columns // size * size  # a last group that is shorter is searched apart
        for begin, groups in ((0, rows[:, :whole].unflatten(1, (-1, size))), (whole, rows[:, None, whole:])):
            if groups.numel():
                found = _int8_groups(groups) if kind == "int8" else int4_groups(groups, zero_steps)
                parts.append((first, begin, found))
    return _assembled(kind, tuple(weight.shape), size, parts)


#: Of groups [rows, groups, size]: codes of that shape, scales and zeros [rows, groups].
_Groups = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def _assembled(kind: str, shape: tuple[int, ...], size: int, parts: list[tuple[int, int, _Groups]]) -> QuantizedWeight:
    """Parts, each from a row and a column on, put into one weight."""
    codes, scales, zeros = parts[0][2]
    all_codes = codes.new_empty(shape)
    all_scales = scales.new_empty(shape[0], -(-shape[1] // size))
    all_zeros = None if zeros is None else torch.empty_like(all_scales)
    for row, column, (codes, scales, zeros) in parts:
        rows, groups = slice(row, row + len(codes)), slice(column // size, column // size + codes.shape[1])
        all_codes[rows, column : column + codes.shape[1] * codes.shape[2]] = codes.flatten(1)
        all_scales[rows, groups] = scales
        if all_zeros is not None and zeros is not None:
            all_zeros[rows, groups] = zeros
    return QuantizedWeight(kind, all_codes, all_scales, all_zeros, size)


def _int8_groups(groups: torch.Tensor) -> _Groups:
    """[rows, groups, size] -> int8 codes of that shape, scales [rows, groups]."""
    scales = groups.abs().amax(-1) / 127
    codes = (groups * inverse(scales)[..., None]).round().clamp(-127, 127)
    return codes.to(torch.int8), scales, None


# Products


class SizedLinear(Protocol):
    """x [T, in] -> [T, out], by a weight that takes `nbytes`."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class ReferenceQuantizedLinear:
    """x [..., in] -> [..., out] in x's dtype: float32 products with the dequantised weight, some rows at a time.

    Keeps codes packed (two int4 codes to a byte), never the whole weight in floats. `rows` reads single rows back.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        if bias is not None and tuple(bias.shape) != (weight.out_features,):
            raise ConfigError(f"a bias of shape {tuple(bias.shape)} for {weight.out_features} outputs")
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._kind, self._group_size, self._order = weight.kind, weight.group_size, weight.input_order
        self._codes = _pack_nibbles(weight.codes) if weight.kind == "int4" else weight.codes
        self._scales, self._zeros, self._bias = weight.scales, weight.zeros, bias

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        tensors = (self._codes, self._scales, self._zeros, self._order)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def _dequantized(self, rows: slice | torch.Tensor) -> torch.Tensor:
        codes = self._codes[rows]
        if self._kind == "int4":
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, : self.in_features]
        zeros = None if self._zeros is None else self._zeros[rows]
        return _values(self._kind, codes, self._scales[rows], zeros, self._group_size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float() if self._order is None else x.float().index_select(-1, self._order)
        step = max(1, ROWS_AT_A_TIME // self.in_features)
        parts = [F.linear(wide, self._dequantized(slice(at, at + step))) for at in range(0, self.out_features, step)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return (out if self._bias is None else out + self._bias.float()).to(x.dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `ids` (int64 [n]) of the weight as [n, in] in `dtype`."""
        values = self._dequantized(ids.reshape(-1)).view(*ids.shape, self.in_features)
        if self._order is not None:
            values = torch.empty_like(values).index_copy_(-1, self._order, values)
        return values.to(dtype)


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in] below 16 -> [out, ceil(in / 2)]: the even input in the low four bits."""
    codes = F.pad(codes, (0, codes.shape[1] % 2))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def fusible(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether weights that read the same input can be one: equal kind, groups, inputs, order and use of zeros."""
    first = parts[0]

    def same_order(other: QuantizedWeight) -> bool:
        if first.input_order is None or other.input_order is None:
            return first.input_order is other.input_order
        return torch.equal(first.input_order, other.input_order)

    return all(
        (p.kind, p.group_size, p.in_features, p.affine, p.codes.dtype)
        == (first.kind, first.group_size, first.in_features, first.affine, first.codes.dtype)
        and same_order(p)
        for p in parts[1:]
    )


def fusible_runs(parts: Sequence[QuantizedWeight]) -> list[list[QuantizedWeight]]:
    """Neighbours that can be one weight, together."""
    runs = [[parts[0]]]
    for part in parts[1:]:
        if fusible([runs[-1][0], part]):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def concatenate(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """`fusible` parts, one below the other."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    zeros = None if first.zeros is None else torch.cat([p.zeros for p in parts if p.zeros is not None])
    codes, scales = torch.cat([p.codes for p in parts]), torch.cat([p.scales for p in parts])
    return QuantizedWeight(first.kind, codes, scales, zeros, first.group_size, first.input_order)


class JoinedLinear:
    """Several products of one input side by side, for parts that cannot be one product."""

    def __init__(self, parts: Sequence[SizedLinear]) -> None:
        self.parts = tuple(parts)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


class Fp8Linear:
    """A weight in eight-bit floats (e4m3) with a float32 scale per output, widened at each product to x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        wide = weight.float()
        if not bool(torch.isfinite(wide).all()):
            raise ConfigError("the weight holds numbers that are not finite; it cannot be quantised")
        self.out_features, self.in_features = weight.shape
        self._scales = wide.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max
        self._numbers = (wide * inverse(self._scales)[:, None]).to(torch.float8_e4m3fn)
        self._bias = bias

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._numbers.numel() + 4 * self._scales.numel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = F.linear(x, self._numbers.to(x.dtype)).float() * self._scales
        return (out if self._bias is None else out + self._bias.float()).to(x.dtype)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `ids` (int64 [n]) of the weight as [n, in] in `dtype`."""
        return (self._numbers[ids].float() * self._scales[ids][..., None]).to(dtype)


def reference_linear(parts: Sequence[QuantizedWeight], bias: torch.Tensor | None = None) -> SizedLinear:
    """x -> x W^T + bias for the parts one below the other; what `Ops.quantized_linear` means."""
    if len({p.in_features for p in parts}) != 1:
        raise ConfigError(f"parts with {', '.join(str(p.in_features) for p in parts)} inputs cannot share an input")
    runs = fusible_runs(parts)
    if len(runs) == 1:
        return ReferenceQuantizedLinear(concatenate(parts), bias)
    sizes = [sum(p.out_features for p in run) for run in runs]
    offsets = [None] * len(runs) if bias is None else list(bias.split(sizes))
    return JoinedLinear([ReferenceQuantizedLinear(concatenate(r), b) for r, b in zip(runs, offsets, strict=True)])
