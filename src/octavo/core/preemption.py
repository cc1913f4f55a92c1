"""Taking a running request's blocks back: whose, and whether to recompute or to swap.

The newest running request goes first, so the oldest always advances. The cost rule of "auto", per victim:

    swap       when its distinct blocks x `swap_block_tokens` < tokens that would have to be computed again,
               and the host pool has room
    recompute  otherwise

`swap_block_tokens` is what one block costs to move out and back, in tokens computed in the same time. Whatever the
way, a victim keeps its key and so its place in the queue, its output, and its counters; nothing is sent twice.
"""

from __future__ import annotations

from octavo.core.memory import KVMemory
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings


def choose_victim(running: list[Request], beneficiary: Request) -> Request | None:
    """The newest running request that is newer than the one in need. `running` is sorted by key."""
    newest = running[-1] if running else None
    if newest is None or newest is beneficiary or newest.key <= beneficiary.key:
        return None
    return newest


def recompute_tokens(request: Request) -> int:
    """Tokens to compute again after a preemption by recompute: the prompt once, every sequence's own output."""
    live = list(request.live())
    prompt = min(request.prompt_len, max((s.num_computed for s in live), default=0))
    return prompt + sum(max(0, s.num_computed - request.prompt_len) for s in live)


def prefers_swap(request: Request, memory: KVMemory, settings: SchedulerSettings) -> bool:
    """The cost rule.

    With a step in flight its blocks are complete by the time they are moved, since the move is part of a later plan. A
    beam is recomputed all the same (the candidates on the way would continue a text it no longer has), and so is a
    sequence with guesses on the way (how many of its positions are right is not known yet).
    """
    if memory.host_pool is None or settings.preemption == "recompute":
        return False
    undecided = request.beam is not None or any(s.num_proposed for s in request.live())
    if undecided and any(s.num_done != s.num_computed or s.num_pending for s in request.live()):
        return False
    if request.pooling is not None:
        return False  # the sum over its tokens lives in the runner's row, which a swap does not keep
    blocks = memory.swap_size(request)
    if not blocks or blocks > memory.host_pool.num_available:
        return False
    return settings.preemption == "swap" or blocks * settings.swap_block_tokens < recompute_tokens(request)
