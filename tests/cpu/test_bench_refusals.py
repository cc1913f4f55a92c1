"""What benchmarks refuse, in one clear line, and the load that is shortened for a model with few positions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_models import tiny_config, tiny_oracle, write_tokenizer
from octavo.bench import implementations, workloads
from octavo.cli.main import main
from octavo.errors import ConfigError


@pytest.mark.parametrize("name", ["weights", "kernels", "quantization"])
@pytest.mark.parametrize("seconds", ["nan", "inf", "0", "-1", "long"])
def test_seconds_are_finite_and_above_zero(name: str, seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", name, f"--seconds={seconds}"])
    assert end.value.code == 2
    assert f"{seconds!r}: must be a finite number above 0" in capsys.readouterr().err


def test_rates_are_finite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9", "--rates", "1,nan"]) == 2
    assert "--rates 1,nan: every rate must be a finite number above 0" in capsys.readouterr().err


def test_hf_cache_names_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "hf-cache", "--model", "/nonexistent"]) == 2
    assert "model '/nonexistent': no such file or directory" in capsys.readouterr().err


def test_implementations_shorten_the_load() -> None:
    whole = workloads.mixed_lengths(16)
    assert implementations.shortened(whole, max(p + o for p, o in whole)) == whole
    short = implementations.shortened(whole, 128)
    assert max(p + o for p, o in short) in (127, 128) and min(min(pair) for pair in short) >= 1
    assert len(set(short)) > 8, "still mixed"
    with pytest.raises(ConfigError, match="max_model_len=16: too short for the load, whose longest"):
        implementations.shortened(whole, 16)


def test_implementations_on_a_short_model(tmp_path: Path) -> None:
    tiny_oracle(tiny_config("llama", num_hidden_layers=1, max_position_embeddings=64)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    file = tmp_path / "run.json"
    given = ["--model", str(tmp_path), "--requests", "3", "--repeat", "1", "--dtype", "float32", "--json", str(file)]
    assert main(["bench", "implementations", *given]) == 0
    said = json.loads(file.read_text())
    assert [row["what"] for row in next(iter(said["tables"].values()))] == ["octavo", "transformers"]
    assert any("all lengths are shortened alike" in note for note in said["notes"])
