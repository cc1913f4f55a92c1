"""Whatever is wrong with a request gets one clear status that names the field; a good request works afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import byte_tokenizer, scripted_engine
from octavo.server.limits import nesting
from octavo.server.settings import ServerSettings

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServerSettings(max_body_bytes=20_000, max_n=8, max_prompts=4, max_schema_bytes=2000)
    with Served(scripted_engine(), settings) as server:
        yield server


@pytest.fixture(autouse=True)
def _goes_on(served: Served) -> Iterator[None]:
    yield
    good = httpx.post(served.url + COMPLETIONS, json={"prompt": "hi", "max_tokens": 3})
    assert good.status_code == 200, good.text
    served.wait_idle()


def refused(served: Served, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused with this status, in OpenAI's form."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = httpx.post(served.url + path, headers={"content-type": "application/json"}, **given)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("path", "good", "fields"),
    [
        (CHAT, {"messages": USER}, ["functions", "function_call", "audio", "modalities", "store", "reasoning_effort",
                                    "service_tier", "prediction", "web_search_options", "chat_template", "anything",
                                    "echo", "suffix"]),
        (COMPLETIONS, {"prompt": "hi"}, ["suffix", "messages", "max_completion_tokens", "top_logprobs", "anything"]),
        (RESPONSES, {"input": "hi"}, ["previous_response_id", "tools", "reasoning", "include", "background", "n"]),
        ("/v1/embeddings", {"input": "hi"}, ["temperature", "anything"]),
        ("/tokenize", {"prompt": "hi"}, ["anything"]),
        ("/detokenize", {"tokens": [97]}, ["anything"]),
    ],
)  # fmt: skip
def test_a_field_that_is_not_supported_is_named(
    served: Served, path: str, good: dict[str, Any], fields: list[str]
) -> None:
    for field in fields:
        error = refused(served, path, {**good, field: "x"})
        assert error["param"] == field
        assert error["code"] == "unsupported"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {}, "messages"),
        (CHAT, {"messages": USER, "prompt_token_ids": [97]}, "messages"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages.0.colour"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
         "messages.0.content.0.type"),
        (CHAT, {"messages": USER, "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": USER, "temperature": 1000}, "temperature"),
        (CHAT, {"messages": USER, "temperature": True}, "temperature"),
        (CHAT, {"messages": USER, "top_p": 0}, "top_p"),
        (CHAT, {"messages": USER, "n": 0}, "n"),
        (CHAT, {"messages": USER, "n": 1_000_000}, "n"),
        (CHAT, {"messages": USER, "n": 2, "temperature": 0}, "n"),
        (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"messages": USER, "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        (CHAT, {"messages": USER, "logit_bias": {"97": 1000}}, "logit_bias"),
        (CHAT, {"messages": USER, "logit_bias": {"99999": 1}}, "logit_bias"),
        (CHAT, {"messages": USER, "stop": [""]}, "stop"),
        (CHAT, {"messages": USER, "seed": 2**70}, "seed"),
        (CHAT, {"messages": USER, "cache_salt": ""}, "cache_salt"),
        (CHAT, {"messages": USER, "response_format": {"type": "yaml"}}, "response_format"),
        (CHAT, {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {
            "enum": ["x" * 3000]}}}}, "structured_outputs"),
        (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (CHAT, {"messages": USER, "tool_choice": "auto"}, "tool_choice"),
        (CHAT, {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"messages": USER, "parallel_tool_calls": True}, "parallel_tool_calls"),
        (CHAT, {"messages": USER, "tools": []}, "tools"),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (COMPLETIONS, {}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "prompt_token_ids": [97]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "best_of": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "x", "stream": True, "echo": True, "logprobs": 1}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a", "b", "c", "d", "e"]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "best_of": 1, "n": 2}, "best_of"),
        (CHAT, {"messages": USER, "best_of": 3, "stream": True}, "best_of"),
        (CHAT, {"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (RESPONSES, {}, "input"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": "x", "store": True}, "store"),
        (RESPONSES, {"prompt_token_ids": [97], "instructions": "x"}, "instructions"),
        ("/tokenize", {}, "prompt"),
        ("/detokenize", {"tokens": [10**12]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    assert refused(served, path, body)["param"] == param


@pytest.mark.parametrize("ids", [[], [-1], [260], [2**31], [2**70], ["97"], [97.0], [None]])
def test_token_ids_outside_the_vocabulary(served: Served, ids: list[Any]) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES):
        refused(served, path, {"prompt_token_ids": ids})
    if ids != ["97"]:  # that is a list of texts
        refused(served, COMPLETIONS, {"prompt": ids})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": "x" * 600}, "prompt"),
        (COMPLETIONS, {"prompt": [97, 9999]}, "prompt"),
        (COMPLETIONS, {"prompt_token_ids": [9999]}, "prompt_token_ids"),
        (COMPLETIONS, {"prompt": "a\ud800"}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a\ud800"}]}, "messages"),
        (CHAT, {"prompt_token_ids": [9999]}, "prompt_token_ids"),
        (RESPONSES, {"input": "x" * 600}, "input"),
        ("/v1/embeddings", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": []}, "input"),
        ("/v1/embeddings", {"input": ["a", "b", "c", "d", "e"]}, "input"),
        ("/v1/embeddings", {"input": "x" * 600}, "input"),
        ("/v1/embeddings", {"input": [9999]}, "input"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_prompt_is_named_as_the_route_calls_it(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    error = refused(served, path, json.dumps(body).encode())
    assert error["param"] == param
    assert "TextInputSequence" not in error["message"]
    assert ("U+D800" in error["message"]) == ("ud800" in json.dumps(body))
    if path == "/v1/embeddings":
        assert "prompt_token_ids" not in error["message"]
        assert "new token" not in error["message"]


@pytest.mark.parametrize("length", [511, 512, 513, 4000])
def test_a_prompt_that_can_never_fit_says_how_long_it_may_be(served: Served, length: int) -> None:
    body = {"prompt_token_ids": [97] * length, "max_tokens": 3}
    if length == 511:
        assert httpx.post(served.url + COMPLETIONS, json=body).json()["usage"]["completion_tokens"] == 1
    else:
        assert "max_model_len=512" in refused(served, COMPLETIONS, body)["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b'"text"', b"null", b"12", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}', b"[" * 5000, b'{"a":' * 900 + b"1" + b"}" * 900,
        b'{"prompt": "x"}{"prompt": "y"}', b"\x00\x01\x02", b'{"prompt": "x", "prompt": [["x"]]}',
    ],
)  # fmt: skip
def test_a_malformed_body_is_a_400(served: Served, body: bytes) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize", "/detokenize", "/v1/embeddings"):
        refused(served, path, body)


def test_a_body_of_another_type_says_which_is_needed(served: Served) -> None:
    for content_type in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data; boundary=x"):
        answer = httpx.post(
            served.url + COMPLETIONS, content=b'{"prompt": "x"}', headers={"content-type": content_type}
        )
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_a_body_over_the_limit_is_a_413(served: Served) -> None:
    assert "max_body_bytes" in refused(served, COMPLETIONS, {"prompt": "x" * 30_000}, 413)["message"]

    def parts() -> Iterator[bytes]:  # chunked, so nothing announces the length
        for _ in range(40):
            yield b"x" * 1000

    answer = httpx.post(served.url + COMPLETIONS, content=parts(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_unknown_paths_and_methods_answer_in_the_same_form(served: Served) -> None:
    assert httpx.get(served.url + "/v1/nothing").json()["error"]["code"] == "not_found"
    assert httpx.get(served.url + COMPLETIONS).status_code == 405
    assert httpx.get(served.url + COMPLETIONS).json()["error"]["code"] == "method_not_allowed"
    assert httpx.post(served.url + "/v1/files", content=b"x").status_code == 404


def test_no_request_reads_a_file_or_an_address(served: Served) -> None:
    """Names that would be read elsewhere are text here."""
    for prompt in ("file:///etc/passwd", "http://127.0.0.1:1/x", "../../etc/passwd", "{{ 7 * 7 }}"):
        answer = httpx.post(served.url + COMPLETIONS, json={"prompt": prompt, "max_tokens": 1, "echo": True}).json()
        assert answer["choices"][0]["text"].startswith(prompt)
        ids = httpx.post(served.url + "/tokenize", json={"messages": [{"role": "user", "content": prompt}]}).json()
        text = httpx.post(served.url + "/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"]
        assert prompt in text


def test_a_model_without_a_template_says_what_to_do() -> None:
    with Served(scripted_engine(tokenizer=byte_tokenizer(None))) as server:
        error = refused(server, CHAT, {"messages": USER})
        assert "--chat-template" in error["message"]
        assert error["code"] == "no_chat_template"
    settings = ServerSettings(chat_template="plain")
    with Served(scripted_engine(tokenizer=byte_tokenizer(None)), settings) as server:
        ids = httpx.post(server.url + "/tokenize", json={"messages": USER}).json()["tokens"]
        text = httpx.post(server.url + "/detokenize", json={"tokens": ids}).json()["prompt"]
        assert text == "<s>User: hi\nAssistant:"


def test_nesting_counts_brackets_outside_strings_in_linear_time() -> None:
    assert nesting(b"[" * 100, 64) > 64
    assert nesting(json.dumps(["[" * 100]).encode(), 64) == 1
    assert nesting(b'"' + b'\\"' * 50_000 + b"[" * 100, 64) == 0
    assert nesting(json.dumps([[1]] * 100).encode(), 64) == 2
