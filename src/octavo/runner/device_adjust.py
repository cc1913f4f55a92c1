"""`Adjustments`: penalties, biases and bans of the sequences that asked for any, kept on the device.

Such a sequence gets a *place* for life: the tokens it has seen with their counts, its factors, the logits to edit, and
the ids it is limited to. All of it is sent once, when the sequence begins (or resumes); afterwards the device counts
its own draws, and the host neither waits nor sends a token. What an edit needs to know of the text is its length, which
the host knows beforehand: an end id is banned while fewer than min_tokens tokens were generated.

Place 0 belongs to nobody and changes nothing; draws without any adjustment use it. Tensors grow when they must, which
raises `generation`. A place that is handed out again is written over completely; one queue keeps that behind the last
step of the former owner.

It does not know batches, slots of block tables, or grammars and bad words of several tokens, which are the host's.
Invariant: tokens are those of `sampler.py`, fallback for bans that leave nothing included.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.step import SequenceStart
from octavo.devices import Device
from octavo.kernels.adjusting import Adjusting, Edits, Penalties, TokenHistory, count_tokens
from octavo.runner.device_inputs import Staging, packed_bytes
from octavo.runner.device_sampler import LOWEST, Draw, DrawInputs, Mode

PLACES = 16  # at first
EDITS = 16  # per place, at first
ALWAYS = 1 << 62  # an edit that no length of the text ends
NOBODY = 0


class Need(IntFlag):
    """What a draw takes besides its logits; a step does whatever any of its draws takes."""

    NOTHING = 0
    EDITS = 1
    PENALTIES = 2
    ALLOWED = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sequence's parameters ask for. need: at any length; early_need: while fewer than `until` tokens are out.

    edits: (token, what is added to its logit, below how many generated tokens).
    """

    need: Need
    early_need: Need
    until: int
    edits: list[tuple[int, float, int]]

    @classmethod
    def of(cls, start: SequenceStart) -> Wanted:
        params = start.params
        edits = [(word[-1], float("-inf"), ALWAYS) for word in start.bad_word_ids]
        edits += [(token, float(bias), ALWAYS) for token, bias in (params.logit_bias or {}).items()]
        need = Need.EDITS if edits else Need.NOTHING
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            need |= Need.PENALTIES
        if params.allowed_token_ids is not None:
            need |= Need.ALLOWED
        until = params.min_tokens if start.end_ids else 0
        if until:
            edits += [(token, float("-inf"), until) for token in start.end_ids]
        return cls(need, Need.EDITS if until else Need.NOTHING, until, edits)

    @property
    def anything(self) -> bool:
        return bool(self.need | self.early_need)


class Adjustments:
    """See the module. max_len: tokens of the longest sequence."""

    def __init__(self, device: Device, adjusting: Adjusting, vocab_size: int, max_len: int) -> None:
        self.generation = 0  # raised when tensors are replaced: whoever holds on to the old ones must let go
        self._device = device
        self._adjusting = adjusting
        self._vocab_size = vocab_size
        self._room = min(max_len + 1, vocab_size)  # the draw in vain after the last one included
        self._places: dict[int, int] = {}
        self._free: list[int] = []
        self._capacity = 0
        # int64 and float32 [places, edits], int64: below how many generated tokens. Nothing is allocated before use.
        self._tokens, self._values, self._until = (self._zeros((0, EDITS), kind) for kind in _EDIT_TYPES)
        self._history: TokenHistory | None = None
        self._factors = self._zeros((0, 3), torch.float32)  # repetition, frequency, presence
        self._counted = self._zeros((0,), torch.bool)
        self._allowed: torch.Tensor | None = None  # bool [places, V]
        self._new: list[tuple[int, SequenceStart, Wanted]] = []  # not sent yet
        self._staging: Staging | None = None

    def __len__(self) -> int:
        return len(self._places)

    def open(self, start: SequenceStart, wanted: Wanted) -> int:
        """A place for a sequence; `send` fills it."""
        if not self._free:
            self._grow()
        place = self._places[start.seq_id] = self._free.pop()
        self._new.append((place, start, wanted))
        return place

    def close(self, seq_id: int) -> None:
        """The sequence's place can be had again; harmless for one that has none."""
        place = self._places.pop(seq_id, None)
        if place is not None:
            self._free.append(place)

    def place(self, seq_id: int) -> int:
        """`NOBODY` for a sequence without adjustments."""
        return self._places.get(seq_id, NOBODY)

    # -- sending -------------------------------------------------------------------------------------------------------

    def send(self) -> None:
        """Fill the places that were opened, in one copy."""
        if not self._new:
            return
        new, self._new = self._new, []
        self._make_room(new)
        width = self._tokens.shape[1]
        packs = [_pack(start, wanted, width) for _, start, wanted in new]
        arrays = [array for pack in packs for array in pack]
        size = packed_bytes([(array.size, array.itemsize) for array in arrays])
        if self._staging is None or size > self._staging.capacity:
            self._staging = Staging(self._device, max(size, 1 << 16, 0 if self._staging is None else 2 * size))
        views = iter(self._staging.send(arrays))
        for place, start, wanted in new:
            self._fill(place, start, wanted, [next(views) for _ in range(len(packs[0]))])

    def _fill(self, place: int, start: SequenceStart, wanted: Wanted, views: list[torch.Tensor]) -> None:
        """Everything that a place holds, written over whatever was there."""
        tokens, values, until, factors, ids, counts, allowed = views
        self._tokens[place].copy_(tokens)
        self._values[place].copy_(values)
        self._until[place].copy_(until)
        self._factors[place].copy_(factors)
        self._counted[place] = bool(wanted.need & Need.PENALTIES)
        if self._history is not None:
            self._history.put(place, ids, counts)
        if self._allowed is not None:
            self._allowed[place] = start.params.allowed_token_ids is None
            self._allowed[place].index_fill_(0, allowed, True)

    def _make_room(self, new: list[tuple[int, SequenceStart, Wanted]]) -> None:
        """Tensors that are as wide as the new sequences need, and those that are needed for the first time."""
        most = max(len(wanted.edits) for _, _, wanted in new)
        width = self._tokens.shape[1]
        if most > width:
            while width < most:
                width *= 2
            self._resize(self._capacity, width)
        rows = self._capacity
        if self._history is None and any(wanted.need & Need.PENALTIES for _, _, wanted in new):
            self._history = self._adjusting.history(rows, self._room, self._device.torch)
            self.generation += 1
        if self._allowed is None and any(wanted.need & Need.ALLOWED for _, _, wanted in new):
            self._allowed = torch.ones(rows, self._vocab_size, dtype=torch.bool, device=self._device.torch)
            self.generation += 1

    def _grow(self) -> None:
        """Twice the places."""
        old = self._capacity
        self._resize(max(PLACES, 2 * old), self._tokens.shape[1])
        self._free = list(range(self._capacity - 1, max(old, NOBODY + 1) - 1, -1))

    def _resize(self, rows: int, width: int) -> None:
        self.generation += 1
        self._capacity = rows
        self._tokens, self._values, self._until = (
            self._wider(t, (rows, width)) for t in (self._tokens, self._values, self._until)
        )
        self._factors = self._wider(self._factors, (rows, 3))
        self._counted = self._wider(self._counted, (rows,))
        if self._history is not None:
            history = self._adjusting.history(0, self._room, self._device.torch)
            history.ids = self._wider(self._history.ids, (rows, self._room))
            history.counts = self._wider(self._history.counts, (rows, self._room))
            history.sizes = self._wider(self._history.sizes, (rows,))
            self._history = history
        if self._allowed is not None:
            wide = torch.ones(rows, self._vocab_size, dtype=torch.bool, device=self._device.torch)
            wide[: len(self._allowed)] = self._allowed
            self._allowed = wide

    def _zeros(self, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=kind, device=self._device.torch)

    def _wider(self, old: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros with `old` in the corner."""
        new = self._zeros(shape, old.dtype)
        new[tuple(slice(0, n) for n in old.shape)] = old
        return new

    # -- drawing -------------------------------------------------------------------------------------------------------

    def draw(
        self,
        logits: torch.Tensor,
        inputs: DrawInputs,
        mode: Mode,
        need: Need,
        places: torch.Tensor,
        lengths: torch.Tensor,
        drawing: Draw,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `drawing`, with adjustments: (token int64 [D], largest *raw* logit float32 [D]). Counts what was drawn.

        places, lengths: int64 [D], the latter tokens generated so far. Where the bans left nothing, the likeliest
        allowed id, or the likeliest of all (`SamplingState.fallback`).
        """
        highest, instead = logits.max(-1)
        changed = logits
        if need & Need.ALLOWED and self._allowed is not None:
            allowed = self._allowed[places]
            changed = torch.where(allowed, logits, float("-inf"))
            # An allowed id to which the model gives nothing comes before one that is not allowed.
            instead = torch.where(allowed, logits.clamp(min=LOWEST), float("-inf")).argmax(-1)
        rows = torch.arange(len(logits), device=logits.device)
        counted = torch.where(self._counted[places], places, -1)
        penalties = edits = None
        if need & Need.EDITS:
            edits = self._edits(rows, places, lengths)
        if need & Need.PENALTIES and self._history is not None:
            penalties = Penalties(self._history, counted, *self._factors[places].t().contiguous())
        if edits is not None or penalties is not None:
            changed = self._adjusting.adjusted(changed, rows, penalties, edits)
        tokens, best = drawing(changed, inputs, mode)
        tokens = torch.where(best.isfinite(), tokens, instead)
        self._count(counted, tokens)
        return tokens, highest

    def _edits(self, rows: torch.Tensor, places: torch.Tensor, lengths: torch.Tensor) -> Edits:
        tokens = self._tokens[places]
        values = torch.where(lengths[:, None] < self._until[places], self._values[places], 0.0)
        # Copied: of a single row `reshape` would make a view that repeats one element.
        return Edits(rows[:, None].expand_as(tokens).contiguous().view(-1), tokens.view(-1), values.view(-1))

    def _count(self, counted: torch.Tensor, tokens: torch.Tensor) -> None:
        if self._history is not None:
            self._history.add(counted, tokens)

    def count(self, drawn: list[tuple[int, int]]) -> None:
        """Tokens that the host drew, as (sequence, token): for those that are counted here."""
        known = [(self._places[seq_id], token) for seq_id, token in drawn if seq_id in self._places]
        if known and self._history is not None:
            places, tokens = torch.tensor(known, device=self._device.torch).unbind(1)
            self._count(torch.where(self._counted[places], places, -1), tokens.contiguous())


_EDIT_TYPES = (torch.int64, torch.float32, torch.int64)


def _pack(start: SequenceStart, wanted: Wanted, width: int) -> list[npt.NDArray[Any]]:
    """A place as arrays: edits padded to `width` (0 is added to token 0), factors, tokens seen, counts, allowed ids."""
    params = start.params
    tokens, values = np.zeros(width, np.int64), np.zeros(width, np.float32)
    until = np.zeros(width, np.int64)
    for i, (token, value, end) in enumerate(wanted.edits):
        tokens[i], values[i], until[i] = token, value, end
    counts: dict[int, int] = {}
    if wanted.need & Need.PENALTIES:
        prompt = start.token_ids[: start.prompt_len] if params.repetition_penalty != 1.0 else ()
        counts = count_tokens(prompt, start.token_ids[start.prompt_len :])
    factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return [
        tokens,
        values,
        until,
        np.array(factors, np.float32),
        np.fromiter(counts, np.int32, count=len(counts)),
        np.fromiter(counts.values(), np.float32, count=len(counts)),
        np.array(params.allowed_token_ids or (), np.int64),
    ]
