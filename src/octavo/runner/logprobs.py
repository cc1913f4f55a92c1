"""Raw log-probabilities in float32, for the rows that ask and no others.

"Raw": of the model's own logits, before temperature, penalties and filters. The normaliser is summed in blocks and
added up in float64; nothing but the few values that are returned is ever normalised.
"""

from __future__ import annotations

import math

import numpy as np

from octavo.core.step import TokenLogprobs
from octavo.runner.filters import Ids, Row, Scratch, block_sums, exponentials, largest


def log_normaliser(row: Row, scratch: Scratch) -> float:
    """log(sum(exp(row))) of finite-or--inf logits [V]."""
    highest = row.max()
    exponentials(row, highest, 1.0, scratch.weights)
    return float(highest) + math.log(float(block_sums(scratch.padded).sum()))


def _entry(row: Row, ids: Ids, normaliser: float, rank: int) -> TokenLogprobs:
    values = (row[ids].astype(np.float64) - normaliser).astype(np.float32)
    return TokenLogprobs(tuple(ids.tolist()), tuple(values.tolist()), rank)


def token_logprobs(row: Row, token: int, k: int, scratch: Scratch) -> TokenLogprobs:
    """The chosen (or actual) token in front with its rank, then the k most likely.

    Its rank is 1 plus the number of tokens that are strictly more likely.
    """
    normaliser = log_normaliser(row, scratch)
    rank = 1 + int(np.count_nonzero(row > row[token]))
    return _entry(row, np.concatenate(([token], largest(row, k))), normaliser, rank)


def candidates(row: Row, k: int, scratch: Scratch) -> TokenLogprobs:
    """The k most likely tokens, best first, for a beam."""
    return _entry(row, largest(row, k), log_normaliser(row, scratch), 0)
