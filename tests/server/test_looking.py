"""`octavo doctor` and `octavo top` at a real server: what they show is what the engine holds; keys; what goes wrong."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.cli.main import main
from octavo.cli.remote import server_url
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams
from octavo.server.settings import ServerSettings
from octavo.text.prompts import Prompt

KEY = "a-key-for-this-test"
CROWD = 24


def run_requests(served: Served, count: int, max_tokens: int, *, wait: bool = True) -> None:
    """Requests with a prompt of about 60 tokens each, on the server's own engine."""

    async def one(number: int) -> None:
        assert served.engine is not None
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=1 + number % 2)
        prompt = Prompt(f"{number} once upon a time there was a keeper of a light")
        async for _ in await served.engine.submit(prompt, params, request_id=f"run-{number}"):
            pass

    async def everyone() -> None:
        await asyncio.gather(*(one(n) for n in range(count)))

    future = asyncio.run_coroutine_threadsafe(everyone(), served.loop)
    if wait:
        future.result(60)


@pytest.fixture
def crowded() -> Iterator[Served]:
    """A pool in which a crowd thrashes: prompts of four blocks, answers of seven, sixty blocks."""
    engine = scripted_engine(num_blocks=60, max_model_len=256, check=False)
    with Served(engine, ServerSettings(api_keys=(KEY,))) as served:
        yield served
        served.wait_idle()


def test_the_doctor_looks_at_a_server(crowded: Served, capsys: pytest.CaptureFixture[str]) -> None:
    run_requests(crowded, CROWD, 100)
    assert main(["doctor", crowded.url, "--api-key", KEY, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["findings"][0]["code"] == "preemption-thrash"
    assert facts["summary"].startswith(f"scripted: {CROWD} requests finished in ")
    assert main(["doctor", crowded.url, "--api-key", KEY]) == 1
    text = capsys.readouterr().out
    assert "[preemption-thrash]" in text and "  remedy    lower max_num_seqs from 32 to " in text
    assert "where prefix look-ups ended:" in text


def test_a_report_that_was_saved_can_be_looked_at_later(
    crowded: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_requests(crowded, CROWD, 100)
    answer = httpx.get(crowded.url + "/blocks/report", headers={"Authorization": f"Bearer {KEY}"})
    (tmp_path / "report.json").write_text(answer.text)
    assert main(["doctor", str(tmp_path / "report.json"), "--json"]) == 1
    saved = json.loads(capsys.readouterr().out)
    assert main(["doctor", crowded.url, "--api-key", KEY, "--json"]) == 1
    assert saved == json.loads(capsys.readouterr().out)


def ids_of(table: str) -> list[int]:
    """`seq 3: [4*, 7]  run-1, 30 tokens` -> [4, 7]."""
    return [int(entry.strip(" *")) for entry in table.split("[")[1].split("]")[0].split(",")]


def test_top_shows_the_tables_of_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with Served(scripted_engine(seconds=0.01, max_num_seqs=4)) as served:
        run_requests(served, 6, 200, wait=False)
        while served.ask(lambda e: len(e.scheduler.running)) < 2:
            time.sleep(0.01)

        def tables() -> dict[int, list[int]]:
            found: dict[int, list[int]] = served.ask(lambda e: {i: t[0] for i, t in e.pool_view().block_tables.items()})
            return found

        before = tables()
        assert main(["top", served.url, "--once"]) == 0
        lines, after = capsys.readouterr().out.splitlines(), tables()
        assert lines[0].startswith("scripted; ") and " running (" in lines[2] and lines[-1].startswith("queue run-")
        shown = {int(line.split()[1].rstrip(":")): ids_of(line) for line in lines if line.startswith("seq ")}
        # The engine goes on meanwhile, and tables only grow here: what is shown lies between the two looks.
        assert set(shown) == set(before) == set(after)
        for seq_id, ids in shown.items():
            assert before[seq_id][:-1] == ids[: len(before[seq_id]) - 1] and ids[:-1] == after[seq_id][: len(ids) - 1]
        for number in range(6):
            served.ask(lambda e, n=number: e.abort(f"run-{n}"))
        served.wait_idle()


def test_keys(crowded: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    for command in ("top", "doctor"):
        assert main([command, crowded.url]) == 2
        assert "asks for an API key; give --api-key KEY or set OCTAVO_API_KEY" in capsys.readouterr().err
        assert main([command, crowded.url, "--api-key", "wrong-key"]) == 2
        assert "refuses this API key" in capsys.readouterr().err
    monkeypatch.setenv("OCTAVO_API_KEY", KEY)
    assert main(["top", crowded.url, "--once"]) == 0
    assert "60 blocks used" in capsys.readouterr().out


def test_a_server_without_its_block_map(capsys: pytest.CaptureFixture[str]) -> None:
    with Served(scripted_engine(), ServerSettings(blocks=False)) as served:
        assert main(["top", served.url, "--once"]) == 2
        assert "not found; the server was started without its block map" in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_addresses() -> None:
    assert server_url(None) == "http://127.0.0.1:8000"
    assert server_url("localhost:9") == "http://localhost:9"
    assert server_url("https://a.b/blocks/") == "https://a.b"
    with pytest.raises(ConfigError, match="no address of a server"):
        server_url("ftp://a")


def test_top_in_a_terminal_ends_with_q(crowded: Served) -> None:
    """A real terminal: the picture comes, q ends it, and the terminal is as it was."""
    parent, child = pty.openpty()
    before = termios.tcgetattr(child)
    environment = {**os.environ, "OCTAVO_API_KEY": KEY, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "top", crowded.url, "--interval", "0.2"],
        stdin=child, stdout=child, stderr=child, env=environment,
    )  # fmt: skip
    seen, limit, asked = b"", time.monotonic() + 60, False
    while process.poll() is None:
        assert time.monotonic() < limit, seen
        if select.select([parent], [], [], 0.1)[0]:
            seen += os.read(parent, 65536)
        if b"queue empty" in seen and not asked:
            os.write(parent, b"q")
            asked = True
    after = termios.tcgetattr(child)
    os.close(parent)
    os.close(child)
    assert process.returncode == 0 and b"60 blocks used" in seen
    assert after == before


def test_top_in_a_pipe_goes_on(crowded: Served) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "top", crowded.url, "--interval", "0.05", "--api-key", KEY],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pictures = 0
    while pictures < 3:
        line = process.stdout.readline()
        assert line
        pictures += line.startswith("queue empty")
    process.terminate()
    process.stdout.close()
    process.wait(20)


def test_the_interval_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--interval", "0"]) == 2
    assert "--interval 0.0: must be more than 0" in capsys.readouterr().err


def test_a_key_is_not_carried_elsewhere(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect is refused, and a proxy is not asked for what is on this machine."""
    seen: list[str | None] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{self.server.server_address[1]}/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with HTTPServer(("127.0.0.1", 0), Redirecting) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        assert main(["top", f"127.0.0.1:{server.server_address[1]}", "--once", "--api-key", KEY]) == 2
        server.shutdown()
        thread.join(10)
    assert "the server answers 302" in capsys.readouterr().err
    assert seen == [f"Bearer {KEY}"]
