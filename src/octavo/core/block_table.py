"""One sequence's map from logical to physical blocks, for one group of layers.

A table owns one count in the pool for every live entry. Entries before `first_live` were released behind a sliding
window and read `RELEASED`; they are never written or read again. The table also remembers which entries the runner
has not seen yet, so that a plan carries differences only.

    position 37, block_size 16:   logical block 37 // 16 = 2, offset 37 % 16 = 5
    ids = [3, 7, 11]:             slot 11 * 16 + 5 = 181
"""

from __future__ import annotations

from octavo.core.block_pool import BlockPool
from octavo.core.step import TableUpdate
from octavo.errors import AuditError, BoundsError

RELEASED = -1


class BlockTable:
    """ids[logical block] = physical block, for the positions that a sequence has (or is about to have)."""

    __slots__ = ("_edited", "_pool", "_sent", "block_size", "first_live", "group", "ids", "seq_id")

    def __init__(self, pool: BlockPool, block_size: int, *, seq_id: int, group: int = 0) -> None:
        self._pool = pool
        self.block_size = block_size
        self.seq_id = seq_id
        self.group = group
        self.ids: list[int] = []
        self.first_live = 0
        self._sent = 0
        self._edited: set[int] = set()

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def num_live(self) -> int:
        """Blocks the table holds now."""
        return len(self.ids) - self.first_live

    def live_ids(self) -> list[int]:
        return self.ids[self.first_live :]

    def num_missing(self, num_tokens: int) -> int:
        """Blocks to append before `num_tokens` positions fit."""
        return max(0, -(-num_tokens // self.block_size) - len(self.ids))

    def not_private(self, start: int, end: int) -> list[int]:
        """Logical blocks in the table that writing positions start..end-1 would spoil for somebody else."""
        first = max(start // self.block_size, self.first_live)
        if first >= len(self.ids):
            return []
        last = min((end - 1) // self.block_size, len(self.ids) - 1)
        pool = self._pool
        return [i for i in range(first, last + 1) if not pool.is_private(self.ids[i])]

    def slot(self, position: int) -> int:
        """Physical slot of a token position; bounds are checked."""
        logical, offset = divmod(position, self.block_size)
        self._check(logical)
        return self.ids[logical] * self.block_size + offset

    def slots(self, start: int, end: int) -> list[int]:
        """Slots of positions start..end-1."""
        return [self.slot(p) for p in range(start, end)]

    # -- acts ----------------------------------------------------------------------------------------------------

    def append(self, num_tokens: int) -> int:
        """Take blocks until `num_tokens` positions fit; returns how many. The caller has counted before."""
        missing = self.num_missing(num_tokens)
        if missing:
            self.ids += self._pool.take_many(missing)
        return missing

    def append_known(self) -> None:
        """Take one block that the runner is taken to know at once. Nothing may be left to tell it."""
        self.ids.append(self._pool.take())
        self._sent = len(self.ids)

    def adopt(self, block: int) -> None:
        """Append a block whose count was already raised for this table (a prefix hit, a swapped-in block)."""
        self.ids.append(block)

    def skip(self, num_blocks: int) -> None:
        """Start the table with entries that are behind the window already (a prefix hit of a windowed group)."""
        if self.ids:
            raise BoundsError(f"sequence {self.seq_id} group {self.group}: skip on a table with {len(self.ids)} blocks")
        self.ids = [RELEASED] * num_blocks
        self.first_live = num_blocks

    def make_private(self, logical: int) -> tuple[int, int]:
        """Copy-on-write: replace a shared or published block by a fresh one; returns (source, destination).

        The copy must run before the next write and before the source is reused: plans keep transfers in order.
        """
        self._check(logical)
        source = self.ids[logical]
        destination = self._pool.take()
        self.ids[logical] = destination
        self._pool.release(source)
        if logical < self._sent:
            self._edited.add(logical)
        return source, destination

    def fork(self, seq_id: int) -> BlockTable:
        """A table of another sequence over the same blocks.

        parent [3, 7, 11]  counts 1 1 1      fork      parent [3, 7, 11], child [3, 7, 11]  counts 2 2 2
        """
        child = BlockTable(self._pool, self.block_size, seq_id=seq_id, group=self.group)
        child.ids = self.ids.copy()
        child.first_live = self.first_live
        for block in child.live_ids():
            self._pool.share(block)
        return child

    def truncate(self, num_tokens: int) -> int:
        """Give back the blocks that positions from `num_tokens` on would use; returns how many."""
        keep = max(-(-num_tokens // self.block_size), self.first_live)
        dropped = self.ids[keep:]
        self._pool.release_all(reversed(dropped))
        del self.ids[keep:]
        self._sent = min(self._sent, keep)
        self._edited = {i for i in self._edited if i < keep}
        return len(dropped)

    def release_before(self, position: int) -> int:
        """Give back blocks that end before `position` (they fell out of the window); returns how many."""
        end = min(position // self.block_size, len(self.ids))
        count = end - self.first_live
        if count <= 0:
            return 0
        # Furthest back first: its content is the least useful one for a later hit.
        for logical in range(self.first_live, end):
            self._pool.release(self.ids[logical])
            self.ids[logical] = RELEASED
        self.first_live = end
        return count

    def free(self) -> int:
        """Give everything back, tail first, so that a cached chain is evicted from its end; returns how many."""
        count = self.num_live
        self._pool.release_all(reversed(self.live_ids()))
        self.ids = []
        self.first_live = 0
        self.forget_sent()
        return count

    # -- what the runner knows -----------------------------------------------------------------------------------

    def take_updates(self, into: list[TableUpdate]) -> None:
        """Append what changed since the last call; afterwards the runner is taken to know it."""
        if self._edited:
            for logical in sorted(self._edited):
                into.append(TableUpdate(self.group, logical, (self.ids[logical],)))
            self._edited.clear()
        if self._sent < len(self.ids):
            into.append(TableUpdate(self.group, self._sent, tuple(self.ids[self._sent :])))
            self._sent = len(self.ids)

    def forget_sent(self) -> None:
        """The runner lost its row: the next plan carries the whole table."""
        self._sent = 0
        self._edited.clear()

    # -- trust ---------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Every entry is a block of the pool, none twice, released ones only in front; `AuditError` at the first."""
        seen: set[int] = set()
        for logical, block in enumerate(self.ids):
            where = f"sequence {self.seq_id}, group {self.group}, logical block {logical}"
            if (block == RELEASED) != (logical < self.first_live):
                raise AuditError(f"{where}: entry {block} contradicts first_live={self.first_live}")
            if block != RELEASED and not 0 <= block < self._pool.num_blocks:
                raise AuditError(f"{where}: block {block} is outside the pool of {self._pool.num_blocks}")
            if block != RELEASED and block in seen:
                raise AuditError(f"{where}: block {block} is twice in one table")
            seen.add(block)

    def _check(self, logical: int) -> None:
        if not self.first_live <= logical < len(self.ids):
            raise BoundsError(
                f"sequence {self.seq_id}, group {self.group}: logical block {logical} is outside the table "
                f"(live blocks {self.first_live} to {len(self.ids) - 1}, block_size {self.block_size})"
            )
