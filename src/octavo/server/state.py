"""What the server is at this moment: loading, ready, draining or dead; and the engine once there is one.

One object per app, `app.state.server`; `app.state.engine` is the engine itself for those who only look. Routes that
need an engine take `ready_engine` as a dependency and so never see one that is not there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request

from octavo.async_engine import AsyncEngine
from octavo.errors import ConfigError
from octavo.logs import logger
from octavo.server.errors import ApiError
from octavo.server.prompts import read_template
from octavo.server.settings import ServerSettings


class ServerState:
    """Mutable; only the event loop's thread changes it."""

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        self._app = app
        self.settings = settings
        self.created = int(time.time())
        self.model_names: tuple[str, ...] = settings.served_model_name
        self.chat_template = read_template(settings.chat_template)
        self.progress: tuple[str, int, int] | None = None  # stage, done, total of loading
        self.load_error: str | None = None
        self.draining = False
        # why requests were turned away -> how many
        self.shed = dict.fromkeys(("queue", "deadline", "loading", "draining", "failed"), 0)
        self.http_requests: dict[tuple[str, int], int] = {}  # (route, status) -> how many
        self.on_death: Callable[[BaseException], None] = lambda error: None

    @property
    def engine(self) -> AsyncEngine | None:
        engine: AsyncEngine | None = self._app.state.engine
        return engine

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Adapters that are loaded, each served as a model of its name."""
        return () if self.engine is None else self.engine.engine.adapters.names

    @property
    def served(self) -> tuple[str, ...]:
        """Every name a request may give as its model."""
        return (*self.model_names, *self.adapter_names)

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a request for `model` runs with; None for the model itself."""
        return model if model is not None and model not in self.model_names else None

    def check_names(self, model: str, adapters: Iterable[str]) -> None:
        """Raises `ConfigError` for an adapter under a name of the model. model: what it is loaded from."""
        if same := set(self.model_names or (_own_name(model),)) & set(adapters):
            raise ConfigError(f"lora: {', '.join(sorted(same))} is the name of the model itself; choose another")

    def attach(self, engine: AsyncEngine) -> None:
        """The engine is loaded and started: requests may come."""
        if not self.model_names:
            self.model_names = (_own_name(engine.engine.config.model),)
        self.check_names(engine.engine.config.model, engine.engine.adapters.names)
        self._app.state.engine = engine
        engine.on_failure(lambda error: self.on_death(error))

    @property
    def phase(self) -> str:
        """ "loading", "ready", "draining", "failed"."""
        engine = self.engine
        if self.load_error is not None or (engine is not None and engine.failure is not None):
            return "failed"
        if self.draining:
            return "draining"
        return "loading" if engine is None else "ready"

    def describe(self) -> dict[str, Any]:
        """Body of the health checks."""
        body: dict[str, Any] = {"status": self.phase}
        if self.phase == "loading" and self.progress is not None:
            stage, done, total = self.progress
            body["loading"] = {"stage": stage, "done": done, "total": total}
        if self.phase == "failed":
            engine = self.engine
            error = engine.failure if engine is not None else None
            body["error"] = self.load_error or f"{type(error).__name__}: {error}"
        return body

    def begin_drain(self) -> None:
        """From now on requests get 503; what runs goes on."""
        if not self.draining:
            self.draining = True
            logger.info("shutting down: no new requests, %d still run", self.engine.num_live if self.engine else 0)

    def turned_away(self, why: str) -> None:
        self.shed[why] += 1


def state_of(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def ready_engine(request: Request) -> AsyncEngine:
    """The engine, or 503 with the reason and when to come back."""
    state = state_of(request)
    phase = state.phase
    if phase == "ready":
        assert state.engine is not None
        return state.engine
    state.turned_away(phase)
    wait, message = {
        "loading": ("2", "the model is still loading"),
        "draining": ("10", "the server is shutting down"),
        "failed": ("30", "the engine has stopped; the server must be started anew"),
    }[phase]
    if phase == "loading" and state.progress is not None:
        stage, done, total = state.progress
        message += f" ({stage}: {100 * done // max(1, total)} %)"
    raise ApiError(503, message, code=phase, headers={"Retry-After": wait})


ReadyEngine = Annotated[AsyncEngine, Depends(ready_engine)]
State = Annotated[ServerState, Depends(state_of)]


def _own_name(model: str) -> str:
    """The last part of a path, or the name as it is."""
    name = model.rstrip("/").rsplit("/", 1)[-1]
    return name or model
