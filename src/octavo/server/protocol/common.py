"""What the generating routes have in common: the fields of `SamplingParams` and of this server, under OpenAI's names.

Types are checked here; ranges and contradictions by `SamplingParams`, so that they are stated once. Fields without an
effect are not there: a client that sends one is told so.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

TokenId = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Strict: a string is no number, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())


class StreamOptions(Body):
    """include_usage: one more event at the end, with the token counts and no choices."""

    include_usage: bool | None = None


class GenerationBody(Body):
    """OpenAI's sampling fields, then those of `SamplingParams` it does not have, then the server's own."""

    model: str | None = Field(None, description="one of /v1/models; left out: the model that is served")
    temperature: float | None = Field(None, description="0 is greedy")
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="token id -> bias from -100 to 100")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=512, description="who asks; written to no log, no effect on the answer")

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    detokenize: bool | None = Field(None, description="false: no text, only what return_token_ids adds")
    best_of: int | None = Field(None, description="draw so many, return the n most likely; not with stream")
    prompt_logprobs: int | None = Field(None, ge=0, description="log-probabilities of the prompt; not with stream")

    prompt_token_ids: list[TokenId] | None = Field(None, description="the prompt, already encoded")
    return_token_ids: bool | None = Field(None, description="adds token_ids to every choice, and prompt_token_ids")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="exactly one of json, json_object, regex, choice, grammar"
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=512, description="share prefixes only under this salt"
    )
    priority: int | None = Field(None, ge=-(2**31), le=2**31, description="smaller runs earlier")
    deadline_ms: float | None = Field(None, description="end after so many milliseconds, with what there is")


class Function(Body):
    """A function the model may call. parameters: a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: str
    function: Function
