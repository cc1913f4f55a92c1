"""compressed-tensors checkpoints with integer weights, as llm-compressor and `octavo quantize` write them.

    pack-quantized      weight_packed int32 [out, ceil(in * bits / 32)]   lowest bits first, plus half the range
                        weight_shape int [2]                              (out, in)
                        weight_zero_point int32 [ceil(out * bits / 32), groups]   packed down the outputs
                        or float [out, groups]   `octavo quantize`'s, which are fractions
    naive-quantized,    weight int8 [out, in]
    int-quantized       weight_zero_point int8 [out, groups]
    all of them         weight_scale float [out, groups]    "channel": one group; "tensor": [1] or []
                        weight_g_idx int [in]               the group of each input, with actorder "group"

Zero points are there if the weights are asymmetric. value = scale * (code - zero). Each module takes the first config
group that targets it; what `ignore` names is plain. Weights are all that is read: int8 activations whose scales are
found at run time ("W8A8", dynamic) stay unrounded here, which is closer to the model before quantisation.
Floating-point formats, sparsity, transforms and quantised caches are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.errors import ModelError
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
from octavo.models.quantized_files.settings import REMEDY, Settings, matches

PACKED, NAIVE = "pack-quantized", ("naive-quantized", "int-quantized")
EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")


@dataclass(frozen=True)
class Group:
    """One config group. group_size: inputs per scale; -1: per output; 0: one scale for the whole weight."""

    targets: tuple[str, ...]
    bits: int
    symmetric: bool
    group_size: int
    packed: bool

    def describe(self) -> str:
        return f"{self.bits} bits, {group_words(self.group_size) if self.group_size else 'a scale per weight'}"


@dataclass(frozen=True)
class CompressedTensors:
    """groups in the order of the config."""

    groups: tuple[Group, ...]
    ignored: tuple[str, ...]
    ends: frozenset[str] = frozenset(
        ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    )

    def group_of(self, module: str) -> Group | None:
        """The settings of a module; None: plain."""
        kind = "Embedding" if module.endswith(EMBEDDINGS) else "Linear"
        if any(matches(module, kind, pattern) for pattern in self.ignored):
            return None
        return next((g for g in self.groups if any(matches(module, kind, t) for t in g.targets)), None)

    def is_packed(self, found: Found) -> bool:
        return bool(found.names.keys() - {"weight"})

    def must_be_packed(self, module: str) -> bool | None:
        return self.group_of(module) is not None

    def open(self, found: Found, files: Tensors) -> PackedModule:
        group = self.group_of(found.module)
        if group is None:
            return damaged(found, f"{found.module} is stored quantised, but is ignored or not targeted")
        shape = _shape(found, files, group)
        if shape is None:
            end = "weight_packed and weight_shape [2]" if group.packed else "weight"
            there = ", ".join(f"{e} {list(s)}" for e, s in sorted(found.shapes.items()))
            return damaged(found, f"{found.module}: {end} of 2 dimensions expected, found {there}")
        problems = _problems(found, group, shape)
        return PackedModule(found, shape, problems, lambda: _read(found, files, group, shape))

    def describe(self) -> str:
        return f"compressed-tensors, {'; '.join(dict.fromkeys(g.describe() for g in self.groups))}"


def _shape(found: Found, files: Tensors, group: Group) -> tuple[int, int] | None:
    if not group.packed:
        shape = found.shapes.get("weight", ())
        return (shape[0], shape[1]) if len(shape) == 2 else None
    if found.shapes.get("weight_shape") != (2,) or len(found.shapes.get("weight_packed", ())) != 2:
        return None
    rows, columns = files.read(found.names["weight_shape"]).tolist()
    return int(rows), int(columns)


def _problems(found: Found, group: Group, shape: tuple[int, int]) -> tuple[str, ...]:
    rows, columns = shape
    groups = group_count(columns, group.group_size)
    scale = None
    if group.group_size != 0:
        scale = found.problem("weight_scale", (rows, groups), FLOATS)
    elif found.shapes.get("weight_scale") not in ((), (1,), (1, 1)):
        scale = f"{found.module}.weight_scale: one number expected"
    zero = None
    if _float_zeros(found, group):
        zero = found.problem("weight_zero_point", (rows, groups), FLOATS)
    elif not group.symmetric and group.packed:
        zero = found.problem("weight_zero_point", (-(-rows * group.bits // 32), groups), ("I32",))
    elif not group.symmetric:
        zero = found.problem("weight_zero_point", (rows, groups), ("I8",))
    order = found.problem("weight_g_idx", (columns,), ("I32", "I64")) if "weight_g_idx" in found.names else None
    if group.packed:
        codes = found.problem("weight_packed", (rows, -(-columns * group.bits // 32)), ("I32",))
    else:
        codes = found.problem("weight", shape, ("I8",))
    return no_problems(codes, scale, zero, order)


def _read(found: Found, files: Tensors, group: Group, shape: tuple[int, int]) -> QuantizedWeight:
    rows, columns = shape
    middle = 1 << (group.bits - 1)
    if group.packed:
        codes = unpack_columns(files.read(found.names["weight_packed"]), group.bits)[:, :columns]
    else:
        codes = _unsigned(files.read(found.names["weight"]), middle)
    scales = files.read(found.names["weight_scale"]).float()
    if group.group_size == 0:
        scales = scales.reshape(1, 1).expand(rows, 1)
    zeros = None
    if not group.symmetric:
        stored = files.read(found.names["weight_zero_point"])
        if _float_zeros(found, group):
            zeros = stored
        else:
            zeros = unpack_rows(stored, group.bits)[:rows] if group.packed else _unsigned(stored, middle)
    order = files.read(found.names["weight_g_idx"]) if "weight_g_idx" in found.names else None
    if order is not None and bool((order < 0).all()):
        order = None  # written so where the order was not used
    return make_weight(found.module, codes, scales, zeros, bits=group.bits, group_size=group.group_size, group=order)


def _float_zeros(found: Found, group: Group) -> bool:
    return group.packed and not group.symmetric and found.dtypes.get("weight_zero_point") in FLOATS


def _unsigned(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """int8 -> uint8, shifted up by `middle`."""
    return (codes.to(torch.int16) + middle).to(torch.uint8)


# -- the settings --------------------------------------------------------------------------------------------------


def read_compressed_tensors(config: Mapping[str, Any]) -> CompressedTensors:
    """From `quantization_config`. Raises `ModelError` for what is not supported."""
    settings = Settings(config, "quantization_config")
    settings.get("quant_method")
    forms = (PACKED, *NAIVE)
    form = settings.one_of("format", default=PACKED, allowed=(*forms, "mixed-precision"))
    settings.one_of("quantization_status", default="compressed", allowed=("compressed",))
    for key in ("kv_cache_scheme", "transform_config", "moe_sparsity_config"):
        settings.only(key)
    _refuse_sparsity(settings.get("sparsity_config"))
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError(f"quantization_config: config_groups={groups!r}: must be a JSON object of groups")
    scheme = CompressedTensors(
        tuple(_read_group(name, given, form) for name, given in groups.items()), settings.names("ignore")
    )
    settings.finish(("version", "global_compression_ratio"))
    return scheme


def _refuse_sparsity(given: Any) -> None:
    if isinstance(given, Mapping) and given.get("format") in (None, "dense"):
        return
    if given:
        raise ModelError(f"quantization_config: sparsity_config={given!r}: sparse weights are not supported; {REMEDY}")


def _read_group(name: str, given: Any, form: str) -> Group:
    settings = Settings(given, f"quantization_config.config_groups.{name}")
    targets = settings.names("targets")
    own = settings.one_of("format", default=form, allowed=(PACKED, *NAIVE))
    weights = Settings(settings.get("weights"), f"{settings.where}.weights")
    _check_activations(settings)
    settings.finish(())
    kind = weights.text("type", default="int")
    if kind != "int":
        weights.refuse("type", kind, f"only integer weights are supported; {REMEDY}")
    bits = weights.whole("num_bits", default=8)
    if bits not in KINDS or (own != PACKED and bits != 8):
        weights.refuse("num_bits", bits, f"supported: 4 and 8 packed, 8 unpacked; {REMEDY}")
    weights.only("dynamic")
    weights.only("block_structure")
    size = weights.get("group_size")
    chosen = weights.one_of(
        "strategy",
        default="channel" if size in (None, -1) else "group",
        allowed=("channel", "group", "tensor"),
    )
    if chosen == "group" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        weights.refuse("group_size", size, "must be at least 1 with strategy='group'")
    weights.get("actorder")  # weight_g_idx in the file says it
    symmetric = weights.flag("symmetric", default=True)
    weights.finish(("observer", "observer_kwargs", "scale_dtype", "zp_dtype"))
    return Group(targets, bits, symmetric, {"channel": -1, "tensor": 0}.get(chosen, size), own == PACKED)


def _check_activations(settings: Settings) -> None:
    """Scales computed as the model runs can be left out; fixed ones belong to the model."""
    given = settings.get("input_activations")
    if given is not None and not (isinstance(given, Mapping) and given.get("dynamic") is True):
        settings.refuse("input_activations", given, f"only dynamic ones can be left unrounded; {REMEDY}")
    settings.only("output_activations")
