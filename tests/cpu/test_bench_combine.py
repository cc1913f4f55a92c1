"""`octavo bench combine` on a tiny model: every lever is in use, and the room that is counted is the room there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo.bench import combine
from octavo.cli.main import main
from octavo.core.static_allocation import StaticAllocation


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model") / "llama"
    write_tiny("llama", folder, max_position_embeddings=512, head_dim=32, intermediate_size=128)
    return str(folder)


def report(model: str, tmp_path: Path, *words: str) -> dict[str, Any]:
    file = tmp_path / "run.json"
    sizes = ["--requests", "5", "--tokens", "12", "--prompt", "52", "--reserve", "128"]
    engine = ["--model", model, "--dtype", "float32", "--json", str(file)]
    assert main(["bench", "combine", *sizes, *engine, *words]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_every_lever(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(model, tmp_path, "--memory", "1600KiB")
    assert "ms/token, one" in capsys.readouterr().out
    (table,) = found["tables"].values()
    rows = {row["name"]: row for row in table}
    assert list(rows) == [lever.name for lever in combine.levers()]
    static, paged = rows["static"], rows["paged"]
    # Static reserves 128 positions for 64: half as many sequences, the same bytes.
    assert static["weight_bytes"] == paged["weight_bytes"] and static["pool_bytes"] == paged["pool_bytes"]
    assert paged["fits"] == paged["pool_bytes"] // (4 * 16 * 3 * 2 * 2 * 32 * 4)
    assert static["fits"] == paged["fits"] // 2 == static["peak"] < paged["peak"] == 5
    assert static["of_static"] == 1 and paged["of_static"] == paged["fits"] / static["fits"]
    # Eight bits: keys and values with a scale each; weights a quarter of float32, what they leave is the pool's.
    int8 = rows["paged, KV int8"]
    assert int8["fits"] / paged["fits"] == pytest.approx(4 * 32 / (32 + 2), rel=0.1)
    assert (
        rows["paged, weights int4"]["weight_bytes"]
        < rows["paged, weights int8"]["weight_bytes"]
        < (0.45 * paged["weight_bytes"])
    )
    together = rows["all, int8"]
    assert together["fits"] > max(int8["fits"], rows["paged, weights int8"]["fits"])
    for row in table:
        assert row["weight_bytes"] + row["pool_bytes"] <= 1.02 * (1600 << 10)
        assert row["rate"] > 0 and row["ms_crowd"] > 0 and row["ms_one"] > 0
        assert row["speculation"] == ("speculative" in row["settings"])
        assert row["speculation"] or not row["guesses"]


def test_what_does_not_fit_says_so(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(model, tmp_path, "--memory", "700KiB", "--only", "static", "--only", "paged-weights-int8")
    (table,) = found["tables"].values()
    static, int8 = table
    assert static["fits"] == 0 and "rate" not in static and int8["fits"] > 0
    assert any("static: does not fit: weights and one sequence need" in note for note in found["notes"])
    assert "paged, weights int8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num-blocks", "5"], "num_blocks: cannot be given here, --memory sizes the pool"),
        (["--quantization", "int8"], "quantization: cannot be given here, it is one of the levers"),
        (["--only", "int8"], "--only int8: must be one of static, paged, paged-KV-int8"),
        (
            ["--lora", "a=/none", "--only", "paged", "--memory", "1600KiB", "--reserve", "128", "--prompt", "52"],
            "lora '/none': no such directory",
        ),
        (
            ["--memory", "1KiB"],
            "1024 bytes (0.0 MiB) for weights and KV: no engine fits; the smallest (all, int4) needs ",
        ),
        (["--reserve", "60", "--prompt", "52"], "--reserve 60: the load needs 52 + 64 positions"),
    ],
)
def test_refusals(words: list[str], reason: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "combine", "--model", model, *words]) == 2
    assert reason in capsys.readouterr().err


def test_the_least_memory_is_the_least(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "paged", "--prompt", "52", "--tokens", "12", "--reserve", "128", "--requests", "2"]
    common = ["bench", "combine", "--model", model, "--dtype", "float32", *only]
    assert main([*common, "--memory", "1000"]) == 2
    said = capsys.readouterr().err
    assert "raise --memory or lower --reserve" in said
    least = int(said.partition(" needs ")[2].split()[0])
    assert main([*common, "--memory", str(least - 1)]) == 2
    capsys.readouterr()
    assert main([*common, "--memory", str(least)]) == 0
    assert "does not fit" not in capsys.readouterr().out


def test_static_is_the_baseline(model: str) -> None:
    """The lever named so allocates so."""
    from octavo.config import make_config
    from octavo.engine import Engine

    first = combine.levers()[0]
    engine = Engine.build(make_config(model=model, num_blocks=16, max_model_len=64, **first.settings))
    assert isinstance(engine.scheduler.memory.allocation, StaticAllocation)
