"""The real `openai` client, sync, async and streaming, against the real server over a tiny model."""

from __future__ import annotations

import asyncio
import base64
import json
from array import array
from typing import Any

import httpx
import openai
import pytest

from helpers.http_server import Served
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a page?"}]
PROMPTS = ["The capital of France is", "héllo wörld ✓", "x"]


def test_chat_answers_equal_llm_chat_token_for_token(client: openai.OpenAI, llm: LLM) -> None:
    for given in ({"temperature": 0}, {"temperature": 0.9, "seed": 7, "top_p": 0.9}):
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=24, extra_body={"return_token_ids": True}, **given
        )
        expected = llm.chat(MESSAGES, SamplingParams(max_tokens=24, **given), use_tqdm=False)[0]
        choice: Any = answer.choices[0]
        assert choice.token_ids == expected.outputs[0].token_ids
        assert choice.prompt_token_ids == expected.prompt_token_ids
        assert choice.message.content == expected.outputs[0].text
        assert choice.finish_reason == expected.outputs[0].finish_reason
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.usage.completion_tokens == len(expected.outputs[0].token_ids)


def test_completions_equal_llm_generate(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPTS, max_tokens=12, temperature=0)
    expected = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)
    assert [c.text for c in answer.choices] == [o.outputs[0].text for o in expected]
    assert [c.index for c in answer.choices] == [0, 1, 2]
    ids = llm.encode("The capital")
    by_ids = client.completions.create(model="tiny", prompt=ids, max_tokens=5, temperature=0)
    assert (
        by_ids.choices[0].text
        == llm.generate("The capital", SamplingParams(max_tokens=5, temperature=0))[0].outputs[0].text
    )


def test_samples_with_a_seed_are_the_same_again_and_differ_from_each_other(client: openai.OpenAI) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(model="tiny", prompt="ab", n=4, seed=3, max_tokens=8, temperature=1.2)
        return [c.text for c in answer.choices]

    assert ask() == ask()
    assert len(set(ask())) == 4


@pytest.mark.parametrize("given", [{"temperature": 0}, {"n": 3, "seed": 1}, {"stop": ["e", "zz"], "seed": 2}])
def test_streamed_text_joined_is_the_text(client: openai.OpenAI, given: dict[str, Any]) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=30, **given)
    texts: dict[int, str] = {}
    reasons: dict[int, list[str]] = {}
    usage = None
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=30, stream=True, stream_options={"include_usage": True}, **given
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                reasons.setdefault(choice.index, []).append(choice.finish_reason)
    assert texts == {c.index: c.message.content for c in whole.choices}
    assert reasons == {c.index: [c.finish_reason] for c in whole.choices}
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    pieces: dict[int, str] = {}
    for chunk in client.completions.create(model="tiny", prompt="ab", max_tokens=30, stream=True, echo=True, **given):
        for part in chunk.choices:
            pieces[part.index] = pieces.get(part.index, "") + part.text
    again = client.completions.create(model="tiny", prompt="ab", max_tokens=30, echo=True, **given)
    assert pieces == {c.index: c.text for c in again.choices}
    assert all(text.startswith("ab") for text in pieces.values())


def test_a_stream_has_no_broken_character(client: openai.OpenAI, llm: LLM) -> None:
    """The tiny model draws bytes at random: nearly every text has incomplete ones."""
    for seed in range(6):
        given = {"max_tokens": 40, "temperature": 1.5, "seed": seed}
        expected = llm.generate("é", SamplingParams(**given), use_tqdm=False)[0].outputs[0].text
        assert (
            "".join(
                c.choices[0].text for c in client.completions.create(model="tiny", prompt="é", stream=True, **given)
            )
            == expected
        )


def test_many_async_streams_at_once(served: Served, client: openai.OpenAI) -> None:
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as many:

            async def one(number: int) -> str:
                stream = await many.completions.create(
                    model="tiny", prompt=f"prompt {number % 5}", max_tokens=20, temperature=0, stream=True
                )
                return "".join([c.choices[0].text async for c in stream])

            texts = await asyncio.gather(*(one(i) for i in range(40)))
        for number in range(5):
            alone = client.completions.create(model="tiny", prompt=f"prompt {number}", max_tokens=20, temperature=0)
            assert {texts[i] for i in range(40) if i % 5 == number} == {alone.choices[0].text}

    asyncio.run(work())


def test_logprobs_in_both_forms_are_the_engines(client: openai.OpenAI, llm: LLM) -> None:
    expected = llm.generate("ab", SamplingParams(max_tokens=6, temperature=0, logprobs=3), use_tqdm=False)[0].outputs[0]
    assert expected.logprobs is not None
    chosen = [entry[token].logprob for token, entry in zip(expected.token_ids, expected.logprobs, strict=True)]
    plain: Any = client.completions.create(model="tiny", prompt="ab", max_tokens=6, temperature=0, logprobs=3)
    found = plain.choices[0].logprobs
    assert found.token_logprobs == pytest.approx(chosen)
    assert len(found.tokens) == len(found.top_logprobs) == len(found.text_offset) == 6
    chat: Any = client.chat.completions.create(
        model="tiny", messages=[], max_tokens=6, temperature=0, logprobs=True, top_logprobs=3,
        extra_body={"prompt_token_ids": llm.encode("ab")},
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert [c.logprob for c in content] == pytest.approx(chosen)
    assert all(len(c.top_logprobs) == 3 for c in content)
    assert b"".join(bytes(c.bytes) for c in content).decode("utf-8", "replace") == chat.choices[0].message.content
    streamed = [
        entry
        for chunk in client.chat.completions.create(
            model="tiny", messages=[], max_tokens=6, temperature=0, logprobs=True, top_logprobs=3, stream=True,
            extra_body={"prompt_token_ids": llm.encode("ab")},
        )
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content
    ]  # fmt: skip
    assert [(e.token, e.logprob) for e in streamed] == [(c.token, c.logprob) for c in content]


def test_echo_with_logprobs_gives_those_of_the_prompt(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.encode("The capital of")
    given = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    expected = llm.generate({"prompt_token_ids": ids}, given, use_tqdm=False)[0].prompt_logprobs
    answer: Any = client.completions.create(
        model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    found = answer.choices[0].logprobs
    assert expected is not None
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx([e[t].logprob for t, e in zip(ids[1:], expected[1:], strict=True)])
    assert answer.choices[0].text == "The capital of"
    assert answer.usage.completion_tokens == 0
    assert [answer.choices[0].text[o : o + 1] for o in found.text_offset[1:]] == list("The capital of")


def test_everything_else_of_sampling_params(client: openai.OpenAI, llm: LLM) -> None:
    sampling = {"n": 2, "best_of": 4, "seed": 5, "max_tokens": 8, "prompt_logprobs": 1, "detokenize": False}
    extra = {**sampling, "return_token_ids": True}
    answer: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=extra)
    expected = llm.chat(MESSAGES, SamplingParams(**sampling), use_tqdm=False)[0]
    assert [c.token_ids for c in answer.choices] == [o.token_ids for o in expected.outputs]
    assert [c.message.content for c in answer.choices] == ["", ""]
    found = answer.choices[0].prompt_logprobs["token_logprobs"]
    assert expected.prompt_logprobs is not None
    assert found[1:] == pytest.approx(
        [e[t].logprob for t, e in zip(expected.prompt_token_ids[1:], expected.prompt_logprobs[1:], strict=True) if e]
    )


def test_cached_tokens_are_told(client: openai.OpenAI) -> None:
    prompt = "a long prompt that fills several blocks of the pool, so that it can be found again"
    first = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
    assert first.usage.prompt_tokens_details.cached_tokens < 16  # at most the begin token
    assert again.usage.prompt_tokens_details.cached_tokens >= 48
    other = client.completions.create(model="tiny", prompt=prompt, max_tokens=2, extra_body={"cache_salt": "mine"})
    assert other.usage.prompt_tokens_details.cached_tokens == 0  # not even that


def test_extra_fields_do_what_they_do_offline(client: openai.OpenAI, llm: LLM) -> None:
    extra = {"top_k": 5, "min_p": 0.02, "repetition_penalty": 1.3, "min_tokens": 4, "ignore_eos": True, "priority": -1}
    sampling = {"temperature": 0.8, "seed": 11, "max_tokens": 16, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    bias = {"65": -50.0, "66": 2.5}
    answer = client.completions.create(
        model="tiny", prompt="ab", logit_bias=bias, user="somebody", extra_body=extra, **sampling
    )
    own = {k: v for k, v in extra.items() if k != "priority"}
    expected = llm.generate("ab", SamplingParams(logit_bias=bias, **own, **sampling), use_tqdm=False)[0]
    assert answer.choices[0].text == expected.outputs[0].text


def test_what_was_defaulted_or_changed_is_told(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(model="tiny", prompt="ab", max_tokens=100_000, temperature=0)
    assert answer.octavo["changed"]["max_tokens"]["asked"] == 100_000
    assert answer.octavo["changed"]["max_tokens"]["used"] == 253
    assert answer.octavo["defaulted"]["top_p"] == 1.0
    assert "temperature" not in answer.octavo["defaulted"]
    chat: Any = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    assert chat.octavo["defaulted"]["max_tokens"] == 256 - chat.usage.prompt_tokens


def test_responses_whole_and_as_events(client: openai.OpenAI, llm: LLM) -> None:
    given = {"model": "tiny", "input": "What is a page?", "instructions": "Be brief.", "temperature": 0}
    whole = client.responses.create(max_output_tokens=12, **given)
    expected = llm.chat(MESSAGES, SamplingParams(max_tokens=12, temperature=0), use_tqdm=False)[0]
    assert whole.output_text == expected.outputs[0].text
    assert whole.status == ("completed" if expected.outputs[0].finish_reason == "stop" else "incomplete")
    assert whole.usage.output_tokens == len(expected.outputs[0].token_ids)
    events = list(client.responses.create(max_output_tokens=12, stream=True, **given))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == f"response.{whole.status}"
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    turns = [{"role": "user", "content": [{"type": "input_text", "text": "What is a page?"}]}]
    listed = client.responses.create(
        model="tiny", input=[{"role": "system", "content": "Be brief."}, *turns], temperature=0, max_output_tokens=12
    )
    assert listed.output_text == whole.output_text


def test_embeddings_in_both_encodings(client: openai.OpenAI, llm: LLM) -> None:
    texts = ["one", "another text"]
    floats = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="tiny", input=texts)  # the client asks for base64
    expected = [e.embedding for e in llm.embed(texts)]
    for index in range(2):
        assert floats.data[index].embedding == pytest.approx(expected[index], abs=1e-6)
        assert packed.data[index].embedding == pytest.approx(expected[index], abs=1e-6)
    assert floats.usage.prompt_tokens == sum(len(llm.encode(t)) for t in texts)
    raw = httpx.post(f"{client.base_url}embeddings", json={"input": "one", "encoding_format": "base64"}).json()
    assert array("f", base64.b64decode(raw["data"][0]["embedding"])).tolist() == pytest.approx(expected[0], abs=1e-6)


def test_models_and_tokens(client: openai.OpenAI, served: Served, llm: LLM) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    with httpx.Client(base_url=served.url) as http:
        ids = http.post("/tokenize", json={"prompt": "héy"}).json()["tokens"]
        assert ids == llm.encode("héy")
        assert http.post("/detokenize", json={"tokens": ids[1:]}).json() == {"prompt": "héy"}
        chat = http.post("/tokenize", json={"messages": MESSAGES, "return_token_strs": True}).json()
        assert chat["tokens"] == list(llm.chat_prompt(MESSAGES).token_ids)
        assert chat["count"] == len(chat["token_strs"]) == len(chat["tokens"])


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="is not served here; there is tiny"):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError, match="must lie in") as refused:
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.code == "invalid_parameter"
    with pytest.raises(openai.BadRequestError, match="max_model_len=256"):
        client.completions.create(model="tiny", prompt="x" * 400)


def test_content_parts_and_developer_messages_are_read_as_text(client: openai.OpenAI) -> None:
    parts: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "a page?"}]},
    ]
    plain: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is\na page?"},
    ]
    answers = [
        client.chat.completions.create(model="tiny", messages=m, temperature=0, max_tokens=9) for m in (parts, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_the_raw_stream_is_well_formed(served: Served) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "stream": True}
    with httpx.stream("POST", served.url + "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
