"""The whole engine against the transformers library on tiny models: whatever the settings, one answer.

Every answer is checked against the oracle; settings that must not matter (block size, chunk size, batch, paging, cache,
windows, preemption, backend) are varied around it, on models with every kind of layer. Audited after every step.
"""

from __future__ import annotations

from typing import Any

import pytest

from helpers.oracle import Model, assert_greedy, greedy, random_ids, tiny
from helpers.tiny_models import FAMILIES
from octavo import LLM, SamplingParams

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 64, 100)
PROMPTS = [random_ids(length, 7) for length in LENGTHS]
COUNT = 24


def params(count: int = COUNT, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **more)


def answers(llm: LLM, prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    """Token ids per prompt; the pool must be empty afterwards."""
    outputs = llm.generate(prompts, params(count), use_tqdm=False)
    view = llm.pool_view()
    assert view.num_used == view.num_pending == 0
    assert all(o.outputs[0].finish_reason == "length" for o in outputs)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """family -> Model, made once."""
    root, made = tmp_path_factory.mktemp("tiny"), {}

    def get(family: str) -> Model:
        if family not in made:
            made[family] = tiny(family, root)
        return made[family]

    return get


@pytest.fixture(scope="module")
def expected(models: Any) -> Any:
    """family -> right answers to PROMPTS, from an engine whose answers the oracle has confirmed."""
    made: dict[str, list[list[int]]] = {}

    def get(family: str) -> list[list[int]]:
        if family not in made:
            with models(family).engine(enable_prefix_caching=False) as llm:
                found = answers(llm, PROMPTS)
            for prompt, answer in zip(PROMPTS, found, strict=True):
                assert_greedy(models(family).oracle, prompt, answer)
            made[family] = found
        return made[family]

    return get


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family(family: str, models: Any, expected: Any) -> None:
    found = expected(family)
    # A model that always says the same proves nothing.
    assert len({tuple(a) for a in found}) == len(PROMPTS)
    assert sum(len(set(a)) for a in found) > 4 * len(found)
    assert greedy(models(family).oracle, PROMPTS[4], COUNT) == found[4]
    backend = {"attention_backend": "reference", "block_size": 8, "max_num_batched_tokens": 48}
    with models(family).engine(**backend) as llm:
        assert llm.settings()["attention_backend"]["chosen"] == "reference"
        assert answers(llm, PROMPTS) == found


def matrix() -> list[Any]:
    """family x block size x chunk limit: the whole of it for gemma3, a cross through the middle for the others."""
    return [
        pytest.param(
            family, size, chunk, marks=[] if family == "gemma3" or size == 16 or chunk == 17 else [pytest.mark.slow]
        )
        for family in ("llama", "gemma3", "qwen2-window")
        for size in (1, 8, 16, 32, 64)
        for chunk in (1, 15, 16, 17, 2048)
    ]


@pytest.mark.parametrize(("family", "block_size", "chunk"), matrix())
def test_block_and_chunk_sizes(family: str, block_size: int, chunk: int, models: Any, expected: Any) -> None:
    # One block size runs all prompts at every chunk size, the others a few.
    chosen = slice(None) if block_size == 16 else slice(2, 8, 2)
    with models(family).engine(block_size=block_size, max_num_batched_tokens=chunk) as llm:
        assert answers(llm, PROMPTS[chosen]) == expected(family)[chosen]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_batch_sizes(family: str, models: Any) -> None:
    """1 to 32 at once; the oracle confirms each of the 32 answers, and no batch size changes one."""
    prompts = [random_ids(1 + (7 * i) % 40, i) for i in range(32)]
    with models(family).engine(enable_prefix_caching=False) as llm:
        whole = answers(llm, prompts, 8)
        for prompt, answer in zip(prompts, whole, strict=True):
            assert_greedy(models(family).oracle, prompt, answer)
        for size in range(1, 32):
            assert answers(llm, prompts[:size], 8) == whole[:size]
    with models(family).engine(enable_prefix_caching=False, max_num_seqs=3) as llm:
        assert answers(llm, prompts, 8) == whole
        assert llm.pool_view().peak_sequences == 3


@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("preemption", ["recompute", "swap", "auto"])
@pytest.mark.parametrize("caching", [False, True])
def test_preempted(family: str, preemption: str, caching: bool, models: Any, expected: Any) -> None:
    """A pool that holds the longest request alone and little more."""
    probe: dict[str, Any] = {"block_size": 4, "max_model_len": 128, "preemption": preemption}
    groups = 2 if family == "gemma3" else 1
    blocks = groups * 32 if family != "mistral" else 12
    if preemption == "auto":
        probe["swap_bytes"] = 1 << 20
    with models(family).engine(num_blocks=blocks, enable_prefix_caching=caching, **probe) as llm:
        # Short prompts first, so that several are admitted before they have grown.
        order = [0, 1, 2, 3, 4, 5, 6, 7, 8] if family != "mistral" else [0, 1, 2, 3]
        assert answers(llm, [PROMPTS[i] for i in order]) == [expected(family)[i] for i in order]
        stats = llm.stats()
        assert stats.preemptions > 0
        if preemption == "swap":
            assert stats.swaps > 0
        if preemption == "recompute":
            assert stats.swaps == 0 and stats.recomputed_tokens > 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-window"])
@pytest.mark.parametrize(
    "settings",
    [
        {"allocation": "static", "max_model_len": 128},
        {"allocation": "static", "max_model_len": 128, "block_size": 64, "max_num_batched_tokens": 17},
        {"hybrid_kv": False},
        {"hybrid_kv": False, "attention_backend": "reference"},
        {"copy_on_write": False, "enable_prefix_caching": False},
        {"enforce_eager": True},
        {"max_num_seqs": 1},
    ],
    ids=lambda s: "-".join(map(str, s.values())),
)
def test_memory_policies(family: str, settings: dict[str, Any], models: Any, expected: Any) -> None:
    with models(family).engine(**settings) as llm:
        assert answers(llm, PROMPTS) == expected(family)
        if settings.get("hybrid_kv") is False or settings.get("allocation") == "static":
            assert len(llm.pool_view().windows) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2-window", "mistral"])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_prefix_cache_hits(family: str, block_size: int, models: Any) -> None:
    """Kinds 1 and 9: prompts around multiples of the block size, sent twice, extended, and as a following turn."""
    prompts = [random_ids(64, 3)[:length] for length in (15, 16, 17, 32, 33, 48, 64)]
    with models(family).engine(block_size=block_size, max_num_seqs=4) as llm:
        first = answers(llm, prompts)
        for prompt, answer in zip(prompts, first, strict=True):
            assert_greedy(models(family).oracle, prompt, answer)
        outputs = llm.generate(prompts, params(), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == first
        # All but the last token may come from the cache, and where blocks are whole they do.
        for prompt, output in zip(prompts, outputs, strict=True):
            assert (len(prompt) - 1) // block_size * block_size <= output.num_cached_tokens < len(prompt)
        turns = [p + a + random_ids(5, 1) for p, a in zip(prompts, first, strict=True)]
        following = llm.generate(turns, params(), use_tqdm=False)
        for prompt, output in zip(turns, following, strict=True):
            assert_greedy(models(family).oracle, prompt, output.outputs[0].token_ids)
        assert all(o.num_cached_tokens > len(p) // 2 for p, o in zip(prompts, following, strict=True))
        assert llm.reset_prefix_cache()
        again = llm.generate(prompts[:1], params(), use_tqdm=False)[0]
        assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == first[0]


def test_context_filled_to_the_last_position(models: Any) -> None:
    """max_tokens None: the answer ends with the model's last position, 256."""
    model = models("gemma3")
    prompt = random_ids(100, 5)
    with model.engine() as llm:
        (output,) = llm.generate(
            [prompt], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True), use_tqdm=False
        )
    assert len(output.outputs[0].token_ids) == 156 and output.outputs[0].finish_reason == "length"
    assert_greedy(model.oracle, prompt, output.outputs[0].token_ids)
