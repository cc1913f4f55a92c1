"""`AsyncEngine`: the engine on a thread of its own, for programs with an event loop.

    engine = AsyncEngine(Engine.build(config)); engine.start()
    request = await engine.submit(Prompt("Once upon a time"), SamplingParams(max_tokens=32))
    async for delta in request: print(delta.text, end="")
    await engine.shutdown(drain_seconds=10)

One thread owns the engine: everything that touches it is a command in a queue, run between two steps; with nothing to
do the thread sleeps in that queue. Tokenising runs before the queue, long texts on helper threads. What a step brought
is cut into deltas on the engine's thread and handed to the event loop in one call per step.

Knows no HTTP. The invariants: a request that was taken in ends exactly once, with a final output or with an error; a
reader that is slow or gone holds up nobody; a request that cannot be taken in leaves the engine as it was.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.async_command import Command
from octavo.async_request import AsyncRequest, Mail
from octavo.errors import InternalError, OctavoError, PromptError, RequestError, UnavailableError
from octavo.latency import Latencies
from octavo.logs import logger
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
from octavo.text.prompts import Prompt

if TYPE_CHECKING:
    from octavo.engine import Engine

T = TypeVar("T")
Params = SamplingParams | BeamSearchParams | PoolingParams
INLINE_CHARACTERS = 2000  # a longer text is tokenised off the event loop


class AsyncEngine:
    """Owns an engine's thread. buffer: deltas that wait for a reader before they are merged, one for each sample."""

    def __init__(self, engine: Engine, *, buffer: int = 256) -> None:
        if buffer < 1:
            raise ValueError(f"buffer={buffer}: must be at least 1")
        self._engine = engine
        self._buffer = buffer
        self.failure: BaseException | None = None
        self.draining = False
        self.latencies = Latencies()
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._lock = threading.Lock()  # guards `_over` against the last commands
        self._over = False
        self._live: dict[str, AsyncRequest] = {}  # only the engine's thread changes it
        self._mail = Mail()
        self._watchers: list[Callable[[Engine], None]] = []
        self._on_failure: list[Callable[[BaseException], None]] = []
        self._numbers = itertools.count()
        self._arriving = 0
        self._thread: threading.Thread | None = None
        self._text_pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="octavo-text")
        self._grammar_pool = concurrent.futures.ThreadPoolExecutor(2, thread_name_prefix="octavo-grammar")

    @property
    def engine(self) -> Engine:
        """Only for what never changes: config, spec, tokenizer. Everything else goes through `call`."""
        return self._engine

    @property
    def num_live(self) -> int:
        """Requests taken in that have not ended."""
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet: in the scheduler's queue or on their way there."""
        return len(self._engine.scheduler.waiting) + self._arriving

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        if self._thread is not None:
            raise InternalError("this AsyncEngine has been started already")
        self._thread = threading.Thread(target=self._run, name="octavo-engine", daemon=True)
        self._thread.start()

    async def shutdown(self, drain_seconds: float) -> None:
        """Take nothing new in, let what runs finish for at most `drain_seconds`, abort the rest, end the thread."""
        self.draining = True
        loop = asyncio.get_running_loop()
        limit = loop.time() + drain_seconds
        while self._live and loop.time() < limit and self.failure is None:
            await asyncio.sleep(0.02)
        if self._thread is not None:
            self._put(Command(lambda engine: self._abort_all(engine)))
            self._put(Command(None))
            await loop.run_in_executor(None, self._thread.join)
        self._text_pool.shutdown(wait=False, cancel_futures=True)
        self._grammar_pool.shutdown(wait=False, cancel_futures=True)

    def abort_all(self) -> None:
        """Abort everything that runs or waits; each gives a last output with finish_reason "abort"."""
        self._put(Command(lambda engine: self._abort_all(engine)))

    def _abort_all(self, engine: Engine) -> None:
        for request_id in list(self._live):
            engine.abort(request_id)

    def on_failure(self, callback: Callable[[BaseException], None]) -> None:
        """Call `callback(error)`, on the engine's thread, when the engine has failed (at once if it has)."""
        self._on_failure.append(callback)
        if self.failure is not None:
            callback(self.failure)

    # -- requests --------------------------------------------------------------------------------------------------

    async def submit(
        self,
        prompt: Prompt,
        params: Params,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        deadline_ms: float | None = None,
        arrived: float | None = None,
        stream: bool = True,
    ) -> AsyncRequest:
        """Hand one request to the engine. Raises `RequestError` at the door, `UnavailableError` without an engine.

        deadline_ms replaces that of `params`; arrived (`time.monotonic()`; None: now) is when it began to count.
        stream=False: the deltas come all at the end, one for each sample. So they do for best_of > n, whatever is
        asked, since which samples are kept is known only then.
        """
        if deadline_ms is not None:
            params = replace(params, deadline_ms=deadline_ms)
        many = await self.submit_all(
            [prompt], params, request_id=request_id, priority=priority, cache_salt=cache_salt, arrived=arrived,
            stream=stream,
        )  # fmt: skip
        return many[0]

    async def submit_all(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        arrived: float | None = None,
        stream: bool = True,
    ) -> list[AsyncRequest]:
        """Several prompts with the same parameters: all are taken in, or none."""
        self._check_open()
        arrived = time.monotonic() if arrived is None else arrived
        self._arriving += len(prompts)
        try:
            encoded = [await self.encode(prompt) for prompt in prompts]
            if isinstance(params, SamplingParams) and params.structured_outputs is not None:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._grammar_pool, self._engine.prepare, params, True)
            name = request_id or f"r{next(self._numbers)}"
            requests = [
                AsyncRequest(
                    self,
                    name if len(encoded) == 1 else f"{name}-{place}",
                    prompt,
                    params,
                    priority=priority,
                    cache_salt=cache_salt or prompt.cache_salt,
                    arrived=arrived,
                    buffer=self._buffer,
                    stream=stream and not _ranked(params),
                )
                for place, prompt in enumerate(encoded)
            ]
            admitted = asyncio.wrap_future(self.call(lambda engine: self._admit(engine, requests)))
            try:
                await asyncio.shield(admitted)
            except asyncio.CancelledError:  # the caller has gone while the command was waiting
                admitted.add_done_callback(_swallow)
                for request in requests:
                    request.abort()
                raise
            return requests
        finally:
            self._arriving -= len(prompts)

    async def encode(self, prompt: Prompt) -> Prompt:
        """The prompt with its ids. Raises `PromptError`; long texts do not hold up the event loop."""
        if prompt.token_ids is not None:
            return prompt
        text, tokenizer = prompt.text, self._engine.tokenizer
        if not text:
            raise PromptError("the prompt is empty: give at least one character, or token ids")
        if tokenizer is None:
            raise RequestError("the engine has no tokenizer: give prompt_token_ids")
        ids = await self.off_loop(lambda: tokenizer.encode(text), len(text))
        return replace(prompt, token_ids=tuple(ids))

    async def off_loop(self, work: Callable[[], T], characters: int) -> T:
        """Text work of about so many characters: here when it is short, on a helper thread when it is long."""
        if characters <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, work)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise UnavailableError(f"the engine has stopped: {self.failure}")
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        if self._thread is None:
            raise UnavailableError("the engine has not been started; call start()")

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def call(self, function: Callable[[Engine], T]) -> concurrent.futures.Future[T]:
        """Run `function(engine)` on the engine's thread between two steps; its result, or what it raised.

        It may take a step's time until it runs, and it holds up every request while it does.
        """
        command = Command(function)
        self._put(command)
        return command.future

    def on_step(self, watcher: Callable[[Engine], None]) -> Callable[[], None]:
        """Call `watcher(engine)` on the engine's thread after each step; returns what ends that.

        A watcher that raises is dropped, with a line in the log.
        """
        self._watchers.append(watcher)

        def remove() -> None:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

        return remove

    def abort(self, request_id: str) -> None:
        """End a request in whatever state it is; harmless when it has ended. Blocks are free before the next step."""
        self._put(Command(lambda engine: engine.abort(request_id)))

    def _put(self, command: Command) -> None:
        with self._lock:
            if not self._over:
                self._commands.put(command)
                return
        command.refuse(UnavailableError(f"the engine has stopped: {self.failure or 'it was shut down'}"))

    def _run(self) -> None:
        try:
            while self._obey():
                if self._engine.has_unfinished():
                    self._step()
        except BaseException as error:
            self._fail(error)
        finally:
            self._end()

    def _obey(self) -> bool:
        """Run the commands that wait; sleep when there is nothing else to do. False: the thread shall end."""
        idle = not self._engine.has_unfinished()
        obeyed = False
        while True:
            try:
                command = self._commands.get() if idle and not obeyed else self._commands.get_nowait()
            except Empty:
                break
            obeyed = True
            if command.function is None:
                return False
            command.run(self._engine)
        self._mail.send()
        return True

    def _admit(self, engine: Engine, requests: list[AsyncRequest]) -> None:
        """All of them or none. An error that is no refusal is the request's, too: the engine goes on."""
        if self.draining:
            raise UnavailableError("the server is shutting down and takes no new requests")
        taken: list[AsyncRequest] = []
        try:
            for request in requests:
                taken.append(request)
                engine.add_request(
                    request.request_id,
                    list(request.prompt.token_ids or ()),
                    request.remaining_params(time.monotonic()),
                    prompt=request.prompt.text,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    lora=request.prompt.lora,
                )
        except BaseException as error:
            for other in taken[:-1] if isinstance(error, RequestError) else taken:
                engine.abort(other.request_id)
            if isinstance(error, RequestError) and len(requests) > 1:
                raise type(error)(f"prompt {len(taken) - 1}: {error}") from error
            raise
        for request in taken:
            self._live[request.request_id] = request

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.monotonic()
        for output in outputs:
            request = self._live.get(output.request_id)
            if request is None:  # refused half-way, or started by `call`
                if output.finished:
                    self._drop_beams(output.request_id)
                continue
            deltas = request.gained(output, now, self.latencies)
            if output.finished:
                del self._live[output.request_id]
                if isinstance(request.params, BeamSearchParams):
                    request.beams = self._drop_beams(output.request_id)
            if deltas or output.finished:
                self._mail.add(request, deltas, output if output.finished else None)
        self._mail.send()
        for watcher in list(self._watchers):
            try:
                watcher(self._engine)
            except Exception:
                logger.exception("a watcher of the engine failed and is dropped")
                self._watchers.remove(watcher)

    def _drop_beams(self, request_id: str) -> Any:
        try:
            return self._engine.take_beams(request_id)
        except RequestError:
            return None

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        logger.critical("the engine has stopped: %s: %s", type(error).__name__, error, exc_info=error)

    def _end(self) -> None:
        """Nobody is left waiting: requests, then commands, then those who watch for a failure."""
        why = UnavailableError(f"the engine has stopped: {self.failure or 'it was shut down'}")
        if self.failure is None:
            self._finish_aborted()
        for request in self._live.values():
            self._mail.fail(request, why)
        self._live.clear()
        self._mail.send()
        with self._lock:
            self._over = True
        while True:
            try:
                self._commands.get_nowait().refuse(why)
            except Empty:
                break
        try:
            self._engine.close()
        except Exception:
            logger.exception("closing the engine failed")
        if self.failure is not None:
            for callback in self._on_failure:
                callback(self.failure)

    def _finish_aborted(self) -> None:
        """Aborted requests get their last outputs even when the thread ends right after."""
        self._abort_all(self._engine)
        try:
            while self._engine.has_unfinished():
                self._step()
        except OctavoError as error:
            self._fail(error)


def _ranked(params: Params) -> bool:
    """Is it known only at the end which samples are returned?"""
    return not isinstance(params, SamplingParams) or params.num_sequences > params.n


def _swallow(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
