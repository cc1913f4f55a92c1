"""Checkpoints whose linear weights are stored as integers: AWQ, GPTQ and compressed-tensors.

`read_scheme` reads a `quantization_config`, `find_packed` lists the packed modules of the files, and each of them
gives a `QuantizedWeight`. Nothing here knows decoders, specs or canonical names: `models/safetensors_loader.py` joins
the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.quantized_files.awq import read_awq
from octavo.models.quantized_files.compressed_tensors import read_compressed_tensors
from octavo.models.quantized_files.gptq import read_gptq
from octavo.models.quantized_files.module import PackedModule, Scheme, find_packed
from octavo.models.quantized_files.settings import REMEDY

__all__ = ["PackedModule", "Scheme", "find_packed", "read_scheme"]

METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": read_awq,
    "gptq": read_gptq,
    "compressed-tensors": read_compressed_tensors,
}


def read_scheme(config: Mapping[str, Any] | None) -> Scheme | None:
    """The format a `quantization_config` describes; None where there is none. Raises `ModelError` for other formats."""
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ModelError(f"quantization_config: must be a JSON object, got {config!r}")
    method = config.get("quant_method")
    if method not in METHODS:
        raise ModelError(
            f"quantization_config: quant_method={method!r} is not supported; supported: {', '.join(METHODS)}; {REMEDY}"
        )
    return METHODS[method](config)
