"""The block map in a real browser: it loads, follows, selects, scrubs, asks for the key, carries a run in a file."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from helpers.chromium import chromium, chromium_path
from helpers.http_server import Served
from helpers.serving import printable, scripted_engine
from octavo.async_engine import AsyncEngine
from octavo.cli.view_demo import demo_text, record_demo
from octavo.core.block_view import block_view
from octavo.inspect.block_map import BlockMap
from octavo.inspect.recorded_run import recorded_run
from octavo.sampling_params import SamplingParams
from octavo.server.page import page_with_run
from octavo.server.settings import ServerSettings
from octavo.text.prompts import Prompt

MISSING = [
    what
    for what, there in (
        ("a Chromium (apt-get install chromium, or set OCTAVO_CHROMIUM=/path/to/it)", chromium_path()),
        ("playwright (pip install playwright; octavo[dev] has it)", find_spec("playwright")),
    )
    if not there
]
if MISSING:
    message = f"BROWSER TESTS SKIPPED, the block map is untested; missing: {', '.join(MISSING)}"
    if os.environ.get("OCTAVO_NEED_BROWSER"):
        raise RuntimeError(message)
    pytest.skip(message, allow_module_level=True)

KEY = "a-key-for-this-test"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """open_page(url, **context options): afterwards no page may have logged an error or asked another host."""
    troubles: list[str] = []
    contexts = []

    def open_(url: str, *, expected: str = "", **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)

        def hear(message: Any) -> None:
            if message.type in ("error", "warning") and not (expected and expected in message.text):
                troubles.append(f"console: {message.text}")

        page.on("console", hear)
        page.on("pageerror", lambda error: troubles.append(f"page error: {error}"))
        own = url.split("/blocks")[0]
        page.on("request", lambda r: None if r.url.startswith((own, "data:")) else troubles.append(f"asked {r.url}"))
        page.goto(url)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


def never_ends(tokens: Any, sample: int) -> int:
    drawn = printable(tokens, sample)
    return drawn if drawn < 256 else 97


def start(
    served: Served, requests: int = 3, *, n: int = 2, max_tokens: int = 400, prompt: str = "Once upon a time "
) -> None:
    """Submit requests and leave them running."""

    async def submit() -> None:
        assert served.engine is not None
        for number in range(requests):
            params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True)
            text = Prompt(prompt.replace("#", str(number)) + f"there was a reader number {number}")
            await served.engine.submit(text, params, request_id=f"tale-{number}", stream=False)

    asyncio.run_coroutine_threadsafe(submit(), served.loop).result(30)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    engine = scripted_engine(script=never_ends, seconds=0.02, max_model_len=1024, check=False)
    with Served(engine, ServerSettings(show_tokens=True)) as served:
        yield served


@pytest.fixture
def running(server: Served) -> Iterator[Served]:
    """Three requests of two samples each, in the middle of their run."""
    start(server)
    yield server
    assert server.engine is not None
    server.engine.abort_all()
    server.wait_idle()


def wait(page: Any, condition: str) -> None:
    page.wait_for_function(f"() => {{ const p = octavo.player, map = p.map; return {condition}; }}")


def wait_text(page: Any, selector: str, text: str) -> None:
    page.wait_for_function(f"() => document.querySelector({selector!r}).textContent === {text!r}")


def table_of(served: Served, seq: int) -> list[int]:
    return served.ask(lambda engine: list(block_view(engine.scheduler).sequences[seq].tables[0]))


def test_it_loads_and_follows_the_engine(running: Served, open_page: Any) -> None:
    page = open_page(running.url + "/blocks")
    wait(page, "map && map.sequences.size === 6 && p.history.length > 4")
    assert page.text_content("#status") == "live" and page.text_content("#model") == "scripted"
    assert page.text_content("#seq-count") == "6 running"
    assert page.locator("#sequences li").count() == 6
    first = page.evaluate("octavo.player.map.step")
    wait(page, f"map.step > {first} + 10")
    shown = int(page.text_content("#count-blocks").replace(",", ""))
    assert shown == page.evaluate("octavo.player.map.stat('used')") > 0
    assert "forked from" in page.text_content("#log") and "copy-on-write" in page.text_content("#log")
    assert "Static allocation would reserve" in page.text_content("#waste-static")
    page.wait_for_selector("#waste-run:not([hidden])")
    assert "sequences at once" in page.text_content("#waste-run")
    assert "Prefix look-ups ended: " in page.text_content("#waste-run")


def test_a_chosen_sequence_lights_up_in_the_order_of_its_table(running: Served, open_page: Any) -> None:
    page = open_page(running.url + "/blocks")
    wait(page, "map && map.sequences.size === 6")
    seq = int(page.get_attribute("#sequences li:nth-child(2)", "data-seq"))
    page.click("#sequences li:nth-child(2)")
    page.wait_for_selector("#strip:not([hidden])")
    lit, shown, title = page.evaluate(
        """() => [[...octavo.grid.selected].sort((a, b) => a[1] - b[1]).map(([block]) => block),
        document.getElementById("reader").textContent, document.getElementById("strip-title").textContent]"""
    )
    now = table_of(running, seq)
    assert lit and lit == now[: len(lit)], "not the table that the engine computes with"
    assert shown.startswith(f"seq {seq}: [{lit[0]}*, ") and f"{len(lit)} blocks" in title
    assert page.text_content("#spoken").startswith(f"seq {seq}: [{lit[0]}*, ")
    # Arrows: ink between the strip and the map.
    wait(page, "performance.now() - octavo.overlay.litAt > 900")
    inked = page.evaluate(
        """() => { const c = octavo.overlay.canvas, g = c.getContext("2d");
        return g.getImageData(0, 0, c.width, c.height).data.filter((v, i) => i % 4 === 3 && v > 0).length; }"""
    )
    assert inked > 2000
    page.keyboard.press("Escape")
    assert page.is_hidden("#strip") and page.evaluate("octavo.grid.selected.size") == 0


def test_clicks_in_the_map_follow_one_owner_after_the_other(running: Served, open_page: Any) -> None:
    page = open_page(running.url + "/blocks")
    wait(page, "map && map.sequences.size === 6 && map.stat('shared') > 0")
    block = page.evaluate("octavo.player.map.states.findIndex((s) => s === 115)")
    owners = page.evaluate(f"octavo.player.map.ownersOf({block}).map((o) => o.seq)")
    spot = page.evaluate(f"octavo.grid.cornerOf({block})")
    for seq in owners:
        page.click("#grid", position={"x": spot[0] + 4, "y": spot[1] + 4})
        assert page.evaluate("octavo.selected.seq") == seq
    assert f"held by {len(owners)} tables" in page.text_content("#tip")


def test_the_tip_tells_all_about_a_block(running: Served, open_page: Any) -> None:
    page = open_page(running.url + "/blocks")
    wait(page, "map && map.sequences.size === 6")
    block, owner = page.evaluate(
        "(() => { const s = octavo.player.map.sequences.values().next().value; return [s.tables[0][1], s.id]; })()"
    )
    x, y = page.evaluate(f"octavo.grid.cornerOf({block})")
    page.hover("#grid", position={"x": x + 4, "y": y + 4})
    page.wait_for_selector("#tip .tokens")
    tip = page.text_content("#tip")
    assert tip.startswith(f"Block {block}") and f"seq {owner}[1]" in tip and "16 of 16 slots" in tip
    assert "content#" in tip and "= block" in tip and "last read" in tip
    # Byte tokens, one before the text: the second block begins at its character 15.
    assert page.text_content("#tip .tokens") == "Once upon a time there was a reader number "[15:31]


def test_the_keyboard_is_enough(running: Served, open_page: Any) -> None:
    page = open_page(running.url + "/blocks")
    wait(page, "map && map.sequences.size === 6")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#grid")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    assert page.evaluate("octavo.cursor") == 1
    assert page.text_content("#spoken").startswith("Block 1: state")
    page.keyboard.press("Enter")
    assert page.evaluate("octavo.selected.seq") in page.evaluate("octavo.player.map.ownersOf(1).map((o) => o.seq)")
    page.keyboard.press("Escape")
    page.keyboard.press("/")
    page.keyboard.type("tale-2")
    assert page.locator("#sequences li").count() == 2 and page.text_content("#seq-count") == "2 of 6"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    chosen = page.locator("#sequences li[aria-selected=true]")
    assert chosen.count() == 1 and "tale-2" in chosen.text_content()
    assert page.get_attribute("#sequences", "aria-activedescendant") == chosen.get_attribute("id")
    page.keyboard.press("m")
    assert page.get_attribute("[data-mode=sequence]", "aria-checked") == "true"
    page.keyboard.press("Space")
    wait_text(page, "#status", "paused")
    page.keyboard.press("l")
    wait_text(page, "#status", "live")
    page.keyboard.press("?")
    assert page.is_visible("#help")
    page.keyboard.press("Escape")
    assert not page.is_visible("#help")
    # Whatever can be reached shows where it is.
    page.focus("#smaller")
    page.keyboard.press("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid" and page.evaluate("document.activeElement.id") == "larger"


def test_time_can_be_held_and_gone_back_in(running: Served, open_page: Any) -> None:
    page = open_page(running.url + "/blocks")
    wait(page, "map && map.sequences.size === 6 && p.history.length > 6")
    page.click("#play")
    held = page.evaluate("[octavo.player.position, octavo.player.map.step]")
    wait(page, f"p.history.last > {held[0]} + 3")
    assert page.evaluate("[octavo.player.position, octavo.player.map.step]") == held
    page.click("#back")
    page.click("#back")
    assert page.evaluate("octavo.player.position") == held[0] - 2
    assert page.evaluate("octavo.player.map.step === octavo.player.history.at(octavo.player.position).step")
    used = page.evaluate("octavo.player.history.at(octavo.player.position).stats[0]")
    wait_text(page, "#count-blocks", str(used))
    page.focus("#time")
    page.keyboard.press("Home")
    assert page.evaluate("octavo.player.position") == 0 and "step" in page.get_attribute("#time", "aria-valuetext")
    page.click("#live")
    wait(page, "p.following && p.position === p.history.last")
    assert page.get_attribute("#live", "aria-pressed") == "true"


def test_the_key_is_asked_for_kept_in_the_tab_and_sent_in_a_header(open_page: Any) -> None:
    engine = scripted_engine(script=never_ends)
    with Served(engine, ServerSettings(api_keys=(KEY,))) as served:
        page = open_page(served.url + "/blocks", expected="401")
        page.wait_for_selector("#key-dialog[open]")
        assert page.evaluate("octavo.player.history.length") == 0
        page.keyboard.press("Escape")
        wait_text(page, "#status", "needs a key")
        page.click("#key-button")
        page.fill("#key", "not-the-key")
        page.click("#key-ok")
        page.wait_for_function("document.getElementById('key-error').textContent === 'That key was refused.'")
        page.fill("#key", KEY)
        addresses = []
        page.on("request", lambda request: addresses.append(request.url))
        page.click("#key-ok")
        wait(page, "map && p.history.length > 0")
        assert page.text_content("#status") == "live"
        assert addresses and not any(KEY in address for address in addresses)
        assert page.evaluate("localStorage.length") == 0 and page.evaluate("sessionStorage['octavo-key']") == KEY
        assert KEY not in page.content()
        page.reload()
        wait(page, "map && p.history.length > 0")
        page.close()


def test_twenty_thousand_blocks_draw_only_what_changes(open_page: Any) -> None:
    engine = scripted_engine(
        num_blocks=20_000,
        script=never_ends,
        max_model_len=16_384,
        max_num_batched_tokens=1 << 18,
        seconds=0.01,
        check=False,
    )
    with Served(engine, ServerSettings()) as served:
        start(served, 24, n=1, max_tokens=600, prompt="#" + " word" * 2400)
        page = open_page(served.url + "/blocks")
        wait(page, "map && map.sequences.size === 24 && map.stat('used') > 17000")
        page.evaluate("octavo.grid.draw()")
        before = page.evaluate("[octavo.grid.drawn, octavo.player.history.length]")
        wait(page, f"p.history.length > {before[1]} + 8")
        after = page.evaluate("[octavo.grid.drawn, octavo.player.history.length]")
        per_frame = (after[0] - before[0]) / (after[1] - before[1])
        assert per_frame < 500, "a frame of decoding touches two blocks a sequence, not all 20,000"
        assert page.evaluate("octavo.grid.columns * octavo.grid.rows") >= 20_000
        size = page.evaluate(
            "(() => { const b = octavo.grid.canvas.getBoundingClientRect(); return [b.width, b.height]; })()"
        )
        assert size[0] <= 1280 and size[1] < 900, "the whole pool is seen at once"
        page.click("#sequences li:nth-child(1)")
        assert page.evaluate("octavo.grid.selected.size") > 700
        page.close()


def test_a_phone_shows_it_without_scrolling_sideways(running: Served, open_page: Any) -> None:
    page = open_page(
        running.url + "/blocks",
        viewport={"width": 390, "height": 844},
        is_mobile=True,
        has_touch=True,
        device_scale_factor=2,
    )
    wait(page, "map && map.sequences.size === 6")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    block = page.evaluate("octavo.player.map.sequences.values().next().value.tables[0][0]")
    x, y = page.evaluate(f"octavo.grid.cornerOf({block})")
    page.tap("#grid", position={"x": x + 4, "y": y + 4})
    assert page.text_content("#tip").startswith(f"Block {block}") and page.evaluate("octavo.selected.seq") >= 0
    tip = page.locator("#tip").bounding_box()
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 390
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for button in ("#play", "#live", "#time"):
        box = page.locator(button).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["y"] + box["height"] <= 844


def test_colours_follow_the_system_and_the_button(running: Served, open_page: Any) -> None:
    def paper(page: Any) -> str:
        return page.evaluate("getComputedStyle(document.querySelector('.map')).backgroundColor")

    page = open_page(running.url + "/blocks", color_scheme="dark")
    wait(page, "map")
    assert paper(page) == "rgb(23, 27, 32)"
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "light" and paper(page) == "rgb(255, 255, 255)"
    page.reload()
    wait(page, "map")
    assert paper(page) == "rgb(255, 255, 255)", "the choice is kept"


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_motion_is_left_out_where_it_is_not_wanted(motion: str, recorded: Path, open_page: Any) -> None:
    page = open_page(recorded.as_uri(), reduced_motion=motion)
    wait(page, "map && map.sequences.size > 2")
    moving = page.evaluate(
        """async () => { octavo.select([...octavo.player.map.sequences.keys()][1]);
        const frame = () => new Promise(requestAnimationFrame);
        await frame(); await frame(); await frame();
        return octavo.overlay.planned; }"""
    )
    assert moving is (motion == "no-preference")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("run") / "demo.jsonl"
    record_demo(path)
    return recorded_run(path, text_of=demo_text)


@pytest.fixture(scope="module")
def recorded(run: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "demo.html"
    path.write_text(page_with_run(run), encoding="utf-8")
    return path


DUMP = """(position) => { octavo.player.seek(position);
const m = octavo.player.map, all = [...Array(m.numBlocks).keys()];
return { states: String.fromCharCode(...m.states), fills: [...m.fills], counts: all.map((b) => m.ownersOf(b).length),
ages: all.map((b) => m.age(b)), parents: all.map((b) => m.keyOf(b)?.parentBlock ?? null),
tables: Object.fromEntries([...m.sequences.values()].map((s) => [s.id, s.tables])), waiting: m.waiting }; }"""


def test_every_moment_of_a_recording_is_what_the_feed_says(run: dict[str, Any], recorded: Path, open_page: Any) -> None:
    """The reader in the page against the reader in Python: forwards, backwards, across the places it starts from."""
    page = open_page(recorded.as_uri())
    wait(page, "map")
    assert page.text_content("#status") == "recorded run" and not page.is_visible("#live")
    assert page.evaluate("octavo.player.map.stat('used')") == max(f["stats"][0] for f in run["frames"])
    expected: dict[int, Any] = {}
    frames = json.loads(json.dumps(run["frames"]))
    wanted = [0, 1, 63, 64, 65, 200, len(frames) - 1]
    for position, frame in enumerate(frames):
        if position == 0:
            block_map = BlockMap(frame)
        else:
            block_map.apply(frame)
        if position in wanted:
            blocks = range(block_map.num_blocks)
            expected[position] = {
                "states": "".join(block_map.states),
                "fills": [block_map.fill(b) for b in blocks],
                "counts": [block_map.count(b) for b in blocks],
                "ages": [block_map.age(b) for b in blocks],
                "parents": [block_map.parent(b) for b in blocks],
                "tables": {str(s.seq_id): [list(t) for t in s.tables] for s in block_map.sequences.values()},
                "waiting": block_map.waiting,
            }
    for position in [*wanted, *reversed(wanted)]:
        assert page.evaluate(DUMP, position) == expected[position], f"frame {position}"


def test_a_recorded_run_plays_and_shows_its_words(run: dict[str, Any], recorded: Path, open_page: Any) -> None:
    page = open_page(recorded.as_uri())
    wait(page, "map && map.sequences.size")
    block = page.evaluate("octavo.player.map.sequences.values().next().value.tables[0][0]")
    x, y = page.evaluate(f"octavo.grid.cornerOf({block})")
    page.hover("#grid", position={"x": x + 4, "y": y + 4})
    words = page.text_content("#tip .tokens").split()
    assert len(words) == 16 and set(words) <= set("".join(demo_text(t) for t in range(200)).split())
    page.evaluate("octavo.player.seek(10)")
    page.click("#play")
    wait(page, "p.position > 14 && p.playing")
    page.keyboard.press("Space")
    wait(page, "!p.playing")
    box = page.locator("#charts canvas").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    middle = (len(run["frames"]) - 1) / 2
    assert abs(page.evaluate("octavo.player.position") - middle) < 5, "a click on a chart goes to that moment"
    page.click("#log li.copy >> nth=0")
    assert page.evaluate("octavo.cursor") >= 0


def test_history_is_bounded_and_its_oldest_moment_can_still_be_shown(
    run: dict[str, Any], recorded: Path, open_page: Any
) -> None:
    page = open_page(recorded.as_uri())
    wait(page, "map")
    first, length, same = page.evaluate(
        """() => { const whole = octavo.player.history, short = new whole.constructor({ maxFrames: 150 });
        for (let i = 0; i <= whole.last; i++) short.push(whole.at(i), 1000);
        const states = (map) => String.fromCharCode(...map.states);
        const same = [short.first, short.first + 7, short.last].map(
            (p) => states(short.seek(p)) === states(whole.seek(p)));
        return [short.first, short.length, same]; }"""
    )
    assert first % 64 == 0 and first > 0 and length <= 150 and same == [True] * 3
    assert first + length == len(run["frames"])


def test_a_lost_connection_is_told_and_found_again(open_page: Any) -> None:
    with Served(scripted_engine(script=never_ends), ServerSettings(drain_seconds=0.0)) as served:
        page = open_page(served.url + "/blocks", expected="net::ERR_")
        wait(page, "map && p.history.length > 0")
        page.context.set_offline(True)
        for connection in list(served.server.server_state.connections):
            served.loop.call_soon_threadsafe(connection.transport.abort)
        wait_text(page, "#status", "connection lost, trying again")
        page.context.set_offline(False)
        wait_text(page, "#status", "live")
        wait(page, "p.history.length >= 2")  # its first frame comes behind the word
        page.close()


def test_while_the_model_loads_the_page_says_so_and_begins_by_itself(open_page: Any) -> None:
    with Served(None, ServerSettings(drain_seconds=0.0)) as served:
        served.app.state.server.progress = ("weights", 3, 10)
        page = open_page(served.url + "/blocks", expected="503")
        wait_text(page, "#empty", "the model is still loading (weights: 30 %)")
        wait_text(page, "#status", "waiting for the engine")
        engine = AsyncEngine(scripted_engine())
        engine.start()
        served.loop.call_soon_threadsafe(served.app.state.server.attach, engine)
        wait(page, "map && p.history.length > 0")
        assert page.text_content("#model") == "scripted" and page.is_hidden("#empty")
        page.close()


def test_without_leave_no_word_is_in_the_file(tmp_path: Path) -> None:
    record_demo(tmp_path / "demo.jsonl", requests=3)
    silent = recorded_run(tmp_path / "demo.jsonl")
    assert silent["tokens"] is None and len(silent["frames"]) > 10
