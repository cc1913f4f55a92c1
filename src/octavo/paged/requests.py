"""`PagedRequests`: the half of `PagedAttention` that says who holds which blocks, behind one lock.

It touches no tensor of the pool. Invariant: every public method is atomic, from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.kv_layout import KVLayout
from octavo.core.request_tables import PagedRequest, RequestTables
from octavo.core.whole_numbers import RequestId, request_ids_of, whole, wholes
from octavo.errors import RequestError
from octavo.paged.batch import slots_of, table_rows
from octavo.paged.rows import pairs_of
from octavo.paged.view import PagedView, paged_view

BlockIds = Sequence[int] | Sequence[Sequence[int]] | torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedStats:
    """Gauges of now, and counters since the start. Blocks, unless it says tokens or bytes."""

    num_blocks: int
    free: int
    used: int
    shared: int  # of the used ones, held by several requests
    peak_used: int
    bytes_per_block: int
    used_bytes: int
    pool_bytes: int
    requests: int
    written_tokens: int  # over all requests, shared ones counted for each
    reserved_tokens: int  # the same with room that is not written yet
    steps: int
    forks: int
    copies: int  # blocks copied before a write


class PagedRequests:
    """Requests over one pool of blocks. See `octavo.PagedAttention`, which is one."""

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._memory = RequestTables(layout, num_blocks)
        self._lock = threading.RLock()

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return self._memory.pool.num_blocks

    @property
    def block_size(self) -> int:
        return self._layout.block_size

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self._layout.groups)

    @property
    def num_groups(self) -> int:
        """Block tables of one request: 1, unless windows differ from layer to layer."""
        return self._layout.num_groups

    @property
    def bytes_per_block(self) -> int:
        return self._layout.bytes_per_block

    # -- requests ----------------------------------------------------------------------------------------------

    def allocate(self, request_id: RequestId, seq_len: int) -> list[int]:
        """Make a request with room for `seq_len` positions, none of them written yet.

        Returns the ids of its blocks, in logical order (the table of layer 0).

        Raises
        ------
        CapacityError
            Too few free blocks. It says who holds them and how many are needed; nothing was taken.
        RequestError
            The id is taken, or seq_len negative.
        """
        with self._lock:
            return list(self._memory.allocate(request_id, seq_len).tables[0].ids)

    def append(self, request_id: RequestId, num_tokens: int = 1) -> list[int]:
        """Make room for `num_tokens` positions more than there is room for; returns the ids of the new blocks.

        `forward` does so by itself where room lacks. Whoever wants to know before a step calls this, or
        `blocks_needed`.
        """
        with self._lock:
            before = len(self._memory.get(request_id).tables[0].ids)
            return list(self._memory.append(request_id, num_tokens).tables[0].ids[before:])

    def fork(self, source: RequestId, destination: RequestId) -> None:
        """Make `destination`, with all that `source` has written. Takes no block and copies nothing.

        Whoever writes first into a block that both hold gets a copy of it: so the next step of either may need one
        block more per group.
        """
        with self._lock:
            self._memory.fork(source, destination)

    def reorder(self, request_ids: Sequence[RequestId], sources: Sequence[RequestId]) -> None:
        """A step of a beam search: `request_ids[i]` goes on from what `sources[i]` has now. Takes no block."""
        with self._lock:
            self._memory.reorder(request_ids, sources)

    def truncate(self, request_id: RequestId, seq_len: int) -> int:
        """Keep the first `seq_len` positions (guesses that were wrong); returns how many blocks were given back.

        With a sliding window, at least the last step can always be taken back.
        """
        with self._lock:
            return self._memory.truncate(request_id, seq_len)

    def release_behind_windows(self, request_id: RequestId) -> int:
        """Give back what the next token cannot see (after `end(keep_windows=True)`); returns how many blocks."""
        with self._lock:
            return self._memory.release_behind_windows(request_id)

    def free(self, request_id: RequestId) -> int:
        """End a request; returns how many blocks it held. Those that nobody else holds are free at once."""
        with self._lock:
            return self._memory.free(request_id)

    # -- questions ---------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now."""
        with self._lock:
            return self._memory.pool.num_available

    @property
    def request_ids(self) -> list[RequestId]:
        with self._lock:
            return list(self._memory.requests)

    def context_len(self, request_id: RequestId) -> int:
        """Positions that are written."""
        with self._lock:
            return self._memory.get(request_id).context_len

    def seq_len(self, request_id: RequestId) -> int:
        """Positions that there is room for, the written ones included."""
        with self._lock:
            return self._memory.get(request_id).seq_len

    def blocks_needed(self, request_ids: Sequence[RequestId], query_lens: Sequence[int] | None = None) -> int:
        """Blocks that a step of these requests would take (None: one token each), copies before a write included."""
        request_ids = request_ids_of("request_ids", request_ids)
        counts = [1] * len(request_ids) if query_lens is None else query_lens
        with self._lock:
            return self._memory.blocks_needed(self._memory.rows(pairs_of(request_ids, counts)))

    def block_table(self, request_id: RequestId, layer: int = 0) -> list[int]:
        """Block ids in logical order; -1: given back behind the sliding window."""
        with self._lock:
            return list(self._memory.get(request_id).tables[self._group(layer)].ids)

    def slots(self, request_id: RequestId, start: int = 0, end: int | None = None, layer: int = 0) -> list[int]:
        """block_id * block_size + offset of positions start..end-1 (None: all that have room)."""
        with self._lock:
            request, start = self._memory.get(request_id), whole("start", start)
            end = request.seq_len if end is None else whole("end", end)
            table = request.tables[self._group(layer)]
            if not table.first_live * self.block_size <= start <= end <= request.seq_len:
                raise RequestError(
                    f"slots({request_id!r}, {start}, {end}): positions {table.first_live * self.block_size} to "
                    f"{request.seq_len} have room"
                )
            return [int(slot) for slot in slots_of(table, start, end)]

    def tables(self, request_ids: Sequence[RequestId], layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """(block_tables int32 [B, M], context_lens int32 [B]) for kernels of your own and `octavo.paged_attention`."""
        with self._lock:
            requests = [self._memory.get(r) for r in request_ids_of("request_ids", request_ids)]
            table = torch.from_numpy(table_rows([r.tables[self._group(layer)] for r in requests]))
            lengths = torch.tensor([r.context_len for r in requests], dtype=torch.int32)
        return table.to(self._device), lengths.to(self._device)

    def view(self) -> PagedView:
        """A snapshot in plain numbers (`octavo.core.view.PoolView`); printed, a picture of the block tables."""
        with self._lock:
            return paged_view(self._memory)

    def stats(self) -> PagedStats:
        """Gauges and counters. O(requests)."""
        with self._lock:
            pool, requests = self._memory.pool, self._memory.requests.values()
            return PagedStats(
                num_blocks=pool.num_blocks,
                free=pool.num_available,
                used=pool.num_used,
                shared=pool.num_shared,
                peak_used=pool.peak_used,
                bytes_per_block=self.bytes_per_block,
                used_bytes=pool.num_used * self.bytes_per_block,
                pool_bytes=pool.num_blocks * self.bytes_per_block,
                requests=len(requests),
                written_tokens=sum(r.context_len for r in requests),
                reserved_tokens=sum(r.seq_len for r in requests),
                steps=self._memory.num_steps,
                forks=self._memory.num_forks,
                copies=self._memory.num_copies,
            )

    def audit(self) -> None:
        """Compare every count with the tables that hold the block; raises `AuditError` at the first contradiction."""
        with self._lock:
            self._memory.audit()

    # -- inside ------------------------------------------------------------------------------------------------

    def _group(self, layer: int) -> int:
        layer = whole("layer", layer)
        if not 0 <= layer < self.num_layers:
            raise RequestError(f"layer={layer}: there are {self.num_layers}, from 0")
        return self._layout.place(layer)[0]

    def _requests_of(self, block_ids: BlockIds | None, request_ids: Sequence[RequestId] | None) -> list[PagedRequest]:
        if (block_ids is None) == (request_ids is None):
            raise RequestError("give either request_ids=[…] or the block ids that allocate() returned")
        if request_ids is not None:
            return [self._memory.get(r) for r in request_ids_of("request_ids", request_ids)]
        ids: Any = block_ids.tolist() if isinstance(block_ids, torch.Tensor) else block_ids
        nested = isinstance(ids, list | tuple) and len(ids) > 0 and hasattr(ids[0], "__len__")
        return [self._holder(wholes("block_ids", table)) for table in (ids if nested else [ids])]

    def _holder(self, ids: list[int]) -> PagedRequest:
        """The one request whose table begins with these ids."""
        found = [r for r in self._memory.requests.values() if ids and r.tables[0].ids[: len(ids)] == ids]
        if len(found) == 1:
            return found[0]
        if not found:
            raise RequestError(
                f"block_ids={ids}: no request's table begins with them. Tables change when a shared block is copied "
                f"or a request is truncated: ask block_table(request_id), or give request_ids=[…]"
            )
        names = ", ".join(repr(r.request_id) for r in found)
        raise RequestError(f"block_ids={ids} are shared by requests {names}: give request_ids=[…] instead")
