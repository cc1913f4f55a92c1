"""Formats of the KV cache that benchmarks compare."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout, build_layout

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec


@dataclass(frozen=True)
class Format:
    """kv_dtype as an engine takes it; dtype: of an engine whose kv_dtype is "auto"."""

    name: str
    kv_dtype: str
    dtype: str = "float32"

    def bytes_per_token_layer(self, spec: ModelSpec) -> int:
        return kv_bytes_per_token_layer(
            self.kv_dtype,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            itemsize={"float32": 4, "bfloat16": 2}[self.dtype],
        )

    def layout(self, spec: ModelSpec, block_size: int = 16) -> KVLayout:
        return build_layout(
            spec.windows,
            block_size=block_size,
            bytes_per_token_layer=self.bytes_per_token_layer(spec),
            kv_dtype=self.kv_dtype,
        )


FORMATS = (
    Format("float32", "auto"),
    Format("bfloat16", "auto", "bfloat16"),
    Format("int8", "int8"),
    Format("int8,int4", "int8,int4"),
    Format("int4", "int4"),
)


def bits_per_number(fmt: Format, spec: ModelSpec) -> float:
    """Bits that a key or value number takes, scales included."""
    return 8 * fmt.bytes_per_token_layer(spec) / spec.kv_values_per_token_layer()
