"""Operations on one row of logits: the largest k, the filters, and the draw. NumPy on the host, one row at a time.

One row at a time on purpose: a row of 262,144 float32 (1 MiB) stays in a core's cache through all passes, and its
arithmetic cannot depend on its neighbours. NumPy rather than torch because at this size a torch call costs a few
times the work (argmax: 0.30 against 0.03 ms). No function here sorts the vocabulary: candidates are found by a
threshold first, and only they are sorted.

Rows hold finite values and -inf (banned); callers have refused NaN and +inf. Ties go to the lower id everywhere.
This module does not know sequences or parameters.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_BLOCK = 512
_SORT_AT_MOST = 2048  # more candidates than this are thinned out before they are sorted
_LOWEST = np.finfo(np.float32).min


class Scratch:
    """Private buffers for one row of `vocab_size` values; `weights` is padded with zeros to whole blocks."""

    def __init__(self, vocab_size: int) -> None:
        padded = -(-vocab_size // _BLOCK) * _BLOCK
        self.vocab_size = vocab_size
        self.padded = np.zeros(padded, dtype=np.float32)
        self.weights = self.padded[:vocab_size]
        self.logits = np.empty(vocab_size, dtype=np.float32)


def kth_largest(row: Row, k: int) -> np.float32:
    """The k-th largest value of `row`, 1 <= k <= len(row).

    The k-th largest of the maxima of blocks is a lower bound of it, and few values reach that bound.
    """
    whole = len(row) // _BLOCK * _BLOCK
    if k <= whole // _BLOCK // 4:
        maxima = row[:whole].reshape(-1, _BLOCK).max(axis=1)
        bound = np.partition(maxima, len(maxima) - k)[-k]
        row = row[row >= bound]
    return np.float32(np.partition(row, len(row) - k)[-k])


def largest(row: Row, k: int) -> Ids:
    """Ids of the k largest values (at most len(row)), best first."""
    k = min(k, len(row))
    if k == 0:
        return np.empty(0, dtype=np.int64)
    ids = np.flatnonzero(row >= kth_largest(row, k))
    return ids[np.argsort(-row[ids], kind="stable")[:k]]


def exponentials(row: Row, highest: np.float32, temperature: float, out: Row) -> None:
    """out = exp((row - highest) / temperature), so the largest is 1; unnormalised probabilities."""
    np.subtract(row, highest, out=out)
    if temperature != 1.0:
        with np.errstate(over="ignore"):  # a tiny temperature sends differences to -inf, as it should
            np.divide(out, np.float32(max(temperature, 1e-30)), out=out)
    np.exp(out, out=out)


def block_sums(padded: Row) -> npt.NDArray[np.float64]:
    """Sums of consecutive blocks of `padded`."""
    return padded.reshape(-1, _BLOCK).sum(axis=1).astype(np.float64)


def draw(scratch: Scratch, uniform: float) -> int:
    """Invert the cumulative distribution of `scratch.weights` at `uniform` in [0, 1): first by block, then inside.

    The first id whose cumulative weight exceeds uniform * total; an id of weight 0 is never drawn.
    """
    cumulative = np.cumsum(block_sums(scratch.padded))
    target = uniform * cumulative[-1]
    block = _first_above(cumulative, target)
    before = cumulative[block - 1] if block else 0.0
    inside = np.cumsum(scratch.padded[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    # The block's own sum is rounded to float32, its running sum is not: measure the rest on the latter's scale.
    rest = (target - before) / (cumulative[block] - before) * inside[-1]
    return block * _BLOCK + _first_above(inside, rest)


def draw_among(ids: Ids, weights: Row, uniform: float) -> int:
    """As `draw`, over the candidates `ids` (ascending) with their weights."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    return int(ids[_first_above(cumulative, uniform * cumulative[-1])])


def _first_above(cumulative: npt.NDArray[np.float64], target: float) -> int:
    """First index whose value exceeds target; where rounding left none, the first that reaches the total."""
    index = int(np.searchsorted(cumulative, target, side="right"))
    if index == len(cumulative):
        index = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return index


def nucleus(weights: Row, limit: float) -> Ids:
    """Ascending indices of the largest weights, as long as the mass before them is below `limit`; ties by index.

    Positive floats order like their bit patterns. Sums over the upper 16 bits tell which weights are surely in and
    which band of equal upper bits holds the border, so that only the band is sorted, not a vocabulary.
    """
    above, sure, band = 0.0, np.empty(0, dtype=np.int64), np.arange(len(weights))
    if len(weights) > _SORT_AT_MOST:
        upper = weights.view(np.uint32) >> np.uint32(16)
        from_top = np.cumsum(np.bincount(upper, weights=weights)[::-1])
        crossing = min(int(np.searchsorted(from_top, limit, side="left")), len(from_top) - 1)
        border = len(from_top) - 1 - crossing
        above = float(from_top[crossing - 1]) if crossing else 0.0
        sure, band = np.flatnonzero(upper > border), np.flatnonzero(upper == border)
    order = band[np.argsort(-weights[band], kind="stable")]
    ordered = weights[order].astype(np.float64)
    return np.sort(np.concatenate([sure, order[above + np.cumsum(ordered) - ordered < limit]]))


def keep(
    row: Row, highest: np.float32, temperature: float, top_k: int, top_p: float, min_p: float, scratch: Scratch
) -> tuple[Ids, Row]:
    """Candidates that survive top_k, then top_p over what top_k left, then min_p: (ids ascending, their weights).

    top_k keeps every token as likely as the k-th. top_p keeps the likeliest tokens while the mass before them is
    below top_p of the whole (so the one that crosses is kept, and always the first). min_p keeps tokens of at least
    min_p times the likeliest one's probability.
    """
    if top_k:
        # Where fewer than k are left after bans, the k-th is -inf; a banned token is no candidate.
        ids = np.flatnonzero(row >= max(kth_largest(row, top_k), _LOWEST))
        weights = np.empty(len(ids), dtype=np.float32)
        exponentials(row[ids], highest, temperature, weights)
        total = float(weights.sum(dtype=np.float64))
    else:
        exponentials(row, highest, temperature, scratch.weights)
        floor = min_p
        total = float(block_sums(scratch.padded).sum()) if top_p < 1.0 else 0.0
        if top_p < 1.0:
            # Tokens below this have, all together, less than the mass that top_p cuts: none of them survives.
            # Halved, so that rounding of the total can never exclude a token that should be seen.
            floor = max(floor, 0.5 * (1.0 - top_p) * total / len(row))
        ids = np.flatnonzero(scratch.weights >= np.float32(floor))
        weights = scratch.weights[ids]
    if top_p < 1.0:
        kept = nucleus(weights, top_p * total)
        ids, weights = ids[kept], weights[kept]
    if min_p > 0.0:
        likely = weights >= np.float32(min_p)
        ids, weights = ids[likely], weights[likely]
    return ids, weights
