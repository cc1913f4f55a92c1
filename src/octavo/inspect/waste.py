"""Where the bytes of the pool are: what holds keys and values, and each kind of what does not. Pure functions.

Every slot of the pool is in exactly one of six places, so

    filled + fragmented + reserved_unused + cached_idle + pending + empty == num_blocks * bytes_per_block

    filled           slots of used blocks that hold a computed position
    fragmented       the rest of the blocks that hold at least one: the last block of a sequence, partly empty
    reserved_unused  used blocks that hold nothing yet: the reservation of static allocation; with paging only blocks
                     that a planned step is about to fill
    cached_idle      blocks that nobody holds, kept because a later prompt may want their content
    pending          blocks given back that a step in flight still reads
    empty            free blocks

What paging saves is counted beside that, not in it: bytes that sharing saves and bytes given back behind windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.view import PoolView


@dataclass(frozen=True, slots=True)
class GroupWaste:
    """One group of layers: its window, blocks given back behind it, and the bytes of those."""

    window: int | None
    released_blocks: int
    released_bytes: int


@dataclass(frozen=True, slots=True)
class Waste:
    """All in bytes. `wasted` is the share of the used blocks that holds nothing (0 when none is used)."""

    filled: int
    fragmented: int
    reserved_unused: int
    cached_idle: int
    pending: int
    empty: int
    shared_saved: int
    window_saved: int
    groups: tuple[GroupWaste, ...]

    @property
    def wasted(self) -> float:
        used = self.filled + self.fragmented + self.reserved_unused
        return (self.fragmented + self.reserved_unused) / used if used else 0.0


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """What static allocation would have needed for the same traffic, and what it would have held in this pool.

    static_peak_bytes: `max_model_len` positions for each of `peak_sequences` sequences that ran at once.
    static_sequences: reservations that fit this pool. paged_peak_bytes: the most that was in use here. ratio: how many
    times as many sequences ran at once as static allocation has room for (None: it has room for none).
    """

    bytes_per_sequence: int
    peak_sequences: int
    static_peak_bytes: int
    paged_peak_bytes: int
    pool_bytes: int
    static_sequences: int
    ratio: float | None

    @property
    def saved_bytes(self) -> int:
        return self.static_peak_bytes - self.paged_peak_bytes


def waste_of(view: PoolView) -> Waste:
    """Where the bytes of a pool are at the moment of the snapshot."""
    slot = view.bytes_per_block // view.block_size
    partial = sum(view.block_size - n for n in view.fill.values() if n)
    nothing = sum(1 for n in view.fill.values() if not n)
    groups = tuple(
        GroupWaste(window, released, released * view.bytes_per_block)
        for window, released in zip(view.windows, view.released_blocks, strict=True)
    )
    return Waste(
        filled=view.filled_slots * slot,
        fragmented=partial * slot,
        reserved_unused=nothing * view.bytes_per_block,
        cached_idle=view.num_cached * view.bytes_per_block,
        pending=view.num_pending * view.bytes_per_block,
        empty=view.num_free * view.bytes_per_block,
        shared_saved=view.shared_saved_blocks * view.bytes_per_block,
        window_saved=sum(g.released_bytes for g in groups),
        groups=groups,
    )


def counterfactual_of(view: PoolView) -> Counterfactual:
    """The same traffic under static allocation, from counters that the scheduler keeps as it goes."""
    pool_bytes = view.num_blocks * view.bytes_per_block
    per_sequence = view.static_bytes_per_sequence
    held = pool_bytes // per_sequence if per_sequence else 0
    return Counterfactual(
        bytes_per_sequence=per_sequence,
        peak_sequences=view.peak_sequences,
        static_peak_bytes=view.peak_sequences * per_sequence,
        paged_peak_bytes=view.peak_used * view.bytes_per_block,
        pool_bytes=pool_bytes,
        static_sequences=held,
        ratio=view.peak_sequences / held if held else None,
    )


def waste_as_json(view: PoolView) -> dict[str, Any]:
    """Both, as plain values: `waste` and `counterfactual` of a report."""
    w, c = waste_of(view), counterfactual_of(view)
    return {
        "waste": {
            "filled_bytes": w.filled,
            "fragmented_bytes": w.fragmented,
            "reserved_unused_bytes": w.reserved_unused,
            "cached_idle_bytes": w.cached_idle,
            "pending_bytes": w.pending,
            "empty_bytes": w.empty,
            "shared_saved_bytes": w.shared_saved,
            "window_saved_bytes": w.window_saved,
            "wasted_share": w.wasted,
            "groups": [
                {"window": g.window, "released_blocks": g.released_blocks, "released_bytes": g.released_bytes}
                for g in w.groups
            ],
        },
        "counterfactual": {
            "bytes_per_sequence": c.bytes_per_sequence,
            "peak_sequences": c.peak_sequences,
            "static_peak_bytes": c.static_peak_bytes,
            "paged_peak_bytes": c.paged_peak_bytes,
            "saved_bytes": c.saved_bytes,
            "pool_bytes": c.pool_bytes,
            "static_sequences": c.static_sequences,
            "ratio": c.ratio,
        },
    }
