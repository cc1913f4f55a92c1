"""Tiny quantised checkpoints, packed here bit by bit from the formats' public definitions, and their float oracle.

`write_quantized` writes a model of a family, quantises its linear weights by plain rounding, stores them packed as AWQ,
GPTQ or compressed-tensors, and puts the values those integers stand for into the transformers model it returns. Nothing
of Octavo is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.tiny_models import write_tiny

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Rounded:
    """codes, unsigned [out, in]; scales, zeros [out, groups]; group [in]: the group of each input."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group: np.ndarray
    bits: int

    def values(self) -> torch.Tensor:
        codes = self.codes.astype(np.float32)
        return torch.from_numpy((codes - self.zeros[:, self.group]) * self.scales[:, self.group])


def round_to_codes(
    weight: torch.Tensor, bits: int, size: int, *, symmetric: bool, shuffled: bool = False, seed: int = 0
) -> Rounded:
    """Round to the nearest code. size: inputs per scale. shuffled: a group's inputs lie anywhere."""
    w = weight.float().numpy()
    group = np.arange(w.shape[1]) // size
    if shuffled:
        group = np.random.default_rng(seed).permutation(group)
    top, middle = (1 << bits) - 1, 1 << (bits - 1)
    scales = np.zeros((w.shape[0], group.max() + 1), np.float32)
    zeros = np.full_like(scales, middle)
    for g in range(scales.shape[1]):
        part = w[:, group == g]
        if symmetric:
            scales[:, g] = np.abs(part).max(1) / (middle - 1)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scales[:, g] = (high - low) / top
            zeros[:, g] = np.clip(np.round(-low / scales[:, g]), 1, top)
    scales = scales.astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(w / scales[:, group]) + zeros[:, group], 0, top)
    return Rounded(codes.astype(np.int64), scales, zeros, group, bits)


def words(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned numbers [rows, n] -> int32 [rows, ceil(n * bits / 32)]: number order[i] of each run in place i."""
    per_word = 32 // bits
    numbers = np.pad(numbers.astype(np.uint64), ((0, 0), (0, -numbers.shape[1] % per_word)))
    out = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint64)
    for place in range(per_word):
        out |= numbers[:, (order[place] if order else place) :: per_word] << np.uint64(bits * place)
    return torch.from_numpy(out.astype(np.uint32).view(np.int32))


def half(scales: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(scales).half()


def awq(r: Rounded) -> Tensors:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(r.codes.T, 4, order),
        "qzeros": words(r.zeros.T, 4, order),
        "scales": half(r.scales.T).contiguous(),
    }


def gptq(r: Rounded, *, v2: bool = False, g_idx: bool = True) -> Tensors:
    tensors = {
        "qweight": words(r.codes, r.bits).T.contiguous(),
        "qzeros": words(r.zeros.T - (0 if v2 else 1), r.bits),
        "scales": half(r.scales.T).contiguous(),
    }
    return tensors | ({"g_idx": torch.from_numpy(r.group).int()} if g_idx else {})


def pack_quantized(r: Rounded, *, symmetric: bool) -> Tensors:
    tensors = {
        "weight_packed": words(r.codes, r.bits),
        "weight_scale": half(r.scales),
        "weight_shape": torch.tensor(r.codes.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(r.zeros.T, r.bits).T.contiguous()
    if (np.diff(r.group) < 0).any():
        tensors["weight_g_idx"] = torch.from_numpy(r.group).int()
    return tensors


def naive_quantized(r: Rounded, *, symmetric: bool) -> Tensors:
    tensors = {"weight": torch.from_numpy(r.codes - 128).to(torch.int8), "weight_scale": half(r.scales)}
    return tensors if symmetric else tensors | {"weight_zero_point": torch.from_numpy(r.zeros - 128).to(torch.int8)}


def write_quantized(
    family: str,
    path: Path,
    config: dict[str, Any],
    quantise: Callable[[torch.Tensor], Rounded],
    pack: Callable[[Rounded], Tensors],
    *,
    chosen: Callable[[str], bool] = lambda module: module.rpartition(".")[2] in LINEARS,
    **settings: Any,
) -> Any:
    """Write into `path`; returns the oracle with the values of the quantised weights.

    config: the quantization_config. chosen: which modules are quantised.
    """
    write_tiny(family, path, **settings)
    tensors = load_file(path / "model.safetensors")
    floats = {name: t.float() for name, t in tensors.items()}
    for name in list(tensors):
        module, _, end = name.rpartition(".")
        if end != "weight" or tensors[name].dim() != 2 or not chosen(module):
            continue
        rounded = quantise(tensors.pop(name))
        tensors.update({f"{module}.{end}": t for end, t in pack(rounded).items()})
        floats[name] = rounded.values()
    save_file(floats, path / "model.safetensors", metadata={"format": "pt"})
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**given, "quantization_config": config}))
    return oracle


# -- settings as the tools write them --------------------------------------------------------------------------------


def awq_config(group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm",
        "backend": "autoawq", "do_fuse": False, "modules_to_not_convert": None, "exllama_config": None, **more,
    }  # fmt: skip


def gptq_config(bits: int = 4, group_size: int = 32, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": False, "sym": True,
        "lm_head": False, "true_sequential": True, "damp_percent": 0.1, "checkpoint_format": "gptq",
        "pack_dtype": "int32", "meta": {"quantizer": ["gptqmodel:1.0"]}, **more,
    }  # fmt: skip


def ct_weights(bits: int = 4, group_size: int | None = 32, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group_size,
        "strategy": "channel" if group_size is None else "group", "block_structure": None, "dynamic": False,
        "actorder": None, "observer": "minmax", "observer_kwargs": {}, **more,
    }  # fmt: skip


def ct_config(
    weights: dict[str, Any], form: str = "pack-quantized", targets: tuple[str, ...] = ("Linear",), **more: Any
) -> dict[str, Any]:
    group = {"targets": list(targets), "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": 1.5, "version": "0.9.4", **more,
    }  # fmt: skip
