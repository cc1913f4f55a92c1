"""`PoolView`: a snapshot of the memory for people and metrics. Plain values; views are pure functions of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from octavo.core.block_pool import BlockPool
    from octavo.core.block_table import BlockTable
    from octavo.core.memory import KVMemory
    from octavo.core.request_tables import RequestTables
    from octavo.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PoolView:
    """State of the pool between two steps.

    block_tables: seq_id -> one list of block ids per group (-1: released behind a window). ref_counts: block -> number
    of tables that hold it, used blocks only. filled_slots: slots of used blocks that hold a computed position;
    reserved_slots: all slots of used blocks; the difference is internal fragmentation (or, with static allocation,
    reserve). static_bytes_same_load: what static allocation would have reserved for the sequences that run now.
    shared_saved_blocks: blocks that would be needed in addition if nothing were shared. fill: used block -> slots that
    hold a computed position. released_blocks: per group, blocks given back behind its window that the running
    sequences would still hold without windows (those inside a prompt that samples share count once).
    static_bytes_per_sequence: what static allocation reserves for one sequence.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    num_pending: int
    usage: float  # used / all
    block_size: int
    bytes_per_block: int
    windows: tuple[int | None, ...]  # per group
    block_tables: dict[int, list[list[int]]]
    ref_counts: dict[int, int]
    filled_slots: int
    reserved_slots: int
    num_running: int
    num_waiting: int
    num_sequences: int
    peak_used: int
    peak_sequences: int
    copies: int
    forks: int
    preemptions: int
    swapped_blocks: int
    static_bytes_same_load: int
    shared_saved_blocks: int
    requests: dict[int, str] = field(default_factory=dict)  # seq_id -> request_id
    fill: dict[int, int] = field(default_factory=dict)
    released_blocks: tuple[int, ...] = ()
    static_bytes_per_sequence: int = 0
    num_tokens: dict[int, int] = field(default_factory=dict)  # seq_id -> tokens known
    num_computed: dict[int, int] = field(default_factory=dict)  # seq_id -> positions handed to a step
    prompt_lens: dict[int, int] = field(default_factory=dict)  # seq_id -> prompt tokens


def pool_view(scheduler: Scheduler) -> PoolView:
    """Take a snapshot; costs time proportional to the blocks in use, so take it when somebody looks."""
    memory, layout = scheduler.memory, scheduler.memory.layout
    requests: dict[int, str] = {}
    known: dict[int, int] = {}
    computed: dict[int, int] = {}
    prompts: dict[int, int] = {}
    rows = []
    for request in scheduler.running:
        for seq in request.live():
            if not seq.tables:
                continue
            rows.append((seq.seq_id, seq.tables, seq.num_computed))
            requests[seq.seq_id] = request.request_id
            known[seq.seq_id], computed[seq.seq_id] = seq.num_tokens, seq.num_computed
            prompts[seq.seq_id] = request.prompt_len
    per_sequence = layout.static_bytes(scheduler.settings.max_model_len)
    view = _view(rows, memory)
    return replace(
        view,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        peak_sequences=scheduler.counters.peak_running,
        preemptions=scheduler.counters.preemptions,
        swapped_blocks=memory.host_pool.num_used if memory.host_pool else 0,
        static_bytes_same_load=view.num_sequences * per_sequence,
        requests=requests,
        released_blocks=_released(scheduler),
        static_bytes_per_sequence=per_sequence,
        num_tokens=known,
        num_computed=computed,
        prompt_lens=prompts,
    )


def requests_view(memory: RequestTables) -> PoolView:
    """The same for an engine that keeps its own scheduler. Nothing waits, and no longest length is known."""
    requests = list(memory.requests.values())
    return replace(
        _view([(r.seq_id, r.tables, r.context_len) for r in requests], memory),
        num_running=len(requests),
        peak_sequences=memory.peak_requests,
        requests={r.seq_id: str(r.request_id) for r in requests},
        released_blocks=tuple(sum(r.tables[g].first_live for r in requests) for g in range(memory.layout.num_groups)),
        num_tokens={r.seq_id: r.seq_len for r in requests},
        num_computed={r.seq_id: r.context_len for r in requests},
    )


def _view(rows: Iterable[tuple[int, Sequence[BlockTable], int]], memory: KVMemory | RequestTables) -> PoolView:
    """What pool and tables say by themselves, of rows (seq_id, tables, written positions); the rest is zero."""
    pool, layout = memory.pool, memory.layout
    tables, counts, fill = _held(rows, pool, layout.block_size)
    return PoolView(
        num_blocks=pool.num_blocks,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_used=pool.num_used,
        num_shared=pool.num_shared,
        num_pending=pool.num_pending,
        usage=pool.num_used / pool.num_blocks,
        block_size=layout.block_size,
        bytes_per_block=layout.bytes_per_block,
        windows=tuple(g.window for g in layout.groups),
        block_tables=tables,
        ref_counts=counts,
        filled_slots=sum(fill.values()),
        reserved_slots=len(fill) * layout.block_size,
        num_running=0,
        num_waiting=0,
        num_sequences=len(tables),
        peak_used=pool.peak_used,
        peak_sequences=0,
        copies=memory.num_copies,
        forks=memory.num_forks,
        preemptions=0,
        swapped_blocks=0,
        static_bytes_same_load=0,
        shared_saved_blocks=sum(c - 1 for c in counts.values()),
        fill=fill,
    )


def _held(
    rows: Iterable[tuple[int, Sequence[BlockTable], int]], pool: BlockPool, block_size: int
) -> tuple[dict[int, list[list[int]]], dict[int, int], dict[int, int]]:
    """Of rows (seq_id, tables, written positions): tables by seq_id, counts by block, written slots by block."""
    tables: dict[int, list[list[int]]] = {}
    counts: dict[int, int] = {}
    fill: dict[int, int] = {}
    for seq_id, held, written in rows:
        tables[seq_id] = [list(t.ids) for t in held]
        for table in held:
            for logical in range(table.first_live, len(table.ids)):
                block = table.ids[logical]
                counts[block] = pool.count(block)
                used = min(block_size, max(0, written - logical * block_size))
                fill[block] = max(fill.get(block, 0), used)
    return tables, counts, fill


def _released(scheduler: Scheduler) -> tuple[int, ...]:
    """Per group: blocks behind the window that the running sequences do not hold any more (or never took)."""
    layout = scheduler.memory.layout
    counts = [0] * layout.num_groups
    for request in scheduler.running:
        seqs = [s for s in request.live() if s.tables]
        shared = request.prompt_len // layout.block_size
        for group in range(layout.num_groups):
            behind = [s.tables[group].first_live for s in seqs]
            inside = max((min(b, shared) for b in behind), default=0)
            counts[group] += inside + sum(max(0, b - shared) for b in behind)
    return tuple(counts)


def counters_of(scheduler: Scheduler) -> dict[str, Any]:
    """Counters since the start and gauges of now, by the names of `EngineStats`. O(1)."""
    memory, pool, c = scheduler.memory, scheduler.memory.pool, scheduler.counters
    cache = memory.cache.counters if memory.cache is not None else None
    return {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "steps": c.steps,
        "computed_tokens": c.computed_tokens,
        "finished": c.finished,
        "aborted": c.aborted,
        "deadlines": c.deadlines,
        "preemptions": c.preemptions,
        "swaps": c.swaps,
        "recomputed_tokens": c.recomputed_tokens,
        "copies": memory.num_copies,
        "forks": memory.num_forks,
        "usage": pool.num_used / pool.num_blocks,
        "free_blocks": pool.num_free,
        "cached_blocks": pool.num_cached,
        "peak_used_blocks": pool.peak_used,
        "peak_sequences": c.peak_running,
        "prefix_queries": cache.queries if cache else 0,
        "prefix_hits": cache.hits if cache else 0,
        "prefix_hit_tokens": cache.hit_tokens if cache else 0,
        "prefix_queried_tokens": cache.queried_tokens if cache else 0,
        "evictions": cache.evictions if cache else 0,
        "miss_reasons": dict(cache.miss_reasons) if cache else {},
        "sequences": c.live,
        "mean_sequences": c.sequence_steps / c.steps if c.steps else 0.0,
        "mean_used_blocks": c.used_block_steps / c.steps if c.steps else 0.0,
        "steps_short_of_blocks": c.short_of_blocks,
        "steps_short_of_seats": c.short_of_seats,
        "steps_short_of_budget": c.short_of_budget,
        **(scheduler.speculator.stats() if scheduler.speculator else {}),
    }
