"""Packed modules as entries of a loader, and whether files and settings tell the same story."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from octavo.core.weight_format import WeightFormat
from octavo.errors import ModelError
from octavo.models.quantized_files.module import PackedModule, Scheme, Tensors
from octavo.models.weights import LISTED, Entry, LazyWeights

ROUTER = ".router.weight"  # small, and left plain by every tool


def packed_entries(
    where: str,
    scheme: Scheme,
    packed: Mapping[str, PackedModule],
    plain: Mapping[str, Entry],
    rename: Callable[[str], str | None],
) -> tuple[dict[str, Entry], list[str]]:
    """(canonical name -> entry, tensors of no use here).

    plain: the entries that are stored as floats, by canonical name. rename: a file's tensor name -> canonical name.
    Raises `ModelError` with every module that does not fit the settings.
    """
    problems = [text for module in packed.values() for text in module.problems]
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
        canonical = rename(f"{name}.weight")
        if canonical is None or canonical in plain:
            unused += module.found.names.values()
        else:
            entries[canonical] = _entry(name, module)
    return entries, unused


def _entry(name: str, module: PackedModule) -> Entry:
    return Entry(name, module.shape, module.found.num_bytes, lambda: module.read().dequantize(), quantized=module.read)


def is_empty_bias(files: Tensors, name: str, packed: Iterable[str]) -> bool:
    """A bias of zeros, which some tools add to modules that have none."""
    module, _, end = name.rpartition(".")
    return end == "bias" and module in packed and not bool(torch.any(files.read(name)))


def refuse_idle_quantization(where: str, scheme: Scheme, weights: LazyWeights, asked: WeightFormat | None) -> None:
    """`quantization=` quantises what a checkpoint leaves as floats. Raises `ModelError` where that is nothing."""
    if asked is not None and all(weights.is_quantized(name) for name in weights if weights.is_matrix(name)):
        raise ModelError(
            f"quantization={str(asked)!r} has no effect: all weights of {where} are stored quantised "
            f"({scheme.describe()}); leave it out, or give the original weights"
        )
