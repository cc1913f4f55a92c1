"""Remake the pictures of docs/blocks.md: the block map in a headless Chromium, in front of a real engine.

    PYTHONPATH=tests python tools/screenshots.py [--out docs/img] [--model gemma-3-270m]

The pictures of the live map come from the model given, those of a recorded run and of 20,000 blocks from scripted
engines, so they look the same each time but for what a model says and how fast the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

from helpers.chromium import chromium
from helpers.http_server import Served
from helpers.serving import printable, scripted_engine
from octavo.cli.view_demo import demo_text, record_demo
from octavo.config import make_config
from octavo.engine import Engine
from octavo.inspect.recorded_run import recorded_run
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.page import page_with_run
from octavo.server.settings import ServerSettings
from octavo.text.prompts import Prompt

SYSTEM = (
    "You are the librarian of a small town. You answer every question about books, pages and shelves in a friendly "
    "way, you never invent a title, and you keep your answers short enough to be read aloud. "
)
QUESTIONS = (
    "Why does a library lend single pages instead of whole shelves?",
    "What is an octavo?",
    "How do two readers share one page until one of them writes on it?",
    "Tell me a story about a book that was folded three times.",
    "Which shelf stands empty, and for whom is it reserved?",
    "What happens to a page that nobody holds any more?",
)
SELECT = "octavo.select([...octavo.player.map.sequences.keys()].sort((a, b) => a - b)[{}])"


def submit(served: Served, work: list[tuple[str, Any]], **more: Any) -> None:
    """Start requests and leave them running."""

    async def all_of_them() -> None:
        assert served.engine is not None
        for number, (text, params) in enumerate(work):
            await served.engine.submit(Prompt(text), params, request_id=f"ask-{number}", stream=False, **more)

    asyncio.run_coroutine_threadsafe(all_of_them(), served.loop).result(120)


class Camera:
    """Opens pages and takes pictures of them."""

    def __init__(self, browser: Any, out: Path) -> None:
        self.browser, self.out = browser, out

    def open(self, url: str, *, size: tuple[int, int] = (1440, 1000), **options: Any) -> Any:
        context = self.browser.new_context(viewport={"width": size[0], "height": size[1]}, **options)
        page = context.new_page()
        page.set_default_timeout(180_000)
        page.goto(url)
        page.wait_for_function("() => octavo.player.map")
        return page

    def take(self, page: Any, name: str) -> None:
        page.wait_for_timeout(1200)  # the table has lit up, charts have drawn
        page.screenshot(path=str(self.out / f"block-map-{name}.png"))
        print(f"{self.out}/block-map-{name}.png")
        page.context.close()


def hover(page: Any, block: str) -> None:
    """Point at a block (a JavaScript expression), so that its tip is in the picture."""
    x, y = page.evaluate(f"octavo.grid.cornerOf({block})")
    page.hover("#grid", position={"x": x + 6, "y": y + 6})


def live(camera: Camera, model: str) -> None:
    """The map of a model at work: by state with a table lit up, by sequence in the dark, on a phone."""
    settings = {"num_blocks": 480, "max_model_len": 1024, "max_num_seqs": 24}
    engine = Engine.build(make_config(model=model, **settings))
    with Served(engine, ServerSettings(show_tokens=True, drain_seconds=0.0)) as served:
        work: list[tuple[str, Any]] = []
        for number, question in enumerate(QUESTIONS):
            params: Any = SamplingParams(
                n=1 + number % 3, max_tokens=220, temperature=1.0, seed=number, ignore_eos=True
            )
            if number == 3:
                params = BeamSearchParams(beam_width=3, max_tokens=200, ignore_eos=True)
            work.append((SYSTEM + question, params))
        submit(served, work)
        page = camera.open(f"{served.url}/blocks", color_scheme="light")
        page.wait_for_function("() => octavo.player.map.sequences.size >= 10 && octavo.player.map.stat('used') > 300")
        page.evaluate(SELECT.format(2))
        hover(page, "[...octavo.grid.selected.keys()][1]")
        page.wait_for_selector("#tip .tokens")
        camera.take(page, "live")
        page = camera.open(f"{served.url}/blocks", color_scheme="dark")
        page.click("[data-mode=sequence]")
        page.wait_for_function("() => octavo.player.history.length > 12")
        camera.take(page, "sequences-dark")
        page = camera.open(
            f"{served.url}/blocks", size=(390, 844), color_scheme="dark", is_mobile=True, has_touch=True,
            device_scale_factor=2,
        )  # fmt: skip
        page.wait_for_function("() => octavo.player.history.length > 8")
        page.evaluate(SELECT.format(2))
        camera.take(page, "phone")


def many(camera: Camera) -> None:
    """20,000 blocks."""
    engine = scripted_engine(
        num_blocks=20_000, script=printable, max_model_len=16_384, max_num_batched_tokens=8192, max_num_seqs=64,
        seconds=0.02, check=False,
    )  # fmt: skip
    rng = random.Random(4)
    with Served(engine, ServerSettings(drain_seconds=0.0)) as served:
        work: list[tuple[str, Any]] = []
        for number in range(40):
            text = SYSTEM * (rng.randrange(4, 30)) + f"{number} " + "".join(rng.choice("abcde ") for _ in range(3000))
            work.append((text, SamplingParams(n=1 + number % 2, max_tokens=rng.randrange(200, 900), ignore_eos=True)))
        submit(served, work)
        page = camera.open(f"{served.url}/blocks", color_scheme="light")
        page.wait_for_function("() => octavo.player.map.sequences.size > 40 && octavo.player.history.length > 15")
        page.evaluate(SELECT.format(30))
        camera.take(page, "20000")


def recorded(camera: Camera) -> None:
    """A run in one file, in the middle of its time."""
    with tempfile.TemporaryDirectory() as folder:
        run, page_file = Path(folder, "run.jsonl"), Path(folder, "run.html")
        record_demo(run)
        page_file.write_text(page_with_run(recorded_run(run, text_of=demo_text)), encoding="utf-8")
        page = camera.open(page_file.as_uri(), color_scheme="light")
        page.evaluate(SELECT.format(4))
        camera.take(page, "recorded")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/img"))
    parser.add_argument("--model", default="gemma-3-270m")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        camera = Camera(browser, args.out)
        recorded(camera)
        many(camera)
        live(camera, args.model)


if __name__ == "__main__":
    main()
