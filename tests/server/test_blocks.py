"""The block map's routes on a real server: the page, the feed, keys, hidden texts, slow and many watchers."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.core.block_view import block_view
from octavo.inspect.block_map import BlockMap
from octavo.inspect.feed import full_frame
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server import blocks
from octavo.server.page import FILES, MODULES, static_file
from octavo.server.settings import ServerSettings
from octavo.text.prompts import Prompt

KEY = "a-key-for-this-test"
DATA = ["/blocks/snapshot", "/blocks/events", "/blocks/report", "/blocks/block/0", "/blocks/explain/r0"]


def generate(served: Served, count: int = 4, max_tokens: int = 24, prompt: str = "Once upon a time there was ") -> None:
    """Run requests to their ends on the server's engine."""

    async def one(number: int) -> None:
        assert served.engine is not None
        params: Any = SamplingParams(n=1 + number % 3, max_tokens=max_tokens, ignore_eos=True)
        if number % 4 == 3:
            params = BeamSearchParams(beam_width=3, max_tokens=max_tokens, ignore_eos=True)
        text = prompt + str(number)
        async for _ in await served.engine.submit(Prompt(text), params, request_id=f"run-{number}"):
            pass

    async def all_of_them() -> None:
        await asyncio.gather(*(one(number) for number in range(count)))

    asyncio.run_coroutine_threadsafe(all_of_them(), served.loop).result(60)


class Lines:
    """Server-sent events of one watcher, decoded."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.iter_lines()

    def next(self) -> tuple[str, Any]:
        name = ""
        for line in self._lines:
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                return name, json.loads(line[6:])
        return "closed", None


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(scripted_engine(seconds=0.002), ServerSettings()) as server:
        yield server


def feed_of(served: Served) -> blocks.BlockFeed:
    feed: blocks.BlockFeed = served.app.state.block_feed
    return feed


def truth(served: Served) -> BlockMap:
    return served.ask(lambda engine: BlockMap(full_frame(block_view(engine.scheduler))))


def test_the_page_and_its_files_come_with_a_policy_that_allows_nothing_else(served: Served) -> None:
    for path in ["/blocks", *(f"/blocks/static/{name}" for name in FILES)]:
        answer = httpx.get(served.url + path)
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'") and "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        for elsewhere in ("http://", "https://", "//cdn"):
            text = answer.text.replace("http://www.w3.org/2000/svg", "")
            assert elsewhere not in text, f"{path} names another host"
    for path in ("app.py", "..%2Fapp.py", "../blocks.py", "%2e%2e/settings.py"):
        assert httpx.get(f"{served.url}/blocks/static/{path}").status_code == 404


def test_each_script_imports_only_scripts_before_it() -> None:
    for place, name in enumerate(MODULES):
        file = static_file(f"{name}.js")
        assert file is not None
        for line in file[0].decode().splitlines():
            if line.startswith("import "):
                other = line.split('"')[1]
                assert other.removeprefix("./").removesuffix(".js") in MODULES[:place], f"{name}.js: {line}"


def test_off_by_one_flag() -> None:
    with Served(scripted_engine(), ServerSettings(blocks=False)) as server:
        for path in ["/blocks", "/blocks/static/main.js", *DATA]:
            assert httpx.get(server.url + path).status_code == 404


def test_every_byte_of_data_needs_the_key() -> None:
    with Served(scripted_engine(), ServerSettings(api_keys=(KEY,))) as server:
        assert httpx.get(server.url + "/blocks").status_code == 200
        for path in DATA:
            assert httpx.get(server.url + path).status_code == 401
            assert httpx.get(server.url + path, headers={"Authorization": "Bearer another-key"}).status_code == 401
            assert httpx.get(f"{server.url}{path}?api_key={KEY}").status_code == 401, "a key in an address is no key"
        answer = httpx.get(server.url + "/blocks/snapshot", headers={"Authorization": f"Bearer {KEY}"})
        assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"


def test_a_snapshot_is_what_the_pool_holds(served: Served) -> None:
    generate(served)
    served.wait_idle()
    block_map = BlockMap(httpx.get(served.url + "/blocks/snapshot").json())
    pool = served.ask(lambda engine: engine.scheduler.memory.pool)
    assert block_map.stats["cached"] == pool.num_cached > 0
    assert block_map.stats["generated_tokens"] == served.ask(lambda engine: engine.stats().generated_tokens) > 0
    assert [block_map.count(block) for block in range(pool.num_blocks)] == [0] * pool.num_blocks


def test_a_watcher_sees_the_run_and_ends_where_the_engine_is(served: Served) -> None:
    with httpx.stream("GET", served.url + "/blocks/events", timeout=20) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = Lines(response)
        name, hello = events.next()
        assert (name, hello["show_tokens"], hello["model"]) == ("hello", False, "scripted")
        name, frame = events.next()
        assert name == "frame" and frame["frame"] == 0 and "pool" in frame
        block_map = BlockMap(frame)
        served.ask(lambda engine: setattr(engine.runner, "seconds", 0.02))  # long enough for several snapshots
        generate(served, 6, 48)
        served.wait_idle()
        last = truth(served)
        kinds, sequences, deltas = set(), set(), 0
        while block_map.stats["finished"] < 6 or block_map.stats["used"]:
            name, frame = events.next()
            assert name == "frame" and "pool" not in frame
            block_map.apply(frame)
            kinds |= {event[2] for event in frame["events"]}
            sequences |= set(block_map.sequences)
            deltas += 1
        assert {"fork", "copy"} <= kinds and sequences and deltas >= 1
        assert block_map.states == last.states and block_map.keys == last.keys and block_map.sequences == {}


def test_nobody_watching_takes_no_snapshots_and_a_watcher_few(served: Served) -> None:
    with httpx.stream("GET", served.url + "/blocks/events", timeout=20) as response:
        Lines(response).next()
    generate(served, 1, 4)  # the loop has seen the watcher go by the time that this is over
    served.wait_idle()
    assert feed_of(served).watchers == 0
    before = feed_of(served).snapshots
    generate(served, 6, 64)
    assert feed_of(served).snapshots == before
    with httpx.stream("GET", served.url + "/blocks/events", timeout=20) as response:
        events = Lines(response)
        assert events.next()[0] == "hello"
        steps = served.ask(lambda engine: engine.stats().steps)
        generate(served, 6, 64)
        steps = served.ask(lambda engine: engine.stats().steps) - steps
        assert feed_of(served).watchers == 1 and before < feed_of(served).snapshots < before + steps / 4


def test_watchers_share_snapshots(served: Served) -> None:
    with (
        httpx.stream("GET", served.url + "/blocks/events", timeout=20) as one,
        httpx.stream("GET", served.url + "/blocks/events", timeout=20) as two,
    ):
        lines = [Lines(one), Lines(two)]
        maps = []
        for line in lines:
            line.next()
            maps.append(BlockMap(line.next()[1]))
        generate(served, 4, 64)
        served.wait_idle()
        for line, block_map in zip(lines, maps):
            while block_map.stats["finished"] < 4 or block_map.stats["used"]:
                block_map.apply(line.next()[1])
        assert maps[0].states == maps[1].states


def test_a_watcher_that_reads_nothing_holds_up_nobody() -> None:
    engine = scripted_engine(num_blocks=20_000, max_model_len=8192, check=False, max_num_batched_tokens=1 << 16)
    with Served(engine, ServerSettings()) as server, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(b"GET /blocks/events HTTP/1.1\r\nHost: here\r\n\r\n")
        generate(server, 6, 200, prompt="word " * 900)
        server.wait_idle()
        assert server.ask(lambda e: e.stats().finished) == 6
        assert feed_of(server).watchers == 1
        lazy.settimeout(10)
        assert lazy.recv(4096).startswith(b"HTTP/1.1 200")


def test_only_so_many_watch(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "MAX_WATCHERS", 1)
    with httpx.stream("GET", served.url + "/blocks/events", timeout=20) as response:
        events = Lines(response)
        assert events.next()[0] == "hello"
        answer = httpx.get(served.url + "/blocks/events")
        assert answer.status_code == 503 and "1 are watching already" in answer.json()["error"]["message"]


def test_stalled_watchers_keep_nobody_out_until_there_are_many(served: Served) -> None:
    assert served.engine is not None
    feed = blocks.BlockFeed(served.engine)
    now = time.monotonic()
    reading = {object(): since for since in [None, now] * 7}
    stalled = {object(): now - blocks.STALLED_SECONDS - 1 for _ in range(7)}
    feed._sending = {**reading, **stalled}
    assert feed.watchers == 21 and not feed.is_full, "14 and 7 quarters: less than 16"
    feed._sending[object()] = now - blocks.STALLED_SECONDS - 1
    assert feed.is_full
    feed._sending = {object(): None for _ in range(blocks.MAX_WATCHERS)}
    assert feed.is_full


def test_the_end_of_the_engine_is_told(served: Served) -> None:
    with httpx.stream("GET", served.url + "/blocks/events", timeout=20) as response:
        events = Lines(response)
        events.next()
        served.ask(lambda engine: setattr(engine.runner, "fault", ValueError("the device is gone")))
        with pytest.raises(Exception, match="the device is gone"):
            generate(served, 1)
        names = []
        while (name := events.next()[0]) != "closed":
            names.append(name)
        assert names[-1] == "stopped"


@pytest.mark.parametrize("show", [False, True])
def test_text_is_shown_only_if_allowed(show: bool) -> None:
    with Served(scripted_engine(), ServerSettings(show_tokens=show)) as server:
        generate(server, 1, 4, prompt="A secret of some length that fills more than one block ")
        server.wait_idle()
        first = truth(server)
        cached = [block for block in range(256) if first.state(block) == "cached"]
        bodies = [httpx.get(f"{server.url}/blocks/block/{block}").json() for block in cached]
        assert all(body["state"] == "cached" and body["fill"] == 16 for body in bodies)
        if show:
            texts = {"".join(body["tokens"]) for body in bodies}
            assert any("secret" in text for text in texts)
        else:
            assert not any("tokens" in body for body in bodies)
            everything = "".join(httpx.get(server.url + path).text for path in DATA if path != "/blocks/events")
            assert "secret" not in everything


def test_details_reports_and_explanations(served: Served) -> None:
    generate(served, 2, 20)
    served.wait_idle()
    missing = httpx.get(served.url + "/blocks/block/256")
    assert missing.status_code == 404 and "its blocks are 0 to 255" in missing.json()["error"]["message"]
    assert httpx.get(served.url + "/blocks/report").json()["pool"]["num_blocks"] == 256
    assert httpx.get(served.url + "/blocks/explain/run-0").json()["reason"] == "never seen"
    assert httpx.get(served.url + "/blocks/explain/nobody").status_code == 404


def test_while_the_model_loads_the_page_is_there_and_its_data_comes_later() -> None:
    with Served(None, ServerSettings()) as server:
        assert httpx.get(server.url + "/blocks").status_code == 200
        answer = httpx.get(server.url + "/blocks/snapshot")
        assert answer.status_code == 503 and "retry-after" in answer.headers
