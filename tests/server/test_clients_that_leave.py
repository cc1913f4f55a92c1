"""Clients that go, stall, trickle or talk nonsense: their requests leave the engine, others never notice."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.server.settings import ServerSettings


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServerSettings(stall_seconds=0.6, receive_seconds=0.6, max_header_bytes=4000)
    with Served(scripted_engine(seconds=0.002, max_model_len=2000, num_blocks=600), settings, buffer=8) as server:
        # Small buffers in the system (accepted sockets inherit this): a reader that stops is noticed soon.
        server.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
        yield server


@pytest.fixture(autouse=True)
def _nothing_is_left(served: Served) -> Iterator[None]:
    yield
    served.wait_idle()
    good = httpx.post(served.url + "/v1/completions", json={"prompt": "hi", "max_tokens": 3})
    assert good.status_code == 200


def connect(served: Served, body: dict[str, Any] | None = None, path: str = "/v1/completions") -> socket.socket:
    """A connection with a request sent on it."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=10)
    if body is not None:
        connection.sendall(request_bytes(body, path))
    return connection


def request_bytes(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def until(condition: Any, what: str, seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.005)


def aborted(served: Served) -> int:
    count: int = served.ask(lambda engine: engine.stats().aborted)
    return count


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request(served: Served, stream: bool) -> None:
    before = aborted(served)
    body = {"prompt": "tell me", "max_tokens": 1900, "stream": stream, "n": 2}
    connection = connect(served, body)
    until(lambda: served.blocks_in_use() > 0, "the request never ran")
    if stream:
        assert b"200 OK" in connection.recv(1000)
    connection.close()
    served.wait_idle()
    assert aborted(served) == before + 1


def test_a_client_that_leaves_while_waiting_aborts_its_request(served: Served) -> None:
    assert served.engine is not None
    before = aborted(served)
    running = [connect(served, {"prompt": f"{i}", "max_tokens": 250, "n": 32, "stream": True}) for i in range(2)]
    until(lambda: served.engine.num_waiting > 0, "nothing waits")  # type: ignore[union-attr]
    until(lambda: served.engine.num_live == 2, "both were taken in")  # type: ignore[union-attr]
    running[1].close()
    until(lambda: served.engine.num_live == 1, "the waiting one stays")  # type: ignore[union-attr]
    running[0].close()
    served.wait_idle()
    assert aborted(served) == before + 2


def test_two_hundred_clients_cut_at_random_points(served: Served) -> None:
    chance = random.Random(5)
    for round_ in range(10):
        connections = []
        for number in range(20):
            body = {"prompt": f"{round_} {number}", "max_tokens": 200, "stream": chance.random() < 0.5}
            data = request_bytes(body)
            connection = connect(served)
            if chance.random() < 0.2:
                data = data[: chance.randrange(1, len(data))]
            connection.sendall(data)
            connections.append(connection)
        for connection in chance.sample(connections, len(connections)):
            if chance.random() < 0.5:
                connection.settimeout(0.02)
                with contextlib.suppress(TimeoutError):
                    connection.recv(chance.randrange(1, 2000))
            if chance.random() < 0.3:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    served.wait_idle()


def test_a_slow_reader_holds_up_nobody_and_loses_its_request(served: Served) -> None:
    before = aborted(served)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    slow.connect(("127.0.0.1", served.port))
    # Log-probabilities make the stream large enough to fill every buffer on the way.
    body = {"prompt": "a", "max_tokens": 1900, "n": 4, "stream": True, "logprobs": 4, "return_token_ids": True}
    slow.sendall(request_bytes(body))
    until(lambda: served.blocks_in_use() > 0, "the request never ran")
    quick = httpx.post(served.url + "/v1/completions", json={"prompt": "hi", "max_tokens": 50})
    assert quick.json()["usage"]["completion_tokens"] == 50
    until(lambda: aborted(served) == before + 1, "the stalled reader keeps its request")
    served.wait_idle()
    slow.close()


def test_a_reader_with_pauses_gets_the_whole_text(served: Served) -> None:
    body = {"prompt": "pauses", "max_tokens": 300, "seed": 1}
    whole = httpx.post(served.url + "/v1/completions", json=body).json()["choices"][0]["text"]
    connection = connect(served, {**body, "stream": True})
    received = b""
    while b"[DONE]" not in received:
        received += connection.recv(3000)
        time.sleep(0.01)
    connection.close()
    pieces = [json.loads(line[6:]) for line in received.splitlines() if line.startswith(b"data: {")]
    assert "".join(p["choices"][0]["text"] for p in pieces) == whole


def test_half_open_and_silent_connections_are_closed(served: Served) -> None:
    silent = connect(served)
    trickle = connect(served)
    trickle.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-")
    body = connect(served)
    body.sendall(request_bytes({"prompt": "x" * 100})[:-20])
    for connection, status in ((silent, b"408"), (trickle, b"408"), (body, b"408")):
        answer = b""
        while data := connection.recv(1000):
            answer += data
        assert answer[9:12] == status, answer
        connection.close()


def test_headers_without_end_are_refused(served: Served) -> None:
    connection = connect(served)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    answer = b""
    try:
        for number in range(5000):
            connection.sendall(b"X-%d: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n" % number)
        answer = connection.recv(1000)
    except (ConnectionResetError, BrokenPipeError):
        pass
    assert answer == b"" or b"431" in answer
    connection.close()
    long = httpx.get(served.url + "/health", headers={"x-long": "a" * 5000})
    assert long.status_code == 431


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 100, b"GET\r\n\r\n", b"FOO /health HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    ],
)  # fmt: skip
def test_bytes_that_are_no_request(served: Served, data: bytes) -> None:
    connection = connect(served)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(5)
    try:
        answer = connection.recv(200)
    except ConnectionResetError:
        answer = b""
    assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
    connection.close()


def test_requests_on_one_connection_are_answered_in_turn(served: Served) -> None:
    with httpx.Client(base_url=served.url) as client:
        for number in range(5):
            body = {"prompt": f"{number}", "max_tokens": 2, "stream": number % 2 == 0}
            assert client.post("/v1/completions", json=body).status_code == 200
    connection = connect(served)
    one = request_bytes({"prompt": "a", "max_tokens": 2})
    connection.sendall(one + one + one)
    received = b""
    while received.count(b'"usage"') < 3:
        data = connection.recv(4000)
        assert data, received
        received += data
    assert received.count(b"HTTP/1.1 200 OK") == 3
    connection.close()
