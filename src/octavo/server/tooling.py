"""Where tool calling meets the chat route: what `octavo.server.tools` must offer, and when it is asked.

A plan is made for a request that has tools; it says what the chat template is told, what a forced call must look like,
and makes one reader per sample, which turns text into the pieces of a message. Without tools there is no plan, and the
text is the message.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from octavo.async_engine import AsyncEngine
from octavo.errors import SamplingError
from octavo.server.errors import ApiError
from octavo.server.protocol.chat import ChatBody
from octavo.server.tools import plan


class ToolReader(Protocol):
    """Of one sample. push and finish return chat deltas: {"content": …} or {"tool_calls": […]}."""

    @property
    def called(self) -> bool:
        """Was a tool called? The finish reason "stop" is then "tool_calls"."""
        ...

    def push(self, text: str) -> list[dict[str, Any]]: ...

    def finish(self) -> list[dict[str, Any]]:
        """What was held back; nothing is pushed after it."""
        ...

    def message(self) -> dict[str, Any]:
        """After finish: the whole message, with role, content and tool_calls."""
        ...


class ToolPlan(Protocol):
    """template_tools: what the chat template gets. structured_outputs: what a forced call must look like, or None.

    keeps_special: calls begin with a special token, so that special tokens must stay in the text.
    """

    template_tools: list[dict[str, Any]] | None
    structured_outputs: dict[str, Any] | None
    keeps_special: bool

    def adapt(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with what a template without tools must be told."""
        ...

    def reader(self) -> ToolReader: ...


def plan_for(body: ChatBody, engine: AsyncEngine, template: str | None) -> ToolPlan | None:
    """The plan of a request with tools; None without. Raises `ApiError` for what cannot be honoured.

    template: the chat template in use, None for the model's own.
    """
    if body.tools == []:
        raise ApiError(400, "tools: the list is empty; give a tool, or leave tools out", param="tools", code="empty")
    if body.tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            value = getattr(body, name)
            # "none" is what holds without tools anyway; "auto" would seem to allow calls.
            if value is not None and not (name == "tool_choice" and value == "none"):
                raise ApiError(400, f"{name} has no effect without tools", param=name, code="contradiction")
        return None
    return plan(body, engine, template)


@contextmanager
def blaming(body: ChatBody, plan: ToolPlan | None) -> Iterator[None]:
    """A grammar that is refused is refused under the name of the field that asked for it."""
    field = "tools" if plan is not None and plan.structured_outputs is not None else "response_format"
    try:
        yield
    except SamplingError as error:
        if body.structured_outputs is not None or not str(error).startswith(("json: ", "grammar: ")):
            raise
        raise ApiError(400, f"{field}: {error}", param=field, code="invalid_parameter") from error


def structure_of(form: dict[str, Any] | None, param: str) -> dict[str, Any] | None:
    """`response_format` of chat (schema inside "json_schema") or `text.format` of responses (flat), as a structure."""
    if form is None:
        return None
    kind, given = form.get("type"), dict(form)
    if kind == "json_schema" and "json_schema" in form:
        inner = form["json_schema"]
        if set(form) == {"type", "json_schema"} and isinstance(inner, dict):
            given = {"type": kind, **inner}
    if kind == "text" and set(given) == {"type"}:
        return None
    if kind == "json_object" and set(given) == {"type"}:
        return {"json_object": True}
    known = {"type", "name", "schema", "strict", "description"}
    if kind == "json_schema" and set(given) <= known and isinstance(given.get("schema"), dict):
        return {"json": given["schema"]}
    said = '{"name": …, "schema": {…}}'
    schema = f'"json_schema": {said}' if param == "response_format" else said[1:-1]
    message = f'must be {{"type": "text"}}, {{"type": "json_object"}} or {{"type": "json_schema", {schema}}}'
    raise ApiError(400, f"{param}: {message}", param=param, code="unsupported")
