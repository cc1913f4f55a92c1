"""Quantised weights in the native kernels: which panels a weight goes into, and the products over them.

csrc/kernels.h has the layout. Panels hold exactly the numbers of the weight they were made from; a product computes
with those and with rounded inputs: of 16 bits with a step per 256 for weights of eight bits (csrc/integer_rows.h),
about 3e-5 from float32; of 8 bits with a step per 32 for narrower ones (csrc/byte_rows.h), whose own rounding is many
times that of such inputs. It knows neither files nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.core.weight_format import FIXED, FIXED_SPAN, WeightFormat
from octavo.kernels.cpu.linear import LoadQueue, NativeLinear
from octavo.kernels.cpu.loader import native
from octavo.kernels.ops import StoredRows
from octavo.kernels.quantized_weights import (
    JoinedLinear,
    QuantizedWeight,
    SizedLinear,
    are_sixteenths,
    concatenate,
    fusible_runs,
    halves_exactly,
    is_small_integer,
    reference_linear,
)

UNIT = 32  # inputs that a product sums exactly; groups are multiples of it
HALF, HALF_ZERO, WIDE, WIDE_ZERO, K_MIN, K_SIGNED, HALF_FINE = range(7)  # csrc/kernels.h: Scales


@dataclass(frozen=True, slots=True)
class Panels:
    """A layout of csrc/kernels.h. bits of a code; scales: a constant above; group: inputs per scale."""

    bits: int
    scales: int
    group: int

    def packed(self, rows: int, columns: int) -> object:
        """Room for a weight [rows, columns]."""
        return native().PackedWeight(self.bits, self.scales, self.group, rows, columns)


#: Panels that hold the blocks of a GGUF type as they are.
GGUF_PANELS = {
    2: Panels(4, HALF, 32),  # Q4_0
    6: Panels(5, HALF, 32),  # Q5_0
    8: Panels(8, HALF, 32),  # Q8_0
    12: Panels(4, K_MIN, 256),  # Q4_K
    13: Panels(5, K_MIN, 256),  # Q5_K
    14: Panels(6, K_SIGNED, 256),  # Q6_K
}


def panels_of_format(format: WeightFormat, columns: int) -> Panels | None:
    """What rows of floats are quantised into; None for "gguf", which quantises nothing."""
    if format.kind == "int8":
        return Panels(8, WIDE, _whole(columns))
    if format == FIXED:
        return Panels(16, WIDE, FIXED_SPAN)
    if format.kind == "int4":
        assert format.group_size is not None
        return Panels(4, HALF_FINE, format.group_size)
    return None


def panels_of_weight(weight: QuantizedWeight) -> Panels | None:
    """The smallest panels that hold `weight` exactly; None where its groups cut units of 32 inputs."""
    group = _whole(weight.in_features) if weight.group_size >= weight.in_features else weight.group_size
    if group % UNIT:
        return None
    halves = halves_exactly(weight.scales)
    if weight.zeros is None:
        return Panels(weight.bits, HALF if halves else WIDE, group)
    if weight.kind != "int4" or not halves:
        return Panels(weight.bits, WIDE_ZERO, group)
    fine = HALF_FINE if are_sixteenths(weight.zeros) else WIDE_ZERO
    return Panels(4, HALF_ZERO if is_small_integer(weight.zeros) else fine, group)


def _whole(columns: int) -> int:
    return -(-columns // UNIT) * UNIT


class NativeQuantizedLinear(NativeLinear):
    """x [..., in] -> [..., out] over quantised panels; see `NativeLinear`. Inputs are put in the weight's order."""

    def __init__(self, weight: QuantizedWeight, panels: Panels, bias: torch.Tensor | None = None) -> None:
        self._order = weight.input_order
        rows, columns = weight.codes.shape
        self._prepare(rows, columns, torch.bfloat16, bias, panels)
        codes, zeros = weight.codes.contiguous(), weight.zeros
        if codes.dtype == torch.uint8 and weight.kind == "int8":  # the kernels' eight-bit codes are signed
            assert zeros is not None
            codes, zeros = codes ^ 0x80, zeros - 128
        scales, zeros = weight.scales.contiguous(), None if zeros is None else zeros.contiguous()
        zeros_address = 0 if zeros is None else zeros.data_ptr()
        self._packed.pack_codes(codes.data_ptr(), scales.data_ptr(), zeros_address, panels.group, 0, rows)

    @property
    def reorders(self) -> bool:
        """Whether inputs are put into the weight's order first: the packed weight alone is not the product then."""
        return self._order is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x if self._order is None else x.index_select(-1, self._order))

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `NativeLinear`."""
        return super().argmax(x if self._order is None else x.index_select(-1, self._order))

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """As in `NativeLinear`."""
        values = super().rows(ids, dtype)
        return values if self._order is None else torch.empty_like(values).index_copy_(-1, self._order, values)


def quantized_linear(parts: Sequence[QuantizedWeight], bias: torch.Tensor | None = None) -> SizedLinear:
    """The product with `parts`, one below the other: neighbours as one weight where they agree, through torch for odd
    groups."""
    runs = fusible_runs(parts)
    if len(runs) > 1:
        sizes = [sum(p.out_features for p in run) for run in runs]
        offsets = [None] * len(runs) if bias is None else list(bias.split(sizes))
        return JoinedLinear([quantized_linear(run, b) for run, b in zip(runs, offsets, strict=True)])
    weight = concatenate(parts)
    panels = panels_of_weight(weight)
    return reference_linear([weight], bias) if panels is None else NativeQuantizedLinear(weight, panels, bias)


def queued_linear(
    queue: LoadQueue,
    parts: Sequence[StoredRows | torch.Tensor],
    format: WeightFormat,
    dtype: torch.dtype,
    bias: torch.Tensor | None,
) -> SizedLinear:
    """A weight of `parts` that is quantised when `queue` runs. "gguf": parts keep their blocks, or `dtype` if floats.

    Neighbours that can share panels become one product.
    """
    runs: list[tuple[Panels | None, list[StoredRows | torch.Tensor]]] = []
    for part in parts:
        columns = part.columns if isinstance(part, StoredRows) else int(part.shape[1])
        panels = panels_of_format(format, columns)
        if panels is None and isinstance(part, StoredRows):
            panels = GGUF_PANELS.get(part.kind)
        if runs and runs[-1][0] == panels:
            runs[-1][1].append(part)
        else:
            runs.append((panels, [part]))
    if len(runs) == 1:
        return NativeLinear.queued(queue, parts, dtype, bias, runs[0][0])
    sizes = [sum(p.rows if isinstance(p, StoredRows) else p.shape[0] for p in run) for _, run in runs]
    offsets = [None] * len(runs) if bias is None else list(bias.split(sizes))
    return JoinedLinear(
        [NativeLinear.queued(queue, run, dtype, b, panels) for (panels, run), b in zip(runs, offsets, strict=True)]
    )
