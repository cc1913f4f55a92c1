"""Sequences with a long context, standing ready to decode, without computing the context.

Computing 64 contexts of 4,096 tokens would take minutes and is not what is measured. So the plans of the prompts are
only noted, random keys and values stand in for the computed ones (attention takes as long over any numbers), and the
first plan that is computed opens the rows as they would be. Scheduler, tables, runner and kernels are the real ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from octavo.bench.drive import timed_steps
from octavo.bench.instrument import ATTENTION, HEAD, KV_WRITE, PRODUCTS, StepProfile
from octavo.bench.scripted import answer
from octavo.bench.workloads import random_ids
from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.kv_layout import KVLayout
from octavo.core.step import Runner, SequenceStart, StepPlan, StepResult, TableUpdate
from octavo.errors import InternalError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.runner.model_runner import ModelRunner


class Noting:
    """A runner that notes plans and makes up tokens, until `computing`; then it is the inner runner."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.computing = False
        self._starts: dict[int, SequenceStart] = {}
        self._tables: dict[int, list[TableUpdate]] = {}
        self._ends: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        if self.computing:
            return self.inner.execute(self._with_notes(plan))
        if plan.transfers:
            raise InternalError("blocks cannot be moved while nothing is computed; leave prefix caching off")
        for seq_id in plan.ends:
            if self._starts.pop(seq_id, None) is None:
                self._ends.append(seq_id)
            self._tables.pop(seq_id, None)
        for start in plan.starts:
            self._starts[start.seq_id], self._tables[start.seq_id] = start, []
        result = answer(plan)
        for scheduled in plan.scheduled:
            self._tables[scheduled.seq_id] += scheduled.tables
        for seq_id, drawn in result.drawn.items():
            start = self._starts[seq_id]
            self._starts[seq_id] = replace(start, token_ids=start.token_ids + drawn.token_ids)
        return result

    def _with_notes(self, plan: StepPlan) -> StepPlan:
        """The plan, with everything the inner runner has not heard of."""
        if not (self._starts or self._ends):
            return plan
        known = [s.seq_id for s in plan.scheduled]
        if set(self._starts) - set(known):
            raise InternalError("a noted sequence is not in the first computed step")
        plan = replace(
            plan,
            ends=(*self._ends, *plan.ends),
            starts=(*self._starts.values(), *plan.starts),
            scheduled=tuple(s._replace(tables=(*self._tables.get(s.seq_id, ()), *s.tables)) for s in plan.scheduled),
        )
        self._starts, self._tables, self._ends = {}, {}, []
        return plan


def blocks_for(layout: KVLayout, cases: Sequence[tuple[int, int]], steps: int, chunk: int) -> int:
    """Blocks that the largest of the (sequences, context) cases needs, with room for a prompt chunk on its way."""
    counter = PagedAllocation(BlockPool(1), layout)
    room = layout.num_groups * layout.blocks_for(chunk + layout.block_size)
    return room + max(n * counter.worst_case(c, length_of(n, c, steps, chunk), 1) for n, c in cases)


def length_of(sequences: int, context: int, steps: int, chunk: int) -> int:
    """Longest sequence of a case: early ones draw a made-up token while later prompts are being noted."""
    return context + 2 * sequences * -(-context // chunk) + steps + 8


def fill_kv(engine: Engine) -> None:
    """Random numbers in every block: the same block everywhere, in memory of its own."""
    import torch

    kv = cast("ModelRunner", engine.runner).store.cache.kv
    generator = torch.Generator().manual_seed(0)
    if kv.dtype == torch.uint8:
        # Bytes of 0x20 to 0x3F: numbers of any kind, and as scales small ones (bfloat16 0x2020 to 0x3F3F: below 1).
        block = torch.randint(0x20, 0x40, kv[:1].shape, dtype=torch.uint8, generator=generator)
    else:
        block = torch.randn(kv[:1].shape, generator=generator)
    kv.copy_(block.expand_as(kv))


def decode_case(
    engine: Engine, profile: StepProfile, sequences: int, context: int, steps: int, chunk: int
) -> dict[str, Any]:
    """Mean milliseconds of each part of a decode step of `sequences` sequences of about `context` tokens."""
    assert engine.spec is not None
    noting = Noting(engine.runner)
    engine.runner = noting
    names = [f"standing-{i}" for i in range(sequences)]
    length = length_of(sequences, context, steps, chunk)
    try:
        for i, name in enumerate(names):
            params = SamplingParams(temperature=0.0, max_tokens=length - context, ignore_eos=True)
            engine.add_request(name, list(random_ids(context, i, engine.spec.vocab_size)), params)
        while engine.scheduler.waiting or _behind(engine):
            engine.step()
        noting.computing = True
        timed_steps(engine, 2)  # opens the rows; first use of everything at this size
        profile.reset()
        parts = parts_of(profile, *timed_steps(engine, steps))
        lengths = [s.num_tokens for r in engine.scheduler.running for s in r.live()]
        if len(lengths) != sequences:
            raise InternalError(f"{len(lengths)} of {sequences} sequences were running")
    finally:
        for name in names:
            engine.abort(name)
        engine.step()  # the runner forgets their rows
        engine.runner = noting.inner
    return {"sequences": sequences, "context": sum(lengths) / len(lengths), **parts}


def _behind(engine: Engine) -> bool:
    """Is some prompt not computed yet?"""
    return any(s.num_tokens - s.num_computed > 1 for r in engine.scheduler.running for s in r.live())


def parts_of(
    profile: StepProfile, schedule: Sequence[float], execute: Sequence[float], update: Sequence[float]
) -> dict[str, float]:
    """Mean milliseconds per step of every section, of schedule and update, of the whole, and of watching itself."""
    steps = len(execute)
    parts = {name: 1e3 * seconds / steps for name, seconds in profile.seconds.items()}
    parts["unaccounted"] = 1e3 * sum(execute) / steps - sum(parts.values())
    parts["schedule"] = 1e3 * sum(schedule) / steps
    parts["update and text"] = 1e3 * sum(update) / steps
    parts["total"] = 1e3 * (sum(schedule) + sum(execute) + sum(update)) / steps
    parts["watching"] = 1e3 * profile.cost_of_watching() / steps
    return parts


def three_parts(parts: dict[str, Any]) -> dict[str, float]:
    """attention, products and the rest of a step, in milliseconds; they add up to the total."""
    attention = parts.get(ATTENTION, 0.0) + parts.get(KV_WRITE, 0.0)
    products = parts.get(PRODUCTS, 0.0) + parts.get(HEAD, 0.0)
    return {"attention": attention, "products": products, "rest": parts["total"] - attention - products}


def python_share(parts: dict[str, Any]) -> float:
    """Schedule, prepare and update over the whole step."""
    return float((parts["schedule"] + parts.get("prepare", 0.0) + parts["update and text"]) / parts["total"])
