"""The whole engine through Triton: its greedy text is the one that the definition in plain torch gives.

In the interpreter in float32, on models with windows, soft caps, norms of heads and grouped heads; on a GPU the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers.oracle import random_ids, tiny
from octavo import LLM, SamplingParams

pytest.importorskip("triton")

PROMPTS = [random_ids(length, 7) for length in (21, 3)]
COUNT = 4


def answers(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    with llm:
        settings = SamplingParams(**{"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, **params})
        outputs = llm.generate(prompts, settings, use_tqdm=False)
        view = llm.pool_view()
        assert view.num_used == view.num_pending == 0
        return [completion.token_ids for o in outputs for completion in o.outputs]


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_greedy_text_is_the_references(family, device, tmp_path):
    model = tiny(family, tmp_path, num_hidden_layers=2)
    common: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 16, "debug": True, "device": device}
    expected = answers(model.engine(attention_backend="reference", **{**common, "device": "cpu"}), PROMPTS)
    llm = model.engine(attention_backend="triton", **common)
    assert llm.config.attention_backend == "triton"
    assert answers(llm, PROMPTS) == expected
    assert len({tuple(a) for a in expected}) == len(PROMPTS)


def test_samples_of_one_prompt_share_blocks_and_copy_them(device, tmp_path):
    """n = 2: the second sample's first write goes into a shared block, so a block is copied by the kernel."""
    model = tiny("llama", tmp_path, num_hidden_layers=2)
    common: dict[str, Any] = {"block_size": 8, "debug": True, "device": device}
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 2, "max_tokens": 4}
    expected = answers(model.engine(attention_backend="reference", **{**common, "device": "cpu"}), PROMPTS[1:], **drawn)
    assert answers(model.engine(attention_backend="triton", **common), PROMPTS[1:], **drawn) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3", "mistral"])
def test_long_greedy_text_on_a_gpu_in_float32_is_the_cpus(family, tmp_path):
    model = tiny(family, tmp_path)
    prompts = [random_ids(length, 3) for length in (1, 2, 15, 16, 17, 31, 33, 64, 100)]
    expected = answers(model.engine(device="cpu"), prompts, max_tokens=40)
    torch.set_float32_matmul_precision("highest")
    assert answers(model.engine(device="cuda"), prompts, max_tokens=40) == expected
