"""The whole engine with device "npu", over the emulated device and operators: right text, and limits that are said.

Answers are float16, so each is checked against the oracle's float32 logits with room for rounding: at every position
the token drawn must be the oracle's best, or less than `ROOM` behind it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import ascend_emulation
from helpers.oracle import Model, logits_of, random_ids, tiny
from octavo import LLM, ConfigError, SamplingParams

ROOM = 0.2
COUNT = 8
# Around the block of 128 tokens, and inside the first one.
PROMPTS = [random_ids(length, 7) for length in (1, 40, 127, 128, 129, 260)]


@pytest.fixture(autouse=True)
def npu(monkeypatch: pytest.MonkeyPatch) -> Any:
    return ascend_emulation.install(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """A model whose layers see everything, one with windows of 16 (and 150) tokens, one with soft caps."""
    root = tmp_path_factory.mktemp("tiny")
    return {family: tiny(family, root, max_position_embeddings=512) for family in ("llama", "gemma3", "gemma2")}


def engine(model: Model, **settings: Any) -> LLM:
    return model.engine(**{"device": "npu", "dtype": "float16", "num_blocks": 40, "max_model_len": 400, **settings})


def check(
    model: Model, llm: LLM, prompts: list[list[int]] = PROMPTS, count: int = COUNT, **params: Any
) -> list[list[int]]:
    """Generate, and compare every token with the oracle."""
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **params), use_tqdm=False
    )
    answers = [o.outputs[0].token_ids for o in outputs]
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = logits_of(model.oracle, prompt + answer[:-1], len(answer))
        behind = logits.amax(-1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert float(behind.max()) < ROOM, f"prompt of {len(prompt)} tokens: {behind.tolist()}"
        assert len(answer) == count
    view = llm.pool_view()
    assert view.num_used == view.num_pending == 0
    return answers


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_text_is_the_oracles(family: str, overlap: bool, models: dict[str, Model]) -> None:
    with engine(models[family], overlap=overlap) as llm:
        answers = check(models[family], llm)
        settings = llm.settings()
    assert len({tuple(a) for a in answers}) == len(PROMPTS)
    assert settings["attention_backend"] == {
        "asked": "auto", "chosen": "ascend", "why": "torch_npu's fused attention can run this model",
    }  # fmt: skip
    assert settings["block_size"]["chosen"] == 128 and "fused attention" in settings["block_size"]["why"]
    assert settings["device"]["chosen"] == "npu"


@pytest.mark.parametrize("chunk", [50, 131])
def test_prompts_in_chunks(chunk: int, models: dict[str, Model]) -> None:
    with engine(models["gemma3"], max_num_batched_tokens=chunk) as llm:
        check(models["gemma3"], llm, PROMPTS[3:], 4)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cached_prefix_is_read_again(family: str, models: dict[str, Model]) -> None:
    prompts = [PROMPTS[5], PROMPTS[5] + [3, 1], PROMPTS[5][:200]]
    with engine(models[family]) as llm:
        first = check(models[family], llm, prompts)
        assert check(models[family], llm, prompts) == first
        assert llm.stats().prefix_hit_tokens >= 3 * 128


def test_samples_share_their_prompt_and_copy_before_they_write(models: dict[str, Model]) -> None:
    sampled = SamplingParams(n=4, temperature=1.0, seed=5, max_tokens=COUNT, ignore_eos=True)
    with engine(models["llama"]) as llm:
        together = llm.generate([PROMPTS[4]], sampled, use_tqdm=False)[0].outputs
        copies = llm.stats().copies
        assert copies > 0
        assert len({tuple(o.token_ids) for o in together}) == 4
        check(models["llama"], llm, PROMPTS[:3])
    with engine(models["llama"], copy_on_write=False) as llm:
        alone = llm.generate([PROMPTS[4]], sampled, use_tqdm=False)[0].outputs
        assert llm.stats().copies > copies  # every sample's own blocks, at once
    assert [o.token_ids for o in alone] == [o.token_ids for o in together]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_what_is_pushed_out_comes_back(preemption: str, models: dict[str, Model]) -> None:
    more = {"swap_bytes": 1 << 21} if preemption == "swap" else {}
    prompts = [random_ids(120 + i, 3) for i in range(3)]
    with engine(
        models["llama"], num_blocks=4, max_model_len=256, preemption=preemption, enable_prefix_caching=False, **more
    ) as llm:
        check(models["llama"], llm, prompts, 12)
        stats = llm.stats()
    assert stats.preemptions > 0 and (stats.swaps > 0) == (preemption == "swap")


@pytest.mark.usefixtures("free_guesses")
def test_guesses_are_checked_in_one_call(models: dict[str, Model]) -> None:
    loop = [5, 9, 2, 7] * 40
    with engine(models["llama"], speculative="ngram:4") as llm:
        check(models["llama"], llm, [loop, PROMPTS[2]], 14)
        assert llm.stats().spec_draft_tokens > 0


def test_the_pool_is_sized_from_the_devices_memory(models: dict[str, Model]) -> None:
    with engine(models["llama"], num_blocks=None, gpu_memory_utilization=0.51) as llm:
        settings = llm.settings()
        assert settings["num_blocks"]["why"].startswith("gpu_memory_utilization=0.51 of 4.0 GiB, minus 2.00 GiB in use")
        # 0.51 * 4 GiB - 2 GiB taken - the largest step's 8 MiB, in blocks of 3 layers * 128 tokens * 128 bytes
        assert settings["num_blocks"]["chosen"] == (int(0.51 * (4 << 30)) - (2 << 30) - (8 << 20)) // (3 * 128 * 128)
        assert settings["swap_bytes"]["why"] == "a quarter of the pool"
        check(models["llama"], llm, PROMPTS[:2], 4)
    with pytest.raises(ConfigError, match=r"the KV pool is too small.*raise num_blocks or gpu_memory_utilization"):
        engine(models["llama"], num_blocks=1)
    with pytest.raises(ConfigError, match=r"num_blocks: 100000 blocks .* MiB of npu memory, 2048.0 MiB are available"):
        engine(models["llama"], num_blocks=100000)
    with pytest.raises(ConfigError, match="cpu_kv_bytes=1048576 has no effect on npu"):
        engine(models["llama"], num_blocks=None, cpu_kv_bytes=1 << 20)


def test_a_block_size_that_cannot_be_read_is_refused(models: dict[str, Model]) -> None:
    with pytest.raises(
        ConfigError, match=r"block_size=16: .*128 or 256 tokens\. Leave block_size out \(128 is chosen\)"
    ):
        engine(models["llama"], block_size=16)
    with engine(models["llama"], block_size=256) as llm:
        assert llm.settings()["block_size"] == {"asked": 256, "chosen": 256, "why": "as asked"}
        check(models["llama"], llm, PROMPTS[:3], 4)
    with engine(models["llama"], block_size=16, attention_backend="reference", num_blocks=80) as llm:
        check(models["llama"], llm, PROMPTS[:3], 4)


def test_what_the_operator_cannot_run_runs_in_plain_torch(
    models: dict[str, Model], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(models["gemma2"], num_blocks=120) as llm:
        settings = llm.settings()
        assert settings["attention_backend"]["chosen"] == "reference"
        assert "no soft cap on scores; this model caps at 50" in settings["attention_backend"]["why"]
        assert settings["block_size"] == {"asked": None, "chosen": 16, "why": "the default"}
        check(models["gemma2"], llm, PROMPTS[:3], 4)
    with pytest.raises(ConfigError, match=r"attention_backend='ascend' cannot be used: .*soft cap.*'reference' can"):
        engine(models["gemma2"], attention_backend="ascend")
    for settings_, reason in (
        ({"dtype": "float32"}, "takes float16 and bfloat16, not float32"),
        ({"kv_cache_dtype": "int8"}, "for single queries only, not kv_cache_dtype='int8'"),
    ):
        with engine(models["llama"], num_blocks=60, **settings_) as llm:
            assert reason in llm.settings()["attention_backend"]["why"]
            check(models["llama"], llm, PROMPTS[:2], 4)
    ascend_emulation.install(monkeypatch, name="Ascend310P3", bf16=False)
    with engine(models["llama"], num_blocks=60, dtype="auto") as llm:
        assert llm.settings()["dtype"]["chosen"] == "float16"
        assert "this one is Ascend310P3" in llm.settings()["attention_backend"]["why"]


def test_number_formats_that_do_not_exist_there_are_refused(models: dict[str, Model]) -> None:
    with pytest.raises(ConfigError, match=r"only the GPU kernels read fp8 keys and values; use int8 or auto on npu"):
        engine(models["llama"], kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="quantization='fp8' needs a GPU"):
        engine(models["llama"], quantization="fp8")
    with pytest.raises(ConfigError, match="quantization='gguf' on npu"):
        engine(models["llama"], quantization="gguf")


def test_contexts_beyond_the_operator(tmp_path: Path, models: dict[str, Model]) -> None:
    long = tiny("llama", tmp_path, max_position_embeddings=1 << 20)
    with engine(long, max_model_len=None, num_blocks=2100) as llm:
        chosen = llm.settings()["max_model_len"]
        assert chosen["chosen"] == 262144 and "no more of the model's 1048576 positions" in chosen["why"]
    with pytest.raises(ConfigError, match="max_model_len=300000: torch_npu's fused attention reads 262144 tokens"):
        engine(long, max_model_len=300000)


def test_experts_and_quantised_weights_run_there(tmp_path: Path, models: dict[str, Model]) -> None:
    experts = tiny("mixtral", tmp_path, max_position_embeddings=256)
    with engine(experts, max_model_len=200) as llm:
        check(experts, llm, PROMPTS[1:4:2], 4)
    answers = []
    for device, backend in (("cpu", "reference"), ("npu", "ascend")):
        with engine(
            models["llama"], device=device, attention_backend=backend, block_size=128, quantization="int8"
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
            answers.append([o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], params, use_tqdm=False)])
    assert answers[0] == answers[1]


def test_other_devices_do_not_get_the_backend(models: dict[str, Model]) -> None:
    with pytest.raises(
        ConfigError, match="attention_backend='ascend' calls operators of an NPU, and the device is cpu"
    ):
        engine(models["llama"], device="cpu", attention_backend="ascend")
    with engine(models["llama"], device="auto", dtype="auto") as llm:
        assert llm.settings()["device"]["chosen"] == "npu"
        assert llm.settings()["dtype"]["chosen"] == "bfloat16"
