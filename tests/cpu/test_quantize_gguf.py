"""`octavo quantize` of GGUF files: the header as config.json and tokenizer files, which both libraries read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from helpers.dense_attention import run_chunks
from helpers.gguf_export import write_gguf
from helpers.tiny_models import BEGIN, CHAT_TEMPLATE, END, PAD, oracle_logits, tiny_config, tiny_oracle
from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.weight_format import parse_weight_format
from octavo.errors import ModelError
from octavo.kernels.ops import TorchOps
from octavo.models.config_writer import config_of
from octavo.models.gguf_file import GGUFFile
from octavo.models.gguf_reader import spec_from_gguf
from octavo.models.gguf_tokenizer import byte_alphabet
from octavo.models.load import LoadedModel, load_model
from octavo.models.spec import ModelSpec

IDS = [(7 * i * i + 3) % 256 for i in range(40)]
_TOKENS = [*sorted(byte_alphabet().values()), BEGIN, END, PAD, "ab"]
#: A byte-level vocabulary with one merge.
TOKENIZER: dict[str, Any] = {
    "/tokenizer.ggml.model": "gpt2", "/tokenizer.ggml.pre": "gpt-2", "/tokenizer.ggml.tokens": _TOKENS,
    "/tokenizer.ggml.token_type": [1] * 256 + [3] * 3 + [1], "/tokenizer.ggml.merges": ["a b"],
    "/tokenizer.ggml.bos_token_id": 256, "/tokenizer.ggml.eos_token_id": 257, "/tokenizer.ggml.padding_token_id": 258,
    "/tokenizer.ggml.eot_token_id": 259, "/tokenizer.ggml.add_bos_token": True,
    "/tokenizer.chat_template": CHAT_TEMPLATE,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "llama-tied": {}, "llama-yarn": {}, "qwen2": {}, "qwen3": {}, "gemma": {},
    "phi3": {"sliding_window": 20}, "gemma2": {"num_hidden_layers": 4, "query_pre_attn_scalar": 32},
    "mixtral": {"sliding_window": None},
    "gemma3": {"num_hidden_layers": 7, "sliding_window_pattern": 6, "query_pre_attn_scalar": 32},
    "qwen2_moe": {}, "qwen3_moe": {"mlp_only_layers": []},
}  # fmt: skip


def gguf_of(family: str, path: Path, **settings: Any) -> Path:
    given = {"intermediate_size": 128, **FAMILIES[family], **settings.pop("shape", {})}
    metadata = {**TOKENIZER, **settings.pop("metadata", {})}
    if family == "llama-yarn":
        metadata |= {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        metadata["rope.scaling.original_context_length"] = 64
    return write_gguf(tiny_oracle(tiny_config(family, **given)), path / "m.gguf", "q8_0", metadata=metadata, **settings)


def load(path: Path, quantization: str | None = None) -> LoadedModel:
    config = EngineConfig(model=str(path), quantization=quantization)
    ops = TorchOps(parse_weight_format(quantization))
    return load_model(config, dtype=torch.float32, device="cpu", ops=ops)


def logits(loaded: LoadedModel) -> torch.Tensor:
    return run_chunks(loaded.decoder, IDS, len(IDS))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_copy_is_what_quantising_the_file_at_load_gives(family: str, tmp_path: Path) -> None:
    """Bit for bit: interleaved rows, norms with their 1, experts, fused matrices, windows, biases, rotary scaling."""
    path, out = gguf_of(family, tmp_path), tmp_path / "out"
    form = "int4" if family in ("llama", "gemma3", "phi3") else "int8"
    assert main(["quantize", str(path), str(out), "-q", form]) == 0
    at_load, saved = load(path, form), load(out)
    assert torch.equal(logits(saved), logits(at_load))
    assert saved.weight_bytes == at_load.weight_bytes
    ours, theirs = at_load.tokenizer, saved.tokenizer
    assert ours is not None and theirs is not None
    assert theirs.encode("an abacus") == ours.encode("an abacus") == [256, *theirs.encode("an ", False), 259,
                                                                      *theirs.encode("acus", False)]  # fmt: skip
    assert (theirs.bos_token_id, theirs.eos_token_ids) == (ours.bos_token_id, ours.eos_token_ids) == (256, (257, 259))
    assert theirs.chat_templates == ours.chat_templates and theirs.special_ids == ours.special_ids
    config = AutoConfig.from_pretrained(out)
    assert config.num_hidden_layers == saved.spec.num_layers and config.vocab_size == 320
    assert AutoTokenizer.from_pretrained(out)("an abacus")["input_ids"] == ours.encode("an abacus")


def test_text_through_the_engine(tmp_path: Path) -> None:
    path = gguf_of("gemma3", tmp_path)
    assert main(["quantize", str(path), str(tmp_path / "out"), "-q", "int4"]) == 0
    params, texts = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), []
    for name, quantization in ((path, "int4"), (tmp_path / "out", None)):
        llm = LLM(str(name), dtype="float32", quantization=quantization, num_blocks=64, max_model_len=96)
        texts.append([o.outputs[0].text for o in llm.generate(["A little text", "abba"], params, use_tqdm=False)])
        llm.close()
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_transformers_computes_the_same_from_a_copy_with_its_embeddings(family: str, tmp_path: Path) -> None:
    path = gguf_of(family, tmp_path)
    assert main(["quantize", str(path), str(tmp_path / "out"), "-q", "int8", "--keep-embeddings"]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    torch.testing.assert_close(logits(load(tmp_path / "out")), oracle_logits(theirs, IDS), atol=1e-3, rtol=1e-3)


def spec_of(path: Path) -> ModelSpec:
    return spec_from_gguf(GGUFFile(path))


def test_divisors_of_frequencies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3's scaling is recognised; other divisors have no place in a config.json."""
    inverse = tiny_oracle(tiny_config("llama3")).model.rotary_emb.inv_freq
    factors = (10000.0 ** -(torch.arange(0, 16, 2) / 16) / inverse).numpy().astype(np.float32)
    path = gguf_of("llama", tmp_path, extra={"rope_freqs.weight": factors})
    rope = config_of(spec_of(path), "here")["rope_parameters"]
    assert rope == {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    assert main(["quantize", str(path), str(tmp_path / "out"), "-q", "int8"]) == 0
    torch.testing.assert_close(logits(load(tmp_path / "out")), logits(load(path, "int8")), atol=1e-4, rtol=1e-4)
    odd = gguf_of("llama", tmp_path, extra={"rope_freqs.weight": factors[::-1].copy()})
    assert main(["quantize", str(odd), str(tmp_path / "odd"), "-q", "int8"]) == 2
    message = capsys.readouterr().err
    assert "no config.json can say what its header does (" in message and "quantization='gguf'" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.gguf", "out"]


def test_what_is_no_model_of_the_kind_is_refused(tmp_path: Path) -> None:
    from octavo.models.quantized_files.writer import quantize_checkpoint

    form = parse_weight_format("int8")
    assert form is not None
    bare = gguf_of("qwen2", tmp_path, metadata={"/tokenizer.ggml.tokens": None})
    with pytest.raises(ModelError, match="holds no vocabulary"):
        quantize_checkpoint(bare, tmp_path / "out", form)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="a directory of safetensors or a GGUF file is needed"):
        quantize_checkpoint(tmp_path / "empty", tmp_path / "out", form)
    assert not (tmp_path / "out").exists()
    kept = json.dumps(config_of(spec_of(bare), "here"))
    assert '"model_type": "qwen2"' in kept
