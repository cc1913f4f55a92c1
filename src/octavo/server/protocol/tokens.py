"""Bodies of /tokenize, /detokenize and /v1/embeddings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octavo.server.protocol.chat import Message
from octavo.server.protocol.common import Body, TokenId


class TokenizeBody(Body):
    """Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = Field(None, description="true for a prompt, false for messages")
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]
    skip_special_tokens: bool = False


class EmbeddingBody(Body):
    """pooling: "mean" of the last hidden states, or "last": that of the last token. normalize: to length 1."""

    model: str | None = None
    input: str | list[TokenId] | list[str] | list[list[TokenId]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="only the model's own number of dimensions")
    user: str | None = Field(None, max_length=512)
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True
    priority: int | None = Field(None, ge=-(2**31), le=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=512)
    deadline_ms: float | None = None
