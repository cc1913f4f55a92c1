"""`octavo bench speculative` on a tiny model: its figures are counts that can be checked, its texts are compared."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo.bench.speculative import Load, compare
from octavo.cli.main import main
from octavo.config import make_config
from octavo.core.speculation import Speculator
from octavo.engine import Engine
from octavo.errors import ConfigError, InternalError
from octavo.runner.draft import DraftModel


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


def test_a_quantised_copy_as_draft_is_left_out_of_the_runs_without_it(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has weights of its own format, computes in each step of the runs with guesses, and in no other."""
    draft = {"method": "draft", "model": model, "num_speculative_tokens": 3, "quantization": "int8"}
    engine = Engine.build(
        make_config(model=model, dtype="float32", num_blocks=400, max_model_len=200, speculative=draft)
    )
    assert engine.scheduler.settings.speculation is not None
    # Without the measured costs, which may say on a busy machine that guessing does not pay.
    free = replace(engine.scheduler.settings.speculation, row_costs=(), draft_costs=())
    engine.scheduler.speculator = Speculator(free, engine.scheduler.memory)
    followed = []
    follow = DraftModel.follow

    def counted(self: DraftModel, scheduled: Any) -> Any:
        followed.append(engine.scheduler.speculator is not None)
        assert self._decoder.weight_bytes < 0.5 * engine.hardware["weight_bytes"]  # type: ignore[attr-defined]
        return follow(self, scheduled)

    monkeypatch.setattr(DraftModel, "follow", counted)
    row = compare(engine, Load("short", ["abc abc abc abc"], 0.0, 1.0), tokens=20, repeats=1)
    assert followed and all(followed)
    assert row["proposed"] > 0 and row["accepted"] > 0.3


def test_a_draft_of_an_unknown_format_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="quantization='int5'"):
        make_config(model=model, speculative={"method": "draft", "model": model, "quantization": "int5"})
