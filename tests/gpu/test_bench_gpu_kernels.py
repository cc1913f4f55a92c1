"""The kernel tables of `octavo bench gpu` run, tiny, in the interpreter; without a GPU the real ones say so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.bench import gpu_kernels
from octavo.errors import ConfigError

pytest.importorskip("triton")


def test_every_table_is_filled_and_every_row_is_kept(device):
    kept: dict[str, dict[str, Any]] = {}

    def once(key: str, measure: Any) -> dict[str, Any]:
        if key not in kept:
            kept[key] = measure()
        return kept[key]

    tables = gpu_kernels.tables(once, device=device, small=True)
    for table in tables:
        assert table.rows, table.title
        for row in table.rows:
            assert all(row[column.name] not in (None, 0) for column in table.columns), row
    assert {key.split("/")[1] for key in kept} == {
        "peak", "decode", "prompt", "blocks", "tiles", "add and norm", "gate", "rotate and write",
        "draw (top-k 40, top-p 0.95)",
    }  # fmt: skip
    measured = len(kept)
    again = gpu_kernels.tables(once, device=device, small=True)
    assert len(kept) == measured and [t.rows for t in again] == [t.rows for t in tables]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_are_no_figures():
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        gpu_kernels.tables(lambda key, measure: measure())
