"""How much memory the weights of a model will take at least, from the headers of its files, before torch is there.

Less than what they take is a lost chance to clear memory early; more would be memory for nothing. So whatever may be
left out or kept in fewer bytes does not count.
"""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.models.resolve import DEFAULT_MODEL, INDEX, SINGLE, resolve_model

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}
#: Parts of a name of tensors that may be left out: a tied head's copy, and encoders of other media.
_UNSURE = ("lm_head", "vision", "visual", "audio")


def least_bytes(config: EngineConfig) -> tuple[int, tuple[Path, ...]]:
    """(bytes, files) for a model whose files are here; (0, ()) where nothing is certain, and for broken files."""
    if config.quantization is not None or config.load_format == "dummy" or config.model_impl == "transformers":
        return 0, ()
    if config.model != DEFAULT_MODEL and not Path(config.model).expanduser().exists():
        return 0, ()  # a hub id: it may have to be fetched
    with suppress(ModelError, OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        found = resolve_model(config.model, config.load_format)
        if found.kind == "gguf":  # most are quantised and become wider; floats may become half as wide
            return found.path.stat().st_size // 2, (found.path,)
        if "quantization_config" in json.loads((found.path / "config.json").read_text(encoding="utf-8")):
            return 0, ()
        wide = 4 if config.dtype == "float32" else 2
        files = _safetensors(found.path)
        return sum(_least_of(path, wide) for path in files), files
    return 0, ()


def _safetensors(directory: Path) -> tuple[Path, ...]:
    """The files that `SafetensorsFiles` reads."""
    if not (directory / INDEX).exists():
        return (directory / SINGLE,)
    index: dict[str, Any] = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    return tuple(directory / name for name in sorted(set(index["weight_map"].values())))


def _least_of(path: Path, wide: int) -> int:
    """Bytes of a file's tensors of floats, in at most `wide` bytes each."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(min(length, path.stat().st_size)))
    return sum(
        prod(entry["shape"]) * min(_BYTES[entry["dtype"]], wide)
        for name, entry in header.items()
        if name != "__metadata__" and entry["dtype"] in _BYTES and not any(part in name for part in _UNSURE)
    )
