"""Packed modules as entries of a loader, and whether files and settings tell the same story."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch

from octavo.core.weight_format import WeightFormat
from octavo.errors import ModelError
from octavo.kernels.quantized_weights import QuantizedWeight
from octavo.models.quantized_files.module import PackedModule, Scheme, Tensors
from octavo.models.tensor_names import Part
from octavo.models.weight_size import idle_quantization
from octavo.models.weights import LISTED, Entry, LazyWeights

#: Ends of tensors that only packed modules have; those of plain modules.
PACKED_ENDS = frozenset(("weight_packed", "qweight"))
PLAIN_ENDS = frozenset(("weight", "bias"))
ROUTER = "router.weight"  # small, and left plain by every tool


def packed_entries(
    where: str,
    scheme: Scheme,
    packed: Mapping[str, PackedModule],
    plain: Mapping[str, Entry],
    parts_of: Callable[[str], tuple[Part, ...] | None],
) -> tuple[dict[str, Entry], list[str]]:
    """(canonical name -> entry, tensors of no use here).

    plain: the entries that are stored as floats, by canonical name. parts_of: a file's tensor name -> the weights it
    holds, whole or as rows. Raises `ModelError` with every module that does not fit the settings.
    """
    problems = [text for module in packed.values() for text in module.problems]
    found = {name: parts_of(f"{name}.weight") for name in packed}
    problems += [
        f"{name} holds weights transposed or stacked, which cannot be read from a quantised checkpoint"
        for name, parts in found.items()
        if not all(_is_rows(part) for part in parts or ())
    ]
    problems += [
        f"{name} is quantised, but the settings leave it out" for name in packed if scheme.must_be_packed(name) is False
    ]
    for name, entry in plain.items():
        wide = len(entry.shape) == 2 and not name.endswith(ROUTER)
        if wide and scheme.must_be_packed(entry.source_name.removesuffix(".weight")):
            problems.append(f"{entry.source_name} is not quantised, but the settings say so")
    if problems:
        listed = f"{'; '.join(problems[:LISTED])}{'; …' if len(problems) > LISTED else ''}"
        raise ModelError(
            f"{where}: {len(problems)} weights do not fit quantization_config ({scheme.describe()}): {listed}"
        )
    entries: dict[str, Entry] = {}
    unused: list[str] = []
    for name, module in packed.items():
        parts = found[name]
        if parts is None or any(part.name in plain for part in parts):
            unused += module.found.names.values()
        else:
            entries.update({part.name: _entry(name, module, part) for part in parts})
    return entries, unused


def _is_rows(part: Part) -> bool:
    """The whole of a matrix, or some of its rows, as they are."""
    return part.change is None and (not part.index or (len(part.index) == 1 and isinstance(part.index[0], slice)))


def _entry(name: str, module: PackedModule, part: Part) -> Entry:
    outputs, inputs = module.shape
    if not part.index:
        rows, read = outputs, module.read
    else:
        (cut,) = part.index
        assert isinstance(cut, slice)
        rows, read = len(range(*cut.indices(outputs))), lambda: _rows(module.read(), cut)
    size = module.found.num_bytes * rows // max(outputs, 1)
    return Entry(name, (rows, inputs), size, lambda: read().dequantize(), quantized=read)


def _rows(weight: QuantizedWeight, cut: slice) -> QuantizedWeight:
    zeros = None if weight.zeros is None else weight.zeros[cut]
    return replace(weight, codes=weight.codes[cut], scales=weight.scales[cut], zeros=zeros)


def is_empty_bias(files: Tensors, name: str, packed: Iterable[str]) -> bool:
    """A bias of zeros, which some tools add to modules that have none."""
    module, _, end = name.rpartition(".")
    return end == "bias" and module in packed and not bool(torch.any(files.read(name)))


def refuse_idle_quantization(where: str, scheme: Scheme, weights: LazyWeights, asked: WeightFormat | None) -> None:
    """`quantization=` quantises what a checkpoint leaves as floats. Raises `ModelError` where that is nothing."""
    if asked is not None and all(weights.is_quantized(name) for name in weights if weights.is_matrix(name)):
        raise ModelError(idle_quantization(where, scheme.describe(), asked))


def refuse_settings_without_packed(where: str, scheme: Scheme) -> None:
    """Settings that speak of packed weights, and files without any. Raises `ModelError`."""
    raise ModelError(
        f"{where}: quantization_config says {scheme.describe()}, but no tensor of the files is packed "
        f"({', '.join(sorted(scheme.ends - PLAIN_ENDS))}); remove quantization_config from config.json if the weights "
        "are the original ones, or get the quantised files"
    )


def packed_without_settings(unused: Iterable[str]) -> str:
    """What to add to the complaint about `unused` tensors where some are packed weights; else nothing."""
    ends = sorted({name.rpartition(".")[2] for name in unused} & PACKED_ENDS)
    if not ends:
        return ""
    return (
        f". Tensors that end in {', '.join(ends)} are quantised weights, and config.json has no quantization_config "
        "that says how they are meant: use the config.json that belongs to these files"
    )
