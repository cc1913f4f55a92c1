"""`WeightSource`: a model's weights on their way into products, in whatever form they are given.

A weight comes quantised already, as rows of a file, or as a tensor; several that read the same input become one
product where they can, else products side by side. What is kept is counted. It knows names, not what layers do with
the products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from octavo.core.weight_format import FIXED, WeightFormat
from octavo.kernels.ops import Ops, SizedLinear, StoredRows
from octavo.kernels.quantized_weights import JoinedLinear
from octavo.models.names import is_float32, weight_shapes
from octavo.models.spec import ModelSpec
from octavo.models.weight_size import matrix_formats


class WeightSource:
    """weights: canonical name -> tensor of any float dtype. queue: of `ops`, or None: tensors are handed over at once.

    num_bytes: of all that was taken so far, as it is kept. fixed_point: whether some of it became fixed-point numbers.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        ops: Ops,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        queue: Any = None,
    ) -> None:
        self._weights, self._ops, self._queue = weights, ops, queue
        self._spec, self._dtype, self._device = spec, dtype, device
        self._formats = matrix_formats(spec, getattr(ops, "quantization", None))
        self._layer_format: WeightFormat | None = getattr(ops, "layer_format", None)
        self._quantized = getattr(weights, "quantized", lambda name: None)
        self.num_bytes = 0
        self.fixed_point = False

    def quantizes(self, name: str) -> bool:
        """Will its product hold less than the weight: given quantised, or quantised as it is taken?"""
        packed = getattr(self._weights, "is_quantized", lambda name: self._quantized(name) is not None)
        return name in self._formats or packed(name)

    def take(self, name: str, count: bool = True) -> torch.Tensor:
        """One weight in its final dtype and place, counted unless it goes on into something that is."""
        dtype = torch.float32 if is_float32(name) else self._dtype
        tensor = self._weights[name].to(device=self._device, dtype=dtype)
        if count:
            self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def fuse(self, prefix: str, names: Sequence[str], bias: bool) -> SizedLinear:
        """One product for several weights that read the same input."""
        offsets = [self.take(f"{prefix}{name}.bias") for name in names] if bias else []
        offset = (offsets[0] if len(offsets) == 1 else torch.cat(offsets)) if bias else None
        linear = self._product([f"{prefix}{name}.weight" for name in names], offset)
        self.num_bytes += linear.nbytes
        return linear

    def _product(self, names: list[str], offset: torch.Tensor | None) -> SizedLinear:
        given = {name: self._quantized(name) for name in names}
        quantized = [part.to(self._device) for part in given.values() if part is not None]
        if quantized and len(quantized) == len(names):
            return self._ops.quantized_linear(quantized, offset)
        if quantized:  # some of them only
            return self._joined([[name] for name in names], offset)
        runs = [list(run) for _, run in groupby(names, self._format_of)]
        return self._of_floats(names, offset) if len(runs) == 1 else self._joined(runs, offset)

    def _joined(self, runs: list[list[str]], offset: torch.Tensor | None) -> SizedLinear:
        """Products side by side, of some of the weights each."""
        shapes = weight_shapes(self._spec)
        sizes = [sum(shapes[name][0] for name in run) for run in runs]
        offsets = [None] * len(runs) if offset is None else list(offset.split(sizes))
        return JoinedLinear([self._product(run, part) for run, part in zip(runs, offsets, strict=True)])

    def _of_floats(self, names: list[str], offset: torch.Tensor | None) -> SizedLinear:
        """Weights of one format, which are quantised now if they have one."""
        form = self._format_of(names[0])
        self.fixed_point |= form == FIXED
        if self._queue is None:
            tensors = [self.take(name, count=False) for name in names]
            return self._ops.linear(tensors[0] if len(tensors) == 1 else torch.cat(tensors), offset, form)
        rows = [self._rows(name) for name in names]
        linear: SizedLinear = self._ops.queued_linear(self._queue, rows, offset, form)  # type: ignore[attr-defined]
        return linear

    def _format_of(self, name: str) -> WeightFormat | None:
        """What one matrix becomes; None: it stays as it is."""
        return self._formats.get(name) or (self._layer_format if name.startswith("layers.") else None)

    def _rows(self, name: str) -> StoredRows | torch.Tensor:
        """One matrix as it is stored, if the operations can unpack that, else as a tensor in its final dtype."""
        find = getattr(self._weights, "stored", None)
        stored: StoredRows | None = None if find is None else find(name)
        if stored is None or not self._ops.can_load(stored.kind, stored.columns):  # type: ignore[attr-defined]
            return self.take(name, count=False)
        return stored
