"""A headless Chromium for tests and screenshots: $OCTAVO_CHROMIUM, or the one of the system."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium_path() -> str | None:
    """The executable, or None."""
    asked = os.environ.get("OCTAVO_CHROMIUM")
    if asked:
        return asked
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    return next((path for path in found if path), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A Playwright browser; every page gets a profile of its own, nothing is kept."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()
