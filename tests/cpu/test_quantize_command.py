"""`octavo quantize`: what it writes loads to the same bits as quantising at load, and other libraries read it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from helpers import quantized_files as qf
from helpers.dense_attention import run_chunks
from helpers.tiny_models import oracle_logits, write_tiny
from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.weight_format import parse_weight_format
from octavo.errors import ConfigError, ModelError
from octavo.kernels.ops import TorchOps
from octavo.kernels.quantized_weights import quantize_rows
from octavo.models.load import LoadedModel, load_model
from octavo.models.quantized_files.writer import quantize_checkpoint
from octavo.models.safetensors_loader import SafetensorsFiles, open_safetensors, quantization_of, read_json

IDS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(path: Path, quantization: str | None = None) -> LoadedModel:
    config = EngineConfig(model=str(path), skip_tokenizer_init=True, quantization=quantization)
    ops = TorchOps(parse_weight_format(quantization))
    return load_model(config, dtype=torch.float32, device="cpu", ops=ops)


def logits(loaded: LoadedModel) -> torch.Tensor:
    return run_chunks(loaded.decoder, IDS, len(IDS))


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "olmo2"])
@pytest.mark.parametrize("form", ["int8", "int4", "int4:64", "int4:64:pure"])
def test_bit_equal_to_quantising_at_load(family: str, form: str, tmp_path: Path) -> None:
    """Tied and untied heads, biases, groups that do not divide the 112 inputs of `down`."""
    write_tiny(family, tmp_path / "model")
    assert main(["quantize", str(tmp_path / "model"), str(tmp_path / "out"), "-q", form]) == 0
    at_load, saved = load(tmp_path / "model", form), load(tmp_path / "out")
    assert torch.equal(logits(saved), logits(at_load))
    assert saved.weight_bytes == at_load.weight_bytes
    assert not torch.equal(logits(saved), logits(load(tmp_path / "model")))


def test_through_the_engine_with_its_tokenizer(tmp_path: Path) -> None:
    write_tiny("qwen3-tied", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int8"))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for name, settings in (("model", {"quantization": "int8"}), ("out", {})):
        llm = LLM(str(tmp_path / name), dtype="float32", num_blocks=40, max_model_len=64, **settings)
        texts.append(llm.generate("A little text", params)[0].outputs[0].token_ids)
    assert texts[0] == texts[1]


def parse(text: str) -> Any:
    form = parse_weight_format(text)
    assert form is not None
    return form


def test_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shards with an index, settings, tokenizer, the names of the source; norms bit by bit; no private modes."""
    write_tiny("llama", tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "model" / "optimizer.bin").write_bytes(b"not this")
    out = tmp_path / "deep" / "out"
    assert main(["quantize", str(tmp_path / "model"), str(out), "-q", "int4", "--shard-bytes", "20k"]) == 0
    said = capsys.readouterr().out
    assert "int4, 23 weights quantised" in said and "files (before: " in said
    files = {p.name for p in out.iterdir()}
    shards = sorted(n for n in files if n.endswith(".safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert files - set(shards) == {
        "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip
    table = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(table.values()) == set(shards)
    ends = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    assert {f"model.layers.1.mlp.up_proj.{end}" for end in ends} <= set(table)
    config = json.loads((out / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    assert [g["weights"]["group_size"] for g in groups.values()] == [None, 32]
    assert [g["weights"]["num_bits"] for g in groups.values()] == [8, 4]
    assert "model.layers.0.self_attn.v_proj" in groups["group_0"]["targets"]
    assert groups["group_1"]["targets"] == ["Linear", "Embedding"]
    assert config["vocab_size"] == 320 and config["quantization_config"]["ignore"] == []
    name = "model.layers.0.input_layernorm.weight"
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as old, safe_open(out / table[name], "pt") as new:
        assert torch.equal(old.get_tensor(name), new.get_tensor(name))
    plain = tmp_path / "plain"
    plain.mkdir()
    assert os.stat(out).st_mode == os.stat(plain).st_mode
    assert sorted(p.name for p in out.parent.iterdir()) == ["out"]
    assert {os.stat(p).st_mode & 0o777 for p in out.iterdir()} == {0o666 & ~_mask()}
    assert load(out).spec.num_layers == 3


def _mask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_transformers_reads_a_copy_that_keeps_the_embeddings(family: str, tmp_path: Path) -> None:
    """The library, which knows quantised linear layers, computes the same from the copy as this engine does."""
    write_tiny(family, tmp_path / "model", intermediate_size=128)
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int8"), keep_embeddings=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ours = load(tmp_path / "out")
    torch.testing.assert_close(logits(ours), oracle_logits(theirs, IDS), atol=1e-4, rtol=1e-4)
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "lm_head" in ignored
    assert ours.weight_bytes < 0.6 * load(tmp_path / "model").weight_bytes


def test_zeros_are_fractions_unless_the_copy_is_for_other_engines(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model", intermediate_size=128)
    name = "model.layers.0.mlp.up_proj"
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as source:
        weight = source.get_tensor(f"{name}.weight")
    for keep, dtype, form in ((False, torch.float16, "torch.float16"), (True, torch.int32, None)):
        out = tmp_path / str(keep)
        quantize_checkpoint(tmp_path / "model", out, parse("int4:pure"), keep_embeddings=keep)
        expected = quantize_rows(weight, "int4", whole_zeros=keep)
        with safe_open(out / "model.safetensors", "pt") as copy:
            assert copy.get_tensor(f"{name}.weight_zero_point").dtype == dtype
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        assert config["config_groups"]["group_0"]["weights"]["zp_dtype"] == form
        files = SafetensorsFiles(out)
        found = open_safetensors(files, load(out).spec, None, quantization_of(out, read_json(out / "config.json")))
        read = found.quantized("layers.0.up.weight")
        assert read is not None and read.zeros is not None and expected.zeros is not None
        assert torch.equal(read.codes, expected.codes) and torch.equal(read.zeros, expected.zeros)
        assert torch.equal(read.scales, expected.scales)


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_tiny("llama", model)
    (tmp_path / "there").mkdir()

    def refused(*words: str) -> str:
        assert main(["quantize", *map(str, words)]) == 2
        return capsys.readouterr().err

    assert "there: exists already" in refused(model, tmp_path / "there", "-q", "int8")  # type: ignore[arg-type]
    assert "quantization='int5'" in refused(model, out, "-q", "int5")  # type: ignore[arg-type]
    assert "a checkpoint can be stored as int8, int4" in refused(model, out, "-q", "gguf")  # type: ignore[arg-type]
    assert "--quantization auto: say int8" in refused(model, out, "-q", "auto")  # type: ignore[arg-type]
    assert "no such file or directory" in refused("nowhere", out, "-q", "int8")  # type: ignore[arg-type]
    (tmp_path / "file.gguf").write_bytes(b"GGUF")
    assert "file.gguf" in refused(tmp_path / "file.gguf", out, "-q", "int4:64")  # type: ignore[arg-type]
    quantize_checkpoint(model, tmp_path / "once", parse("int8"))
    with pytest.raises(ModelError, match=r"is quantised already \(compressed-tensors, 8 bits, a scale per output\)"):
        quantize_checkpoint(tmp_path / "once", out, parse("int4"))
    assert not out.exists()
    (tmp_path / "file").write_text("")
    message = refused(model, tmp_path / "file" / "out", "-q", "int8")  # type: ignore[arg-type]
    assert f"{tmp_path / 'file' / 'out'}: cannot be written: " in message
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "cohere", "architectures": ["C"]}))
    message = refused(model, out, "-q", "int8")  # type: ignore[arg-type]
    assert f"{model / 'config.json'}: model_type='cohere'" in message and "model_impl" not in message


def test_one_tensor_for_weights_of_two_formats(tmp_path: Path) -> None:
    """Phi-3 stores q, k and v as one; a module has one format in the file."""
    write_tiny("phi3", tmp_path / "model")
    with pytest.raises(ModelError, match=r"qkv_proj.weight holds several weights.*; use int4:64:pure \(all in 4\)"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int4:64"))
    assert not (tmp_path / "out").exists()
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int4:64:pure"))
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(tmp_path / "model", "int4:64:pure")))


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model")

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int8"), on_progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    tensor = "model.layers.1.mlp.up_proj.weight"
    qf_rewrite(tmp_path / "model", {tensor: torch.full((112, 64), torch.inf)})
    with pytest.raises(ModelError, match=f"{tensor}: .*not finite"):
        quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int8"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def qf_rewrite(path: Path, changes: dict[str, torch.Tensor]) -> None:
    from safetensors.torch import load_file, save_file

    save_file({**load_file(path / "model.safetensors"), **changes}, path / "model.safetensors")


def test_quantising_what_is_quantised_already_has_no_effect_and_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny("llama", tmp_path / "model")
    quantize_checkpoint(tmp_path / "model", tmp_path / "out", parse("int8"))
    with pytest.raises(ConfigError, match=r"quantization='int4' has no effect.*compressed-tensors, 8 bits"):
        load(tmp_path / "out", "int4")
    plan = ["plan", str(tmp_path / "out"), "--device", "cpu", "--memory", "4GiB"]
    for command in (plan, ["info", str(tmp_path / "out")]):
        assert main([*command, "--quantization", "int4"]) == 2
        assert "quantization='int4' has no effect: all weights of" in capsys.readouterr().err
        assert main(command) == 0
        capsys.readouterr()
        gguf = [*plan[:2], "--memory", "4GiB", "--quantization", "gguf"]
        assert main(gguf) == 2 and "--device cuda (the default); add --device cpu" in capsys.readouterr().err
    # What a checkpoint leaves as floats can be quantised.
    quantize_checkpoint(tmp_path / "model", tmp_path / "kept", parse("int8"), keep_embeddings=True)
    whole = load(tmp_path / "kept", "int8")
    assert torch.equal(logits(whole), logits(load(tmp_path / "out")))
    assert whole.weight_bytes == load(tmp_path / "out").weight_bytes


def test_packing_by_hand() -> None:
    """The helper packs number by number; the writer's words are the same."""
    from octavo.models.quantized_files.packing import pack_columns, pack_rows, unpack_columns, unpack_rows

    for bits in (4, 8):
        codes = torch.randint(0, 1 << bits, (5, 21), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
        words = pack_columns(codes, bits)
        assert torch.equal(words, qf.words(codes.numpy(), bits))
        assert torch.equal(unpack_columns(words, bits)[:, :21], codes)
        assert torch.equal(unpack_rows(pack_rows(codes, bits), bits)[:5], codes)
