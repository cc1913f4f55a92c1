"""Overlapped steps: step k + 1 is planned, and its inputs are prepared, while step k runs.

The plan holds `LAST_SAMPLED` where a token of step k is not known here yet; the runner knows it. An end is noticed one
step late: the one token that was computed in vain is dropped, and no block is handed out again before the last step
that reads it has reported (`BlockPool.fence`). Text is therefore that of steps run one by one.

Some sequences cannot go on before the host has seen their last token: beams are chosen here, a grammar's mask is made
here, and a runner may have draws of its own that need it (`AsyncRunner.needs_host`). A step that draws for one of them
reports before the next one is planned. Such steps are counted by reason.

It knows no tensors; whether overlapping pays is decided by the builder.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from octavo.core.scheduler import Scheduler
from octavo.core.step import SequenceStart, StepPlan, StepResult

IN_FLIGHT = 2  # steps: one runs, one is planned


class AsyncRunner(Protocol):
    """A runner whose steps take their time: `submit` plans in order, `collect` their results in the same order."""

    def submit(self, plan: StepPlan) -> None:
        """Begin the step; returns before it is done where the device allows."""
        ...

    def collect(self) -> StepResult:
        """The result of the oldest step that has not been collected; waits for it."""
        ...

    def needs_host(self, start: SequenceStart) -> str | None:
        """Why the sequence's next draw needs its last token on the host, in a few words; None: it does not."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """`submit` and `collect`, with nothing else in flight."""
        ...

    def close(self) -> None:
        """Wait for what runs and let go of the device."""
        ...


def reason_to_wait(start: SequenceStart) -> str | None:
    """What of a sequence is decided on the host token by token, whatever the runner."""
    if start.num_candidates:
        return "beam search"
    return "grammar" if start.constraint is not None else None


class OverlappedSteps:
    """Plans and results of one scheduler on one asynchronous runner.

    Per step of the engine: `must_wait` and then `take` (only where the plan needs it), `submit`, `take` while `due`.
    """

    def __init__(self, scheduler: Scheduler, runner: AsyncRunner) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._waiting_for: dict[int, str] = {}  # sequence -> why its token is needed here
        self._flights: deque[tuple[StepPlan, str | None]] = deque()
        self.steps = 0
        self.waits: dict[str, int] = {}  # reason -> steps that had to report before the next was planned

    def must_wait(self) -> bool:
        """Does the newest step in flight draw what the next plan depends on?"""
        return bool(self._flights) and self._flights[-1][1] is not None

    def due(self) -> bool:
        """Is there a step to take before another may be planned, or the last one of all?"""
        return len(self._flights) >= IN_FLIGHT or bool(self._flights and not self._scheduler.has_unfinished)

    @property
    def in_flight(self) -> int:
        return len(self._flights)

    def submit(self, now: float) -> StepPlan:
        """Plan one step and begin it."""
        plan = self._scheduler.schedule(now)
        reason = self._reason(plan)
        self._runner.submit(plan)
        self._flights.append((plan, reason))
        self.steps += 1
        if reason is not None:
            self.waits[reason] = self.waits.get(reason, 0) + 1
        return plan

    def take(self) -> tuple[StepPlan, StepResult]:
        """The oldest step in flight and what came of it; the scheduler must be told before anything else happens."""
        result = self._runner.collect()
        plan, _ = self._flights.popleft()
        return plan, result

    def _reason(self, plan: StepPlan) -> str | None:
        """Why the step must report before the next is planned; keeps the account of who is live."""
        waiting = self._waiting_for
        for seq_id in plan.ends:
            waiting.pop(seq_id, None)
        for start in plan.starts:
            reason = reason_to_wait(start) or self._runner.needs_host(start)
            if reason is not None:
                waiting[start.seq_id] = reason
        if not waiting:
            return None
        drawing = (seq_id for item in plan.scheduled for seq_id in item.sample_ids)
        return next((waiting[seq_id] for seq_id in drawing if seq_id in waiting), None)
