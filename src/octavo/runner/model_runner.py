"""`ModelRunner`: obeys a `StepPlan` and answers with a `StepResult`.

Order, as the plan promises: forget what ended, open new rows, move blocks, update tables, compute, draw. Everything
that touches the device happens in this package; nothing here decides anything or allocates a block.

One sequence's trouble (ids outside the vocabulary, logits with a NaN) is reported in its own `Drawn.error` and stays
with it. A broken plan is an `InternalError` and leaves the runner unusable for the sequences concerned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch

from octavo.core.step import Drawn, ScheduledSequence, StepPlan, StepResult, TokenLogprobs
from octavo.kernels.interface import AttentionBackend, KVCache
from octavo.runner.batch import BatchBuilder, StepBatch
from octavo.runner.draft import Draft, DraftModel
from octavo.runner.kv_store import KVStore
from octavo.runner.memory import check_host_arrays
from octavo.runner.rows import RowStore, SequenceRow
from octavo.runner.sampler import Draw, Sampler
from octavo.runner.verify import Pick, draw_picks

LOGITS_BYTES = 64 << 20  # most float32 logits alive at once


class DecoderLike(Protocol):
    """What the runner needs of a model."""

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """token_ids, positions int64 [T] -> hidden [T, D]; `attention.plan` was called.

        Rows that the planned batch does not want (`AttentionBatch.wanted`) may hold anything.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] -> float32 [N, V]."""
        ...


class Profile(Protocol):
    """Receives the sections of a step: prepare, draft, model, head, sample."""

    def section(self, name: str) -> AbstractContextManager[object]:
        """A context that is entered while the named section runs."""
        ...


class _NoProfile:
    """Times nothing."""

    _nothing: AbstractContextManager[object] = nullcontext()

    def section(self, name: str) -> AbstractContextManager[object]:
        return self._nothing


def _wanted(s: ScheduledSequence, row: SequenceRow) -> int:
    """Of how many of its last tokens a sequence's step reads the hidden state."""
    if s.prompt_logprobs is not None:
        return s.num_tokens
    if row.pool is not None:
        return row.pool.wants(s.num_tokens)
    return 1 + s.num_proposed if s.sample_ids else 0


class ModelRunner:
    """Executes plans for one decoder over one KV store.

    cache: a `KVStore`, or a bare `KVCache` when nothing is ever swapped. max_num_batched_tokens bounds a step,
    max_model_len the block tables; max_num_seqs is the expected number of live sequences (rows grow beyond it when
    preempted sequences keep theirs). vocab_size: columns of the logits and the limit of token ids. draft: a model that
    guesses ahead; its groups follow the decoder's in the plan's tables.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        cache: KVStore | KVCache,
        backend: AttentionBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        profile: Profile | None = None,
        draft: Draft | None = None,
    ) -> None:
        self.store = cache if isinstance(cache, KVStore) else KVStore(cache)
        self.profile: Profile = profile or _NoProfile()
        self._decoder = decoder
        self._backend = backend
        layout = self.store.cache.layout
        num_groups = layout.num_groups + (0 if draft is None else draft.cache.layout.num_groups)
        check_host_arrays(num_groups, layout.blocks_for(max_model_len), max_num_seqs, max_num_batched_tokens)
        self._rows = RowStore(num_groups, layout.blocks_for(max_model_len), max_num_seqs, vocab_size)
        self._batches = BatchBuilder(
            layout,
            self._rows,
            max_tokens=max_num_batched_tokens,
            vocab_size=vocab_size,
            device=self.store.cache.kv.device,
        )
        self._recordable: Callable[[], bool] = lambda: True
        self._sampler = Sampler(vocab_size)
        self._draft = None
        if draft is not None:
            self._draft = DraftModel(
                draft,
                self._rows,
                layout.num_groups,
                self._sampler,
                max_tokens=max_num_batched_tokens,
                vocab_size=vocab_size,
            )
        self._head_rows = max(1, LOGITS_BYTES // (4 * vocab_size))
        self._vocab_size = vocab_size
        # The decoder's own argmax, if it has one and it looks at the same columns.
        whole = getattr(getattr(decoder, "spec", None), "vocab_size", None) == vocab_size
        self._best = getattr(decoder, "best", None) if whole else None

    def watch_batches(
        self, watcher: Callable[[Sequence[SequenceRow], Any], None], recordable: Callable[[], bool]
    ) -> None:
        """Call watcher(rows, starts) for every batch before it is computed, see `BatchBuilder.on_batch`.

        recordable: asked afterwards, whether a recorded step could stand for this one.
        """
        self._batches.on_batch = watcher
        self._recordable = recordable

    @contextmanager
    def without_draft(self) -> Iterator[None]:
        """Leave the draft model out of the steps inside: what they would cost without it. For new sequences only."""
        draft, self._draft = self._draft, None
        try:
            yield
        finally:
            self._draft = draft

    @property
    def num_rows(self) -> int:
        """Live sequences the runner has a row for."""
        return len(self._rows)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """One step. See `StepPlan` for the order and `StepResult` for what comes back."""
        section = self.profile.section
        with section("prepare"):
            self._obey(plan)
            if not plan.scheduled:
                return StepResult(plan.step_id)
            if self._draft is None:
                batch = self._batch(plan.scheduled)
        if self._draft is not None:
            with section("draft"):
                scheduled = self._draft.follow(plan.scheduled)
            with section("prepare"):
                batch = self._batch(scheduled)
        return self._finish(plan.step_id, batch)

    def _finish(self, step_id: int, batch: StepBatch) -> StepResult:
        """Compute a planned batch and draw."""
        with self.profile.section("model"):
            hidden = self._decoder.forward(batch.token_ids, batch.positions, self._backend)
        # Prompt logprobs first: a NaN found there is an error of the draw.
        prompt_logprobs = self._prompt_logprobs(batch, hidden)
        for b, row in enumerate(batch.rows):
            if row.pool is not None:
                row.pool.add(hidden[batch.starts[b] : batch.starts[b + 1]])
        return StepResult(step_id, self._draw(batch, hidden), prompt_logprobs)

    def _obey(self, plan: StepPlan) -> None:
        """Everything of the plan that comes before computing."""
        for seq_id in plan.ends:
            self._rows.close(seq_id)
        for start in plan.starts:
            self._rows.open(start)
        self.store.transfer(plan.transfers, self._backend)
        for scheduled in plan.scheduled:
            if scheduled.tables:
                self._rows.update(self._rows.get(scheduled.seq_id), scheduled.tables)

    def _batch(self, scheduled: Sequence[ScheduledSequence]) -> StepBatch:
        batch = self._batches.build(scheduled, _wanted)
        self._backend.plan(batch.attention)
        return batch

    def _logits(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V] of the given tokens of the batch."""
        with self.profile.section("head"):
            return self._decoder.logits(self._chosen(hidden, tokens))[:, : self._vocab_size].float()

    def _chosen(self, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Rows `tokens` of the batch's hidden states, all of them or one per sequence."""
        return hidden if len(tokens) == len(hidden) else hidden[torch.tensor(tokens, device=hidden.device)]

    def _draw(self, batch: StepBatch, hidden: torch.Tensor) -> dict[int, Drawn]:
        """Draw (or pool) for every sequence in any `sample_ids`; siblings share one row of logits."""
        drawn: dict[int, Drawn] = {}
        sampling: deque[int] = deque()
        for b, (s, row) in enumerate(zip(batch.scheduled, batch.rows, strict=True)):
            if s.sample_ids and row.pool is not None:
                result = row.pool.result() if row.error is None else Drawn((), error=row.error)
                row.error = result.error
                drawn[row.seq_id] = result
            elif s.sample_ids:
                sampling.append(b)
        while sampling:
            picks: list[Pick] = []
            tokens: list[int] = []  # of the batch: the rows of logits
            while sampling and (
                not tokens or len(tokens) + batch.scheduled[sampling[0]].num_proposed < self._head_rows
            ):
                b = sampling.popleft()
                s, end = batch.scheduled[b], batch.starts[b + 1]
                known = s.num_tokens - s.num_proposed
                for seq_id in s.sample_ids:
                    row = self._rows.get(seq_id)
                    row.error = row.error or batch.rows[b].error
                    picks.append(Pick(row, len(tokens), s.start + known, s.token_ids[known:]))
                tokens += range(end - 1 - s.num_proposed, end)
            results = draw_picks(self._answerer(hidden, tokens), picks)
            drawn.update((pick.row.seq_id, result) for pick, result in zip(picks, results, strict=True))
        return drawn

    def _answerer(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[list[Draw]], list[Drawn]]:
        """Answers draws whose logit rows are the given tokens of the batch. All greedy: no logits are made."""
        logits: torch.Tensor | None = None

        def answer(draws: list[Draw]) -> list[Drawn]:
            nonlocal logits
            if logits is not None:  # not the first time: few of the rows are still wanted
                wanted = sorted({draw.logit_row for draw in draws})
                place = {row: i for i, row in enumerate(wanted)}
                draws = [replace(draw, logit_row=place[draw.logit_row]) for draw in draws]
                with self.profile.section("sample"):
                    return self._sampler.sample(logits[wanted], draws)
            if self._best is not None and all(draw.state.plain_greedy for draw in draws):
                with self.profile.section("head"):
                    found = self._best(self._chosen(hidden, tokens))
                if found is not None:
                    return self._sampler.greedy(found[0], found[1], draws)
            logits = self._logits(hidden, tokens)
            with self.profile.section("sample"):
                return self._sampler.sample(logits, draws)

        return answer

    def _prompt_logprobs(self, batch: StepBatch, hidden: torch.Tensor) -> dict[int, tuple[TokenLogprobs, ...]]:
        return {
            s.seq_id: self._prompt_row(s, row, batch.starts[b], hidden)
            for b, (s, row) in enumerate(zip(batch.scheduled, batch.rows, strict=True))
            if s.prompt_logprobs is not None
        }

    def _prompt_row(
        self, s: ScheduledSequence, row: SequenceRow, first_token: int, hidden: torch.Tensor
    ) -> tuple[TokenLogprobs, ...]:
        """Entries for the prompt tokens that follow the computed positions, a bounded number of logits at a time.

        None for a sequence that cannot go on: its error comes with its draw.
        """
        assert s.prompt_logprobs is not None
        last = min(s.start + s.num_tokens, row.prompt_len - 1)
        entries: list[TokenLogprobs] = []
        for low in range(s.start, last, self._head_rows):
            positions = range(low, min(low + self._head_rows, last))
            logits = self._logits(hidden, [first_token + p - s.start for p in positions])
            following = [row.token_ids[p + 1] for p in positions]
            with self.profile.section("sample"):
                found = self._sampler.prompt_logprobs(logits, following, s.prompt_logprobs)
            for p, entry in zip(positions, found, strict=True):
                if row.error is None and entry is None:
                    row.error = f"the model's logits have no usable maximum at position {p + 1} of the prompt"
                if row.error is not None or entry is None:
                    return ()
                entries.append(entry)
        return tuple(entries)
