"""Integers in 32-bit words, and what all formats share when they turn tensors into a `QuantizedWeight`.

A word holds 32 / bits codes, lowest bits first, unless a format says otherwise (AWQ). Codes are unsigned; what a signed
format stores is shifted up by half its range, and its zero with it, so the difference stays the same.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from octavo.errors import ModelError
from octavo.kernels.quantized_weights import QuantizedWeight

#: Bits of a code -> kind of the weight.
KINDS = {4: "int4", 8: "int8"}


def unpack_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] -> codes uint8 [rows, n * 32 / bits]."""
    octets = words.reshape(-1).view(torch.uint8).view(len(words), -1)  # flat: a column's strides may be odd
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), dim=-1).view(len(words), -1)


def unpack_rows(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [n, columns] -> codes uint8 [n * 32 / bits, columns]."""
    return unpack_columns(words.t(), bits).t()


def pack_columns(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, n] -> int32 [rows, ceil(n * bits / 32)], padded with zeros; undoes `unpack_columns`."""
    codes = F.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    return codes.reshape(-1).view(torch.int32).view(len(codes), -1)


def pack_rows(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [n, columns] -> int32 [ceil(n * bits / 32), columns]; undoes `unpack_rows`."""
    return pack_columns(codes.t(), bits).t().contiguous()


def make_weight(
    name: str,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group_size: int,
    group: torch.Tensor | None = None,
) -> QuantizedWeight:
    """One weight from unsigned codes.

    codes uint8 [out, in], in the order of the inputs; scales [out, groups]; zeros [out, groups] on the codes' scale
    (None: half the range). group_size: inputs per scale; -1 or 0: all. group: int [in], the group of each input, where
    it is not simply its place. Raises `ModelError` naming `name` for groups of another size.
    """
    middle = 1 << (bits - 1)
    size = codes.shape[1] if group_size < 1 else min(group_size, codes.shape[1])
    order = None if group is None else input_order(name, group, size)
    if order is not None:
        codes = codes[:, order]
    if zeros is not None and bool((zeros == middle).all()):
        zeros = None
    if bits == 8 and zeros is None:
        codes = (codes.to(torch.int16) - middle).to(torch.int8)
    return QuantizedWeight(
        kind="int8" if bits == 8 else "int4",
        codes=codes.contiguous(),
        scales=scales.float().contiguous(),
        zeros=None if zeros is None else zeros.float().contiguous(),
        group_size=size,
        input_order=order,
    )


def input_order(name: str, group: torch.Tensor, size: int) -> torch.Tensor | None:
    """The inputs sorted by group, int64 [in], or None where they are sorted: columns of one group then lie together."""
    group = group.long()
    wanted = torch.arange(len(group)) // size
    if torch.equal(group, wanted):
        return None
    order = torch.argsort(group, stable=True)
    if not torch.equal(group[order], wanted):
        raise ModelError(f"{name}: its inputs are not in groups of {size}; the file is damaged, or group_size is wrong")
    return order
