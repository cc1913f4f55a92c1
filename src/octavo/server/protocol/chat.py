"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.protocol.common import Body, GenerationBody, Tool


class TextPart(Body):
    """The one kind of content part that a text model reads."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """content: a string, or text parts, joined with newlines. "developer" is read as "system"."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None


class ChatBody(GenerationBody):
    """Either messages, or prompt_token_ids with messages empty."""

    messages: list[Message] = Field(default_factory=list)
    max_completion_tokens: int | None = Field(None, description="None: the rest of the context")
    max_tokens: int | None = Field(None, description="the older name of max_completion_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: dict[str, Any] | None = Field(
        None, description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {…}}'
    )
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables for the model's chat template")
    add_generation_prompt: bool | None = None
