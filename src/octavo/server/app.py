"""`create_app`: the routes, the limits around them, and errors in one form.

    app = create_app(engine, settings)      # any ASGI server can run it; `octavo serve` uses uvicorn

engine may be None while the model loads: `app.state.server.attach(engine)` makes the app ready.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from octavo import __version__
from octavo.async_engine import AsyncEngine
from octavo.server import errors, metrics
from octavo.server.exchange import RequestLog
from octavo.server.limits import Limits
from octavo.server.routes import adapters, chat, completions, embeddings, responses, status, tokens
from octavo.server.security import KeyRing
from octavo.server.settings import ServerSettings
from octavo.server.shedding import FinishRate
from octavo.server.state import ServerState

DESCRIPTION = """OpenAI's protocol over Octavo, a PagedAttention engine.

Every field that is not listed is refused by name. Answers carry `octavo`: which values were defaulted or changed."""


def create_app(engine: AsyncEngine | None, settings: ServerSettings | None = None) -> FastAPI:
    """The ASGI app. It starts no engine and stops none but at the end of its own life (lifespan)."""
    settings = settings or ServerSettings()

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        app.state.server.begin_drain()
        if app.state.engine is not None:
            await app.state.engine.shutdown(settings.drain_seconds)
        app.state.request_log.close()

    app = FastAPI(
        title="Octavo",
        version=__version__,
        description=DESCRIPTION,
        lifespan=life,
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.engine = None
    app.state.settings = settings
    app.state.keys = KeyRing(settings.all_keys())
    app.state.server = state = ServerState(app, settings)
    app.state.finish_rate = FinishRate()
    app.state.request_log = RequestLog(settings.request_log)
    if engine is not None:
        state.attach(engine)
    errors.install(app)
    for module in (chat, completions, responses, embeddings, tokens, adapters, status, metrics):
        app.include_router(module.router)
    if settings.blocks and importlib.util.find_spec("octavo.server.blocks") is not None:
        app.include_router(importlib.import_module("octavo.server.blocks").router)
    if settings.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )

    def count(route: str, code: int) -> None:
        state.http_requests[route, code] = state.http_requests.get((route, code), 0) + 1

    app.add_middleware(Limits, settings=settings, count=count)
    describe_errors(app, keyed=bool(len(app.state.keys)))
    return app


def describe_errors(app: FastAPI, *, keyed: bool) -> None:
    """The OpenAPI document says what errors look like, and asks for a key only where one is needed."""
    made = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is not None:
            return app.openapi_schema
        schema = made()
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts["Error"] = ERROR_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        said = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                found = operation["responses"]
                found.pop("422", None)
                codes = ["431"]
                if method == "post":
                    codes += ["400", "404", "408", "413", "429", "503"]
                if keyed and operation.get("security"):
                    codes.append("401")
                for code in codes:
                    found[code] = {"description": STATUSES[code], **said}
                for code in ("404", "503"):
                    if code in found and path not in ("/health", "/ready"):
                        found[code] = {"description": STATUSES[code], **said}
                if not keyed:
                    operation.pop("security", None)
        app.openapi_schema = schema
        return schema

    app.openapi = document  # type: ignore[method-assign]


ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field at fault"},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
STATUSES = {
    "400": "The request is refused; the message names the field, its value and what is allowed",
    "401": "No API key, or an unknown one",
    "404": "No such model, or nothing at this path",
    "408": "The request did not come in whole in time",
    "413": "The body is too large",
    "429": "Too many requests are waiting; Retry-After says when to come back",
    "431": "The headers are too large",
    "503": "Loading, shutting down, or the deadline passed in the queue",
}
