"""Weights from a GGUF file, dequantised one tensor at a time into the dtype of the model.

Undoes what the format does to weights: in `llama` files the rows of q and k are interleaved for another rotary layout.
Gemma's norms already include their +1 there, which is the canonical form here (`models/names.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from octavo.errors import ModelError
from octavo.kernels.ops import StoredRows
from octavo.models.gguf_file import GGUFFile, GGUFTensor
from octavo.models.gguf_reader import FREQUENCY_FACTORS
from octavo.models.gguf_types import dequantize
from octavo.models.names import is_norm, weight_shapes
from octavo.models.spec import ModelSpec
from octavo.models.weights import Entry, LazyWeights, Progress, check_entries

_TOP = {
    "token_embd.weight": "embedding.weight",
    "output_norm.weight": "final_norm.weight",
    "output.weight": "head.weight",
}
_PARTS = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "out", "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm", "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "attn_norm": "attention_norm",
    "post_attention_norm": "post_attention_norm", "ffn_norm": "mlp_norm", "post_ffw_norm": "post_mlp_norm",
}  # fmt: skip
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
#: Header architectures whose q and k rows are interleaved.
INTERLEAVED = ("llama",)


def canonical_name(name: str) -> str | None:
    """Name in `models/names.py` of a GGUF tensor name; None when it has none."""
    if name in _TOP:
        return _TOP[name]
    if (match := _LAYER.fullmatch(name)) and match[2] in _PARTS:
        return f"layers.{match[1]}.{_PARTS[match[2]]}.{match[3]}"
    return None


def open_gguf(file: GGUFFile, spec: ModelSpec, dtype: torch.dtype, on_progress: Progress | None = None) -> LazyWeights:
    """Lazy canonical weights in `dtype` (norms float32). Raises `ModelError` with every tensor that does not fit."""
    interleaved = file.get("general.architecture") in INTERLEAVED
    entries: dict[str, Entry] = {}
    unused: list[str] = []
    for tensor in file.tensors.values():
        if tensor.name == FREQUENCY_FACTORS:
            continue  # part of the spec
        name = canonical_name(tensor.name)
        if name is None:
            unused.append(tensor.name)
            continue
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads}.get(name.split(".")[-2]) if interleaved else None
        target = torch.float32 if is_norm(name) else dtype
        stored = _stored(file, tensor) if heads is None and len(tensor.shape) == 2 else lambda: None
        entries[name] = Entry(tensor.name, tensor.shape, tensor.num_bytes, _reader(file, tensor, target, heads), stored)
    check_entries(str(file.path), entries, weight_shapes(spec), unused)
    return LazyWeights(entries, on_progress)


def _reader(file: GGUFFile, tensor: GGUFTensor, dtype: torch.dtype, heads: int | None) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        try:
            weight = dequantize(file.raw(tensor), tensor.type_id, tensor.shape, dtype)
        except NotImplementedError:
            raise ModelError(
                f"{file.path}: {tensor.name} has type {tensor.type_name}, which cannot be unpacked"
            ) from None
        return weight if heads is None else _halves(weight, heads)

    return read


def _stored(file: GGUFFile, tensor: GGUFTensor) -> Callable[[], StoredRows | None]:
    return lambda: StoredRows(file.address(tensor), tensor.type_id, tensor.shape[0], tensor.shape[1], file)


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (pair, half) order back to (half, pair): row 2j + h of the file is row h·d/2 + j."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
