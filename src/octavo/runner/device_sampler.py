"""Drawing on the device: logits that never leave it -> tokens that stay there.

Same rules and same noise as `sampler.py`, for draws that depend on nothing but their logits: greedy, temperature,
top_k, top_p, min_p. The uniform number of a draw is a function of where its token stands (`noise.py`), so it is made on
the host beforehand and travels with the step's inputs; a token is found by inverting the cumulative distribution at it,
by block and then inside the block, in float64, as on the host. All rows are drawn at once and nothing waits.

Penalties, biases and bans change the logits beforehand (`device_adjust.py`). What depends on the text so far in other
ways (a grammar, bad words of several tokens) is drawn on the host: `why_not`. It is plain torch, so it runs, and is
tested, on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

if TYPE_CHECKING:
    from octavo.core.step import SequenceStart

BLOCK = 512  # words whose weights are summed together
FILTER_BYTES = 256 << 20  # most scratch memory of the filters, which sort: rows are filtered in parts
FILTER_BYTES_PER_WORD = 48
LOWEST = torch.finfo(torch.float32).min


class Mode(IntEnum):
    """How much work the draws of a step are; each includes those before it."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Per draw, on the device: temperature float32 (0: greedy), top_k int32 (0: all), top_p, min_p float32, and the
    uniform number, float64. All [D]."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor


class Draw(Protocol):
    """`draw` of this module, or kernels that do the same."""

    def __call__(self, logits: torch.Tensor, numbers: DrawInputs, mode: Mode, /) -> tuple[torch.Tensor, torch.Tensor]:
        """logits float32 [D, V] -> (token int64 [D], the row's largest logit float32 [D])."""
        ...


class Listing(Protocol):
    """`list_logprobs` of this module, or kernels that do the same."""

    def __call__(
        self, logits: torch.Tensor, tokens: torch.Tensor, count: int, /
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]: ...


def why_not(start: SequenceStart) -> str | None:
    """Why the sequence cannot be drawn for on the device, in a few words; None: it can."""
    if start.pooling is not None:
        return "pooling"
    if start.num_candidates:
        return "beam search"
    if start.constraint is not None:
        return "grammar"
    return "bad words" if any(len(word) > 1 for word in start.bad_word_ids) else None


def draw(logits: torch.Tensor, inputs: DrawInputs, mode: Mode) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float32 [D, V], one row per draw -> (token int64 [D], the row's largest logit float32 [D]).

    A row whose largest logit is not finite has no usable token; whoever reads the results looks at it. Ties: where
    torch's maximum goes on this device.
    """
    highest, best = logits.max(-1)
    if mode is Mode.GREEDY:
        return best, highest
    temperature = inputs.temperature.clamp(min=1e-30)[:, None]
    weights = torch.exp((logits - highest[:, None]) / temperature)
    if mode is Mode.FILTERED:
        at_once = max(1, FILTER_BYTES // (FILTER_BYTES_PER_WORD * logits.shape[-1]))
        for first in range(0, len(logits), at_once):
            _filter(logits, weights, inputs, slice(first, first + at_once))
    drawn = _invert(weights, inputs.uniform)
    return torch.where(inputs.temperature > 0, drawn, best), highest


def list_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Raw log-probabilities of rows float32 [D, V]: (ids int64 [D, 1 + count], values float32 [D, 1 + count], rank
    [D]). In front the token (int64 [D]), then the `count` likeliest, best first, ties by id. The rank is 1 plus the
    number of tokens that are strictly likelier."""
    highest = logits.max(-1, keepdim=True).values
    total = torch.exp(logits - highest).sum(-1, keepdim=True, dtype=torch.float64)
    normaliser = highest.double() + total.log()
    own = logits.gather(1, tokens[:, None])
    ids = tokens[:, None]
    if count:
        ranked = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :count]
        ids = torch.cat((ids, ranked), dim=1)
    values = (logits.gather(1, ids).double() - normaliser).float()
    return ids, values, 1 + (logits > own).sum(-1)


def _filter(all_logits: torch.Tensor, all_weights: torch.Tensor, inputs: DrawInputs, part: slice) -> None:
    """Of the rows `part` of the weights [D, V], set those removed by top_k, then top_p over what it left, then min_p,
    to 0."""
    logits, weights = all_logits[part], all_weights[part]
    top_k, top_p, min_p = inputs.top_k[part], inputs.top_p[part], inputs.min_p[part]
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    count = logits.shape[-1]
    k = torch.where(top_k > 0, top_k, count).clamp(max=count).long()
    kth = order.values.gather(1, (k - 1)[:, None]).clamp(min=LOWEST)
    ranked = torch.where(order.values >= kth, weights.gather(1, order.indices), 0.0)
    wide = ranked.double()
    before = wide.cumsum(-1) - wide
    limit = top_p.double()[:, None] * wide.sum(-1, keepdim=True)
    # top_p = 1 removes nothing, whatever the rounding of the sums.
    kept = (before < limit) | (top_p >= 1.0)[:, None]
    kept &= ranked >= min_p[:, None]
    weights.scatter_(1, order.indices, torch.where(kept, ranked, 0.0))


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """First id whose cumulative weight exceeds uniform * total; an id of weight 0 is never drawn. int64 [D]."""
    draws, words = weights.shape
    blocks = -(-words // BLOCK)
    cut = F.pad(weights, (0, blocks * BLOCK - words)).view(draws, blocks, BLOCK)
    sums = cut.sum(-1, dtype=torch.float64).cumsum(-1)
    total = sums[:, -1:]
    target = uniform[:, None] * total
    block = _first_above(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    own = sums.gather(1, block) - before
    inside = cut.gather(1, block[:, :, None].expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    rest = (target - before) / own * inside[:, -1:]
    return (block * BLOCK + _first_above(inside, rest)).squeeze(1).clamp(max=words - 1)


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First index [D, 1] whose value exceeds target; where rounding left none, the first that reaches the total."""
    above = (cumulative <= target).sum(-1, keepdim=True)
    last = (cumulative < cumulative[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(above, last)
