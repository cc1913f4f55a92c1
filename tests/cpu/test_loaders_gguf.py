"""GGUF files: read back to the model they were exported from, and refused when they are not what they say (kind 46)."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from helpers.dense_attention import greedy, run_chunks
from helpers.gguf_export import write_gguf
from helpers.oracle import random_ids
from helpers.tiny_models import oracle_greedy, oracle_logits, tiny_config, tiny_oracle
from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.kernels import cpu
from octavo.kernels.ops import TorchOps
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_reader import spec_from_gguf
from octavo.models.gguf_types import dequantize
from octavo.models.load import LoadedModel, load_model, read_spec

# Multiples of 32 columns so that Q8_0 applies to every matrix.
GEMMA = {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32, "intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 128},
    "llama-tied": {"intermediate_size": 128},
    "qwen2": {"intermediate_size": 128},
    "qwen3": {"intermediate_size": 128},
    "gemma3": GEMMA,
    "gemma": {"intermediate_size": 128},
    "gemma2": {"intermediate_size": 128, "num_hidden_layers": 4, "query_pre_attn_scalar": 32},
    "phi3": {"intermediate_size": 128, "sliding_window": 20},
    "mixtral": {"intermediate_size": 128, "sliding_window": None},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 64, "mlp_only_layers": []},
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(
        EngineConfig(model=str(path), skip_tokenizer_init=True), dtype=dtype, device="cpu", ops=TorchOps()
    )


def oracle_of(family: str, **settings: Any) -> Any:
    return tiny_oracle(tiny_config(family, **{**FAMILIES[family], **settings}))


IDS = [random.Random(7).randrange(320) for _ in range(50)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_float32_export_equals_the_model(family: str, tmp_path: Path) -> None:
    oracle = oracle_of(family)
    model = load(write_gguf(oracle, tmp_path / "m.gguf"))
    torch.testing.assert_close(run_chunks(model.decoder, IDS, 50), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)
    assert greedy(model.decoder, IDS, 24) == oracle_greedy(oracle, IDS, 24)
    assert model.spec.tied_head == oracle.config.tie_word_embeddings


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "mixtral"])
def test_small_types_equal_the_rounded_model(family: str, kind: str, tmp_path: Path) -> None:
    oracle = oracle_of(family)
    wanted = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16}.get(
        kind, gguf.GGMLQuantizationType.Q8_0
    )
    path = write_gguf(oracle, tmp_path / "m.gguf", kind)
    with torch.no_grad():
        for weight in oracle.parameters():
            if weight.dim() >= 2:
                packed = gguf.quants.quantize(weight.numpy(), wanted)
                weight.copy_(torch.from_numpy(gguf.quants.dequantize(packed, wanted)))
    actual, expected = run_chunks(load(path).decoder, IDS, 50), oracle_logits(oracle, IDS)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q6_K", "Q4_K", "Q3_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_equals_the_package(name: str, dtype: torch.dtype) -> None:
    """Several chunks and an odd number of rows; random bytes cover every bit pattern, with finite scales."""
    kind = gguf.GGMLQuantizationType[name]
    rows, columns = 4099, 512
    block, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(5)
    if name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        raw = gguf.quants.quantize(generator.standard_normal((rows, columns), dtype=np.float32), kind)
    else:  # no packer in the package: any bytes are valid, but for float16 scales that are not finite
        raw = generator.integers(0, 120, (rows, columns // block * size), dtype=np.uint8)
    expected = torch.from_numpy(np.array(gguf.quants.dequantize(raw, kind))).reshape(rows, columns).to(dtype)
    flat = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    actual = dequantize(flat, int(kind), (rows, columns), dtype)
    assert actual.dtype == dtype
    assert torch.equal(actual, expected)


def test_odd_vocabulary(tmp_path: Path) -> None:
    oracle = oracle_of("llama", vocab_size=1003)
    model = load(write_gguf(oracle, tmp_path / "m.gguf", "f16"))
    assert model.spec.vocab_size == 1003
    assert run_chunks(model.decoder, [1002, 5], 2).shape == (2, 1003)


def test_frequency_factors_are_honoured(tmp_path: Path) -> None:
    """Llama 3.1 files carry the rotary scaling as a tensor of divisors."""
    oracle = tiny_oracle(tiny_config("llama3", intermediate_size=128))
    plain = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    factors = (plain / oracle.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 4  # the scaling is in there
    model = load(write_gguf(oracle, tmp_path / "m.gguf", extra={"rope_freqs.weight": factors}))
    torch.testing.assert_close(run_chunks(model.decoder, IDS, 50), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)
    broken = write_gguf(oracle, tmp_path / "b.gguf", extra={"rope_freqs.weight": factors[:3]})
    with pytest.raises(ModelError, match="rope_freqs"):
        read_spec(str(broken))


@pytest.mark.parametrize("family", ["llama-linear", "llama-yarn"])
def test_rope_scaling_keys(family: str, tmp_path: Path) -> None:
    oracle = tiny_oracle(tiny_config(family, intermediate_size=128))
    rope = oracle.config.rope_parameters
    keys: dict[str, Any] = {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if family == "llama-yarn":
        keys["rope.scaling.original_context_length"] = 64
    model = load(write_gguf(oracle, tmp_path / "m.gguf", metadata=keys))
    torch.testing.assert_close(run_chunks(model.decoder, IDS, 50), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("limit", "length"), [(64, 50), (None, 90)])
def test_phi3_long_and_short_factors(limit: int | None, length: int, tmp_path: Path) -> None:
    """Phi-3 files carry LongRoPE as two tensors of divisors and a factor in the header."""
    short, long = [1.0 + 0.1 * i for i in range(6)], [1.0 + i for i in range(6)]
    rope = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    oracle = oracle_of("phi3", rope_parameters=rope, original_max_position_embeddings=64, sliding_window=None)
    keys = {
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": oracle.model.rotary_emb.attention_scaling,
    }
    tensors = {
        f"rope_factors_{name}.weight": np.array(f, dtype=np.float32) for name, f in (("short", short), ("long", long))
    }
    path = write_gguf(oracle, tmp_path / "m.gguf", metadata=keys, extra=tensors)
    config = EngineConfig(model=str(path), max_model_len=limit, skip_tokenizer_init=True)
    model = load_model(config, dtype=torch.float32, device="cpu", ops=TorchOps())
    ids = random_ids(length, 1)
    torch.testing.assert_close(run_chunks(model.decoder, ids, 40), oracle_logits(oracle, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["phi3", "mixtral", "qwen2_moe"])
def test_parts_of_a_tensor_by_the_native_loader(family: str, tmp_path: Path) -> None:
    """Rows of fused and stacked tensors are unpacked straight from the map of the file."""
    path = write_gguf(oracle_of(family), tmp_path / "m.gguf", "q8_0")
    config = EngineConfig(model=str(path), skip_tokenizer_init=True)
    native = load_model(config, dtype=torch.float32, device="cpu", ops=cpu.make_ops(torch.float32))
    torch.testing.assert_close(
        run_chunks(native.decoder, IDS, 50), run_chunks(load(path).decoder, IDS, 50), atol=1e-4, rtol=1e-4
    )


def test_gemma_pattern_and_local_base_from_the_header(tmp_path: Path) -> None:
    oracle = oracle_of("gemma3", sliding_window_pattern=2, rope_local_base_freq=5000.0)
    keys = {"attention.sliding_window_pattern": 2, "rope.freq_base_swa": 5000.0}
    model = load(write_gguf(oracle, tmp_path / "m.gguf", metadata=keys))
    assert model.spec.windows == (16, None, 16, None, 16, None, 16)
    torch.testing.assert_close(run_chunks(model.decoder, IDS, 50), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)
    flags = {**keys, "attention.sliding_window_pattern": [True, False, True, False, True, False, True]}
    assert read_spec(str(write_gguf(oracle, tmp_path / "f.gguf", metadata=flags))).windows == model.spec.windows
    default = read_spec(str(write_gguf(oracle, tmp_path / "d.gguf")))
    assert default.windows == (16, 16, 16, 16, 16, None, 16)
    assert [r.base for r in default.rotaries] == [1e6, 1e4]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"rope.scaling.type": "linear"}, "factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "original_max_position_embeddings"),
        ({"new_trick": 3}, "new_trick"),
        ({"expert_count": 8}, "expert_used_count is missing"),
        ({"expert_count": 2, "expert_used_count": 3}, "expert_used_count=3 exceeds the 2"),
        ({"attention.sliding_window": 16}, "sliding_window=16"),
        ({"rope.dimension_count": 8}, "rope.dimension_count=8"),
        ({"attention.value_length": 8}, "value_length=8"),
        ({"block_count": None}, "block_count"),
        ({"feed_forward_length": 120}, r"blk\.0\.ffn_gate\.weight is \[128, 64\], expected \[120, 64\]"),
        ({"block_count": 2}, r"not used by this model: blk\.2\."),
        ({"block_count": 4}, r"missing: blk\.3\."),
    ],
)
def test_headers_that_are_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(oracle_of("llama"), tmp_path / "m.gguf", metadata=metadata)
    with pytest.raises(ModelError, match=message):
        load(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = write_gguf(oracle_of("llama"), tmp_path / "m.gguf", drop=("blk.1.ffn_up.weight", "output_norm.weight"))
    with pytest.raises(ModelError, match=r"2 tensors missing: blk\.1\.ffn_up\.weight, output_norm\.weight"):
        load(path)


def test_truncated_and_foreign_files(tmp_path: Path) -> None:
    whole = write_gguf(oracle_of("llama"), tmp_path / "m.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 30, 200, 700, len(whole) // 2, len(whole) - 40):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            load(path)
    path.write_bytes(b"PK\x03\x04" + whole[4:])
    with pytest.raises(ModelError, match="not a GGUF file"):
        load(path)


def test_header_bytes_changed_at_random_never_crash(tmp_path: Path) -> None:
    """Whatever a header says, opening it gives a file or a `ModelError`."""
    whole = write_gguf(oracle_of("llama"), tmp_path / "m.gguf").read_bytes()
    draw, path = random.Random(3), tmp_path / "noise.gguf"
    for _ in range(200):
        data = bytearray(whole[:6000])
        for _ in range(draw.randrange(1, 4)):
            data[draw.randrange(4, 3000)] = draw.randrange(256)
        path.write_bytes(bytes(data) + whole[6000:])
        with contextlib.suppress(ModelError):
            spec_from_gguf(GGUFFile(path))


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "falcon")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"'falcon'.*llama, qwen2, qwen3, gemma"):
        read_spec(str(path))


def test_progress_counts_every_byte_once(tmp_path: Path) -> None:
    path = write_gguf(oracle_of("gemma3"), tmp_path / "m.gguf", "q8_0")
    seen: list[tuple[int, int]] = []
    load_model(
        EngineConfig(model=str(path), skip_tokenizer_init=True),
        dtype=torch.float32,
        device="cpu",
        ops=TorchOps(),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    total = sum(t.num_bytes for t in GGUFFile(path).tensors.values())
    assert [s[0] for s in seen] == sorted({s[0] for s in seen})
    assert seen[-1] == (total, total)
