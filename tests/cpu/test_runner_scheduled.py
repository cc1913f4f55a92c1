"""The real scheduler drives the model runner over a small decoder: whatever it decides, answers equal solo ones."""

from __future__ import annotations

import random

import pytest
import torch

from helpers.fake_decoder import FakeDecoder, dense_logits
from helpers.paged import fresh_seed, tiny_spec
from octavo.core.kv_layout import build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.sequence import Request
from octavo.core.settings import SchedulerSettings
from octavo.kernels.reference import ReferenceAttention
from octavo.runner.kv_store import KVStore
from octavo.runner.model_runner import ModelRunner
from octavo.sampling_params import SamplingParams

SPEC = tiny_spec([None, 8, None], head_dim=8)
DECODER = FakeDecoder(SPEC)
LIMIT = 64


def run(requests, *, block_size=4, num_blocks=400, **settings):
    """All requests at once through scheduler and runner -> {request id: token ids per sample}, and the counters."""
    layout = build_layout(SPEC.windows, block_size=block_size, bytes_per_token_layer=1)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_host_blocks": 0, **settings}
    scheduler = Scheduler(
        layout=layout, settings=SchedulerSettings(num_blocks=num_blocks, max_model_len=LIMIT, **settings)
    )
    store = KVStore.allocate(layout, SPEC, num_blocks, dtype=torch.float32, num_host_blocks=settings["num_host_blocks"])
    store.cache.kv.fill_(float("nan"))
    runner = ModelRunner(
        DECODER,
        store,
        ReferenceAttention(store.cache, SPEC),
        max_num_seqs=settings["max_num_seqs"],
        max_model_len=LIMIT,
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        vocab_size=SPEC.vocab_size,
    )
    for number, (prompt, params) in enumerate(requests):
        scheduler.add(
            Request(
                str(number),
                list(prompt),
                params,
                arrival=float(number),
                number=number,
                seed=params.seed or 0,
                max_len=min(LIMIT, len(prompt) + params.max_tokens),
            )
        )
    answers = {str(n): [[] for _ in range(params.num_sequences)] for n, (_, params) in enumerate(requests)}
    for step in range(3000):
        if not scheduler.has_work:
            break
        for news in scheduler.update(runner.execute(scheduler.schedule(float(step))), float(step)):
            assert news.error is None
            answers[news.sequence.request.request_id][news.sequence.index] += news.token_ids
    scheduler.audit()
    assert not scheduler.has_unfinished and runner.num_rows == 0
    return answers, scheduler.counters


def mixed_requests(rng):
    prefix = [rng.randrange(50) for _ in range(13)]
    requests = []
    for i in range(7):
        prompt = (prefix if i % 2 else []) + [rng.randrange(50) for _ in range(rng.randrange(6, 18))]
        kinds = [
            SamplingParams(temperature=0, max_tokens=rng.randrange(15, 25)),
            SamplingParams(n=3, seed=i + 1, max_tokens=rng.randrange(14, 20)),
            SamplingParams(seed=i + 1, top_p=0.8, repetition_penalty=1.4, max_tokens=20),
        ]
        requests.append((prompt, kinds[i % 3]))
    return requests


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 9, "block_size": 1},
        {"enable_prefix_caching": True, "block_size": 2},
        {"num_blocks": 66, "preemption": "recompute"},
        {"num_blocks": 66, "preemption": "swap", "num_host_blocks": 200},
        {"num_blocks": 66, "enable_prefix_caching": True, "max_num_batched_tokens": 17, "num_host_blocks": 40},
        {"copy_on_write": False},
        {"allocation": "static", "num_blocks": 400},
    ],
)
def test_answers_equal_solo_whatever_the_scheduler_does(settings):
    rng = random.Random(fresh_seed())
    requests = mixed_requests(rng)
    answers, counters = run(requests, **settings)
    if settings.get("num_blocks") == 66:
        assert counters.preemptions > 0, "the pool was meant to be too small"
    for i, request in enumerate(requests):
        solo, _ = run([request])
        assert answers[str(i)] == solo["0"], f"request {i}"
        prompt, params = request
        if params.greedy:
            tokens = list(prompt)
            for _ in range(params.max_tokens):
                tokens.append(int(dense_logits(DECODER, tokens)[-1].argmax()))
            assert answers[str(i)][0] == tokens[len(prompt) :]
