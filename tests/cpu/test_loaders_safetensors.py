"""Directories of safetensors: shards, ties, missing, extra and mis-shaped tensors, broken files (kinds 43 and 44)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.dense_attention import greedy, run_chunks
from helpers.tiny_models import oracle_logits, write_tiny
from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.kernels.ops import TorchOps
from octavo.models.load import LoadedModel, load_model, pick_dtype, read_spec

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> LoadedModel:
    config = EngineConfig(model=str(path), skip_tokenizer_init=True, **settings)
    return load_model(config, dtype=dtype, device="cpu", ops=TorchOps())


def logits(path: Path) -> torch.Tensor:
    return run_chunks(load(path).decoder, IDS, len(IDS))


def edit_config(path: Path, **keys: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    for key, value in keys.items():
        if value is ...:
            config.pop(key, None)
        else:
            config[key] = value
    (path / "config.json").write_text(json.dumps(config))


def split(path: Path, parts: int = 3) -> dict[str, str]:
    """Cut model.safetensors into shards with an index; returns the weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    table: dict[str, str] = {}
    for part in range(parts):
        file = f"model-{part + 1:05d}-of-{parts:05d}.safetensors"
        own = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % parts == part}
        save_file(own, path / file)
        table.update(dict.fromkeys(own, file))
    write_index(path, table)
    return table


def write_index(path: Path, table: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    oracle = write_tiny("llama", tmp_path)
    return tmp_path, oracle_logits(oracle, IDS)


# Tied heads: kind 43


@pytest.mark.parametrize("flag", [True, False, ...])
@pytest.mark.parametrize("head", ["own", "equal", "absent"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_tied_by_flag_and_files(family: str, head: str, flag: Any, tmp_path: Path) -> None:
    """Each case equals what the library makes of the same files, or is refused."""
    write_tiny(family, tmp_path, tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    if head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif head == "absent":
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, tie_word_embeddings=flag)
    tied_by_flag = family == "gemma3" if flag is ... else flag
    if head == "absent" and not tied_by_flag:
        with pytest.raises(ModelError, match=r"lm_head\.weight"):
            load(tmp_path)
        return
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(tmp_path), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)


def test_tied_and_only_the_head_was_saved(tmp_path: Path) -> None:
    oracle = write_tiny("llama-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(tmp_path), oracle_logits(oracle, IDS), atol=1e-4, rtol=1e-4)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"missing: model\.embed_tokens\.weight"):
        load(tmp_path)


# Shards: kind 44


def test_shards_give_the_same_model(model: tuple[Path, torch.Tensor]) -> None:
    path, expected = model
    split(path)
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)


def test_files_the_index_does_not_name_are_never_read(model: tuple[Path, torch.Tensor]) -> None:
    path, expected = model
    tensors = load_file(path / "model.safetensors")
    split(path)
    wrong = {name: torch.full_like(t, 7.0) for name, t in tensors.items()}
    save_file(wrong, path / "model-00004-of-00004.safetensors")
    save_file(wrong, path / "consolidated.safetensors")
    save_file(wrong, path / "model.safetensors")
    (path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)


def test_missing_shard(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    split(path)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"not there: model-00002-of-00003\.safetensors"):
        load(path)


@pytest.mark.parametrize(
    "content", ["{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[]", "{", '{"weight_map": {"a": 1}}']
)
def test_broken_index(model: tuple[Path, torch.Tensor], content: str) -> None:
    path, _ = model
    split(path)
    (path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=r"index\.json"):
        load(path)


def test_index_and_files_disagree(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    table = split(path)
    first, second = sorted(set(table.values()))[:2]
    name = next(n for n, f in table.items() if f == first)
    write_index(path, {**table, name: second})
    with pytest.raises(ModelError, match="disagree") as caught:
        load(path)
    assert name in str(caught.value)
    write_index(path, {n: f for n, f in table.items() if n != name})
    with pytest.raises(ModelError, match=f"not in the index.*{name} in {first}"):
        load(path)
    write_index(path, {**table, name: "../../etc/passwd"})
    with pytest.raises(ModelError, match="outside its directory"):
        load(path)


# Tensors that do not fit


def rewrite(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_missing_extra_and_misshaped_are_listed_together(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
        tensors["vision.patch.weight"] = torch.ones(2)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(5, 64)

    rewrite(path, change)
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "1 tensor missing: model.norm.weight" in message
    assert "2 tensors not used by this model" in message
    assert "model.layers.0.self_attn.q_norm.weight" in message
    assert "vision.patch.weight" in message
    assert "model.layers.1.mlp.up_proj.weight is [5, 64], expected [112, 64]" in message


def test_known_buffers_are_passed_over(model: tuple[Path, torch.Tensor]) -> None:
    path, expected = model
    rewrite(path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    torch.testing.assert_close(logits(path), expected, atol=1e-4, rtol=1e-4)


def test_lost_bias_is_an_error(tmp_path: Path) -> None:
    write_tiny("qwen2", tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.self_attn.k_proj.bias"))
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2\.self_attn\.k_proj\.bias"):
        load(tmp_path)


def test_integer_tensor_is_refused(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(path, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(ModelError, match="dtype I8"):
        load(path)


# Broken and absent files


@pytest.mark.parametrize("size", [0, 4, 100, -1000])
def test_truncated_file(model: tuple[Path, torch.Tensor], size: int) -> None:
    path, _ = model
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:size])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe{}", b"[]"])
def test_broken_config(model: tuple[Path, torch.Tensor], content: bytes) -> None:
    path, _ = model
    (path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load(path)


def test_no_weights_names_the_pickles(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*never read"):
        load(path)


# The rest of load_model


def test_stored_dtype_does_not_decide(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    rewrite(path, lambda tensors: tensors.update({k: v.to(torch.bfloat16) for k, v in tensors.items()}))
    wide, narrow = load(path), load(path, torch.bfloat16)
    assert wide.decoder.forward(torch.tensor([1]), torch.tensor([0]), _dense(wide)).dtype == torch.float32
    assert narrow.decoder.forward(torch.tensor([1]), torch.tensor([0]), _dense(narrow)).dtype == torch.bfloat16
    assert narrow.weight_bytes < 0.52 * wide.weight_bytes


def _dense(loaded: LoadedModel) -> Any:
    from helpers.dense_attention import DenseAttention

    return DenseAttention(loaded.spec)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "qwen3-tied", "gemma2"])
def test_dummy_weights(family: str, tmp_path: Path) -> None:
    """From a config alone: repeatable, seeded, never zero, with distinct logits and varied text."""
    write_tiny(family, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    one, two = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    other = load(tmp_path, load_format="dummy", seed=1)
    a, b, c = (run_chunks(m.decoder, IDS, 8) for m in (one, two, other))
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    assert float(a.std()) > 0.3
    assert all(len(row.unique()) > 300 for row in a)
    texts = [tuple(greedy(one.decoder, [i, 7, 2 * i], 12)) for i in range(1, 6)]
    assert len(set(texts)) == 5


def test_read_spec_touches_no_weights(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    assert read_spec(str(path)).num_layers == 3
    (path / "model.safetensors").unlink()
    assert read_spec(str(path), "dummy").num_layers == 3


def test_generation_config_ends(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    (path / "generation_config.json").write_text('{"eos_token_id": [257, 9]}')
    assert read_spec(str(path)).eos_token_ids == (257, 9)


def test_no_tokenizer(model: tuple[Path, torch.Tensor]) -> None:
    path, _ = model
    (path / "tokenizer.json").unlink()
    assert load(path).tokenizer is None
    with pytest.raises(ModelError, match=r"tokenizer\.json.*skip_tokenizer_init=True"):
        load_model(EngineConfig(model=str(path)), dtype=torch.float32, device="cpu", ops=TorchOps())


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "a", vocab_size=300)
    write_tiny("llama", tmp_path / "b", vocab_size=200, eos_token_id=1, bos_token_id=1, pad_token_id=1)
    config = EngineConfig(model=str(tmp_path / "b"), tokenizer=str(tmp_path / "a"))
    with pytest.raises(ModelError, match=r"258.*200 embedding rows"):
        load_model(config, dtype=torch.float32, device="cpu", ops=TorchOps())
    shutil.rmtree(tmp_path / "b")


def test_pick_dtype() -> None:
    assert pick_dtype("float16", "cpu") == torch.float16
    native = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert pick_dtype("auto", "cpu") == (torch.bfloat16 if native else torch.float32)
