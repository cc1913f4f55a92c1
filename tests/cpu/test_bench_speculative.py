"""`octavo bench speculative` on a tiny model: its figures are counts that can be checked, its texts are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_models import write_tiny
from octavo.bench.speculative import Load, compare
from octavo.cli.main import main
from octavo.config import make_config
from octavo.engine import Engine
from octavo.errors import InternalError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_tiny("llama", folder, max_position_embeddings=2048)
    return str(folder)


def test_the_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    load = ["--tokens", "24", "--repeats", "2", "--crowd", "2", "--json", str(file)]
    engine = ["--model", model, "--num-blocks", "600", "--dtype", "float32", "--speculative", "ngram:3"]
    assert main(["bench", "speculative", *load, *engine]) == 0
    shown = capsys.readouterr().out
    assert "tokens per second" in shown and "cost of a step, measured at start" in shown
    run = json.loads(file.read_text())
    rows = {row["load"]: row for row in run["tables"]["tokens per second"]}
    assert set(rows) == {"code edit", "extraction", "prose, sampled", "crowd, sampled"}
    assert len(run["goals"]) == 4 and run["facts"]["speculative"]["num_speculative_tokens"] == 3
    for row in rows.values():
        assert len(row["seconds_on"]) == len(row["seconds_off"]) == 2
        assert row["per_step"] <= 4


def test_a_comparison_runs_both_ways_and_leaves_the_engine_as_it_was(model: str) -> None:
    engine = Engine.build(
        make_config(model=model, dtype="float32", num_blocks=200, max_model_len=200, speculative="ngram")
    )
    speculator = engine.scheduler.speculator
    row = compare(engine, Load("twice", ["abc abc abc abc"], 0.0, 1.0), tokens=20, repeats=2)
    assert engine.scheduler.speculator is speculator and not engine.has_unfinished()
    assert engine.stats().generated_tokens == 4 * 20
    assert row["proposed"] == engine.stats().spec_draft_tokens


def test_texts_that_differ_are_an_error(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine.build(
        make_config(model=model, dtype="float32", num_blocks=200, max_model_len=200, speculative="ngram")
    )
    said = iter([[[1, 2]], [[1, 3]]])
    monkeypatch.setattr("octavo.bench.speculative._timed", lambda *given: (1.0, next(said)))
    with pytest.raises(InternalError, match="the text with guesses is another than without"):
        compare(engine, Load("broken", ["x"], 0.0, 1.0), tokens=2, repeats=1)
