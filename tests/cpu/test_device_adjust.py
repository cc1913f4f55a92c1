"""Penalties, biases and bans on a device: the numbers of the host's sampler, and engines that wait for none of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from helpers.oracle import Model, random_ids, tiny
from helpers.paged import fresh_seed
from helpers.queue_device import QueueDevice, standing_in
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.core.step import ScheduledSequence, SequenceStart, StepPlan, TableUpdate
from octavo.engine import Engine
from octavo.errors import BoundsError
from octavo.kernels.adjusting import Adjusting, Edits, Penalties, TokenHistory, adjusted
from octavo.runner.device_adjust import NOBODY, PLACES, Adjustments, Wanted
from octavo.runner.device_runner import DeviceRunner
from octavo.runner.device_sampler import DrawInputs, Mode, draw
from octavo.runner.draws import DrawParameters
from octavo.runner.sampler import Draw, Sampler
from octavo.runner.sampling_state import SamplingState

BANNED = float("-inf")
WORDS = 200
SMALL: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 100}
PROMPTS = [random_ids(9 + 7 * i, i) for i in range(7)]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4, "n": 3},
    {"logit_bias": {7: 3.0, 9: -100.0, 40: 2.5}},
    {"allowed_token_ids": list(range(30, 70)), "repetition_penalty": 0.8, "n": 2},
    {"min_tokens": 9, "stop_token_ids": list(range(0, 256, 3)), "ignore_eos": False},
    {"temperature": 0},
    {"min_tokens": 3, "stop_token_ids": [5, 8], "logit_bias": {5: 4.0, 3: 1.0}, "frequency_penalty": -0.3, "top_k": 30,
     "top_p": 0.9, "logprobs": 2},
]  # fmt: skip


# -- numbers -----------------------------------------------------------------------------------------------------------


def start_of(params: SamplingParams, prompt: list[int], output: list[int], seq_id: int = 0, **more: Any) -> Any:
    return SequenceStart(seq_id, "r", 0, params, (*prompt, *output), len(prompt), seed=seq_id, **more)


def test_history_counts_and_forgets_nothing_but_what_has_no_room() -> None:
    rng = np.random.default_rng(fresh_seed())
    history = TokenHistory(4, 12, "cpu")
    history.start(1, range(10), [])
    history.start(1, [3, 3, 4], [4, 90])  # what was there before is not seen any more
    history.start(0, [], [])
    truth: dict[int, dict[int, int]] = {0: {}, 1: {3: 0, 4: 1, 90: 1}, 2: {}}
    for _ in range(60):
        slots = rng.permutation([0, 1, 2, -1, -1])
        tokens = rng.integers(0, 14, 5)
        tokens[rng.integers(5)] = -1
        history.add(torch.from_numpy(slots), torch.from_numpy(tokens))
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot >= 0 and token >= 0 and (token in truth[slot] or len(truth[slot]) < 12):
                truth[slot][token] = truth[slot].get(token, 0) + 1
    for slot, counts in truth.items():
        size = int(history.sizes[slot])
        found = zip(history.ids[slot, :size].tolist(), history.counts[slot, :size].tolist(), strict=True)
        assert dict(found) == counts and size == len(counts)
    assert not int(history.sizes[3])
    with pytest.raises(BoundsError, match="slot 2: 13 different tokens, a history has room for 12"):
        history.start(2, range(13), [])


def test_logits_are_changed_as_on_the_host() -> None:
    rng = np.random.default_rng(fresh_seed())
    logits = torch.from_numpy((2 * rng.normal(size=(3, WORDS))).astype(np.float32))
    params = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.2),
        SamplingParams(repetition_penalty=0.7, logit_bias={3: 2.5, 0: -1.0}),
        SamplingParams(logit_bias={5: 1.0}),
        SamplingParams(frequency_penalty=1.1),
    ]
    prompt, output = rng.integers(0, WORDS, 30).tolist(), rng.integers(0, 40, 50).tolist()
    history, slots, rows = TokenHistory(3, 80, "cpu"), [2, 0, -1, 1], torch.tensor([2, 0, 0, 1])
    for p, slot in zip(params, slots, strict=True):
        if slot >= 0:
            history.start(slot, prompt if p.repetition_penalty != 1.0 else [], output)
    factors = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    penalties = Penalties(history, torch.tensor(slots), *torch.tensor(factors).t())
    edits = Edits.of([(i, p.logit_bias or {}) for i, p in enumerate(params)] + [(1, {3: BANNED})], "cpu")
    before = logits.clone()
    found = adjusted(logits, rows, penalties, edits)
    for i, p in enumerate(params):
        row = logits[rows[i]].numpy().copy()
        SamplingState(start_of(p, prompt, output, bad_word_ids=((3,),) if i == 1 else ()), WORDS).adjust(row)
        assert np.array_equal(found[i].numpy(), row), i
    assert torch.equal(logits, before)


def test_draws_are_those_of_the_host_over_many_steps_and_owners() -> None:
    """Sequences come, draw and go; places are handed out again; tokens are only ever counted on the device."""
    rng = np.random.default_rng(fresh_seed())
    tables, params = Adjustments(QueueDevice(), Adjusting(), WORDS, 120), DrawParameters(4)
    kinds = [SamplingParams(**{k: v for k, v in c.items() if k != "n"}) for c in CHANGES]
    kinds.append(SamplingParams(allowed_token_ids=[9, 5], logit_bias={6: 50.0}, min_tokens=40, max_tokens=99))
    live: dict[int, tuple[SequenceStart, SamplingState, int]] = {}
    sampler, used = Sampler(WORDS, native=False), set()
    for step in range(60):
        for seq_id in [s for s in live if rng.random() < 0.1]:
            tables.close(seq_id)
            del live[seq_id]
        while len(live) < 24:  # more than there are places at first
            seq_id = 1000 * step + len(live)
            prompt = rng.integers(0, WORDS, int(rng.integers(1, 30))).tolist()
            output = rng.integers(0, WORDS, int(rng.choice([0, 6]))).tolist()  # resumed ones bring what they have
            kind = kinds[int(rng.integers(len(kinds)))]
            words = tuple((int(t),) for t in rng.integers(0, WORDS, int(rng.choice([0, 3, 21]))))
            start = start_of(kind, prompt, output, seq_id, end_ids=(9, 5, 11), bad_word_ids=words)
            wanted, slot = Wanted.of(start), len(live)
            live[seq_id] = (start, SamplingState(start, WORDS), tables.open(start, wanted) if wanted.anything else 0)
            used.add(live[seq_id][2])
        tables.send()
        logits = torch.from_numpy((3 * rng.normal(size=(len(live), WORDS))).astype(np.float32))
        for slot, (start, _, place) in enumerate(live.values()):
            params.set(slot, start, WORDS)
            params.adjust(slot, Wanted.of(start), place)
        slots = np.arange(len(live))
        lengths = [start.prompt_len + state.num_output for start, state, _ in live.values()]
        need, (places, generated) = params.changes(slots, np.array(lengths))
        noise = sampler._noise([Draw(i, state, n) for i, ((_, state, _), n) in enumerate(zip(live.values(), lengths))])
        arrays = (params.temperature, params.top_k, params.top_p, params.min_p)
        inputs = DrawInputs(*(torch.from_numpy(a[slots]) for a in arrays), torch.tensor(noise, dtype=torch.float64))
        tokens, highest = tables.draw(
            logits, inputs, Mode.FILTERED, need, torch.from_numpy(places), torch.from_numpy(generated), draw
        )
        assert torch.equal(highest, logits.max(-1).values), "of the raw logits"
        for i, ((_, state, _), token) in enumerate(zip(live.values(), tokens.tolist(), strict=True)):
            drawn = sampler.sample(logits, [Draw(i, replace_logprobs(state), lengths[i])])[0]
            assert (token,) == drawn.token_ids, (step, i, drawn)
            state.push(token)
    assert max(used) >= PLACES > len(used & {NOBODY}) and tables.generation > 3


def replace_logprobs(state: SamplingState) -> SamplingState:
    state.logprobs = None
    return state


# -- whole engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("adjust"))


def params_of(i: int, **more: Any) -> SamplingParams:
    base = {"temperature": 0.9, "seed": i, "max_tokens": 18 + i, "ignore_eos": True}
    return SamplingParams(**{**base, **CHANGES[i % len(CHANGES)], **more})


def answers(llm: LLM, rounds: int = 1) -> list[Any]:
    """All changes in one batch, some sequences without any; every round in another order, so that places change."""
    found = []
    for r in range(rounds):
        order = [(i + 3 * r) % len(PROMPTS) for i in range(len(PROMPTS))]
        outputs = llm.generate([PROMPTS[i] for i in order], [params_of(i) for i in order], use_tqdm=False)
        assert (llm.pool_view().num_used, llm.pool_view().num_pending) == (0, 0)
        by_prompt = dict(zip(order, outputs, strict=True))
        found.append([[(c.token_ids, c.finish_reason) for c in by_prompt[i].outputs] for i in range(len(PROMPTS))])
    return found


def queued(model: Model, **settings: Any) -> tuple[LLM, Any]:
    with standing_in(QueueDevice()):
        llm = model.engine(debug=True, **settings)
    runner: Any = llm._live().runner
    assert isinstance(runner, DeviceRunner)
    return llm, runner


@pytest.fixture(scope="module")
def expected(model: Model) -> Any:
    with model.engine() as plain:
        found = answers(plain)[0]
        without = plain.generate(PROMPTS, [SamplingParams(**GREEDY, max_tokens=18)] * 7, use_tqdm=False)
    assert found[0][0][0] != without[0].outputs[0].token_ids, "the penalty matters"
    assert found[5][0][0][:18] == without[5].outputs[0].token_ids
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "single": {"overlap": False},
    "eager": {"enforce_eager": True},
    "recompute": {**SMALL, "preemption": "recompute"},
    "swap": {**SMALL, "preemption": "swap"},
    "chunks": {"max_num_batched_tokens": 9, "max_num_seqs": 4},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_text_is_that_of_the_cpu_and_nothing_waits(name: str, model: Model, expected: Any) -> None:
    llm, runner = queued(model, **SETTINGS[name])
    with llm:
        assert answers(llm, rounds=3) == [expected] * 3
        stats = llm.stats()
        assert not runner.host_steps and not stats.overlap_waits
        assert (stats.overlapped_steps > 0) == (name != "single")
        assert (stats.preemptions > 0) == (name in ("recompute", "swap")) and (stats.swaps > 0) == (name == "swap")
        if name == "plain":
            assert runner.graphs.counters.replayed > 0
        llm.generate([PROMPTS[0]], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        assert len(runner._adjust) == 0, "places are given back with the plan after the end"


def test_history_that_is_not_kept_up_would_be_noticed(
    model: Model, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenHistory, "add", lambda self, slots, tokens: None)
    llm, _ = queued(model)
    with llm:
        assert answers(llm)[0] != expected


def test_a_neighbour_that_needs_the_host(model: Model) -> None:
    """Steps that it takes part in are drawn on the host, those before and after on the device; each knows the other's
    tokens."""
    words = SamplingParams(bad_words=["qu", "the"], temperature=0, max_tokens=7, ignore_eos=True)

    def run(llm: LLM) -> Any:
        engine = llm._live()
        for i in (0, 1, 3, 6):
            engine.add_request(f"a{i}", PROMPTS[i], params_of(i))
        last: dict[str, Any] = {}
        steps = 0
        while engine.has_unfinished():
            steps += 1
            if steps == 6:
                engine.add_request("b", PROMPTS[4], words)
            last |= {o.request_id: [c.token_ids for c in o.outputs] for o in engine.step()}
        return last

    with model.engine() as plain:
        alone = run(plain)
    llm, runner = queued(model)
    with llm:
        assert run(llm) == alone
        stats = llm.stats()
        assert runner.host_steps == {"bad words": 7} and stats.overlap_waits == {"bad words": 7}
        assert stats.overlapped_steps > 15


def test_aborted_sequences_leave_nothing_to_the_next_owner(model: Model, expected: Any) -> None:
    with standing_in(QueueDevice()):
        config = EngineConfig(model=str(model.path), dtype="float32", device="cpu", num_blocks=64, debug=True)
        engine = Engine.build(config)
    try:
        full = SamplingParams(
            repetition_penalty=2.0, presence_penalty=2.0, logit_bias=dict.fromkeys(range(40), 9.0),
            allowed_token_ids=list(range(60)), temperature=0, max_tokens=60, ignore_eos=True,
        )  # fmt: skip
        for turn in range(2):
            for i in range(5):
                engine.add_request(f"gone{turn}{i}", PROMPTS[i], full)
            for _ in range(6):
                engine.step()
            for i in range(5):
                engine.abort(f"gone{turn}{i}")
            for i in range(len(PROMPTS)):
                engine.add_request(f"r{turn}{i}", PROMPTS[i], params_of(i))
            last: dict[str, Any] = {}
            while engine.has_unfinished():
                last |= {o.request_id: [(c.token_ids, c.finish_reason) for c in o.outputs] for o in engine.step()}
            assert [last[f"r{turn}{i}"] for i in range(len(PROMPTS))] == expected
    finally:
        engine.close()


def test_more_sequences_and_wider_edits_than_there_is_room_for_at_first(model: Model) -> None:
    bias = {t: (t % 7) - 3.0 for t in range(50)}

    def run(llm: LLM) -> Any:
        few = [params_of(0, max_tokens=30)]
        many = [params_of(1 + i % 6, seed=i, n=1, max_tokens=12) for i in range(30)]
        wide = [params_of(0, logit_bias=bias, max_tokens=10), *many]
        found = []
        for params in (few, few, many, wide, many, wide):
            prompts = [PROMPTS[i % 7] for i in range(len(params))]
            found.append([o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)])
        return found

    with model.engine(max_num_seqs=32) as plain:
        alone = run(plain)
    llm, runner = queued(model, max_num_seqs=32)
    with llm:
        assert run(llm) == alone and not runner.host_steps
        assert runner._adjust._capacity == 2 * PLACES and runner._adjust._tokens.shape[1] == 128


def test_ids_outside_the_vocabulary_end_their_sequence_and_nobody_elses(model: Model) -> None:
    """The engine refuses them at its door; a plan from elsewhere may still hold them."""
    kinds = [
        (SamplingParams(logit_bias={5000: 1.0}), ()),
        (SamplingParams(allowed_token_ids=[4000, 1]), ()),
        (SamplingParams(min_tokens=2), (3000,)),
        (SamplingParams(repetition_penalty=1.3, temperature=0), (3,)),
    ]
    starts = tuple(start_of(p, PROMPTS[0], [], i, end_ids=ends) for i, (p, ends) in enumerate(kinds))
    blocks = -(-len(PROMPTS[0]) // 4)
    scheduled = tuple(
        ScheduledSequence(i, 0, s.token_ids, (TableUpdate(0, 0, tuple(range(i * blocks, (i + 1) * blocks))),), (i,))
        for i, s in enumerate(starts)
    )
    plan = StepPlan(1, scheduled, starts=starts)
    with model.engine(**SMALL) as plain:
        alone = plain._live().runner.execute(plan).drawn
    llm, runner = queued(model, **SMALL)
    with llm:
        assert runner.execute(plan).drawn == alone and not runner.host_steps
    assert [drawn.error is None for drawn in alone.values()] == [False, False, False, True]


def test_bans_that_contradict_each_other(model: Model) -> None:
    contradictions: list[dict[str, Any]] = [
        {"allowed_token_ids": [40, 30], "stop_token_ids": [30, 40], "min_tokens": 6, "logprobs": 1},
        {"stop_token_ids": list(range(320)), "min_tokens": 6},
        {"allowed_token_ids": [44], "repetition_penalty": 1.5},
    ]
    params = [SamplingParams(**{"temperature": i % 2, "seed": i, "max_tokens": 8, **c})
              for i, c in enumerate(contradictions)]  # fmt: skip

    def run(llm: LLM) -> Any:
        return [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], params, use_tqdm=False)]

    with model.engine() as plain:
        alone = run(plain)
    llm, runner = queued(model)
    with llm:
        assert run(llm) == alone and not runner.host_steps
    assert set(alone[0]) <= {30, 40} and alone[2] == [44] * 8
