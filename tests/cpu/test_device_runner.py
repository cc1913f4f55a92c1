"""The GPU engine's runner on a CPU that stands in for the queue: inputs, tables, draws, graphs, memory, whole engines.

What a GPU alone can show (that copies and kernels overlap, that a recorded graph is what ran) is in tests/gpu.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.fuzzing import make_case, plain_engine, run_case
from helpers.oracle import Model, random_ids, tiny
from helpers.paged import fresh_seed
from helpers.queue_device import QueueDevice, standing_in
from octavo import LLM, PoolingParams, SamplingParams, builder
from octavo.config import EngineConfig, Facts, resolve
from octavo.core.step import SequenceStart, StepPlan
from octavo.device_setup import measured_budget, weights_must_fit
from octavo.devices import CpuDevice, CudaDevice, device_of, find_device
from octavo.errors import ConfigError, InternalError
from octavo.kernels.ops import TorchOps
from octavo.kernels.reference import ReferenceAttention
from octavo.models.load import load_model
from octavo.models.staging import StagedWeights
from octavo.runner import filters, logprobs
from octavo.runner.device_inputs import DeviceTables, Staging
from octavo.runner.device_runner import DeviceRunner
from octavo.runner.device_sampler import DrawInputs, Mode, draw, list_logprobs, why_not
from octavo.runner.draws import DrawParameters
from octavo.runner.graphs import ALLOWANCE, GraphStore, buckets_up_to
from octavo.runner.noise import uniforms
from octavo.sizing import layout_for

PROMPTS = [random_ids(9 + 7 * i, i) for i in range(6)]
SMALL: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 100}


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_inputs_arrive_together_and_lie_where_their_sizes_say() -> None:
    device = QueueDevice()
    staging = Staging(device, 4096)
    arrays: list[Any] = [np.arange(5, dtype=np.int64), np.array([1.5, -2.0], np.float32), np.arange(7, dtype=np.int32),
              np.array([0.25], np.float64), np.array([3, 255], np.uint8), np.empty(0, np.int64)]  # fmt: skip
    first = staging.send(arrays)
    assert [t.tolist() for t in first] == [a.tolist() for a in arrays]
    assert [t.dtype for t in first[:5]] == [torch.int64, torch.float32, torch.int32, torch.float64, torch.uint8]
    addresses = [t.data_ptr() for t in first]
    assert all(address % 16 == 0 for address in addresses)
    second = staging.send([a + a.dtype.type(1) for a in arrays])
    assert [t.data_ptr() for t in second] == addresses, "a recorded step finds the next step's inputs there"
    assert first[0].tolist() == [1, 2, 3, 4, 5] and staging.num_copies == 2
    with pytest.raises(InternalError, match="4096 bytes kept for them"):
        staging.send([np.zeros(513)])


def test_tables_follow_differences_in_slots_kept_for_life() -> None:
    rng = np.random.default_rng(fresh_seed())
    tables = DeviceTables(QueueDevice(), 2, 3, 8, spare_block=99)
    truth: dict[int, np.ndarray] = {}
    slots: dict[int, int] = {}
    for step in range(60):
        if len(truth) > 4 or (truth and rng.random() < 0.3):
            gone = int(rng.choice(list(truth)))
            tables.close(gone)
            del truth[gone], slots[gone]
        truth[step], slots[step] = np.zeros((2, 8), np.int32), tables.open(step)
        for seq, table in truth.items():
            for _ in range(rng.integers(0, 3)):
                group, first = int(rng.integers(2)), int(rng.integers(6))
                ids = rng.integers(0, 50, size=int(rng.integers(1, 8 - first)))
                table[group, first : first + len(ids)] = ids
                tables.note(seq, group, first, tuple(ids.tolist()))
        if step % 4 == 0:  # the new sequence is told everything, in two rounds
            tables.note(step, 0, 0, tuple(truth[step][0].tolist()))
        while tables.pending:
            before = tables.pending
            tables.apply(*(torch.from_numpy(a) for a in tables.take_changes(7)))
            assert before - tables.pending == min(7, before)
        for seq, table in truth.items():
            assert tables.slot(seq) == slots[seq], "a slot never moves"
            written = table != 0
            assert (tables.tables[:, slots[seq]].numpy()[written] == table[written]).all()
    assert (tables.tables[:, tables.spare_slot] == 99).all() and len(tables) == len(truth)
    assert tables.generation == 1 and tables.capacity == 6, "it grew once"


# -- draws -------------------------------------------------------------------------------------------------------------


def on_host(row: Any, temperature: float, k: int, p: float, m: float, uniform: float) -> int:
    scratch = filters.Scratch(len(row))
    if temperature == 0:
        return int(row.argmax())
    if k or p < 1 or m:
        return filters.draw_among(*filters.keep(row, row.max(), temperature, k, p, m, scratch), uniform)
    filters.exponentials(row, row.max(), temperature, scratch.weights)
    return filters.draw(scratch, uniform)


@pytest.mark.parametrize("mode", list(Mode))
def test_draws_are_those_of_the_host(mode: Mode) -> None:
    rng = np.random.default_rng(fresh_seed())
    count, words = 40, 1700
    rows = (rng.normal(size=(count, words)) * 3).astype(np.float32)
    rows[::3] = rows[::3].round()  # ties
    rows[::4, rng.integers(0, words, 900)] = -np.inf  # banned words
    temperature = rng.choice([0.0, 0.3, 1.0, 1.7], size=count).astype(np.float32) * (mode > 0)
    k = rng.choice([0, 1, 5, 60, 1700], size=count).astype(np.int32) * (mode > 1)
    p = rng.choice([1.0, 0.9, 0.4], size=count).astype(np.float32) if mode > 1 else np.ones(count, np.float32)
    m = rng.choice([0.0, 0.1], size=count).astype(np.float32) * (mode > 1)
    noise = rng.random(count)
    inputs = DrawInputs(*(torch.from_numpy(a) for a in (temperature, k, p, m, noise)))
    tokens, highest = draw(torch.from_numpy(rows), inputs, mode)
    expected = [on_host(*args) for args in zip(rows, temperature.tolist(), k.tolist(), p.tolist(), m.tolist(), noise)]
    assert tokens.tolist() == expected and (highest.numpy() == rows.max(1)).all()


@pytest.mark.parametrize("count", [0, 1, 7, 900])
def test_listed_log_probabilities_are_those_of_the_host(count: int) -> None:
    rng = np.random.default_rng(fresh_seed())
    rows = (rng.normal(size=(20, 900)) * 4).astype(np.float32)
    rows[::2] = rows[::2].round()  # ties
    rows[::3, rng.integers(0, 900, 100)] = -np.inf
    tokens = rng.integers(0, 900, 20)
    ids, values, ranks = list_logprobs(torch.from_numpy(rows), torch.from_numpy(tokens), count)
    scratch = filters.Scratch(900)
    for i, (row, token) in enumerate(zip(rows, tokens.tolist())):
        entry = logprobs.token_logprobs(row, token, count, scratch)
        assert tuple(ids[i].tolist()) == entry.token_ids and int(ranks[i]) == entry.rank
        np.testing.assert_allclose(values[i].numpy(), entry.logprobs, atol=2e-6)


def test_engines_list_what_was_asked_for(model: Model) -> None:
    def listed(llm: LLM) -> tuple[list[Any], list[float]]:
        """(request, place, token, rank) of every entry, and their log-probabilities."""
        asked = [SamplingParams(temperature=0, max_tokens=9, logprobs=k) for k in (None, 0, 3, 6)]
        outputs = llm.generate(PROMPTS[:4], asked, use_tqdm=False)
        assert outputs[0].outputs[0].logprobs is None
        entries = [
            (r, place, token, entry)
            for r, output in enumerate(outputs[1:])
            for place, found in enumerate(output.outputs[0].logprobs or ())
            for token, entry in found.items()
        ]
        return [(r, place, token, e.rank) for r, place, token, e in entries], [e.logprob for *_, e in entries]

    with model.engine() as plain:
        expected, values = listed(plain)
    llm, runner, _ = queued(model)
    with llm:
        for _ in range(2):
            found, own = listed(llm)
            assert found == expected
            np.testing.assert_allclose(own, values, atol=1e-5)
        assert not runner.host_steps and runner.graphs.counters.replayed > 0


def test_a_row_without_a_usable_maximum_shows_it() -> None:
    rows = torch.zeros(3, 600)
    rows[0, 5], rows[1, 7] = float("nan"), float("inf")
    rows[2] = float("-inf")
    ones = torch.ones(3)
    for mode in Mode:
        inputs = DrawInputs(ones, torch.zeros(3, dtype=torch.int32), ones * 0.9, ones * 0, ones.double() * 0.5)
        tokens, highest = draw(rows, inputs, mode)
        assert not highest.isfinite().any()
        assert ((tokens >= 0) & (tokens < 600)).all(), "the next step may look it up before anybody knows"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"temperature": 0.0}, None),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["x"], "seed": 3}, None),
        ({"presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1}, None),
        ({"logit_bias": {3: 1.0}, "allowed_token_ids": [1, 2]}, None),
        ({"logprobs": 2}, None),
        ({"min_tokens": 2}, None),
    ],
)
def test_what_is_drawn_on_the_host(given: dict[str, Any], why: str | None) -> None:
    start = SequenceStart(0, "r", 0, SamplingParams(**given), (1,), 1, seed=0, end_ids=(2,))
    assert why_not(start) == why
    banned = [replace(start, bad_word_ids=words) for words in (((3,), (4,)), ((3,), (4, 5)))]
    assert [why_not(s) for s in banned] == [why, "bad words"]
    pooled = SequenceStart(0, "r", 0, SamplingParams(), (1,), 1, seed=0, pooling=PoolingParams())
    assert why_not(pooled) == "pooling"


def test_parameters_stay_with_their_slot() -> None:
    params = DrawParameters(2)
    wanted = SamplingParams(temperature=0.5, top_k=9, top_p=0.8, min_p=0.2)
    params.set(0, SequenceStart(0, "r", 3, wanted, (1,), 1, seed=-1), 50)
    params.set(5, SequenceStart(1, "q", 0, SamplingParams(temperature=0), (1,), 1, seed=7), 50)
    assert (params.temperature[0], params.top_k[0], params.sample_index[0]) == (np.float32(0.5), 9, 3)
    assert params.mode[0] == Mode.FILTERED and params.mode[5] == Mode.GREEDY
    assert uniforms([int(params.seed[0])], [3], [11])[0] == uniforms([-1], [3], [11])[0]


# -- graphs ------------------------------------------------------------------------------------------------------------


def test_buckets_cover_every_batch_with_little_waste() -> None:
    sizes = buckets_up_to(256)
    assert sizes[0] == 1 and sizes[-1] == 256 and list(sizes) == sorted(set(sizes))
    assert buckets_up_to(1) == (1,) and buckets_up_to(3) == (1, 2, 3) and buckets_up_to(100)[-2:] == (96, 100)
    store = GraphStore(QueueDevice(), 256)
    waste = [store.bucket(n) - n for n in range(1, 257)]  # type: ignore[operator]
    assert min(waste) == 0 and max(waste) < 16 and store.bucket(257) is None


def test_a_shape_runs_once_then_is_recorded_then_replayed() -> None:
    device, calls = QueueDevice(), []
    store = GraphStore(device, 8)
    for _ in range(4):
        store.run(4, "greedy", lambda: calls.append("greedy"))
    store.run(4, "random", lambda: calls.append("random"))
    assert calls == ["greedy"] * 4 + ["random"]
    counters = store.counters
    assert (counters.eager, counters.recorded, counters.replayed) == (2, 1, 3)
    assert [g.replays for g in device.graphs] == [3] and counters.by_bucket == {4: 3}
    store.forget()
    store.run(4, "greedy", lambda: calls.append("again"))
    assert calls[-1] == "again" and len(device.graphs) == 2, "recorded anew, with what it reads now"


@pytest.mark.parametrize("reason", ["time", "memory", "refused"])
def test_recording_stops_and_says_why(reason: str, caplog: pytest.LogCaptureFixture) -> None:
    device = QueueDevice(free=(100 if reason == "memory" else 1000) << 20, fails=reason == "refused")
    now = iter(range(0, 1000, 3))
    store = GraphStore(device, 64, seconds=5.0, clock=lambda: float(next(now)))
    ran: list[int] = []
    for bucket in (1, 2, 4, 8):
        for _ in range(3):
            store.run(bucket, 0, lambda b=bucket: ran.append(b))  # type: ignore[misc]
    assert ran == [1, 1, 1, 2, 2, 2, 4, 4, 4, 8, 8, 8], "what is not recorded runs all the same"
    words = {"time": "6.0 s were spent", "memory": "100 MiB are free", "refused": "not permitted when stream"}[reason]
    assert words in store.counters.stopped and store.counters.recorded == (2 if reason == "time" else 0)
    assert sum("no more steps are recorded" in r.message for r in caplog.records) == 1


# -- whole engines -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("device"))


def answers(llm: LLM, **given: Any) -> list[list[list[int]]]:
    """Every second request is greedy, the others draw several seeded samples."""
    params = []
    for i in range(len(PROMPTS)):
        own = {"temperature": 0.9, "seed": i, "n": 1 + i % 3} if i % 2 else {"temperature": 0.0}
        params.append(SamplingParams(**{"max_tokens": 20 + i, "ignore_eos": True, **own, **given}))
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    view = llm.pool_view()
    assert (view.num_used, view.num_pending) == (0, 0)
    return [[c.token_ids for c in output.outputs] for output in outputs]


def queued(model: Model, **settings: Any) -> tuple[LLM, Any, QueueDevice]:
    with standing_in(QueueDevice()) as device:
        llm = model.engine(debug=True, **settings)
    runner: Any = llm._live().runner
    assert isinstance(runner, DeviceRunner)
    return llm, runner, device


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("settings", [{}, SMALL, {"max_num_batched_tokens": 9}], ids=["plain", "small", "chunks"])
def test_the_text_is_that_of_the_model_runner(overlap: bool, settings: dict[str, Any], model: Model) -> None:
    with model.engine() as plain:
        expected, filtered = answers(plain), answers(plain, top_p=0.9, top_k=20)
    llm, runner, device = queued(model, overlap=overlap, **settings)
    with llm:
        assert answers(llm) == expected and answers(llm, top_p=0.9, top_k=20) == filtered
        stats, counters = llm.stats(), runner.graphs.counters
        assert (stats.preemptions > 0) == (settings == SMALL) and not runner.host_steps
        assert (stats.overlapped_steps > 0) == overlap and not stats.overlap_waits
        assert counters.replayed > counters.eager > 0 and counters.recorded == len(device.graphs)
        surplus = runner._staging.num_copies - stats.steps
        assert surplus <= 0, "one copy to the device in a step, none in an empty one"
        assert runner.num_rows <= sum(map(len, expected)), "the last to end are forgotten with the next plan"


def test_eager_when_it_is_asked_for_or_cannot_be_otherwise(model: Model) -> None:
    with standing_in(QueueDevice()), model.engine(enforce_eager=True) as llm:
        assert llm._live().runner.graphs is None and llm.settings()["enforce_eager"]["why"].startswith("as asked")
        eager = answers(llm)
        pool = llm._live().runner.store.num_blocks
        assert pool == llm.config.num_blocks
    with standing_in(QueueDevice(), record=()), model.engine() as llm:
        line = llm.settings()["enforce_eager"]
        assert (line["asked"], line["chosen"]) == (False, True) and "looks at its tables on the host" in line["why"]
        assert answers(llm) == eager
    with standing_in(QueueDevice()), model.engine(speculative="ngram") as llm:
        assert not isinstance(llm._live().runner, DeviceRunner) and not llm.config.overlap
        assert answers(llm) == eager
    with standing_in(QueueDevice(fails=True)), model.engine() as llm:
        assert answers(llm) == eager
        assert "not permitted" in llm._live().runner.graphs.counters.stopped


def test_a_block_more_for_rows_that_are_nobodys(model: Model) -> None:
    """A batch of three runs as one of four; what the fourth row writes lands where no sequence reads."""
    llm, runner, _ = queued(model, num_blocks=40)
    with llm:
        assert runner.store.num_blocks == 41 and llm.pool_view().num_blocks == 40
        kv = runner.store.cache.kv
        llm.generate(PROMPTS[:3], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
        assert runner.graphs.counters.by_bucket.keys() == {4} and kv[40].any() and not kv[39].any()


@pytest.mark.parametrize("number", [9, 24, 29])
def test_fuzzed_engines(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers import fuzzing
    from helpers.tiny_models import write_tiny

    case = make_case(number)
    case.settings.pop("speculative", None)
    case.settings["overlap"] = "auto"
    write_tiny(case.family, tmp_path)
    oracle = plain_engine(tmp_path, "auto")
    build, runners = fuzzing.build, []

    def build_queued(*args: Any, **settings: Any) -> Any:
        with standing_in(QueueDevice()):
            engine = build(*args, **settings)
        runners.append(engine.runner)
        return engine

    monkeypatch.setattr(fuzzing, "build", build_queued)
    figures = run_case(case, tmp_path, "auto", oracle)
    assert figures["compared"] > 3 and figures["overlapped_steps"] == figures["steps"]
    assert all(r.graphs is not None and r._adjust.generation > 0 for r in runners), "penalties on the device"
    why = {reason for r in runners for reason in r.host_steps}
    assert why <= {"prompt logprobs", "beam search"}, "nothing else of a case depends on the host"
    oracle.close()


def test_a_broken_logit_ends_its_sequence_and_nobody_elses(model: Model) -> None:
    llm, runner, _ = queued(model, enforce_eager=True)
    decoder: Any = runner._decoder
    real, seen = decoder.logits, []

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        logits = real(hidden)
        seen.append(len(logits))
        if len(seen) == 4:
            logits[1, 3] = float("nan")
        return logits

    with llm:
        params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS[:3], params, use_tqdm=False)]
        decoder.logits = broken
        outputs = [o.outputs[0] for o in llm.generate(PROMPTS[:3], params, use_tqdm=False)]
        assert [o.finish_reason for o in outputs] == ["length", "error", "length"]
        assert "no usable maximum (nan)" in str(outputs[1].stop_reason)
        assert outputs[1].token_ids == expected[1][:3] and outputs[0].token_ids == expected[0]
        assert outputs[2].token_ids == expected[2]


def test_results_are_taken_in_order_and_only_once(model: Model) -> None:
    llm, runner, _ = queued(model)
    with llm:
        with pytest.raises(InternalError, match="no step is in flight"):
            runner.collect()
        runner.submit(StepPlan(7, ()))
        with pytest.raises(InternalError, match="1 steps are in flight"):
            runner.execute(StepPlan(8, ()))
        assert runner.collect().step_id == 7


# -- memory and devices ------------------------------------------------------------------------------------------------


def test_the_pool_is_what_the_card_leaves(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of the whole, minus what others hold, what the steps measured take, and what graphs are allowed."""
    gib, mib = 1 << 30, 1 << 20
    ran: list[int] = []

    def peak(self: QueueDevice, run: Any) -> int:
        run()
        ran.append(1)
        return (300, 40)[len(ran) % 2 == 0] * mib  # the largest step, then one token of each sequence

    monkeypatch.setattr(QueueDevice, "peak_bytes_of", peak)
    loaded = load_model(
        EngineConfig(model=str(model.path), skip_tokenizer_init=True), dtype=torch.float32, device="cpu", ops=TorchOps()
    )

    def build(free: int, share: float, eager: bool = False) -> tuple[int, str]:
        device: Any = QueueDevice(total=8 * gib, free=free)
        config = EngineConfig(
            model=str(model.path), gpu_memory_utilization=share, max_num_seqs=8, max_num_batched_tokens=16,
            max_model_len=16, enforce_eager=eager,
        )  # fmt: skip
        layout = layout_for(config, loaded.spec, 4)
        budget = measured_budget(config, loaded, layout, torch.float32, device, ReferenceAttention)
        return budget.bytes, budget.reason

    eager, why = build(6 * gib, 0.5, eager=True)
    assert eager == 2 * gib - 300 * mib
    assert "0.5 of 8.0 GiB, minus 2.00 GiB in use (2.00 GiB not by this engine) and 0.29 GiB for the largest" in why
    recorded, why = build(6 * gib, 0.5)
    assert recorded == eager - 40 * mib - 4 * ALLOWANCE and "0.07 GiB for graphs" in why  # sizes 1, 2, 4, 8
    assert build(3 * gib, 0.5)[0] == 0, "others hold more than the share"


def test_weights_that_do_not_fit_are_told_in_numbers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(builder, "load_model", full)
    device = QueueDevice(total=8 << 30, free=3 << 30)
    monkeypatch.setattr(device, "kind", "cuda", raising=False)
    expected = r"do not fit .*: 3\.00 of 8\.00 GiB were free.* quantization='int8'"
    with pytest.raises(ConfigError, match=expected), weights_must_fit(EngineConfig(), device):
        full()
    with standing_in(device), pytest.raises(ConfigError, match=expected):
        model.engine(num_blocks=8)


def test_a_card_that_is_too_small_says_what_would_fit() -> None:
    facts = Facts(4096, 1 << 20, 1, lambda length: -(-length // 16), lambda blocks: 16 * blocks, "cuda", "bfloat16",
                  100 << 20, "what the card leaves")  # fmt: skip
    with pytest.raises(ConfigError) as error:
        resolve(EngineConfig(max_model_len=4096), facts)
    words = str(error.value)
    assert "needs 256 blocks (256.0 MiB), the pool has 100 (100.0 MiB). Longest length that fits: 1600" in words
    assert "raise num_blocks or gpu_memory_utilization" in words
    assert resolve(EngineConfig(), facts).config.max_model_len == 1600


def test_names_of_devices() -> None:
    assert find_device("cpu").kind == "cpu" and device_of(torch.device("cpu")).kind == "cpu"
    device = CpuDevice()
    assert device_of(device) is device
    for wrong in ("gpu", "cpu:1", "cuda:x"):
        with pytest.raises(ConfigError, match=f"device='{wrong}': must be auto, cpu, cuda or npu"):
            find_device(wrong)
    with pytest.raises(RuntimeError, match="no graphs"):
        device.capture(lambda: None)
    with device.use(device.stream()):
        event = device.event()
        event.record()
        event.synchronize()
        assert event.query() and device.pinned((2, 3), torch.float16).shape == (2, 3)


def test_cards_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2), ("get_device_name", "a card")):
        monkeypatch.setattr(torch.cuda, name, lambda *where, value=value: value)
    card = find_device("cuda:1")
    assert isinstance(card, CudaDevice) and card.torch == torch.device("cuda", 1) and card.name == "a card"
    assert find_device("auto").kind == "cuda"
    with pytest.raises(ConfigError, match=r"device='cuda:2': torch sees 2 CUDA device\(s\), numbered from 0"):
        find_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert not card.supports_float8()


def test_weights_pass_through_buffers_of_any_size() -> None:
    class Files(dict[str, torch.Tensor]):
        def stored(self, name: str) -> str:
            return f"rows of {name}"

    files = Files(
        a=torch.randn(1000, 37), b=torch.randn(5, dtype=torch.bfloat16), c=torch.randn(4, 6).t(), d=torch.empty(0, 3),
        e=torch.arange(5000, dtype=torch.int8),
    )  # fmt: skip
    device = QueueDevice()
    staged = StagedWeights(files, device, chunk_bytes=4096)
    for name in staged:
        assert torch.equal(staged[name], files[name]) and staged[name].dtype == files[name].dtype
    assert len(staged) == 5 and staged.stored("a") == "rows of a" and device.pinned_bytes == 2 * 4096


def test_only_devices_ask_torch_about_accelerators() -> None:
    source = Path(sys.modules["octavo"].__file__ or "").parent
    allowed = {"devices.py", "npu_device.py"}
    found = [
        f"{path.relative_to(source)}:{number}"
        for path in sorted(source.rglob("*.py"))
        if path.name not in allowed
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if "torch.cuda." in line and not line.lstrip().startswith("#")
    ]
    assert not found, "ask a Device instead"


def test_stale_inputs_would_be_noticed(model: Model) -> None:
    """The stand-in's own proof: a graph that kept old inputs would give other text."""
    llm, runner, _ = queued(model)
    send = runner._staging.send
    runner._staging.send = lambda arrays: [t.clone() for t in send(arrays)]
    with llm:
        stale = answers(llm)
    with model.engine() as plain:
        assert answers(plain) != stale
