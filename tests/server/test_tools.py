"""Tool calling: readers of each way of writing calls, plans of requests, the real client against a real server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken

from helpers.grammars import fits
from helpers.http_server import Served
from helpers.serving import byte_tokenizer, scripted_engine
from helpers.tiny_models import write_tiny
from octavo.config import make_config
from octavo.engine import Engine
from octavo.grammar.compiler import GrammarCompiler
from octavo.models.tokenizer import Tokenizer
from octavo.sampling_params import StructuredOutputs
from octavo.server.errors import ApiError
from octavo.server.protocol.chat import ChatBody
from octavo.server.tool_formats import FORMATS, format_of, takes_tools
from octavo.server.tool_messages import as_text, with_instructions
from octavo.server.tool_parsers import ListReader, MarkedReader, ObjectReader, Reader
from octavo.server.tools import Plan, adapt_history

NAMES = {"get", "f"}
NESTED = '{"a": [1, "}{\\"", {"b": null}], "ü": "☃"}'
Found = tuple[str, list[tuple[str, str]]]


def read(reader: Reader, text: str, cuts: Sequence[int] = ()) -> Found:
    """Content and calls, joined from the deltas; they must equal the whole message."""
    deltas, last = [], 0
    for cut in [*cuts, len(text)]:
        deltas += reader.push(text[last:cut])
        last = cut
    deltas += reader.finish()
    content = "".join(d.get("content", "") for d in deltas)
    calls: dict[int, dict[str, str]] = {}
    for piece in (c for d in deltas for c in d.get("tool_calls", [])):
        if piece["index"] not in calls:
            assert piece["id"].startswith("call_") and piece["type"] == "function"
            calls[piece["index"]] = {"name": piece["function"]["name"], "arguments": ""}
        calls[piece["index"]]["arguments"] += piece["function"]["arguments"]
    message = reader.message()
    assert (message["content"] or "") == content
    assert [c["function"] for c in message.get("tool_calls", [])] == [calls[i] for i in sorted(calls)]
    assert reader.called == bool(calls)
    return content, [(c["name"], c["arguments"]) for c in calls.values()]


CALL = '<tool_call>\n{"name": "get", "arguments": ' + NESTED + "}\n</tool_call>"
WRITTEN: list[tuple[type[Reader], str, Found]] = [
    (MarkedReader, "plain < <tool text </tool_call>  ", ("plain < <tool text </tool_call>  ", [])),
    (MarkedReader, CALL, ("", [("get", NESTED)])),
    (MarkedReader, "Sure.\n" + CALL + "\n" + CALL + "\n", ("Sure.", [("get", NESTED)] * 2)),
    (MarkedReader, CALL + "\nDone.", ("Done.", [("get", NESTED)])),
    (MarkedReader, 'a <tool_call>{"arguments": {}, "name": "f"}</tool_call> b', ("a b", [("f", "{}")])),
    (MarkedReader, '<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
    (MarkedReader, '<tool_call>{"name": "f", "arguments": null}</tool_call>', ("", [("f", "{}")])),
    (MarkedReader, '<tool_call>{"name": "f", "arguments": "{\\"q\\": 1}"}</tool_call>', ("", [("f", '{"q": 1}')])),
    (MarkedReader, 'x <tool_call>{"name": "f", "arguments": {"q": ', ("x", [("f", '{"q": ')])),  # cut by max_tokens
    (ObjectReader, '{"name": "get", "parameters": ' + NESTED + "}", ("", [("get", NESTED)])),
    (
        ObjectReader,
        '<|python_tag|>{"name": "get", "parameters": {}}; {"name": "f", "parameters": {"x":1}}',
        ("", [("get", "{}"), ("f", '{"x":1}')]),
    ),
    (ObjectReader, '{"answer": 3} and text', ('{"answer": 3} and text', [])),
    (ObjectReader, ' hello {"name": "f"}', (' hello {"name": "f"}', [])),
    (
        ListReader,
        '[TOOL_CALLS] [{"name": "get", "arguments": ' + NESTED + '}, {"name": "f", "arguments": {}}]',
        ("", [("get", NESTED), ("f", "{}")]),
    ),
    (ListReader, 'ok [TOOL_CALLS]get[ARGS]{"x": 1}[TOOL_CALLS]f[ARGS]{}', ("ok", [("get", '{"x": 1}'), ("f", "{}")])),
    (ListReader, "[1, 2] [TOOL_X", ("[1, 2] [TOOL_X", [])),
]
#: No call of a known tool: it is content to the last character.
NO_CALLS: list[tuple[type[Reader], str]] = [
    (MarkedReader, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call> hi'),
    (MarkedReader, "<tool_call>\n{bad json}\n</tool_call> hi"),
    (MarkedReader, 'x <tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (MarkedReader, 'x <tool_call>{"name": 3}'),
    (MarkedReader, 'x <tool_call>{"name" "f"}'),
    (MarkedReader, 'x <tool_call>\n{"name": "f", "argu'),
    (MarkedReader, "x <tool_call> "),
    (MarkedReader, "<tool_call>[]"),
    (ObjectReader, '{"name": "unknown", "parameters": {}}'),
    (ObjectReader, "{"),
    (ObjectReader, "<|python"),
    (ListReader, "ok [TOOL_CALLS]unknown[ARGS]{}"),
    (ListReader, '[TOOL_CALLS][{"name": "unknown", "arguments": {}}] z'),
    (ListReader, '[TOOL_CALLS][{"na'),
    (ListReader, "[TOOL_CALLS]get[ARGS]x"),
    (ListReader, "ok [TOOL"),
]


@pytest.mark.parametrize(("kind", "text", "found"), [*WRITTEN, *((k, t, (t, [])) for k, t in NO_CALLS)])
def test_read_as_written_however_it_is_cut(kind: type[Reader], text: str, found: Found) -> None:
    assert read(kind(NAMES), text) == found
    assert read(kind(NAMES), text, range(1, len(text))) == found
    chance = random.Random(text)
    for _ in range(30):
        cuts = sorted(chance.sample(range(len(text) + 1), min(len(text), chance.randint(1, 5))))
        assert read(kind(NAMES), text, cuts) == found, cuts


@pytest.mark.parametrize(("kind", "text", "found"), [w for w in WRITTEN if len(w[2][1]) == 2])
def test_with_a_limit_of_one_the_first_call_counts(kind: type[Reader], text: str, found: Found) -> None:
    assert read(kind(NAMES, 1), text, range(1, len(text))) == (found[0], found[1][:1])


def test_arguments_stream_while_they_are_written() -> None:
    reader = MarkedReader(NAMES)
    assert reader.push('<tool_call>{"name": "get"') == []
    first = reader.push(', "arguments": {"city": "Pa')
    assert [d["tool_calls"][0]["function"]["arguments"] for d in first] == ["", '{"city": "Pa']
    assert reader.push('ris"}')[0]["tool_calls"][0]["function"] == {"arguments": 'ris"}'}
    assert reader.push("}") == [] and reader.finish() == []


# -- the plan of a request ---------------------------------------------------------------------------------------------

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now-utc"}},
]
SCHEMAS = {"get_weather": WEATHER, "now-utc": {"type": "object", "maxProperties": 0}}
TEMPLATES = {
    "marked": "{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>",
    "llama3": '{% if tools is not none %}{{ tools }}{"name": , "parameters": }{% endif %}',
    "mistral": "{% if tools %}{{ tools }}[TOOL_CALLS]{% endif %}",
    "mistral_args": "{% if tools %}{{ tools }}[TOOL_CALLS]name[ARGS]{% endif %}",
}


def body(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields})


def with_special(*marks: str) -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in marks])
    return Tokenizer(tokenizer.backend, 256, (257,), tokenizer.special_tokens, tokenizer.chat_templates)


def test_families_are_recognised_by_their_templates() -> None:
    assert {name: format_of(template).name for name, template in TEMPLATES.items()} == {n: n for n in TEMPLATES}
    assert format_of(None).name == format_of("{{ messages }} my tools").name == "marked"
    assert takes_tools("{%- if tools %}") and not takes_tools("{{ bos }} tools {{ x }}")


@pytest.mark.parametrize("special", [False, True], ids=["text marks", "special marks"])
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_whatever_is_drawn_from_a_forced_grammar_is_read_back(name: str, choice: Any, special: bool) -> None:
    """Random walks through the grammar of each family, decoded and read by its reader: known names, valid arguments."""
    tokenizer = with_special(*FORMATS[name].marks) if special else byte_tokenizer()
    size = tokenizer.vocab_size
    plan = Plan(body(tool_choice=choice), tokenizer, TEMPLATES[name])
    assert plan.keeps_special == (special and name != "llama3") and plan.structured_outputs is not None
    grammar = GrammarCompiler(tokenizer, size, (257,)).compile(StructuredOutputs(**plan.structured_outputs))
    chance, counts = random.Random(0), set()
    for _ in range(12):
        matcher, ids = grammar.start((), (257,)), []
        while len(ids) < 2000 and (token := chance.choice(matcher.allowed().nonzero()[0].tolist())) != 257:
            ids.append(token)
            matcher.push(token)
        text = tokenizer.decode(ids, skip_special_tokens=not plan.keeps_special)
        content, calls = read(plan.reader(), text)
        assert content == "" and calls, text
        for called, arguments in calls:
            assert fits(SCHEMAS[called], arguments)
            assert choice == "required" or called == "get_weather"
        counts.add(len(calls))
    assert counts == {1} if isinstance(choice, dict) or name == "llama3" else max(counts) > 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_strict_functions_are_held_to_their_schema_once_called(name: str) -> None:
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    tokenizer = byte_tokenizer()
    plan = Plan(body(tools=strict), tokenizer, TEMPLATES[name])
    assert plan.structured_outputs is not None
    grammar = GrammarCompiler(tokenizer, 260, (257,)).compile(StructuredOutputs(**plan.structured_outputs))
    good = {
        "marked": 'Let me see. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        "</tool_call> ok",
        "llama3": '{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}',
        "mistral": 'Ok [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]',
        "mistral_args": 'Ok [TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}',
    }[name]
    for text, fine in ((good, True), (good.replace("Paris", "Oslo"), False), ("No call at all: [1] < 2.\n", True)):
        matcher = grammar.start(tokenizer.encode(text, add_special_tokens=False), (257,))
        assert matcher.may_end() == fine, (text, matcher.error)
    assert Plan(body(), tokenizer, TEMPLATES[name]).structured_outputs is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools.0.type", "only functions"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "1 to 64 letters"),
    ({"tools": [TOOLS[1], TOOLS[1]]}, "tools.1.function.name", "there twice"),
    (
        {"tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "array"}}}]},
        "tools.0.function.parameters",
        "must be",
    ),
    ({"tools": [TOOLS[1]] * 129}, "tools", "at most 128"),
    ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice", "there is no tool 'nope'"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "must be"),
    ({"tool_choice": {"type": "allowed_tools", "function": {"name": "now-utc"}}}, "tool_choice", "must be"),
]


@pytest.mark.parametrize(("fields", "param", "words"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        Plan(body(**fields), byte_tokenizer(), None)
    assert refused.value.param == param and refused.value.status == 400


def test_hiding_special_tokens_would_hide_the_calls() -> None:
    with pytest.raises(ApiError, match="skip_special_tokens"):
        Plan(body(skip_special_tokens=True), with_special("[TOOL_CALLS]"), TEMPLATES["mistral"])


# -- what the model is told --------------------------------------------------------------------------------------------

HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
            {"id": "2", "type": "function", "function": {"name": "now-utc", "arguments": {}}},
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    {"role": "tool", "content": "noon", "tool_call_id": "2"},
    {"role": "user", "content": "Thanks."},
]


def test_the_convention_is_told_and_the_past_is_written_in_it() -> None:
    plan = Plan(body(tool_choice="required"), byte_tokenizer(), "{{ messages }} system")
    assert plan.template_tools is None
    adapted = plan.adapt(HISTORY)
    assert [m["role"] for m in adapted] == ["system", "user", "assistant", "user", "user"]
    system = adapted[0]["content"]
    assert system.startswith("Be brief.\n\nYou can call functions.") and '"get_weather"' in system
    assert system.endswith("Call one of the functions now.")
    assert adapted[2]["content"].count("<tool_call>\n{") == 2
    assert read(MarkedReader(SCHEMAS), adapted[2]["content"]) == (
        "", [("get_weather", '{"city": "Rome"}'), ("now-utc", "{}")]
    )  # fmt: skip
    both = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    assert adapted[3]["content"] == both


def test_a_template_with_tools_is_left_to_write_them() -> None:
    plan = Plan(body(), byte_tokenizer(), TEMPLATES["marked"])
    assert plan.adapt(HISTORY) is HISTORY
    assert plan.template_tools is not None and plan.template_tools[1]["function"] == {"name": "now-utc"}


def test_without_a_place_for_a_system_message_the_user_is_told() -> None:
    told = with_instructions([{"role": "user", "content": "hi"}], "rules", takes_system=False)
    assert told == [{"role": "user", "content": "rules\n\nhi"}]
    assert with_instructions([{"role": "user", "content": "hi"}], "rules", takes_system=True)[0]["role"] == "system"


def test_past_calls_without_tools_in_the_request() -> None:
    plain = byte_tokenizer()
    assert adapt_history(HISTORY, plain, None) == as_text(HISTORY)
    assert adapt_history(HISTORY, plain, TEMPLATES["marked"]) is HISTORY
    assert adapt_history(HISTORY[:2], plain, None) is not None


# -- the real client ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny("llama", path, max_position_embeddings=4096)
    with Served(Engine.build(make_config(model=str(path), num_blocks=600, max_model_len=2500))) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, **given: Any) -> Any:
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    defaults = {"messages": messages, "tools": TOOLS, "temperature": 1.5, "max_completion_tokens": 1500}
    return client.chat.completions.create(model="tiny", **{**defaults, **given})


@pytest.mark.parametrize(
    ("choice", "parallel"),
    [("required", None), ("required", False), ({"type": "function", "function": {"name": "get_weather"}}, None)],
    ids=str,
)
def test_a_forced_call_always_parses_and_streams_to_the_same(client: openai.OpenAI, choice: Any, parallel: Any) -> None:
    given = {"tool_choice": choice, "n": 3, "seed": 5} | ({} if parallel is None else {"parallel_tool_calls": parallel})
    whole = ask(client, **given)
    for option in whole.choices:
        assert option.finish_reason == "tool_calls" and option.message.content is None
        assert len(option.message.tool_calls) == 1 or (choice == "required" and parallel is None)
        for call in option.message.tool_calls:
            assert fits(SCHEMAS[call.function.name], call.function.arguments)
    calls: dict[tuple[int, int], list[str]] = {}
    reasons = {}
    for chunk in ask(client, **given, stream=True):
        for part in chunk.choices:
            assert not part.delta.content
            reasons[part.index] = part.finish_reason or reasons.get(part.index)
            for call in part.delta.tool_calls or ():
                if call.id is not None:
                    calls[part.index, call.index] = [call.function.name, ""]
                calls[part.index, call.index][1] += call.function.arguments or ""
    assert set(reasons.values()) == {"tool_calls"}
    assert calls == {
        (c.index, i): [t.function.name, t.function.arguments]
        for c in whole.choices
        for i, t in enumerate(c.message.tool_calls)
    }


def test_the_clients_own_stream_helper_understands_the_deltas(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    with client.chat.completions.stream(
        model="tiny", messages=messages, tools=TOOLS, tool_choice="required", max_completion_tokens=1500, seed=1
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events and "tool_calls.function.arguments.done" in events
    assert final.finish_reason == "tool_calls"
    for call in final.message.tool_calls or ():
        assert fits(SCHEMAS[call.function.name], call.function.arguments)


def test_a_conversation_goes_on_with_its_results(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice="required", seed=2).choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in first.tool_calls]
    question = {"role": "user", "content": "What is the weather?"}
    history = [question, first.model_dump(exclude_none=True), *results]
    for more in ({}, {"tools": openai.omit}, {"tool_choice": "none"}):
        answer = ask(client, messages=history, max_completion_tokens=8, **more).choices[0]
        assert answer.finish_reason in ("length", "stop") and answer.message.tool_calls is None


def test_refusals_name_the_field(client: openai.OpenAI, served: Served) -> None:
    unsupported = {"type": "function", "function": {"name": "odd", "parameters": {"not": {"required": ["a"]}}}}
    with pytest.raises(openai.BadRequestError, match=r"Unimplemented keys: .*not") as refused:
        ask(client, tools=[unsupported], tool_choice="required")
    assert refused.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="no effect without tools"):
        ask(client, tools=openai.omit, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="only one of them"):
        ask(client, tool_choice="required", response_format={"type": "json_object"})
    answer = httpx.post(served.url + "/v1/chat/completions", json={"messages": [], "tools": 3})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_a_call_cut_by_max_tokens_says_so(client: openai.OpenAI) -> None:
    choice = ask(client, tool_choice="required", max_completion_tokens=5).choices[0]
    assert choice.finish_reason == "length" and choice.message.content.startswith("<too")


def test_auto_reads_what_the_model_writes() -> None:
    """A scripted model that writes text and a call."""
    written = b'Hm. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'

    def script(tokens: Sequence[int], sample: int) -> int:
        done = len(tokens) - start
        return written[done] if done < len(written) else 257

    tokenizer = byte_tokenizer()
    engine = scripted_engine(script=script, max_model_len=4096, num_blocks=600)
    with Served(engine) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages: Any = [{"role": "user", "content": "hi"}]
        told = Plan(body(), tokenizer, tokenizer.chat_templates["default"]).adapt(messages)
        start = len(tokenizer.encode(tokenizer.apply_chat_template(told), add_special_tokens=False))
        choice = client.chat.completions.create(model=model, messages=messages, tools=TOOLS).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Hm."
        assert choice.message.tool_calls is not None
        function: Any = choice.message.tool_calls[0]
        assert json.loads(function.function.arguments) == {"city": "Oslo"}
        pieces = list(client.chat.completions.create(model=model, messages=messages, tools=TOOLS, stream=True))
        assert "".join(p.choices[0].delta.content or "" for p in pieces) == "Hm."
