"""`octavo bench serve` on a tiny model: the real server process, rates, and the comparison with offline."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from helpers.tiny_models import write_tiny
from octavo.bench.http_load import Sent, percentile
from octavo.bench.serve import as_arguments, rate_row
from octavo.cli.main import build_parser, main


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    write_tiny("llama", path)
    return str(path)


def run(model: str, tmp_path: Path, *more: str) -> dict:
    target = tmp_path / "run.json"
    sizes = ["--num-blocks", "200", "--requests", "5", "--prompt-len", "12", "--output-len", "6"]
    assert main(["bench", "serve", "--model", model, *sizes, *more, "--json", str(target)]) == 0
    found: dict = json.loads(target.read_text())
    return found


def test_rates_and_their_percentiles(model: str, tmp_path: Path) -> None:
    found = run(model, tmp_path, "--rates", "20,200")
    (rows,) = found["tables"].values()
    assert [row["rate"] for row in rows] == [20.0, 200.0]
    for row in rows:
        assert (row["requests"], row["failed"]) == (5, 0)
        assert 0 < row["first_50"] <= row["first_95"] <= row["first_99"]
        assert row["output_rate"] * row["seconds"] == pytest.approx(30)


def test_the_server_against_offline(model: str, tmp_path: Path) -> None:
    found = run(model, tmp_path, "--compare-offline", "--repeat", "1")
    load, first = found["tables"].values()
    assert [row["how"] for row in load] == ["offline", "HTTP, streamed", "HTTP, whole answers"]
    assert all(row["output_rate"] * row["seconds"] == pytest.approx(30) for row in load)
    assert [row["how"] for row in first] == ["offline", "streamed"]
    assert len(found["goals"]) == 2


def test_a_row_counts_failures_apart() -> None:
    sent = [Sent(200, [0.1, 0.2, 0.4], 0.5, 9), Sent(429, error="full"), Sent(200, [0.3], 0.4, 1, error="cut")]
    row = rate_row(2.0, 2.0, sent)
    assert (row["requests"], row["failed"], row["first_error"]) == (3, 2, "full")
    assert (row["request_rate"], row["output_rate"]) == (0.5, 4.5)
    assert row["first_50"] == pytest.approx(100)
    assert row["between_99"] == pytest.approx(200)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentile([], 0.5) is None
    assert [percentile([4, 1, 3, 2], share) for share in (0.01, 0.5, 0.75, 1.0)] == [1, 2, 3, 4]


def test_settings_become_options_that_serve_understands() -> None:
    given = {"model": "x", "enable_prefix_caching": False, "seed": 3, "num_blocks": 9, "enforce_eager": True}
    args: argparse.Namespace = build_parser(full_bench=False).parse_args(["serve", *as_arguments(given)])
    assert (args.model, args.prefix_caching, args.engine_seed, args.num_blocks) == ("x", False, 3, 9)
    assert args.enforce_eager is True


@pytest.mark.parametrize("arguments", ["--rates 0", "--rates x", "--url http://x --compare-offline"])
def test_what_makes_no_sense_is_refused(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments.split(), *(["--url", "http://127.0.0.1:1"])]) == 2
