"""A scheduler with a scripted runner, driven like the engine drives it, with an audit around every step.

Imports nothing but the core: tests that use it need no torch. `Rig` owns the loop, the clock and the plans; `expected`
says what a request's sequences must hold when it runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from octavo.core.fake_runner import DelayedRunner, FakeRunner, Script, default_script
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler, SequenceNews
from octavo.core.sequence import Request, Sequence
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.sampling_params import BeamSearchParams, SamplingParams

END = 3  # the scripts' end token


class Rig:
    """`settings` are `SchedulerSettings`. delay: results are seen that many steps late."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        block_size: int = 4,
        windows: Seq[int | None] = (None,),
        script: Script = default_script,
        delay: int = 0,
        vocab_size: int = 997,
        **settings: Any,
    ) -> None:
        self.layout = build_layout(windows, block_size=block_size, bytes_per_token_layer=8)
        given = {"max_model_len": 128, "max_num_seqs": 16, "max_in_flight": delay + 1, **settings}
        self.settings = SchedulerSettings(num_blocks=num_blocks, **given)
        self.scheduler = Scheduler(self.settings, self.layout)
        self.runner = FakeRunner(
            self.layout, num_blocks, script=script, num_host_blocks=self.settings.num_host_blocks, vocab_size=vocab_size
        )
        self.device = DelayedRunner(self.runner, delay)
        self.script = script
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.news: list[SequenceNews] = []
        self.number = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.memory.pool

    def request(self, prompt: Seq[int], params: Any = None, **given: Any) -> Request:
        """A request that has not arrived. Sampling parameters, and `name`, `priority`, `salt`, are given by name."""
        options = {k: given.pop(k) for k in ("priority", "adapter") if k in given}
        name, salt = given.pop("name", None), given.pop("salt", None)
        ends = given.pop("end_ids", (END,))
        params = params or SamplingParams(**{"max_tokens": 8, **given})
        number, self.number = self.number, self.number + 1
        limit = self.settings.max_model_len
        new = limit if params.max_tokens is None else params.max_tokens
        return Request(
            name or f"r{number}",
            list(prompt),
            params,
            arrival=self.now,
            number=number,
            seed=number,
            cache_salt=salt,
            end_ids=ends,
            max_len=min(limit, len(prompt) + new),
            **options,
        )

    def add(self, prompt: Seq[int], params: Any = None, **given: Any) -> Request:
        request = self.request(prompt, params, **given)
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan:
        self.now += 0.01
        plan = self.scheduler.schedule(self.now)
        self.plans.append(plan)
        self.check()
        return plan

    def take(self, result: StepResult | None) -> None:
        if result is not None:
            self.news += self.scheduler.update(result, self.now)
            self.check()

    def step(self) -> StepPlan:
        """Plan, submit, and take the result that is due."""
        plan = self.plan()
        self.take(self.device.submit(plan))
        return plan

    def run(self, limit: int = 3000) -> int:
        """Step until everything has ended; returns the number of steps."""
        for steps in range(limit):
            if not self.scheduler.has_work:
                self.drain()
                return steps
            self.step()
        raise AssertionError(f"not finished after {limit} steps: {self.scheduler.requests}")

    def until(self, happened: Callable[[], object], limit: int = 300) -> None:
        """Step until something has happened."""
        for _ in range(limit):
            if happened():
                return
            assert self.scheduler.has_work, "everything has ended before it happened"
            self.step()
        raise AssertionError(f"it did not happen in {limit} steps")

    def drain(self) -> None:
        while (result := self.device.collect()) is not None:
            self.take(result)

    def check(self) -> None:
        """The invariants that hold between any two calls."""
        pool = self.pool
        assert pool.num_free + pool.num_cached + pool.num_used + pool.num_pending == pool.num_blocks
        self.scheduler.audit()

    def check_empty(self) -> None:
        """Everything has ended: the pool is as it was."""
        assert not self.scheduler.requests and not self.scheduler.running and not len(self.scheduler.waiting)
        pool, host = self.pool, self.scheduler.memory.host_pool
        assert (pool.num_used, pool.num_pending, pool.num_shared) == (0, 0, 0)
        assert host is None or host.num_available == host.num_blocks
        admission = self.scheduler.admission
        assert not admission._computing and not admission._promised
        assert not self.scheduler._sequences and not self.scheduler._deadlines
        self.check()

    def tokens_of(self, request: Request) -> list[list[int]]:
        return [s.output_token_ids for s in request.sequences]

    def check_answers(self, *requests: Request) -> None:
        """Each finished sample holds what the script says it holds alone."""
        for request in requests:
            for seq in request.sequences:
                assert seq.output_token_ids == expected(seq, self.script), (request, seq.index)


def expected(seq: Sequence, script: Script = default_script) -> list[int]:
    """Output of a sample run alone; for one that was cut from outside, as many tokens as it has."""
    request = seq.request
    tokens = list(request.prompt_token_ids)
    cut = len(seq.token_ids) if seq.finish_reason in ("abort", "deadline", "stop string", None) else None
    while len(tokens) < request.max_len if cut is None else len(tokens) < cut:
        tokens.append(script(tokens, seq.index))
        params = request.sampling
        if cut is None and tokens[-1] in request.end_ids and len(tokens) - request.prompt_len > params.min_tokens:
            break
    return tokens[request.prompt_len :]


def never_ends(tokens: Seq[int], sample_index: int) -> int:
    """A script without end tokens."""
    return 10 + default_script(tokens, sample_index) % 900


def beam(width: int, max_tokens: int = 8, **given: Any) -> BeamSearchParams:
    return BeamSearchParams(beam_width=width, max_tokens=max_tokens, **given)


def prompt(length: int, salt: int = 0) -> list[int]:
    """Distinct, repeatable tokens; another salt differs from the first position on."""
    return [10 + (i * 7 + salt * 131 + (i * i * (salt + 3)) % 53) % 900 for i in range(length)]
