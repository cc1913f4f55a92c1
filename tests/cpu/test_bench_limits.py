"""The machine's limits beside a step: what is measured, and the shares computed from it. Never times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_models import tiny_config
from octavo.bench import limits
from octavo.cli.main import main
from octavo.kernels import cpu
from octavo.kernels.cpu import loader

needs_native = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")


@needs_native
def test_profile_measures_the_limits_beside_the_step(tmp_path: Path) -> None:
    tiny_config("gemma3", num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(tmp_path)
    kept = tmp_path / "profile.json"
    options = ["--load-format", "dummy", "--sequences", "3", "--context", "40", "--prompt", "24", "--steps", "2"]
    assert main(["bench", "profile", "--model", str(tmp_path), *options, "--json", str(kept)]) == 0
    said = json.loads(kept.read_text())
    rows = list(said["tables"].values())[1]
    assert [r["case"] for r in rows] == ["decode 3", "prompt 24"]
    assert all(r["gbs"] > 0 and r["of_arithmetic"] > 0 for r in rows)
    assert "limits measured in this run" in "".join(said["notes"])


def test_limit_shares_of_known_times() -> None:
    measured = {
        "decode 4": {"sequences": 4, "context": 100, "products": 6.0, "head": 4.0},
        "prompt 50": {"sequences": 1, "context": 50, "products": 15.0, "head": 5.0},
    }
    yardsticks = limits.Limits(reading=(60e9, 50e9), arithmetic=(120e9, 100e9))
    work = limits.StepWork(weights=400_000_000, layers=65_000_000, last=5_000_000, head=30_000_000, floats=True)
    decode, prompt = limits.limit_table(yardsticks, work, measured).rows
    assert (decode["ms"], decode["gbs"], decode["of_reading"]) == pytest.approx((10, 40, 0.8))
    assert (decode["gflops"], decode["of_arithmetic"]) == pytest.approx((80, 0.8))  # 4 rows of 200 MFLOP in 10 ms
    assert prompt["gflops"] == pytest.approx((50 * 130e6 + 70e6) / 20e-3 / 1e9)  # one row of the prompt draws
    quantized = limits.StepWork(weights=1, layers=1, last=1, head=1, floats=False)
    assert limits.limit_table(yardsticks, quantized, measured).rows[0]["of_arithmetic"] is None


@needs_native
def test_limits_refuse_what_measures_nothing() -> None:
    native = loader.native()
    with pytest.raises(ValueError, match="caches"):
        native.read_rate(1000, 0.01)
    with pytest.raises(ValueError, match="rounds"):
        native.arithmetic_rate(0, 0, 0.01)
    for best, middle in (native.read_rate(1 << 21, 0.01), native.arithmetic_rate(1, 100, 0.01)):
        assert best >= middle > 0
