"""`Draws`: which sequences draw in a step, from which row of the model's output, and with what.

Parameters of a draw never change, so they are kept in arrays by slot when a sequence begins and are only gathered per
step. It knows no logits and no device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.core.step import SequenceStart
from octavo.runner.batch import HostBatch
from octavo.runner.device_adjust import NOBODY, Need, Wanted
from octavo.runner.device_inputs import DeviceTables
from octavo.runner.device_sampler import Mode
from octavo.runner.noise import uniforms
from octavo.runner.rows import RowStore, SequenceRow

LISTED = (-1, 0, 1, 5, 20)  # so many log-probabilities are listed for every draw of a step, if anybody asks for as many

Ints = npt.NDArray[np.int64]


class DrawParameters:
    """By slot: temperature (0: greedy), filters, seed and sample index, and what it takes to adjust the logits."""

    def __init__(self, capacity: int) -> None:
        self._allocate(capacity)

    def _allocate(self, capacity: int) -> None:
        self.temperature = np.zeros(capacity, dtype=np.float32)
        self.top_k = np.zeros(capacity, dtype=np.int32)
        self.top_p = np.ones(capacity, dtype=np.float32)
        self.min_p = np.zeros(capacity, dtype=np.float32)
        self.seed = np.zeros(capacity, dtype=np.uint64)
        self.sample_index = np.zeros(capacity, dtype=np.int64)
        self.mode = np.zeros(capacity, dtype=np.int8)
        self.listed = np.full(capacity, -1, dtype=np.int32)  # log-probabilities asked for; -1: none
        self.need = np.zeros(capacity, dtype=np.int8)  # `Need` at any length of the text
        self.early_need = np.zeros(capacity, dtype=np.int8)  # and while fewer than `until` tokens are generated
        self.until = np.zeros(capacity, dtype=np.int64)
        self.prompt_len = np.zeros(capacity, dtype=np.int64)
        self.place = np.full(capacity, NOBODY, dtype=np.int64)  # in `Adjustments`

    def set(self, slot: int, start: SequenceStart, vocab_size: int) -> None:
        """A sequence begins in `slot`."""
        if slot >= len(self.mode):
            old, size = self.__dict__.copy(), len(self.mode)
            self._allocate(max(2 * size, slot + 1))
            for name, values in old.items():
                getattr(self, name)[:size] = values
        params = start.params
        top_k = params.top_k if params.top_k < vocab_size else 0
        self.temperature[slot] = 0.0 if params.greedy else max(params.temperature, 1e-30)
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = top_k, params.top_p, params.min_p
        self.seed[slot] = start.seed & 0xFFFFFFFFFFFFFFFF
        self.sample_index[slot] = start.sample_index
        self.listed[slot] = -1 if params.logprobs is None else min(params.logprobs, vocab_size)
        filtered = bool(top_k) or params.top_p < 1.0 or params.min_p > 0.0
        self.mode[slot] = Mode.GREEDY if params.greedy else Mode.FILTERED if filtered else Mode.RANDOM
        self.adjust(slot, None, NOBODY)
        self.prompt_len[slot] = start.prompt_len

    def adjust(self, slot: int, wanted: Wanted | None, place: int) -> None:
        """The slot's sequence has a place in `Adjustments`, or None and `NOBODY`."""
        self.place[slot] = place
        self.need[slot] = 0 if wanted is None else wanted.need
        self.early_need[slot] = 0 if wanted is None else wanted.early_need
        self.until[slot] = 0 if wanted is None else wanted.until

    def changes(self, slots: Ints, positions: Ints) -> tuple[Need, tuple[Ints, ...]]:
        """(what draws at `positions` need; their places and generated tokens, empty if they need nothing)."""
        lengths = positions - self.prompt_len[slots]
        needs = self.need[slots] | np.where(lengths < self.until[slots], self.early_need[slots], 0)
        need = Need(int(np.bitwise_or.reduce(needs))) if len(slots) else Need.NOTHING
        return need, (self.place[slots], lengths) if need else ()


@dataclass(frozen=True, slots=True)
class Draws:
    """Per draw: its sequence's row and slot, the token of the batch whose output it reads, the position it draws.

    errors: why a sequence cannot draw although it is part of the step. in_row_order: row b of the batch draws once, for
    itself, and nobody else draws. mode, listed: the most demanding draw's, the latter rounded up to one of a few. need:
    adjustments that any of them takes.
    """

    rows: list[SequenceRow]
    slots: Ints
    tokens: Ints
    positions: list[int]
    errors: list[str | None]
    in_row_order: bool
    mode: Mode
    listed: int
    need: Need
    _numbers: tuple[npt.NDArray[Any], ...]

    @classmethod
    def of(cls, host: HostBatch, rows: RowStore, tables: DeviceTables, params: DrawParameters) -> Draws:
        """The draws of a batch."""
        drawing: list[SequenceRow] = []
        tokens: list[int] = []
        positions: list[int] = []
        errors: list[str | None] = []
        in_row_order = True
        for b, (s, row) in enumerate(zip(host.scheduled, host.rows, strict=True)):
            in_row_order &= s.sample_ids == (s.seq_id,)
            last = int(host.query_start[b + 1]) - 1 if s.sample_ids else 0
            for seq_id in s.sample_ids:
                own = row if seq_id == s.seq_id else rows.get(seq_id)
                drawing.append(own)
                tokens.append(last)
                positions.append(s.start + s.num_tokens)
                errors.append(row.error or own.state.error)
        slots = np.fromiter((tables.slot(r.seq_id) for r in drawing), np.int64, count=len(drawing))
        mode = Mode(int(params.mode[slots].max())) if len(slots) else Mode.GREEDY
        most = int(params.listed[slots].max()) if len(slots) else -1
        listed = next((size for size in LISTED if size >= most), most)
        noise = np.zeros(len(slots))
        if mode is not Mode.GREEDY:
            noise = uniforms(params.seed[slots].tolist(), params.sample_index[slots].tolist(), positions)
        numbers = (params.temperature[slots], params.top_k[slots], params.top_p[slots], params.min_p[slots], noise)
        need, changes = params.changes(slots, np.array(positions, dtype=np.int64))
        order = np.array(tokens, dtype=np.int64)
        return cls(drawing, slots, order, positions, errors, in_row_order, mode, listed, need, (*numbers, *changes))

    def __len__(self) -> int:
        return len(self.rows)

    def arrays(self) -> Sequence[npt.NDArray[Any]]:
        """Logit rows and slots int64 [D], the fields of `DrawInputs`, and if there is a need, places and lengths."""
        return (self.tokens, self.slots, *self._numbers)

    def padded(self, size: int) -> list[npt.NDArray[Any]]:
        """The same but for the first two, for `size` draws; those added are greedy and nobody's."""
        fills = (0.0, 0, 1.0, 0.0, 0.0, *((NOBODY, 0) if self.need else ()))
        out = []
        for array, fill in zip(self._numbers, fills, strict=True):
            wide = np.full(size, fill, dtype=array.dtype)
            wide[: len(array)] = array
            out.append(wide)
        return out
