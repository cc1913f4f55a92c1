"""The pool: which physical blocks are free, cached, used or shared, and in which order they are reused.

It knows block ids and counts, nothing of tokens, sequences or tensors. Invariant, after every call:
`num_free + num_cached + num_used + num_pending == num_blocks`, where

    free     count 0, empty: no content anybody could ask for
    cached   count 0, but published: still findable by its hash (the prefix cache holds the map)
    used     count >= 1 (shared: count > 1)
    pending  count 0, but a step that reads it is still in flight: not to be handed out yet

Blocks of count 0 form one circular doubly linked list, threaded through two arrays indexed by block id (the last
index is the sentinel), so take, release, share and revive are O(1) and allocate nothing. Order of reuse: the head is
taken first; a released block without content goes to the head (still warm in the processor's cache), a cached block
to the tail, so cached blocks are evicted least recently used and only after every empty one.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator

from octavo.errors import AuditError, InternalError, OutOfBlocksError


class BlockPool:
    """`num_blocks` interchangeable blocks with reference counts."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InternalError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._counts = array("i", bytes(4 * num_blocks))
        self._published = bytearray(num_blocks)
        self._end = num_blocks  # sentinel of the list
        self._next = array("i", range(1, num_blocks + 2))
        self._next[self._end] = 0
        self._prev = array("i", range(-1, num_blocks))
        self._prev.append(num_blocks - 1)
        self._prev[0] = self._end
        self._listed = num_blocks  # blocks in the list: free and cached
        self.num_cached = 0
        self.num_shared = 0
        self._pending: dict[int, int] = {}  # block -> last step that may read it
        self._fence: int | None = None
        self.clock = 0  # the step planned last
        self._released_at = array("i", bytes(4 * num_blocks))
        #: Called with a block id when its cached content is given up. Set by the prefix cache.
        self.on_evict: Callable[[int], None] = _nothing_cached
        self.peak_used = 0

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out now: free and cached."""
        return self._listed

    @property
    def num_free(self) -> int:
        return self._listed - self.num_cached

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._listed - len(self._pending)

    def count(self, block: int) -> int:
        """Number of block tables that hold the block."""
        return self._counts[block]

    def is_published(self, block: int) -> bool:
        return bool(self._published[block])

    def is_pending(self, block: int) -> bool:
        return block in self._pending

    @property
    def fence_step(self) -> int | None:
        """The step that released blocks wait for; None: they are available at once."""
        return self._fence

    def is_private(self, block: int) -> bool:
        """May its one owner write into it in place? Not if shared, not if its content can be found by hash."""
        return self._counts[block] == 1 and not self._published[block]

    # -- acts ----------------------------------------------------------------------------------------------------

    def take(self) -> int:
        """Hand out one block with count 1; evicts the least recently used cached block when none is empty."""
        block = self._next[self._end]
        if block == self._end:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use; count what is needed before taking")
        self._unlink(block)
        if self._published[block]:
            self._published[block] = 0
            self.num_cached -= 1
            self.on_evict(block)
        self._counts[block] = 1
        used = self.num_blocks - self._listed - len(self._pending)
        if used > self.peak_used:
            self.peak_used = used
        return block

    def take_many(self, count: int) -> list[int]:
        """The same `count` times, at a fraction of the price; all or none."""
        if count == 1:
            return [self.take()]
        if count > self._listed:
            raise OutOfBlocksError(f"{count} blocks are asked for, {self._listed} are available; count before taking")
        counts, published, following = self._counts, self._published, self._next
        blocks = []
        block = following[self._end]
        for _ in range(count):
            blocks.append(block)
            counts[block] = 1
            if published[block]:
                published[block] = 0
                self.num_cached -= 1
                self.on_evict(block)
            block = following[block]
        following[self._end] = block  # all of them left the head of the list
        self._prev[block] = self._end
        self._listed -= count
        self.peak_used = max(self.peak_used, self.num_used)
        return blocks

    def take_exactly(self, block: int) -> None:
        """Hand out this very block (static allocation reserves consecutive ids); it must be free."""
        if self._counts[block] or self._published[block] or block in self._pending:
            raise InternalError(f"block {block} is not free and cannot be reserved")
        self._unlink(block)
        self._counts[block] = 1
        self.peak_used = max(self.peak_used, self.num_used)

    def share(self, block: int) -> None:
        """One more table holds the block. A cached or pending block is revived."""
        count = self._counts[block]
        if count == 0:
            if not self._published[block]:
                raise InternalError(f"block {block} is empty and cannot be shared")
            if self._pending.pop(block, None) is None:
                self._unlink(block)
                self.num_cached -= 1
            self.peak_used = max(self.peak_used, self.num_used)
        elif count == 1:
            self.num_shared += 1
        self._counts[block] = count + 1

    def count_up(self, block: int) -> None:
        """One more table holds a block that is in use."""
        if self._counts[block] < 1:
            raise InternalError(f"block {block} is not in use")
        self.share(block)

    def release(self, block: int) -> None:
        """One table less holds the block. At count 0 it can be handed out again, at once or after the fence."""
        count = self._counts[block] - 1
        if count < 0:
            raise InternalError(f"block {block} was released more often than it was taken")
        self._counts[block] = count
        if count == 1:
            self.num_shared -= 1
        if count:
            return
        self._released_at[block] = self.clock
        if self._fence is not None:
            self._pending[block] = self._fence
        else:
            self._list(block)

    def release_all(self, blocks: Iterable[int]) -> None:
        """Release in the given order; callers pass a table tail first, so a chain is evicted from its end."""
        counts, published, following, before, end = self._counts, self._published, self._next, self._prev, self._end
        released_at, clock, fenced = self._released_at, self.clock, self._fence is not None
        for block in blocks:
            if fenced or counts[block] != 1 or published[block]:
                self.release(block)
                continue
            # The common case, written out: the only holder of a block without content puts it at the head.
            counts[block] = 0
            released_at[block] = clock
            first = following[end]
            before[first] = following[end] = block
            following[block], before[block] = first, end
            self._listed += 1

    def publish(self, block: int) -> None:
        """The block's content is complete and can be found from now on. Only its owners call this."""
        if self._counts[block] < 1 or self._published[block]:
            raise InternalError(f"block {block} cannot be published (count {self._counts[block]})")
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """Forget the content. A cached block becomes free and is reused first."""
        if not self._published[block]:
            return
        self._published[block] = 0
        if self._counts[block] == 0 and block not in self._pending:
            self.num_cached -= 1
            self._unlink(block)
            self._list(block)

    # -- steps in flight -------------------------------------------------------------------------------------

    def fence(self, step: int | None) -> None:
        """While set, released blocks wait until `settle(step)`: a step up to `step` may still read them."""
        self._fence = step
        if step is not None:
            self.clock = step

    def settle(self, step: int) -> None:
        """Every step up to `step` is complete: blocks that waited for it become available."""
        ripe = [block for block, until in self._pending.items() if until <= step]
        for block in ripe:
            del self._pending[block]
            self._list(block)

    # -- the list ----------------------------------------------------------------------------------------------

    def _list(self, block: int) -> None:
        nxt, prev, end = self._next, self._prev, self._end
        if self._published[block]:  # to the tail
            last = prev[end]
            nxt[last] = block
            prev[block] = last
            nxt[block] = end
            prev[end] = block
            self.num_cached += 1
        else:  # to the head
            first = nxt[end]
            prev[first] = block
            nxt[block] = first
            prev[block] = end
            nxt[end] = block
        self._listed += 1

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self._listed -= 1

    # -- trust ---------------------------------------------------------------------------------------------------

    def reuse_order(self) -> list[int]:
        """Blocks of count 0 in the order they will be handed out. For tests and views; O(num_blocks)."""
        order = list(self._walk())
        last = order[-1] if order else self._end
        if self._next[last] != self._end or self._prev[self._end] != last:
            raise AuditError(
                f"the free list is broken behind block {last}: block {self._next[last]} is not linked back"
            )
        return order

    def snapshot(self) -> tuple[array[int], array[int], bytes, frozenset[int]]:
        """Copies for views, by block: counts, the step of the last release, published or not; and who is pending."""
        return self._counts[:], self._released_at[:], bytes(self._published), frozenset(self._pending)

    def _walk(self) -> Iterator[int]:
        """The list from its head, as far as each block is linked back to the one before it (so never in a circle)."""
        before, block = self._end, self._next[self._end]
        while 0 <= block < self.num_blocks and self._prev[block] == before:
            yield block
            before, block = block, self._next[block]

    def audit(self, holders: dict[int, int]) -> None:
        """Compare with `holders`: block -> number of tables that hold it. `AuditError` at the first bad one."""
        listed = set(self.reuse_order())
        cached = shared = 0
        for block in range(self.num_blocks):
            count, held = self._counts[block], holders.get(block, 0)
            if count != held:
                raise AuditError(f"block {block}: count is {count}, but {held} tables hold it")
            idle = (block in listed) + (block in self._pending)
            if idle != (count == 0):
                where = "neither free nor pending" if not idle else "free or pending more than once, or while in use"
                raise AuditError(f"block {block}: count {count}, {where}")
            cached += block in listed and bool(self._published[block])
            shared += count > 1
        if len(listed) != self._listed:
            raise AuditError(f"the free list has {len(listed)} blocks, {self._listed} were counted")
        if (cached, shared) != (self.num_cached, self.num_shared):
            raise AuditError(
                f"counted {cached} cached and {shared} shared blocks, "
                f"the pool says {self.num_cached} and {self.num_shared}"
            )

    def repair(self, holders: dict[int, int]) -> list[int]:
        """Set every count to the number of holders and rebuild the list; returns the blocks that had leaked.

        No step may be in flight. Cached blocks keep their content and, as far as the list is whole, their order.
        """
        order = list(self._walk())
        listed = set(order)
        leaked = [b for b in range(self.num_blocks) if self._is_lost(b, holders.get(b, 0), listed)]
        if leaked:
            cached_order = [b for b in order if self._published[b] and not holders.get(b)]
            for block in range(self.num_blocks):
                self._counts[block] = holders.get(block, 0)
            self._pending.clear()
            self._next[self._end] = self._prev[self._end] = self._end
            self._listed = self.num_cached = 0
            known = set(cached_order)
            for block in range(self.num_blocks - 1, -1, -1):
                if not self._counts[block] and block not in known:
                    self._list(block)
            for block in cached_order:
                self._list(block)
            self.num_shared = sum(c > 1 for c in self._counts)
        return leaked

    def _is_lost(self, block: int, held: int, listed: set[int]) -> bool:
        """Wrong count, waiting for a step that is long done, or of count 0 and not in the list (or the reverse)."""
        return self._counts[block] != held or block in self._pending or (block in listed) != (held == 0)


def _nothing_cached(block: int) -> None:
    raise InternalError(f"block {block} was evicted, but no prefix cache listens")
