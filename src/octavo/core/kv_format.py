"""Number formats of the KV cache: what `kv_cache_dtype` means, in bytes and in places inside a block.

A *row* is the key or the value of one token in one head: `head_dim` numbers. A quantised row carries everything that is
needed to read it, inside its block, so a block can be shared, copied, swapped or saved without a look elsewhere:

    int8   head_dim bytes, and one scale:          number = scale * q                  q in -127..127
    int4   head_dim / 2 bytes, a scale, and one multiplier per 32 numbers:
                                                   number = scale * multiplier * q     q in -8..7
    fp8    head_dim bytes (e4m3), and one scale:   number = scale * q

Scales are bfloat16: float32's range, so no key is too large or too small for one, in half the bytes. They are rounded
up before the numbers are, so the rounding costs resolution (0.4 % on average) but never clips.

A quantised block, for every layer of its group one after the other:

    key slab of head 0, head 1, …, value slab of head 0, head 1, …
    slab: data [block_size, bytes of a row] | scales [block_size] | multipliers [block_size, head_dim / 32]

This module knows no tensors; who turns numbers into rows is `kernels/quantized_kv.py` and csrc/attention_quantized.h.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

KV_DTYPES = ("auto", "int8", "int4", "fp8")
GROUP = 32  # numbers of an int4 row that share a multiplier
SCALE_BYTES = 2
_BITS = {"int8": 8, "int4": 4, "fp8": 8}


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How one quantised row is stored. name: "int8", "int4" or "fp8"."""

    name: str

    @property
    def bits(self) -> int:
        """Of one number."""
        return _BITS[self.name]

    def data_bytes(self, head_dim: int) -> int:
        return head_dim * self.bits // 8

    def multipliers(self, head_dim: int) -> int:
        """Bytes of multipliers of a row."""
        return head_dim // GROUP if self.name == "int4" else 0

    def row_bytes(self, head_dim: int) -> int:
        """All bytes of a row: numbers, scale and multipliers."""
        return self.data_bytes(head_dim) + SCALE_BYTES + self.multipliers(head_dim)


@dataclass(frozen=True, slots=True)
class SlabPlaces:
    """Where the keys (or the values) of one layer lie, in bytes from the layer's first byte in a block.

    first: slab of head 0. slab: bytes of a slab, so head h's lies at first + h * slab. data: bytes of a row's numbers.
    scales, multipliers: from the slab's first byte. groups: multipliers of a row.
    """

    first: int
    slab: int
    data: int
    scales: int
    multipliers: int
    groups: int


@dataclass(frozen=True, slots=True)
class KVFormat:
    """A quantised cache: how keys and how values are stored."""

    key: RowFormat
    value: RowFormat

    def bytes_per_token_layer(self, num_kv_heads: int, head_dim: int) -> int:
        """Key and value of one token in one layer, scales included."""
        return num_kv_heads * (self.key.row_bytes(head_dim) + self.value.row_bytes(head_dim))

    def places(self, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[SlabPlaces, SlabPlaces]:
        """(keys, values) of a layer inside a block."""
        found, first = [], 0
        for row in (self.key, self.value):
            data, slab = row.data_bytes(head_dim), block_size * row.row_bytes(head_dim)
            scales = block_size * data
            multipliers = scales + block_size * SCALE_BYTES
            found.append(SlabPlaces(first, slab, data, scales, multipliers, row.multipliers(head_dim)))
            first += num_kv_heads * slab
        return found[0], found[1]


def parse_kv_dtype(kv_dtype: str) -> KVFormat | None:
    """ "int8" or "int8,int4" (keys, values) -> the format; None for "auto": numbers as the model computes them.

    Raises `ConfigError` for anything else.
    """
    if not isinstance(kv_dtype, str):
        raise ConfigError(f"kv_cache_dtype={kv_dtype!r}: must be a string, {_examples()}")
    names = [part.strip() for part in kv_dtype.split(",")]
    if len(names) == 1:
        names *= 2
    if len(names) != 2 or not set(names) <= set(KV_DTYPES):
        raise ConfigError(f"kv_cache_dtype={kv_dtype!r}: must be {_examples()}")
    if names == ["auto", "auto"]:
        return None
    if "auto" in names:
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r}: keys and values are either both quantised or both kept as they are; "
            f"give auto, or two of int8, int4, fp8"
        )
    return KVFormat(RowFormat(names[0]), RowFormat(names[1]))


def _examples() -> str:
    return f"one of {', '.join(KV_DTYPES)}, or two of them for keys and values, such as int8,int4"


def check_kv_dtype(kv_dtype: str, device: str, head_dim: int | None = None) -> None:
    """Raise `ConfigError` where a device (cpu, cuda, …) or a model cannot have this cache, with the reason."""
    kv_format = parse_kv_dtype(kv_dtype)
    if kv_format is None:
        return
    names = {kv_format.key.name, kv_format.value.name}
    if "fp8" in names and device == "cpu":
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r}: a CPU has no instructions for 8-bit floats, so fp8 would cost time and save "
            f"nothing against int8, which is also more exact (7 bits instead of 3); use int8 here"
        )
    if "fp8" in names and device == "npu":
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r}: only the GPU kernels read fp8 keys and values; use int8 or auto on npu"
        )
    if "int4" in names and head_dim is not None and head_dim % GROUP:
        raise ConfigError(
            f"kv_cache_dtype={kv_dtype!r}: int4 keeps one multiplier per {GROUP} numbers, and this model's heads have "
            f"{head_dim}, no multiple of {GROUP}; use int8"
        )


def kv_bytes_per_token_layer(kv_dtype: str, *, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Bytes of one token's key and value in one layer. itemsize: bytes of a number under "auto"."""
    kv_format = parse_kv_dtype(kv_dtype)
    if kv_format is None:
        return 2 * num_kv_heads * head_dim * itemsize
    return kv_format.bytes_per_token_layer(num_kv_heads, head_dim)
