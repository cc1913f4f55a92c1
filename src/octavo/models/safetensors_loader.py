"""Weights from a Hugging Face directory of safetensors: one file, or the shards that the index names.

Only files the index names are opened; a stale or consolidated copy beside them is never looked at. No pickle is ever
read. Every tensor must be used and every weight found, or the load stops with the list.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from octavo.errors import ModelError
from octavo.kernels.ops import StoredRows
from octavo.models.config_reader import HeadState
from octavo.models.families import FAMILIES
from octavo.models.names import is_norm, weight_shapes
from octavo.models.quantized_files import Scheme, find_packed, read_scheme
from octavo.models.quantized_files.entries import (
    is_empty_bias,
    packed_entries,
    packed_without_settings,
    refuse_settings_without_packed,
)
from octavo.models.resolve import INDEX, SINGLE
from octavo.models.spec import ModelSpec
from octavo.models.tensor_names import HARMLESS, Part, parts_of, tensor_of
from octavo.models.weights import Entry, LazyWeights, Progress, check_entries, part_shapes, run_of_rows

#: Where the families keep their embedding and their output head.
EMBEDDINGS = tuple(dict.fromkeys(f"{p}{f.names.embedding}.weight" for f in FAMILIES.values() for p in f.names.prefixes))
HEADS = tuple(dict.fromkeys(f"{head}.weight" for f in FAMILIES.values() for head in f.names.heads))
FLOATS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
#: GGUF's numbers of these types
KINDS = {"F32": 0, "F16": 1, "BF16": 30}


def canonical_name(name: str, spec: ModelSpec) -> str | None:
    """Name in `models/names.py` of a Hugging Face tensor that is one weight as it stands; None for any other."""
    names = FAMILIES[spec.architecture].names
    for prefix in names.prefixes:
        parts = parts_of(name, spec, names, prefix)
        if parts is not None and len(parts) == 1:
            return parts[0].name
    return None


def read_json(path: Path) -> Any:
    """A JSON file, or `ModelError` naming it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error


class SafetensorsFiles:
    """The tensors of a directory: name -> (file, dtype, shape), from headers only."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._maps: dict[Path, tuple[mmap.mmap, dict[str, Any]]] = {}
        if (directory / INDEX).exists():
            self._read_index(directory / INDEX)
        elif (directory / SINGLE).exists():
            path = directory / SINGLE
            self._file_of = dict.fromkeys(self._open(path).keys(), path)
        else:
            others = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pth"))
            hint = (
                f"; found {', '.join(others[:4])}, but pickled weights are never read: save the model again as "
                "safetensors (save_pretrained of transformers), or take a repository that has them"
                if others
                else "; download the weights again, or load_format='dummy' makes random ones from config.json"
            )
            raise ModelError(f"{directory}: no weights: no {SINGLE} and no {INDEX}{hint}")

    def _read_index(self, path: Path) -> None:
        index = read_json(path)
        table = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(table, dict) or not table or not all(isinstance(v, str) for v in table.values()):
            raise ModelError(f"{path}: weight_map is missing or empty; it must map tensor names to files")
        names = sorted(set(table.values()))
        outside = [n for n in names if Path(n).name != n]
        if outside:
            raise ModelError(f"{path}: names files outside its directory: {', '.join(outside)}")
        absent = [name for name in names if not (self.directory / name).is_file()]
        if absent:
            raise ModelError(f"{path}: names files that are not there: {', '.join(absent)}; download them again")
        held = {name: set(self._open(self.directory / name).keys()) for name in names}
        lost = [tensor for tensor, file in table.items() if tensor not in held[file]]
        unnamed = [
            f"{tensor} in {file}"
            for file, tensors in held.items()
            for tensor in sorted(tensors)
            if table.get(tensor) != file
        ]
        if lost or unnamed:
            raise ModelError(
                f"{path}: index and files disagree; tensors not in their file: {lost[:12]}; "
                f"not in the index: {unnamed[:12]}"
            )
        self._file_of = {tensor: self.directory / file for tensor, file in table.items()}

    def _open(self, path: Path) -> Any:
        if path not in self._handles:
            try:
                self._handles[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: broken or truncated safetensors file: {error}") from error
        return self._handles[path]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return list(self._file_of)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype as safetensors spells it, shape)."""
        part = self._open(self._file_of[name]).get_slice(name)
        return part.get_dtype(), tuple(part.get_shape())

    def num_bytes(self, name: str) -> int:
        """Bytes of a tensor of floats."""
        dtype, shape = self.describe(name)
        return FLOATS[dtype] * prod(shape)

    def stored(self, name: str, index: tuple[int | slice, ...] = ()) -> StoredRows | None:
        """The rows of a matrix in a map of its file; None for what is no matrix of a type with a number.

        index: numbers, then at most one slice, which cut a matrix out of the tensor; its rows lie together.
        """
        dtype, shape = self.describe(name)
        if dtype not in KINDS:
            return None
        run = run_of_rows(shape, index)
        if run is None or len(run[1]) != 2:
            return None
        first, rows = run
        path = self._file_of[name]
        if path not in self._maps:
            self._maps[path] = _map(path)
        content, header = self._maps[path]
        (header_bytes,) = struct.unpack_from("<Q", content)
        offset = 8 + header_bytes + header[name]["data_offsets"][0] + first * FLOATS[dtype]
        address = np.frombuffer(content, dtype=np.uint8, offset=offset).ctypes.data
        return StoredRows(int(address), KINDS[dtype], rows[0], rows[1], content)

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """A tensor, or the part of it that `index` cuts out along its first dimensions."""
        handle = self._open(self._file_of[name])
        tensor: torch.Tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        return tensor


def _map(path: Path) -> tuple[mmap.mmap, dict[str, Any]]:
    """A file that `safe_open` has accepted: its bytes and its header, name -> dtype, shape, data_offsets."""
    with path.open("rb") as stream:
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    (length,) = struct.unpack_from("<Q", content)
    return content, json.loads(content[8 : 8 + length])


def quantization_of(directory: Path, config: Mapping[str, Any]) -> Scheme | None:
    """How the weights of a directory are packed: config.json says it, or a file of its own (older AWQ and GPTQ)."""
    given = config.get("quantization_config") if isinstance(config, Mapping) else None
    if given:
        return read_scheme(given)
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (directory / name).is_file():
            settings = read_json(directory / name)
            return read_scheme({"quant_method": method, **settings} if isinstance(settings, Mapping) else settings)
    return None


def head_state(files: SafetensorsFiles, scheme: Scheme | None = None) -> HeadState:
    """What the files hold as output head. Only a head of the embedding's shape and first row is compared in full."""
    if scheme is not None and "lm_head" in find_packed(files, scheme):
        return "own"
    head = next((name for name in HEADS if name in files), None)
    embedding = next((name for name in EMBEDDINGS if name in files), None)
    if head is None:
        return "absent"
    if embedding is None:
        return "only"
    if files.describe(head) != files.describe(embedding):
        return "own"
    ours, theirs = files.read(head), files.read(embedding)
    return "equal" if torch.equal(ours[:1], theirs[:1]) and torch.equal(ours, theirs) else "own"


def open_safetensors(
    files: SafetensorsFiles, spec: ModelSpec, on_progress: Progress | None = None, scheme: Scheme | None = None
) -> LazyWeights:
    """Lazy canonical weights of a directory. Raises `ModelError` with every tensor that does not fit.

    scheme: how the linear modules are packed, see `quantized_files`.
    """
    entries: dict[str, Entry] = {}
    unused: list[str] = []
    expected = weight_shapes(spec)
    packed = {} if scheme is None else find_packed(files, scheme)
    if scheme is not None and not packed:
        refuse_settings_without_packed(str(files.directory), scheme)
    taken = {name for module in packed.values() for name in module.found.names.values()}
    names = FAMILIES[spec.architecture].names
    prefix = names.prefix_in(files.names())
    for name in files.names():
        if name in taken:
            continue
        parts = parts_of(name, spec, names, prefix)
        if parts is not None and parts[0].name == "head.weight" and spec.tied_head:
            if f"{prefix}{names.embedding}.weight" in files:
                continue  # an equal copy, see `head_state`
            parts = (Part("embedding.weight"),)  # tied, and only the other name of the pair was saved
        if (parts is None or parts[0].name not in expected) and is_empty_bias(files, name, packed):
            continue
        if parts is None:
            if HARMLESS.fullmatch(name) is None:
                unused.append(name)
            continue
        dtype, whole = files.describe(name)
        if dtype not in FLOATS:
            raise ModelError(f"{files.directory}: {name} has dtype {dtype}; supported: {', '.join(FLOATS)}")
        for part, shape in zip(parts, part_shapes(whole, parts), strict=True):
            size = FLOATS[dtype] * prod(shape)
            entries[part.name] = Entry(name, shape, size, _reader(files, name, part, spec), _stored(files, name, part))
    if scheme is not None:
        where = str(files.directory)
        more, idle = packed_entries(where, scheme, packed, entries, lambda name: parts_of(name, spec, names, prefix))
        entries, unused = entries | more, unused + idle
    note = "" if scheme is not None else packed_without_settings(unused)
    check_entries(
        str(files.directory), entries, expected, unused, lambda name: tensor_of(name, spec, names, prefix), note
    )
    return LazyWeights(entries, on_progress)


def _reader(files: SafetensorsFiles, name: str, part: Part, spec: ModelSpec) -> Callable[[], torch.Tensor]:
    if is_norm(part.name) and spec.norm_offset:
        return lambda: files.read(name).float() + 1.0
    return lambda: part.arranged(files.read(name, part.index))


def _stored(files: SafetensorsFiles, name: str, part: Part) -> Callable[[], StoredRows | None]:
    if part.change is not None:
        return lambda: None
    return lambda: files.stored(name, part.index)
