"""/v1/embeddings: one vector per input, pooled from the model's last hidden states."""

from __future__ import annotations

import base64
from array import array
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from octavo.sampling_params import PoolingParams
from octavo.server.errors import ApiError
from octavo.server.exchange import Exchange
from octavo.server.prompts import blaming as blaming_prompt
from octavo.server.prompts import texts
from octavo.server.protocol.tokens import EmbeddingBody
from octavo.server.sampling import check_model
from octavo.server.security import KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.wire import dumps

router = APIRouter(tags=["embeddings"])


@router.post("/v1/embeddings", summary="Vectors of texts")
async def embeddings(
    body: EmbeddingBody, http: Request, caller: KeyedCaller, state: State, engine: ReadyEngine
) -> Response:
    """One vector for each input: the mean of the last hidden states, or that of the last token (`pooling`)."""
    model = check_model(body.model, state)
    spec = engine.engine.spec
    if body.dimensions is not None and spec is not None and body.dimensions != spec.hidden_size:
        message = f"dimensions={body.dimensions}: this model has {spec.hidden_size}, and they cannot be cut"
        raise ApiError(400, message, param="dimensions", code="unsupported")
    deadline = body.deadline_ms if body.deadline_ms is not None else state.settings.default_deadline_ms
    params = PoolingParams(pooling=body.pooling, normalize=body.normalize, deadline_ms=deadline)
    with blaming_prompt("input"):
        prompts = await texts(engine, body.input)
        exchange = Exchange(http, engine, caller, "/v1/embeddings")
        await exchange.submit(
            prompts, params, model=body.model, priority=body.priority or 0, cache_salt=body.cache_salt, stream=False
        )
    outputs = await exchange.results()
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    data = [
        {"object": "embedding", "index": index, "embedding": _encoded(output.embedding, body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    counts = {"prompt_tokens": tokens, "total_tokens": tokens}
    answer = {"object": "list", "data": data, "model": model, "usage": counts, "octavo": {"pooling": body.pooling}}
    return Response(dumps(answer), media_type="application/json")


def _encoded(vector: Any, form: str) -> Any:
    """float: a list; base64: float32, little-endian."""
    values = [float(v) for v in vector]
    if form == "float":
        return values
    packed = array("f", values)
    return base64.b64encode(packed.tobytes()).decode()
