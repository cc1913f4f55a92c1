"""/metrics: Prometheus text, computed from the live engine at the moment of the scrape. Names are vLLM's, `octavo:`.

The numbers are read on the engine's thread, between two steps, so they belong together; when there is no engine (or
it is dead) what can still be told is told. Nothing is counted twice: this module keeps no state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from octavo.async_engine import AsyncEngine
from octavo.engine import Engine, EngineStats
from octavo.latency import HistogramView, Latencies
from octavo.server.security import KeyedCaller
from octavo.server.state import ServerState, State

router = APIRouter(tags=["status"])
SCRAPE_SECONDS = 5.0  # a scrape waits for the step that runs, but not for ever


@router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
async def metrics(caller: KeyedCaller, state: State) -> Response:
    engine = state.engine
    reading = None
    if engine is not None and engine.failure is None:
        try:
            reading = await asyncio.wait_for(asyncio.wrap_future(engine.call(read)), SCRAPE_SECONDS)
        except (TimeoutError, RuntimeError):
            reading = read(engine.engine)  # a very long step, or it has just ended: not between two steps, but true
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(list(families(state, engine, reading))))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


@dataclass(frozen=True, slots=True)
class Reading:
    """What one moment looks like."""

    stats: EngineStats
    blocks: dict[str, int]  # state -> blocks
    num_blocks: int


def read(engine: Engine) -> Reading:
    """On the engine's thread."""
    pool = engine.scheduler.memory.pool
    shared = pool.num_shared
    states = {
        "free": pool.num_free,
        "cached": pool.num_cached,
        "used": pool.num_used - shared,
        "shared": shared,
        "pending": pool.num_pending,
    }
    return Reading(engine.stats(), states, pool.num_blocks)


class _Once:
    """A collector of families that are there already."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        return self._found


def families(state: ServerState, engine: AsyncEngine | None, reading: Reading | None) -> Iterator[Metric]:
    """All metric families of this moment."""
    model = state.model_names[0] if state.model_names else ""
    up = GaugeMetricFamily("octavo:up", "1 while requests are taken", labels=["model_name", "phase"])
    up.add_metric([model, state.phase], float(state.phase == "ready"))
    yield up
    http = CounterMetricFamily("octavo:http_requests", "HTTP requests answered", labels=["route", "status"])
    for (route, status), count in sorted(state.http_requests.items()):
        http.add_metric([route, str(status)], count)
    yield http
    shed = CounterMetricFamily("octavo:requests_shed", "Requests turned away", labels=["model_name", "reason"])
    for reason, count in sorted(state.shed.items()):
        shed.add_metric([model, reason], count)
    yield shed
    if engine is not None:
        yield from _latency_families(engine.latencies, model)
    if reading is not None:
        yield from _engine_families(reading, model)


def _engine_families(reading: Reading, model: str) -> Iterator[Metric]:
    stats = reading.stats
    for name, text, value in (
        ("num_requests_running", "Requests that hold blocks", stats.running),
        ("num_requests_waiting", "Requests in the queue", stats.waiting),
        ("gpu_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", stats.usage),
        ("num_blocks", "Blocks of the pool", reading.num_blocks),
        ("peak_used_blocks", "Most blocks in use at once since the start", stats.peak_used_blocks),
    ):
        yield _one(GaugeMetricFamily, name, text, model, value)
    blocks = GaugeMetricFamily("octavo:blocks", "Blocks by state", labels=["model_name", "state"])
    for name, value in reading.blocks.items():
        blocks.add_metric([model, name], value)
    yield blocks
    for name, text, value in (
        ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", stats.prefix_queried_tokens),
        ("prefix_cache_hits", "Prompt tokens found there", stats.prefix_hit_tokens),
        ("prefix_cache_evictions", "Cached blocks given up", stats.evictions),
        ("num_preemptions", "Requests whose blocks were taken back", stats.preemptions),
        ("swaps", "Preemptions that moved blocks to host memory", stats.swaps),
        ("recomputed_tokens", "Tokens computed again after a preemption", stats.recomputed_tokens),
        ("block_copies", "Blocks copied before a write (copy-on-write)", stats.copies),
        ("forks", "Block tables forked", stats.forks),
        ("aborted_requests", "Requests ended by their clients or the server", stats.aborted),
        ("deadlines", "Requests ended by their deadlines", stats.deadlines),
        ("generation_tokens", "Tokens drawn", stats.generated_tokens),
        ("computed_tokens", "Token positions computed, prompts and recomputation included", stats.computed_tokens),
        ("engine_steps", "Steps of the engine", stats.steps),
        ("leaked_blocks_repaired", "Blocks found leaked and taken back", stats.leaks_repaired),
    ):
        yield _one(CounterMetricFamily, name, text, model, value)
    misses = CounterMetricFamily(
        "octavo:prefix_cache_misses", "Why prefix look-ups ended where they did", labels=["model_name", "reason"]
    )
    for reason, count in sorted(stats.miss_reasons.items()):
        misses.add_metric([model, reason], count)
    yield misses
    if stats.spec_draft_tokens_per_pos:
        yield from _speculation_families(stats, model)


def _speculation_families(stats: EngineStats, model: str) -> Iterator[Metric]:
    """Only of an engine that speculates."""
    for name, text, value in (
        ("spec_decode_num_drafts", "Rows computed with guesses", stats.spec_drafts),
        ("spec_decode_num_draft_tokens", "Guesses checked", stats.spec_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Guesses found right", stats.spec_accepted_tokens),
        ("spec_decode_num_left_sequences", "Sequences a draft did not follow to the end", stats.spec_left_sequences),
    ):
        yield _one(CounterMetricFamily, name, text, model, value)
    accepted = CounterMetricFamily(
        "octavo:spec_decode_num_accepted_tokens_per_pos",
        "Guesses found right, by place behind the last known token",
        labels=["model_name", "position"],
    )
    for position, count in enumerate(stats.spec_accepted_tokens_per_pos):
        accepted.add_metric([model, str(position)], count)
    yield accepted


def _latency_families(found: Latencies, model: str) -> Iterator[Metric]:
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From arrival to the first token", found.first_token),
        ("time_per_output_token_seconds", "Between two tokens of one sample", found.between_tokens),
        ("request_queue_time_seconds", "From arrival to the first block", found.queue),
        ("e2e_request_latency_seconds", "From arrival to the last token", found.end_to_end),
    ):
        yield _histogram(name, text, histogram.view(), model)
    yield _one(CounterMetricFamily, "prompt_tokens", "Prompt tokens of finished requests", model, found.prompt_tokens)
    yield _one(
        CounterMetricFamily, "prompt_tokens_cached", "Of those, taken from the prefix cache", model, found.cached_tokens
    )
    ended = CounterMetricFamily(
        "octavo:request_success", "Samples that ended, by how", labels=["model_name", "finished_reason"]
    )
    for reason, count in sorted(found.finished.items()):
        ended.add_metric([model, reason], count)
    yield ended


def _one(kind: Any, name: str, text: str, model: str, value: float) -> Metric:
    family: Metric = kind(f"octavo:{name}", text, labels=["model_name"])
    family.add_metric([model], value)  # type: ignore[attr-defined]
    return family


def _histogram(name: str, text: str, view: HistogramView, model: str) -> Metric:
    family = HistogramMetricFamily(f"octavo:{name}", text, labels=["model_name"])
    family.add_metric([model], view.cumulative(), view.total)
    return family
