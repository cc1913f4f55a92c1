"""Any order of events: hypothesis drives a scheduler and the scripted runner, and audits after each.

Arrivals with shared prefixes, samples, beams, salts, priorities and deadlines; steps (also two in flight); aborts;
ends by "stop string"; cache resets; preemption by either way in a pool that is too small. At the end the pool is as at
the start and every answer is that of the request alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from helpers.scheduling import Rig, beam, expected, prompt
from octavo.core.fake_runner import default_script
from octavo.core.sequence import Request
from octavo.errors import CapacityError
from octavo.sampling_params import SamplingParams

LONGEST = 72


def script(tokens: Seq[int], sample_index: int) -> int:
    """One token in forty is the end."""
    return default_script(tokens, sample_index, 41)


class Life(RuleBasedStateMachine):
    """One scheduler from start to idle."""

    rig: Rig
    requests: list[Request]

    @initialize(
        windows=st.sampled_from([(None,), (6, None), (5,), (7, 12, None)]),
        block_size=st.sampled_from([1, 2, 4, 8]),
        tightness=st.integers(0, 3),
        limit=st.sampled_from([2, 5, 16, 512]),
        seats=st.sampled_from([4, 8, 32]),
        delay=st.sampled_from([0, 0, 1, 2]),
        kind=st.sampled_from(["paged", "paged", "cached", "cached", "cached", "static", "copying"]),
        way=st.sampled_from(["auto", "recompute", "swap"]),
        bound=st.sampled_from([1, 2, 8]),
        aging=st.sampled_from([0.02, 60.0]),
    )
    def start(self, windows: Any, block_size: int, tightness: int, limit: int, seats: int, delay: int, kind: str,
              way: str, bound: int, aging: float) -> None:  # fmt: skip
        per_sequence = -(-LONGEST // block_size) * len(windows)
        self.windows, self.block_size = windows, block_size
        self.rig = Rig(
            per_sequence * (1 + 2 * tightness) // (2 if kind != "static" else 1) + 1,
            block_size=block_size,
            windows=windows,
            delay=delay,
            script=script,
            max_model_len=LONGEST,
            max_num_batched_tokens=limit,
            max_num_seqs=seats,
            preemption="auto" if kind == "static" else way,
            num_host_blocks=0 if way == "recompute" else per_sequence,
            allocation="static" if kind == "static" else "paged",
            enable_prefix_caching=kind == "cached",
            copy_on_write=kind != "copying",
            max_preemptions=bound,
            priority_aging_s=aging,
        )
        self.requests = []

    def _add(self, tokens: list[int], params: Any, **given: Any) -> None:
        try:
            self.requests.append(self.rig.add(tokens, params, **given))
        except CapacityError:
            self.rig.check()  # refused at the door, and nothing has changed

    @rule(
        shared=st.integers(0, 40),
        salt=st.sampled_from([None, None, "a"]),
        family=st.integers(0, 1),
        own=st.integers(1, 12),
        new=st.integers(1, 18),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.sampled_from([0, 0, 0, -1, 4]),
        deadline=st.sampled_from([None, None, None, 60.0]),
        logprobs=st.sampled_from([None, None, None, 1]),
    )
    def sample(self, shared: int, salt: Any, family: int, own: int, new: int, n: int, priority: int, deadline: Any,
               logprobs: Any) -> None:  # fmt: skip
        tokens = prompt(40, family)[:shared] + prompt(own, 2 + len(self.requests) % 3)
        params = SamplingParams(n=n, max_tokens=new, deadline_ms=deadline, prompt_logprobs=logprobs)
        self._add(tokens, params, priority=priority, salt=salt)

    @rule(shared=st.integers(1, 40), width=st.sampled_from([1, 2, 4]), new=st.integers(1, 12), early=st.booleans())
    def search(self, shared: int, width: int, new: int, early: bool) -> None:
        self._add(prompt(40)[:shared], beam(width, new, early_stopping=early))

    @precondition(lambda self: self.rig.scheduler.has_work)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 50), index=st.sampled_from([None, None, 0, 1]))
    def abort(self, which: int, index: int | None) -> None:
        request = self.requests[which % len(self.requests)]
        self.rig.scheduler.abort(request.request_id, index)
        self.rig.check()
        if index is None:
            assert request.finished and not any(s.tables for s in request.sequences)
            assert not self.rig.scheduler.abort(request.request_id)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 50))
    def stop_string(self, which: int) -> None:
        """The engine ends a sample whose text matched."""
        live = [s for q in self.requests if q.beam is None for s in q.live() if s.num_output]
        if live:
            self.rig.scheduler.finish(live[which % len(live)], "stop string", "x")
            self.rig.check()

    @precondition(lambda self: self.rig.scheduler.memory.cache is not None)
    @rule()
    def reset_cache(self) -> None:
        assert self.rig.scheduler.memory.cache is not None
        self.rig.scheduler.memory.cache.reset()
        self.rig.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        rig.run()
        rig.check_empty()
        for request in self.requests:
            assert request.num_preemptions <= rig.settings.max_preemptions + 1
            if request.beam is None:
                for seq in request.sequences:
                    assert seq.output_token_ids == expected(seq, script)
            elif not any(s.finish_reason in ("abort", "deadline") for s in request.sequences):
                self._check_beams(request)

    def _check_beams(self, request: Request) -> None:
        alone = Rig(400 * len(self.windows), block_size=8, windows=self.windows, max_model_len=LONGEST, script=script)
        solo = alone.add(request.prompt_token_ids, replace(request.params, deadline_ms=None))
        alone.run()
        assert request.beam_state.finished == solo.beam_state.finished


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
