"""`LoraBank`: adapters in memory, and the products they change.

Each product of the decoder is wrapped once. In a step every sequence may have an adapter of its own: its tokens are
gathered, one pass per adapter that is present adds scale * B (A x) to them, and tokens without one cost nothing. The
halves are products of `Ops`, so where those give a row the same bits whatever the batch, an adapted row has them too.

Knows adapters by the hash of their content; names and lives are `octavo.lora`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.errors import InternalError
from octavo.kernels.ops import Linear, Ops
from octavo.models.lora_reader import AdapterFiles
from octavo.models.lora_targets import LinearUpdate, updates_of
from octavo.runner.rows import SequenceRow


@dataclass(frozen=True, slots=True)
class _Update:
    """One product's part of an adapter: the halves that read its input together, then what each adds where."""

    down: Linear  # [n, in] -> [n, sum of ranks]
    ups: tuple[tuple[slice, slice, Linear], ...]  # (columns of the middle, rows of the product, [n, r] -> [n, rows])


@dataclass(frozen=True, slots=True)
class _Segment:
    """The tokens of a step that belong to one adapter: a run of them, or their places."""

    adapter: Mapping[str, _Update]
    tokens: slice | torch.Tensor


class LoraBank:
    """For one decoder. ops: makes the halves' products; dtype: of the halves, as the decoder's activations."""

    def __init__(self, decoder: Any, ops: Ops, dtype: torch.dtype) -> None:
        self._decoder = decoder
        self._ops = ops
        self._dtype = dtype
        self._adapters: dict[str, Mapping[str, _Update]] = {}
        self._bytes: dict[str, int] = {}
        self._segments: list[_Segment] = []
        self._wrapped = False

    def __contains__(self, key: str) -> bool:
        return key in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def keys(self) -> list[str]:
        """Hashes of the adapters in memory."""
        return list(self._adapters)

    @property
    def nbytes(self) -> int:
        """Bytes of all halves."""
        return sum(self._bytes.values())

    @torch.inference_mode()
    def add(self, adapter: AdapterFiles) -> None:
        """Take an adapter in. Raises `ModelError` when it does not fit the decoder; nothing is changed then."""
        updates = {name: self._prepare(found) for name, found in updates_of(adapter, self._decoder).items()}
        if not self._wrapped:
            self._wrap()
        self._adapters[adapter.key] = updates
        numbers = sum(pair.a.numel() + pair.b.numel() for pair in adapter.modules.values())
        self._bytes[adapter.key] = numbers * self._dtype.itemsize

    def remove(self, key: str) -> None:
        """Forget an adapter that no sequence uses."""
        del self._adapters[key], self._bytes[key]

    def _prepare(self, updates: Sequence[LinearUpdate]) -> _Update:
        where = self._decoder.device
        down = torch.cat([update.a for update in updates]).to(where, self._dtype)
        ups, first = [], 0
        for update in updates:
            rank = update.a.shape[0]
            up = self._ops.linear(update.b.to(where, self._dtype).contiguous())
            rows = slice(update.first, update.first + update.b.shape[0])
            ups.append((slice(first, first + rank), rows, up))
            first += rank
        return _Update(self._ops.linear(down), tuple(ups))

    def _wrap(self) -> None:
        for name, linear in self._decoder.linears().items():
            self._decoder.replace_linear(name, self._adapted(name, linear))
        self._wrapped = True

    def _adapted(self, name: str, linear: Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        def product(x: torch.Tensor) -> torch.Tensor:
            """[T, in] -> [T, out]."""
            out = linear(x)
            for segment in self._segments:
                update = segment.adapter.get(name)
                if update is not None:
                    _add(out, x, segment.tokens, update)
            return out

        return product

    def recordable(self) -> bool:
        """Could the step that comes next be recorded, or a record of one stand for it? A record knows no adapters."""
        return not self._segments

    def select(self, rows: Sequence[SequenceRow], starts: npt.NDArray[np.int64]) -> None:
        """The step that comes next: row b of the batch has the tokens starts[b] : starts[b + 1]."""
        runs: dict[str, list[tuple[int, int]]] = {}
        for b, row in enumerate(rows):
            if row.adapter is None:
                continue
            if row.adapter not in self._adapters:
                raise InternalError(f"sequence {row.seq_id} uses adapter {row.adapter}, which is not loaded")
            begin, end = int(starts[b]), int(starts[b + 1])
            found = runs.setdefault(row.adapter, [])
            if found and found[-1][1] == begin:
                found[-1] = (found[-1][0], end)
            else:
                found.append((begin, end))
        self._segments = [_Segment(self._adapters[key], self._tokens(found)) for key, found in runs.items()]

    def _tokens(self, runs: list[tuple[int, int]]) -> slice | torch.Tensor:
        if len(runs) == 1:
            return slice(*runs[0])
        places = np.concatenate([np.arange(begin, end) for begin, end in runs])
        return torch.from_numpy(places).to(self._decoder.device)


def _add(out: torch.Tensor, x: torch.Tensor, tokens: slice | torch.Tensor, update: _Update) -> None:
    """out[tokens] += B (A x[tokens]), in place."""
    middle = update.down(x[tokens])
    for columns, rows, up in update.ups:
        added = up(middle[:, columns]).to(out.dtype)
        if isinstance(tokens, slice):
            out[tokens, rows] += added
        else:
            out[:, rows].index_add_(0, tokens, added)
