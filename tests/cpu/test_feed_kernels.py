"""What the block map shows are the tables that the attention kernels were given, block by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo.config import make_config
from octavo.core.block_view import block_view
from octavo.engine import Engine
from octavo.inspect.block_map import BlockMap
from octavo.inspect.feed import delta_frame, full_frame
from octavo.sampling_params import BeamSearchParams, SamplingParams


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_feed_shows_the_tables_that_the_kernels_read(family: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path)
    settings = {"dtype": "float32", "block_size": 8, "num_blocks": 60, "max_model_len": 96, "debug": True}
    engine = Engine.build(make_config(model=str(tmp_path), **settings))
    given: list[tuple[Any, list[Any]]] = []  # of the last step: what was scheduled, and the kernels' tables
    build = engine.runner._batches.build  # type: ignore[attr-defined]

    def watched(*given_to: Any) -> Any:
        batch = build(*given_to)
        given.append((batch.scheduled, [table.clone().tolist() for table in batch.attention.block_tables]))
        return batch

    engine.runner._batches.build = watched  # type: ignore[attr-defined]
    for number in range(4):
        params: Any = SamplingParams(n=1 + number % 3, max_tokens=20, seed=number, ignore_eos=True)
        if number == 3:
            params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
        engine.add_request(f"r{number}", [5 + i for i in range(11 + 9 * number)], params)
    view = block_view(engine.scheduler)
    block_map = BlockMap(full_frame(view))
    compared = 0
    while engine.has_unfinished():
        given.clear()
        engine.step()
        now = block_view(engine.scheduler)
        block_map.apply(delta_frame(view, now, block_map.frame + 1))
        view = now
        for scheduled, tables in given:
            for row, item in enumerate(scheduled):
                shown = block_map.sequences.get(item.seq_id)
                if shown is None:
                    continue  # it ended in this step
                end = -(-(item.start + item.num_tokens) // block_map.block_size)
                for group, window in enumerate(block_map.windows):
                    first = max(0, item.start - window + 1) // block_map.block_size if window else 0
                    assert shown.tables[group][first:end] == tables[group][row][first:end] != []
                    compared += 1
    engine.close()
    assert compared > 100 and (family == "llama" or len(block_map.windows) > 1)
