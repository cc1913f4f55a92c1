"""Rotary variants: tables equal to the library at 0, 1, L - 1, L and 4 L (kind 40), and what depends on the length."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dense_attention import run_chunks
from helpers.oracle import random_ids
from helpers.tiny_models import oracle_logits, tiny_config, tiny_oracle, write_tiny
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError
from octavo.kernels.ops import TorchOps
from octavo.models.config_reader import spec_from_config
from octavo.models.load import load_model
from octavo.models.rope_reader import for_length
from octavo.models.rotary import RotaryTable
from octavo.models.spec import ModelSpec

ORIGINAL = 64
SHORT, LONG = [1.0 + 0.1 * i for i in range(6)], [1.0 + i for i in range(6)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}),
    "proportional": ("llama", {"rope_parameters": {
        "rope_type": "proportional", "partial_rotary_factor": 0.25, "factor": 2.0}}),
    "yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}}),
    "yarn partial": ("gpt_neox", {"rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
        "partial_rotary_factor": 0.5}}),
    "llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL}}),
    "partial": ("stablelm", {"partial_rotary_factor": 0.5}),
    "base": ("smollm3", {}),
}  # fmt: skip


def read(config: Any) -> ModelSpec:
    return spec_from_config(config.to_dict() | {"architectures": None})


def tables(spec: ModelSpec, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    table = RotaryTable(spec.rotaries[0], spec.head_dim)
    table.reserve(int(positions.max()) + 1)
    return table.lookup(positions)


def reference(config: Any, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the library computes for a text that ends at the last of `positions`."""
    model = tiny_oracle(config)
    base = getattr(model, "model", None) or model.gpt_neox
    cos, sin = base.rotary_emb(torch.zeros(1), positions[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("name", VARIANTS)
def test_tables_equal_the_librarys(name: str) -> None:
    family, settings = VARIANTS[name]
    config = tiny_config(family, **settings)
    last = config.max_position_embeddings if name == "dynamic" else 4 * ORIGINAL + 1
    positions = torch.tensor([p for p in (0, 1, ORIGINAL - 1, ORIGINAL, 4 * ORIGINAL) if p < last])
    for ours, theirs in zip(tables(read(config), positions), reference(config, positions), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def phi3(**settings: Any) -> Any:
    return tiny_config("phi3", sliding_window=None, rope_parameters=dict(LONGROPE),
                       original_max_position_embeddings=ORIGINAL, **settings)  # fmt: skip


@pytest.mark.parametrize(("limit", "last"), [(ORIGINAL, ORIGINAL - 1), (None, 4 * ORIGINAL - 1)])
def test_longrope_has_two_sets(limit: int | None, last: int) -> None:
    """The library picks the set by the length of a text, the engine by the longest text it takes."""
    spec = for_length(read(phi3()), limit)
    positions = torch.tensor([0, 1, ORIGINAL - 2, last])
    for ours, theirs in zip(tables(spec, positions), reference(phi3(), positions), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_longrope_by_the_engines_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Short texts in a short engine and long texts in a long engine are computed as the library does, in any chunks."""
    oracle = write_tiny("phi3", tmp_path, sliding_window=None, rope_parameters=dict(LONGROPE),
                        original_max_position_embeddings=ORIGINAL)  # fmt: skip

    def logits(length: int, limit: int | None, chunk: int) -> torch.Tensor:
        config = EngineConfig(model=str(tmp_path), max_model_len=limit, skip_tokenizer_init=True)
        model = load_model(config, dtype=torch.float32, device="cpu", ops=TorchOps())
        return run_chunks(model.decoder, random_ids(length, 1), chunk)

    short, long = oracle_logits(oracle, random_ids(50, 1)), oracle_logits(oracle, random_ids(90, 1))
    torch.testing.assert_close(logits(50, ORIGINAL, 7), short, atol=1e-4, rtol=0)
    assert not caplog.text
    with caplog.at_level(logging.INFO, "octavo.models"):
        torch.testing.assert_close(logits(90, None, 33), long, atol=1e-4, rtol=0)
    assert "max_model_len=64 uses the short ones" in caplog.text
    # One set serves a text from its first token on: keys in the cache are never turned again.
    assert not torch.allclose(logits(50, None, 50), short, atol=1e-2)


def test_dynamic_ends_where_it_would_begin(tmp_path: Path) -> None:
    """Plain rotary up to the model's own limit, equal to the library; beyond it the engine takes nothing."""
    from octavo import LLM

    write_tiny("llama-dynamic", tmp_path)
    with pytest.raises(ConfigError, match="max_model_len=512 exceeds the model's 256 positions"):
        LLM(model=str(tmp_path), max_model_len=512, num_blocks=64)


PHI3 = {"model_type": "phi3", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 256, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": ORIGINAL}  # fmt: skip
FACTORS = {"short_factor": SHORT, "long_factor": LONG}


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_longrope_in_every_spelling(kind: str, key: str, place: str) -> None:
    """Phi-3 configs call it su, longrope or, once, yarn."""
    config = {**PHI3, place: {key: kind, **FACTORS}, "rope_theta": 10000.0}
    rotary = spec_from_config(config).rotaries[0]
    fields = dict(rotary.parameters)
    assert (rotary.kind, rotary.dim) == ("longrope", 12)
    assert fields["original_max_position_embeddings"] == ORIGINAL and fields["long"] is True
    assert fields["attention_factor"] == pytest.approx((1 + torch.log(torch.tensor(4.0)).item() / 4.1588831) ** 0.5)


def test_original_length_outside_wins_and_a_conflict_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    inside = {"type": "su", **FACTORS, "original_max_position_embeddings": 128}
    with caplog.at_level(logging.WARNING, "octavo.models"):
        fields = dict(spec_from_config({**PHI3, "rope_scaling": inside}).rotaries[0].parameters)
    assert fields["original_max_position_embeddings"] == ORIGINAL
    assert "contradicts the outer 64" in caplog.text


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rope_scaling": {"type": "su", "short_factor": SHORT}}, "needs long_factor"),
        ({"rope_scaling": {"type": "su", **FACTORS, "long_factor": LONG[:-1]}}, "long_factor must be a list of 6"),
        ({"rope_scaling": {"type": "su", **FACTORS, "short_factor": [0.0] * 6}}, "short_factor=0.0"),
        ({"partial_rotary_factor": 0.2}, "rotates 3 numbers"),
        ({"partial_rotary_factor": 1.5}, "rotates 24 numbers"),
        ({"partial_rotary_factor": "0.5"}, "partial_rotary_factor='0.5'"),
    ],
)
def test_what_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({**PHI3, **keys})


def test_share_nested_and_flat(caplog: pytest.LogCaptureFixture) -> None:
    """The nested word wins over the flat one, GPT-NeoX's own names are read, and a conflict is logged."""
    neox = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    assert spec_from_config(neox).rotaries[0].dim == 4
    own = spec_from_config({**neox, "rotary_pct": 0.5, "rotary_emb_base": 500.0}).rotaries[0]
    assert (own.dim, own.base) == (8, 500.0)
    assert spec_from_config({**neox, "rotary_pct": 1.0}).rotaries[0].dim is None
    with caplog.at_level(logging.WARNING, "octavo.models"):
        nested = spec_from_config({**neox, "rotary_pct": 0.5, "rope_parameters": {"partial_rotary_factor": 0.25}})
    assert nested.rotaries[0].dim == 4 and "contradicts rotary_pct=0.5" in caplog.text


def test_layers_without_positions() -> None:
    layers = {"model_type": "smollm3", "num_hidden_layers": 5}
    assert spec_from_config(layers).rotary == (0, 0, 0, None, 0)
    assert spec_from_config({**layers, "no_rope_layers": [0, 1, 1, 0, 1]}).rotary == (None, 0, 0, None, 0)
    with pytest.raises(ModelError, match=r"no_rope_layers=\[1\]: must be a list of 5"):
        spec_from_config({**layers, "no_rope_layers": [1]})
