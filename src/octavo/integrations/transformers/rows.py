"""`CacheRows`: which request of the pool each row of a batch is.

`generate` repeats a prompt for every sample and every beam before it computes anything, so rows begin as copies of each
other. Rows that were given the same so far are *twins*: one request, computed and kept once. They part when their keys
differ for the first time: then, and only then, one of them forks, and copy-on-write does the rest. To reorder beams is
to rename rows.

Rows are compared by the keys and values that the first layer computes (bit by bit), since a cache never sees tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.attention import PagedAttention
from octavo.integrations.transformers.pool import PagedPool


class CacheRows:
    """ids[b]: the request of row b. Empty before the first pass."""

    def __init__(self, pool: PagedPool, *, share: bool) -> None:
        self.pool = pool
        self.share = share
        self.ids: list[int] = []

    @property
    def requests(self) -> list[int]:
        """Every request once, in the order of its first row."""
        return list(dict.fromkeys(self.ids))

    def open(self, attention: PagedAttention, batch: int) -> None:
        """Rows for a batch of an empty cache: one request until they differ."""
        first = self.pool.new_request()
        attention.allocate(first, 0)
        self.ids = [first] * batch

    def part(self, attention: PagedAttention, seen: torch.Tensor) -> None:
        """Fork rows that are not twins any more. seen: [B, …], what each row is given now."""
        if len(set(self.ids)) == len(self.ids):
            return
        flat = seen.flatten(1)
        sums = flat.double().sum(1).tolist()
        kept: dict[int, list[int]] = {}  # request -> a row of each kind
        ids = list(self.ids)
        for row, request in enumerate(self.ids):
            kinds = kept.setdefault(request, [])
            same = (k for k in kinds if self.share and sums[k] == sums[row] and torch.equal(flat[k], flat[row]))
            twin = next(same, None)
            if twin is not None:
                ids[row] = ids[twin]
                continue
            if kinds:
                ids[row] = self.pool.new_request()
                attention.fork(request, ids[row])
            kinds.append(row)
        self.ids = ids

    def rearrange(self, sources: Sequence[int]) -> None:
        """Row i goes on from what row sources[i] has; requests without a row end."""
        before = self.requests
        self.ids = [self.ids[source] for source in sources]
        for request in before:
            if request not in self.ids:
                self.pool.attention.free(request)

    def fork(self) -> CacheRows:
        """The same rows again, over forks of the same requests."""
        twin = CacheRows(self.pool, share=self.share)
        renamed = {}
        for request in self.requests:
            renamed[request] = self.pool.new_request()
            self.pool.attention.fork(request, renamed[request])
        twin.ids = [renamed[request] for request in self.ids]
        return twin

    def free(self) -> None:
        """End every request; the rows are gone."""
        requests, self.ids = self.requests, []
        for request in requests:
            self.pool.attention.free(request)
