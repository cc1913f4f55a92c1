"""All KV memory of an engine behind one door: pool, block tables, prefix cache, host pool for swapped blocks.

The scheduler decides who gets memory; this class carries it out and collects the block transfers that the next plan
must run, in the order in which they were decided. Order is what makes reuse safe: a block that is copied away,
released and handed to another sequence within one plan is read before it is written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from octavo.core.allocation import Allocation, PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import RELEASED
from octavo.core.block_view import BlockEvent
from octavo.core.kv_layout import KVLayout
from octavo.core.prefix_cache import Match, PrefixCache
from octavo.core.sequence import CacheReport, Miss, Request, Sequence
from octavo.core.settings import SchedulerSettings
from octavo.core.static_allocation import StaticAllocation
from octavo.core.step import BlockTransfer, TransferKind
from octavo.errors import AuditError

EVENTS_KEPT = 1024


class KVMemory:
    """Blocks of one device pool and one host pool."""

    def __init__(self, layout: KVLayout, settings: SchedulerSettings) -> None:
        self.layout = layout
        self.pool = BlockPool(settings.num_blocks)
        self.host_pool = BlockPool(settings.num_host_blocks) if settings.num_host_blocks else None
        self.allocation: Allocation
        if settings.allocation == "static":
            self.allocation = StaticAllocation(self.pool, layout, max_model_len=settings.max_model_len)
        else:
            self.allocation = PagedAllocation(self.pool, layout, copy_on_write=settings.copy_on_write)
        self.cache = PrefixCache(self.pool, layout) if settings.enable_prefix_caching else None
        self._transfers: list[BlockTransfer] = []
        self.num_copies = 0
        self.num_forks = 0
        self.num_events = 0
        self.events: deque[BlockEvent] = deque(maxlen=EVENTS_KEPT)  # for views: the latest

    # -- prefix cache --------------------------------------------------------------------------------------------

    def find(self, seq: Sequence, *, partial: bool = True) -> Match:
        """What of the sequence's tokens is cached. Pure but for the memoised hashes of the sequence."""
        if self.cache is None or seq.request.unread_cache:
            return Match()
        root = self._extend_keys(seq)
        limit = self._limit(seq)
        return self.cache.match(seq.keys, seq.token_ids, root, limit=limit, partial=partial)

    def _limit(self, seq: Sequence) -> int:
        """Tokens that may come from the cache: all but one, and only the prompt while siblings wait to fork off it."""
        request = seq.request
        waiting = not request.forked and request.num_live() > 1
        return (request.prompt_len if waiting else len(seq.token_ids)) - 1

    def _extend_keys(self, seq: Sequence) -> bytes:
        assert self.cache is not None
        request = seq.request
        root = request.cache_root
        if root is None:
            root = request.cache_root = self.cache.root_key(request.cache_salt, request.adapter)
        self.cache.extend_keys(seq.keys, root, seq.token_ids, len(seq.token_ids))
        return root

    def next_key(self, seq: Sequence, match: Match) -> bytes | None:
        """Key of the first full block that the match lacks."""
        at = match.num_tokens // self.layout.block_size
        return seq.keys[at] if at < len(seq.keys) else None

    def report(self, seq: Sequence, match: Match) -> CacheReport:
        """Count the look-up and say why it ended where it did."""
        if self.cache is None:
            return CacheReport(0, 0, Miss("off"))
        if seq.request.unread_cache:
            return CacheReport(0, 0, Miss(seq.request.unread_cache))
        root, limit = self._extend_keys(seq), self._limit(seq)
        miss = self.cache.explain(seq.keys, seq.token_ids, root, match, limit)
        counters = self.cache.counters
        counters.queries += limit // self.layout.block_size
        counters.hits += match.num_tokens // self.layout.block_size
        counters.queried_tokens += limit + 1
        counters.hit_tokens += match.num_tokens
        counters.miss_reasons[miss.kind] = counters.miss_reasons.get(miss.kind, 0) + 1
        return CacheReport(match.num_blocks, match.num_tokens, miss)

    def publish(self, seq: Sequence) -> list[bytes]:
        """Make the sequence's newly completed blocks findable; returns their keys."""
        if self.cache is None:
            return []
        size = self.layout.block_size
        full = min(seq.num_done, len(seq.token_ids)) // size
        if full <= seq.num_published:
            return []
        root = self._extend_keys(seq)
        done = []
        for i in range(seq.num_published, full):
            tokens = seq.token_ids[i * size : (i + 1) * size]
            parent = seq.keys[i - 1] if i else root
            for group, table in enumerate(seq.tables):
                if i >= table.first_live:
                    self.cache.publish(seq.keys[i], parent, tokens, i, group, table.ids[i], seq.drafted is not False)
            done.append(seq.keys[i])
        seq.num_published = full
        return done

    # -- a sequence's blocks -------------------------------------------------------------------------------------

    def acquire(self, seq: Sequence, match: Match) -> None:
        """Take the match over into fresh tables: counts first, before anything else is taken from the pool."""
        if self.cache is not None and match.num_tokens:
            self.cache.acquire(match)
            if not match.drafted:
                seq.drafted = False
        self.allocation.open(seq, match)
        seq.num_computed = seq.num_done = match.num_tokens
        seq.num_published = match.num_tokens // self.layout.block_size

    def extend(self, seq: Sequence, start: int, upto: int) -> int:
        """Blocks for positions start..upto-1, private where they will be written; returns how many were taken.

        The caller has counted before.
        """
        before = self.pool.num_available
        copies = self.allocation.extend(seq, start, upto)
        seq.writable_until = len(seq.tables[0].ids) * self.layout.block_size
        seq.tables_changed = True
        if copies:
            self._copied(seq, copies)
        return before - self.pool.num_available

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.num_forks += 1
        copies = self.allocation.fork(parent, child)
        self._note("fork", child.seq_id, parent.seq_id, child.seq_id)
        self._copied(child, copies)
        child.num_computed, child.num_done = parent.num_computed, parent.num_done
        child.num_published, child.drafted = parent.num_published, parent.drafted
        # Only the shared tokens: a resumed parent knows keys of its own output already.
        child.keys = parent.keys[: parent.num_computed // self.layout.block_size]
        parent.writable_until = child.writable_until = 0

    def hand_over(self, leader: Sequence, heir: Sequence) -> None:
        """A sibling that has not forked yet takes over the blocks of the one that computes their prompt."""
        for table in leader.tables:
            table.seq_id = heir.seq_id
            table.forget_sent()
        heir.tables, leader.tables = leader.tables, []
        heir.num_computed, heir.num_done = leader.num_computed, leader.num_done
        heir.num_published, heir.drafted = leader.num_published, leader.drafted
        heir.keys = leader.keys[: leader.num_computed // self.layout.block_size]
        swapped = leader.request.swapped
        if swapped is not None and leader.seq_id in swapped:
            swapped[heir.seq_id] = swapped.pop(leader.seq_id)

    def close(self, seq: Sequence) -> int:
        """Give back every block of the sequence, wherever it is."""
        seq.writable_until = 0
        swapped = seq.request.swapped
        if swapped is not None and seq.seq_id in swapped:
            assert self.host_pool is not None
            for ids in swapped.pop(seq.seq_id):
                self.host_pool.release_all(b for b in reversed(ids) if b != RELEASED)
        return self.allocation.close(seq)

    @contextmanager
    def unread_by_steps_in_flight(self) -> Iterator[None]:
        """While beams end that have all reported: no step in flight reads what is theirs alone.

        With static allocation everything is, and the reservation of a lost beam is needed for a fork at once. Paged
        blocks may have been shared with a sequence that ended while its step was in flight: they keep waiting.
        """
        waits = self.pool.fence_step
        if isinstance(self.allocation, StaticAllocation):
            self.pool.fence(None)
        try:
            yield
        finally:
            self.pool.fence(waits)

    def truncate(self, seq: Sequence) -> None:
        """Drop blocks beyond what has been computed (a planned step that did not happen)."""
        seq.writable_until = 0
        if isinstance(self.allocation, PagedAllocation):
            for table in seq.tables:
                table.truncate(seq.num_computed)

    def rewind(self, seq: Sequence, num_tokens: int) -> None:
        """Only `num_tokens` positions of the last step were right: the others and their blocks are given back."""
        seq.num_computed = seq.num_done = num_tokens
        if isinstance(self.allocation, PagedAllocation):
            for table in seq.tables:
                table.truncate(num_tokens)
            seq.writable_until = min(seq.writable_until, len(seq.tables[0].ids) * self.layout.block_size)

    # -- swapping ------------------------------------------------------------------------------------------------

    def swap_size(self, request: Request) -> int:
        """Distinct device blocks that swapping the request out would move."""
        return len({b for s in request.live() for t in s.tables for b in t.live_ids()})

    def swap_out(self, request: Request) -> int:
        """Move the request's blocks to the host pool, sharing kept; returns how many were moved."""
        assert self.host_pool is not None
        moved: dict[int, int] = {}
        request.swapped = {}
        for seq in request.live():
            if not seq.tables:
                continue  # a sibling that has not forked yet
            tables = []
            for table in seq.tables:
                ids = []
                for block in table.ids:
                    if block == RELEASED:
                        ids.append(RELEASED)
                    elif block in moved:
                        self.host_pool.count_up(moved[block])
                        ids.append(moved[block])
                    else:
                        moved[block] = self.host_pool.take()
                        self._transfers.append(BlockTransfer(TransferKind.SWAP_OUT, block, moved[block]))
                        ids.append(moved[block])
                tables.append(ids)
            request.swapped[seq.seq_id] = tables
            seq.num_done = seq.num_computed  # a step in flight is done before the next plan moves its blocks
            self.allocation.close(seq)
        self._note("swap out", next(iter(request.swapped), -1), len(moved), 0)
        return len(moved)

    def swapped_size(self, request: Request) -> int:
        """Device blocks that bringing the request back takes."""
        tables = (request.swapped or {}).values()
        return len({b for t in tables for ids in t for b in ids if b != RELEASED})

    def swap_in(self, request: Request) -> None:
        """Bring a swapped request back; the caller has counted `swapped_size` blocks."""
        assert self.host_pool is not None and request.swapped is not None
        back: dict[int, int] = {}
        for seq in request.live():
            host_tables = request.swapped.pop(seq.seq_id, None)
            if host_tables is None:
                continue
            self.allocation.open(seq)
            for table, ids in zip(seq.tables, host_tables):
                released = sum(b == RELEASED for b in ids)
                table.skip(released)
                for host in ids[released:]:
                    if host in back:
                        self.pool.count_up(back[host])
                    else:
                        back[host] = self.pool.take()
                        self._transfers.append(BlockTransfer(TransferKind.SWAP_IN, host, back[host]))
                    table.adopt(back[host])
                    self.host_pool.release(host)
            seq.num_published = 0  # its blocks are new: publish them again where the content is gone
        request.swapped = None
        self._note("swap in", next((s.seq_id for s in request.live()), -1), len(back), 0)

    # -- what happened -------------------------------------------------------------------------------------------

    def _note(self, kind: str, seq_id: int, source: int, destination: int) -> None:
        self.num_events += 1
        self.events.append(BlockEvent(self.num_events, self.pool.clock, kind, seq_id, source, destination))

    def _copied(self, seq: Sequence, copies: list[BlockTransfer]) -> None:
        self.num_copies += len(copies)
        self._transfers += copies
        for copy in copies:
            self._note("copy", seq.seq_id, copy.source, copy.destination)

    # -- for the plan --------------------------------------------------------------------------------------------

    @property
    def has_transfers(self) -> bool:
        return bool(self._transfers)

    def take_transfers(self) -> tuple[BlockTransfer, ...]:
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    # -- trust ---------------------------------------------------------------------------------------------------

    def holders(self, requests: Iterable[Request]) -> tuple[dict[int, int], dict[int, int]]:
        """(device, host): block -> number of tables that hold it."""
        device: dict[int, int] = {}
        host: dict[int, int] = {}
        for request in requests:
            for seq in request.sequences:
                for table in seq.tables:
                    table.audit()
                    for block in table.live_ids():
                        device[block] = device.get(block, 0) + 1
            for tables in (request.swapped or {}).values():
                for ids in tables:
                    for block in ids:
                        if block != RELEASED:
                            host[block] = host.get(block, 0) + 1
        return device, host

    def audit(self, requests: Iterable[Request]) -> None:
        """Everything must agree: counts and tables, list and states, hashes and blocks. O(pool)."""
        requests = list(requests)
        device, host = self.holders(requests)
        self.pool.audit(device)
        if self.host_pool is not None:
            self.host_pool.audit(host)
        if self.cache is not None:
            self.cache.audit()
        for request in requests:
            for seq in request.live():
                self._audit_content(seq)
                for table in seq.tables:
                    if table.num_missing(seq.num_computed):
                        raise AuditError(
                            f"sequence {seq.seq_id}, group {table.group}: {len(table.ids)} blocks cannot hold "
                            f"{seq.num_computed} computed positions"
                        )

    def _audit_content(self, seq: Sequence) -> None:
        """A complete block of the sequence that is published must be published as what it holds."""
        if self.cache is None:
            return
        for logical in range(min(seq.num_done // self.layout.block_size, len(seq.keys))):
            for table in seq.tables:
                if logical < table.first_live:
                    continue
                info = self.cache.block_info(table.ids[logical])
                if info is not None and info != (seq.keys[logical], table.group):
                    raise AuditError(
                        f"sequence {seq.seq_id}, group {table.group}, logical block {logical}: block "
                        f"{table.ids[logical]} is published with the hash of another content"
                    )
