"""`octavo info`: parameter counts against transformers for every family, KV sizes by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from helpers.tiny_models import FAMILIES, tiny_config
from octavo.cli.info import describe, num_parameters, tables
from octavo.cli.main import main
from octavo.models.config_reader import spec_from_config


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_as_transformers_counts_them(family: str) -> None:
    config = tiny_config(family)
    model = AutoModelForCausalLM.from_config(config)
    spec = spec_from_config(json.loads(config.to_json_string(use_diff=False)), None)
    assert num_parameters(spec) == sum(p.numel() for p in model.parameters())


def gemma(**changes: Any) -> dict[str, Any]:
    """Windowed (16) and full layers, head_dim 32, 2 key/value heads, 4 layers."""
    config = tiny_config("gemma3", **changes)
    return describe(spec_from_config(json.loads(config.to_json_string(use_diff=False)), None), "bfloat16", 8)


def test_kv_bytes_by_hand() -> None:
    facts = gemma()
    per_token_layer = 2 * 2 * 32 * 2  # key and value, heads, head_dim, bytes
    windows = [g["window"] for g in facts["groups"]]
    layers = [len(g["layers"]) for g in facts["groups"]]
    assert facts["kv_bytes_per_token"] == 4 * per_token_layer
    assert windows == [None, 16] and layers == [2, 2]
    assert facts["bytes_per_block"] == 2 * 8 * per_token_layer
    # 256 tokens: 32 blocks in the full group; the windowed one keeps positions 240..255, two blocks.
    assert facts["sequence_bytes"]["256"]["paged"] == (32 + 2) * facts["bytes_per_block"]
    assert facts["sequence_bytes"]["256"]["all_layers"] == 32 * 2 * facts["bytes_per_block"]


def test_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] == 268_098_176
    assert facts["kv_bytes_per_token"] == 18 * 1024
    long = facts["sequence_bytes"]["4096"]
    assert long["paged"] <= 0.4 * long["all_layers"]
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert "268.1 million" in text and "window 512, layers 0, 1, 2" in text and "511.4 MiB" in text


def test_tables_have_a_row_for_every_group() -> None:
    spec = spec_from_config(json.loads(tiny_config("gemma3").to_json_string(use_diff=False)), None)
    rows = dict(tables("tiny", spec, describe(spec, "float32", 16))[2][1])
    assert rows["group 0"].startswith("full attention") and rows["group 1"].startswith("window 16")


def test_a_model_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "/no/such/model"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: model '/no/such/model'") and error.count("\n") == 1
