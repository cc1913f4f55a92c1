"""Metrics are the truth of the moment of the scrape, under the names of the dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.http_server import Served
from helpers.serving import scripted_engine
from octavo.latency import Histogram

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana-octavo.json"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(scripted_engine(num_blocks=64, seconds=0.001)) as server:
        yield server


def scrape(served: Served) -> Samples:
    answer = httpx.get(served.url + "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[f"octavo:{name}", frozenset(labels.items())]


def complete(served: Served, prompt: str = "hello there", **given: object) -> None:
    body = {"prompt": prompt, "max_tokens": 10, **given}
    assert httpx.post(served.url + "/v1/completions", json=body).status_code == 200


def test_counters_and_histograms_count_what_was_done(served: Served) -> None:
    long = "a prompt that fills two whole blocks of the pool and more"
    for _ in range(3):
        complete(served, long)
    complete(served, "ab", n=4)
    found = scrape(served)
    assert value(found, "generation_tokens_total") == 70
    assert value(found, "prompt_tokens_total") == 3 * (1 + len(long)) + 3
    assert value(found, "prompt_tokens_cached_total") >= 2 * 48
    assert value(found, "prefix_cache_hits_total") == value(found, "prompt_tokens_cached_total")
    assert value(found, "request_success_total", finished_reason="length") == 7
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert value(found, f"{name}_count") == 4
        assert value(found, f"{name}_bucket", le="+Inf") == 4
        assert value(found, f"{name}_sum") > 0
    assert value(found, "time_per_output_token_seconds_count") == 3 * 9 + 4 * 9
    assert value(found, "http_requests_total", route="/v1/completions", status="200") == 4
    assert value(found, "block_copies_total") + value(found, "forks_total") > 0


def test_gauges_are_those_of_now(served: Served) -> None:
    """They change with the engine's state, not with its steps: a request aborted on an idle engine is gone at once."""
    served.ask(lambda engine: setattr(engine.runner, "seconds", 0.02))
    body = {"prompt": "x", "max_tokens": 400, "stream": True, "n": 2}
    with httpx.stream("POST", served.url + "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()  # (dropping it would close the connection)
        next(lines)
        during = scrape(served)
        assert value(during, "num_requests_running") == 1
        assert 0 < value(during, "gpu_cache_usage_perc") <= 1
    served.wait_idle()
    after = scrape(served)
    assert value(after, "num_requests_running") == value(after, "num_requests_waiting") == 0
    assert value(after, "gpu_cache_usage_perc") == 0
    assert value(after, "aborted_requests_total") == 1
    states = ("free", "cached", "used", "shared", "pending")
    for samples in (during, after):
        assert sum(value(samples, "blocks", state=s) for s in states) == value(samples, "num_blocks") == 64


def test_preemptions_and_recomputed_tokens_are_counted(served: Served) -> None:
    complete(served, "ab", n=8, max_tokens=120)
    assert value(scrape(served), "num_preemptions_total") == served.ask(lambda e: e.stats().preemptions)
    complete(served, ["a", "b", "c", "d", "e", "f", "g", "h"], max_tokens=200, ignore_eos=True)
    found = scrape(served)
    assert value(found, "num_preemptions_total") == served.ask(lambda e: e.stats().preemptions) > 0
    assert value(found, "recomputed_tokens_total") > 0


def test_the_dashboard_asks_only_for_metrics_that_exist(served: Served) -> None:
    complete(served)
    names = {name for name, _ in scrape(served)}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"octavo:\w+", query)}
    assert len(queries) >= 12
    assert asked <= names, asked - names


def test_without_an_engine_what_can_be_told_is_told() -> None:
    with Served(None) as server:
        text = httpx.get(server.url + "/metrics").text
        assert 'octavo:up{model_name="",phase="loading"} 0.0' in text
        assert "octavo:blocks" not in text


def test_a_histogram_puts_a_bound_into_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(seconds)
    histogram.observe(2.0, times=3)
    view = histogram.view()
    assert view.counts == (2, 4, 1)
    assert view.cumulative() == [("1.0", 2), ("2.0", 6), ("+Inf", 7)]
    assert view.total == pytest.approx(18.0)
