"""The block map's page: its files, and the same page in one file that carries a recorded run. No FastAPI here.

The scripts are ES modules in `static/`, in an order in which each imports only earlier ones; the single file holds them
joined together, for a page opened from a disk can load no modules. Top-level names are therefore unique over all of
them. The policies allow nothing from anywhere else.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import Any

MODULES = ("map", "player", "text", "theme", "grid", "overlay", "charts", "panels", "stream", "main")
TYPES = {"html": "text/html; charset=utf-8", "css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8"}
FILES = ("index.html", "style.css", *(f"{name}.js" for name in MODULES))
#: For the page of a server: its own files and its own data.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


@cache
def static_file(name: str) -> tuple[bytes, str] | None:
    """(content, media type) of a file of the page; None when there is no such file."""
    if name not in FILES:
        return None
    content = resources.files("octavo.server").joinpath("static", name).read_bytes()
    return content, TYPES[name.rsplit(".", 1)[1]]


def page_with_run(run: dict[str, Any]) -> str:
    """One HTML file with everything in it; `run` is what `octavo.inspect.recorded_run` gives."""
    page, style, script = _text("index.html"), _text("style.css"), _joined_modules()
    packed = gzip.compress(json.dumps(run, separators=(",", ":")).encode(), 6, mtime=0)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    data = f'<script type="application/json" id="octavo-run">{base64.b64encode(packed).decode()}</script>'
    page = _replaced(page, '<meta charset="utf-8">', f'<meta charset="utf-8">\n{head}')
    page = _replaced(page, '<link rel="stylesheet" href="/blocks/static/style.css">', f"<style>{style}</style>")
    page = _replaced(page, '<script type="module" src="/blocks/static/main.js"></script>\n', "")
    return _replaced(page, "</body>", f"{data}\n<script>{script}</script>\n</body>")


def _text(name: str) -> str:
    file = static_file(name)
    assert file is not None
    return file[0].decode()


def _joined_modules() -> str:
    parts = []
    for name in MODULES:
        text = re.sub(r"^import [^;]*;\n", "", _text(f"{name}.js"), flags=re.MULTILINE)
        parts.append(re.sub(r"^export ", "", text, flags=re.MULTILINE))
    return '"use strict";\n{\n' + "\n".join(parts) + "}\n"


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(sha256(content.encode()).digest()).decode()}"


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"the page has changed: {old} is expected once"
    return text.replace(old, new)
