"""`octavo bench quantization` on tiny things: the tables, exact room, and that quality is measured, not assumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo.bench import kv_speed
from octavo.bench.kernels import Shape
from octavo.bench.kv_formats import FORMATS
from octavo.bench.weight_quality import weights_text
from octavo.cli.main import main
from octavo.kernels import cpu


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bench")
    write_tiny("qwen3-tied", path)
    return str(path)


def report(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    target = tmp_path / "report.json"
    assert main(["bench", "quantization", "--json", str(target), *arguments]) == 0
    found: dict[str, Any] = json.loads(target.read_text())
    return found


def test_quality_and_room(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path, "--model", tiny, "--only", "quality", "--only", "room", "--tokens", "150")
    quality, room = found["tables"].values()
    rows = {r["format"]: r for r in quality}
    assert rows["float32"]["mean_cosine"] == pytest.approx(1) and rows["float32"]["change"] == 0
    # Fewer bits, more divergence: a format that was not in use would not show any.
    assert 0 < rows["int8"]["divergence"] < rows["int8,int4"]["divergence"] < rows["int4"]["divergence"]
    assert [rows[name]["bits"] for name in ("bfloat16", "int8", "int4")] == [16, 8.5, 4.75]
    assert {r["format"]: r["token"] for r in room}["int8"] == 3 * 2 * 2 * (32 + 2)
    assert "octavo bench quantization" in capsys.readouterr().out


def test_weights(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(tmp_path, "--model", tiny, "--weights", "--tokens", "150")
    (table,) = found["tables"].values()
    rows = {r["format"]: r for r in table}
    pure = ["int4:pure", "int4:64:pure", "int4:128:pure"]
    assert list(rows) == ["float32", "bfloat16", "fixed point", "int8", "int4", "int4:128", *pure]
    assert rows["float32"]["bits"] == 32 and rows["float32"]["change"] == 0
    # Fewer bits, fewer bytes, logits further off.
    for more, fewer in (("float32", "int8"), ("int8", "int4"), ("int4", "int4:pure"), ("int4:pure", pure[-1])):
        assert rows[more]["bytes"] > rows[fewer]["bytes"]
        assert rows[more]["mean_cosine"] > rows[fewer]["mean_cosine"]
    assert any("gguf left out: quantization='gguf' needs a GGUF file" in note for note in found["notes"])
    assert "cosine, mean" in capsys.readouterr().out
    assert main(["bench", "quantization", "--model", tiny, "--weights", "--only", "room"]) == 2
    assert "--weights is --only weights" in capsys.readouterr().err


def test_the_text_is_long_enough_to_say_something() -> None:
    assert len(weights_text().split()) > 3000


@pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
def test_speed(tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_speed, "SHAPES", (Shape(2, 64, 1, 4, 2, 32),))
    monkeypatch.setattr(kv_speed, "COLD_BYTES", 128 * 300)  # int4: 128 tokens of 2 x 2 x (16 + 2 + 1) bytes a layer
    found = report(tmp_path, "--model", tiny, "--only", "attention", "--seconds", "0.01")
    (row,) = found["tables"]["attention of a decode step"]
    assert row["layers"] == 4
    assert "so that keys and values come from memory" in " ".join(found["notes"])
    assert all(row[f.name] > 0 for f in FORMATS)
    assert row["int8_ratio"] > 0 and row["int4_ratio"] > 0
    (row,) = report(tmp_path, "--model", tiny, "--only", "attention", "--seconds", "0.01", "--layers", "1")["tables"][
        "attention of a decode step"
    ]
    assert row["layers"] == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [(["--cpu-time"], "--threads 1"), (["--text", "/dev/null"], "two tokens")],
)
def test_refusals(given: list[str], reason: str, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quantization", "--model", tiny, "--only", "quality", *given]) != 0
    assert reason in capsys.readouterr().err


def test_a_time_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "quantization", "--seconds", "0"])
    assert "must be a finite number above 0" in capsys.readouterr().err
