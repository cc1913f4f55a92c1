"""`/blocks`: the block map in the browser, and the data behind it.

The page and its scripts are open to everybody who can reach the port (they hold nothing); every byte of data needs the
key. Watching is pull, not push: each watcher asks for a new snapshot when it has sent the last one, at most
`SNAPSHOTS_PER_SECOND` times a second for all of them together, less often when snapshots are dear. So nobody watching
costs nothing, and a watcher that reads slowly gets fewer frames and holds up nobody.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response, StreamingResponse

from octavo.async_engine import AsyncEngine
from octavo.core.block_view import BlockView, block_view
from octavo.engine import Engine
from octavo.errors import RequestError, UnavailableError
from octavo.inspect.block_details import block_details, text_of_tokens
from octavo.inspect.explain import explain_as_json
from octavo.inspect.feed import FEED_VERSION, Frame, delta_frame, full_frame
from octavo.inspect.report import engine_report
from octavo.server.errors import ApiError
from octavo.server.page import POLICY, static_file
from octavo.server.security import KeyedCaller
from octavo.server.state import ReadyEngine, State
from octavo.server.wire import dumps, event

T = TypeVar("T")

SNAPSHOTS_PER_SECOND = 5
MOST_OF_THE_TIME = 0.01  # share of the time that snapshots may take
IDLE_SECONDS = 2.0  # without a step, look again after so long
HEARTBEAT_SECONDS = 15.0
MAX_WATCHERS = 16
STALLED_SECONDS = 30.0  # who has taken nothing for so long keeps nobody else out

router = APIRouter(tags=["blocks"])


class BlockFeed:
    """The newest snapshot of one engine, shared by all who watch. Lives on the event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self._sending: dict[object, float | None] = {}  # watcher -> since when it is being sent something
        self.snapshots = 0  # taken since the start
        self._lock = asyncio.Lock()
        self._view: BlockView | None = None
        self._taken_at = float("-inf")
        self.interval = 1.0 / SNAPSHOTS_PER_SECOND

    @property
    def watchers(self) -> int:
        """Open streams, stalled ones included."""
        return len(self._sending)

    @property
    def is_full(self) -> bool:
        """Are so many watching that one more is too many? Stalled streams count a quarter: they only hold memory."""
        now = time.monotonic()
        stalled = sum(since is not None and now - since > STALLED_SECONDS for since in self._sending.values())
        return len(self._sending) - stalled + stalled / 4 >= MAX_WATCHERS

    async def take(self) -> BlockView:
        """A snapshot of this moment."""
        view, seconds = await asyncio.wrap_future(self.engine.call(_timed_view))
        self.snapshots += 1
        self._view, self._taken_at = view, time.monotonic()
        self.interval = max(1.0 / SNAPSHOTS_PER_SECOND, seconds / MOST_OF_THE_TIME)
        return view

    async def next(self) -> BlockView:
        """The newest snapshot that the pace allows: another watcher's, if it is fresh, else a new one."""
        async with self._lock:
            if self._view is None or time.monotonic() - self._taken_at >= self.interval:
                return await self.take()
            return self._view

    def has_moved(self, since: BlockView) -> bool:
        """Has the engine planned a step since that snapshot, or has it been long?"""
        clock = self.engine.engine.scheduler.memory.pool.clock  # one int, read without asking the engine's thread
        return clock != since.step or time.monotonic() - self._taken_at > IDLE_SECONDS

    async def events(self, hello: dict[str, Any], over: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events for one watcher until `over()` or the engine ends: hello, a full frame, then deltas."""
        watcher = object()
        try:
            async with aclosing(self._events(hello, over)) as texts:
                async for text in texts:
                    self._sending[watcher] = time.monotonic()
                    yield text
                    self._sending[watcher] = None
        finally:
            self._sending.pop(watcher, None)

    async def _events(self, hello: dict[str, Any], over: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        try:
            yield event(hello, "hello")
            sent, number = await self.take(), 0
            yield await asyncio.to_thread(lambda: event(full_frame(sent), "frame"))
            spoken = time.monotonic()
            while not over():
                await asyncio.sleep(self.interval)
                frame = None
                if self.has_moved(sent) and (view := await self.next()) is not sent:
                    frame = delta_frame(sent, view, number + 1)
                if frame is not None and not _is_empty(frame, sent):
                    sent, number, spoken = view, number + 1, time.monotonic()
                    yield event(frame, "frame")
                elif time.monotonic() - spoken > HEARTBEAT_SECONDS:
                    spoken = time.monotonic()
                    yield b": still here\n\n"
        except UnavailableError:  # the engine has gone while a snapshot was asked for
            pass
        yield event({}, "stopped")


def _timed_view(engine: Engine) -> tuple[BlockView, float]:
    begin = time.thread_time()
    view = block_view(engine.scheduler, now=engine.now(), generated_tokens=engine.journal.generated)
    return view, time.thread_time() - begin


def _is_empty(frame: Frame, before: BlockView) -> bool:
    changes = (frame[name] for name in ("keys", "new", "gone", "progress", "tables", "events"))
    same = frame["waiting"] is None and frame["stats"] == list(before.stats) and frame["step"] == before.step
    return same and not frame["blocks"][0] and not any(changes)


def block_feed(request: Request, engine: ReadyEngine) -> BlockFeed:
    """The feed of the app's engine."""
    feed: BlockFeed | None = getattr(request.app.state, "block_feed", None)
    if feed is None or feed.engine is not engine:
        feed = request.app.state.block_feed = BlockFeed(engine)
    return feed


Feed = Annotated[BlockFeed, Depends(block_feed)]


def _json(body: Any) -> Response:
    return Response(dumps(body), media_type="application/json", headers={"Cache-Control": "no-store"})


async def _ask(engine: AsyncEngine, function: Callable[[Engine], T]) -> T:
    """The answer of the engine's thread; what is not there is 404."""
    try:
        return await asyncio.wrap_future(engine.call(function))
    except RequestError as error:
        raise ApiError(404, str(error), code="not_found") from error


# -- the page ----------------------------------------------------------------------------------------------------------


@router.get("/blocks", include_in_schema=False)
async def page() -> Response:
    """The block map."""
    return _static("index.html")


@router.get("/blocks/static/{name}", include_in_schema=False)
async def static(name: str) -> Response:
    """A script or the style sheet of the page."""
    return _static(name)


def _static(name: str) -> Response:
    file = static_file(name)
    if file is None:
        raise ApiError(404, f"the block map has no file {name!r}", code="not_found")
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(file[0], media_type=file[1], headers=headers)


# -- the data ----------------------------------------------------------------------------------------------------------


@router.get("/blocks/snapshot", summary="Every block and every table at this moment")
async def snapshot(caller: KeyedCaller, feed: Feed) -> Response:
    """A full frame of the feed; its format is described in docs/blocks.md."""
    view = await feed.take()
    return Response(
        await asyncio.to_thread(lambda: dumps(full_frame(view))),
        media_type="application/json",
        headers={"Cache-Control": "no-store"},
    )


@router.get("/blocks/events", summary="The block map as it changes")
async def events(caller: KeyedCaller, feed: Feed, state: State) -> Response:
    """Server-sent events: `hello`, a full `frame`, then delta frames, at most a few a second; `stopped` at the end."""
    if feed.is_full:
        raise ApiError(503, f"{MAX_WATCHERS} are watching already; close one of them", headers={"Retry-After": "5"})
    hello = {
        "version": FEED_VERSION,
        "model": state.model_names[0] if state.model_names else "",
        "show_tokens": state.settings.show_tokens,
        "interval": feed.interval,
    }
    stream = feed.events(hello, lambda: state.phase != "ready")
    return StreamingResponse(stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@router.get("/blocks/block/{block}", summary="All about one block")
async def block(caller: KeyedCaller, engine: ReadyEngine, state: State, block: Annotated[int, Path(ge=0)]) -> Response:
    """State, owners, fill, age and content hash; the text of its tokens only if the server was told to show it."""
    text_of = text_of_tokens(engine.engine.tokenizer) if state.settings.show_tokens else None
    return _json(await _ask(engine, lambda e: block_details(e.scheduler, block, text_of)))


@router.get("/blocks/report", summary="Waste, static counterfactual, samples, settings")
async def report(
    caller: KeyedCaller,
    engine: ReadyEngine,
    finished: Annotated[int, Query(ge=0, le=256)] = 32,
    samples: Annotated[int | None, Query(ge=0, le=600)] = None,
) -> Response:
    """What `octavo doctor` and `octavo top` read; see docs/doctor.md. finished, samples: how many to list."""
    return _json(await _ask(engine, lambda e: engine_report(e, finished=finished, samples=samples)))


@router.get("/blocks/explain/{request_id}", summary="Why a prompt was not found further in the cache")
async def explain(caller: KeyedCaller, engine: ReadyEngine, request_id: str) -> Response:
    """For one of the latest finished requests: which block broke the chain, and why."""
    return _json(await _ask(engine, lambda e: explain_as_json(e.explain(request_id))))
