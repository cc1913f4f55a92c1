"""One report of an engine: settings, counters, hardware, the past as samples, waste, misses, finished requests.

`engine_report` looks at an engine that runs in this process, `recording_report` replays a recorded run through the
scheduler and looks at that. Both give the same dictionary of plain values (JSON as it stands); `octavo doctor`,
`octavo top`, the block map and `/blocks/report` read nothing else. Taking one costs time in proportion to the blocks in
use and the samples kept, so take it when somebody looks.

    version, source ("engine" or "recording"), time (s, the run's clock)
    model       name, layers, windowed_layers, window, max_position_embeddings (as far as known)
    settings    name -> {asked, chosen, why}
    hardware    device, name, cores, total_bytes, available_bytes, weight_bytes, kv_bytes, activation_bytes (or {})
    pool        num_blocks, block_size, bytes_per_block, groups, free, cached, used, shared, pending, usage, peak_used
    stats       counters since the start and gauges of now (`EngineStats`)
    waste, counterfactual   see `octavo.inspect.waste`
    totals      sums over the finished requests, with the losses of other block sizes
    miss_reasons            reason -> look-ups that ended for it
    sequences   those that hold blocks now, oldest first: seq_id, request_id, tokens, computed, tables (per group; -1:
                released); shared: blocks of these tables that others hold too
    queue       the first that wait: request_id, prompt_tokens, output_tokens so far, preemptions, waited_s
    recent, overall         samples: the last minute, and the whole run (coarser); rates since the sample before
    finished    reports of the latest finished requests, newest first
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from octavo.core.journal import FinishedRequest, Journal, Sample
from octavo.core.scheduler import Scheduler
from octavo.core.view import counters_of, pool_view
from octavo.inspect.explain import explain_as_json
from octavo.inspect.waste import waste_as_json

if TYPE_CHECKING:
    from pathlib import Path

    from octavo.core.record import Watcher
    from octavo.core.view import PoolView

VERSION = 1
FINISHED_SHOWN = 32
SEQUENCES_SHOWN = 256
QUEUE_SHOWN = 64


class EngineLike(Protocol):
    """The part of an engine that a report reads."""

    scheduler: Scheduler
    journal: Journal

    def about(self) -> dict[str, Any]: ...
    def stats(self) -> Any: ...
    def now(self) -> float: ...


def engine_report(engine: EngineLike, *, finished: int = FINISHED_SHOWN, samples: int | None = None) -> dict[str, Any]:
    """The report of a live engine. Call it on the engine's thread, between two steps.

    finished: requests that have ended to list. samples: at most so many of each ring (None: all that are kept).
    """
    stats = asdict(engine.stats())
    report = _report("engine", engine.scheduler, engine.journal, engine.about(), stats, engine.now(), finished)
    if samples is not None:
        report["recent"] = report["recent"][-samples:] if samples else []
        report["overall"] = report["overall"][:: max(1, -(-len(report["overall"]) // samples))] if samples else []
    return report


def recording_report(
    path: str | Path, *, finished: int = FINISHED_SHOWN, also: Watcher | None = None
) -> dict[str, Any]:
    """The report of a recorded run as it was at its end. Raises ConfigError for a file that is no recording, or one
    that this version would not decide in the same way. also: looks on while the run is repeated."""
    from octavo.core.record import replay
    from octavo.errors import ConfigError

    watcher = _Watcher(also)
    result = replay(path, watcher=watcher)
    if watcher.scheduler is None:
        raise ConfigError(f"{path}: the recording holds no step")
    if not result.same:
        raise ConfigError(f"{path}: the recording {result}; it was made by another version, or is damaged")
    watcher.take_ended()  # what was aborted after the last step
    journal = watcher.journal
    stats = {**counters_of(watcher.scheduler), "generated_tokens": journal.generated, "leaks_repaired": 0}
    return _report("recording", watcher.scheduler, journal, watcher.about, stats, watcher.now, finished)


class _Watcher:
    """Keeps the journal that the engine kept while it ran."""

    def __init__(self, also: Watcher | None) -> None:
        self.journal = Journal()
        self.also = also
        self.scheduler: Scheduler | None = None
        self.about: dict[str, Any] = {}
        self.now = 0.0

    def begin(self, scheduler: Scheduler, about: dict[str, Any]) -> None:
        self.scheduler, self.about = scheduler, about
        if self.also is not None:
            self.also.begin(scheduler, about)

    def step(self, scheduler: Scheduler, drawn: int, now: float) -> None:
        self.now = now
        self.journal.generated += drawn
        self.journal.stepped(scheduler, now)
        self.take_ended()
        if self.also is not None:
            self.also.step(scheduler, drawn, now)

    def take_ended(self) -> None:
        assert self.scheduler is not None
        for request in self.scheduler.take_ended():
            self.journal.ended(request)


def _report(
    source: str,
    scheduler: Scheduler,
    journal: Journal,
    about: dict[str, Any],
    stats: dict[str, Any],
    now: float,
    finished: int,
) -> dict[str, Any]:
    view, layout = pool_view(scheduler), scheduler.memory.layout
    settings = scheduler.settings
    latest = journal.look(scheduler, now)
    return {
        "version": VERSION,
        "source": source,
        "time": now,
        "model": about.get("model") or {},
        "settings": about.get("config") or {},
        "hardware": about.get("hardware") or {},
        "limits": {
            "max_model_len": settings.max_model_len,
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "enable_prefix_caching": settings.enable_prefix_caching,
            "allocation": settings.allocation,
            "num_host_blocks": settings.num_host_blocks,
        },
        "pool": {
            "num_blocks": view.num_blocks,
            "block_size": view.block_size,
            "bytes_per_block": view.bytes_per_block,
            "groups": [{"layers": len(g.layers), "window": g.window} for g in layout.groups],
            "free": view.num_free,
            "cached": view.num_cached,
            "used": view.num_used,
            "shared": view.num_shared,
            "pending": view.num_pending,
            "usage": view.usage,
            "peak_used": view.peak_used,
            "swapped": view.swapped_blocks,
        },
        "stats": stats,
        **waste_as_json(view),
        **_live(scheduler, view, now),
        "totals": totals_as_json(journal),
        "miss_reasons": stats["miss_reasons"],
        "recent": samples_as_json([*journal.recent, latest]),
        "overall": samples_as_json([*journal.whole, latest]),
        "finished": [finished_as_json(r) for r in journal.latest(finished)],
    }


def _live(scheduler: Scheduler, view: PoolView, now: float) -> dict[str, Any]:
    """Sequences and queue of this moment, as far as they are shown."""
    shown = sorted(view.block_tables)[:SEQUENCES_SHOWN]
    blocks = {b for seq_id in shown for table in view.block_tables[seq_id] for b in table if b >= 0}
    return {
        "sequences": [
            {
                "seq_id": seq_id,
                "request_id": view.requests[seq_id],
                "tokens": view.num_tokens[seq_id],
                "computed": view.num_computed[seq_id],
                "tables": view.block_tables[seq_id],
            }
            for seq_id in shown
        ],
        "shared": sorted(b for b in blocks if view.ref_counts.get(b, 0) > 1),
        "queue": [
            {
                "request_id": r.request_id,
                "prompt_tokens": r.prompt_len,
                "output_tokens": max(s.num_output for s in r.sequences),
                "preemptions": r.num_preemptions,
                "waited_s": max(0.0, now - r.arrival),
            }
            for r in islice(scheduler.waiting, QUEUE_SHOWN)
        ],
    }


def totals_as_json(journal: Journal) -> dict[str, Any]:
    """Sums over the finished requests and their means."""
    t = journal.totals
    return {
        **{k: v for k, v in asdict(t).items() if k not in ("tail_slots", "table_entries")},
        "mean_prompt": t.prompt_tokens / t.requests if t.requests else 0.0,
        "mean_output": t.output_tokens / t.sequences if t.sequences else 0.0,
        "mean_length": t.tokens / t.sequences if t.sequences else 0.0,
        "mean_wait_seconds": t.wait_seconds / t.requests if t.requests else 0.0,
        "by_block_size": {
            str(size): {"tail_slots": t.tail_slots[size], "table_entries": t.table_entries[size]}
            for size in t.tail_slots
        },
    }


def samples_as_json(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """Samples with their rates since the one before: tokens_per_s (drawn), computed_per_s, hit_rate (of the tokens
    looked up in between; None when none were)."""
    rows: list[dict[str, Any]] = []
    before: Sample | None = None
    for sample in samples:
        row = sample._asdict()
        seconds = sample.time - before.time if before is not None else 0.0
        if before is not None and seconds > 0:
            asked = sample.queried_tokens - before.queried_tokens
            row["tokens_per_s"] = (sample.generated - before.generated) / seconds
            row["computed_per_s"] = (sample.computed - before.computed) / seconds
            row["hit_rate"] = (sample.hit_tokens - before.hit_tokens) / asked if asked else None
        else:
            row |= {"tokens_per_s": 0.0, "computed_per_s": 0.0, "hit_rate": None}
        rows.append(row)
        before = sample
    return rows


def finished_as_json(record: FinishedRequest) -> dict[str, Any]:
    """A finished request: lengths, times in seconds, and why its prompt was not found further in the cache."""

    def since(start: float | None, end: float | None) -> float | None:
        return None if start is None or end is None else end - start

    return {
        "request_id": record.request_id,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": list(record.output_tokens),
        "finish_reasons": list(record.finish_reasons),
        "preemptions": record.preemptions,
        "waited_s": since(record.arrival, record.admitted_at),
        "first_token_s": since(record.arrival, record.first_token_at),
        "total_s": since(record.arrival, record.finished_at),
        "cache": explain_as_json(record),
    }


def rate_of(samples: Sequence[dict[str, Any]], key: str = "generated", seconds: float = 5.0) -> float:
    """Units per second of a counter over the last `seconds` of the samples of a report."""
    if len(samples) < 2:
        return 0.0
    last = samples[-1]
    first = next((s for s in samples if s["time"] >= last["time"] - seconds), samples[-2])
    first = samples[-2] if first is last else first
    span = last["time"] - first["time"]
    return float((last[key] - first[key]) / span) if span > 0 else 0.0
