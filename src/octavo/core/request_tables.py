"""`RequestTables`: which blocks the requests of somebody else's engine hold.

The bookkeeping under `octavo.PagedAttention`: the pool, the block tables and the copy-on-write of the engine, for
people who keep a scheduler and a model of their own. It knows no tensors, no tokens and no threads.

A request has two lengths. `context_len` positions are written; `seq_len` of them have room (blocks in its tables). A
*step* writes further positions of some requests: `begin` gives them room and private blocks and says what must be
copied first, `commit` makes the new positions part of the context, `abort` forgets them.

Invariant: every method that changes something counts first. It does all of what it is asked, or it raises and
everything is as before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.block_table import BlockTable
from octavo.core.kv_layout import KVLayout
from octavo.core.whole_numbers import RequestId, request_id_of, request_ids_of, whole
from octavo.errors import AuditError, CapacityError, RequestError

NAMED_HOLDERS = 5  # requests that an out-of-memory message names


class PagedRequest:
    """One request's tables (one per group of layers) and its two lengths."""

    __slots__ = ("context_len", "request_id", "seq_id", "seq_len", "tables")

    def __init__(self, request_id: RequestId, seq_id: int, tables: list[BlockTable]) -> None:
        self.request_id = request_id
        self.seq_id = seq_id
        self.tables = tables
        self.context_len = 0
        self.seq_len = 0


@dataclass(frozen=True, slots=True)
class StepRow:
    """`count` new positions of a request, from `start` on."""

    request: PagedRequest
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class RequestTables:
    """Requests by id over one pool of `num_blocks` blocks cut as `layout` says."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.pool = BlockPool(num_blocks)
        self.requests: dict[RequestId, PagedRequest] = {}
        self.step: tuple[StepRow, ...] = ()  # the open one; empty: none is
        self.num_forks = self.num_copies = self.num_steps = self.peak_requests = 0
        self._allocation = PagedAllocation(self.pool, layout)
        self._next_seq_id = 0

    # -- questions ---------------------------------------------------------------------------------------------

    def get(self, request_id: RequestId) -> PagedRequest:
        """The request, or `RequestError` with the ids there are."""
        try:
            return self.requests[request_id_of(request_id)]
        except KeyError:
            known = ", ".join(repr(r) for r in list(self.requests)[:20]) or "none"
            more = f" and {len(self.requests) - 20} more" if len(self.requests) > 20 else ""
            raise RequestError(
                f"request {request_id!r} is unknown; there are: {known}{more}. allocate() or fork() makes one"
            ) from None

    def rows(self, counts: Sequence[tuple[RequestId, int]]) -> list[StepRow]:
        """What a step of these (request, new positions) would be; refuses duplicates, unknown ids and empty rows."""
        rows = []
        seen: set[int] = set()
        for request_id, given in counts:
            request, count = self.get(request_id), whole("query_lens", given)
            if request.seq_id in seen:
                raise RequestError(f"request {request_id!r} is twice in one step; give all its new tokens in one row")
            if count < 1:
                raise RequestError(f"request {request_id!r}: {count} new tokens; a row of a step has at least one")
            seen.add(request.seq_id)
            rows.append(StepRow(request, request.context_len, count))
        return rows

    def blocks_needed(self, rows: Sequence[StepRow]) -> int:
        """Blocks that a step of these rows takes: new ones, and private copies of shared ones. Pure, and exact.

        If all holders of a block write into it in one step, the last of them keeps it.
        """
        needed = 0
        writers: Counter[int] = Counter()
        for row in rows:
            for table in row.request.tables:
                needed += table.num_missing(row.end)
                writers.update(table.ids[i] for i in table.not_private(row.start, row.end))
        return needed + sum(number - (number == self.pool.count(block)) for block, number in writers.items())

    def first_truncation(self, request: PagedRequest) -> int:
        """The shortest length the request can be cut to: what lies behind a window is gone."""
        size = self.layout.block_size
        windowed = zip(request.tables, self.layout.groups, strict=True)
        shortest = [
            table.first_live * size + group.window - 1
            for table, group in windowed
            if group.window is not None and table.first_live
        ]
        return min(request.seq_len, max(shortest, default=0))

    # -- requests ----------------------------------------------------------------------------------------------

    def allocate(self, request_id: RequestId, seq_len: int) -> PagedRequest:
        """A new request with room for `seq_len` positions, none of them written."""
        request_id, seq_len = self._new_id(request_id), whole("seq_len", seq_len)
        if seq_len < 0:
            raise RequestError(f"allocate(request_id={request_id!r}, seq_len={seq_len}): seq_len must be at least 0")
        need = self.layout.num_groups * self.layout.blocks_for(seq_len)
        self._check_room(f"allocate(request_id={request_id!r}, seq_len={seq_len})", need)
        request = self._new(request_id)
        self._allocation.open(request)
        for table in request.tables:
            table.append(seq_len)
        request.seq_len = seq_len
        return request

    def append(self, request_id: RequestId, num_tokens: int) -> PagedRequest:
        """Room for `num_tokens` more positions behind `seq_len`."""
        request, num_tokens = self._idle(request_id, "append"), whole("num_tokens", num_tokens)
        if num_tokens < 0:
            raise RequestError(f"append({request_id!r}, {num_tokens}): give 0 or more tokens; truncate() takes back")
        seq_len = request.seq_len + num_tokens
        self._check_room(f"append({request_id!r}, {num_tokens})", sum(t.num_missing(seq_len) for t in request.tables))
        for table in request.tables:
            table.append(seq_len)
        request.seq_len = seq_len
        return request

    def fork(self, source: RequestId, destination: RequestId) -> PagedRequest:
        """`destination` gets tables over what `source` has written. Takes no block: the first write copies."""
        parent = self._idle(source, "fork")
        child = self._new(self._new_id(destination))
        self._share(parent, child)
        return child

    def reorder(self, request_ids: Sequence[RequestId], sources: Sequence[RequestId]) -> None:
        """`request_ids[i]` goes on from what `sources[i]` has now (a step of a beam search). Takes no block."""
        request_ids, sources = request_ids_of("request_ids", request_ids), request_ids_of("sources", sources)
        if len(request_ids) != len(sources) or len(set(request_ids)) != len(request_ids):
            raise RequestError(
                f"reorder: {len(sources)} sources for {len(request_ids)} requests; each request is given once, with "
                f"one source"
            )
        targets = [self._idle(r, "reorder") for r in request_ids]
        parents = [self._idle(s, "reorder") for s in sources]
        fresh: list[tuple[PagedRequest, PagedRequest]] = []
        for target, parent in zip(targets, parents, strict=True):
            if target is not parent:
                child = PagedRequest(target.request_id, target.seq_id, [])
                self._share(parent, child)
                fresh.append((target, child))
        for target, child in fresh:
            self._allocation.close(target)
            self.requests[target.request_id] = child

    def truncate(self, request_id: RequestId, length: int) -> int:
        """Keep the first `length` positions; returns how many blocks that gave back."""
        request, length = self._idle(request_id, "truncate"), whole("seq_len", length)
        if not 0 <= length <= request.seq_len:
            raise RequestError(
                f"truncate({request_id!r}, {length}): the request has room for {request.seq_len} positions, "
                f"{request.context_len} of them written; give 0 to {request.seq_len}"
            )
        if length < (first := self.first_truncation(request)):
            raise RequestError(
                f"truncate({request_id!r}, {length}): blocks behind a sliding window were given back after they were "
                f"read last; this request can be cut to {first} positions or more. Free it and compute it again"
            )
        released = sum(table.truncate(length) for table in request.tables)
        request.seq_len = length
        request.context_len = min(request.context_len, length)
        return released

    def free(self, request_id: RequestId) -> int:
        """The request is over; returns how many blocks its tables held."""
        request = self._idle(request_id, "free")
        del self.requests[request.request_id]
        return self._allocation.close(request)

    # -- steps -------------------------------------------------------------------------------------------------

    def begin(self, counts: Sequence[tuple[RequestId, int]]) -> list[tuple[int, int]]:
        """Open a step; returns the (source, destination) block copies to run, in order, before anything is written."""
        if self.step:
            raise RequestError(f"{self.describe_step()} is open; end or abort it before the next one begins")
        if not counts:
            raise RequestError("a step of no request; give at least one")
        rows = self.rows(counts)
        tokens = sum(row.count for row in rows)
        what = f"a step of {_counted(len(rows), 'request')} and {_counted(tokens, 'token')}"
        self._check_room(what, self.blocks_needed(rows))
        copies = []
        for row in rows:
            copies += [(t.source, t.destination) for t in self._allocation.extend(row.request, row.start, row.end)]
            row.request.seq_len = max(row.request.seq_len, row.end)
        self.num_copies += len(copies)
        self.step = tuple(rows)
        return copies

    def commit(self, *, keep_windows: bool = False) -> None:
        """The open step's positions are written in all layers.

        Behind a window everything stays that the step's first new position could see, so that a whole step can be
        taken back (guesses that turn out wrong). keep_windows: nothing is given back at all.
        """
        for row in self.step:
            row.request.context_len = row.end
            if not keep_windows:
                self._allocation.release_behind_window(row.request, row.start)
        self.num_steps += bool(self.step)
        self.step = ()

    def abort(self) -> None:
        """Forget the open step: no context grew. The room it took stays with its requests."""
        self.step = ()

    def release_behind_windows(self, request_id: RequestId) -> int:
        """Give back at once what the next token cannot see; returns how many blocks. No truncation after it."""
        request = self._idle(request_id, "release_behind_windows")
        return self._allocation.release_behind_window(request, request.context_len)

    def describe_step(self) -> str:
        """The open step in words."""
        return f"a step of request {', '.join(repr(row.request.request_id) for row in self.step)}"

    # -- trust -------------------------------------------------------------------------------------------------

    def audit(self) -> None:
        """Counts, tables and lengths must agree; `AuditError` at the first that does not. O(pool)."""
        holders: Counter[int] = Counter()
        for request_id, request in self.requests.items():
            if request.request_id != request_id or not 0 <= request.context_len <= request.seq_len:
                raise AuditError(
                    f"request {request_id!r}: {request.context_len} positions written, room for {request.seq_len}"
                )
            for table in request.tables:
                table.audit()
                if table.num_missing(request.seq_len):
                    raise AuditError(
                        f"request {request_id!r}, group {table.group}: {len(table.ids)} blocks cannot hold "
                        f"{request.seq_len} positions"
                    )
                holders.update(table.live_ids())
        self.pool.audit(dict(holders))

    # -- inside ------------------------------------------------------------------------------------------------

    def _new(self, request_id: RequestId) -> PagedRequest:
        request = PagedRequest(request_id, self._next_seq_id, [])
        self._next_seq_id += 1
        self.requests[request_id] = request
        self.peak_requests = max(self.peak_requests, len(self.requests))
        return request

    def _share(self, parent: PagedRequest, child: PagedRequest) -> None:
        self._allocation.fork(parent, child)
        for table in child.tables:
            table.truncate(parent.context_len)  # room that the parent has not written stays its own
        child.context_len = child.seq_len = parent.context_len
        self.num_forks += 1

    def _new_id(self, request_id: RequestId) -> RequestId:
        request_id = request_id_of(request_id)
        if request_id in self.requests:
            raise RequestError(f"request {request_id!r} is there already; free({request_id!r}) it or take another id")
        return request_id

    def _idle(self, request_id: RequestId, verb: str) -> PagedRequest:
        request = self.get(request_id)
        if any(row.request is request for row in self.step):
            raise RequestError(
                f"{verb}: request {request_id!r} is in the step that is open; end or abort the step before it"
            )
        return request

    def _check_room(self, what: str, need: int) -> None:
        available = self.pool.num_available
        if need <= available:
            return
        held = [r for r in self.requests.values() if any(t.num_live for t in r.tables)]
        held.sort(key=lambda r: -sum(t.num_live for t in r.tables))
        names = [f"request {r.request_id!r} with {self._holding(r)}" for r in held[:NAMED_HOLDERS]]
        if len(held) > NAMED_HOLDERS:
            names.append(_counted(len(held) - NAMED_HOLDERS, "more request"))
        holders = f"; held: {', '.join(names)}" if names else ""
        raise CapacityError(
            f"{what}: {_counted(need, 'block')} {'is' if need == 1 else 'are'} needed, {available} of "
            f"{self.pool.num_blocks} are free{holders}. Free or truncate a request, wait until one ends, or build the "
            f"pool with num_blocks={self.pool.num_blocks + need - available} or more"
        )

    def _holding(self, request: PagedRequest) -> str:
        ids = [block for table in request.tables for block in table.live_ids()]
        shared = sum(self.pool.count(block) > 1 for block in ids)
        return _counted(len(ids), "block") + (f" ({shared} shared)" if shared else "")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
