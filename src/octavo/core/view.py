"""`PoolView`: a snapshot of the memory for people and metrics. Plain values; views are pure functions of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class PoolView:
    """State of the pool between two steps.

    block_tables: seq_id -> one list of block ids per group (-1: released behind a window). ref_counts: block -> number
    of tables that hold it, used blocks only. filled_slots: slots of used blocks that hold a computed position;
    reserved_slots: all slots of used blocks; the difference is internal fragmentation (or, with static allocation,
    reserve). static_bytes_same_load: what static allocation would have reserved for the sequences that run now.
    shared_saved_blocks: blocks that would be needed in addition if nothing were shared.
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


def pool_view(scheduler: Scheduler) -> PoolView:
    """Take a snapshot; costs time proportional to the blocks in use, so take it when somebody looks."""
    memory, pool, layout = scheduler.memory, scheduler.memory.pool, scheduler.memory.layout
    tables: dict[int, list[list[int]]] = {}
    requests: dict[int, str] = {}
    counts: dict[int, int] = {}
    fill: dict[int, int] = {}
    for request in scheduler.running:
        for seq in request.live():
            if not seq.tables:
                continue
            tables[seq.seq_id] = [list(t.ids) for t in seq.tables]
            requests[seq.seq_id] = request.request_id
            for table in seq.tables:
                for logical in range(table.first_live, len(table.ids)):
                    block = table.ids[logical]
                    counts[block] = pool.count(block)
                    used = min(layout.block_size, max(0, seq.num_computed - logical * layout.block_size))
                    fill[block] = max(fill.get(block, 0), used)
    per_sequence = layout.blocks_for(scheduler.settings.max_model_len) * layout.num_groups * layout.bytes_per_block
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
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_sequences=len(tables),
        peak_used=pool.peak_used,
        peak_sequences=scheduler.counters.peak_running,
        copies=memory.num_copies,
        forks=memory.num_forks,
        preemptions=scheduler.counters.preemptions,
        swapped_blocks=memory.host_pool.num_used if memory.host_pool else 0,
        static_bytes_same_load=len(tables) * per_sequence,
        shared_saved_blocks=sum(c - 1 for c in counts.values()),
        requests=requests,
    )
