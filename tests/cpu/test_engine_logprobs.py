"""Log-probabilities, penalties and the influence of a batch, through the whole engine (kinds 8, 32, 33, 34)."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch

from helpers.oracle import Model, logits_of, logprobs_of, random_ids, tiny
from octavo import LLM, SamplingParams
from octavo.outputs import Logprob, RequestOutput

PROMPT = random_ids(50, 21)


@pytest.fixture(scope="module", params=["llama", "gemma3-untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny(request.param, tmp_path_factory.mktemp("logprobs"))


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return model.engine()


def run(llm: LLM, prompts: list[list[int]], params: Any) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.pool_view().num_used == 0
    return outputs


def assert_entry(entry: dict[int, Logprob], token: int, right: torch.Tensor, k: int) -> None:
    """The chosen token is in, the k best are in, with the oracle's values [V] and ranks."""
    best = right.topk(max(k, 1))
    assert token in entry
    assert set(entry) == {token, *best.indices.tolist()[:k]}
    for other, given in entry.items():
        assert given.logprob == pytest.approx(float(right[other]), abs=1e-4)
        assert given.rank == 1 + int((right > right[other]).sum())
        assert (given.decoded_token is not None) == (other <= 258)  # ids beyond have no token in the tokenizer


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_equal_to_a_plain_forward_pass(chunk: int, backend: str, model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    neighbour = SamplingParams(seed=1, max_tokens=20)
    with model.engine(max_num_batched_tokens=chunk, attention_backend=backend, block_size=8) as llm:
        output = run(llm, [PROMPT, random_ids(30, 2)], [params, neighbour])[0]
    answer, sample = output.outputs[0].token_ids, output.outputs[0]
    right = logprobs_of(model.oracle, PROMPT + answer)
    assert output.prompt_logprobs is not None and sample.logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT) and output.prompt_logprobs[0] is None
    for at in range(1, len(PROMPT)):
        entry = output.prompt_logprobs[at]
        assert entry is not None
        assert_entry(entry, PROMPT[at], right[at - 1], 2)
    assert len(sample.logprobs) == len(answer)
    for at, token in enumerate(answer):
        assert_entry(sample.logprobs[at], token, right[len(PROMPT) + at - 1], 3)
    total = sum(entry[token].logprob for entry, token in zip(sample.logprobs, answer, strict=True))
    assert sample.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_raw_whatever_shapes_the_draw(model: Model, llm: LLM) -> None:
    """Temperature, filters, penalties and bias change what is drawn, not the log-probability it is given."""
    params = SamplingParams(
        n=3, seed=4, temperature=1.7, top_k=50, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4,
        logit_bias={7: 4.0}, max_tokens=10, ignore_eos=True, logprobs=0,
    )  # fmt: skip
    for sample in run(llm, [PROMPT], params)[0].outputs:
        right = logprobs_of(model.oracle, PROMPT + sample.token_ids)[len(PROMPT) - 1 : -1]
        assert sample.logprobs is not None
        for entry, token, row in zip(sample.logprobs, sample.token_ids, right, strict=True):
            assert_entry(entry, token, row, 0)


def test_prompt_logprobs_of_a_cached_prompt(model: Model) -> None:
    """Kind 8: asked for with 1, 0 and 1 while the prompt is in the cache; also beside a request that hits it."""
    with model.engine(block_size=8) as llm:
        first, second, third = (
            run(llm, [PROMPT], SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=k))[0] for k in (1, 0, 1)
        )
        plain = run(llm, [PROMPT], SamplingParams(temperature=0, max_tokens=2))[0]
        both = run(
            llm, [PROMPT] * 2, [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=k) for k in (None, 1)]
        )
    assert plain.num_cached_tokens == 48 and plain.prompt_logprobs is None
    assert first.prompt_logprobs == third.prompt_logprobs == both[1].prompt_logprobs
    assert second.prompt_logprobs is not None and first.prompt_logprobs is not None
    assert len(second.prompt_logprobs) == len(first.prompt_logprobs) == len(PROMPT)
    assert first.prompt_logprobs[0] is second.prompt_logprobs[0] is None
    assert first.num_cached_tokens == second.num_cached_tokens == third.num_cached_tokens == 0
    for at in range(1, len(PROMPT)):
        one, none = first.prompt_logprobs[at], second.prompt_logprobs[at]
        assert one is not None and none is not None
        assert list(none) == [PROMPT[at]] and none[PROMPT[at]] == one[PROMPT[at]]
    assert first.outputs[0].token_ids == plain.outputs[0].token_ids == both[0].outputs[0].token_ids


def test_prompt_of_one_token(llm: LLM) -> None:
    (output,) = run(llm, [[5]], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, logprobs=1))
    assert output.prompt_logprobs == [None]


def test_prompt_logprobs_after_preemption(model: Model) -> None:
    prompts = [random_ids(20 + i, 5) for i in range(5)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1, logprobs=1)
    with model.engine(block_size=4) as llm:
        expected = [run(llm, [p], params)[0] for p in prompts]
    with model.engine(block_size=4, num_blocks=26, max_model_len=48) as llm:
        found = run(llm, prompts, params)
        assert llm.stats().preemptions > 0
    for ours, right in zip(found, expected, strict=True):
        assert ours.prompt_logprobs == right.prompt_logprobs
        assert ours.outputs[0].logprobs == right.outputs[0].logprobs


PENALTIES = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5},
    {"repetition_penalty": 1.8},
]


def penalised(oracle: Any, prompt: list[int], count: int, given: dict[str, float]) -> list[int]:
    """Ten lines: presence and frequency count the output, repetition counts the prompt and the output."""
    answer: list[int] = []
    for _ in range(count):
        row = logits_of(oracle, prompt + answer, 1)[0].clone()
        for token in set(prompt + answer):
            factor = given.get("repetition_penalty", 1.0)
            row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        for token in set(answer):
            row[token] -= given.get("frequency_penalty", 0.0) * answer.count(token)
            row[token] -= given.get("presence_penalty", 0.0)
        answer.append(int(row.argmax()))
    return answer


def test_penalties(model: Model, llm: LLM) -> None:
    """Kind 33: each equals the ten lines above, in all six orders, and beside a request without any."""
    prompts = [[*random_ids(9, s), 4, 4, 4] for s in range(3)]
    expected = [penalised(model.oracle, p, 24, g) for p, g in zip(prompts, PENALTIES, strict=True)]
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **g) for g in PENALTIES]
    plain = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    without = [o.outputs[0].token_ids for o in run(llm, prompts, plain)]
    assert sum(a != b for a, b in zip(without, expected, strict=True)) >= 2
    for order in permutations(range(3)):
        found = run(llm, [*(prompts[i] for i in order), prompts[0]], [*(params[i] for i in order), plain])
        assert [o.outputs[0].token_ids for o in found[:3]] == [expected[i] for i in order]
        assert found[3].outputs[0].token_ids == without[0]
    with model.engine(num_blocks=24, block_size=4, max_model_len=40, preemption="recompute") as small:
        found = run(small, prompts, params)
        assert small.stats().preemptions > 0
        assert [o.outputs[0].token_ids for o in found] == expected


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_a_batch_has_no_influence(backend: str, model: Model) -> None:
    """Kind 34: alone, among seven, and among seven others: the same bits (the plain torch path: the last two)."""
    if backend == "native":
        pytest.importorskip("octavo.kernels.cpu._native")
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=5)
    other = [SamplingParams(seed=i, max_tokens=16, ignore_eos=True, repetition_penalty=1.1) for i in range(7)]
    with model.engine(attention_backend=backend, enable_prefix_caching=False) as llm:

        def among(neighbours: list[list[int]]) -> list[dict[int, Logprob]] | None:
            prompts = [*neighbours[:3], PROMPT, *neighbours[3:]]
            each = [*other[:3], params, *other[3:]]
            return run(llm, prompts, each)[3].outputs[0].logprobs

        alone = run(llm, [PROMPT], params)[0].outputs[0].logprobs
        first = among([random_ids(20 + i, 1) for i in range(7)])
        second = among([random_ids(20 + i, 2) for i in range(7)])
    assert first == second
    assert alone is not None and first is not None
    if backend == "native":
        assert alone == first
    for ours, theirs in zip(alone, first, strict=True):
        assert list(ours) == list(theirs)
        for token, entry in ours.items():
            assert entry.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_settings_leave_the_same_bits(model: Model) -> None:
    """Native kernels: block size, chunk size, cache and windows released or kept change no bit of a log-probability."""
    pytest.importorskip("octavo.kernels.cpu._native")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
    found = []
    for settings in (
        {},
        {"block_size": 1},
        {"block_size": 64, "max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 1},
        {"hybrid_kv": False},
        {"allocation": "static"},
    ):
        with model.engine(**settings) as llm:
            found += [run(llm, [PROMPT], params)[0].outputs[0].logprobs for _ in range(2)]
    assert all(f == found[0] for f in found)
