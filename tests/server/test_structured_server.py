"""Structured output and embeddings over HTTP, with the real client; what hostile schemas do to a server: nothing."""

from __future__ import annotations

import base64
import json
import threading
import time
from typing import Any, Literal

import httpx
import numpy as np
import openai
import pytest
from pydantic import BaseModel

from helpers.grammars import CHOICES, GRAMMAR, PATTERNS, SCHEMAS, fits, matches
from helpers.http_server import Served
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "Name a cat."}]


def chat(client: openai.OpenAI, **given: Any) -> Any:
    defaults = {"messages": MESSAGES, "temperature": 1.5, "max_completion_tokens": 150}
    return client.chat.completions.create(model="tiny", **{**defaults, **given})


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


# -- response_format ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_fit_the_schema_and_equal_offline_ones(client: openai.OpenAI, llm: LLM, name: str) -> None:
    answer = chat(client, response_format=json_schema(SCHEMAS[name]), n=3, seed=4)
    texts = [choice.message.content for choice in answer.choices]
    assert all(fits(SCHEMAS[name], text) for text in texts)
    params = SamplingParams(temperature=1.5, max_tokens=150, n=3, seed=4, structured_outputs={"json": SCHEMAS[name]})
    assert texts == [s.text for s in llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs]
    streamed = ["", "", ""]
    for chunk in chat(client, response_format=json_schema(SCHEMAS[name]), n=3, seed=4, stream=True):
        for part in chunk.choices:
            streamed[part.index] += part.delta.content or ""
    assert streamed == texts


class Cat(BaseModel):
    name: Literal["Tom", "Kit"]
    lives: Literal[7, 9]
    friends: list[Literal["dog", "mouse"]]


def test_the_clients_parse_gives_the_callers_own_type(client: openai.OpenAI) -> None:
    for seed in range(4):
        parsed = client.chat.completions.parse(
            model="tiny", messages=MESSAGES, response_format=Cat, seed=seed, max_completion_tokens=190
        )
        choice = parsed.choices[0]
        assert isinstance(choice.message.parsed, Cat)


def test_responses_take_a_format_too(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMAS["object"]}}
    answer = client.responses.create(model="tiny", input="A cat.", text=form, max_output_tokens=150, store=False)
    assert fits(SCHEMAS["object"], answer.output_text)


def test_json_object_begins_as_one(client: openai.OpenAI) -> None:
    for choice in chat(client, response_format={"type": "json_object"}, n=4, max_completion_tokens=60).choices:
        text = choice.message.content
        assert text.startswith("{")
        assert choice.finish_reason == "length" or isinstance(json.loads(text), dict)


# -- structured_outputs ------------------------------------------------------------------------------------------------


def test_pattern_choice_and_grammar_in_both_routes(client: openai.OpenAI) -> None:
    def texts(asked: dict[str, Any]) -> list[str]:
        extra = {"structured_outputs": asked}
        answer = chat(client, extra_body=extra, n=3)
        plain = client.completions.create(
            model="tiny", prompt=["a", "b"], n=2, max_tokens=150, temperature=1.5, extra_body=extra
        )
        return [c.message.content for c in answer.choices] + [c.text for c in plain.choices]

    for pattern in PATTERNS:
        assert all(matches(pattern, text) for text in texts({"regex": pattern}))
    assert set(texts({"choice": CHOICES})) <= set(CHOICES)
    assert all(matches(r"sum\(\d{1,3}(,\d{1,3}){0,2}\)", text) for text in texts({"grammar": GRAMMAR}))
    assert all(fits(SCHEMAS["array"], text) for text in texts({"json": SCHEMAS["array"]}))


def test_log_probabilities_and_stop_strings_go_with_it(client: openai.OpenAI) -> None:
    asked = {"structured_outputs": {"regex": "[a-d]{12}"}}
    choice = chat(client, extra_body=asked, logprobs=True, top_logprobs=2, stop="c", seed=3).choices[0]
    assert "c" not in choice.message.content and matches("[a-d]*", choice.message.content)
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)


CONTRADICTIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"schema": {}}}, "structured_outputs", "unknown schema"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "does not go together"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "does not go together"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "only one"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
    ({"response_format": {"type": "xml"}}, "response_format", "must be"),
    ({"response_format": json_schema({"not": {"type": "null"}})}, "response_format", "Unimplemented keys"),
]


@pytest.mark.parametrize(("fields", "param", "words"), CONTRADICTIONS)
def test_contradictions_are_named(served: Served, fields: dict[str, Any], param: str, words: str) -> None:
    answer = httpx.post(served.url + "/v1/chat/completions", json={"messages": MESSAGES, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"], error
    assert error["param"] == param


# -- hostile schemas ---------------------------------------------------------------------------------------------------


def chain(count: int) -> dict[str, Any]:
    links = {f"r{i}": {"$ref": f"#/$defs/r{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/r0", "$defs": {**links, f"r{count}": {"type": "integer"}}}


HOSTILE: dict[str, str] = {
    "deep": '{"type":"array","items":' * 3000 + "{}" + "}" * 3000,
    "huge": json.dumps({"enum": ["x" * 500] * 2000}),
    "chain": json.dumps(chain(2000)),
    "circle": json.dumps({"$ref": "#"}),
    "remote": json.dumps({"$ref": "file:///etc/passwd"}),
    "arithmetic": json.dumps({"type": "integer", "multipleOf": 7919999}),
    "repetition": json.dumps({"type": "string", "pattern": "^((a{1000}){1000}){1000}$"}),
    "many": json.dumps({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}}),
    "nothing": json.dumps({"type": ["integer"], "enum": ["a"]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_schemas_get_a_400_and_leave_nothing(served: Served, client: openai.OpenAI, name: str) -> None:
    free = served.ask(lambda engine: engine.pool_view().num_used)
    head = '{"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5, "response_format": '
    schema = '{"type": "json_schema", "json_schema": {"name": "x", "schema": ' + HOSTILE[name] + "}}}"
    answer = httpx.post(
        served.url + "/v1/chat/completions",
        content=head + schema,
        headers={"Content-Type": "application/json"},
        timeout=20,
    )
    assert answer.status_code in (400, 413), answer.text
    assert answer.json()["error"]["message"] and len(answer.text) < 2000
    good = chat(client, extra_body={"structured_outputs": {"choice": ["fine"]}})
    assert good.choices[0].message.content == "fine"
    assert served.ask(lambda engine: engine.pool_view().num_used) == free


def test_a_grammar_that_outgrows_its_limits_on_the_way_is_the_clients_error(served: Served) -> None:
    """It passes the door, is followed for some tokens, and then ends its own request: an error, never another text."""
    asked = {"structured_outputs": {"regex": "(.{0,1000}){0,1000}x"}, "logit_bias": {"87": -100}}
    body = {"prompt": "x", "max_tokens": 200, "temperature": 1.5, **asked}
    answer = httpx.post(served.url + "/v1/completions", json=body, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "grammar_failed", "structured_outputs")
    assert "cannot be followed here" in error["message"]


def test_compiling_holds_up_no_step(served: Served, client: openai.OpenAI) -> None:
    """A grammar is made on a thread of its own: another request's stream goes on meanwhile, step by step."""
    compiler = served.ask(lambda engine: engine._door.grammars)
    started: list[float] = []
    original = compiler.compile

    def slow(asked: Any, **more: Any) -> Any:
        started.append(time.monotonic())
        if len(started) == 1:
            time.sleep(0.5)
        return original(asked, **more)

    compiler.compile = slow
    try:
        with httpx.Client(timeout=20) as http:
            steps = served.ask(lambda engine: engine.stats().steps)
            body = {"messages": MESSAGES, "max_completion_tokens": 150, "ignore_eos": True, "stream": True}
            with http.stream("POST", served.url + "/v1/chat/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                asked = {"structured_outputs": {"regex": "slow"}}
                other = threading.Thread(target=chat, args=(client,), kwargs={"extra_body": asked})
                other.start()
                while not started and other.is_alive():
                    time.sleep(0.001)
                at_start = served.ask(lambda engine: engine.stats().steps)
                for _ in lines:
                    pass
                after = served.ask(lambda engine: engine.stats().steps)
                other.join()
        assert steps <= at_start and after - at_start > 20
    finally:
        del compiler.compile


def test_grammars_of_clients_are_tried_in_another_process(served: Served, client: openai.OpenAI) -> None:
    chat(client, extra_body={"structured_outputs": {"regex": "tried"}})
    probe = served.ask(lambda engine: engine._door.grammars.probe)
    assert probe._process is not None and probe._process.poll() is None


def test_a_grammar_is_compiled_once(served: Served, client: openai.OpenAI) -> None:
    compiler = served.ask(lambda engine: engine._door.grammars)
    asked = {"structured_outputs": {"regex": "once{1,3}"}}
    chat(client, extra_body=asked)
    before = compiler.compiled
    for _ in range(5):
        chat(client, extra_body=asked)
    assert compiler.compiled == before


# -- embeddings --------------------------------------------------------------------------------------------------------

TEXTS = ["a cat", "héllo ☃", "a much longer text " * 8]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_equal_offline_ones_in_both_encodings(client: openai.OpenAI, llm: LLM, pooling: str) -> None:
    offline = [np.array(o.embedding) for o in llm.embed(TEXTS, pooling=pooling, use_tqdm=False)]
    for given in ({"encoding_format": "float"}, {}):  # the client asks for base64 by itself
        answer: Any = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"pooling": pooling}, **given)
        assert [d.index for d in answer.data] == [0, 1, 2]
        for wanted, found in zip(offline, answer.data, strict=True):
            assert np.abs(wanted - np.array(found.embedding)).max() < 1e-5
        assert answer.usage.prompt_tokens == sum(len(llm.encode(t)) for t in TEXTS) == answer.usage.total_tokens


def test_embeddings_of_token_ids_single_and_many(client: openai.OpenAI, served: Served, llm: LLM) -> None:
    ids = llm.encode(TEXTS[0])
    wanted = np.array(llm.embed(TEXTS[0], use_tqdm=False)[0].embedding)
    for given in (TEXTS[0], [TEXTS[0]], ids, [ids]):
        answer = client.embeddings.create(model="tiny", input=given)
        assert np.abs(np.array(answer.data[0].embedding) - wanted).max() < 1e-5
    raw = httpx.post(served.url + "/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    packed = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), dtype="<f4")
    assert np.abs(packed - wanted).max() < 1e-5
    long = httpx.post(served.url + "/v1/embeddings", json={"input": TEXTS[0], "normalize": False}).json()
    assert abs(np.linalg.norm(long["data"][0]["embedding"]) - 1) > 1e-3


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dimensions": 8}, "dimensions=8"),
        ({"input": ""}, "empty"),
        ({"input": []}, "empty"),
        ({"input": ["a", ""]}, "empty"),
        ({"input": [10**6]}, "outside the vocabulary"),
        ({"input": "x" * 400}, "max_model_len"),
        ({"pooling": "max"}, "pooling"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"temperature": 1}, "temperature"),
    ],
)
def test_embedding_requests_that_are_refused(served: Served, fields: dict[str, Any], words: str) -> None:
    answer = httpx.post(served.url + "/v1/embeddings", json={"input": "a", **fields})
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
