"""The words between the scheduler and the runner: one `StepPlan` down, one `StepResult` up.

Plans carry *differences*: a runner keeps one row per live sequence (tokens, block tables, sampling state) and
a plan says only what is new, so the cost of a step does not grow with the length of the context. Everything
here is frozen and made of plain integers, so a plan can be logged, recorded, replayed, or still be in flight
while the next one is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from octavo.sampling_params import PoolingParams, SamplingParams

#: In `ScheduledSequence.token_ids`: "the token this sequence drew in the step before this one".
#: Only planned while that step is still in flight; the runner has the token, the scheduler not yet.
LAST_SAMPLED = -1

#: In `ScheduledSequence.token_ids`: "a token that the draft model proposes for this position".
PROPOSED = -2


class TransferKind(Enum):
    """What a `BlockTransfer` moves between."""

    COPY = "copy"  # device block -> device block: copy-on-write
    SWAP_OUT = "swap_out"  # device block -> host block
    SWAP_IN = "swap_in"  # host block -> device block


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Move one whole block. A plan's transfers run in order, before anything is computed or written."""

    kind: TransferKind
    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class TableUpdate:
    """`table[group][first : first + len(block_ids)] = block_ids` for one sequence's row."""

    group: int
    first: int  # logical block index
    block_ids: tuple[int, ...]  # -1: released, behind a sliding window, never read again


class ConstraintState(Protocol):
    """One sequence's place in a grammar. error: why no token may follow any more; the sequence must end then."""

    error: str | None

    def push(self, token: int) -> None:
        """The sequence drew `token`."""
        ...

    def restrict(self, row: Any) -> None:
        """Logits of tokens that may not follow become -inf; row: float32 [V], changed in place."""
        ...


class Constraint(Protocol):
    """What the text of a request must look like. Immutable; every sequence starts a state of its own."""

    def start(self, output: Sequence[int], end_ids: Sequence[int]) -> ConstraintState:
        """The state after the tokens `output`. end_ids may follow where the text may end, and nowhere else."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceStart:
    """A sequence the runner has no row for (new, forked, or resumed): everything known about it."""

    seq_id: int
    request_id: str
    sample_index: int  # which of the request's n samples: part of the noise counter
    params: SamplingParams
    token_ids: tuple[int, ...]  # prompt and output so far
    prompt_len: int
    seed: int  # 64-bit; fresh for a request that gave none
    end_ids: tuple[int, ...] = ()  # end of text and stop ids: banned before `params.min_tokens`
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    num_candidates: int = 0  # a beam: return this many candidates, draw nothing; `params` is then a neutral default
    constraint: Constraint | None = None
    pooling: PoolingParams | None = None  # return a vector, draw nothing; `params` is then a neutral default
    adapter: str | None = None  # hash of the LoRA adapter it runs with


class ScheduledSequence(NamedTuple):
    """One sequence's share of a step: compute `token_ids` at positions `start`, `start + 1`, …

    `sample_ids` are the sequences that draw a token from the logits of the last position: usually the
    sequence itself, at the end of a prompt also its sibling samples, empty for a prompt chunk that is not
    the last. `prompt_logprobs`: also return logprobs of the prompt tokens that follow the computed positions.
    `num_proposed`: so many of the last `token_ids` are guesses. Then the one sequence in `sample_ids` draws at the last
    known position and goes on drawing behind each guess for as long as the guess is what it drew: 1 to
    `num_proposed` + 1 tokens, exactly those that it would draw one step at a time. `drafted`: a draft model, where
    there is one, computes the positions too; it has computed all before.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    tables: tuple[TableUpdate, ...] = ()
    sample_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    num_proposed: int = 0
    drafted: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass, decided. The runner obeys in this order:

    forget `ends`, open rows for `starts`, run `transfers` in order, apply each sequence's table updates,
    write and attend, draw.
    """

    step_id: int
    scheduled: tuple[ScheduledSequence, ...]
    transfers: tuple[BlockTransfer, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)

    @property
    def is_empty(self) -> bool:
        return not (self.scheduled or self.transfers or self.ends)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Raw (before temperature, penalties and filters) float32 log-probabilities at one position.

    `token_ids[0]` is the chosen (or actual) token with rank `rank` (1 = most likely); the rest are the most
    likely tokens, best first. The chosen token may appear twice: once in front, once among the best.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


class Drawn(NamedTuple):
    """What one sequence got from a step: its token(s), or for a beam the candidates.

    For a beam `token_ids` is empty and `logprobs` holds the candidates (best first, no chosen token in front,
    rank 0). `error`: this sequence could not draw (its logits hold a NaN, an id is outside the vocabulary); it must
    end, the others of the step are untouched. `embedding`: what a pooling request asked for; it has no tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a `StepPlan`: `drawn[seq_id]` for every id in any `sample_ids`.

    `prompt_logprobs[seq_id]`: for a `ScheduledSequence` that asked, one entry for each computed position p that
    has a prompt token at p + 1 (the entry describes that token).
    """

    step_id: int
    drawn: Mapping[int, Drawn] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class Runner(Protocol):
    """All that executes plans. `FakeRunner` (scripted tokens) and the model runner are the two of them."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Obey the plan; never allocate blocks, never keep a reference to live scheduler state."""
        ...
