"""The last layer for those tokens alone whose hidden states are read: what an engine answers is the same, bit by bit.

What the layers give for such tokens is in test_native_stack.py; here the runner says which they are. Unwanted states
are NaN, so one that is read anyway would end its request with an error.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle import random_ids
from helpers.tiny_models import write_tiny
from octavo import PoolingParams, SamplingParams
from octavo.config import make_config
from octavo.core.speculation import Speculator
from octavo.engine import Engine
from octavo.kernels import cpu
from octavo.kernels.interface import AttentionBatch
from octavo.runner.batch import BatchBuilder

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")

WORDS = random_ids(12, 3)
#: A prompt in several chunks, one that says something again and again, samples that share one, and all that reads more
#: states than the last: prompt logprobs, both ways of pooling.
REQUESTS: list[tuple[list[int], Any]] = [
    (random_ids(100, 1), SamplingParams(temperature=0, max_tokens=12, logprobs=2)),
    (WORDS * 3, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)),
    (random_ids(40, 4), SamplingParams(n=3, seed=5, max_tokens=10, logprobs=1)),
    (random_ids(70, 6), SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=2)),
    (random_ids(70, 8), PoolingParams(pooling="mean")),
    (random_ids(60, 9), PoolingParams(pooling="last")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_tiny("gemma3", folder / "gemma3")
    write_tiny("gemma3", folder / "small", num_hidden_layers=2, num_key_value_heads=1)
    return folder


def answers(path: Path, **settings: Any) -> list[Any]:
    """Everything that is told of each of `REQUESTS`, all at once and in chunks."""
    given = {"num_blocks": 300, "max_model_len": 200, "max_num_batched_tokens": 48, "debug": True}
    engine = Engine.build(make_config(model=str(path), **{**given, **settings}))
    if (speculator := engine.scheduler.speculator) is not None:  # guesses cost nothing: as many as may be
        free = replace(speculator.settings, row_costs=(), draft_costs=())
        engine.scheduler.speculator = Speculator(free, engine.scheduler.memory)
    done: dict[str, Any] = {}
    for number, (prompt, params) in enumerate(REQUESTS):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step() if o.finished}
    told = []
    for number in range(len(REQUESTS)):
        output = done[str(number)]
        told.append(
            (
                [(o.token_ids, o.finish_reason, o.logprobs) for o in output.outputs],
                output.prompt_logprobs,
                output.embedding,
            )
        )
    return told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("speculative", [None, "ngram:3", "draft"])
def test_every_answer_is_that_of_the_whole_computation(
    dtype: str, speculative: str | None, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[AttentionBatch] = []
    plan = cpu.NativeAttention.plan

    def watched(self: cpu.NativeAttention, batch: AttentionBatch) -> None:
        batches.append(batch)
        plan(self, batch)

    monkeypatch.setattr(cpu.NativeAttention, "plan", watched)
    chosen = f"draft:{models / 'small'}:2" if speculative == "draft" else speculative
    settings = {"dtype": dtype, "speculative": chosen}
    found = answers(models / "gemma3", **settings)
    parts = [batch.wanted.tolist() for batch in batches if batch.wanted is not None]
    assert any(0 in part for part in parts) and any(max(part) > 1 for part in parts)
    if speculative == "draft":  # its last pass of each step is for keys and values
        assert sum(set(part) == {0} for part in parts) > 5
    build = BatchBuilder.build
    monkeypatch.setattr(BatchBuilder, "build", lambda self, scheduled, wanted=None: build(self, scheduled))
    batches.clear()
    assert answers(models / "gemma3", **settings) == found
    assert all(batch.wanted is None for batch in batches)
    for outputs, _, _ in found:
        assert all(reason in ("length", "stop") for _, reason, _ in outputs)
