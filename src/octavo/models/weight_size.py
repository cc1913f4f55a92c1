"""Bytes that a model's weights will take in memory, from headers alone: as a plan needs them before anything is loaded.

Matrices take what their format makes of them (`core/weight_format.py`; which has which: `core/weight_recipe.py`), those
of a quantised checkpoint what they take in its file; norms, biases and routers stay floats. No weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from octavo.core.weight_format import WeightFormat
from octavo.core.weight_recipe import formats_of
from octavo.errors import ConfigError, ModelError
from octavo.models.names import is_float32, matrices, weight_shapes
from octavo.models.spec import ModelSpec


def matrix_formats(spec: ModelSpec, form: WeightFormat | None) -> dict[str, WeightFormat]:
    """What `quantization=` makes of each matrix of a model that is stored as floats; nothing without one."""
    return {} if form is None else formats_of(form, matrices(spec), spec.num_layers)


@dataclass(frozen=True)
class StoredSizes:
    """What a model's files say. packed: bytes of the weights they store quantised, by canonical name.

    kind: how those are stored, in words; None: nothing is. gguf: the blocks of a GGUF file, which the engine unpacks
    unless it is told `quantization="gguf"`. where: the directory, for messages.
    """

    spec: ModelSpec
    packed: Mapping[str, int]
    kind: str | None
    gguf: bool = False
    where: str = "the model"

    @property
    def quantizable(self) -> bool:
        """Can the weights be quantised at load? Not those that run through transformers."""
        return self.spec.extra.get("model_impl") != "transformers"

    def weight_bytes(self, itemsize: int, form: WeightFormat | None = None) -> int:
        """In memory, with `itemsize` bytes for a float and `form` for what it applies to. A tied head counts once."""
        if not self.quantizable:
            if form is not None:
                raise ConfigError(f"quantization={str(form)!r} needs Octavo's own decoder, not transformers")
            return int(self.spec.extra["num_parameters"]) * itemsize
        if form is not None and form.kind == "gguf":
            if not self.gguf:
                raise ConfigError("quantization='gguf' needs a GGUF file; use int8 or int4")
            return self._sum(itemsize, None, self.packed)
        wide = [name for name, shape in weight_shapes(self.spec).items() if len(shape) == 2]
        if form is not None and self.kind is not None and all(name in self.packed for name in wide):
            raise ModelError(idle_quantization(self.where, self.kind, form))
        return self._sum(itemsize, form, {} if self.gguf else self.packed)

    def _sum(self, itemsize: int, form: WeightFormat | None, packed: Mapping[str, int]) -> int:
        total, formats = 0, matrix_formats(self.spec, form)
        for name, shape in weight_shapes(self.spec).items():
            if name in packed:
                total += packed[name]
                continue
            size = formats[name].matrix_bytes(shape[0], shape[1]) if name in formats else None
            total += prod(shape) * (4 if is_float32(name) else itemsize) if size is None else size
        return total


def idle_quantization(where: str, stored: str, asked: WeightFormat) -> str:
    """The words for a `quantization=` that finds nothing to quantise. stored: how the files hold their weights."""
    return (
        f"quantization={str(asked)!r} has no effect: all weights of {where} are stored quantised "
        f"({stored}); leave it out, or give the original weights"
    )
