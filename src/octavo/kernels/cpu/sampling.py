"""`NativeSampling`: draws, log-probabilities and largest values of rows of logits in C++ (csrc/sampling.h).

The rules are those of `runner/filters.py` and `runner/logprobs.py`, which stay the definition and the fallback; only
the last bit of an exponential or of a sum may differ, so a draw can differ where its uniform number lies within about
1e-6 of the border between two tokens. Rows are dealt to threads, and so are the parts of a single row.

Invariant: what is drawn from a row depends on that row, its parameters and its uniform number only. It knows no
sequences, penalties or masks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.kernels.cpu.loader import native

Row = npt.NDArray[np.float32]
#: (row, temperature > 0, top_k or 0, top_p, min_p, uniform in [0, 1))
DrawRequest = tuple[int, float, int, float, float, float]
#: (ids, their log-probabilities, rank of the chosen token)
LogprobEntry = tuple[list[int], list[float], int]


class NativeSampling:
    """Works on rows of one vocabulary size. `scan` first: its rows must stay as they are until the next one."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._native = native().Sampling(vocab_size)
        self._rows: list[Row] = []

    def scan(self, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
        """float32 [V] contiguous, each -> (first index of its largest value, that value; NaN if the row holds one)."""
        for row in rows:
            if row.shape != (self._vocab_size,) or row.dtype != np.float32 or not row.flags.c_contiguous:
                raise ValueError(f"a row of {row.dtype} {row.shape}: contiguous float32 [{self._vocab_size}] is needed")
        self._rows = list(rows)  # keeps the memory alive
        best, highest = self._native.scan([row.ctypes.data for row in rows])
        return best, highest

    def uniforms(self, seeds: Sequence[int], samples: Sequence[int], positions: Sequence[int]) -> list[float]:
        """As `runner.noise.uniforms` for the stream of draws, the same bits; seeds modulo 2**64."""
        keys = [seed & 0xFFFFFFFFFFFFFFFF for seed in seeds]
        numbers: list[float] = native().uniforms(keys, list(samples), list(positions), 0)
        return numbers

    def draw(self, requests: Sequence[DrawRequest]) -> list[int]:
        """One token per request; its row's largest value must be finite."""
        tokens: list[int] = self._native.draw(list(requests))
        return tokens

    def logprobs(self, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]) -> list[LogprobEntry]:
        """Per row: the token (unless -1) in front with its rank, then the `count` most likely, best first."""
        entries: list[LogprobEntry] = self._native.logprobs(list(rows), list(tokens), list(counts))
        return entries
