"""Speculative decoding in the whole engine: every answer is the one without it, and what it saves is counted.

Tiny random models say much the same again and again, so n-grams come true often; the "draft" is the model itself (all
guesses right), another of its family (few right), or another shape (another block geometry in the same pool).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo.config import make_config
from octavo.core.kv_layout import build_layout
from octavo.core.kv_sharing import share_pool
from octavo.core.record import replay
from octavo.core.settings import SpeculationSettings
from octavo.core.speculation import Speculator
from octavo.engine import Engine, EngineStats
from octavo.errors import ConfigError, ModelError, SamplingError
from octavo.outputs import RequestOutput
from octavo.runner.model_runner import ModelRunner
from octavo.runner.row_costs import measure_row_costs
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.vllm_names import config_from

LONGEST = 128


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """name -> directory."""
    folder = tmp_path_factory.mktemp("models")
    shapes: dict[str, tuple[str, dict[str, Any], int]] = {
        "gemma3": ("gemma3", {}, 0),
        "gemma3-other": ("gemma3", {}, 1),
        "gemma3-small": ("gemma3", {"num_hidden_layers": 2, "num_key_value_heads": 1}, 0),
        "gemma3-odd": ("gemma3", {"num_hidden_layers": 3, "head_dim": 48}, 0),
        "llama": ("llama", {}, 0),
        "more-words": ("llama", {"vocab_size": 352}, 0),
    }
    for name, (family, settings, seed) in shapes.items():
        write_tiny(family, folder / name, seed=seed, **settings)
    return {name: str(folder / name) for name in shapes}


def build(model: str, **settings: Any) -> Engine:
    """An engine in float32 that audits after every step; guesses cost nothing, so that as many as may be are made."""
    given = {
        "dtype": "float32",
        "device": "cpu",
        "max_model_len": LONGEST,
        "num_blocks": 300,
        "debug": True,
        **settings,
    }
    engine = Engine.build(make_config(model=model, **given))
    speculator = engine.scheduler.speculator
    if speculator is not None:
        free = replace(speculator.settings, row_costs=(), draft_costs=())
        engine.scheduler.speculator = Speculator(free, engine.scheduler.memory)
    return engine


def run(engine: Engine, asks: list[tuple[list[int], Any]], together: bool = True) -> list[RequestOutput]:
    last: dict[str, RequestOutput] = {}
    for number, (prompt, params) in enumerate(asks):
        engine.add_request(f"r{number}", prompt, params)
        while not together and engine.has_unfinished():
            last.update((o.request_id, o) for o in engine.step())
    while engine.has_unfinished():
        last.update((o.request_id, o) for o in engine.step())
    view = engine.pool_view()
    assert view.num_used == view.num_pending == 0
    return [last[f"r{n}"] for n in range(len(asks))]


def told(outputs: list[RequestOutput]) -> list[Any]:
    return [
        [(o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, o.cumulative_logprob) for o in r.outputs]
        for r in outputs
    ]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Half of them say something twice."""
    draw = random.Random(seed)
    result = []
    for i in range(count):
        words = [draw.randrange(32, 250) for _ in range(draw.randrange(2, 25))]
        result.append([*words, *words] if i % 2 else words)
    return result


FIFTY: list[tuple[list[int], Any]] = [
    (p, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)) for p in prompts(50)
]


@pytest.fixture(scope="module")
def plain_greedy(models: dict[str, str]) -> tuple[list[Any], EngineStats]:
    """What is said on the fifty prompts without guesses, and the counters of that run."""
    engine = build(models["gemma3"], debug=False)
    return told(run(engine, FIFTY)), engine.stats()


WAYS = ["ngram", "draft:gemma3:4", "draft:gemma3-other:3", "draft:gemma3-small:2", "draft:gemma3-odd:3"]


def setting(way: str, models: dict[str, str]) -> Any:
    method, _, rest = way.partition(":")
    name, _, count = rest.partition(":")
    if method == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1}
    return f"draft:{models[name]}:{count}"


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_equal_on_fifty_prompts(models: dict[str, str], plain_greedy: Any, way: str) -> None:
    guessing = build(models["gemma3"], speculative=setting(way, models))
    expected, without = plain_greedy
    assert told(run(guessing, FIFTY)) == expected
    stats = guessing.stats()
    assert stats.spec_draft_tokens >= stats.spec_accepted_tokens == sum(stats.spec_accepted_tokens_per_pos)
    assert stats.spec_draft_tokens == sum(stats.spec_draft_tokens_per_pos)
    assert stats.generated_tokens == without.generated_tokens
    if way == "draft:gemma3:4":
        # The model guesses itself: all of the guesses come true but those cut off by the length limit.
        assert stats.spec_accepted_tokens == stats.spec_draft_tokens
        assert stats.steps < 0.7 * without.steps
    if way == "ngram":
        assert stats.spec_accepted_tokens > 20


@pytest.mark.parametrize("way", WAYS[:3])
def test_sampling_with_everything_draws_the_very_same(models: dict[str, str], way: str) -> None:
    """Penalties, bans, bias, stops, ends, n, logprobs, seeds: token for token what is drawn without guesses."""
    everything: list[dict[str, Any]] = [
        {"temperature": 0.8, "n": 3, "logprobs": 2},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.3, "min_tokens": 6},
        {"temperature": 0, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 0},
        {"temperature": 0.3, "stop": ["e", "th", "1"], "include_stop_str_in_output": True},
        {"temperature": 0.5, "bad_words": ["ab", "q"], "logit_bias": {40: 2.0, 41: -9.0}},
        {"temperature": 0.7, "allowed_token_ids": list(range(60, 70)), "n": 2, "best_of": 3},
        {"temperature": 0, "stop_token_ids": list(range(0, 256, 5)), "min_tokens": 3},
        {"temperature": 0.1, "min_p": 0.2, "prompt_logprobs": 1, "logprobs": 1},
    ]
    asks = [
        (p, SamplingParams(max_tokens=14, seed=i, **everything[i % len(everything)]))
        for i, p in enumerate(prompts(16, seed=1))
    ]
    plain, guessing = build(models["gemma3"]), build(models["gemma3"], speculative=setting(way, models))
    expected = told(run(plain, asks))
    assert told(run(guessing, asks)) == expected
    assert guessing.stats().spec_accepted_tokens > 0
    if way == "ngram":
        assert told(run(guessing, asks, together=False)) == expected, "alone, over a warm prefix cache"


@pytest.mark.parametrize("way", [WAYS[0], WAYS[1], WAYS[3]])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_nearly_full_pool(models: dict[str, str], way: str, preemption: str, tmp_path: Path) -> None:
    """Preempted again and again, cached and swapped: same answers, audited each step, and the recording replays."""
    asks = [
        (p, SamplingParams(temperature=0.4 * (i % 2), seed=i, max_tokens=40, ignore_eos=True))
        for i, p in enumerate(prompts(12, seed=2))
    ]
    swap = {"swap_bytes": 1 << 22} if preemption == "swap" else {}
    record = str(tmp_path / "run")
    blocks = 55 if way == "ngram" else 85
    tight = build(
        models["gemma3"], speculative=setting(way, models), num_blocks=blocks, block_size=4, max_model_len=96,
        preemption=preemption, record=record, **swap,
    )  # fmt: skip
    expected = told(run(build(models["gemma3"]), asks))
    assert told(run(tight, asks)) == expected
    stats = tight.stats()
    assert stats.preemptions > 0 and stats.spec_accepted_tokens > 0
    assert (stats.swaps > 0) == (preemption == "swap")
    tight.close()
    header = Path(record).read_text().split("\n", 1)
    assert '"speculation":{"method"' in header[0]


def test_a_recording_of_measured_costs_replays(models: dict[str, str], tmp_path: Path) -> None:
    record = str(tmp_path / "run")
    engine = Engine.build(
        make_config(
            model=models["llama"], dtype="float32", num_blocks=99, max_model_len=96, speculative="ngram", record=record
        )
    )
    run(engine, [(p, SamplingParams(temperature=0, max_tokens=30)) for p in prompts(8)])
    engine.close()
    assert (report := replay(record)).same, str(report)


def test_sampled_tokens_have_the_model_s_distribution(models: dict[str, str]) -> None:
    """Chi-square of the third token over many seeds, against the same engine without guesses and other seeds."""
    prompt = prompts(2)[1]

    def third(engine: Engine, first_seed: int) -> Counter[int]:
        asks = [
            (prompt, SamplingParams(temperature=1.0, top_k=6, max_tokens=4, ignore_eos=True, seed=first_seed + i))
            for i in range(500)
        ]
        return Counter(r.outputs[0].token_ids[2] for r in run(engine, asks))

    guessing = build(models["gemma3"], speculative=setting(WAYS[1], models), debug=False)
    ours = third(guessing, 0)
    theirs = third(build(models["gemma3"], debug=False), 10_000)
    assert guessing.stats().spec_accepted_tokens > 300
    rare = {t for t in {*ours, *theirs} if ours[t] + theirs[t] < 20}
    cells = [(ours[t], theirs[t]) for t in {*ours, *theirs} - rare]
    cells.append((sum(ours[t] for t in rare), sum(theirs[t] for t in rare)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells if a + b)
    freedom = len(cells) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom, cells)


def test_grammars_hold_behind_guesses(models: dict[str, str]) -> None:
    pytest.importorskip("llguidance")
    asks: list[tuple[list[int], Any]] = []
    for i, p in enumerate(prompts(6, seed=3)):
        shape = [{"regex": "(ab|cd){3,9}x"}, {"choice": ["yes yes yes", "no no no no"]}][i % 2]
        asks.append((p, SamplingParams(temperature=0.5 * (i % 3), seed=i, max_tokens=40, structured_outputs=shape)))
    plain = build(models["gemma3"])
    expected = told(run(plain, asks))
    for way in (WAYS[0], WAYS[1]):
        guessing = build(models["gemma3"], speculative=setting(way, models))
        assert told(run(guessing, asks)) == expected
        assert guessing.stats().spec_draft_tokens > 0


def test_static_allocation_and_one_table_for_all_layers(models: dict[str, str]) -> None:
    asks = [(p, SamplingParams(temperature=0, max_tokens=20)) for p in prompts(8)]
    expected = told(run(build(models["gemma3"]), asks))
    for more in ({"allocation": "static"}, {"hybrid_kv": False}, {"copy_on_write": False}, {"block_size": 1}):
        assert told(run(build(models["gemma3"], speculative="ngram", num_blocks=800, **more), asks)) == expected
    together = build(models["gemma3"], speculative=setting(WAYS[1], models), hybrid_kv=False)
    assert told(run(together, asks)) == expected


@pytest.mark.parametrize("kv", ["int8", "int8,int4"])
def test_over_quantised_keys_and_values(models: dict[str, str], kv: str) -> None:
    asks = [(p, SamplingParams(temperature=0.5 * (i % 2), seed=i, max_tokens=16)) for i, p in enumerate(prompts(12))]
    plain, guessing = (build(models["gemma3"], kv_cache_dtype=kv, **more) for more in ({}, {"speculative": "ngram"}))
    assert told(run(guessing, asks)) == told(run(plain, asks))
    assert guessing.stats().spec_accepted_tokens > 0


def test_tokens_behind_a_stop_string_do_not_count(models: dict[str, str]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, stop=["e", "a", "t"], ignore_eos=True)
    asks = [(p, params) for p in prompts(12, seed=5)]
    plain, guessing = build(models["gemma3"]), build(models["gemma3"], speculative=setting(WAYS[1], models))
    for engine in (plain, guessing):
        run(engine, asks)
    for number in range(len(asks)):
        mine, theirs = guessing.explain(f"r{number}"), plain.explain(f"r{number}")
        assert (mine.output_tokens, mine.finish_reasons) == (theirs.output_tokens, theirs.finish_reasons)
    assert guessing.stats().generated_tokens == plain.stats().generated_tokens


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_measured_and_reported(models: dict[str, str]) -> None:
    engine = Engine.build(make_config(model=models["gemma3"], num_blocks=200, max_model_len=96, speculative="ngram:3"))
    measured = engine.scheduler.settings.speculation
    assert isinstance(measured, SpeculationSettings)
    assert measured.num_tokens == 3 and measured.row_costs[0][0] == 1 and all(t > 0 for _, t in measured.row_costs)
    report = engine.settings()["speculative"]
    assert report["chosen"] == {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
    }  # fmt: skip
    assert report["why"].startswith("measured: a step of 1 rows")
    assert "spec_drafts" in vars(type(engine.stats()))["__dataclass_fields__"]


def test_the_report_says_how_a_draft_shares_the_pool(models: dict[str, str]) -> None:
    engine = build(models["gemma3"], speculative=setting(WAYS[3], models))
    assert "one pool: a block of" in engine.settings()["speculative"]["why"]
    assert engine.scheduler.settings.speculation is not None
    assert engine.scheduler.settings.speculation.draft_costs[0][1] > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("magic", "method 'magic' is not known; methods are ngram and draft"),
        ("ngram:0", "num_speculative_tokens=0 must be a whole number from 1 to 64"),
        ("ngram:many", "'ngram:many': write"),
        ("ngram:", "'ngram:': write"),
        ({"method": "draft", "model": "x", "quantization": "int99"}, "speculative: the draft's quantization='int99'"),
        ("draft", 'needs "model"'),
        ({"method": "ngram", "model": "x"}, "model has no effect with method 'ngram'"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "exceeds prompt_lookup_max=4"),
        ({"method": "draft", "model": "x", "prompt_lookup_min": 2}, "prompt_lookup_min has no effect"),
        ("{broken", "not JSON"),
        (7, "speculative=7: write"),
    ],
)
def test_what_cannot_be_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_config(speculative=given)
    assert message in str(error.value)


def test_forms_that_mean_the_same() -> None:
    assert make_config(speculative="ngram:5") == make_config(
        speculative={"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    )
    assert make_config(speculative="draft:a/b:c:4") == make_config(
        speculative='{"model": "a/b:c", "num_speculative_tokens": 4}'
    )


def test_the_name_that_vllm_uses() -> None:
    asked = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
    assert config_from(speculative_config=asked) == make_config(speculative=asked)
    with pytest.raises(ConfigError, match="are the same setting"):
        config_from(speculative_config=asked, speculative="ngram")


def test_costs_are_measured_on_an_idle_pool_and_leave_nothing(models: dict[str, str]) -> None:
    engine = build(models["gemma3"], speculative=setting(WAYS[1], models), max_num_seqs=4)
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    assert runner.num_rows == 0 and not runner.store.cache.kv.any()
    settings = engine.scheduler.settings.speculation
    assert settings is not None
    rows = [r for r, _ in settings.row_costs]
    assert rows == sorted(set(rows)) and rows[0] == 1 and 5 in rows and rows[-1] == 20
    alone = ModelRunner(
        runner._decoder, runner.store, runner._backend, max_num_seqs=1, max_model_len=64, max_num_batched_tokens=64,
        vocab_size=320,
    )  # fmt: skip
    few = measure_row_costs(alone, runner.store.cache.layout, alone=3, most=40, budget=0.0)
    assert [r for r, _ in few] == [1, 3, 32], "no time: one row, all guesses, a crowd"


def test_a_draft_that_is_not_there_is_named_as_the_draft(models: dict[str, str]) -> None:
    with pytest.raises(ModelError, match="speculative: the draft: model 'nope'"):
        build(models["gemma3"], speculative="draft:nope:3")


def test_drafts_that_do_not_fit_are_refused(models: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"has 352 tokens in its vocabulary, the model 320"):
        build(models["llama"], speculative=f"draft:{models['more-words']}")
    with pytest.raises(ConfigError, match=r"a draft model needs allocation='paged'"):
        build(models["llama"], speculative=f"draft:{models['llama']}", allocation="static")
    with pytest.raises(ConfigError, match=r"cannot share blocks of kv_cache_dtype='int8'"):
        build(models["llama"], speculative=f"draft:{models['llama']}", kv_cache_dtype="int8")
    layout = build_layout((None,), block_size=16, bytes_per_token_layer=512)
    with pytest.raises(ConfigError, match=r"do not fit the model's blocks of 1 layers of 512 bytes"):
        share_pool(layout, (None,), 1536)


def test_geometry_of_two_models_in_one_pool() -> None:
    target = build_layout((8, 8, None), block_size=4, bytes_per_token_layer=96)
    pool = share_pool(target, (None, None, 8, None), 64)
    assert pool.target.bytes_per_block == pool.draft.bytes_per_block == pool.whole.bytes_per_block
    assert [len(g.layers) for g in pool.draft.groups] == [3, 1]
    assert pool.whole.groups[: target.num_groups] == target.groups
    layers = [layer for g in pool.whole.groups for layer in g.layers]
    assert sorted(layers) == list(range(7))


def test_beams_are_refused_at_the_door(models: dict[str, str]) -> None:
    engine = build(models["llama"], speculative="ngram")
    with pytest.raises(SamplingError, match=r"beam search cannot run with speculative decoding"):
        engine.add_request("b", [1, 2, 3], BeamSearchParams(beam_width=2))
    assert not engine.has_unfinished()
