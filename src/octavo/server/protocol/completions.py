"""The body of /v1/completions."""

from __future__ import annotations

from pydantic import Field

from octavo.server.protocol.common import GenerationBody, TokenId


class CompletionBody(GenerationBody):
    """prompt: a text, token ids, or a list of either; or prompt_token_ids instead."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]] | None = None
    max_tokens: int | None = Field(None, ge=0, description="16 when left out; 0 together with echo")
    logprobs: int | None = Field(None, ge=0, description="so many of the most likely tokens at each place")
    echo: bool | None = Field(None, description="the prompt before the answer")
    add_special_tokens: bool | None = Field(None, description="the model's begin token before a text prompt (true)")
