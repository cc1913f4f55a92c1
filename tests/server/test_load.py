"""Too much at once: the queue has an end, deadlines are kept, and both say what to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.server.settings import ServerSettings
from octavo.server.shedding import FinishRate


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    settings = ServerSettings(max_waiting=3, default_deadline_ms=30_000)
    with Served(scripted_engine(seconds=0.002, max_num_seqs=2), settings) as server:
        yield server
        server.wait_idle()


def complete(served: Served, **given: Any) -> httpx.Response:
    body = {"prompt": "hello", "max_tokens": 5, **given}
    return httpx.post(served.url + "/v1/completions", json=body, timeout=60)


class Busy:
    """The engine's thread is held while this is entered."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._go = threading.Event()

    def __enter__(self) -> None:
        entered = threading.Event()
        self._served.engine.call(lambda _: (entered.set(), self._go.wait(20)))  # type: ignore[union-attr]
        assert entered.wait(10)

    def __exit__(self, *_: Any) -> None:
        self._go.set()


def until_waiting(served: Served, count: int) -> None:
    assert served.engine is not None
    limit = time.monotonic() + 20
    while served.engine.num_waiting < count:
        assert time.monotonic() < limit, f"{served.engine.num_waiting} wait, {count} should"
        time.sleep(0.005)


def test_a_full_queue_is_a_429_with_the_numbers(served: Served) -> None:
    answers: list[httpx.Response] = []
    with Busy(served):
        threads = [threading.Thread(target=lambda: answers.append(complete(served))) for _ in range(3)]
        for thread in threads:
            thread.start()
        until_waiting(served, 3)
        shed = complete(served)
        too_many = complete(served, prompt=["a", "b"])
        assert httpx.get(served.url + "/health").status_code == 200  # never shed
    for thread in threads:
        thread.join()
    for answer in (shed, too_many):
        assert answer.status_code == 429
        error = answer.json()["error"]
        assert (error["waiting"], error["limit"], error["code"]) == (3, 3, "queue_full")
        assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert [a.status_code for a in answers] == [200, 200, 200]
    assert (
        'octavo:requests_shed_total{model_name="scripted",reason="queue"} 2.0'
        in httpx.get(served.url + "/metrics").text
    )


def test_a_deadline_that_passes_in_the_queue_is_a_503(served: Served) -> None:
    late: list[httpx.Response] = []
    with Busy(served):
        thread = threading.Thread(target=lambda: late.append(complete(served, deadline_ms=50)))
        thread.start()
        until_waiting(served, 1)
        time.sleep(0.1)  # the deadline passes
    thread.join()
    assert late[0].status_code == 503
    assert late[0].json()["error"]["param"] == "deadline_ms"
    assert "retry-after" in late[0].headers


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_in_the_middle_gives_what_there_is_and_says_so(served: Served, stream: bool) -> None:
    answer = complete(served, max_tokens=480, deadline_ms=400, stream=stream)
    assert answer.status_code == 200
    if stream:
        assert '"finish_reason":"deadline"' in answer.text
        return
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "deadline"
    assert 0 < answer.json()["usage"]["completion_tokens"] < 480


def test_a_smaller_priority_runs_earlier(served: Served) -> None:
    ended: list[str] = []

    def ask(name: str, priority: int) -> None:
        complete(served, prompt=name, max_tokens=30, n=2, priority=priority)
        ended.append(name)

    with Busy(served):
        threads = []
        for name, priority in (("late", 5), ("urgent", -5)):
            threads.append(threading.Thread(target=ask, args=(name, priority)))
            threads[-1].start()
            until_waiting(served, len(threads))
    for thread in threads:
        thread.join()
    assert ended == ["urgent", "late"]


def test_the_server_has_a_default_deadline_and_tells_it(served: Served) -> None:
    assert complete(served).json()["octavo"]["defaulted"]["deadline_ms"] == 30_000


def test_the_rate_of_finished_requests_forgets() -> None:
    rate = FinishRate()
    for moment in range(20):
        rate.finished(float(moment))
    assert rate.per_second(20.0) == pytest.approx(1.0)
    assert rate.per_second(100.0) == 0.0
