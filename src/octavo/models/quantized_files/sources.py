"""Where `octavo quantize` takes a model from: a directory of safetensors, or a GGUF file.

A source says what the model is, hands out tensors under the names of a Hugging Face file, and writes what else belongs
to a copy: settings as `config.json` has them, tokenizer, generation settings. It quantises nothing.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.errors import ModelError
from octavo.models.config_reader import FALLBACK, spec_from_config
from octavo.models.config_writer import config_of
from octavo.models.families import FAMILIES
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_loader import open_gguf
from octavo.models.gguf_reader import spec_from_gguf
from octavo.models.names import is_float32, is_norm
from octavo.models.safetensors_loader import (
    FLOATS,
    SafetensorsFiles,
    head_state,
    open_safetensors,
    quantization_of,
    read_json,
)
from octavo.models.spec import ModelSpec
from octavo.models.tensor_names import tensor_of
from octavo.models.tokenizer_files import load_tokenizer_gguf

#: What else belongs to a model: tokenizer, chat template, generation settings, licence.
COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "generation_config.json",
          "vocab.json", "merges.txt", "LICENSE*", "NOTICE*")  # fmt: skip
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFiles(Protocol):
    """Tensors by the names of a Hugging Face file. directory: for messages."""

    directory: Path

    def __contains__(self, name: str) -> bool: ...

    def names(self) -> list[str]: ...

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype in which it is kept if it stays a float, shape)."""
        ...

    def num_bytes(self, name: str) -> int:
        """Bytes of it in the source."""
        ...

    def read(self, name: str) -> torch.Tensor: ...


class Source(Protocol):
    """A model that can be written anew."""

    spec: ModelSpec
    config: dict[str, Any]
    files: TensorFiles

    def write_rest(self, directory: Path) -> None:
        """All but config.json and the weights."""
        ...


def open_source(path: Path) -> Source:
    """Raises `ModelError` for what is no model, is quantised already, or has no form as a directory."""
    return _GGUFSource(path) if path.is_file() else _Directory(path)


class _Directory:
    """A directory of safetensors: everything is copied as it is stored."""

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: no config.json; a directory of safetensors or a GGUF file is needed")
        self._path, self.config = path, read_json(path / "config.json")
        if (scheme := quantization_of(path, self.config)) is not None:
            raise ModelError(f"{path}: is quantised already ({scheme.describe()}); give the original weights")
        self.files: TensorFiles = (files := SafetensorsFiles(path))
        self.spec = self._read_spec(files)
        open_safetensors(files, self.spec)  # refuses what is incomplete

    def _read_spec(self, files: SafetensorsFiles) -> ModelSpec:
        """Its refusals name the file, and no other code: only the own decoder's models can be written."""
        try:
            return spec_from_config(self.config, head_state(files))
        except ModelError as error:
            reason = str(error).removeprefix("config: ").removesuffix(f"; {FALLBACK}")
            raise ModelError(
                f"{self._path / 'config.json'}: {reason}; octavo quantize writes models that its own decoder covers"
            ) from error

    def write_rest(self, directory: Path) -> None:
        for path in sorted({p for pattern in COPIED for p in self._path.glob(pattern) if p.is_file()}):
            shutil.copyfile(path, directory / path.name)


class _GGUFSource:
    """A GGUF file: its header becomes config.json and tokenizer files, its blocks the numbers they stand for."""

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self.spec = spec_from_gguf(file)
        self.config = config_of(self.spec, str(path))
        self._tokenizer = load_tokenizer_gguf(file)
        self.files: TensorFiles = _GGUFTensors(path, file, self.spec)

    def write_rest(self, directory: Path) -> None:
        self._tokenizer.backend.save(str(directory / "tokenizer.json"))
        templates = [{"name": n, "template": text} for n, text in self._tokenizer.chat_templates.items()]
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **self._tokenizer.special_tokens,
                                    "model_max_length": self.spec.max_position_embeddings,
                                    "clean_up_tokenization_spaces": False}  # fmt: skip
        if templates:
            single = len(templates) == 1 and templates[0]["name"] == "default"
            settings["chat_template"] = templates[0]["template"] if single else templates
        ends = {"bos_token_id": self.spec.bos_token_id, "eos_token_id": list(self.spec.eos_token_ids)}
        for name, content in (("tokenizer_config", settings), ("generation_config", ends)):
            text = json.dumps({k: v for k, v in content.items() if v not in (None, [])}, indent=2, ensure_ascii=False)
            (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")


class _GGUFTensors:
    """See `TensorFiles`. Matrices are read in float32; one that stays a float is kept in bfloat16."""

    def __init__(self, path: Path, file: GGUFFile, spec: ModelSpec) -> None:
        self.directory = path
        self._spec, self._weights = spec, open_gguf(file, spec, torch.float32)
        names = FAMILIES[spec.architecture].names
        self._canonical = {tensor_of(name, spec, names, names.prefixes[0]): name for name in self._weights}
        assert len(self._canonical) == len(self._weights), "each weight has a tensor of its own"

    def __contains__(self, name: str) -> bool:
        return name in self._canonical

    def names(self) -> list[str]:
        return list(self._canonical)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        weight = self._canonical[name]
        floats = is_float32(weight) or not self._weights.is_matrix(weight)
        return ("F32" if floats else "BF16"), tuple(self._weights.shape(weight))

    def num_bytes(self, name: str) -> int:
        return self._weights.num_bytes(self._canonical[name])

    def read(self, name: str) -> torch.Tensor:
        weight = self._canonical[name]
        tensor = self._weights[weight]
        # The file holds 1 + w where this family's own files hold w; the sum is exact, and so is the way back.
        return tensor - 1.0 if is_norm(weight) and self._spec.norm_offset else tensor


def kept_bytes(files: TensorFiles, name: str) -> int:
    """Bytes of a tensor that stays a float."""
    dtype, shape = files.describe(name)
    return FLOATS[dtype] * int(torch.Size(shape).numel())
