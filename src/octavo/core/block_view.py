"""`BlockView`: every block and every table at one moment, for maps that draw them one by one.

Where `PoolView` counts, this lists. It is made of whole copies (arrays, dictionaries, lists), not of loops over blocks,
so that a map of 20,000 blocks can be taken several times a second between two steps. Nothing here formats, names or
hides anything: that is `octavo.inspect.feed`, a pure function of this.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler

WAITING_SHOWN = 200


class BlockEvent(NamedTuple):
    """Something that happened to tables between two steps. `number` counts from 1 and never repeats.

    kind "fork": `source` and `destination` are sequences, the child shares every block of the parent.
    kind "copy": copy-on-write; `sequence` wrote into block `source`, which others hold too, and got `destination`.
    kind "swap out", "swap in": `source` blocks of the request moved to host memory or back; `sequence` is its first.
    """

    number: int
    step: int
    kind: str
    sequence: int
    source: int
    destination: int


class SequenceRow(NamedTuple):
    """A sequence that holds blocks. tables: per group, block ids in logical order, -1 for released ones."""

    request_id: str
    sample_index: int
    prompt_len: int
    num_tokens: int
    num_computed: int  # positions whose KV is in the tables
    last_step: int  # the step that computed something for it most recently
    tables: tuple[list[int], ...]


class WaitingRow(NamedTuple):
    """A request in the queue, new or preempted."""

    request_id: str
    prompt_len: int
    num_sequences: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """State of all blocks between two steps.

    counts, released_at: indexed by block: number of tables that hold it; the step after which it was last given back
    (0: never). published: 1 where the content can be found by hash. keys: block -> (key, group, key of the block before
    it); keys are hashes under a secret of the process, not the secret itself. stats: see `STATS`.
    """

    step: int
    time: float  # seconds, on the engine's clock
    block_size: int
    bytes_per_block: int
    windows: tuple[int | None, ...]  # per group
    max_model_len: int
    max_num_seqs: int
    counts: array[int]
    released_at: array[int]
    published: bytes
    pending: frozenset[int]
    keys: dict[int, tuple[bytes, int, bytes]]
    sequences: dict[int, SequenceRow]
    waiting: tuple[WaitingRow, ...]  # the first WAITING_SHOWN in queue order
    events: tuple[BlockEvent, ...]  # the latest
    stats: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return len(self.counts)


#: Names of `BlockView.stats`: gauges of now, then counters since the start.
STATS = (
    "used", "shared", "cached", "free", "pending", "running", "sequences", "waiting", "swapped_blocks",
    "steps", "computed_tokens", "generated_tokens", "queried_tokens", "hit_tokens", "preemptions", "copies", "forks",
    "evictions", "finished",
)  # fmt: skip


def block_view(scheduler: Scheduler, *, now: float = 0.0, generated_tokens: int = 0) -> BlockView:
    """Take a snapshot between two steps.

    now: seconds on the engine's clock; generated_tokens: drawn since the start, which the scheduler does not count.
    """
    memory, pool, layout = scheduler.memory, scheduler.memory.pool, scheduler.memory.layout
    sequences = {
        seq.seq_id: SequenceRow(
            request.request_id,
            seq.index,
            seq.prompt_len,
            seq.num_tokens,
            seq.num_computed,
            seq.last_step,
            tuple(t.ids.copy() for t in seq.tables),
        )
        for request in scheduler.running
        for seq in request.live()
        if seq.tables
    }
    counts, released_at, published, pending = pool.snapshot()
    return BlockView(
        step=pool.clock,
        time=now,
        block_size=layout.block_size,
        bytes_per_block=layout.bytes_per_block,
        windows=tuple(g.window for g in layout.groups),
        max_model_len=scheduler.settings.max_model_len,
        max_num_seqs=scheduler.settings.max_num_seqs,
        counts=counts,
        released_at=released_at,
        published=published,
        pending=pending,
        keys=memory.cache.places() if memory.cache is not None else {},
        sequences=sequences,
        waiting=_waiting(scheduler),
        events=tuple(memory.events),
        stats=_stats(scheduler, len(sequences), generated_tokens),
    )


def _waiting(scheduler: Scheduler) -> tuple[WaitingRow, ...]:
    if not len(scheduler.waiting):
        return ()
    rows: list[WaitingRow] = []
    for request in scheduler.waiting:
        if len(rows) == WAITING_SHOWN:
            break
        rows.append(WaitingRow(request.request_id, request.prompt_len, request.num_live(), request.num_preemptions))
    return tuple(rows)


def _stats(scheduler: Scheduler, num_sequences: int, generated_tokens: int) -> tuple[int, ...]:
    memory, pool, counters = scheduler.memory, scheduler.memory.pool, scheduler.counters
    cache = memory.cache.counters if memory.cache is not None else None
    return (
        pool.num_used,
        pool.num_shared,
        pool.num_cached,
        pool.num_free,
        pool.num_pending,
        len(scheduler.running),
        num_sequences,
        len(scheduler.waiting),
        memory.host_pool.num_used if memory.host_pool else 0,
        counters.steps,
        counters.computed_tokens,
        generated_tokens,
        cache.queried_tokens if cache else 0,
        cache.hit_tokens if cache else 0,
        counters.preemptions,
        memory.num_copies,
        memory.num_forks,
        cache.evictions if cache else 0,
        counters.finished,
    )
