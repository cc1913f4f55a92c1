"""Formats of the KV cache: names, bytes, places, and what is refused."""

from __future__ import annotations

import pytest

from octavo.core.kv_format import KVFormat, RowFormat, check_kv_dtype, kv_bytes_per_token_layer, parse_kv_dtype
from octavo.errors import ConfigError


def size(kv_dtype: str, head_dim: int, heads: int = 3, itemsize: int = 2) -> int:
    return kv_bytes_per_token_layer(kv_dtype, num_kv_heads=heads, head_dim=head_dim, itemsize=itemsize)


def test_names() -> None:
    assert parse_kv_dtype("auto") is None
    assert parse_kv_dtype("int8") == KVFormat(RowFormat("int8"), RowFormat("int8"))
    assert parse_kv_dtype("int8, int4") == KVFormat(RowFormat("int8"), RowFormat("int4"))


@pytest.mark.parametrize("bad", ["int2", "", "int8,int8,int8", "int8,", "fp16", "bfloat16", None, 8, "INT8"])
def test_unknown_names_are_refused(bad: object) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=.*must be.* auto, int8, int4, fp8"):
        parse_kv_dtype(bad)  # type: ignore[arg-type]


def test_impossible_combinations_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="both quantised or both kept as they are"):
        parse_kv_dtype("auto,int8")
    with pytest.raises(ConfigError, match=r"fp8.*CPU has no instructions for 8-bit floats.*use int8"):
        check_kv_dtype("fp8", "cpu")
    with pytest.raises(ConfigError, match="fp8"):
        check_kv_dtype("int8,fp8", "cpu")
    check_kv_dtype("fp8", "cuda", 64)
    with pytest.raises(ConfigError, match="this model's heads have 80, no multiple of 32; use int8"):
        check_kv_dtype("int8,int4", "cpu", 80)
    check_kv_dtype("int8", "cpu", 80)


def test_bytes_of_a_token() -> None:
    assert size("auto", 64) == 2 * 3 * 64 * 2 and size("auto", 64, itemsize=4) == 2 * 3 * 64 * 4
    assert size("int8", 64) == 2 * 3 * (64 + 2)
    assert size("int4", 64) == 2 * 3 * (32 + 2 + 2)
    assert size("int8,int4", 64) == 3 * (66 + 36)
    assert size("fp8", 64) == size("int8", 64)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_int8_holds_nearly_twice_the_tokens_of_bfloat16(head_dim: int) -> None:
    assert size("auto", head_dim) / size("int8", head_dim) >= 1.9


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "int8,int4", "int4,int8"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_the_parts_of_a_block_fill_it_without_gaps(kv_dtype: str, block_size: int) -> None:
    kv_format = parse_kv_dtype(kv_dtype)
    assert kv_format is not None
    heads, head_dim = 3, 96
    keys, values = kv_format.places(heads, block_size, head_dim)
    assert keys.first == 0 and values.first == heads * keys.slab
    assert values.first + heads * values.slab == block_size * kv_format.bytes_per_token_layer(heads, head_dim)
    for at, row in ((keys, kv_format.key), (values, kv_format.value)):
        assert at.scales == block_size * at.data and at.data == head_dim * row.bits // 8
        assert at.multipliers == at.scales + 2 * block_size
        assert at.slab == at.multipliers + block_size * at.groups
        assert at.groups == (3 if row.name == "int4" else 0)
