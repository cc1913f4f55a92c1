"""`octavo bench blocks` on a tiny model: both orders and every size are measured, and counts are exact. Never times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_models import tiny_config
from octavo.bench.blocks import arrange, waste
from octavo.cli.main import main
from octavo.core.block_pool import BlockPool
from octavo.kernels import cpu


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration; weights are drawn when it is loaded."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_config("gemma3", num_hidden_layers=2, max_position_embeddings=1024).save_pretrained(path)
    return path


def bench(model: Path, *given: str) -> int:
    return main(["bench", "blocks", "--model", str(model), "--load-format", "dummy", "--dtype", "float32", *given])


@pytest.mark.skipif(bool(cpu.why_unavailable()), reason="times the native kernels")
def test_both_orders_and_every_size(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "blocks.json"
    shape = ("--sequences", "1,2", "--contexts", "40,70", "--sizes", "8,16,24,64")
    assert bench(model, *shape, "--rounds", "1", "--steps", "2", "--seconds", "0.01", "--json", str(file)) == 0
    steps, sizes = json.loads(file.read_text())["tables"].values()
    assert [r["sequences"] for r in steps] == [1, 1, 2, 2]
    for row in steps:
        assert row["ratio"] == pytest.approx(row["scattered"] / row["in_order"])
    assert [r["size"] for r in sizes] == [8, 16, 24, 64]
    assert all(r["attention"] > 0 and r["pool"] > 0 for r in sizes)
    assert [r["table"] for r in sizes] == [500, 252, 168, 64]  # 125, 63, 42 and 16 entries of four bytes


def test_waste_is_half_a_block() -> None:
    assert waste(16) == pytest.approx(7.5 / (1152 + 7.5), rel=0.01)
    assert waste(8) < waste(16) < waste(128) and waste(1) == 0


def test_arranging_a_pool_decides_which_blocks_come_first() -> None:
    pool = BlockPool(50)
    arrange(pool, 3)
    shuffled = pool.take_many(50)
    assert sorted(shuffled) == list(range(50)) and shuffled != list(range(50))
    pool.release_all(shuffled)
    arrange(pool, None)
    assert pool.take_many(50) == list(range(50))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--num-blocks", "8"), "num_blocks"),
        (("--contexts", "64", "--attention-backend", "reference"), "attention_backend='reference'"),
    ],
)
def test_refusals_name_the_option(
    model: Path, given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(model, *given) == 2
    assert said in capsys.readouterr().err
