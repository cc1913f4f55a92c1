"""The decoder against the transformers library: the same files, the same logits, the same greedy text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dense_attention import greedy, run_chunks
from helpers.tiny_models import FIRST, VOCABULARY, oracle_greedy, oracle_logits, write_tiny
from octavo.config import EngineConfig
from octavo.kernels.ops import TorchOps
from octavo.models.load import LoadedModel, load_model

LENGTHS = (1, 2, 15, 16, 17, 33, 100)


def load(path: Path | str, dtype: torch.dtype = torch.float32, **settings: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(path), **settings), dtype=dtype, device="cpu", ops=TorchOps())


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module", params=sorted(FIRST))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    path = tmp_path_factory.mktemp(request.param)
    oracle = write_tiny(request.param, path)
    return oracle, load(path)


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_equal(pair: tuple[Any, LoadedModel], length: int) -> None:
    oracle, model = pair
    ids = prompt(length, length)
    expected = oracle_logits(oracle, ids)
    for chunk in {length, 1, 7}:
        actual = run_chunks(model.decoder, ids, chunk)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_greedy_equal_and_varied(pair: tuple[Any, LoadedModel]) -> None:
    oracle, model = pair
    texts = []
    for seed in range(3):
        ids = prompt(5 + 20 * seed, seed)
        texts.append(greedy(model.decoder, ids, 40))
        assert texts[-1] == oracle_greedy(oracle, ids, 40)
    # An oracle that repeats one token would prove nothing.
    assert len({tuple(t) for t in texts}) == 3
    assert min(len(set(t)) for t in texts) > 4


def test_rotary_tables_equal(pair: tuple[Any, LoadedModel]) -> None:
    """Kind 40: cos and sin at 0, 1, L - 1, L and 4 L."""
    oracle, model = pair
    spec = model.spec
    positions = torch.tensor([0, 1, 63, 64, 255, 256, 1024])
    types = getattr(oracle.config, "layer_types", None)
    per_type = model.spec.architecture == "gemma3_text"
    for layer in range(spec.num_layers):
        table = model.decoder._tables[spec.rotary[layer]]
        table.reserve(2048)
        arguments = (types[layer],) if per_type else ()
        cos, sin = oracle.model.rotary_emb(torch.zeros(1), positions[None], *arguments)
        torch.testing.assert_close(table.lookup(positions)[0], cos[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(table.lookup(positions)[1], sin[0], atol=1e-6, rtol=0)


def test_weights_counted_once(pair: tuple[Any, LoadedModel]) -> None:
    oracle, model = pair
    assert model.weight_bytes == 4 * sum(p.numel() for p in oracle.parameters())
    assert model.decoder.parameter_count() == sum(p.numel() for p in oracle.parameters())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2"])
def test_bfloat16_close(family: str, tmp_path: Path) -> None:
    oracle = write_tiny(family, tmp_path)
    ids = prompt(40, 9)
    expected = oracle_logits(oracle, ids)
    actual = run_chunks(load(tmp_path, torch.bfloat16).decoder, ids, 40)
    cosine = torch.nn.functional.cosine_similarity(actual, expected, dim=-1)
    assert actual.dtype == torch.float32
    assert float(cosine.mean()) > 0.99


def test_growth_of_rotary_table_changes_nothing(pair: tuple[Any, LoadedModel]) -> None:
    _, model = pair
    ids = torch.tensor(prompt(3, 1))
    from helpers.dense_attention import DenseAttention

    before = model.decoder.forward(ids, torch.arange(3), DenseAttention(model.spec))
    model.decoder._tables[0].reserve(5000)
    after = model.decoder.forward(ids, torch.arange(3), DenseAttention(model.spec))
    assert torch.equal(before, after)
