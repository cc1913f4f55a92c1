"""`DraftModel`: a smaller model that guesses ahead, with its own layers' blocks in the same pool.

Its layers are further groups of the layout, so its keys and values live in the same block tables, are forked, swapped,
cached and truncated with the target's, and need no bookkeeping of their own. The invariant that makes that work: of a
sequence that it follows it computes, in every step, exactly the positions that the target computes, so whatever is true
of a position of one model is true of the other. Of the others it computes nothing, ever again (`core/following.py`).

A step with guesses is one pass per guess (each over one token of every sequence that still needs one), and one last
pass over everything else of the step and the last guesses. Guesses are drawn as the target will draw: greedily for a
greedy sequence, else with its temperature, filters and the very noise of the place, which makes agreement likely
wherever the two distributions are alike. Penalties, bans and grammars are left to the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from octavo.core.step import ScheduledSequence
from octavo.kernels.interface import AttentionBackend, KVCache
from octavo.runner.batch import BatchBuilder, StepBatch, Wanted
from octavo.runner.rows import RowStore
from octavo.runner.sampler import Draw, Sampler

if TYPE_CHECKING:
    from octavo.runner.model_runner import DecoderLike


@dataclass(frozen=True, slots=True)
class Draft:
    """What the runner is given: a decoder, its view of the pool, and a backend over that view."""

    decoder: DecoderLike
    cache: KVCache
    backend: AttentionBackend


class DraftModel:
    """`follow` keeps the draft's keys and values in step with a plan and fills in its guesses.

    first_group: of the rows' tables; the groups before belong to the target.
    """

    def __init__(
        self, draft: Draft, rows: RowStore, first_group: int, sampler: Sampler, *, max_tokens: int, vocab_size: int
    ) -> None:
        self._decoder = draft.decoder
        self._backend = draft.backend
        self._rows = rows
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._batches = BatchBuilder(
            draft.cache.layout,
            rows,
            max_tokens=max_tokens,
            vocab_size=vocab_size,
            device=draft.cache.kv.device,
            first_group=first_group,
        )

    def follow(self, scheduled: Sequence[ScheduledSequence]) -> list[ScheduledSequence]:
        """Compute the positions of those it follows; returns all with tokens in the places of the guesses."""
        followed = [s for s in scheduled if s.drafted]
        if not followed:
            return list(scheduled)
        guesses: dict[int, list[int]] = {s.seq_id: [] for s in followed if s.num_proposed}
        for place in range(max(s.num_proposed for s in followed)):
            step = [_single(s, place, guesses[s.seq_id]) for s in followed if s.num_proposed > place]
            for s, token in zip(*self._guess(step), strict=True):
                guesses[s.seq_id].append(token)
        rest = [_single(s, s.num_proposed, guesses[s.seq_id]) if s.num_proposed else s for s in followed]
        self._pass(rest, lambda s, row: 0)  # for its keys and values
        return [
            s._replace(token_ids=(*s.token_ids[: -s.num_proposed], *guesses[s.seq_id])) if s.num_proposed else s
            for s in scheduled
        ]

    def _pass(self, scheduled: list[ScheduledSequence], wanted: Wanted | None = None) -> tuple[StepBatch, torch.Tensor]:
        batch = self._batches.build(scheduled, wanted)
        self._backend.plan(batch.attention)
        return batch, self._decoder.forward(batch.token_ids, batch.positions, self._backend)

    def _guess(self, step: list[ScheduledSequence]) -> tuple[list[ScheduledSequence], list[int]]:
        """One token behind each item. Where the draft's logits are unusable the guess is token 0, as good as any."""
        batch, hidden = self._pass(step)
        draws = [
            Draw(i, row.state.unadjusted(), s.start + 1)
            for i, (s, row) in enumerate(zip(batch.scheduled, batch.rows, strict=True))
        ]
        best = getattr(self._decoder, "best", None)
        found = best(hidden) if best is not None and all(d.state.greedy for d in draws) else None
        if found is not None:
            results = self._sampler.greedy(found[0], found[1], draws)
        else:
            results = self._sampler.sample(self._decoder.logits(hidden)[:, : self._vocab_size].float(), draws)
        return batch.scheduled, [r.token_ids[0] if r.token_ids else 0 for r in results]


def _single(s: ScheduledSequence, place: int, guesses: list[int]) -> ScheduledSequence:
    """The item's token at `place` behind its start: the known one, or the guess before."""
    return ScheduledSequence(s.seq_id, s.start + place, (guesses[place - 1] if place else s.token_ids[0],))
