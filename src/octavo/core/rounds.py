"""Small records of the scheduler: what a round decided, what is in flight, what a sequence gained, what was counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.core.sequence import Request, Sequence
from octavo.core.step import StepPlan, StepResult, TokenLogprobs


class SequenceNews(NamedTuple):
    """Tokens that a sequence gained in an update. `error`: the runner could not draw for it, the request ends."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    error: str | None = None


@dataclass(slots=True)
class Counters:
    """Since the start, but `live`: sequences of running requests now. beams: beam searches taken in.

    short_of_*: steps that left somebody waiting, by what was missing. sequence_steps and used_block_steps are sums over
    the steps, so their means need no history.
    """

    steps: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    aborted: int = 0
    deadlines: int = 0
    finished: int = 0
    beams: int = 0
    live: int = 0
    peak_running: int = 0
    sequence_steps: int = 0
    used_block_steps: int = 0
    short_of_blocks: int = 0
    short_of_seats: int = 0
    short_of_budget: int = 0

    def count_step(self, tokens: int, used_blocks: int, steps: int = 1) -> None:
        """A step was planned, or `steps` of the same kind; O(1)."""
        self.steps += steps
        self.computed_tokens += tokens * steps
        self.sequence_steps += self.live * steps
        self.used_block_steps += used_blocks * steps
        if self.live > self.peak_running:
            self.peak_running = self.live

    def count_shortage(self, round_: Round, seats_left: int | None) -> None:
        """Somebody still waits after the admissions of a step.

        seats_left: what would be left of max_num_seqs if the one that was kept out came in; None: nobody was kept out
        (the token budget ended first, or a prefix that it needs is being computed).
        """
        if seats_left is not None and seats_left >= 0:
            self.short_of_blocks += 1
        elif seats_left is not None:
            self.short_of_seats += 1
        elif not round_.budget:
            self.short_of_budget += 1


@dataclass(slots=True)
class Round:
    """Decisions of one `schedule()` that are not committed yet."""

    budget: int
    decided: dict[Sequence, int] = field(default_factory=dict)
    preempted: bool = False
    swept: bool = False  # windows were swept
    kept_out: Request | None = None  # the first that waits for a seat or for blocks
    proposals: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)  # part of what `decided` counts


@dataclass(slots=True)
class Flight:
    """A plan that has not reported back."""

    plan: StepPlan
    work: list[tuple[Sequence, int, int]]  # sequence, computed up to, epoch


def is_stale(seq: Sequence, flight: Flight) -> bool:
    """Do a beam's candidates continue a text that it no longer has, or computed before a preemption?"""
    return (seq, len(seq.token_ids), seq.epoch) not in flight.work


def end_of(seq: Sequence, token: int) -> tuple[str, int | None] | None:
    """(reason, stop reason) if the token just appended ends the sequence: a natural end, a stop id, a length limit.

    Stop strings are text: the engine finds them.
    """
    request, params = seq.request, seq.request.sampling
    if token in request.end_ids and seq.num_output > params.min_tokens:
        return "stop", token if token in (params.stop_token_ids or ()) else None
    return ("length", None) if len(seq.token_ids) >= request.max_len else None


def keep_prompt_logprobs(flight: Flight, result: StepResult) -> None:
    """They are the request's: the sample that computed them may have ended since."""
    for item, (seq, _, _) in zip(flight.plan.scheduled, flight.work):
        if entries := result.prompt_logprobs.get(item.seq_id):
            store = seq.request.prompt_logprobs
            if not store:
                store.extend([None] * seq.request.prompt_len)
            store[item.start + 1 : item.start + 1 + len(entries)] = entries


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
