"""Static allocation, the classic baseline: `max_model_len` contiguous positions per sequence, reserved at admission.

Nothing is shared, nothing is given back before the sequence ends, windows free nothing: this is what paging is measured
against, with the same scheduler and the same kernels. The pool is cut into equal *reservations* of consecutive block
ids.
"""

from __future__ import annotations

from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_layout import KVLayout
from octavo.core.prefix_cache import Match
from octavo.core.sequence import Sequence
from octavo.core.step import BlockTransfer, TransferKind
from octavo.errors import InternalError


class StaticAllocation:
    """Whole reservations only. Implements `Allocation`."""

    def __init__(self, pool: BlockPool, layout: KVLayout, *, max_model_len: int) -> None:
        self.pool = pool
        self.layout = layout
        self.blocks_per_group = layout.blocks_for(max_model_len)
        self.blocks_per_sequence = self.blocks_per_group * layout.num_groups
        self.num_reservations = pool.num_blocks // self.blocks_per_sequence
        self._free = list(range(self.num_reservations - 1, -1, -1))

    def worst_case(self, prompt_len: int, positions: int, width: int) -> int:
        return width * self.blocks_per_sequence

    def longest(self, num_blocks: int) -> int:
        return num_blocks // self.layout.num_groups * self.layout.block_size

    def can_admit(self, need: int) -> bool:
        return need <= len(self._ready()) * self.blocks_per_sequence

    def _ready(self) -> list[int]:
        """Reservations that no step in flight still reads."""
        return [p for p in self._free if not self.pool.is_pending(p * self.blocks_per_sequence)]

    def blocks_needed(self, seq: Sequence, start: int, upto: int) -> int:
        return 0

    def fork_cost(self, parent: Sequence) -> int:
        return self.blocks_per_sequence

    def open(self, seq: Sequence, match: Match | None = None) -> None:
        ready = self._ready()
        if not ready:
            raise InternalError("no reservation is free; count before admitting")
        place = ready[-1]
        self._free.remove(place)
        first = place * self.blocks_per_sequence
        seq.tables = []
        for g in range(self.layout.num_groups):
            table = BlockTable(self.pool, self.layout.block_size, seq_id=seq.seq_id, group=g)
            start = first + g * self.blocks_per_group
            for block in range(start, start + self.blocks_per_group):
                self.pool.take_exactly(block)
                table.adopt(block)
            seq.tables.append(table)

    def extend(self, seq: Sequence, start: int, upto: int) -> list[BlockTransfer]:
        return []

    def fork(self, parent: Sequence, child: Sequence) -> list[BlockTransfer]:
        """Nothing can be shared: the child gets a reservation and a copy of what the parent has computed."""
        self.open(child)
        used = self.layout.blocks_for(parent.num_computed)
        return [
            BlockTransfer(TransferKind.COPY, source, destination)
            for mine, theirs in zip(child.tables, parent.tables)
            for source, destination in zip(theirs.ids[:used], mine.ids[:used])
        ]

    def release_behind_window(self, seq: Sequence, position: int) -> int:
        return 0

    def close(self, seq: Sequence) -> int:
        if seq.tables:
            self._free.append(seq.tables[0].ids[0] // self.blocks_per_sequence)
        held = sum(t.free() for t in seq.tables)
        seq.tables = []
        return held
