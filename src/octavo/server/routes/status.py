"""Models, health, readiness and version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from octavo import __version__
from octavo.server.errors import ApiError
from octavo.server.security import KeyedCaller
from octavo.server.state import ServerState, State
from octavo.server.wire import dumps

router = APIRouter(tags=["status"])


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(body), status, headers, "application/json")


@router.get("/health", summary="Is the process alive and its engine sound?", responses={503: {}})
async def health(state: State) -> Response:
    """200 while loading, ready or draining; 503 once the engine has stopped: restart the process."""
    return _json(state.describe(), 503 if state.phase == "failed" else 200)


@router.get("/ready", summary="Should requests be sent here?", responses={503: {}})
async def ready(state: State) -> Response:
    """200 only when requests are taken; 503 while loading, draining or dead."""
    if state.phase == "ready":
        return _json(state.describe())
    return _json(state.describe(), 503, {"Retry-After": "2"})


@router.get("/version", summary="Versions")
async def version(caller: KeyedCaller) -> Response:
    return _json({"version": __version__})


@router.get("/v1/models", summary="Models that are served")
async def models(caller: KeyedCaller, state: State) -> Response:
    return _json({"object": "list", "data": [_card(state, name) for name in state.served]})


@router.get("/v1/models/{model:path}", summary="One model", responses={404: {}})
async def model(model: str, caller: KeyedCaller, state: State) -> Response:
    if model not in state.served:
        served = ", ".join(state.served)
        message = f"model {model!r} is not served here; there is {served}"
        raise ApiError(404, message, param="model", code="model_not_found")
    return _json(_card(state, model))


def _card(state: ServerState, name: str) -> dict[str, Any]:
    limit = state.engine.engine.config.max_model_len if state.engine is not None else None
    card = {"id": name, "object": "model", "created": state.created, "owned_by": "octavo"}
    adapters = () if state.engine is None else state.engine.engine.adapters
    for adapter in adapters:
        if adapter.name == name and name not in state.model_names:
            card |= {"parent": state.model_names[0], "created": adapter.loaded_at}
    return card if limit is None else {**card, "max_model_len": limit}
