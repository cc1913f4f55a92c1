"""The body of /v1/responses: text in, text out. Nothing is stored, so there is nothing to continue from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.protocol.common import Body, TokenId


class InputText(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = Field(None, max_length=0)
    logprobs: list[Any] | None = Field(None, max_length=0)


class InputMessage(Body):
    """A message as sent, or an output message of an earlier response sent back."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None


class TextOptions(Body):
    """format: as response_format of chat, flat: {"type": "json_schema", "name": …, "schema": {…}}."""

    format: dict[str, Any] | None = None


class ResponsesBody(Body):
    """input: a text (one user message) or messages; instructions go before them as the system's."""

    model: str | None = None
    input: str | list[InputMessage] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    text: TextOptions | None = None
    metadata: dict[str, str] | None = Field(None, max_length=16, description="given back as it is")
    store: Literal[False] | None = Field(None, description="responses are never stored")
    stream: bool | None = None
    user: str | None = Field(None, max_length=512)

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    prompt_token_ids: list[TokenId] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    deadline_ms: float | None = None
