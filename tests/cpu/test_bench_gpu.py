"""`octavo bench gpu` without a GPU: it says so, its dry run works and goes on where it was cut, its sums are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.bench import gpu_work
from octavo.bench.gpu_card import measure_card
from octavo.bench.gpu_work import ABOUT, ROWS, START, Card, Scale, floor, model_config, workload
from octavo.bench.workloads import Item
from octavo.cli.main import main
from octavo.devices import CpuDevice
from octavo.errors import ConfigError

H200 = Card(copy_bytes_per_s=4.17e12, flops=754e12)
DRY = ("bench", "gpu", "--small", "--models", "qwen3-0.6b,llama-2-7b", "--workloads", "single,n8,prefill")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert main(["bench", "gpu", "--json", str(file)]) == 2
    said = capsys.readouterr()
    assert not file.exists() and said.out == ""
    assert "there is none to be had" in said.err and "Nothing was measured" in said.err and "--small" in said.err


def test_the_dry_run_works_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    assert main([*DRY, "--only", "checks,table", "--json", str(file)]) == 0
    first = json.loads(file.read_text())
    shown = capsys.readouterr().out
    assert "comparable with nothing" in shown and "vLLM, H200" in shown
    rows = first["rows"]
    assert {k: r["result"] for k, r in rows.items() if k.startswith("check/")} == dict.fromkeys(
        ("check/greedy/qwen3-0.6b", "check/sampled/qwen3-0.6b", "check/greedy/llama-3.1-8b",
         "check/sampled/llama-3.1-8b", "check/overlap"), "equal",
    )  # fmt: skip
    assert rows["qwen3-0.6b/n8"]["output_tokens"] == 5 * 8 * (256 // gpu_work.TINY.shorter)
    assert rows["qwen3-0.6b/prefill"]["output_tokens"] == 1 and "llama-2-7b/prefill" not in rows
    # A row that is lost is measured again, the others are not: what is planted in them stays.
    planted = {**rows, "qwen3-0.6b/single": {**rows["qwen3-0.6b/single"], "planted": 7}}
    del planted["llama-2-7b/single"]
    file.write_text(json.dumps({**first, "rows": planted}))
    assert main([*DRY, "--only", "checks,table,paging,blocks", "--json", str(file)]) == 0
    second = json.loads(file.read_text())["rows"]
    assert second["qwen3-0.6b/single"]["planted"] == 7 and second["llama-2-7b/single"]["output_tokens"] == 8
    assert second["paging/static, max_model_len 256"]["peak_sequences"] == 1
    assert second["paging/static, max_model_len 128"]["peak_sequences"] == 3
    assert second["paging/paged, blocks of 16"]["peak_sequences"] > 3
    assert {k for k in second if k.startswith("blocks/")} == {f"blocks/{n}" for n in (8, 16, 32, 64)}


def test_a_file_of_other_conditions_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    facts: dict[str, Any] = {"device": "another card", "versions": {}, "dry_run": True}
    for text, words in (
        (json.dumps({"facts": facts, "rows": {}}), "was measured on another card"),
        ("[]", "is no run"),
    ):
        file.write_text(text)
        assert main([*DRY, "--json", str(file)]) == 2
        assert words in capsys.readouterr().err and file.read_text() == text


@pytest.mark.parametrize(
    ("option", "value"), [("--only", "speed"), ("--models", "qwen3"), ("--workloads", "mix256,mix")]
)
def test_unknown_names_are_refused(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gpu", "--small", option, value]) == 2
    assert f"{option} {value.rpartition(',')[2]}: must be of" in capsys.readouterr().err


def test_workloads_are_those_of_the_reference_figures() -> None:
    """Counted once with the script that measured the reference engine: prompt tokens, output tokens."""
    counted = {
        "mix256": (144_342, 140_586), "seed2048": (145_562, 145_689), "b16": (16_384, 16_384), "single": (128, 512),
        "prefill": (8_192, 1), "prefill1k": (1_024, 1), "n8": (16_384, 16_384), "prefix": (532_480, 8_192),
    }  # fmt: skip
    found = {name: workload(name) for name in ABOUT}
    assert {name: (w.prompt_tokens, w.output_tokens) for name, w in found.items()} == counted
    assert found["single"].items[0].token_ids[:4] == (6321, 6900, 673, 4252)
    prefixes = {item.token_ids[:4096] for item in found["prefix"].items}
    assert len(prefixes) == 1 and len({i.token_ids for i in found["prefix"].items}) == 128
    with pytest.raises(ConfigError, match="workload 'mix': must be one of mix256"):
        workload("mix")
    assert len({r.key for r in ROWS}) == len(ROWS) and {r.model for r in ROWS} == set(START)


def test_floors_by_hand() -> None:
    llama, qwen = model_config("llama-3.1-8b"), model_config("qwen3-0.6b")
    # 8.03e9 numbers but the embedding table (0.525e9), read once per token, and at most 0.3 % of keys and values.
    one = floor(workload("single"), llama, H200, 2)
    assert one.by == "bandwidth" and one.seconds / 512 == pytest.approx(2 * 7.505e9 / 4.17e12, rel=4e-3)
    assert floor(workload("single"), qwen, H200, 2).seconds / 512 == pytest.approx(0.29e-3, rel=0.03)
    prompt = floor(workload("prefill"), llama, H200, 2)
    assert prompt.by == "arithmetic" and prompt.seconds == pytest.approx(0.175, rel=0.01)
    # A shared prompt is computed once: 4,096 + 128 * 64 tokens, not 128 * 4,160.
    shared = floor(workload("prefix"), llama, H200, 2).seconds
    apart = gpu_work.Workload(
        "x", tuple(Item((i, *w.token_ids), w.output) for i, w in enumerate(workload("prefix").items)), 1, 0.0, 1
    )
    assert floor(apart, llama, H200, 2).seconds > 5 * shared


def test_scaled_workloads_keep_their_shape() -> None:
    small = workload("n8", Scale(shorter=64, most=3))
    assert [(len(i.token_ids), i.output) for i in small.items] == [(32, 4)] * 3 and small.n == 8
    with pytest.raises(ConfigError, match="model 'gpt-2': must be one of llama"):
        model_config("gpt-2")


def test_ceilings_are_counted_in_bytes_and_operations() -> None:
    found = measure_card(CpuDevice(), copy_bytes=1 << 16, side=32)
    assert found["copy_bytes_per_s"] > 0 and found["flops"] > 0
