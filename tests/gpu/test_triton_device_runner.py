"""The whole GPU path of the engine with Triton's kernels: attention, operations, draws and listed log-probabilities
through recorded, overlapped steps. On a CPU in the interpreter, with a device that stands in for the queue."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle import random_ids, tiny
from helpers.queue_device import QueueDevice, standing_in
from octavo import LLM, SamplingParams

pytest.importorskip("triton")

PROMPTS = [random_ids(5 + 3 * i, i) for i in range(3)]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, seed=2, max_tokens=4, ignore_eos=True),
]


def answers(llm: LLM) -> Any:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    places = outputs[0].outputs[0].logprobs or []
    return [o.outputs[0].token_ids for o in outputs], [[(t, e.rank) for t, e in place.items()] for place in places]


def test_overlapped_recorded_steps_give_the_text_of_the_cpu(device: str, tmp_path: Path) -> None:
    model = tiny("llama", tmp_path, num_hidden_layers=1)
    limits: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_model_len": 64, "max_num_seqs": 4}
    with model.engine(**limits, device="cpu") as plain:
        expected = answers(plain)
    with standing_in(QueueDevice()) if device == "cpu" else nullcontext():
        llm = model.engine(attention_backend="triton", device=device, **limits)
    with llm:
        runner: Any = llm._live().runner
        assert runner._drawing.__module__ == runner._listing.__module__ == "octavo.kernels.triton.sampling"
        assert answers(llm) == expected
        assert runner.graphs.counters.replayed > 0 and not runner.host_steps and llm.stats().overlapped_steps > 0
