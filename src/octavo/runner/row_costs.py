"""What a step costs by its number of rows, measured on the engine's own runner before it serves.

A row with a guess costs about what any other decoding row costs, and that differs by machine, model and format: from
nearly nothing (a GPU, or weights that are slow to read) to as much as a whole step. The scheduler weighs guesses by
these figures, so they are measured once at start, in a fraction of a second to a few, and recorded with the settings.
"""

from __future__ import annotations

import time

from octavo.core.kv_layout import KVLayout
from octavo.core.step import ScheduledSequence, SequenceStart, StepPlan, TableUpdate
from octavo.runner.model_runner import ModelRunner
from octavo.sampling_params import SamplingParams

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
REPEATS = 3
SECONDS = 3.0  # no larger step is tried once this is spent

_GREEDY = SamplingParams(temperature=0.0)


def measure_row_costs(
    runner: ModelRunner, layout: KVLayout, *, most: int, budget: float = SECONDS
) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of verification steps of up to `most` rows, ascending. Uses the first blocks of an idle pool.

    The least of a few runs each: what others on the machine do can only make a run slower.
    """
    most = max(1, most)
    blocks = layout.blocks_for(most)
    tables = tuple(
        TableUpdate(group, 0, tuple(range(group * blocks, (group + 1) * blocks))) for group in range(layout.num_groups)
    )
    start = SequenceStart(0, "row-costs", 0, _GREEDY, (0,), 1, seed=0)
    runner.execute(StepPlan(0, (ScheduledSequence(0, 0, (0,), tables, (0,)),), starts=(start,)))
    begin = time.perf_counter()
    points: list[tuple[int, float]] = []
    for rows in sorted({r for r in ROWS if r < most} | {most}):
        plan = StepPlan(0, (ScheduledSequence(0, 0, (0,) * rows, (), (0,), None, rows - 1),))
        seconds = []
        for _ in range(REPEATS):
            before = time.perf_counter()
            runner.execute(plan)
            seconds.append(time.perf_counter() - before)
        points.append((rows, min(seconds)))
        if time.perf_counter() - begin > budget:
            break
    runner.execute(StepPlan(0, (), ends=(0,)))
    return tuple(points)
