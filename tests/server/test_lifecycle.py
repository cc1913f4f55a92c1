"""Loading, ready, draining, dead: what the port answers in each, and with which code the process ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.async_engine import AsyncEngine

TESTS = Path(__file__).parents[1]
#: `octavo serve` with a scripted engine instead of a model: the rest is the real command's code.
PROGRAM = """
import atexit, sys, time
sys.path[:0] = [{tests!r}, {source!r}]
from helpers.serving import scripted_engine
from octavo.server.run import serve
from octavo.server.settings import load

atexit.register(print, "wound up", file=sys.stderr)

def build(config, on_progress):
    on_progress("weights", 1, 4)
    time.sleep({loading})
    if {broken}:
        raise {broken}
    engine = scripted_engine(seconds=0.01, max_model_len=2000, num_blocks=2000)
    for name in {adapters}:
        engine.adapters._names[name] = None
    if {dies}:
        real, steps = engine.runner.execute, []
        def execute(plan):
            steps.append(plan)
            if len(steps) > {dies}:
                raise RuntimeError("the device is gone")
            return real(plan)
        engine.runner.execute = execute
    return engine

settings = {{"port": 0, "drain_seconds": {drain}, "request_log": "-", "served_model_name": {names}}}
sys.exit(serve(load(settings), build=build))
"""


class Process:
    """The program above, started and listened to."""

    def __init__(
        self,
        *,
        loading: float = 0.0,
        broken: str = "None",
        dies: int = 0,
        drain: float = 10.0,
        adapters: str = "()",
        names: str = "()",
    ) -> None:
        program = PROGRAM.format(
            tests=str(TESTS),
            source=str(TESTS.parent / "src"),
            loading=loading,
            broken=broken,
            dies=dies,
            drain=drain,
            adapters=adapters,
            names=names,
        )
        environment = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env=environment,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def until(self, words: str) -> str:
        """The line with these words."""
        limit = time.monotonic() + 30
        while time.monotonic() < limit:
            if found := [line for line in self.lines if words in line]:
                return found[0]
            assert self.process.poll() is None, self.lines
            time.sleep(0.01)
        raise AssertionError(f"no {words!r} in {self.lines}")

    @property
    def url(self) -> str:
        return self.until("listening on ").split()[2]

    def ends_with(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def start() -> Iterator[Any]:
    started: list[Process] = []

    def begin(**given: Any) -> Process:
        started.append(Process(**given))
        return started[-1]

    yield begin
    for process in started:
        process.close()


def test_the_port_answers_while_the_model_loads(start: Any) -> None:
    process = start(loading=1.0)
    url = process.url
    ready = httpx.get(url + "/ready")
    assert ready.status_code == 503
    assert ready.json() == {"status": "loading", "loading": {"stage": "weights", "done": 1, "total": 4}}
    assert httpx.get(url + "/health").status_code == 200
    early = httpx.post(url + "/v1/completions", json={"prompt": "x"})
    assert early.status_code == 503
    assert early.json()["error"]["message"] == "the model is still loading (weights: 25 %)"
    assert "retry-after" in early.headers
    process.until("ready: scripted at http://127.0.0.1:")
    assert httpx.get(url + "/ready").json() == {"status": "ready"}
    assert httpx.post(url + "/v1/completions", json={"prompt": "x"}).status_code == 200
    report = [line for line in process.lines if line.startswith("  ")]
    assert any(line.startswith("  port = 0  (flag)") for line in report)
    assert any(line.startswith("  block_size = ") for line in report)
    assert [line for line in process.lines if line == "settings in force:"] == ["settings in force:"]


def test_sigterm_lets_what_runs_finish_and_takes_nothing_new(start: Any) -> None:
    process = start()
    process.until("ready: ")
    url = process.url
    body = {"prompt": "x", "max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
    with httpx.Client() as kept, httpx.stream("POST", url + "/v1/completions", json=body) as answer:
        assert kept.get(url + "/ready").status_code == 200
        lines = answer.iter_lines()
        next(lines)
        process.process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    assert '"completion_tokens":100' in text
    assert text.rstrip().endswith("data: [DONE]")
    assert process.ends_with() == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(url + "/health")
    log = [json.loads(line) for line in process.lines if line.startswith("{")]
    assert [(entry["status"], entry["output_tokens"], entry["finish_reasons"]) for entry in log] == [
        (200, 100, ["length"])
    ]


@pytest.mark.parametrize("signals", [("SIGTERM",), ("SIGINT",), ("SIGINT", "SIGINT"), ("SIGTERM", "SIGTERM")])
def test_a_signal_while_the_model_loads_ends_at_once(start: Any, signals: tuple[str, ...]) -> None:
    """The loader may be inside C++, where an interpreter that winds up would tear it down and abort the process."""
    process = start(loading=120.0)
    process.until("listening on ")
    for name in signals:
        process.process.send_signal(getattr(signal, name))
    assert process.ends_with() == 0
    assert process.lines[1:] == [], "nothing is said, and no exit handler ran under the loader"


def test_a_signal_to_a_server_that_is_ready_winds_up_as_usual(start: Any) -> None:
    process = start()
    process.until("ready: ")
    process.process.send_signal(signal.SIGINT)
    assert process.ends_with() == 0
    assert process.lines[-1] == "wound up"


def test_what_does_not_finish_in_time_is_ended_and_told(start: Any) -> None:
    process = start(drain=0.3)
    process.until("ready: ")
    url = process.url
    answers: list[httpx.Response] = []
    whole = threading.Thread(
        target=lambda: answers.append(httpx.post(url + "/v1/completions", json={"prompt": "x", "max_tokens": 1900}))
    )
    whole.start()
    body = {"prompt": "x", "max_tokens": 1900, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        time.sleep(0.2)
        process.process.send_signal(signal.SIGTERM)
        text = "\n".join(lines)
    whole.join()
    assert '"code":"aborted"' in text
    assert answers[0].status_code == 503
    assert answers[0].json()["error"]["code"] == "aborted"
    assert process.ends_with() == 0


def test_a_dead_engine_is_told_to_everybody_and_ends_the_process(start: Any) -> None:
    process = start(dies=20)
    process.until("ready: ")
    url = process.url
    body = {"prompt": "x", "max_tokens": 500, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body) as answer:
        text = "\n".join(answer.iter_lines())
    assert '"code":"unavailable"' in text
    assert "[DONE]" not in text
    assert process.ends_with() == 1


def test_a_model_that_cannot_be_loaded_ends_the_process(start: Any) -> None:
    process = start(broken="__import__('octavo.errors').errors.ConfigError('no such model: x')")
    assert process.ends_with() == 2
    assert "octavo: the model could not be loaded: no such model: x" in process.lines
    process = start(broken="ZeroDivisionError('a bug')")
    assert process.ends_with() == 1
    said = "octavo: the model could not be loaded: ZeroDivisionError: a bug (OCTAVO_DEBUG=1 shows where)"
    assert said in process.lines and not [line for line in process.lines if "Traceback" in line]


def test_an_error_after_loading_ends_the_process_too(start: Any) -> None:
    """Anywhere in the loader's thread: here a name that only the loaded engine has turns out to be the model's."""
    process = start(adapters="('small',)", names="('small',)")
    assert process.ends_with() == 2
    said = "octavo: the model could not be loaded: lora: small is the name of the model itself; choose another"
    assert said in process.lines
    assert not [line for line in process.lines if "Traceback" in line or line.startswith("ready")]


def test_health_is_red_when_the_engine_has_failed() -> None:
    with Served(scripted_engine()) as served:
        assert served.engine is not None
        served.engine.call(lambda engine: setattr(engine.runner, "fault", RuntimeError("the device is gone")))
        answer = httpx.post(served.url + "/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 503
        assert "the device is gone" in answer.json()["error"]["message"]
        for path in ("/health", "/ready"):
            red = httpx.get(served.url + path)
            assert red.status_code == 503
            assert red.json() == {"status": "failed", "error": "RuntimeError: the device is gone"}
        again = httpx.post(served.url + "/v1/completions", json={"prompt": "x"})
        assert again.status_code == 503
        assert 'phase="failed"} 0.0' in httpx.get(served.url + "/metrics").text


def test_an_app_becomes_ready_when_its_engine_is_attached() -> None:
    with Served(None) as served:
        assert httpx.get(served.url + "/ready").status_code == 503
        assert httpx.get(served.url + "/v1/models").json()["data"] == []
        engine = AsyncEngine(scripted_engine())
        engine.start()
        served.app.state.server.attach(engine)
        assert httpx.get(served.url + "/ready").status_code == 200
        assert httpx.get(served.url + "/v1/models").json()["data"][0]["id"] == "scripted"


def test_the_port_does_not_wait_for_torch() -> None:
    program = "import sys, octavo.server.run, octavo.cli.serve; print('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100, env=environment
    )
    assert done.stdout.strip() == "False"
