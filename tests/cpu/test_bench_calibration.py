"""`octavo bench calibration` on a tiny model: the schedule agrees exactly, and the recording can be used again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_models import tiny_config
from octavo.cli.main import main
from octavo.core.record import replay


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config and no weights."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_config("gemma3", num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(path)
    return path


def test_the_simulator_runs_the_same_steps(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, kept = tmp_path / "run.json", tmp_path / "run.jsonl"
    engine = ["--model", str(model), "--load-format", "dummy", "--num-blocks", "2000"]
    assert main(["bench", "calibration", *engine, "--json", str(out), "--keep", str(kept)]) == 0
    rows = json.loads(out.read_text())["tables"]["simulated against measured"]
    assert {r["load"] for r in rows} == {"calibration", "long", "short"}
    for row in rows:
        if row["what"] == "steps":
            assert row["measured"] == row["simulated"] > 40
        else:
            assert row["measured"] > 0 and row["simulated"] > 0
    assert replay(kept).same
    capsys.readouterr()
    simulate = ["simulate", "--calibrate", str(kept), "--kv-bytes", "1MiB", "--model", str(model), "--dtype", "float32"]
    assert (
        main([*simulate, "--requests", "5", "--lengths", "fixed:20+10", "--policies", "paged:16", "--json", "-"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert "calibrated on" in found["setup"]
    assert found["policies"][0]["output_rate"] > 0


def test_it_records_by_itself(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "calibration", "--model", str(model), "--load-format", "dummy", "--record", "x"]) == 2
    assert "record: cannot be given here" in capsys.readouterr().err
