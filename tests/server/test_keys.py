"""API keys: who comes in, what is compared, what is shared, and what is never written anywhere."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.server import security
from octavo.server.security import KeyRing
from octavo.server.settings import ServerSettings

KEYS = ("first-secret-key", "second-secret-key")
OPEN = {"/health", "/ready"}


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests.jsonl"


@pytest.fixture(scope="module")
def served(log_file: Path) -> Iterator[Served]:
    settings = ServerSettings(api_keys=KEYS, request_log=str(log_file), access_log=True)
    with Served(scripted_engine(), settings) as server:
        yield server


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def complete(served: Served, key: str, **given: Any) -> dict[str, Any]:
    body = {"prompt": "a prompt of more than two whole blocks of the pool, so it is kept", "max_tokens": 2, **given}
    answer = httpx.post(served.url + "/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_every_route_but_health_checks_needs_a_key(served: Served) -> None:
    document = httpx.get(served.url + "/openapi.json").json()
    tried = 0
    for path, operations in document["paths"].items():
        for method in operations:
            if path.startswith("/blocks"):
                continue  # its page is open, its data is not: see the tests of the block map
            url = served.url + path.replace("{model}", "scripted")
            for headers in ({}, bearer("wrong-secret-key"), {"authorization": f"Basic {KEYS[0]}"}):
                answer = httpx.request(method, url, headers=headers)
                assert (answer.status_code == 401) == (path not in OPEN), (path, answer.text)
                tried += 1
            if path not in OPEN:
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert answer.headers["www-authenticate"] == "Bearer"
    assert tried >= 30


def test_each_of_several_keys_comes_in(served: Served) -> None:
    for key in KEYS:
        assert httpx.get(served.url + "/v1/models", headers=bearer(key)).status_code == 200


def test_all_keys_are_compared_each_time_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def noting(a: bytes, b: bytes) -> bool:
        assert len(a) == len(b) == 32
        compared.append(b)
        return compare(a, b)

    ring = KeyRing([*KEYS, "third-secret-key"])
    monkeypatch.setattr(security.hmac, "compare_digest", noting)
    found = [ring.find(key) for key in (*KEYS, "third-secret-key")]
    assert [caller.key for caller in found if caller] == [1, 2, 3]
    assert ring.find("nobody") is None
    assert ring.find("\ud800") is None
    assert len(compared) == 5 * 3


def test_tenants_do_not_share_prefixes(served: Served) -> None:
    def cached(answer: dict[str, Any]) -> int:
        count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return count

    assert cached(complete(served, KEYS[0])) == 0
    assert cached(complete(served, KEYS[0])) >= 32
    assert cached(complete(served, KEYS[1])) == 0, "one key can probe another's prompts"
    assert cached(complete(served, KEYS[1])) >= 32
    assert cached(complete(served, KEYS[0], cache_salt="x")) == 0
    assert cached(complete(served, KEYS[1], cache_salt="x")) == 0, "a known salt must not open another key's cache"


def test_salts_are_not_guessable(served: Served) -> None:
    ring, other = KeyRing(KEYS), KeyRing(KEYS)
    salts = {ring.find(k).salt for k in KEYS} | {other.find(k).salt for k in KEYS}  # type: ignore[union-attr]
    assert len(salts) == 4
    assert KeyRing([]).find(KEYS[0]) is None


def test_secrets_and_texts_are_in_no_log(served: Served, log_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="octavo"):
        complete(served, KEYS[0], prompt="something private", user="somebody", cache_salt="my-salt")
        httpx.get(served.url + "/v1/models", headers=bearer("wrong-secret-key"))
        served.wait_idle()
    written = caplog.text + log_file.read_text() + repr(served.settings)
    assert '"route": "/v1/completions"' in written
    assert "POST /v1/completions" in written
    for secret in (*KEYS, "wrong-secret", "something private", "somebody", "my-salt"):
        assert secret not in written
    metrics = httpx.get(served.url + "/metrics", headers=bearer(KEYS[0])).text
    assert "secret" not in metrics


def test_cors_is_off_unless_told(served: Served) -> None:
    asked = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    answer = httpx.options(served.url + "/v1/completions", headers=asked)
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in answer.headers
    with Served(scripted_engine(), ServerSettings(cors_origins=("http://good.example",))) as other:
        good = httpx.options(other.url + "/v1/completions", headers={**asked, "origin": "http://good.example"})
        assert good.headers["access-control-allow-origin"] == "http://good.example"
        assert "access-control-allow-origin" not in httpx.options(other.url + "/v1/completions", headers=asked).headers
        body = {"prompt": "hi", "max_tokens": 2, "stream": True}
        streamed = httpx.post(other.url + "/v1/completions", json=body, headers={"origin": "http://good.example"})
        assert streamed.headers["access-control-allow-origin"] == "http://good.example"
        assert streamed.text.endswith("data: [DONE]\n\n")
