"""Resting sequences change nothing: step for step the same plans, blocks, evictions and counters as `Scheduler`."""

from __future__ import annotations

from dataclasses import asdict
from random import Random
from typing import Any

import pytest

from helpers.scheduling import beam, prompt
from octavo.core.kv_layout import build_layout
from octavo.core.resting import RestingScheduler
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.core.step import Drawn, StepPlan, StepResult, TokenLogprobs
from octavo.errors import InternalError
from octavo.sampling_params import SamplingParams


def output(request: Request, first: int, end: int) -> list[int]:
    """Depends on the request's number and on the place; families of eight say the same, so outputs can be shared."""
    return [10 + (request.seed % 8 * 31 + i * 7) % 900 for i in range(first, end)]


def answer(scheduler: Scheduler, plan: StepPlan) -> StepResult:
    drawn = {}
    for item in plan.scheduled:
        for seq_id in item.sample_ids:
            seq = scheduler.sequence(seq_id)
            assert seq is not None
            if seq.request.beam is not None:
                count = seq.request.beam_state.num_candidates
                ids = tuple(20 + (seq.seq_id * 5 + i * 7 + len(seq.token_ids)) % 300 for i in range(count))
                best = TokenLogprobs(ids, tuple(-0.1 * (1 + i) for i in range(count)), 0)
                drawn[seq_id] = Drawn((), (best,))
            else:
                at = len(seq.token_ids) - seq.prompt_len
                drawn[seq_id] = Drawn(tuple(output(seq.request, at, at + 1)))
    return StepResult(plan.step_id, drawn)


class Pair:
    """The same load on both schedulers, compared after every act."""

    def __init__(self, windows: tuple[int | None, ...], block_size: int, **settings: Any) -> None:
        layout = build_layout(windows, block_size=block_size, bytes_per_token_layer=8)
        self.settings = SchedulerSettings(max_model_len=96, **settings)
        self.plain = Scheduler(self.settings, layout)
        self.resting = RestingScheduler(self.settings, layout, output)
        self.number = 0
        self.now = 0.0
        self.rested = self.skipped = self.tended = 0

    def add(self, tokens: list[int], params: Any, **options: Any) -> None:
        for scheduler in (self.plain, self.resting):
            new = params.max_tokens
            scheduler.add(
                Request(
                    f"r{self.number}",
                    list(tokens),
                    params,
                    arrival=self.now,
                    number=self.number,
                    seed=self.number,
                    max_len=min(96, len(tokens) + new),
                    **options,
                )
            )
        self.number += 1

    def step(self) -> None:
        self.now += 1.0
        plain, resting = self.plain.schedule(self.now), self.resting.schedule(self.now)
        awake = {s.seq_id: s for s in resting.scheduled}
        assert [s for s in plain.scheduled if s.seq_id in awake] == list(resting.scheduled)
        assert (plain.step_id, plain.transfers, plain.starts, plain.ends) == (
            resting.step_id, resting.transfers, resting.starts, resting.ends,
        )  # fmt: skip
        rest = [s for s in plain.scheduled if s.seq_id not in awake]
        self._check_resting(plain, rest)
        news = self.plain.update(answer(self.plain, plain), self.now)
        awake_news = self.resting.update(answer(self.resting, resting), self.now)
        ours = {n.sequence.seq_id: n.token_ids for n in awake_news}
        quiet = {s.seq_id for s in rest}
        assert {n.sequence.seq_id: n.token_ids for n in news if n.sequence.seq_id not in quiet} == ours
        assert [r.request_id for r in self.plain.take_ended()] == [r.request_id for r in self.resting.take_ended()]

    def _check_resting(self, plan: StepPlan, rest: list[Any]) -> None:
        assert len(rest) == self.resting.num_resting
        self.rested += len(rest)
        for item in rest:
            assert (item.num_tokens, item.sample_ids) == (1, (item.seq_id,))
        reads = [sum(min(s.start + 1, w or s.start + 1) for s in rest) for w in self.resting.windows]
        assert self.resting.resting_reads() == reads

    def skip(self) -> None:
        """As many quiet steps at once as there are, and those in which only blocks are taken or published."""
        while True:
            quiet = self.resting.quiet_steps()
            if quiet is None:
                break
            for ahead in range(quiet):
                self._plain_step(self.resting.resting_reads(ahead + 1))
            self.resting.skip(quiet)
            self.skipped += quiet
            reads = self.resting.resting_reads(1)
            if not self.resting.tend():
                break
            self._plain_step(reads)
            self.tended += 1

    def _plain_step(self, expected: list[int]) -> None:
        self.now += 1.0
        plan = self.plain.schedule(self.now)
        assert not (plan.starts or plan.transfers)
        assert len(plan.scheduled) == self.resting.num_resting
        reads = [sum(min(s.start + 1, w or s.start + 1) for s in plan.scheduled) for w in self.resting.windows]
        assert expected == reads
        self.plain.update(answer(self.plain, plan), self.now)
        assert not self.plain.take_ended()

    def compare(self) -> None:
        """Every counter, block and sequence."""
        plain, resting = self.plain, self.resting
        resting.sync()
        resting.audit()
        assert asdict(plain.counters) == asdict(resting.counters)
        assert [r.request_id for r in plain.running] == [r.request_id for r in resting.running]
        assert [r.request_id for r in plain.waiting] == [r.request_id for r in resting.waiting]
        for a, b in zip(plain.requests.values(), resting.requests.values(), strict=True):
            for s, t in zip(a.sequences, b.sequences, strict=True):
                assert [x.ids for x in s.tables] == [x.ids for x in t.tables]
                assert (s.token_ids, s.num_computed, s.num_done) == (t.token_ids, t.num_computed, t.num_done)
                assert (s.num_published, s.writable_until, s.started) == (t.num_published, t.writable_until, t.started)
        pools = plain.memory.pool, resting.memory.pool
        assert pools[0].reuse_order() == pools[1].reuse_order()
        assert (pools[0].num_cached, pools[0].peak_used) == (pools[1].num_cached, pools[1].peak_used)
        if plain.memory.cache is not None and resting.memory.cache is not None:
            assert asdict(plain.memory.cache.counters) == asdict(resting.memory.cache.counters)


KINDS: dict[str, dict[str, Any]] = {
    "paged": {},
    "tight": {"num_blocks": 26},
    "prefix": {"enable_prefix_caching": True, "num_blocks": 40},
    "swap": {"preemption": "swap", "num_host_blocks": 60, "num_blocks": 26},
    "window": {"windows": (10, None), "num_blocks": 60},
    "two windows": {"windows": (6, 13, None), "enable_prefix_caching": True, "num_blocks": 90},
    "static": {"allocation": "static", "num_blocks": 120},
    "few seats": {"max_num_seqs": 3, "enable_prefix_caching": True},
    "small budget": {"max_num_seqs": 8, "max_num_batched_tokens": 8, "num_blocks": 40},
    "starving": {"max_num_seqs": 16, "max_num_batched_tokens": 5},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_as_the_scheduler_step_for_step(kind: str, seed: int) -> None:
    random = Random(f"{kind} {seed}")
    given = {"windows": (None,), "num_blocks": 80, "max_num_seqs": 12, "max_num_batched_tokens": 24, **KINDS[kind]}
    pair = Pair(given.pop("windows"), random.choice((4, 8)), **given)
    for _ in range(160):
        if random.random() < 0.25:
            _arrive(pair, random)
        if random.random() < 0.02 and pair.plain.requests:
            gone = random.choice(list(pair.plain.requests))
            assert pair.plain.abort(gone) == pair.resting.abort(gone)
            assert [r.request_id for r in pair.plain.take_ended()] == [r.request_id for r in pair.resting.take_ended()]
        if not pair.plain.has_work:
            continue
        if random.random() < 0.5:
            pair.skip()
        pair.step()
        if random.random() < 0.2:
            pair.compare()
    while pair.plain.has_work:
        pair.skip()
        pair.step()
    pair.compare()
    assert not pair.resting.has_work
    if kind != "starving":
        assert pair.rested > 10
        assert pair.skipped > 0


def _arrive(pair: Pair, random: Random) -> None:
    """A request of a random kind, mostly the plain one; prompts often begin alike."""
    new = random.choice((1, 2, 9, 30, 40))
    tokens = prompt(random.randint(1, 40), random.choice((0, 0, 0, 1, 2, 3)))
    options: dict[str, Any] = {"priority": random.choice((0, 0, 0, 1))}
    static = pair.settings.allocation == "static"
    if random.random() < 0.1 and pair.settings.max_num_seqs > 2:
        pair.add(tokens, SamplingParams(n=2, max_tokens=min(new, 9)), **options)
    elif random.random() < 0.05 and not static:
        pair.add(tokens, beam(2, max_tokens=5), **options)
    elif random.random() < 0.1:
        pair.add(tokens, SamplingParams(max_tokens=new, deadline_ms=30_000.0), **options)
    else:
        pair.add(tokens, SamplingParams(max_tokens=new), **options)


def test_most_of_a_long_answer_is_skipped() -> None:
    pair = Pair((None,), 8, num_blocks=40, max_num_seqs=4)
    pair.add(prompt(5), SamplingParams(max_tokens=64))
    steps = 0
    while pair.plain.has_work:
        pair.skip()
        pair.step()
        steps += 1
    # Awake are the prompt, the last token, and the farewell to the runner.
    assert (steps, pair.skipped, pair.tended) == (3, 54, 8)


def test_only_quiet_steps_can_be_skipped() -> None:
    pair = Pair((None,), 8, num_blocks=40, max_num_seqs=4)
    pair.add(prompt(5), SamplingParams(max_tokens=64))
    assert pair.resting.quiet_steps() is None
    pair.step()
    quiet = pair.resting.quiet_steps()
    assert quiet == 3
    with pytest.raises(InternalError, match="4 steps cannot be skipped, 3 are quiet"):
        pair.resting.skip(4)
    pair.add(prompt(5), SamplingParams(max_tokens=64))
    assert pair.resting.quiet_steps() is None  # somebody waits to be let in
