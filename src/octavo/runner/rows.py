"""`RowStore`: one row per live sequence, updated by difference.

A row holds the sequence's block tables (one per KV group), its last drawn token and its sampling state. Rows stay
dense: when one is closed the last row moves into the hole, so in the common case (every live sequence takes part in
a step) the first B rows of a table *are* the batch's table and nothing is gathered.

It does not know the pool: block ids are numbers it was told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.core.step import SequenceStart, TableUpdate
from octavo.errors import BoundsError, InternalError
from octavo.runner.pooling import Pool
from octavo.runner.sampling_state import SamplingState

Table = npt.NDArray[np.int32]


class SequenceRow:
    """What the runner knows of one sequence. `index`: its row in the tables, which may change when others end."""

    __slots__ = (
        "adapter",
        "end_ids",
        "error",
        "index",
        "last_token",
        "pool",
        "prompt_len",
        "seq_id",
        "state",
        "token_ids",
    )

    def __init__(self, start: SequenceStart, index: int, vocab_size: int) -> None:
        self.seq_id = start.seq_id
        self.adapter = start.adapter
        self.index = index
        self.prompt_len = start.prompt_len
        self.end_ids = frozenset(start.end_ids)
        self.token_ids = start.token_ids  # kept for prompt logprobs; the tuple is shared, not copied
        self.state = SamplingState(start, vocab_size)
        self.pool = None if start.pooling is None else Pool(start.pooling, start.prompt_len)
        self.last_token: int | None = None
        self.error: str | None = None

    def push(self, token: int) -> None:
        """The sequence drew `token`."""
        self.last_token = token
        self.state.push(token)


class RowStore:
    """Rows by sequence id, and `tables`: int32 [groups, capacity, max_blocks], -1 where nothing was ever set."""

    def __init__(self, num_groups: int, max_blocks: int, capacity: int, vocab_size: int) -> None:
        self.max_blocks = max_blocks
        self._vocab_size = vocab_size
        self._rows: list[SequenceRow] = []
        self._by_id: dict[int, SequenceRow] = {}
        self.tables: Table = np.full((num_groups, capacity, max_blocks), -1, dtype=np.int32)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._by_id

    def open(self, start: SequenceStart) -> None:
        """Give a sequence a row with empty tables. Its id must be new."""
        if start.seq_id in self._by_id:
            raise InternalError(f"sequence {start.seq_id} is started but has a row already; end it first")
        index = len(self._rows)
        if index == self.tables.shape[1]:
            self.tables = np.concatenate([self.tables, np.full_like(self.tables, -1)], axis=1)
        self.tables[:, index] = -1
        row = SequenceRow(start, index, self._vocab_size)
        self._rows.append(row)
        self._by_id[start.seq_id] = row

    def close(self, seq_id: int) -> None:
        """Forget a sequence; forgetting one that has no row (ended while it was preempted) does nothing."""
        row = self._by_id.pop(seq_id, None)
        if row is None:
            return
        last = self._rows.pop()
        if last is not row:
            self.tables[:, row.index] = self.tables[:, last.index]
            last.index = row.index
            self._rows[row.index] = last

    def get(self, seq_id: int) -> SequenceRow:
        """The row of a live sequence."""
        row = self._by_id.get(seq_id)
        if row is None:
            live = ", ".join(map(str, sorted(self._by_id)[:8])) or "none"
            raise InternalError(f"sequence {seq_id} is in the plan but was never started; live ones: {live}")
        return row

    def update(self, row: SequenceRow, updates: Sequence[TableUpdate]) -> None:
        """Write new block ids into the row's tables."""
        for update in updates:
            end = update.first + len(update.block_ids)
            if not 0 <= update.group < len(self.tables):
                raise BoundsError(f"sequence {row.seq_id}: group {update.group} of {len(self.tables)}")
            if update.first < 0 or end > self.max_blocks:
                raise BoundsError(
                    f"sequence {row.seq_id}, group {update.group}: logical blocks {update.first} to {end - 1} do not "
                    f"fit a table of {self.max_blocks} blocks (max_model_len)"
                )
            self.tables[update.group, row.index, update.first : end] = update.block_ids
