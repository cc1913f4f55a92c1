"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them: codes of 4 or 8 bits, scale and zero per group of inputs.

    qweight int32 [in * bits / 32, out]      qzeros int32 [groups, out * bits / 32]
    scales  float [groups, out]              g_idx  int32 [in]  the group of each input

Words hold neighbouring inputs (qweight) or outputs (qzeros), lowest bits first. checkpoint_format "gptq" stores each
zero less one, "gptq_v2" as it is. With desc_act the inputs of a group need not be neighbours: the columns are then put
into the order of their groups, and `input_order` says whose they are. value = scale * (code - zero). Frantar et al.
2022, "GPTQ".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from octavo.models.quantized_files.packing import KINDS, make_weight, unpack_columns, unpack_rows
from octavo.models.quantized_files.settings import Settings, names_part

#: Keys that choose kernels of other engines, or tell how the file was made.
HARMLESS = (
    "true_sequential", "static_groups", "damp_percent", "damp_auto_increment", "act_group_aware", "mse", "quantizer",
    "meta", "dataset", "tokenizer", "model_name_or_path", "model_file_base_name", "block_name_to_quantize",
    "module_name_preceding_first_block", "modules_in_block_to_quantize", "model_seqlen", "batch_size", "pad_token_id",
    "max_input_length", "cache_block_outputs", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config",
    "backend", "parallel_packing", "mock_quantization", "offload_to_disk", "device", "v2", "vram_strategy",
)  # fmt: skip


@dataclass(frozen=True)
class GPTQ:
    """group_size: inputs per scale, -1 for all. v2: zeros are stored as they are. head: the output head is packed."""

    bits: int
    group_size: int
    v2: bool
    desc_act: bool
    head: bool
    skipped: tuple[str, ...]
    ends: frozenset[str] = frozenset(("qweight", "qzeros", "scales", "g_idx"))

    def is_packed(self, found: Found) -> bool:
        return bool(found.names.keys() & {"qweight", "qzeros"})

    def must_be_packed(self, module: str) -> bool | None:
        if module == "lm_head":
            return self.head
        return False if names_part(module, self.skipped) else None

    def open(self, found: Found, files: Tensors) -> PackedModule:
        if len(found.shapes.get("qweight", ())) != 2:
            return damaged(found, f"{found.module}.qweight is missing, or no matrix")
        per_word = 32 // self.bits
        rows, outputs = found.shapes["qweight"]
        inputs = rows * per_word
        groups = group_count(inputs, self.group_size)
        wants_order = self.desc_act or "g_idx" in found.names
        problems = no_problems(
            found.problem("qweight", (rows, outputs), ("I32",)),
            found.problem("scales", (groups, outputs), FLOATS),
            found.problem("qzeros", (groups, outputs // per_word), ("I32",)),
            found.problem("g_idx", (inputs,), ("I32", "I64")) if wants_order else None,
        )
        return PackedModule(found, (outputs, inputs), problems, lambda: self._read(found, files))

    def _read(self, found: Found, files: Tensors) -> QuantizedWeight:
        codes = unpack_rows(files.read(found.names["qweight"]), self.bits).t()
        stored = unpack_columns(files.read(found.names["qzeros"]), self.bits).t()
        zeros = stored.float() if self.v2 else stored.float() + 1
        group = files.read(found.names["g_idx"]) if "g_idx" in found.names else None
        scales = files.read(found.names["scales"]).t()
        return make_weight(found.module, codes, scales, zeros, bits=self.bits, group_size=self.group_size, group=group)

    def describe(self) -> str:
        version, order = " v2" if self.v2 else "", ", act-order" if self.desc_act else ""
        return f"GPTQ{version}, {self.bits} bits, {group_words(self.group_size)}{order}"


def read_gptq(config: Mapping[str, Any]) -> GPTQ:
    """From `quantization_config`. Raises `ModelError` for what is not supported."""
    settings = Settings(config, "quantization_config")
    settings.get("quant_method")
    bits = settings.whole("bits", "w_bit")
    if bits not in KINDS:
        settings.refuse("bits", bits, f"supported: {', '.join(map(str, KINDS))}")
    form = settings.one_of("checkpoint_format", "format", default="gptq", allowed=("gptq", "gptq_v2"))
    for key in ("is_marlin_format", "dynamic", "adapter", "rotation"):
        settings.only(key)
    settings.only("pack_dtype", "int32")
    settings.flag("sym", default=True)  # the zeros in the file say it
    scheme = GPTQ(
        bits=bits,
        group_size=settings.group_size("group_size", "q_group_size", default=128),
        v2=form == "gptq_v2",
        desc_act=settings.flag("desc_act", default=False),
        head=settings.flag("lm_head", default=False),
        skipped=settings.names("modules_to_not_convert"),
    )
    settings.finish(HARMLESS)
    return scheme
