"""What the scheduler needs to know, as plain numbers: the part of the configuration that the simulator shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculationSettings:
    """How tokens are proposed ahead, and what checking them costs.

    method: "ngram" (what followed the same tokens before in the sequence) or "draft" (a smaller model, run by the
    runner). num_tokens: most proposals for a sequence in one step. lookup_min, lookup_max: tokens that must, and at
    most do, agree before a continuation is copied. row_costs: (rows, time of a step with so many), rows ascending, any
    unit; empty: proposals cost nothing, so as many as possible are made. draft_costs: the same of a pass of the draft
    model, in the same unit.
    """

    method: str
    num_tokens: int
    lookup_min: int = 2
    lookup_max: int = 4
    row_costs: tuple[tuple[int, float], ...] = ()
    draft_costs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSettings:
    """num_blocks: physical blocks of the pool. num_host_blocks: blocks of the host pool that swapping uses (0: none).

    swap_block_tokens: what moving one block out and back costs, in recomputed tokens; preemption "auto" swaps a
    victim when its blocks cost less to move than its tokens to recompute. max_preemptions: after that many, a
    request is only readmitted when nothing older can push it out again (0: no bound). priority_aging_s: seconds of
    waiting that are worth one level of priority. max_in_flight: steps that may be planned before the oldest reports
    back. speculation: None: no token is proposed ahead.
    """

    num_blocks: int
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    allocation: str = "paged"
    copy_on_write: bool = True
    enable_prefix_caching: bool = False
    preemption: str = "auto"
    num_host_blocks: int = 0
    swap_block_tokens: float = 1.0
    max_preemptions: int = 8
    max_queue: int | None = None
    priority_aging_s: float = 60.0
    max_in_flight: int = 1
    speculation: SpeculationSettings | None = None
