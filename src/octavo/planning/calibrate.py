"""A cost model from a measured run: positive coefficients by least squares, from a recording (`record=FILE`).

A recording has the time at which every step began and what each step was to do. The time between two beginnings, while
the engine had work, is the time of a step: model, sampling, scheduling, text and all. Work is counted as the simulator
counts it, so what the fit learns is what the simulation spends.

    minimise   sum over steps  (predicted - measured)² / measured        subject to every coefficient >= 0

A coefficient that would have to be negative is left out (all subsets of the few features are tried, so the optimum is
exact). The knee of the token curve is tried at powers of two. Steps far off the fit (a neighbour's burst, the first
step of all) are left out of a second fit; then everything is scaled so that the whole run takes as long as measured.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from octavo.core.record import replay
from octavo.core.scheduler import Scheduler
from octavo.core.step import ScheduledSequence
from octavo.errors import ConfigError
from octavo.planning.cost_model import CostModel, Work, WorkCounter

FEWEST_STEPS = 20
OUTLIER = 3.0  # times the typical relative error
MOST_OUTLIERS = 0.05
COEFFICIENTS = ("step", "below", "above", "draw", "read", "pair", "copy", "swap")


@dataclass(frozen=True, slots=True)
class Measured:
    """One step of a run: what it did and how long it took, in seconds."""

    work: Work
    seconds: float


class _Replay:
    """Looks on while a recording is replayed: which steps left work behind, and the layout."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.about: dict[str, Any] = {}
        self.busy: list[bool] = []

    def begin(self, scheduler: Scheduler, about: dict[str, Any]) -> None:
        self.scheduler, self.about = scheduler, about

    def step(self, scheduler: Scheduler, drawn: int, now: float) -> None:
        self.busy.append(scheduler.has_unfinished)


def read_steps(path: str | Path) -> tuple[list[Measured], dict[str, Any]]:
    """Steps of a recording with their times, and what it says about the model. Raises `ConfigError`."""
    watcher = _Replay()
    report = replay(path, watcher=watcher)
    if not report.same or watcher.scheduler is None:
        raise ConfigError(f"{path}: cannot be replayed ({report}); record the run again with this version")
    counter = WorkCounter(watcher.scheduler.memory.layout)
    steps: list[tuple[float, Work]] = []
    with Path(path).open(encoding="utf-8") as lines:
        for line in lines:
            if line.startswith('{"event":"step"'):
                event = json.loads(line)
                steps.append((event["now"], _work(counter, event["plan"])))
    measured = [
        Measured(work, after - now)
        for (now, work), (after, _), busy in zip(steps, steps[1:], watcher.busy)
        if busy and work.tokens and after > now
    ]
    if len(measured) < FEWEST_STEPS:
        raise ConfigError(
            f"{path}: {len(measured)} steps with a time are too few to calibrate on; record a run of at least "
            f"{FEWEST_STEPS} steps, with prompts of several lengths"
        )
    return measured, watcher.about


def _work(counter: WorkCounter, plan: dict[str, Any]) -> Work:
    items = [ScheduledSequence(s, start, (0,) * count, (), tuple(ids)) for s, start, count, _, ids in plan["scheduled"]]
    copies = sum(kind == "copy" for kind, _, _ in plan["transfers"])
    return counter.count(items, (copies, len(plan["transfers"]) - copies))


def calibrate(path: str | Path) -> CostModel:
    """The cost model of the engine that made the recording. Raises `ConfigError`."""
    measured, about = read_steps(path)
    model = fit(measured)
    name = about.get("model", "an unknown model")
    name = name.get("name", "an unknown model") if isinstance(name, dict) else name
    source = f"calibrated on {len(measured)} steps of {name} ({Path(path).name})"
    return replace(model, source=source, facts={**model.facts, **about})


def fit(measured: Sequence[Measured]) -> CostModel:
    """The best cost model for these steps."""
    longest = max(m.work.tokens for m in measured)
    knees = [float(1 << i) for i in range(1, 13) if 1 << i < longest] or [float(longest)]
    first, _ = min((_fit_at(measured, knee) for knee in knees), key=lambda found: found[1])
    errors = [abs(first.seconds(m.work) / m.seconds - 1.0) for m in measured]
    typical = sorted(errors)[len(errors) // 2]
    limit = max(OUTLIER * typical, sorted(errors)[int((1 - MOST_OUTLIERS) * (len(errors) - 1))])
    kept = [m for m, error in zip(measured, errors) if error <= limit]
    model, _ = min((_fit_at(kept, knee) for knee in knees), key=lambda found: found[1])
    scale = sum(m.seconds for m in measured) / sum(model.seconds(m.work) for m in measured)
    scaled = {name: scale * getattr(model, name) for name in COEFFICIENTS}
    model = replace(model, **scaled)
    errors = sorted(abs(model.seconds(m.work) / m.seconds - 1.0) for m in measured)
    facts = {
        "steps": len(measured),
        "left_out": len(measured) - len(kept),
        "median_error": errors[len(errors) // 2],
        "p90_error": errors[int(0.9 * (len(errors) - 1))],
    }
    return replace(model, facts=facts)


def _features(work: Work, knee: float) -> list[float]:
    """In the order of `COEFFICIENTS`."""
    below = min(float(work.tokens), knee)
    return [1.0, below, work.tokens - below, work.draws, work.reads, work.pairs, work.copies, work.swaps]


def _fit_at(measured: Sequence[Measured], knee: float) -> tuple[CostModel, float]:
    """(model, sum of squared errors) for one place of the knee."""
    size = len(COEFFICIENTS)
    rows = [_features(m.work, knee) for m in measured]
    scales = [max(row[i] for row in rows) for i in range(size)]
    used = [i for i in range(size) if scales[i] > 0]
    normal = [[0.0] * size for _ in range(size)]
    right = [0.0] * size
    total = 0.0
    for row, m in zip(rows, measured):
        weight = 1.0 / m.seconds
        total += m.seconds
        for i in used:
            x = row[i] / scales[i]
            right[i] += x  # times measured, times weight
            for j in used:
                normal[i][j] += weight * x * row[j] / scales[j]
    best, least = [0.0] * size, total
    for count in range(1, len(used) + 1):
        for chosen in combinations(used, count):
            solution = _solve(normal, right, chosen)
            if solution is None or min(solution) < 0:
                continue
            error = total - sum(x * right[i] for i, x in zip(chosen, solution))
            if error < least:
                best, least = [0.0] * size, error
                for i, x in zip(chosen, solution):
                    best[i] = x / scales[i]
    step, below, above, draw, read, pair, copy, swap = best
    return CostModel(step, below, above, knee, draw, read, pair, copy, swap), least


def _solve(normal: list[list[float]], right: list[float], chosen: Sequence[int]) -> list[float] | None:
    """The least-squares solution over the chosen features; None where they depend on each other."""
    rows = [[normal[i][j] for j in chosen] + [right[i]] for i in chosen]
    size = len(chosen)
    for k in range(size):
        pivot = max(range(k, size), key=lambda r: abs(rows[r][k]))
        if abs(rows[pivot][k]) < 1e-9 * max(1.0, abs(normal[chosen[k]][chosen[k]])):
            return None
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for r in range(k + 1, size):
            factor = rows[r][k] / rows[k][k]
            for c in range(k, size + 1):
                rows[r][c] -= factor * rows[k][c]
    solution = [0.0] * size
    for k in range(size - 1, -1, -1):
        known = sum(rows[k][c] * solution[c] for c in range(k + 1, size))
        solution[k] = (rows[k][size] - known) / rows[k][k]
    return solution
