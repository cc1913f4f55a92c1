"""AWQ checkpoints as AutoAWQ writes them (version "gemm"): 4-bit codes with a scale and a zero per group of inputs.

    qweight int32 [in, out / 8]      qzeros int32 [groups, out / 8]      scales float [groups, out]

A word holds eight neighbouring outputs; its nibbles, lowest first, are those of the outputs 0, 2, 4, 6, 1, 3, 5, 7
(the order its kernel unpacks fastest). value = scale * (code - zero). Lin et al. 2023, "AWQ"; other versions (gemv,
gemv_fast, marlin) pack otherwise and are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.kernels.quantized_weights import QuantizedWeight
from octavo.models.quantized_files.module import (
    FLOATS,
    Found,
    PackedModule,
    Tensors,
    damaged,
    group_count,
    group_words,
    no_problems,
)
from octavo.models.quantized_files.packing import make_weight, unpack_columns
from octavo.models.quantized_files.settings import Settings, names_part

#: The nibble that holds output j of eight.
NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
#: Keys that choose kernels of other engines, or tell how the file was made.
HARMLESS = (
    "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "quantizer", "meta", "model_seqlen",
    "dataset", "tokenizer", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size",
    "pad_token_id", "max_input_length", "cache_block_outputs", "damp_percent", "true_sequential", "act_group_aware",
)  # fmt: skip


@dataclass(frozen=True)
class AWQ:
    """group_size: inputs per scale, -1 for all. skipped: names of modules that are plain, or of what they are in."""

    group_size: int
    zero_point: bool
    skipped: tuple[str, ...]
    ends: frozenset[str] = frozenset(("qweight", "qzeros", "scales"))

    def is_packed(self, found: Found) -> bool:
        return bool(found.names.keys() & {"qweight", "qzeros"})

    def must_be_packed(self, module: str) -> bool | None:
        return False if names_part(module, self.skipped) else None

    def open(self, found: Found, files: Tensors) -> PackedModule:
        if len(found.shapes.get("qweight", ())) != 2:
            return damaged(found, f"{found.module}.qweight is missing, or no matrix")
        inputs, words = found.shapes["qweight"]
        groups = group_count(inputs, self.group_size)
        needed = self.zero_point or "qzeros" in found.names
        problems = no_problems(
            found.problem("qweight", (inputs, words), ("I32",)),
            found.problem("scales", (groups, 8 * words), FLOATS),
            found.problem("qzeros", (groups, words), ("I32",)) if needed else None,
        )
        return PackedModule(found, (8 * words, inputs), problems, lambda: self._read(found, files))

    def _read(self, found: Found, files: Tensors) -> QuantizedWeight:
        codes = _outputs(files.read(found.names["qweight"])).t()
        zeros = _outputs(files.read(found.names["qzeros"])).t() if "qzeros" in found.names else None
        scales = files.read(found.names["scales"]).t()
        return make_weight(found.module, codes, scales, zeros, bits=4, group_size=self.group_size)

    def describe(self) -> str:
        return f"AWQ, 4 bits, {group_words(self.group_size)}"


def read_awq(config: Mapping[str, Any]) -> AWQ:
    """From `quantization_config`. Raises `ModelError` for what is not supported."""
    settings = Settings(config, "quantization_config")
    settings.get("quant_method")
    bits = settings.whole("bits", "w_bit", default=4)
    if bits != 4:
        settings.refuse("bits", bits, "AWQ has 4")
    settings.one_of("version", "format", "checkpoint_format", default="gemm", allowed=("gemm",))
    settings.one_of("backend", default="autoawq", allowed=("autoawq", "auto", "legacy_awq"))
    settings.only("desc_act")
    settings.only("sym", True)
    scheme = AWQ(
        group_size=settings.group_size("group_size", "q_group_size", default=128),
        zero_point=settings.flag("zero_point", default=True),
        skipped=settings.names("modules_to_not_convert"),
    )
    settings.finish(HARMLESS)
    return scheme


def _outputs(words: torch.Tensor) -> torch.Tensor:
    """int32 [n, out / 8] -> codes uint8 [n, out]."""
    nibbles = unpack_columns(words, 4).view(len(words), -1, 8)
    return nibbles[:, :, NIBBLE].reshape(len(words), -1)
