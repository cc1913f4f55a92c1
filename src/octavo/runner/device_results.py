"""What comes back from a device: for every step one copy of what was drawn, and the `StepResult` made of it.

`ResultBuffers.read_back` queues the copy into page-locked memory and returns the `Flight`; `settle` waits for it. The
buffers take turns, so a step may be read while the copies of the next two are under way. It queues no other work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.core.step import Drawn, StepResult, TokenLogprobs
from octavo.devices import Device, Event
from octavo.runner.draws import Draws
from octavo.runner.rows import SequenceRow

RESULTS = 3  # host buffers for what was drawn: two steps in flight, one being read


@dataclass(slots=True)
class Flight:
    """A step that has been queued. result: already there when the step was finished inside `submit`."""

    step_id: int
    rows: Sequence[SequenceRow] = ()
    errors: Sequence[str | None] = ()
    positions: Sequence[int] = ()
    drawn: torch.Tensor | None = None  # pinned float64 [R, D], see `DeviceRunner._draw_lines`
    event: Event | None = None
    result: StepResult | None = None

    def settle(self) -> StepResult:
        """Wait for the step's tokens and tell the rows."""
        if self.result is not None:
            return self.result
        assert self.drawn is not None and self.event is not None
        self.event.synchronize()
        tokens, highest, *listed = self.drawn.tolist()
        drawn: dict[int, Drawn] = {}
        for i, row in enumerate(self.rows):
            error = self.errors[i]
            if error is None and not abs(highest[i]) < float("inf"):
                error = f"the model's logits have no usable maximum ({highest[i]}) at position {self.positions[i]}"
            if error is not None:
                row.error, row.last_token = error, None
                drawn[row.seq_id] = Drawn((), error=error)
                continue
            token = int(tokens[i])
            row.push(token)
            asked = row.state.logprobs
            drawn[row.seq_id] = Drawn((token,), () if asked is None else (_entry(listed, i, asked),))
        self.result = StepResult(self.step_id, drawn)
        return self.result


class ResultBuffers:
    """Host memory for what is drawn. most: draws of the largest step that is expected."""

    def __init__(self, device: Device, most: int) -> None:
        self._device = device
        self._most = most
        self._buffers: list[torch.Tensor] = [device.pinned(0, torch.float64) for _ in range(RESULTS)]
        self._events = [device.event() for _ in range(RESULTS)]
        self._turn = 0

    def read_back(self, step_id: int, draws: Draws, drawn: torch.Tensor) -> Flight:
        """Queue the copy of what was drawn, float64 [R, D]."""
        count = len(draws)
        if not count:
            return Flight(step_id, result=StepResult(step_id))
        turn, self._turn = self._turn, (self._turn + 1) % RESULTS
        lines = len(drawn)
        if self._buffers[turn].numel() < lines * count:
            self._buffers[turn] = self._device.pinned(lines * max(count, self._most), torch.float64)
        target = self._buffers[turn][: lines * count].view(lines, count)
        target.copy_(drawn if drawn.is_contiguous() else drawn.contiguous(), non_blocking=True)
        self._events[turn].record()
        return Flight(step_id, draws.rows, draws.errors, draws.positions, target, self._events[turn])


def _entry(listed: list[list[float]], draw: int, asked: int) -> TokenLogprobs:
    """What a draw asked for of ranks, ids and values [lines][D], which may hold more."""
    ranks, *lines = listed
    held = len(lines) // 2
    count = min(1 + asked, held)
    ids = tuple(int(line[draw]) for line in lines[:count])
    return TokenLogprobs(ids, tuple(line[draw] for line in lines[held : held + count]), int(ranks[draw]))
