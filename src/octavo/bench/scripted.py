"""The scheduler without a model: plans are answered with one made-up token each, so only bookkeeping is left.

Used to time scheduling and to count memory exactly: fixed lengths make the schedule of a load independent of what
the model says. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo.bench.drive import Occupancy, occupancy
from octavo.bench.workloads import Item
from octavo.core.kv_layout import KVLayout
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.core.step import Drawn, StepPlan, StepResult
from octavo.sampling_params import SamplingParams

_TOKEN = Drawn((1,))


def answer(plan: StepPlan) -> StepResult:
    """Token 1 for everything that draws."""
    return StepResult(plan.step_id, {seq_id: _TOKEN for s in plan.scheduled for seq_id in s.sample_ids})


def request(number: int, item: Item, params: SamplingParams | None = None) -> Request:
    """A request as the engine's door would make it, all arriving at time 0."""
    params = params or SamplingParams(temperature=0.0, max_tokens=item.output, ignore_eos=True)
    return Request(f"r{number}", list(item.token_ids), params, arrival=0.0, number=number, seed=0, max_len=item.total)


def simulate(settings: SchedulerSettings, layout: KVLayout, items: Sequence[Item]) -> list[Occupancy]:
    """The occupancy of the pool in every step of a load, from the engine's own scheduler."""
    scheduler = Scheduler(settings, layout)
    for number, item in enumerate(items):
        scheduler.add(request(number, item))
    samples = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        samples.append(occupancy(scheduler))
        scheduler.update(answer(plan))
    return samples
