"""A real uvicorn on a loopback port, on a thread, around the real app. `with Served(engine, settings) as served: …`"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType
from typing import Any

import uvicorn

from octavo.async_engine import AsyncEngine
from octavo.engine import Engine
from octavo.server.app import create_app
from octavo.server.connection import protocol_for
from octavo.server.settings import ServerSettings


class Served:
    """url: where it listens. Everything about the engine is asked on its own thread."""

    def __init__(self, engine: Engine | None, settings: ServerSettings | None = None, *, buffer: int = 256) -> None:
        self.settings = settings or ServerSettings()
        self.engine = None if engine is None else AsyncEngine(engine, buffer=buffer)
        if self.engine is not None:
            self.engine.start()
        self.app = create_app(self.engine, self.settings)
        config = uvicorn.Config(
            self.app, port=0, http=protocol_for(self.settings), ws="none", log_level="critical", loop="uvloop",
            timeout_graceful_shutdown=5,
        )  # fmt: skip
        self.server = uvicorn.Server(config)
        self.loop: Any = None
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.serve())

    def __enter__(self) -> Served:
        self._thread.start()
        limit = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < limit and self._thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not end"

    def ask(self, function: Any) -> Any:
        """function(engine), between two steps."""
        assert self.engine is not None
        return self.engine.call(function).result(20)

    def blocks_in_use(self) -> int:
        used: int = self.ask(lambda engine: engine.scheduler.memory.pool.num_used)
        return used

    def wait_idle(self, seconds: float = 10) -> None:
        """Until nothing runs, waits or holds a block; the bookkeeping is then audited."""
        assert self.engine is not None
        limit = time.monotonic() + seconds
        while self.engine.num_live or self.blocks_in_use():
            assert time.monotonic() < limit, f"{self.engine.num_live} requests, {self.blocks_in_use()} blocks are left"
            time.sleep(0.01)
        self.ask(lambda engine: engine.audit())
