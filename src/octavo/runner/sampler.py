"""`Sampler`: logits of a step -> what each sequence drew.

Order for one row, as in vLLM: raw log-probabilities; allowed ids, bad words, end ids before min_tokens, logit_bias,
penalties (`SamplingState.adjust`); temperature; top_k, top_p, min_p; one draw. A row without an option does not pay
for it, and a batch of nothing but greedy rows is one argmax.

A row whose logits are not usable (a NaN, +inf, or no finite value) gets an error in its `Drawn`; the others do not
notice. Bans that contradict each other fall back to a fixed choice (`SamplingState.fallback`).

It knows no block tables and changes no sequence: the caller tells the states what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.step import Drawn
from octavo.runner import filters, logprobs
from octavo.runner.filters import Row, Scratch
from octavo.runner.noise import uniforms
from octavo.runner.sampling_state import SamplingState


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw to make. position: index in the sequence of the token that is drawn (part of the noise counter)."""

    logit_row: int
    state: SamplingState
    position: int


class Sampler:
    """Draws for a batch. Holds scratch memory only."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._scratch = Scratch(vocab_size)

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """logits float32 [N, V], any device; never changed. One `Drawn` per draw, in order.

        Several draws may refer to one row of logits (samples of one prompt).
        """
        if logits.dim() != 2 or logits.shape[1] != self._vocab_size or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {logits.dtype} {tuple(logits.shape)}; expected float32 [N, {self._vocab_size}]"
            )
        if all(draw.state.plain_greedy for draw in draws):
            return self._all_greedy(logits, draws)
        rows = logits.cpu().numpy()
        noise = self._noise(draws)
        return [self._draw(rows[draw.logit_row], draw, uniform) for draw, uniform in zip(draws, noise, strict=True)]

    def _all_greedy(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One argmax where the logits lie; only ids and maxima leave the device. Ties: the lowest id on a CPU."""
        if logits.device.type == "cpu":
            rows = logits.numpy()  # NumPy's argmax is ten times torch's at this size
            best = rows.argmax(axis=1)
            highest = rows[np.arange(len(rows)), best]
        else:
            values, places = logits.max(-1)  # a NaN is the maximum here too
            best, highest = places.cpu().numpy(), values.cpu().numpy()
        ids, usable = best.tolist(), np.isfinite(highest).tolist()
        return [
            Drawn((ids[d.logit_row],)) if usable[d.logit_row] else _unusable(highest[d.logit_row], d.position)
            for d in draws
        ]

    def _noise(self, draws: Sequence[Draw]) -> list[float]:
        """The uniform number of each draw; 0 for those that need none."""
        noise = [0.0] * len(draws)
        random = [i for i, draw in enumerate(draws) if not draw.state.greedy and not draw.state.num_candidates]
        if random:
            states = [draws[i].state for i in random]
            numbers = uniforms(
                [s.seed for s in states], [s.sample_index for s in states], [draws[i].position for i in random]
            )
            for i, number in zip(random, numbers.tolist(), strict=True):
                noise[i] = number
        return noise

    def _draw(self, raw: Row, draw: Draw, uniform: float) -> Drawn:
        state = draw.state
        if state.error is not None:
            return Drawn((), error=state.error)
        best = int(raw.argmax())
        highest = raw[best]  # a NaN anywhere is what argmax finds
        if not np.isfinite(highest):
            return _unusable(highest, draw.position)
        if state.num_candidates:
            return Drawn((), (logprobs.candidates(raw, state.num_candidates, self._scratch),))
        token = self._token(raw, best, state, uniform)
        if state.logprobs is None:
            return Drawn((token,))
        return Drawn((token,), (logprobs.token_logprobs(raw, token, state.logprobs, self._scratch),))

    def _token(self, raw: Row, best: int, state: SamplingState, uniform: float) -> int:
        row = raw
        if state.adjusts:
            row = self._scratch.logits
            np.copyto(row, raw)
            state.adjust(row)
            best = int(row.argmax())
            if not np.isfinite(row[best]):
                return state.fallback(raw)
        if state.greedy:
            return best
        highest, scratch = row[best], self._scratch
        if state.filters:
            ids, weights = filters.keep(row, highest, state.temperature, state.top_k, state.top_p, state.min_p, scratch)
            return filters.draw_among(ids, weights, uniform)
        filters.exponentials(row, highest, state.temperature, scratch.weights)
        return filters.draw(scratch, uniform)


def _unusable(highest: np.float32, position: int) -> Drawn:
    return Drawn((), error=f"the model's logits have no usable maximum ({highest}) at position {position}")
