"""Drawing on the device through jit/sample.py and jit/adjust.py: logits -> tokens, without the host looking at either.

`draw` is what `runner/sampler.py` does for greedy, temperature, top_k, top_p and min_p; `adjusted` makes private copies
of rows and applies penalties, biases and bans; `list_logprobs` tells what was likely; `uniforms` makes the numbers of
`runner/noise.py` from the same seeds. Every call only queues kernels, whose grids follow from shapes, so they may be
recorded.

What depends on text (bad words of several tokens, a grammar) is the host's: it can hand over the bans that follow.
This module does not know sequences; a draw is a row, a history a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.errors import ConfigError
from octavo.kernels import adjusting
from octavo.kernels.adjusting import Edits, Penalties
from octavo.kernels.triton.jit import adjust, sample
from octavo.kernels.triton.tuning import next_power_of_two

TURN = 4  # blocks of logits per program
TILE = 1024
FUSION = {"enable_fp_fusion": False}  # the host rounds after every operation


class DrawNumbers(Protocol):
    """Per draw, on the device, all [D]. temperature float32 (0: greedy), top_k int32 (0: all), top_p and min_p float32
    or float64 (1 and 0: all), uniform float64."""

    @property
    def temperature(self) -> torch.Tensor: ...

    @property
    def top_k(self) -> torch.Tensor: ...

    @property
    def top_p(self) -> torch.Tensor: ...

    @property
    def min_p(self) -> torch.Tensor: ...

    @property
    def uniform(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Numbers:
    """`DrawNumbers` as plain tensors."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    @classmethod
    def same(
        cls,
        draws: int,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        device: torch.device | str,
    ) -> Numbers:
        """The same settings for all draws, with uniform numbers that step through [0, 1)."""

        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((draws,), value, dtype=dtype, device=device)

        uniform = torch.arange(draws, dtype=torch.float64, device=device) / draws
        return cls(
            full(temperature, torch.float32), full(top_k, torch.int32), full(top_p, torch.float64),
            full(min_p, torch.float64), uniform,
        )  # fmt: skip


class TokenHistory(adjusting.TokenHistory):
    """The same, counted by a kernel: one program per token, nothing of the size of the room."""

    def add(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        if tokens.numel():
            adjust.count_kernel[(tokens.numel(),)](
                slots, tokens, self.ids, self.counts, self.sizes, self.ids.shape[1], TILE=TILE, num_warps=4, **FUSION
            )


class TritonAdjusting(adjusting.Adjusting):
    """`Adjusting` by the kernels of this module."""

    def history(self, slots: int, capacity: int, device: torch.device | str) -> adjusting.TokenHistory:
        return TokenHistory(slots, capacity, device)

    def adjusted(
        self, logits: torch.Tensor, rows: torch.Tensor, penalties: Penalties | None, edits: Edits | None
    ) -> torch.Tensor:
        return adjusted(logits, rows, penalties, edits)


def draw(logits: torch.Tensor, numbers: DrawNumbers, mode: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [D, V], one row per draw -> (token int64 [D], the row's largest logit float32 [D]).

    mode: 0 every draw is greedy, 1 some have a temperature, 2 some have a filter. Ties go to the lowest id. A row
    whose largest logit is not finite (NaN if it holds one) has no usable token; whoever reads the results looks at it.
    """
    _check(logits)
    draws, words = logits.shape
    blocks, padded = _blocks(words)
    tokens = torch.empty(draws, dtype=torch.int64, device=logits.device)
    largest = torch.empty(draws, dtype=torch.float32, device=logits.device)
    if not draws:
        return tokens, largest
    maxima = _scan(logits, blocks)
    sums = maxima
    if mode > 0:
        sums = torch.empty(draws, blocks, dtype=torch.float32, device=logits.device)
        sample.sums_kernel[(-(-blocks // TURN), draws)](
            logits, maxima, sums, numbers.temperature, numbers.top_k, words, logits.stride(0), blocks,
            TURN=TURN, NB=padded, num_warps=4, **FUSION,
        )  # fmt: skip
    given = (logits, maxima, sums, numbers.temperature, numbers.top_k, numbers.top_p, numbers.min_p, numbers.uniform)
    sample.pick_kernel[(draws,)](
        *given, tokens, largest, words, logits.stride(0), blocks, RANDOM=mode > 0, NB=padded, num_warps=4, **FUSION
    )
    if mode > 1:
        sample.filter_kernel[(draws,)](
            *given, tokens, *_scratch(logits, blocks), words, logits.stride(0), blocks, NB=padded, TILE=TILE,
            num_warps=4, **FUSION,
        )  # fmt: skip
    return tokens, largest


def adjusted(
    logits: torch.Tensor, rows: torch.Tensor, penalties: Penalties | None = None, edits: Edits | None = None
) -> torch.Tensor:
    """Private copies [D, V] of logits float32 [N, V], row `rows[i]` (int64 [D]) for draw i, changed: first edits, then
    penalties, as `SamplingState.adjust` does."""
    _check(logits)
    draws, words = rows.numel(), logits.shape[1]
    out = torch.empty(draws, words, dtype=torch.float32, device=logits.device)
    if not draws:
        return out
    adjust.copy_rows_kernel[(-(-words // TILE), draws)](
        logits, rows, out, words, logits.stride(0), out.stride(0), TILE=TILE, num_warps=4, **FUSION
    )
    if edits is not None and edits.rows.numel():
        count = edits.rows.numel()
        adjust.edit_kernel[(-(-count // TILE),)](
            out, edits.rows, edits.tokens, edits.values, count, out.stride(0), TILE=TILE, num_warps=4, **FUSION
        )
    if penalties is not None:
        history = penalties.history
        room = history.ids.shape[1]
        adjust.penalise_kernel[(-(-room // TILE), draws)](
            out, penalties.slots, history.ids, history.counts, history.sizes, penalties.repetition, penalties.frequency,
            penalties.presence, out.stride(0), room, TILE=TILE, num_warps=4, **FUSION,
        )  # fmt: skip
    return out


def list_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities of rows float32 [D, V]: (ids int64 [D, 1 + count], values float32 [D, 1 + count], rank
    int32 [D]). In front the token (int64 [D]; negative: none, its place is -1 and its rank 1), then the `count`
    likeliest, best first, ties by id. The rank is 1 plus the number of tokens that are strictly likelier. Where a row
    has no finite maximum all ids are -1."""
    _check(logits)
    draws, words = logits.shape
    if not 0 <= count <= words:
        raise ConfigError(f"{count} log-probabilities of a vocabulary of {words}: ask for 0 to {words}")
    blocks, padded = _blocks(words)
    device = logits.device
    ids = torch.full((draws, 1 + count), -1, dtype=torch.int64, device=device)
    values = torch.full((draws, 1 + count), float("-inf"), dtype=torch.float32, device=device)
    ranks = torch.ones(draws, dtype=torch.int32, device=device)
    if not draws:
        return ids, values, ranks
    maxima = _scan(logits, blocks)
    sums = torch.empty(draws, blocks, dtype=torch.float32, device=device)
    ones = torch.ones(draws, dtype=torch.float32, device=device)
    sample.sums_kernel[(-(-blocks // TURN), draws)](
        logits, maxima, sums, ones, torch.zeros(draws, dtype=torch.int32, device=device), words, logits.stride(0),
        blocks, TURN=TURN, NB=padded, num_warps=4, **FUSION,
    )  # fmt: skip
    adjust.rank_kernel[(-(-words // TILE), draws)](
        logits, tokens, ranks, words, logits.stride(0), TILE=TILE, num_warps=4, **FUSION
    )
    adjust.list_kernel[(draws,)](
        logits, maxima, sums, tokens, ids, values, *_scratch(logits, blocks), words, logits.stride(0), blocks,
        LISTED=count, NB=padded, TILE=TILE, num_warps=4, **FUSION,
    )  # fmt: skip
    return ids, values, ranks


def uniforms(seeds: torch.Tensor, sample_indices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [D] each (seeds: the 64 bits of an unsigned number) -> float64 [D] in [0, 1), bit for bit those of
    `runner/noise.py`."""
    out = torch.empty(seeds.numel(), dtype=torch.float64, device=seeds.device)
    if out.numel():
        adjust.uniform_kernel[(-(-out.numel() // 256),)](
            seeds, sample_indices, positions, out, out.numel(), TILE=256, num_warps=2, **FUSION
        )
    return out


def _check(logits: torch.Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ConfigError(
            f"logits are {logits.dtype} {tuple(logits.shape)}; float32 [D, V] with contiguous rows is needed"
        )


def _blocks(words: int) -> tuple[int, int]:
    """(blocks of a row, a power of two that holds them)."""
    blocks = -(-words // sample.BLOCK)
    return blocks, max(16, next_power_of_two(blocks))


def _scan(logits: torch.Tensor, blocks: int) -> torch.Tensor:
    draws, words = logits.shape
    maxima = torch.empty(draws, blocks, dtype=torch.float32, device=logits.device)
    sample.scan_kernel[(-(-blocks // TURN), draws)](
        logits, maxima, words, logits.stride(0), blocks, TURN=TURN, num_warps=4, **FUSION
    )
    return maxima


def _scratch(logits: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Room for candidates: ids int32 and values float32 [D, V], and blocks int32 [D, blocks]."""
    draws, words = logits.shape
    device = logits.device
    return (
        torch.empty(draws, words, dtype=torch.int32, device=device),
        torch.empty(draws, words, dtype=torch.float32, device=device),
        torch.empty(draws, blocks, dtype=torch.int32, device=device),
    )
