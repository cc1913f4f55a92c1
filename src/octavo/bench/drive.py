"""Runs a load on an engine and keeps time and occupancy, without changing what the engine does.

`Watched` stands between engine and runner: it lets every plan through, keeps the time of the runner's share of each
step, and takes a sample of the pool at the one moment when a step's memory is complete: after the pass, before finished
sequences give their blocks back. Time spent on taking samples is taken off the run's time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from octavo.bench.report import add_report_options
from octavo.bench.workloads import Item
from octavo.cli.options import add_engine_options, engine_settings
from octavo.config import make_config
from octavo.core.scheduler import Scheduler
from octavo.core.step import Runner, StepPlan, StepResult
from octavo.errors import ConfigError, InternalError
from octavo.progress import LoadProgress
from octavo.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from octavo.engine import Engine

Params = SamplingParams | BeamSearchParams


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The pool during one step, in bytes: all of it, held by sequences, and really filled with keys and values.

    sequences: live ones that hold blocks. waiting: requests that found no room.
    """

    pool: int
    held: int
    filled: int
    sequences: int
    waiting: int

    @property
    def use(self) -> float:
        """Share of the whole pool that holds tokens."""
        return self.filled / self.pool


def occupancy(scheduler: Scheduler) -> Occupancy:
    """Sample the pool. Exact while no block is shared (a shared one would count its tokens once per sequence)."""
    layout, pool = scheduler.memory.layout, scheduler.memory.pool
    filled = sequences = 0
    for request in scheduler.running:
        for seq in request.live():
            sequences += bool(seq.tables)
            for table, group in zip(seq.tables, layout.groups):
                tokens = max(0, seq.num_computed - table.first_live * layout.block_size)
                filled += tokens * len(group.layers) * layout.bytes_per_token_layer
    size = layout.bytes_per_block
    return Occupancy(pool.num_blocks * size, pool.num_used * size, filled, sequences, len(scheduler.waiting))


class Watched:
    """A runner that remembers when it worked, and calls `look` after each pass."""

    def __init__(self, inner: Runner, look: Callable[[], None] | None = None) -> None:
        self.inner = inner
        self.look = look
        self.entered = 0.0
        self.left = 0.0
        self.looking = 0.0  # seconds spent in `look`, all in all

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered = time.perf_counter()
        result = self.inner.execute(plan)
        self.left = time.perf_counter()
        if self.look is not None and plan.scheduled:
            self.look()
            self.looking += time.perf_counter() - self.left
        return result


@dataclass
class Run:
    """What came of a load. Times in seconds since the first request was handed over."""

    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    first_token: dict[str, float] = field(default_factory=dict)
    finished: dict[str, float] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)  # request -> tokens of each of its sequences
    samples: list[Occupancy] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0

    @property
    def output_rate(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        """Prompt and output tokens per second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def peak_sequences(self) -> int:
        return max(s.sequences for s in self.samples)

    @property
    def peak_use(self) -> float:
        return max(s.use for s in self.samples)

    @property
    def peak_held(self) -> int:
        return max(s.held for s in self.samples)

    def mean_use_under_pressure(self) -> float | None:
        """Mean use of the pool over the steps in which somebody waited for room; None if nobody ever did."""
        pressed = [s.use for s in self.samples if s.waiting]
        return sum(pressed) / len(pressed) if pressed else None

    def ms_per_token(self) -> float:
        """Mean over requests of arrival to end, waiting included, per output token (the "normalised latency")."""
        return 1e3 * _mean([self.finished[r] / max(1, sum(n)) for r, n in self.outputs.items()])

    def ms_between_tokens(self) -> float | None:
        """Mean over requests of the time between two tokens once the first is there."""
        gaps = [
            (self.finished[r] - self.first_token[r]) / (max(n) - 1)
            for r, n in self.outputs.items()
            if max(n) > 1 and r in self.first_token
        ]
        return 1e3 * _mean(gaps) if gaps else None


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def greedy(item: Item) -> SamplingParams:
    """Exactly `item.output` tokens, the most likely ones."""
    return SamplingParams(temperature=0.0, max_tokens=item.output, ignore_eos=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of an engine takes: the engine's settings and where the JSON goes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add_engine_options(parser)
    add_report_options(parser)


def settings_of(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """The engine settings that were given, over `defaults`. Random weights need no tokenizer."""
    given = engine_settings(args)
    if given.get("load_format") == "dummy" and "tokenizer" not in given:
        defaults.setdefault("skip_tokenizer_init", True)
    return {**defaults, **given}


def refuse_settings(args: argparse.Namespace, names: Sequence[str], because: str) -> None:
    """Raise `ConfigError` for engine settings that the benchmark decides itself."""
    given = engine_settings(args)
    clash = [name for name in names if name in given]
    if clash:
        raise ConfigError(f"{', '.join(clash)}: cannot be given here, {because}; leave it out")


def build(settings: dict[str, Any], **more: Any) -> Engine:
    """An engine from settings (those of `EngineConfig`), with a bar while it loads. `more` overrides."""
    from octavo.engine import Engine

    progress = LoadProgress()
    try:
        return Engine.build(make_config(**{**settings, **more}), on_progress=progress)
    finally:
        progress.close()


def run_load(
    engine: Engine,
    items: Sequence[Item],
    params: Callable[[Item], Params] = greedy,
    *,
    sample: bool = True,
    tick: Callable[[str], None] = lambda text: None,
) -> Run:
    """Hand all items over at once and step until they are done. tick: called as each request ends."""
    run = Run(prompt_tokens=sum(len(i.token_ids) for i in items))
    look = (lambda: run.samples.append(occupancy(engine.scheduler))) if sample else None
    watched = Watched(engine.runner, look)
    engine.runner = watched
    if engine.overlaps:  # plans go past `engine.runner`; before a result is taken a step's memory is as complete
        engine.before_update = look
    before = engine.stats()
    begin = time.perf_counter()
    try:
        for number, item in enumerate(items):
            engine.add_request(f"bench-{number}", list(item.token_ids), params(item), lora=item.lora)
        while engine.has_unfinished():
            outputs = engine.step()
            now = time.perf_counter() - begin - watched.looking
            for output in outputs:
                if any(o.token_ids for o in output.outputs):
                    run.first_token.setdefault(output.request_id, now)
                if output.finished:
                    run.finished[output.request_id] = now
                    run.outputs[output.request_id] = _counts(engine, output.request_id, output.outputs)
                    tick(f"{engine.stats().generated_tokens / max(now, 1e-9):.0f} tok/s")
        run.seconds = time.perf_counter() - begin - watched.looking
    finally:
        engine.runner, engine.before_update = watched.inner, None
    run.output_tokens = sum(sum(n) for n in run.outputs.values())
    after = engine.stats()
    run.steps, run.preemptions = after.steps - before.steps, after.preemptions - before.preemptions
    return run


def _counts(engine: Engine, request_id: str, outputs: Sequence[Any]) -> list[int]:
    """Tokens of each sequence of a finished request; beams are taken from the engine. A failed one is no figure."""
    if outputs:
        for output in outputs:
            if output.finish_reason != "length":
                raise InternalError(f"{request_id} ended with {output.finish_reason!r} ({output.stop_reason})")
        return [len(o.token_ids) for o in outputs]
    return [len(s.token_ids) for s in engine.take_beams(request_id).sequences]


def warm_up(engine: Engine) -> None:
    """One short request: first-use costs of kernels and allocator are not the load's."""
    limit = engine.config.max_model_len
    assert limit is not None
    run_load(engine, [Item((1,) * max(1, min(16, limit - 4)), 2)], sample=False)
    engine.reset_prefix_cache()


def timed_steps(engine: Engine, count: int) -> tuple[list[float], list[float], list[float]]:
    """Run `count` steps; seconds of each before the runner (schedule), in it, and after it (update and text)."""
    watched = Watched(engine.runner)
    engine.runner = watched
    schedule, execute, update = [], [], []
    try:
        for _ in range(count):
            begin = time.perf_counter()
            engine.step()
            end = time.perf_counter()
            schedule.append(watched.entered - begin)
            execute.append(watched.left - watched.entered)
            update.append(end - watched.left)
    finally:
        engine.runner = watched.inner
    return schedule, execute, update
