"""`ThreadedRunner`: any runner on a thread of its own, so that the next step can be planned while one runs.

On a CPU this is what a GPU's queue is: plans go in, results come out in the same order. The runner sees the same plans
in the same order as without it and executes them one after the other, so whatever it keeps of a sequence (its last
token, penalties, a grammar's state) is up to date when the next plan needs it. It decides nothing.

An exception of the runner comes out of the `collect` that waits for that plan; nothing is executed after it.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import Any

from octavo.core.step import Runner, SequenceStart, StepPlan, StepResult
from octavo.errors import InternalError


class ThreadedRunner:
    """See the module. One caller at a time; `close` ends the thread after the steps that were submitted."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._results: SimpleQueue[StepResult | BaseException] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(runner, self._plans, self._results), name="octavo-steps", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._plans.put, None)  # the thread does not outlive whoever asks it

    def submit(self, plan: StepPlan) -> None:
        if not self._end.alive:
            raise InternalError("the runner is closed")
        self._plans.put(plan)

    def collect(self) -> StepResult:
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def needs_host(self, start: SequenceStart) -> str | None:
        return None  # the runner executes in order and has every token when it needs it

    def execute(self, plan: StepPlan) -> StepResult:
        self.submit(plan)
        return self.collect()

    def close(self) -> None:
        """Let the thread finish what was submitted; its results are dropped."""
        if self._end.alive:
            self._end()
            self._thread.join()

    def __getattr__(self, name: str) -> Any:
        """What else the runner offers (its store, its profile), for whoever looks at it between steps."""
        if name == "runner":
            raise AttributeError(name)
        return getattr(self.runner, name)


def _run(runner: Runner, plans: SimpleQueue[StepPlan | None], results: SimpleQueue[StepResult | BaseException]) -> None:
    broken = False
    while (plan := plans.get()) is not None:
        if broken:
            results.put(InternalError("a step before this one failed"))
            continue
        try:
            results.put(runner.execute(plan))
        except BaseException as error:
            broken = True
            results.put(error)
