"""`LLM` over the real engine and a tiny model: streams, stop strings, aborts, beams; the pool is empty afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.tiny_models import write_tiny
from octavo.errors import PromptError, RequestError
from octavo.llm import LLM
from octavo.sampling_params import BeamSearchParams, SamplingParams

PROMPT = "Hello, world"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_tiny("llama", path)
    with LLM(str(path), dtype="float32", block_size=4, num_blocks=200, max_model_len=96, debug=True) as made:
        yield made


@pytest.fixture(autouse=True)
def empty_afterwards(llm: LLM) -> Iterator[None]:
    yield
    llm.audit()
    assert llm.pool_view().num_used == 0
    assert not llm.pool_view().block_tables


def streamed(llm: LLM, params: SamplingParams) -> tuple[str, list[int], str | None]:
    deltas = list(llm.stream(PROMPT, params))
    return "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids], deltas[-1].finish_reason


def test_every_substring_as_stop_streamed_and_whole(llm: LLM) -> None:
    full = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]
    assert len(full.text) > 8 and len(set(full.text)) > 4
    stops = sorted({full.text[i : i + k] for i in range(len(full.text)) for k in range(1, 7)})
    for include in (False, True):
        each = [
            SamplingParams(temperature=0, max_tokens=24, logprobs=0, stop=s, include_stop_str_in_output=include)
            for s in stops
        ]
        for stop, params, output in zip(stops, each, llm.generate([PROMPT] * len(each), each), strict=True):
            answer = output.outputs[0]
            cut = full.text.index(stop) + len(stop) * include
            assert (answer.text, answer.finish_reason, answer.stop_reason) == (full.text[:cut], "stop", stop)
            assert answer.token_ids == full.token_ids[: len(answer.token_ids)]
            assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
            assert streamed(llm, params) == (answer.text, answer.token_ids, "stop")


def test_stream_and_whole_agree_for_every_limit(llm: LLM) -> None:
    for limit in range(1, 30, 4):
        params = SamplingParams(temperature=0, max_tokens=limit)
        answer = llm.generate(PROMPT, params)[0].outputs[0]
        assert streamed(llm, params) == (answer.text, answer.token_ids, answer.finish_reason)


def test_samples_streamed_are_the_samples_returned(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=12)
    whole = llm.generate(PROMPT, params)[0]
    deltas = list(llm.stream(PROMPT, params))
    for sample in whole.outputs:
        assert "".join(d.text for d in deltas if d.index == sample.index) == sample.text
    assert len({o.text for o in whole.outputs}) == 3


def test_closing_a_stream_frees_its_blocks_at_once(llm: LLM) -> None:
    stream = llm.stream(PROMPT, SamplingParams(n=4, max_tokens=64, ignore_eos=True))
    for _ in range(6):
        next(stream)
    assert llm.pool_view().num_shared > 0
    stream.close()
    assert llm.pool_view().num_used == 0


def test_one_refusal_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(PromptError, match=r"prompt 1: .*max_model_len"):
        llm.generate([PROMPT, {"prompt_token_ids": [5] * 97}, PROMPT])
    with pytest.raises(RequestError, match="prompt 0"):
        llm.generate([{"prompt_token_ids": [10**6]}, PROMPT])


def test_text_is_the_tokenizers_own(llm: LLM) -> None:
    for output in llm.generate([PROMPT, "x", "日本"], SamplingParams(seed=1, max_tokens=20, skip_special_tokens=False)):
        answer = output.outputs[0]
        ids = answer.token_ids[:-1] if answer.finish_reason == "stop" else answer.token_ids
        assert answer.text == llm.decode(ids, skip_special_tokens=False)


def test_beams_and_chat(llm: LLM) -> None:
    beams = llm.beam_search([PROMPT, "x"], BeamSearchParams(beam_width=3, max_tokens=6))
    assert [len(b.sequences) for b in beams] == [3, 3]
    assert [s.score for s in beams[0].sequences] == sorted((s.score for s in beams[0].sequences), reverse=True)
    answer = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=4))[0]
    assert answer.prompt == "<s>[user]hi</s>[assistant]"
    assert answer.prompt_token_ids.count(llm.get_tokenizer().bos_token_id) == 1


def test_watch_sees_every_step(llm: LLM) -> None:
    seen: list[int] = []
    llm.watch(lambda: seen.append(llm.pool_view().num_used))
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    llm.watch(None)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(seen) == 8 and seen[0] >= 3 and seen[-1] == 0
