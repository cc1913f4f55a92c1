"""Tools for models whose chat template knows none: the convention, told in the system message, and past calls as text.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

is a call, and its result comes back as a user message between <tool_response> marks. A template that takes tools is
left to do it in its own way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

HEAD = """You can call functions. To call one, answer with nothing but

<tool_call>
{"name": "<name of the function>", "arguments": {<its arguments, as JSON>}}
</tool_call>

A result comes back between <tool_response> and </tool_response>. The functions, with JSON schemas of their arguments:
"""


def instructions(tools: Sequence[Mapping[str, Any]], forced: str | None) -> str:
    """What the model is told. forced: that it must call now, in words."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return HEAD + "\n".join(lines) + (f"\n\n{forced}" if forced else "")


def with_instructions(messages: Sequence[Message], text: str, *, takes_system: bool) -> list[Message]:
    """The conversation with `text` in its system message, or before the first user message where there can be none."""
    role = "system" if takes_system else "user"
    for place, message in enumerate(messages):
        if message["role"] == role and (place == 0 or role == "user"):
            joined = f"{message['content']}\n\n{text}" if takes_system else f"{text}\n\n{message['content']}"
            return [*messages[:place], {**message, "content": joined}, *messages[place + 1 :]]
    return [{"role": role, "content": text}, *messages]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Calls and results of the past as the convention writes them; results that follow one another share a message."""
    plain: list[Message] = []
    after_result = False
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            text = f"<tool_response>\n{content}\n</tool_response>"
            if after_result:
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
            after_result = True
            continue
        after_result = False
        if message.get("tool_calls"):
            calls = "\n".join(_call(call["function"]) for call in message["tool_calls"])
            content = f"{content}\n{calls}" if content else calls
        plain.append({"role": message["role"], "content": content})
    return plain


def _call(function: Mapping[str, Any]) -> str:
    written = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
    return f"<tool_call>\n{written}\n</tool_call>"


def takes_system(template: str) -> bool:
    """Has a chat template a place for a system message?"""
    return "System role not supported" not in template and ("system" in template or "raise_exception" not in template)
