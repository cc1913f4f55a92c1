"""Chaos: a real server process, and clients that do what clients must not do. `make chaos`, or

    python tools/chaos.py [--model NAME] [--scale X] [--only WORD] [octavo serve options]

Each attack is repeated; an attempt survives when the server gives it a clear end (a status that fits, an error event,
or a closed connection where no HTTP was spoken). After every attack a good request must work, nothing may run or wait,
and every block must be free or cached, as before. Prints a table of counts; exit code 1 when anything failed.

The server is `octavo serve`'s own code in a child process; the one thing added is a route that makes the engine fail.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SETTINGS = {"receive_seconds": 2.0, "stall_seconds": 2.0, "drain_seconds": 5.0, "max_header_bytes": 8192}
JSON_HEAD = "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize", "/detokenize")
CLEAR = {200, 400, 404, 405, 408, 413, 429, 431, 503}


@dataclass
class Count:
    """Of one attack. first: what happened to the first that did not survive."""

    name: str
    tried: int = 0
    survived: int = 0
    recovered: bool = False
    first: str = ""

    def note(self, good: bool, what: object = "") -> None:
        self.tried += 1
        self.survived += good
        if not good and not self.first:
            self.first = str(what)[:200]


# -- the server ------------------------------------------------------------------------------------------------------


def child(port: int, engine: dict[str, Any]) -> int:
    """Serve, with the one extra route."""
    from starlette.responses import JSONResponse

    from octavo.server.run import Running, _build, _to_stderr
    from octavo.server.settings import load

    running = Running(load({**SETTINGS, **engine, "port": port, "chat_template": "plain"}), _to_stderr, _build)

    def break_engine(request: Any) -> JSONResponse:
        def break_it(engine: Any) -> None:
            def fail(plan: Any) -> Any:
                raise RuntimeError("chaos: an injected fault")

            engine.runner.execute = fail

        request.app.state.engine.call(break_it)
        return JSONResponse({"broken": True})

    running.app.router.add_route("/chaos/break", break_engine, methods=["POST"])
    return running.run()


class Server:
    """The child process."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._engine = engine
        self.start()

    def start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        command = [sys.executable, __file__, "--child", str(self.port), json.dumps(self._engine)]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        limit = time.monotonic() + 300
        while self.status("/ready") != 200:
            if self.process.poll() is not None or time.monotonic() > limit:
                raise SystemExit(f"the server did not start (exit code {self.process.poll()})")
            time.sleep(0.2)
        asyncio.run(self.good())

    def status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def metrics(self) -> dict[str, float]:
        """Gauges of now: running, waiting, free (free and cached blocks), all (blocks)."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()

        def total(pattern: str) -> float:
            return sum(float(n) for n in re.findall(pattern + r"[^\n]*\} ([0-9.e+]+)", text))

        return {
            "running": total("octavo:num_requests_running{"),
            "waiting": total("octavo:num_requests_waiting{"),
            "free": total('octavo:blocks{[^\n]*state="free"') + total('octavo:blocks{[^\n]*state="cached"'),
            "all": total("octavo:num_blocks{"),
        }

    async def good(self) -> bool:
        """A request as it should be."""
        status, body = await self.post("/v1/completions", completion(max_tokens=4))
        return status == 200 and b'"finish_reason":"length"' in body

    async def recovered(self) -> str:
        """ "" when everything is as before; else what is not."""
        if self.process.poll() is not None:
            return f"the server ended with {self.process.returncode}"
        if not await self.good():
            return "a good request fails"
        limit = time.monotonic() + 20
        while True:
            now = await asyncio.to_thread(self.metrics)
            if now["running"] == now["waiting"] == 0 and now["free"] == now["all"] > 0:
                return ""
            if time.monotonic() > limit:
                return f"left over: {now}"
            await asyncio.sleep(0.1)

    async def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = JSON_HEAD.format(path=path, length=len(data)).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n")
        return await self.raw(head.encode() + data)

    async def raw(self, data: bytes | Iterable[bytes], wait: float = 60) -> tuple[int, bytes]:
        """Send bytes, read to the end: (status, everything). Status 0: closed without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        received = b""
        try:
            for part in (data,) if isinstance(data, bytes) else data:
                writer.write(part)
                await writer.drain()
        except ConnectionError:
            pass
        try:
            async with asyncio.timeout(wait):
                while chunk := await reader.read(1 << 16):
                    received += chunk
        except (ConnectionError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                return -1, received
        finally:
            writer.close()
        return (int(received[9:12]) if received.startswith(b"HTTP/1.") else 0), received

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def completion(**more: Any) -> dict[str, Any]:
    return {"prompt": "Once upon a time", "max_tokens": 64, "temperature": 0, "ignore_eos": True, **more}


# -- attacks on a server that goes on ----------------------------------------------------------------------------------


async def cut_clients(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    """Connections closed at any byte of the request or of the answer, in order or with a reset."""

    async def one(number: int) -> None:
        data = json.dumps(completion(stream=number % 2 == 0, n=1, prompt=f"{number} things")).encode()
        data = JSON_HEAD.format(path="/v1/completions", length=len(data)).encode() + data
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(data[: chance.randrange(1, len(data))] if number % 5 == 0 else data)
        if number % 3:
            try:
                async with asyncio.timeout(chance.random() * 2):
                    for _ in range(chance.randrange(6)):
                        await reader.read(chance.randrange(1, 500))
            except TimeoutError:
                pass
        if number % 4 == 0:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.close()
        count.note(True)

    for begin in range(0, tries, 20):
        await asyncio.gather(*(one(n) for n in range(begin, min(tries, begin + 20))))


async def half_open(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    """Connections that say nothing, or stop in the middle; they must be closed, with 408 where HTTP was begun."""
    body = json.dumps(completion()).encode()
    whole = JSON_HEAD.format(path="/v1/completions", length=len(body)).encode() + body

    async def one(number: int) -> None:
        status, _ = await server.raw(whole[: 0 if number % 3 == 0 else chance.randrange(1, len(whole))], wait=30)
        count.note(status in (0, 408), status)

    await asyncio.gather(*(one(n) for n in range(tries)))


async def slow_readers(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    """Streams that nobody reads; others must go on meanwhile."""
    connections = []
    for number in range(tries):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        data = json.dumps(completion(prompt=f"{number}", stream=True, logprobs=20, max_tokens=200)).encode()
        connection.sendall(JSON_HEAD.format(path="/v1/completions", length=len(data)).encode() + data)
        connections.append(connection)
    for connection in connections:
        count.note(await server.good(), "a good request failed beside a slow reader")
        connection.close()


def malformed() -> list[bytes]:
    """Bodies that are no JSON object, or hold the wrong things."""
    good = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [1]}
    odd = [None, True, 0, -1, 1e308, "", "x" * 300, [], {}, [[]], [{}], {"a": {"b": []}}, [None], 2**70]
    bodies = [json.dumps({**good, name: value}).encode() for name in good for value in odd]
    fields = ("max_tokens", "temperature", "n", "stop", "logit_bias", "seed", "stream", "logprobs", "top_k", "priority")
    bodies += [json.dumps({"prompt": "x", name: value}).encode() for name in fields for value in odd]
    broken = [b"", b"{", b"}", b"[", b'"', b"nul", b"{}{}", b"\x00", b"{'a': 1}", b'{"prompt": "x",}', b"[" * 100]
    return bodies + broken


def invalid_text() -> list[bytes]:
    bad = [
        b"\xff",
        b"\xc3",
        b"\xed\xa0\x80",
        b"\xf8\x88\x80\x80\x80",
        b"\xc0\xaf",
        b"\\ud800",
        b"\\udc00\\ud800",
        b"\\u0000",
    ]
    return [b'{"prompt": "' + b + b'", "max_tokens": 2}' for b in bad] + [b"\xff\xfe{\x00}\x00", b"\xef\xbb\xbf{}"]


def deep() -> list[bytes]:
    lists = [b"[" * n + b"]" * n for n in (65, 1000, 100_000)]
    return lists + [b'{"prompt": "x", "a": ' + b'{"a": ' * n + b"1" + b"}" * n + b"}" for n in (65, 1000, 50_000)]


def hostile_schemas() -> list[bytes]:
    """Structures that are endless, huge, contradictory or dear to compile."""
    node: dict[str, Any] = {"type": "string"}
    for _ in range(30):
        node = {"type": "object", "properties": {"a": node, "b": node}} if len(json.dumps(node)) < 5000 else node
    asked: list[dict[str, Any]] = [
        {"json": {"$ref": "#"}},
        {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
        {"json": {"$ref": "file:///etc/passwd"}},
        {"json": {"$ref": "http://127.0.0.1:1/schema"}},
        {"json": {"enum": []}},
        {"json": {"enum": [f"{i:05d}" for i in range(6000)]}},
        {"json": node},
        {"json": {"type": "integer", "minimum": 5, "maximum": 4}},
        {"json": {"type": "string", "pattern": "(a*)*b"}},
        {"json": {"type": "string", "minLength": 10**9}},
        {"json": {"type": "array", "items": {}, "minItems": 10**6}},
        {"json": {"allOf": [{"type": "string"}, {"type": "object"}]}},
        {"json": {"patternProperties": {"(((((": {}}}},
        {"regex": "(" * 500},
        {"regex": "(a|a)*" * 200},
        {"regex": "a{1000}{1000}{1000}"},
        {"regex": "(?=x)y"},
        {"regex": "\\p{L}{500}" * 20},
        {"choice": []},
        {"choice": ["x" * 60_000]},
        {"choice": [str(i) for i in range(10_000)]},
        {"grammar": "start: start"},
        {"grammar": "start: start start | "},
        {"grammar": "nonsense"},
        {"grammar": 'start: "a" ~ 1..1000000'},
        {"json": {"type": "object"}, "regex": "x"},
        {},
    ]
    return [json.dumps(completion(structured_outputs=each, max_tokens=3, ignore_eos=False)).encode() for each in asked]


def hostile_fields() -> list[bytes]:
    asked: list[dict[str, Any]] = [
        {"n": 10**6}, {"n": 32, "max_tokens": 10**9}, {"best_of": 10**6}, {"logprobs": 10**6}, {"max_tokens": 2**63},
        {"prompt_token_ids": [2**40], "prompt": None}, {"prompt_token_ids": [0] * 200_000, "prompt": None},
        {"prompt": "x" * 1_000_000}, {"stop": ["x"] * 10_000}, {"stop": ["x" * 500_000]},
        {"logit_bias": {str(i): 1 for i in range(50_000)}}, {"allowed_token_ids": list(range(100_000))},
        {"bad_words": ["x" * 100_000]}, {"cache_salt": "x" * 100_000}, {"user": "x" * 100_000},
        {"deadline_ms": 1e-9}, {"deadline_ms": -1}, {"priority": 10**30}, {"seed": 10**40}, {"unknown": 1},
        {"prompt": ["x"] * 10_000}, {"prompt": [[1]] * 10_000}, {"stop_token_ids": [10**12]}, {"echo": True, "n": 32},
    ]  # fmt: skip
    return [json.dumps(completion(**each)).encode() for each in asked]


def bodies(make: Callable[[], list[bytes]], paths: tuple[str, ...]) -> Callable[..., Awaitable[None]]:
    """An attack that posts every body to every path."""

    async def attack(server: Server, count: Count, tries: int, chance: random.Random) -> None:
        for path in paths:
            for body in make():
                status, answer = await server.post(path, body)
                late = status == 503 and b'"code":"deadline"' in answer
                count.note(
                    late or (status in CLEAR and status != 503), f"{path} {body[:60]!r}: {status} {answer[-200:]!r}"
                )

    return attack


async def huge_bodies(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    """Announced and unannounced, of 64 MB and of no end."""
    for path in PATHS:
        status, _ = await server.raw(JSON_HEAD.format(path=path, length=1 << 40).encode())
        count.note(status == 413, status)
        head = JSON_HEAD.format(path=path, length=64 << 20).encode()
        status, _ = await server.raw([head, *[b"[" * (1 << 20)] * 64])
        count.note(status in (413, 0), status)  # 0: reset while we were still sending
        chunked = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        chunk = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        status, _ = await server.raw([chunked.encode(), *[chunk] * 64])
        count.note(status in (413, 0), status)


async def no_http(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    """Bytes of other protocols, of none, and headers without end."""
    fixed = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 32, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000, b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ]  # fmt: skip
    for data in fixed + [chance.randbytes(chance.randrange(1, 2000)) for _ in range(tries)]:
        status, _ = await server.raw(data, wait=20)
        count.note(status in CLEAR or status == 0, f"{data[:40]!r}: {status}")


# -- attacks that end a server -----------------------------------------------------------------------------------------


LONG = completion(max_tokens=400)


async def _streams(server: Server, number: int) -> list[asyncio.Task[tuple[int, bytes]]]:
    tasks = [
        asyncio.ensure_future(
            server.post("/v1/completions", completion(prompt=f"{i}", stream=i % 2 == 0, max_tokens=200))
        )
        for i in range(number)
    ]
    limit = time.monotonic() + 60
    while (await asyncio.to_thread(server.metrics))["running"] < 1 and time.monotonic() < limit:
        await asyncio.sleep(0.05)
    return tasks


def _has_clear_end(answer: tuple[int, bytes]) -> bool:
    """A whole answer, an error status, or an error event."""
    status, body = answer
    if status == 200:
        return b"[DONE]" in body or b'"usage":' in body or b'"error":' in body
    return status == 503 and b'"error":' in body


async def _exit_code(server: Server) -> int | None:
    """None: it does not end."""
    try:
        return await asyncio.to_thread(server.process.wait, 60)
    except subprocess.TimeoutExpired:
        return None


async def sigterm(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    tasks = await _streams(server, tries)
    server.process.send_signal(signal.SIGTERM)
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        count.note(not isinstance(answer, BaseException) and _has_clear_end(answer), answer)
    code = await _exit_code(server)
    count.note(code == 0, f"exit code {code}")


async def engine_fault(server: Server, count: Count, tries: int, chance: random.Random) -> None:
    tasks = await _streams(server, tries)
    status, _ = await server.post("/chaos/break", b"{}")
    count.note(status == 200, f"the fault was not injected: {status}")
    for answer in await asyncio.gather(*tasks, return_exceptions=True):
        count.note(not isinstance(answer, BaseException) and _has_clear_end(answer), answer)
    code = await _exit_code(server)
    count.note(code == 1, f"exit code {code}")


ATTACKS: list[tuple[str, Callable[..., Awaitable[None]], int, bool]] = [
    ("clients cut at random points", cut_clients, 200, False),
    ("half-open connections", half_open, 60, False),
    ("readers that read nothing", slow_readers, 12, False),
    ("malformed bodies", bodies(malformed, PATHS), 0, False),
    ("invalid UTF-8", bodies(invalid_text, PATHS), 0, False),
    ("deep JSON", bodies(deep, PATHS), 0, False),
    ("huge bodies", huge_bodies, 0, False),
    ("hostile schemas", bodies(hostile_schemas, PATHS[:1]), 0, False),
    ("hostile fields", bodies(hostile_fields, PATHS[:1]), 0, False),
    ("bytes that are no HTTP", no_http, 60, False),
    ("SIGTERM during load", sigterm, 24, True),
    ("an exception in the engine", engine_fault, 24, True),
]


def run(engine: dict[str, Any], scale: float, only: str | None, seed: int) -> list[Count]:
    server = Server(engine)
    counts = []
    try:
        for name, attack, tries, ends in ATTACKS:
            if only is not None and only not in name:
                continue
            count = Count(name)
            begin = time.monotonic()
            asyncio.run(attack(server, count, max(1, round(tries * scale)), random.Random(seed)))
            if ends:
                server.stop()
                server.start()
            left = asyncio.run(server.recovered())
            count.recovered = not left
            count.first = count.first or left
            counts.append(count)
            good = count.recovered and count.survived == count.tried
            mark = "good" if good else f"BAD: {count.first}"
            seconds = time.monotonic() - begin
            print(f"{name:32} {count.tried:6} tried {count.survived:6} survived  {seconds:6.1f} s  {mark}", flush=True)
    finally:
        server.stop()
    return counts


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        return child(int(sys.argv[2]), json.loads(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--max-model-len", type=int, default=256)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--scale", type=float, default=1.0, help="times the attempts of attacks that have a number")
    parser.add_argument("--only", metavar="WORD", help="attacks with this word in their names")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    engine = {"model": args.model, "max_model_len": args.max_model_len, "num_blocks": args.num_blocks}
    counts = run(engine, args.scale, args.only, args.seed)
    tried, survived = sum(c.tried for c in counts), sum(c.survived for c in counts)
    whole = all(c.recovered for c in counts)
    print(
        f"{'all':32} {tried:6} tried {survived:6} survived  " + ("recovered after each" if whole else "NOT RECOVERED")
    )
    return 0 if whole and tried == survived else 1


if __name__ == "__main__":
    sys.exit(main())
