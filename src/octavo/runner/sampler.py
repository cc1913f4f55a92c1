"""`Sampler`: logits of a step -> what each sequence drew.

Order for one row, as in vLLM: raw log-probabilities; allowed ids, bad words, end ids before min_tokens, logit_bias,
penalties (`SamplingState.adjust`); temperature; top_k, top_p, min_p; one draw. A row without an option does not pay
for it, and a batch of nothing but greedy rows is one argmax.

A row whose logits are not usable (a NaN, +inf, or no finite value) gets an error in its `Drawn`; the others do not
notice. Bans that contradict each other fall back to a fixed choice (`SamplingState.fallback`).

On a CPU with native kernels all rows of a step are scanned, drawn and listed together (`_draw_natively`, the same rules
in C++); else, and as the definition, NumPy goes row by row (`_draw`).

It knows no block tables and changes no sequence: the caller tells the states what was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.core.step import Drawn, TokenLogprobs
from octavo.kernels import cpu
from octavo.runner import filters, logprobs
from octavo.runner.filters import Row, Scratch
from octavo.runner.noise import uniforms
from octavo.runner.sampling_state import SamplingState

ADJUSTED_BYTES = 64 << 20  # most private copies of rows (penalties, bans, bias) alive at once


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw to make. position: index in the sequence of the token that is drawn (part of the noise counter)."""

    logit_row: int
    state: SamplingState
    position: int


class Sampler:
    """Draws for a batch. Holds scratch memory only. native=False: NumPy even where the native kernels are built."""

    def __init__(self, vocab_size: int, native: bool = True) -> None:
        self._vocab_size = vocab_size
        self._scratch = Scratch(vocab_size)
        self._native = cpu.make_sampling(vocab_size) if native else None
        self._copies_at_once = max(1, ADJUSTED_BYTES // (4 * vocab_size))
        self._copies = np.empty((0, vocab_size), dtype=np.float32)

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
        if self._native is not None:
            return self._draw_natively(self._native, rows, draws, noise)
        return [self._draw(rows[draw.logit_row], draw, uniform) for draw, uniform in zip(draws, noise, strict=True)]

    def _all_greedy(self, logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One argmax where the logits lie; only ids and maxima leave the device. Ties: the lowest id on a CPU."""
        if logits.device.type == "cpu" and self._native is not None:
            return self._greedy_answers(*self._native.scan(list(logits.numpy())), draws)
        if logits.device.type == "cpu":
            rows = logits.numpy()  # NumPy's argmax is ten times torch's at this size
            best = rows.argmax(axis=1)
            highest = rows[np.arange(len(rows)), best]
        else:
            values, places = logits.max(-1)  # a NaN is the maximum here too
            best, highest = places.cpu().numpy(), values.cpu().numpy()
        return self._greedy_answers(best.tolist(), highest.tolist(), draws)

    def prompt_logprobs(self, logits: torch.Tensor, tokens: Sequence[int], k: int) -> list[TokenLogprobs | None]:
        """logits float32 [N, V], the N tokens that follow -> raw entries with k likeliest; None: no finite maximum."""
        rows = list(np.ascontiguousarray(logits.cpu().numpy()))
        if self._native is None:
            return [
                logprobs.token_logprobs(row, token, k, self._scratch) if np.isfinite(row.max()) else None
                for row, token in zip(rows, tokens, strict=True)
            ]
        _, highest = self._native.scan(rows)
        good = [i for i, value in enumerate(highest) if math.isfinite(value)]
        found = self._native.logprobs(good, [tokens[i] for i in good], [k] * len(good))
        entries: list[TokenLogprobs | None] = [None] * len(rows)
        for i, (ids, values, rank) in zip(good, found, strict=True):
            entries[i] = TokenLogprobs(tuple(ids), tuple(values), rank)
        return entries

    def greedy(self, best: torch.Tensor, highest: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """One `Drawn` per plain greedy draw, from the index and value of each row's largest logit."""
        return self._greedy_answers(best.tolist(), highest.tolist(), draws)

    def _greedy_answers(self, best: list[int], highest: list[float], draws: Sequence[Draw]) -> list[Drawn]:
        """best and highest: index and value of the largest logit of each row."""
        return [
            Drawn((best[d.logit_row],))
            if math.isfinite(highest[d.logit_row])
            else _unusable(highest[d.logit_row], d.position)
            for d in draws
        ]

    def _noise(self, draws: Sequence[Draw]) -> list[float]:
        """The uniform number of each draw; 0 for those that need none."""
        noise = [0.0] * len(draws)
        random = [i for i, draw in enumerate(draws) if not draw.state.greedy and not draw.state.num_candidates]
        if random:
            states = [draws[i].state for i in random]
            places = ([s.seed for s in states], [s.sample_index for s in states], [draws[i].position for i in random])
            numbers = self._native.uniforms(*places) if self._native is not None else uniforms(*places).tolist()
            for i, number in zip(random, numbers, strict=True):
                noise[i] = number
        return noise

    def _draw_natively(
        self, native: cpu.NativeSampling, rows: Row, draws: Sequence[Draw], noise: Sequence[float]
    ) -> list[Drawn]:
        """All draws together. Tokens first (in parts, where rows are changed), then log-probabilities of raw rows."""
        raw = list(np.ascontiguousarray(rows))
        best, highest = native.scan(raw)
        usable = [draw.state.error is None and math.isfinite(highest[draw.logit_row]) for draw in draws]
        tokens: dict[int, int] = {}
        plain: list[int] = []
        adjusted: list[int] = []
        for i, draw in enumerate(draws):
            if not usable[i] or draw.state.num_candidates:
                continue
            if draw.state.adjusts:
                adjusted.append(i)
            elif draw.state.greedy:
                tokens[i] = best[draw.logit_row]
            else:
                plain.append(i)
        drawn = native.draw([_request(draws[i].logit_row, draws[i].state, noise[i]) for i in plain]) if plain else ()
        tokens.update(zip(plain, drawn, strict=True))
        for first in range(0, len(adjusted), self._copies_at_once):
            self._draw_adjusted(native, raw, draws, noise, adjusted[first : first + self._copies_at_once], tokens)
        entries = self._entries(native, raw, draws, usable, tokens, rescan=bool(adjusted))
        return [
            _answer(draw, usable[i], highest[draw.logit_row], tokens.get(i), entries.get(i))
            for i, draw in enumerate(draws)
        ]

    def _draw_adjusted(
        self,
        native: cpu.NativeSampling,
        raw: list[Row],
        draws: Sequence[Draw],
        noise: Sequence[float],
        part: list[int],
        tokens: dict[int, int],
    ) -> None:
        """Draws `part`, each from its own changed copy of its row, into `tokens`."""
        if len(self._copies) < len(part):
            self._copies = np.empty((len(part), self._vocab_size), dtype=np.float32)
        copies = list(self._copies[: len(part)])
        for copy, i in zip(copies, part, strict=True):
            np.copyto(copy, raw[draws[i].logit_row])
            draws[i].state.adjust(copy)
        best, highest = native.scan(copies)
        random: list[int] = []
        for place, i in enumerate(part):
            if not math.isfinite(highest[place]):
                tokens[i] = draws[i].state.fallback(raw[draws[i].logit_row])
            elif draws[i].state.greedy:
                tokens[i] = best[place]
            else:
                random.append(place)
        if random:
            drawn = native.draw([_request(place, draws[part[place]].state, noise[part[place]]) for place in random])
            tokens.update(zip((part[place] for place in random), drawn, strict=True))

    def _entries(
        self,
        native: cpu.NativeSampling,
        raw: list[Row],
        draws: Sequence[Draw],
        usable: Sequence[bool],
        tokens: dict[int, int],
        rescan: bool,
    ) -> dict[int, TokenLogprobs]:
        """Raw log-probabilities for the draws that ask, by index."""
        asking = [
            i
            for i, draw in enumerate(draws)
            if usable[i] and (draw.state.num_candidates or draw.state.logprobs is not None)
        ]
        if not asking:
            return {}
        if rescan:
            native.scan(raw)
        counts = [draws[i].state.num_candidates or draws[i].state.logprobs or 0 for i in asking]
        found = native.logprobs([draws[i].logit_row for i in asking], [tokens.get(i, -1) for i in asking], counts)
        return {
            i: TokenLogprobs(tuple(ids), tuple(values), rank)
            for i, (ids, values, rank) in zip(asking, found, strict=True)
        }

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
        if state.error is not None:  # the grammar allows nothing here
            return Drawn((), error=state.error)
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


def _unusable(highest: float | np.float32, position: int) -> Drawn:
    return Drawn((), error=f"the model's logits have no usable maximum ({highest}) at position {position}")


def _request(row: int, state: SamplingState, uniform: float) -> tuple[int, float, int, float, float, float]:
    return row, max(state.temperature, 1e-30), state.top_k, state.top_p, state.min_p, uniform


def _answer(draw: Draw, usable: bool, highest: float, token: int | None, entry: TokenLogprobs | None) -> Drawn:
    """One `Drawn` from what was found for it."""
    if draw.state.error is not None:
        return Drawn((), error=draw.state.error)
    if not usable:
        return _unusable(highest, draw.position)
    listed = () if entry is None else (entry,)
    return Drawn(() if token is None else (token,), listed)
