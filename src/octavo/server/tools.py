"""Tool calling: from `tools` and `tool_choice` to what the template is told, what a forced call must be, the reader.

`plan` is what the chat route asks (`tooling.ToolPlan`). auto: the model may call, and a function with strict: true is
held to its schema as soon as a call begins. required, or a function's name: the answer is a call, enforced by a grammar
from the first token on. none: the model is told of no tools.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from octavo.async_engine import AsyncEngine
from octavo.server.errors import ApiError
from octavo.server.protocol.chat import ChatBody
from octavo.server.tool_formats import CallableFunction, format_of, takes_tools
from octavo.server.tool_messages import as_text, instructions, takes_system, with_instructions
from octavo.server.tool_parsers import Reader

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Plan:
    """What one request with tools needs."""

    def __init__(self, body: ChatBody, tokenizer: Tokenizer, template: str | None) -> None:
        functions = _functions(body)
        self._format = format_of(template)
        forced = _forced(body, functions)
        many = body.parallel_tool_calls is not False
        self._names = frozenset(f.name for f in functions)
        self._limit = None if many and not isinstance(body.tool_choice, dict) else 1
        self._tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        self._template_takes = template is not None and takes_tools(template)
        self._system = template is None or takes_system(template)
        self._must = None if forced is None else _words(forced)
        self.template_tools = self._tools if self._template_takes else None
        self.structured_outputs: dict[str, Any] | None = None
        if forced is not None:
            grammar = self._format.forced_grammar(forced, self._limit is None, tokenizer)
            self.structured_outputs = {"grammar": grammar}
        elif any(f.strict for f in functions):
            self.structured_outputs = {"grammar": self._format.free_grammar(functions, tokenizer)}
        self.keeps_special = self._format.has_special_mark(tokenizer)
        if self.keeps_special and body.skip_special_tokens:
            message = "skip_special_tokens: true would hide this model's tool calls, which begin with a special token"
            raise ApiError(400, message, param="skip_special_tokens", code="contradiction")

    def adapt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation as the template can write it."""
        if self._template_takes:
            return messages
        text = instructions(self._tools, self._must)
        return with_instructions(as_text(messages), text, takes_system=self._system)

    def reader(self) -> Reader:
        """For one sample."""
        return self._format.reader(self._names, self._limit)


def plan(body: ChatBody, engine: AsyncEngine, template: str | None) -> Plan | None:
    """The plan of a request with tools, None where none may be called. Raises `ApiError`."""
    tokenizer = engine.engine.tokenizer
    if tokenizer is None:
        raise ApiError(400, "tools: the engine has no tokenizer", param="tools", code="no_tokenizer")
    made = Plan(body, tokenizer, source_of(tokenizer, template))
    return None if body.tool_choice == "none" else made


def source_of(tokenizer: Tokenizer | None, template: str | None) -> str | None:
    """The chat template in use for a request with tools."""
    if template is not None or tokenizer is None:
        return template
    return tokenizer.chat_templates.get("tool_use") or tokenizer.chat_templates.get("default")


def adapt_history(
    messages: list[dict[str, Any]], tokenizer: Tokenizer | None, template: str | None
) -> list[dict[str, Any]]:
    """Past calls in a request without tools, for a template that cannot write them."""
    source = source_of(tokenizer, template)
    past = any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
    return as_text(messages) if past and not (source is not None and takes_tools(source)) else messages


def _functions(body: ChatBody) -> list[CallableFunction]:
    """The functions, checked: known kind, a usable name of its own, a schema of an object."""
    tools = body.tools or []
    if len(tools) > MAX_TOOLS:
        raise _refused("tools", f"{len(tools)} tools; at most {MAX_TOOLS} are taken")
    found: dict[str, CallableFunction] = {}
    for place, tool in enumerate(tools):
        name, schema = tool.function.name, tool.function.parameters or NO_ARGUMENTS
        if tool.type != "function":
            raise _refused(f"tools.{place}.type", f"{tool.type!r} is not supported; only functions can be called")
        if NAME.fullmatch(name) is None:
            raise _refused(f"tools.{place}.function.name", f"{name!r}: 1 to 64 letters, digits, _ and -")
        if name in found:
            raise _refused(f"tools.{place}.function.name", f"{name!r} is there twice")
        if schema.get("type", "object") != "object":
            raise _refused(f"tools.{place}.function.parameters", f'"type" must be "object", not {schema["type"]!r}')
        found[name] = CallableFunction(name, {"type": "object", **schema}, bool(tool.function.strict))
    return list(found.values())


def _forced(body: ChatBody, functions: list[CallableFunction]) -> list[CallableFunction] | None:
    """The functions of which one must be called; None where none must."""
    choice = body.tool_choice
    if choice == "required":
        return functions
    if not isinstance(choice, dict):
        return None
    named = choice.get("function")
    name = named.get("name") if isinstance(named, dict) else None
    if set(choice) != {"type", "function"} or choice["type"] != "function" or set(named or ()) != {"name"}:
        form = '"none", "auto", "required" or {"type": "function", "function": {"name": …}}'
        raise _refused("tool_choice", f"must be {form}")
    chosen = [f for f in functions if f.name == name]
    if not chosen:
        raise _refused("tool_choice", f"there is no tool {name!r}; there is {', '.join(f.name for f in functions)}")
    return chosen


def _words(forced: list[CallableFunction]) -> str:
    return f"Call {forced[0].name} now." if len(forced) == 1 else "Call one of the functions now."


def _refused(param: str, message: str) -> ApiError:
    return ApiError(400, f"{param}: {message}", param=param, code="invalid_tools")
