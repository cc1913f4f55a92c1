"""Small records of the scheduler: what a round decided, what is in flight, what a sequence gained, what was counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.sequence import Request, Sequence
from octavo.core.step import StepPlan, TokenLogprobs


class SequenceNews(NamedTuple):
    """Tokens that a sequence gained in an update. `error`: the runner could not draw for it, the request ends."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    error: str | None = None


@dataclass(slots=True)
class Counters:
    """Since the start."""

    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    deadlines: int = 0
    finished: int = 0
    peak_running: int = 0


@dataclass(slots=True)
class Round:
    """Decisions of one `schedule()` that are not committed yet."""

    budget: int
    decided: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    swept: bool = False  # windows were swept


@dataclass(slots=True)
class Flight:
    """A plan that has not reported back."""

    plan: StepPlan
    work: list[tuple[Sequence, int, int]]  # sequence, computed up to, epoch


def is_stale(seq: Sequence, flight: Flight) -> bool:
    """Do a beam's candidates continue a text that it no longer has, or computed before a preemption?"""
    return (seq, len(seq.token_ids), seq.epoch) not in flight.work


def keep_prompt_logprobs(request: Request, start: int, entries: tuple[TokenLogprobs, ...]) -> None:
    """They are the request's: the sample that computed them may have ended since."""
    store = request.prompt_logprobs
    if not store:
        store.extend([None] * request.prompt_len)
    store[start + 1 : start + 1 + len(entries)] = entries


def work_of(request: Request) -> Iterator[tuple[Sequence, int]]:
    """(sequence, positions it lacks). While siblings wait to fork, only the prompt is computed, by the first."""
    leads = not request.forked and request.num_live() > 1
    for seq in request.sequences:
        if seq.finish_reason is not None or not seq.tables:
            continue
        known = request.prompt_len if leads else len(seq.token_ids) + seq.num_pending
        missing = known - seq.num_computed
        # With a step in flight the last token may be drawn already: nothing reads its KV.
        if missing > 0 and not (seq.num_pending and seq.num_tokens >= request.max_len):
            yield seq, missing
