"""Asking a running server for JSON, for commands that look at it. Errors say what to do about them."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from octavo.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "OCTAVO_API_KEY"
TIMEOUT_S = 10.0


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error: it would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class ServerUnreachable(ConfigError):
    """The server does not answer, or not with what was asked for."""


def add_key_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--api-key", metavar="KEY", help=f"of the server (or {KEY_VARIABLE} in the environment)")


def server_url(text: str | None) -> str:
    """`localhost:8000`, `http://host` -> a base URL without a path. Raises ConfigError."""
    url = text or DEFAULT_URL
    if "://" not in url:
        url = f"http://{url}"
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"{text!r} is no address of a server; write http://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/blocks')}"


def _opener(base: str) -> OpenerDirector:
    """No redirects, and no proxy for this machine's own addresses."""
    own = (urlsplit(base).hostname or "") in ("localhost", "127.0.0.1", "::1")
    return build_opener(_NoRedirect, *([ProxyHandler({})] if own else []))


def fetch_json(base: str, path: str, api_key: str | None = None) -> Any:
    """GET `base + path`. Raises ServerUnreachable with the remedy, ConfigError for a key that is refused."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    request = Request(base + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with _opener(base).open(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())
    except HTTPError as error:
        error.close()
        if error.code in (401, 403):
            what = "refuses this API key" if key else "asks for an API key"
            raise ConfigError(f"{base} {what}; give --api-key KEY or set {KEY_VARIABLE}") from error
        if error.code == 404:
            raise ServerUnreachable(
                f"{base}{path}: not found; the server was started without its block map (--no-blocks), or is no Octavo"
            ) from error
        raise ServerUnreachable(f"{base}{path}: the server answers {error.code} {error.reason}") from error
    except json.JSONDecodeError as error:
        raise ServerUnreachable(f"{base}{path}: the answer is no JSON; is it an Octavo server?") from error
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise ServerUnreachable(
            f"{base} does not answer ({reason}); start one with `octavo serve`, or name another"
        ) from error
