"""`serve`: the app under uvicorn, with the model loading meanwhile, until a signal or the engine's end.

The port answers from the first moment: /health says "loading", /ready 503. SIGTERM or Ctrl-C: no new connections, what
runs may finish for `drain_seconds`, then it is aborted; a second Ctrl-C ends at once. A signal while the model loads
ends at once, too. Exit codes: 0 after a signal, 1 when the engine failed, 2 when the port could not be opened or the
model not be loaded as asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from octavo.async_engine import AsyncEngine
from octavo.engine import Engine
from octavo.errors import ConfigError, RequestError
from octavo.logs import logger
from octavo.server.app import create_app
from octavo.server.connection import protocol_for
from octavo.server.settings import Loaded
from octavo.server.state import ServerState
from octavo.vllm_names import config_from

SWITCH_SECONDS = 0.001  # the engine's thread waits at most so long for the interpreter when a kernel has ended
LOADER, ENGINE = "octavo-load", "octavo-engine"  # threads
Say = Callable[[str], None]


def serve(loaded: Loaded, *, say: Say | None = None, build: Callable[..., Engine] | None = None) -> int:
    """Run until the end; the exit code. say: where lines for the operator go. build: what makes the engine.

    The process is the server's: SIGINT and SIGTERM are handled here from now on, and where a model still loads at the
    end it does not return but ends the process with that code.
    """
    return Running(loaded, say or _to_stderr, build or _build).run()


class Running:
    """One server process."""

    def __init__(self, loaded: Loaded, say: Say, build: Callable[..., Engine]) -> None:
        self._loaded = loaded
        self._say = say
        self._build_engine = build
        settings = loaded.server
        self.app = create_app(None, settings)
        self.state: ServerState = self.app.state.server
        self.server = _Server(
            uvicorn.Config(
                self.app,
                host=settings.host,
                port=settings.port,
                http=protocol_for(settings),
                ws="none",
                loop="uvloop" if _has("uvloop") else "asyncio",
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=settings.max_connections,
                timeout_graceful_shutdown=int(settings.drain_seconds) + 5,
                timeout_keep_alive=30,
                backlog=1024,
            ),
            self._begin_drain,
            self._listening,
        )
        self.code = 0

    def run(self) -> int:
        """Blocks. Raises ConfigError for settings that cannot be honoured. See `serve` for how it ends."""
        # Fail before the port is open on what can be known now.
        config = config_from(**self._loaded.engine)
        self.state.check_names(config.model, config.lora or ())
        if "max_loras" in self._loaded.engine and not config.lora and not len(self.app.state.keys):
            raise ConfigError(
                f"max_loras={config.max_loras} has no effect without adapters, and none can be loaded later without "
                "API keys; leave it out, or give lora or api_key_file"
            )
        check_address(self._loaded.server.host, self._loaded.server.port)
        for warning in self._loaded.warnings:
            self._say(f"warning: {warning}")
        if not len(self.app.state.keys) and self._loaded.server.host not in ("127.0.0.1", "localhost", "::1"):
            self._say(
                f"warning: {self._loaded.server.host} can be reached from other machines and there is no API key; "
                "give --api-key-file"
            )
        sys.setswitchinterval(SWITCH_SECONDS)
        self.state.on_death = lambda error: self._end(1)
        self.server.take_signals()  # before there is a thread that an exception here would leave behind
        threading.Thread(target=self._load, args=(config,), name=LOADER, daemon=True).start()
        try:
            self.server.run()
        except SystemExit:  # the port was taken since it was checked; uvicorn has said why
            self.code = 1
        if _at_work():
            self._leave()
        return self.code

    def _leave(self) -> NoReturn:
        """End the process now, with our code.

        A model cannot be told to stop loading. An interpreter that winds up under threads inside C++ (weights,
        tokenizers) tears them down at their next step into Python, through frames that let no exception pass: the
        process would abort. Nothing of ours is left to be done at exit: the request log is written line by line.
        """
        logging.shutdown()
        sys.stdout.flush()
        os._exit(self.code)

    # -- on other threads --------------------------------------------------------------------------------------------

    def _load(self, config: Any) -> None:
        try:
            self._make_ready(config)
        except BaseException as error:  # nobody else would hear of it: the port would say "loading" for ever
            message = " ".join(str(error).split())
            self.state.load_error = f"{type(error).__name__}: {message}"
            asked = isinstance(error, ConfigError | RequestError)
            said = message if asked else f"{self.state.load_error} (OCTAVO_DEBUG=1 shows where)"
            self._say(f"octavo: the model could not be loaded: {said}")
            if os.environ.get("OCTAVO_DEBUG"):
                logger.error("loading failed", exc_info=error)
            self._end(2 if asked else 1)

    def _make_ready(self, config: Any) -> None:
        engine = self._build_engine(config, on_progress=self._progress)
        self._progress("grammars", 0, 1)
        if why := engine.warm_grammars():
            logger.info("requests for structured output will be refused: %s", why)
        gc.collect()
        gc.freeze()  # weights, tables and modules stay: collections need not look at them again
        running = AsyncEngine(engine)
        running.start()
        self.state.attach(running)
        self._report(engine)

    def _progress(self, stage: str, done: int, total: int) -> None:
        self.state.progress = (stage, done, total)

    def _report(self, engine: Engine) -> None:
        settings = self._loaded.server
        self._say("settings in force:")
        for line in self._loaded.report(engine.settings()):
            self._say(f"  {line}")
        self._say(f"ready: {', '.join(self.state.served)} at http://{settings.host}:{self.server.port}/v1")

    def _end(self, code: int) -> None:
        """Let the process end with this code. From any thread."""
        self.code = self.code or code
        self.server.should_exit = True

    # -- on the event loop ---------------------------------------------------------------------------------------------

    def _listening(self) -> None:
        settings = self._loaded.server
        self._say(f"listening on http://{settings.host}:{self.server.port} (loading the model)")

    def _begin_drain(self) -> None:
        self.state.begin_drain()
        engine = self.state.engine
        if engine is not None:
            engine.draining = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._loaded.server.drain_seconds, engine.abort_all)


class _Server(uvicorn.Server):
    """uvicorn's server; signals begin the drain, and the process ends with our own exit code."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None], on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit
        self._on_start = on_start

    @property
    def port(self) -> int:
        """The port really used (0 asks for any)."""
        for server in getattr(self, "servers", []):
            for listening in server.sockets:
                return int(listening.getsockname()[1])
        return self.config.port

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    async def shutdown(self, sockets: Any = None) -> None:
        self._on_exit()
        await super().shutdown(sockets)
        if self.force_exit:  # the app's lifespan is cancelled, which uvicorn would report with a traceback
            logging.getLogger("uvicorn.error").disabled = True

    def take_signals(self) -> None:
        """SIGINT and SIGTERM end the server from now on, until the process is gone: one more is no reason to crash."""
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, self._handle)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # not for the run alone: `take_signals`

    def _handle(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def _at_work() -> bool:
    """Does a model still load, or an engine run?

    The loader starts the engine's thread before it ends, so one of them is seen at any moment of the handover.
    """
    return any(thread.name in (LOADER, ENGINE) for thread in threading.enumerate())


def check_address(host: str, port: int) -> None:
    """Can the port be opened? Binds it for a moment. Raises `ConfigError` with the system's reason.

    As for the server itself, a family that this machine does not have (IPv6 for localhost, say) is no obstacle while
    another address of the host can be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"host={host!r}: {reason}; give an address of this machine, such as 127.0.0.1 or 0.0.0.0 (all)"
        ) from error
    missing: OSError | None = None
    usable = False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            usable = True
        except OSError as error:
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                why = f"{error.strerror}; choose another port, or 0 for any free one"
                raise ConfigError(f"host={host!r}, port={port}: {why}") from error
            missing = error
    if not usable:
        reason = missing.strerror if missing else "no address"
        raise ConfigError(
            f"host={host!r}: {reason}; give an address of this machine, such as 127.0.0.1 or 0.0.0.0 (all)"
        ) from missing


def _build(config: Any, on_progress: Any) -> Engine:
    return Engine.build(config, on_progress=on_progress, texts=True)


def _has(module: str) -> bool:
    try:
        __import__(module)
    except ImportError:
        return False
    return True


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
