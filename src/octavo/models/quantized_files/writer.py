"""A quantised copy of a checkpoint, as compressed-tensors "pack-quantized": `octavo quantize`.

The linear weights become the codes that `quantization=` makes of them at load, bit for bit; everything else is copied
as it is stored (of a GGUF file: written out, see `sources.py`). One tensor at a time is in memory, and one shard. The
copy is put together beside its place and renamed into it when it is whole, so that a reader never sees half of it.

Octavo's int4 zeros are sixteenths, which the format's packed integers cannot hold: they are written as float16 numbers,
unpacked. With `keep_embeddings` the embedding and the output head stay floats and zeros are whole and packed: that is
the form that other engines read (they know quantised linear layers, not quantised embeddings).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.core.weight_format import WeightFormat
from octavo.errors import ConfigError, ModelError
from octavo.kernels.quantized_weights import QuantizedWeight, quantize_rows
from octavo.models.families import FAMILIES
from octavo.models.quantized_files.packing import pack_columns, pack_rows
from octavo.models.quantized_files.sources import DTYPES, TensorFiles, kept_bytes, open_source
from octavo.models.resolve import INDEX, SINGLE
from octavo.models.spec import ModelSpec
from octavo.models.tensor_names import HARMLESS, parts_of
from octavo.models.weight_size import matrix_formats
from octavo.models.weights import Progress

SHARD_BYTES = 4 << 30
BITS = {"int8": 8, "int4": 4}
EMBEDDINGS = ("embedding.weight", "head.weight")


@dataclass(frozen=True)
class Written:
    """What came of it. Bytes of the tensors, before and after; quantised: modules."""

    path: Path
    before: int
    after: int
    quantised: int
    shards: int


@dataclass(frozen=True)
class _Item:
    """One tensor of the source. module: its name without ".weight" if it is to be quantised, to `form`; else None."""

    name: str
    module: str | None
    shape: tuple[int, ...]
    source_bytes: int
    num_bytes: int
    form: WeightFormat | None = None


def quantize_checkpoint(
    source: Path,
    target: Path,
    form: WeightFormat,
    *,
    keep_embeddings: bool = False,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Progress | None = None,
) -> Written:
    """Write a quantised copy of `source` (a directory or a GGUF file) to `target`, which must not exist yet.

    form: int8, or int4 with its group, mixed or not. on_progress: bytes of the source done, of all. Raises
    `ConfigError` or `ModelError`, before anything is written, for what cannot be done.
    """
    if form.kind not in BITS:
        raise ConfigError(f"--quantization {form}: a checkpoint can be stored as {', '.join(BITS)}")
    if target.exists():
        raise ConfigError(f"{target}: exists already; name a directory that does not")
    model = open_source(source)
    items = _items(model.files, model.spec, form, keep_embeddings)
    beside = _place_beside(target)
    try:
        shards = _write_tensors(model.files, items, beside, shard_bytes, on_progress, whole_zeros=keep_embeddings)
        heads = FAMILIES[model.spec.architecture].names.heads
        settings = quantization_config(items, keep_embeddings, heads)
        config = {**model.config, "tie_word_embeddings": model.spec.tied_head, "quantization_config": settings}
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        model.write_rest(beside)
        beside.chmod(0o777 & ~_umask())
        beside.rename(target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    before, after = (sum(getattr(i, name) for i in items) for name in ("source_bytes", "num_bytes"))
    return Written(target, before, after, sum(i.module is not None for i in items), shards)


def _place_beside(target: Path) -> Path:
    """An empty directory next to `target`, to be renamed into it."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"{target}: cannot be written: {error.strerror or error} ({target.parent}); name a directory in a place "
            "you may write to"
        ) from error


def quantization_config(items: list[_Item], keep_embeddings: bool, heads: tuple[str, ...]) -> dict[str, Any]:
    """The settings, as the compressed-tensors library spells them. Plain linear modules are named in `ignore`.

    A group of settings for each format: that of most modules targets them by class, the others come first and name
    theirs. heads: names of the output head, a module to other libraries even where its weight is the embedding's.
    """
    modules: dict[WeightFormat, list[str]] = {}
    for item in items:
        if item.module is not None and item.form is not None:
            modules.setdefault(item.form, []).append(item.module)
    fewest = sorted(modules, key=lambda form: len(modules[form]))
    classes = ["Linear"] if keep_embeddings else ["Linear", "Embedding"]
    groups = {}
    for number, form in enumerate(fewest):
        targets = classes if form == fewest[-1] else modules[form]
        weights = _group_settings(form, whole_zeros=keep_embeddings)
        groups[f"group_{number}"] = {
            "targets": targets, "weights": weights, "input_activations": None, "output_activations": None,
        }  # fmt: skip
    plain = [
        i.name.removesuffix(".weight")
        for i in items
        if i.module is None and len(i.shape) == 2 and i.name.endswith(".weight")
    ]
    quantised = {i.module for i in items}
    plain += [head for head in heads if head not in quantised and head not in plain]
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": plain, "kv_cache_scheme": None, "global_compression_ratio": None,
    }  # fmt: skip


def _group_settings(form: WeightFormat, *, whole_zeros: bool) -> dict[str, Any]:
    int4 = form.kind == "int4"
    return {
        "num_bits": BITS[form.kind], "type": "int", "symmetric": not int4, "strategy": "group" if int4 else "channel",
        "group_size": form.group_size, "dynamic": False, "actorder": None, "block_structure": None,
        "observer": None, "observer_kwargs": {}, "zp_dtype": None if whole_zeros or not int4 else "torch.float16",
    }  # fmt: skip


def packed_tensors(weight: QuantizedWeight, *, whole_zeros: bool = False) -> dict[str, torch.Tensor]:
    """A weight that `quantize_rows` made -> its tensors, by the ends of their names. Zeros: packed if whole."""
    bits = BITS[weight.kind]
    codes = weight.codes if weight.codes.dtype == torch.uint8 else (weight.codes.to(torch.int16) + 128).to(torch.uint8)
    tensors = {
        "weight_packed": pack_columns(codes, bits),
        "weight_scale": weight.scales.contiguous(),
        "weight_shape": torch.tensor(weight.codes.shape, dtype=torch.int64),
    }
    if weight.zeros is not None and whole_zeros:
        tensors["weight_zero_point"] = pack_rows(weight.zeros.to(torch.uint8), bits)
    elif weight.zeros is not None:
        tensors["weight_zero_point"] = weight.zeros.half()
    return tensors


# -- what becomes of each tensor ---------------------------------------------------------------------------------------


def _items(files: TensorFiles, spec: ModelSpec, form: WeightFormat, keep_embeddings: bool) -> list[_Item]:
    names = FAMILIES[spec.architecture].names
    prefix = names.prefix_in(files.names())
    formats = matrix_formats(spec, form)
    items = []
    for name in files.names():
        parts = parts_of(name, spec, names, prefix)
        if parts is None and HARMLESS.fullmatch(name):
            continue
        assert parts is not None, "open_safetensors refuses what it does not know"
        if parts[0].name == "head.weight" and spec.tied_head and f"{prefix}{names.embedding}.weight" in files:
            continue  # an equal copy of the embedding
        shape, size = files.describe(name)[1], files.num_bytes(name)
        if not all(p.name in formats for p in parts) or (keep_embeddings and parts[0].name in EMBEDDINGS):
            items.append(_Item(name, None, shape, size, kept_bytes(files, name)))
            continue
        if not name.endswith(".weight") or any(p.change is not None or len(p.index) > 1 for p in parts):
            raise ModelError(
                f"{files.directory}: {name} stores its weights transposed or stacked, which compressed-tensors has no "
                "form for; quantise this model at load instead (quantization=)"
            )
        own = _one_format(f"{files.directory}: {name}", form, {formats[p.name] for p in parts})
        packed = _packed_bytes(shape[0], shape[1], own, whole_zeros=keep_embeddings)
        items.append(_Item(name, name.removesuffix(".weight"), shape, size, packed, own))
    return items


def _one_format(where: str, asked: WeightFormat, found: set[WeightFormat]) -> WeightFormat:
    """The format of all weights that one tensor holds; a module can be stored in one only."""
    if len(found) > 1:
        pure = WeightFormat(asked.kind, asked.group_size)
        raise ModelError(
            f"{where} holds several weights, of which {asked} keeps some in 8 bits and some in 4, which "
            f"compressed-tensors has no form for; use {pure} (all in 4), int8, or quantise this model at load instead "
            "(quantization=)"
        )
    return next(iter(found))


def _packed_bytes(rows: int, columns: int, form: WeightFormat, *, whole_zeros: bool) -> int:
    bits, size = BITS[form.kind], min(form.group_size or columns, columns)
    groups = -(-columns // size)
    codes = 4 * rows * -(-columns * bits // 32)
    zeros = 4 * -(-rows * bits // 32) if whole_zeros else 2 * rows
    zeros = groups * zeros if form.kind == "int4" else 0
    return codes + 4 * rows * groups + zeros + 16


# -- writing -------------------------------------------------------------------------------------------------------


def _write_tensors(
    files: TensorFiles,
    items: list[_Item],
    directory: Path,
    shard_bytes: int,
    on_progress: Progress | None,
    *,
    whole_zeros: bool,
) -> int:
    """All tensors in one file or in shards with an index; how many files."""
    shards: list[list[_Item]] = [[]]
    held = 0
    for item in items:
        if shards[-1] and held + item.num_bytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(item)
        held += item.num_bytes
    table: dict[str, str] = {}
    total, done = sum(i.source_bytes for i in items), 0
    for number, shard in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for item in shard:
            tensors |= _tensors(files, item, whole_zeros)
            done += item.source_bytes
            if on_progress is not None:
                on_progress(done, total)
        save_file(tensors, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o666 & ~_umask())  # the library makes it private
        table |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(i.num_bytes for i in items)}, "weight_map": table}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return len(shards)


def _tensors(files: TensorFiles, item: _Item, whole_zeros: bool) -> dict[str, torch.Tensor]:
    tensor = files.read(item.name)
    if item.module is None or item.form is None:
        return {item.name: tensor.to(DTYPES[files.describe(item.name)[0]]).contiguous()}
    try:
        weight = quantize_rows(tensor, item.form.kind, item.form.group_size, whole_zeros=whole_zeros)
    except ConfigError as error:
        raise ModelError(f"{files.directory}: {item.name}: {error}") from error
    return {f"{item.module}.{end}": part for end, part in packed_tensors(weight, whole_zeros=whole_zeros).items()}


def _umask() -> int:
    """The process's mask for new files (a temporary directory starts out private)."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
