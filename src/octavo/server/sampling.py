"""From a request body to `SamplingParams`, and what the answer says of it: which values were defaulted or changed.

Only fields that were sent are passed on; everything else is `SamplingParams`' default, except where OpenAI's protocol
has another.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from pydantic import BaseModel

from octavo.async_engine import AsyncEngine
from octavo.sampling_params import SamplingParams
from octavo.server.errors import ApiError
from octavo.server.protocol.common import GenerationBody
from octavo.server.state import ServerState
from octavo.server.wire import dumps

NAMES = [f.name for f in fields(SamplingParams)]


@dataclass(slots=True)
class Settled:
    """Parameters, and the report that goes into the answer under "octavo"."""

    params: SamplingParams
    defaulted: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, dict[str, Any]] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        return {"defaulted": self.defaulted, "changed": self.changed}

    def cut_to_context(self, engine: AsyncEngine, longest_prompt: int) -> None:
        """Say so when the context has no room for what was asked for; the engine cuts it."""
        limit = engine.engine.config.max_model_len
        asked = self.params.max_tokens
        if limit is None or longest_prompt >= limit:
            return
        room = limit - longest_prompt
        if asked is None:
            self.defaulted["max_tokens"] = room
        elif asked > room:
            why = f"max_model_len={limit} leaves {room} after a prompt of {longest_prompt}"
            self.changed["max_tokens"] = {"asked": asked, "used": room, "why": why}


def settle(body: BaseModel, state: ServerState, **extra: Any) -> Settled:
    """The parameters of a body. extra: values under names of `SamplingParams` that the body spells otherwise."""
    check_model(getattr(body, "model", None), state)
    given = {n: v for n in NAMES if (v := getattr(body, n, None)) is not None and n not in extra}
    given |= {name: value for name, value in extra.items() if value is not None}
    limits = state.settings
    for name in ("n", "best_of"):
        if isinstance(given.get(name), int) and given[name] > limits.max_n:
            message = f"{name}={given[name]}: this server gives at most {limits.max_n} (max_n)"
            raise ApiError(400, message, param=name, code="too_many_samples")
    if (structure := given.get("structured_outputs")) is not None:
        size = len(dumps(structure))
        if size > limits.max_schema_bytes:
            limit = limits.max_schema_bytes
            message = f"structured_outputs: the schema has {size} bytes; at most {limit} are taken (max_schema_bytes)"
            raise ApiError(400, message, param="structured_outputs", code="too_large")
    if given.get("deadline_ms") is None and limits.default_deadline_ms is not None:
        given["deadline_ms"] = limits.default_deadline_ms
    params = SamplingParams(**{"max_tokens": None, **given})
    asked = set(given) & set(body.model_fields_set | set(extra))
    told = ("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "deadline_ms")
    defaulted = {n: getattr(params, n) for n in told if n not in asked and n in type(body).model_fields}
    return Settled(params, {n: v for n, v in defaulted.items() if v is not None})


def check_stream(body: GenerationBody) -> None:
    """What cannot be streamed because it is known only at the end."""
    if not body.stream:
        if body.stream_options is not None:
            raise ApiError(400, "stream_options has no effect without stream", param="stream_options")
        return
    if body.best_of is not None and body.best_of > (body.n or 1):
        message = "best_of cannot be streamed: which texts are kept is known only at the end"
        raise ApiError(400, message, param="best_of", code="contradiction")
    if body.prompt_logprobs is not None:
        message = "prompt_logprobs cannot be streamed; leave out one of the two"
        raise ApiError(400, message, param="prompt_logprobs", code="contradiction")


def check_model(name: str | None, state: ServerState) -> str:
    """The name of the model as it was asked for; 404 for one that is not served."""
    if name is None:
        return state.model_names[0]
    if name not in state.served:
        served = ", ".join(state.served)
        raise ApiError(
            404, f"model={name!r} is not served here; there is {served}", param="model", code="model_not_found"
        )
    return name
