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

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
CROWD = 32  # rows of a large step that is measured in any case
ROUNDS, FEWEST_ROUNDS = 6, 3
SECONDS = 3.0
WORDS = 8  # of the model's own text

_GREEDY = SamplingParams(temperature=0.0)


def measure_row_costs(
    runner: ModelRunner, layout: KVLayout, *, alone: int, most: int, budget: float = SECONDS, first: int = 0
) -> tuple[tuple[int, float], ...]:
    """(rows, seconds) of verification steps of up to `most` rows, ascending. Uses the first blocks of an idle pool.

    alone: rows of a sequence with all its guesses. first: the token that begins a text. Where steps are so long that
    `budget` seconds do not suffice, one row, `alone` and a large step are measured and the scheduler goes in straight
    lines between them. The least of a few runs each: what others on the machine do can only make a run slower.
    """
    alone, most = min(alone, most), max(1, most)
    blocks = layout.blocks_for(most)
    tables = tuple(
        TableUpdate(group, 0, tuple(range(group * blocks, (group + 1) * blocks))) for group in range(layout.num_groups)
    )
    text = _own_words(runner, tables, first, min(most, WORDS))
    begin = time.perf_counter()
    needed = [1, alone, min(CROWD, most)]
    sizes = list(
        dict.fromkeys([*needed, *(r for r in ROWS if r < alone), *(r for r in ROWS if alone < r < most), most])
    )
    least: dict[int, float] = {}
    # Round by round over all sizes, so that a burst of other work cannot fall on one size alone.
    for number in range(ROUNDS):
        for rows in sizes:
            tokens = (text * (rows // len(text) + 1))[:rows]
            plan = StepPlan(0, (ScheduledSequence(0, 0, tokens, (), (0,), None, rows - 1),))
            before = time.perf_counter()
            runner.execute(plan)
            after = time.perf_counter()
            least[rows] = min(after - before, least.get(rows, after - before))
            if number == 0 and len(least) >= len(set(needed)) and after - begin > budget / FEWEST_ROUNDS:
                break
        sizes = list(least)
        if number + 1 >= FEWEST_ROUNDS and time.perf_counter() - begin > budget:
            break
    runner.execute(StepPlan(0, (), ends=(0,)))
    runner.store.cache.kv[: blocks * layout.num_groups].zero_()  # no more: untouched pages take no memory
    return tuple(sorted(least.items()))


def _own_words(runner: ModelRunner, tables: tuple[TableUpdate, ...], first: int, count: int) -> tuple[int, ...]:
    """`first` and what the model writes after it, at the first positions of a new sequence 0.

    What a step costs depends on what it computes: a screened output head is quicker the surer the model is, and of
    tokens that nobody writes it is less sure than of text.
    """
    text = [first]
    start = SequenceStart(0, "row-costs", 0, _GREEDY, (first,), 1, seed=0)
    for position in range(count):
        begins = position == 0
        scheduled = ScheduledSequence(0, position, (text[-1],), tables if begins else (), (0,))
        drawn = runner.execute(StepPlan(0, (scheduled,), starts=(start,) if begins else ())).drawn[0]
        text += drawn.token_ids or (first,)  # none: an error that the first request will be told
    return tuple(text[:count])
