"""Beam search as bookkeeping: which beams go on, which are finished, when to stop. No tensors, no blocks.

Semantics are those of transformers' `generate(num_beams=W, do_sample=False)`: of the candidates of all live beams the
best `W * max(2, 1 + number of end ids)` are looked at; those that end count as finished only when they are among the
best W; the best W that do not end go on. Scores are sums of log-probabilities; finished ones are divided by (generated
length ** length_penalty), once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.memory import KVMemory
from octavo.core.sequence import Request, Sequence
from octavo.core.step import TokenLogprobs
from octavo.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished beam. token_ids: generated only, an end token included."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Continuation:
    """A live beam of the next step: `parent` goes on with `token_id`."""

    parent: Sequence
    token_id: int
    cumulative_logprob: float


class BeamSearch:
    """State of one request's search; lives through preemption because it holds plain numbers only."""

    def __init__(self, params: BeamSearchParams, end_ids: Seq[int], max_tokens: int) -> None:
        self.width = params.beam_width
        self.length_penalty = params.length_penalty
        self.early_stopping = params.early_stopping
        self.end_ids = frozenset(end_ids)
        self.max_tokens = max_tokens
        self.num_candidates = max(2, 1 + len(self.end_ids)) * self.width
        self.finished: list[Hypothesis] = []  # best first, at most `width`
        self._offers: dict[int, TokenLogprobs] = {}

    def offer(self, seq_id: int, candidates: TokenLogprobs) -> None:
        """A step brought the best continuations of one beam."""
        self._offers[seq_id] = candidates

    def is_ready(self, live: Seq[Sequence]) -> bool:
        """Has every live beam been computed?"""
        return bool(live) and all(s.seq_id in self._offers for s in live)

    def advance(self, live: Seq[Sequence]) -> list[Continuation]:
        """Choose the beams of the next step, best first; an empty list ends the search."""
        length = live[0].num_output + 1  # generated tokens after this step
        ranked = self._rank(live)[: self.num_candidates]
        self._offers.clear()
        full_length = length >= self.max_tokens
        going: list[Continuation] = []
        for place, candidate in enumerate(ranked):
            ends = candidate.token_id in self.end_ids
            if ends or full_length:
                if place < self.width:
                    self._finish(candidate, length, "stop" if ends else "length")
            elif len(going) < self.width:
                going.append(candidate)
        if not going or self._is_settled(going[0].cumulative_logprob, length):
            return []
        return going

    def _rank(self, live: Seq[Sequence]) -> list[Continuation]:
        ranked = [
            Continuation(seq, token, seq.cumulative_logprob + logprob)
            for seq in live
            for token, logprob in zip(self._offers[seq.seq_id].token_ids, self._offers[seq.seq_id].logprobs)
        ]
        ranked.sort(key=lambda c: -c.cumulative_logprob)
        return ranked

    def _finish(self, candidate: Continuation, length: int, reason: str) -> None:
        tokens = (*candidate.parent.output_token_ids, candidate.token_id)
        score = candidate.cumulative_logprob / length**self.length_penalty
        self.finished.append(Hypothesis(tokens, candidate.cumulative_logprob, score, reason))
        self.finished.sort(key=lambda h: -h.score)
        del self.finished[self.width :]

    def _is_settled(self, best_running: float, length: int) -> bool:
        """No running beam can (or, for the heuristics, is expected to) beat the worst finished one."""
        if len(self.finished) < self.width:
            return False
        if self.early_stopping is True or self.width == 1:  # a single beam is greedy search: its first end is the end
            return True
        longest = self.max_tokens if self.early_stopping == "never" and self.length_penalty > 0 else length
        return best_running / longest**self.length_penalty <= self.finished[-1].score


def advance_beams(
    request: Request,
    memory: KVMemory,
    finish: Callable[[Sequence, str], None],
    new_sequence: Callable[[Request, int, list[int]], Sequence],
) -> None:
    """When every beam has reported: forks for beams with several continuations, ends for those with none."""
    live = list(request.live())
    if request.finished or not request.beam_state.is_ready(live):
        return
    going = request.beam_state.advance(live)
    if not going:
        for seq in live:
            finish(seq, "beam")
        return
    first_use: set[int] = set()
    forks = []
    kept = {c.parent.seq_id for c in going}
    with memory.unread_by_steps_in_flight():
        for seq in live:
            if seq.seq_id not in kept:
                finish(seq, "beam lost")
    for c in going:
        if c.parent.seq_id in first_use:
            child = new_sequence(request, len(request.sequences), list(c.parent.token_ids))
            memory.fork(c.parent, child)
            forks.append((child, c))
        else:
            first_use.add(c.parent.seq_id)
            forks.append((c.parent, c))
    for seq, c in forks:
        seq.token_ids.append(c.token_id)
        seq.cumulative_logprob = c.cumulative_logprob
    request.sequences = [s for s in request.sequences if not s.finished]
    request.forked = True
