"""`EngineStats`: what an engine has counted, as plain numbers. It computes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start and gauges of now, computed when asked.

    mean_sequences, mean_used_blocks: over the steps so far. steps_short_of_*: steps that left somebody waiting for
    blocks, for a seat of max_num_seqs, or for the token budget. spec_*: speculative decoding: rows with guesses
    ("drafts"), guesses checked and found right, the last two also by place behind the last known token; sequences that
    a draft model did not follow, or not to their end ("left").
    overlapped_steps: planned while the one before could still run; overlap_waits: reason -> those that had to report
    before the next was planned.
    """

    running: int
    waiting: int
    steps: int
    computed_tokens: int
    generated_tokens: int
    finished: int
    aborted: int
    deadlines: int
    preemptions: int
    swaps: int
    recomputed_tokens: int
    copies: int
    forks: int
    usage: float
    free_blocks: int
    cached_blocks: int
    peak_used_blocks: int
    peak_sequences: int
    prefix_queries: int
    prefix_hits: int
    prefix_hit_tokens: int
    prefix_queried_tokens: int
    evictions: int
    miss_reasons: dict[str, int]
    sequences: int
    mean_sequences: float
    mean_used_blocks: float
    steps_short_of_blocks: int
    steps_short_of_seats: int
    steps_short_of_budget: int
    leaks_repaired: int
    spec_drafts: int = 0
    spec_draft_tokens: int = 0
    spec_accepted_tokens: int = 0
    spec_draft_tokens_per_pos: tuple[int, ...] = ()
    spec_accepted_tokens_per_pos: tuple[int, ...] = ()
    spec_left_sequences: int = 0
    overlapped_steps: int = 0
    overlap_waits: dict[str, int] = field(default_factory=dict)
