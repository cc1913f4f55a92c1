"""`Pool`: one vector from the final hidden states of a prompt, taken in as the chunks are computed.

The states are the model's after its last norm, those that the head would turn into logits. The mean is summed in
float64, so that cutting a prompt into chunks changes nothing that float32 could show. A preempted request computes its
prompt again and begins with an empty pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from octavo.core.step import Drawn

if TYPE_CHECKING:
    from octavo.sampling_params import PoolingParams


class Pool:
    """The pool of one sequence; `prompt_len` tokens go in, in order."""

    __slots__ = ("_params", "_prompt_len", "_sum", "_taken")

    def __init__(self, params: PoolingParams, prompt_len: int) -> None:
        self._params = params
        self._prompt_len = prompt_len
        self._sum: torch.Tensor | None = None
        self._taken = 0

    def wants(self, count: int) -> int:
        """How many of the next `count` tokens' states it reads, from the last backwards."""
        return 1 if self._params.pooling == "last" else count

    def add(self, hidden: torch.Tensor) -> None:
        """hidden [T, D]: the states of the next T tokens."""
        if self._params.pooling == "last":
            self._sum, self._taken = hidden[-1].double(), 1
            return
        part = hidden.double().sum(0)
        self._sum = part if self._sum is None else self._sum + part
        self._taken += len(hidden)

    def result(self) -> Drawn:
        """The vector, or an error where it is not finite."""
        expected = self._prompt_len if self._params.pooling == "mean" else 1
        if self._sum is None or self._taken != expected:
            return Drawn((), error=f"{self._taken} of {expected} tokens were pooled")
        vector = self._sum / self._taken
        length = float(vector.norm())
        if not length < float("inf"):
            return Drawn((), error="the model's hidden states are not finite")
        if self._params.normalize and length > 0:
            vector = vector / length
        return Drawn((), embedding=vector.float().tolist())
