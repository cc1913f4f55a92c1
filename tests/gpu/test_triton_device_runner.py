"""The whole GPU path of the engine with Triton's kernels: attention, operations, draws, penalties, bans and listed
log-probabilities through recorded, overlapped steps. On a CPU in the interpreter, with a device that stands in for the
queue."""

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


ADJUSTED = [
    SamplingParams(
        temperature=0, repetition_penalty=1.5, frequency_penalty=0.3, max_tokens=5, ignore_eos=True, logprobs=1
    ),
    SamplingParams(temperature=0.9, seed=4, n=3, presence_penalty=0.8, logit_bias={7: 5.0, 9: -20.0}, max_tokens=4),
    SamplingParams(
        temperature=0.9, seed=5, allowed_token_ids=list(range(40, 60)), repetition_penalty=0.7, max_tokens=4,
        min_tokens=3, stop_token_ids=list(range(40, 50)),
    ),
]  # fmt: skip


def answers(llm: LLM, params: list[SamplingParams]) -> Any:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    places = outputs[0].outputs[0].logprobs or []
    tokens = [[sample.token_ids for sample in o.outputs] for o in outputs]
    return tokens, [[(t, e.rank) for t, e in place.items()] for place in places]


def test_overlapped_recorded_steps_give_the_text_of_the_cpu(device: str, tmp_path: Path) -> None:
    model = tiny("llama", tmp_path, num_hidden_layers=1)
    limits: dict[str, Any] = {"num_blocks": 64, "block_size": 8, "max_model_len": 64, "max_num_seqs": 4}
    with model.engine(**limits, device="cpu") as plain:
        expected, adjusted = answers(plain, PARAMS), answers(plain, ADJUSTED)
    with standing_in(QueueDevice()) if device == "cpu" else nullcontext():
        llm = model.engine(attention_backend="triton", device=device, **limits)
    with llm:
        runner: Any = llm._live().runner
        assert runner._drawing.__module__ == runner._listing.__module__ == "octavo.kernels.triton.sampling"
        assert type(runner._adjust._adjusting).__module__ == "octavo.kernels.triton.sampling"
        assert answers(llm, PARAMS) == expected
        assert answers(llm, ADJUSTED) == adjusted and not llm.stats().overlap_waits
        assert runner.graphs.counters.replayed > 0 and not runner.host_steps and llm.stats().overlapped_steps > 0
