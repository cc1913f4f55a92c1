"""Paged allocation: blocks on demand, shared by counts, copied before they are written.

`PagedAllocation` turns "sequence S is to have `upto` positions, writing from `start`" into block-table changes and
block transfers. It counts before it takes and never leaves a table half extended. The scheduler talks only to the
interface below, so that `StaticAllocation` can stand in for it and the comparison is fair.
"""

from __future__ import annotations

from typing import Protocol

from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_layout import KVLayout, largest
from octavo.core.prefix_cache import Match
from octavo.core.sequence import Sequence
from octavo.core.step import BlockTransfer, TransferKind


class TableHolder(Protocol):
    """Whose tables they are: a `Sequence` of the scheduler, or a request of an engine built on `RequestTables`."""

    seq_id: int
    tables: list[BlockTable]


class Allocation(Protocol):
    """A memory policy. All counts are physical blocks over all groups."""

    pool: BlockPool
    layout: KVLayout

    def worst_case(self, prompt_len: int, positions: int, width: int) -> int:
        """Most blocks a request holds at once: `width` sequences of `positions` written positions each."""
        ...

    def longest(self, num_blocks: int) -> int:
        """Most positions of a single sequence that `num_blocks` can carry."""
        ...

    def open(self, seq: Sequence, match: Match | None = None) -> None:
        """Give an admitted sequence its tables, starting with an acquired prefix match."""
        ...

    def blocks_needed(self, seq: Sequence, start: int, upto: int) -> int:
        """Blocks to take before positions start..upto-1 can be written: new ones and private copies. Pure."""
        ...

    def extend(self, seq: Sequence, start: int, upto: int) -> list[BlockTransfer]:
        """Take them; returns the copies to run before the write."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> list[BlockTransfer]:
        """The child gets tables with the parent's content."""
        ...

    def fork_cost(self, parent: Sequence) -> int:
        """Blocks that `fork` takes at once. Pure."""
        ...

    def release_behind_window(self, seq: Sequence, position: int) -> int:
        """Give back what a token at `position` and later ones no longer read."""
        ...

    def close(self, seq: Sequence) -> int:
        """Give everything back; returns how many blocks this table held."""
        ...

    def can_admit(self, need: int) -> bool:
        """Is there room for a request that needs `need` blocks now? Pure."""
        ...


class PagedAllocation:
    """Blocks on demand from one pool, for every group of layers."""

    def __init__(self, pool: BlockPool, layout: KVLayout, *, copy_on_write: bool = True) -> None:
        self.pool = pool
        self.layout = layout
        self.copy_on_write = copy_on_write  # False: a fork copies everything before its first step (to measure sharing)
        self._unsharing: set[int] = set()  # forks that have not had that step yet

    # -- counting ------------------------------------------------------------------------------------------------

    def worst_case(self, prompt_len: int, positions: int, width: int) -> int:
        """Exact peak over the life of a request, when chunks are as small as they must be.

        Blocks wholly inside the prompt are shared by all `width` sequences, the rest is everyone's own; a windowed
        group holds only what its window touches. The sum grows with every new block and shrinks inside a block, so the
        peak lies where a block is begun for the last time, or where samples part: at the end of the prompt.
        """
        if not self.copy_on_write and width > 1:
            return width * self.worst_case(prompt_len, positions, 1)
        size = self.layout.block_size
        last = positions - 1
        points = {last // size * size, prompt_len, prompt_len - 1, (prompt_len - 1) // size * size}
        return max(self._held_at(p, prompt_len, width) for p in points if 0 <= p <= last)

    def _held_at(self, position: int, prompt_len: int, width: int) -> int:
        """Blocks held while the token at `position` is computed."""
        if position < prompt_len:
            width = 1
        size = self.layout.block_size
        total = 0
        for group in self.layout.groups:
            first, end = group.first_needed(position) // size, position // size + 1
            shared = max(0, min(prompt_len // size, end) - first)
            total += shared + width * (end - first - shared)
        return total

    def longest(self, num_blocks: int) -> int:
        per_group = num_blocks // self.layout.num_groups
        low, high = per_group * self.layout.block_size, num_blocks * self.layout.block_size
        return largest(high, lambda length: self.worst_case(length, length, 1) <= num_blocks, low)

    def can_admit(self, need: int) -> bool:
        return need <= self.pool.num_available

    def blocks_needed(self, seq: TableHolder, start: int, upto: int) -> int:
        if seq.seq_id in self._unsharing:
            start = 0
        return sum(t.num_missing(upto) + len(t.not_private(start, upto)) for t in seq.tables)

    def fork_cost(self, parent: TableHolder) -> int:
        return 0

    # -- acting ----------------------------------------------------------------------------------------------------

    def open(self, seq: TableHolder, match: Match | None = None) -> None:
        seq.tables = [
            BlockTable(self.pool, self.layout.block_size, seq_id=seq.seq_id, group=g)
            for g in range(self.layout.num_groups)
        ]
        if match is None or not match.num_tokens:
            return
        for table, first, ids in zip(seq.tables, match.first, match.ids):
            table.skip(first)
            for block in ids:
                table.adopt(block)

    def extend(self, seq: TableHolder, start: int, upto: int) -> list[BlockTransfer]:
        if seq.seq_id in self._unsharing:
            self._unsharing.discard(seq.seq_id)
            start = 0
        transfers = []
        for table in seq.tables:
            for logical in table.not_private(start, upto):
                transfers.append(BlockTransfer(TransferKind.COPY, *table.make_private(logical)))
            table.append(upto)
        return transfers

    def fork(self, parent: TableHolder, child: TableHolder) -> list[BlockTransfer]:
        child.tables = [t.fork(child.seq_id) for t in parent.tables]
        if not self.copy_on_write:
            self._unsharing.add(child.seq_id)
        return []

    def release_behind_window(self, seq: TableHolder, position: int) -> int:
        released = 0
        for table, group in zip(seq.tables, self.layout.groups):
            if group.window is not None:
                released += table.release_before(group.first_needed(position))
        return released

    def close(self, seq: TableHolder) -> int:
        held = sum(t.free() for t in seq.tables)
        seq.tables = []
        self._unsharing.discard(seq.seq_id)
        return held
