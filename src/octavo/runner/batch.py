"""`BatchBuilder`: the scheduled part of a plan -> token ids, positions and an `AttentionBatch`.

Arrays are allocated once for the largest step. Work per step grows with sequences and new tokens, not with context:
tables are read in place when the batch is the first B rows of the row store (the usual case), and copied row by row
only when some live sequence sits the step out.

The batch's order is the rows' order, not the plan's; `StepBatch.scheduled` says which sequence is where. It does not
know the model or the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.kv_layout import KVLayout
from octavo.core.step import LAST_SAMPLED, ScheduledSequence
from octavo.errors import BoundsError, InternalError
from octavo.kernels.interface import AttentionBatch
from octavo.runner.rows import RowStore, SequenceRow

Ints = npt.NDArray[np.int64]
Wanted = Callable[[ScheduledSequence, SequenceRow], int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's input, valid until the next build. Row b is `scheduled[b]`; its tokens are starts[b] : starts[b + 1]."""

    scheduled: list[ScheduledSequence]
    rows: list[SequenceRow]
    starts: list[int]
    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionBatch


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A step's input as arrays of the host. index: each row's place in the row store; slots: [groups, T]."""

    scheduled: list[ScheduledSequence]
    rows: list[SequenceRow]
    index: Ints
    query_start: npt.NDArray[np.int32]
    context_len: npt.NDArray[np.int32]
    token_ids: Ints
    positions: Ints
    slots: Ints
    max_query: int
    max_context: int


class BatchBuilder:
    """Assembles batches of at most `max_tokens` tokens over the tables of `rows`.

    layout: of one model; its groups are those of the rows from `first_group` on.
    """

    def __init__(
        self,
        layout: KVLayout,
        rows: RowStore,
        *,
        max_tokens: int,
        vocab_size: int,
        device: torch.device,
        first_group: int = 0,
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._device = device
        #: Told of every batch: its rows, and int64 [B + 1] where their tokens start.
        self.on_batch: Callable[[Sequence[SequenceRow], Ints], None] | None = None
        #: Places of the batch whose token is not known on the host, filled by `arrays`; None: it knows all of them.
        self.late: list[tuple[int, SequenceRow]] | None = None
        self._tokens = np.zeros(max_tokens, dtype=np.int64)
        self._positions = np.zeros(max_tokens, dtype=np.int64)
        self._slots = np.zeros((layout.num_groups, max_tokens), dtype=np.int64)
        self._arange = np.arange(max_tokens + 1, dtype=np.int64)
        self._groups = slice(first_group, first_group + layout.num_groups)
        self._tables = np.empty_like(rows.tables[self._groups])

    def build(self, scheduled: Sequence[ScheduledSequence], wanted: Wanted | None = None) -> StepBatch:
        """The rows' tables are up to date. Raises `BoundsError` for a position without a block of its own.

        wanted: of how many of a sequence's last tokens the hidden state is read; None: of all.
        """
        host = self.arrays(scheduled)
        attention = AttentionBatch(
            query_start=self._to_device(host.query_start),
            context_len=self._to_device(host.context_len),
            block_tables=self._to_device(self._batch_tables(host.index)).unbind(0),
            slots=self._to_device(host.slots).unbind(0),
            max_query=host.max_query,
            max_context=host.max_context,
            wanted=None if wanted is None else self._wanted(host, wanted),
        )
        return StepBatch(
            scheduled=host.scheduled,
            rows=host.rows,
            starts=host.query_start.tolist(),
            token_ids=self._to_device(host.token_ids),
            positions=self._to_device(host.positions),
            attention=attention,
        )

    def arrays(self, scheduled: Sequence[ScheduledSequence]) -> HostBatch:
        """The same on the host, without the tables; valid until the next call."""
        pairs = sorted(((self._rows.get(s.seq_id), s) for s in scheduled), key=lambda pair: pair[0].index)
        rows, order = [row for row, _ in pairs], [s for _, s in pairs]
        counts, first = [s.num_tokens for s in order], [s.start for s in order]
        total = sum(counts)
        self._check(order, rows, counts, total)
        index = np.array([row.index for row in rows], dtype=np.int64)
        if total == len(order):  # one token each: most steps, and a small one should cost little
            starts, batch_row, token_index = self._arange[: total + 1], self._arange[:total], index
            self._positions[:total] = first
        else:
            starts = np.zeros(len(order) + 1, dtype=np.int64)
            np.cumsum(counts, out=starts[1:])
            batch_row = np.repeat(self._arange[: len(order)], counts)
            token_index = index[batch_row]
            np.add((first - starts[:-1])[batch_row], self._arange[:total], out=self._positions[:total])
        if self.late is not None:
            self.late = []
        self._fill_tokens(rows, order, starts.tolist(), total)
        if self.on_batch is not None:
            self.on_batch(rows, starts)
        self._fill_slots(order, token_index, batch_row, total)
        context = [low + count for low, count in zip(first, counts, strict=True)]
        return HostBatch(
            scheduled=order,
            rows=rows,
            index=index,
            query_start=starts.astype(np.int32),
            context_len=np.array(context, dtype=np.int32),
            token_ids=self._tokens[:total],
            positions=self._positions[:total],
            slots=self._slots[:, :total],
            max_query=max(counts),
            max_context=max(context),
        )

    def _wanted(self, host: HostBatch, wanted: Wanted) -> torch.Tensor | None:
        """`AttentionBatch.wanted`: None where it is every token, as in a step of decoding sequences."""
        counts = [wanted(s, row) for s, row in zip(host.scheduled, host.rows, strict=True)]
        return None if sum(counts) == len(host.token_ids) else self._to_device(np.array(counts, dtype=np.int32))

    def _check(self, order: list[ScheduledSequence], rows: list[SequenceRow], counts: list[int], total: int) -> None:
        if total > self._max_tokens:
            raise BoundsError(f"the plan has {total} tokens, the limit is max_num_batched_tokens={self._max_tokens}")
        limit = self._rows.max_blocks * self._layout.block_size
        for i, s in enumerate(order):
            if i and rows[i] is rows[i - 1]:
                raise InternalError(f"sequence {s.seq_id} is scheduled twice in one step")
            if counts[i] < 1 or s.start < 0 or s.start + counts[i] > limit:
                raise BoundsError(
                    f"sequence {s.seq_id}: {counts[i]} tokens from position {s.start}; a step computes at least "
                    f"one, and tables end at position {limit}"
                )

    def _fill_tokens(
        self, rows: list[SequenceRow], order: list[ScheduledSequence], starts: list[int], total: int
    ) -> None:
        ids: list[int] = []
        for i, s in enumerate(order):
            ids += s.token_ids
            if LAST_SAMPLED in s.token_ids:
                place = starts[i] + s.token_ids.index(LAST_SAMPLED)
                ids[place] = self._last(rows[i], place)
        self._tokens[:total] = ids
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            self._refuse_tokens(rows, starts)

    def _last(self, row: SequenceRow, place: int) -> int:
        """What LAST_SAMPLED stands for; 0 for a sequence whose draw failed, which cannot be used any more."""
        if self.late is not None:
            self.late.append((place, row))  # the device has it
            return 0
        if row.last_token is None:
            if row.error is None:
                row.error = f"sequence {row.seq_id} refers to the token it drew last, but has drawn none"
            return 0
        return row.last_token

    def _refuse_tokens(self, rows: list[SequenceRow], starts: list[int]) -> None:
        """Mark the sequences that hold ids outside the vocabulary and compute with id 0 in their place."""
        for i, row in enumerate(rows):
            part = self._tokens[starts[i] : starts[i + 1]]
            bad = (part < 0) | (part >= self._vocab_size)
            if bad.any():
                limit = self._vocab_size - 1
                row.error = f"token id {int(part[bad][0])} is outside the vocabulary; use ids 0 to {limit}"
                part[bad] = 0

    def _fill_slots(self, order: list[ScheduledSequence], index: Ints, batch_row: Ints, total: int) -> None:
        size = self._layout.block_size
        logical, offset = np.divmod(self._positions[:total], size)
        blocks = self._rows.tables[self._groups][:, index, logical]
        # A write to a block nobody holds would corrupt a neighbour, so this is checked whatever the backend.
        if int(blocks.min()) < 0:
            group = int((blocks < 0).any(axis=1).argmax())
            token = int(blocks[group].argmin())
            s = order[int(batch_row[token])]
            raise BoundsError(
                f"sequence {s.seq_id}, group {group}: position {int(self._positions[token])} needs logical block "
                f"{int(logical[token])}, which has no physical block"
            )
        slots = self._slots[:, :total]
        np.multiply(blocks, size, out=slots, dtype=np.int64)
        slots += offset

    def _batch_tables(self, index: Ints) -> npt.NDArray[np.int32]:
        """Tables [groups, B, max_blocks] of the rows `index` (ascending, all different)."""
        count, tables = len(index), self._rows.tables[self._groups]
        if index[-1] == count - 1:
            return tables[:, :count]
        if self._tables.shape[1] < count:
            self._tables = np.empty_like(tables)
        return np.take(tables, index, axis=1, out=self._tables[:, :count], mode="clip")

    def _to_device(self, array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> torch.Tensor:
        """On a CPU the tensor shares the array's memory."""
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)
