"""A run without a model, to look at: the real scheduler and pool, a scripted runner, and a little of everything.

Prompts that share a beginning, several samples, a beam search, a windowed group of layers, and a pool too small for all
of it at once, so that blocks are cached, evicted, shared, copied and preempted. It is written as a recording, like any
other run. The words are made up; what the memory does is not.
"""

from __future__ import annotations

import random
from pathlib import Path

from octavo.core.fake_runner import FakeRunner, default_script
from octavo.core.kv_layout import build_layout
from octavo.core.record import Recorder
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.sampling_params import BeamSearchParams, SamplingParams

VOCABULARY = 997
STEP_SECONDS = 0.02
TEXT = (
    "a sheet folds into eight leaves and the library lends single pages to every reader so no shelf waits empty while "
    "others stand in line each page has a number a count and a place in some table who writes on a shared page first "
    "gets a copy of it then both go on alone"
)
WORDS = TEXT.split()


def demo_text(token: int) -> str:
    """A word for a token of the demo."""
    return WORDS[token % len(WORDS)] + " "


def record_demo(path: str | Path, *, num_blocks: int = 320, requests: int = 28, seed: int = 8) -> None:
    """Write the recording of a run of `requests` requests over `num_blocks` blocks."""
    layout = build_layout((None, 64, 64), block_size=16, bytes_per_token_layer=2048, hybrid=True)
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        max_model_len=1024,
        max_num_seqs=24,
        max_num_batched_tokens=256,
        enable_prefix_caching=True,
    )
    scheduler = Scheduler(settings, layout)
    runner = FakeRunner(layout, num_blocks, script=_script, vocab_size=VOCABULARY, check=False)
    recorder = Recorder(str(path), settings, layout, {"model": {"name": "demo (no model)"}, "vocab_size": VOCABULARY})
    arrivals = _arrivals(random.Random(seed), requests)
    now = 0.0
    while arrivals or scheduler.has_work:
        now += STEP_SECONDS
        while arrivals and arrivals[0].arrival <= now:
            request = arrivals.pop(0)
            scheduler.add(request)
            recorder.arrival(request)
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule(now)
        result = runner.execute(plan)
        scheduler.update(result, now)
        recorder.step(now, plan, result)
    recorder.close()


def _script(tokens: object, sample: int) -> int:
    """Never a low id, so nothing ends before its length."""
    return 10 + default_script(tokens, sample) % (VOCABULARY - 20)  # type: ignore[arg-type]


def _arrivals(rng: random.Random, count: int) -> list[Request]:
    """Requests in order of arrival; two thirds of them begin with one of two long instructions."""
    instructions = [[rng.randrange(10, VOCABULARY) for _ in range(length)] for length in (150, 90)]
    requests = []
    at = 0.0
    for number in range(count):
        at += rng.expovariate(6.0)
        head = instructions[number % 3] if number % 3 < 2 else []
        prompt = [*head, *(rng.randrange(10, VOCABULARY) for _ in range(rng.randrange(20, 160)))]
        new = rng.randrange(30, 170)
        params: SamplingParams | BeamSearchParams = SamplingParams(
            n=(1, 1, 3, 1, 2)[number % 5], max_tokens=new, ignore_eos=True
        )
        if number % 9 == 4:
            params = BeamSearchParams(beam_width=3, max_tokens=min(new, 60), ignore_eos=True)
        name = f"{('chat', 'draft', 'ask')[number % 3]}-{number}"
        requests.append(
            Request(name, prompt, params, arrival=at, number=number, seed=number, max_len=len(prompt) + new)
        )
    return requests
