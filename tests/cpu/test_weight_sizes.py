"""What info, plan and simulate say of weights: from headers, and equal to what an engine then holds."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import quantized_files as qf
from helpers.tiny_models import write_tiny
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.core.weight_format import parse_weight_format
from octavo.errors import ConfigError
from octavo.kernels import cpu
from octavo.models.load import load_model, read_sizes

SHAPE = {"hidden_size": 128, "intermediate_size": 256}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    write_tiny("qwen3-tied", path, **SHAPE)
    return path


@pytest.fixture(scope="module")
def awq(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("awq")
    rounded = partial(qf.round_to_codes, bits=4, size=32, symmetric=False)
    qf.write_quantized("llama", path, qf.awq_config(), rounded, qf.awq, **SHAPE)
    return path


def held(path: Path, quantization: str | None) -> int:
    ops = cpu.make_ops(torch.float32, parse_weight_format(quantization))
    config = EngineConfig(model=str(path), skip_tokenizer_init=True, quantization=quantization)
    return load_model(config, dtype=torch.float32, device="cpu", ops=ops).weight_bytes


@pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
@pytest.mark.parametrize("quantization", [None, "int8", "int4", "int4:pure", "int4:128", "int4:64:pure"])
def test_sizes_are_those_of_the_loaded_model(quantization: str | None, plain: Path) -> None:
    said = read_sizes(str(plain)).weight_bytes(4, parse_weight_format(quantization))
    assert said == pytest.approx(held(plain, quantization), rel=0.01)


@pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_sizes_of_a_quantised_checkpoint(quantization: str | None, awq: Path) -> None:
    """Its layers are as stored; what it leaves as floats can be quantised."""
    sizes = read_sizes(str(awq))
    said = sizes.weight_bytes(4, parse_weight_format(quantization))
    assert said == pytest.approx(held(awq, quantization), rel=0.03)
    floats = 2 * 320 * 128 + 128 * (2 * 3 + 1)
    assert sum(sizes.packed.values()) == sizes.weight_bytes(4) - 4 * floats
    with pytest.raises(ConfigError, match="quantization='gguf' needs a GGUF file"):
        sizes.weight_bytes(4, parse_weight_format("gguf"))


def test_info(plain: Path, awq: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def info(*words: object) -> dict[str, Any]:
        assert main(["info", *map(str, words), "--json"]) == 0
        facts: dict[str, Any] = json.loads(capsys.readouterr().out)
        return facts

    facts = info(plain, "--quantization", "int4:128")
    sizes = read_sizes(str(plain))
    assert list(facts["weight_bytes"]) == ["float32", "bfloat16", "float16", "int8", "int4", "int4:128"]
    assert facts["weight_bytes"]["int4:128"] == sizes.weight_bytes(2, parse_weight_format("int4:128"))
    stored = info(awq)
    assert stored["stored"] == "AWQ, 4 bits, groups of 32"
    assert stored["weight_bytes"]["as stored"] == read_sizes(str(awq)).weight_bytes(2)
    assert main(["info", str(awq)]) == 0
    assert "AWQ, 4 bits, groups of 32" in capsys.readouterr().out
    assert main(["info", str(plain), "--quantization", "gguf"]) == 2
    assert "needs a GGUF file" in capsys.readouterr().err


def test_plan_of_a_quantised_checkpoint(awq: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own bytes; nothing else is proposed for its weights."""
    words = ["plan", str(awq), "--memory", "700MiB", "--lengths", "fixed:200+50", "--max-num-seqs", "4096", "--json"]
    assert main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["memory"]["weights"] == read_sizes(str(awq)).weight_bytes(2)
    assert {s["quantization"] for s in facts["smaller"]} <= {None}


def test_simulate_counts_the_bytes_of_formats(awq: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.json"

    def seconds(*words: str) -> tuple[str, float]:
        fixed = ["--requests", "20", "--lengths", "fixed:50+50", "--policies", "paged:16", "--no-timeline"]
        assert main(["simulate", *fixed, "--json", str(file), *words]) == 0
        found = json.loads(file.read_text())
        (policy,) = found["policies"]
        return found["setup"], policy["seconds"]

    setup, plain = seconds()
    assert "12.55" not in setup
    int8_setup, int8 = seconds("--quantization", "int8")
    assert "int8 weights" in int8_setup and int8 < plain
    assert seconds("--quantization", "int4", "--kv-cache-dtype", "int8")[1] < int8
    capsys.readouterr()
    for words, reason in (
        (["--quantization", "fp8"], "a simulation knows int8 and int4"),
        (["--kv-cache-dtype", "int3"], "int3"),
        (["--model", str(awq)], "its files are quantised (AWQ, 4 bits, groups of 32)"),
        (["--quantization", "int8", "--cost-model", "x.json", "--kv-bytes", "1GiB"], "has no effect with a calibrated"),
    ):
        assert main(["simulate", *words]) == 2
        assert reason in capsys.readouterr().err
