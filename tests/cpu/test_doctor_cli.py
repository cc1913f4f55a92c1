"""Doctor and explanations from the command line: recordings of real runs, demos, what a prompt missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_models import write_tiny
from octavo import LLM, RequestError, SamplingParams
from octavo.bench.troubles import TROUBLES
from octavo.cli.main import main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_tiny("llama", path)
    return str(path)


def record(model: str, path: Path, count: int, max_tokens: int, n: int = 1, **settings: int) -> None:
    """A real model answers `count` prompts and records it."""
    prompts = [{"prompt_token_ids": [(7 * i + j * 3 + i * j) % 250 for j in range(30 + i % 9)]} for i in range(count)]
    params = SamplingParams(temperature=1.0 if n > 1 else 0.0, n=n, max_tokens=max_tokens, ignore_eos=True, seed=3)
    with LLM(model, record=str(path), max_model_len=200, skip_tokenizer_init=True, **settings) as llm:  # type: ignore[arg-type]
        llm.generate(prompts, params, use_tqdm=False)


@pytest.mark.parametrize(
    ("expected", "count", "max_tokens", "n", "settings"),
    [
        ("preemption-thrash", 16, 120, 1, {"num_blocks": 32, "max_num_seqs": 16}),
        ("throughput-capped", 24, 12, 1, {"num_blocks": 400, "max_num_seqs": 2}),
        ("copies-frequent", 12, 4, 6, {"num_blocks": 400, "max_num_seqs": 96}),
        (None, 8, 40, 1, {"num_blocks": 400, "max_num_seqs": 16}),
    ],
)
def test_recordings_of_a_real_model(
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    expected: str | None,
    count: int,
    max_tokens: int,
    n: int,
    settings: dict[str, int],
) -> None:
    record(model, tmp_path / "run.jsonl", count, max_tokens, n, **settings)
    code = main(["doctor", str(tmp_path / "run.jsonl"), "--json"])
    facts = json.loads(capsys.readouterr().out)
    codes = [f["code"] for f in facts["findings"]]
    assert facts["enough"] is (n == 1)
    if n > 1:  # twelve requests of four tokens are too few steps to judge; more of them are enough
        record(model, tmp_path / "run.jsonl", 12 * count, max_tokens, n, **{**settings, "max_num_seqs": 24})
        code = main(["doctor", str(tmp_path / "run.jsonl"), "--json"])
        codes = [f["code"] for f in json.loads(capsys.readouterr().out)["findings"]]
    assert codes[:1] == ([expected] if expected else [])
    assert code == (1 if expected else 0)


def test_demos(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--demo", "list"], ["--demo"]):
        assert main(["doctor", *words]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(TROUBLES)
    assert main(["doctor", "--demo", "healthy"]) == 0
    assert "no findings: this run is healthy" in capsys.readouterr().out
    assert main(["doctor", "--demo", "evicted-early"]) == 1
    assert "[evicted-early]" in capsys.readouterr().out
    assert main(["doctor", "--demo", "throughput-flat"]) == 0, "information is no reason to fail"
    capsys.readouterr()
    assert main(["doctor", "--demo", "gout"]) == 2
    assert "no trouble is called 'gout'" in capsys.readouterr().err
    assert main(["doctor", "run.jsonl", "--demo", "healthy"]) == 2
    assert "leave 'run.jsonl' out" in capsys.readouterr().err


def test_files_that_are_nothing_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path / "none.jsonl")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "text.jsonl").write_text("hello\n")
    assert main(["doctor", str(tmp_path / "text.jsonl")]) == 2
    assert "not a recording" in capsys.readouterr().err


def test_generate_explains_the_cache(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text("A keeper of a light counted ships.\nA keeper of a light counted SHIPS.\n")
    options = ["--model", model, "--num-blocks", "60", "--max-model-len", "100", "--max-tokens", "3"]
    many = [*options, "--max-num-seqs", "1", "--prompts-file", str(tmp_path / "prompts"), "--explain-cache"]
    assert main(["generate", *many]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("cache: ")]
    assert "nobody has computed this before" in notes[0]
    # The beginning token, and 28 letters that are the same.
    assert notes[1].startswith("cache: 29 of 35 prompt tokens came from the cache (2 blocks). Block 1 (from token 29) ")
    assert main(["generate", *many, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["cache_report"]["reason"] for r in rows] == ["never seen", "different token"]
    assert (rows[1]["cache_report"]["tokens_hit"], rows[1]["num_cached_tokens"]) == (29, 29)
    assert main(["generate", *options, "hello", "--stream", "--explain-cache"]) == 0
    assert "cache: 0: 0 of 6 prompt tokens came from the cache" in capsys.readouterr().out
    assert main(["generate", *options, "hello", "--beam-width", "2", "--explain-cache"]) == 2
    assert "--explain-cache: no effect with --beam-width" in capsys.readouterr().err


def test_outputs_and_the_engine_explain(model: str) -> None:
    with LLM(model, num_blocks=60, max_model_len=100) as llm:
        prompt = {"prompt_token_ids": list(range(48))}
        params = SamplingParams(temperature=0, max_tokens=3)
        first, second = (llm.generate([prompt], params, use_tqdm=False)[0] for _ in range(2))
        assert str(first.cache_report).startswith("0 prompt tokens came from the cache (0 blocks). Block 0")
        assert str(second.cache_report).startswith("47 prompt tokens came from the cache (3 blocks): every token")
        assert str(llm.explain(second.request_id)).startswith(f"{second.request_id}: 47 of 48 prompt tokens")
        with pytest.raises(RequestError, match="'nobody' is not known"):
            llm.explain("nobody")
