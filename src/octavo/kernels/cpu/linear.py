"""`NativeLinear`: a product in C++ over a weight packed once, and the queue that packs weights from files.

Weights keep their dtype (bfloat16 and float16 are widened inside the product, which halves the bytes a token costs).

Invariant, bit for bit on one instruction set: every output is the sum, in order, of chains of fused multiply-adds over
256 inputs each, whatever the number of rows or threads; so a row of a result depends on that row of the input only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from octavo.core.weight_format import screen_bytes
from octavo.errors import ConfigError
from octavo.kernels.cpu.loader import dtype_code, native
from octavo.kernels.cpu.screen import Screen
from octavo.kernels.ops import StoredRows

if TYPE_CHECKING:
    from octavo.kernels.cpu.quantized import Panels

#: GGUF's numbers of the plain types
_KINDS_OF_TENSORS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}


class NativeLinear:
    """x [..., in] -> [..., out] in x's dtype (float32, bfloat16 or float16); sums in float32.

    Holds a packed copy of the weight and nothing else; `rows` reads single rows back, exactly, so that a tied
    embedding needs no second copy.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        code = dtype_code(weight.dtype)
        if weight.dim() != 2 or code is None or weight.device.type != "cpu" or 0 in weight.shape:
            raise ConfigError(
                f"a weight of shape {tuple(weight.shape)}, {weight.dtype} on {weight.device}: a non-empty [out, in] of "
                "float32, bfloat16 or float16 on the CPU is needed"
            )
        self._prepare(weight.shape[0], weight.shape[1], weight.dtype, bias)
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        self._packed.pack(weight.data_ptr(), weight.stride(0))

    def _prepare(
        self, rows: int, columns: int, dtype: torch.dtype, bias: torch.Tensor | None, panels: Panels | None = None
    ) -> None:
        """Room for the panels: of `dtype`, or quantised ones."""
        if bias is not None and bias.shape != (rows,):
            raise ConfigError(f"a bias of shape {tuple(bias.shape)} for {rows} outputs")
        self.out_features, self.in_features = rows, columns
        self._bias = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._bias_address = 0 if self._bias is None else self._bias.data_ptr()
        self.quantized = panels is not None
        self._screen: Screen | None = None
        self._packed: Any
        if panels is None:
            self._packed = native().PackedWeight(dtype_code(dtype), rows, columns)
        else:
            self._packed = panels.packed(rows, columns)

    @classmethod
    def queued(
        cls,
        queue: LoadQueue,
        parts: Sequence[StoredRows | torch.Tensor],
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        panels: Panels | None = None,
    ) -> NativeLinear:
        """A weight of `parts`, one below the other, that is filled when `queue` runs; not to be used before.

        panels: quantised ones, where it is not to be kept in `dtype`.
        """
        columns = parts[0].columns if isinstance(parts[0], StoredRows) else parts[0].shape[1]
        rows = sum(part.rows if isinstance(part, StoredRows) else part.shape[0] for part in parts)
        linear = cls.__new__(cls)
        linear._prepare(rows, columns, dtype, bias, panels)
        first = 0
        for part in parts:
            first += queue.add(linear._packed, part, first)
        return linear

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight, and of its screen, which comes into being with use."""
        if self._screen is None:
            return int(self._packed.bytes)
        tiles = native().in_use() == "amx"
        return int(self._packed.bytes) + screen_bytes(self.out_features, self.in_features, on_tiles=tiles)

    @property
    def native_parts(self) -> tuple[Any, int]:
        """The packed weight, and the address of the bias (0: none), which lives as long as this object."""
        return self._packed, self._bias_address

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flat, code = self._input(x)
        out = torch.empty((*x.shape[:-1], self.out_features), dtype=x.dtype)
        rows = flat.shape[0]
        if rows:
            self._packed.run(flat.data_ptr(), code, flat.stride(0), rows, out.data_ptr(), code, self._bias_address)
        return out

    def argmax(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [N, in] -> first index int64 [N] and value float32 [N] of each row's largest output (a NaN is largest).

        The same sums as calling it, but the outputs are never stored: for 64 rows of a vocabulary of 262,144 that is
        64 MiB less to write and to read again.
        """
        flat, code = self._input(x)
        rows = flat.shape[0]
        ids, values = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float32)
        place = (flat.data_ptr(), code, flat.stride(0), rows, ids.data_ptr(), values.data_ptr())
        if rows and self._screen is not None:
            self._screen.argmax(place)
        elif rows:
            self._packed.argmax(*place, self._bias_address)
        return ids, values

    def screen(self) -> str:
        """From now on `argmax` looks at a copy of the weight in six bits first; the same results. Or why it cannot."""
        if self.quantized:
            return "the output head is quantised, and a copy of it in six bits would be as slow to read"
        self._screen = Screen(self._packed, self._bias_address)
        return ""

    def _input(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        code = dtype_code(x.dtype)
        if x.shape[-1] != self.in_features or code is None or x.device.type != "cpu":
            raise ConfigError(
                f"an input of shape {tuple(x.shape)}, {x.dtype} on {x.device}: {self.in_features} features of float32, "
                "bfloat16 or float16 on the CPU are needed"
            )
        return as_rows(x), code

    def rows(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Rows `ids` (int64 [n]) of the weight as [n, in], converted to `dtype`. IndexError outside [0, out)."""
        code = dtype_code(dtype)
        if code is None:
            raise ConfigError(f"rows in {dtype}: float32, bfloat16 or float16 is needed")
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((*ids.shape, self.in_features), dtype=dtype)
        self._packed.rows(ids.data_ptr(), ids.numel(), out.data_ptr(), code)
        return out


class LoadQueue:
    """Weights on their way from files into panels, see csrc/loading.h. Fill it, then run it; several threads may."""

    def __init__(self) -> None:
        self._native = native().LoadQueue()
        self._owners: list[object] = []

    def add(self, packed: object, part: StoredRows | torch.Tensor, first: int) -> int:
        """Put the rows of `part` at row `first` of a packed weight; returns how many rows that is."""
        if isinstance(part, StoredRows):
            self._owners.append(part.owner)
            self._native.add(packed, part.address, part.kind, first, part.rows, True)
            return part.rows
        part = part.contiguous()
        self._owners.append(part)
        self._native.add(packed, part.data_ptr(), _KINDS_OF_TENSORS[part.dtype], first, part.shape[0], False)
        return int(part.shape[0])

    def run(self, threaded: bool, share: float = 1.0) -> None:
        """Until nothing is left to begin, without the interpreter lock. threaded: on all threads, else the caller's.

        share: stop once this part of the bytes is done. What another thread has begun may still be under way when
        this returns.
        """
        self._native.run(threaded, share)

    def check(self) -> None:
        """Raise ConfigError if a weight could not be quantised."""
        if not self._native.finite:
            raise ConfigError(
                "the model's weights hold numbers that are not finite (infinities or NaN); they cannot be quantised"
            )

    @property
    def done(self) -> int:
        """Bytes of the files that are read."""
        return int(self._native.done)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [rows, D] with contiguous rows; a view where the strides allow one."""
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()
