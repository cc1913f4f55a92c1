"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while requests run.

They read files of the server's machine and take its memory, so they answer only where callers have keys.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from octavo.errors import ModelError
from octavo.server.errors import ApiError
from octavo.server.protocol.adapters import LoadAdapterBody, UnloadAdapterBody
from octavo.server.security import Caller, KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.wire import dumps

router = APIRouter(tags=["adapters"])
_FORBIDDEN: dict[int | str, dict[str, Any]] = {403: {"description": "The server has no API keys"}}


@router.post("/v1/load_lora_adapter", summary="Load a LoRA adapter and serve it as a model", responses=_FORBIDDEN)
async def load(body: LoadAdapterBody, caller: KeyedCaller, state: State, engine: ReadyEngine) -> Response:
    """The adapter is read beside the engine and taken in between two steps."""
    from octavo.models.lora_reader import read_adapter  # brings torch, for which the port must not wait

    _check(caller)
    if body.lora_name in state.model_names:
        message = f"lora_name={body.lora_name!r} is the name of the model itself; choose another"
        raise ApiError(400, message, param="lora_name", code="name_in_use")
    try:
        files = await asyncio.get_running_loop().run_in_executor(None, read_adapter, body.lora_path)
        loaded = await asyncio.wrap_future(engine.call(lambda e: e.load_lora(body.lora_name, files)))
    except ModelError as error:
        raise ApiError(400, f"lora_path: {error}", param="lora_path", code="invalid_adapter") from error
    answer = {"id": loaded.name, "object": "model", "parent": state.model_names[0], "rank": loaded.max_rank}
    return Response(dumps(answer), media_type="application/json")


@router.post("/v1/unload_lora_adapter", summary="Take a LoRA adapter's name away", responses=_FORBIDDEN)
async def unload(body: UnloadAdapterBody, caller: KeyedCaller, state: State, engine: ReadyEngine) -> Response:
    """New requests for it get 404 from now on; those that run finish with it, then its memory is free."""
    _check(caller)
    if body.lora_name not in state.adapter_names:
        loaded = ", ".join(state.adapter_names) or "none"
        message = f"lora_name={body.lora_name!r}: no adapter of this name is loaded; loaded: {loaded}"
        raise ApiError(404, message, param="lora_name", code="model_not_found")
    await asyncio.wrap_future(engine.call(lambda e: e.drop_lora(body.lora_name)))
    return Response(dumps({"id": body.lora_name, "object": "model", "deleted": True}), media_type="application/json")


def _check(caller: Caller) -> None:
    if not caller.key:
        raise ApiError(
            403, "adapters are loaded and unloaded only with an API key: start the server with --api-key-file",
            code="forbidden",
        )  # fmt: skip
