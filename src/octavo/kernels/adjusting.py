"""Changes to logits before a draw, on the device: what `SamplingState.adjust` does to one row on the host, for many.

Written in operations of torch, for any device, and the definition of what faster kernels (`triton/sampling.py`) do.
Every function only queues operations whose shapes follow from those of its arguments, so a step with them may be
recorded. This module does not know sequences; a draw is a row, a history a slot.

Invariant: every number is the host's, bit for bit: one rounding per operation, in the host's order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from octavo.errors import BoundsError


class TokenHistory:
    """The different tokens that sequences have seen and how often each was generated, on the device, by slot.

    capacity: different tokens a slot has room for (a sequence's longest length is enough; more are forgotten).
    ids int32 and counts float32 [slots, capacity], sizes int32 [slots]: what lies behind a slot's size means nothing.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device | str) -> None:
        self.ids = torch.zeros(slots, capacity, dtype=torch.int32, device=device)
        self.counts = torch.zeros(slots, capacity, dtype=torch.float32, device=device)
        self.sizes = torch.zeros(slots, dtype=torch.int32, device=device)

    def start(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """A sequence begins in `slot`. prompt: its tokens if a repetition penalty asks for them, else nothing."""
        counts = count_tokens(prompt, output)
        size, capacity = len(counts), self.ids.shape[1]
        if size > capacity:
            raise BoundsError(f"slot {slot}: {size} different tokens, a history has room for {capacity}")
        ids = torch.tensor(list(counts), dtype=torch.int32)
        self.put(slot, ids, torch.tensor(list(counts.values()), dtype=torch.float32))

    def put(self, slot: int, ids: torch.Tensor, counts: torch.Tensor) -> None:
        """The slot holds the different tokens `ids`, int32 [n], with `counts`, float32 [n], and nothing else."""
        size = len(ids)
        self.ids[slot, :size].copy_(ids)
        self.counts[slot, :size].copy_(counts)
        self.sizes[slot] = size

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count tokens [D] (int64) in their slots [D] (int64, all different); negative ones are passed over."""
        room = self.ids.shape[1]
        own = slots.clamp(min=0)
        sizes = self.sizes[own]
        places = torch.arange(room, device=slots.device)
        same = (self.ids[own] == tokens[:, None]) & (places < sizes[:, None])
        known = same.any(1)
        place = torch.where(known, same.to(torch.uint8).argmax(1), sizes.long())
        valid = (slots >= 0) & (tokens >= 0) & (place < room)
        new = valid & ~known
        # Differences are added, so that a draw that is passed over writes nothing that another has written.
        flat = own * room + place.clamp(max=room - 1)
        ids, counts = self.ids.view(-1), self.counts.view(-1)
        change = torch.where(new, tokens - ids[flat], 0).to(torch.int32)
        more = torch.where(new, 1.0 - counts[flat], valid.float())
        ids.index_add_(0, flat, change)
        counts.index_add_(0, flat, more)
        self.sizes.index_add_(0, own, new.to(torch.int32))


def count_tokens(prompt: Sequence[int], output: Sequence[int]) -> dict[int, int]:
    """Each different token and how often it was generated; 0 for one of the prompt only."""
    counts = dict.fromkeys(prompt, 0)
    for token in output:
        counts[token] = counts.get(token, 0) + 1
    return counts


@dataclass(frozen=True, slots=True)
class Penalties:
    """Per draw, on the device: slot int64 [D] in `history` (negative: no penalty), factors float32 [D]."""

    history: TokenHistory
    slots: torch.Tensor
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True)
class Edits:
    """Single logits to change: row of the draw, token (int64 [E]) and what is added (float32 [E]; -inf: a ban). All
    contiguous; several edits of one logit add up."""

    rows: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, changes: Sequence[tuple[int, Mapping[int, float]]], device: torch.device | str) -> Edits:
        """From (row, token -> what is added) pairs."""
        flat = [(row, token, value) for row, added in changes for token, value in added.items()]
        rows, tokens, values = zip(*flat, strict=True) if flat else ((), (), ())
        return cls(
            torch.tensor(rows, dtype=torch.int64, device=device),
            torch.tensor(tokens, dtype=torch.int64, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )


def adjusted(
    logits: torch.Tensor, rows: torch.Tensor, penalties: Penalties | None = None, edits: Edits | None = None
) -> torch.Tensor:
    """Private copies [D, V] of logits float32 [N, V], row `rows[i]` (int64 [D]) for draw i, changed: first edits, then
    penalties, as `SamplingState.adjust` does."""
    draws, words = len(rows), logits.shape[1]
    wide = logits.new_zeros(draws, words + 1)  # the last column takes what is written for nobody
    wide[:, :words] = logits[rows]
    if edits is not None:
        wide.view(-1).index_add_(0, edits.rows * (words + 1) + edits.tokens, edits.values)
    if penalties is not None:
        _penalise(wide, penalties)
    return wide[:, :words]


def _penalise(wide: torch.Tensor, penalties: Penalties) -> None:
    """Penalties of rows [D, V + 1], in place."""
    history = penalties.history
    own = penalties.slots.clamp(min=0)
    places = torch.arange(history.ids.shape[1], device=wide.device)
    known = (places < history.sizes[own][:, None]) & (penalties.slots >= 0)[:, None]
    tokens = torch.where(known, history.ids[own].long(), wide.shape[1] - 1)
    counts = history.counts[own]
    repetition = penalties.repetition[:, None]
    x = wide.gather(1, tokens)
    x = torch.where(x > 0, x / repetition, x * repetition)
    x = x - penalties.frequency[:, None] * counts
    x = x - penalties.presence[:, None] * (counts > 0).float()
    wide.scatter_(1, tokens, x)


class Adjusting:
    """Both halves together, for whoever is handed them: `history` makes a `TokenHistory`, `adjusted` is the function.
    These are the ones of this module; faster ones are a subclass."""

    def history(self, slots: int, capacity: int, device: torch.device | str) -> TokenHistory:
        return TokenHistory(slots, capacity, device)

    def adjusted(
        self, logits: torch.Tensor, rows: torch.Tensor, penalties: Penalties | None, edits: Edits | None
    ) -> torch.Tensor:
        return adjusted(logits, rows, penalties, edits)
