"""Failures seen in public in engines of this kind, one test per numbered kind, on tiny models through the whole engine.

The numbers are those of the project's list of failure kinds, A to K. The oracle is the same request alone on an engine
that shares nothing, and an empty pool at the end. Parts that need a server (closed connections of 20, HTTP answers of
17 and 29, scraping of 22, tool calls of 27, echo of 8 and 32) belong to the server's tests.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fuzzing import Ask, compare, plain_engine, run_alone
from helpers.oracle import Model, assert_greedy, beams, greedy, logprobs_of, random_ids, tiny
from helpers.tiny_models import write_tokenizer
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.core.prefix_cache import PrefixCache
from octavo.engine import Engine
from octavo.errors import AuditError, CapacityError, ConfigError, PromptError, RequestError, SamplingError
from octavo.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("failures")


@pytest.fixture(scope="module")
def model(root: Path) -> Model:
    return tiny("llama", root)


@pytest.fixture(scope="module")
def windowed(root: Path) -> Model:
    return tiny("gemma3", root)


@pytest.fixture(scope="module")
def oracle(model: Model) -> Engine:
    return plain_engine(model.path, "auto")


def check_empty(llm: LLM) -> None:
    llm.audit()
    view = llm.pool_view()
    assert (view.num_used, view.num_pending, view.num_running, view.num_waiting) == (0, 0, 0, 0)
    assert view.num_free + view.num_cached == view.num_blocks


def generate(llm: LLM, prompts: list[list[int]], params: Any = GREEDY) -> list[RequestOutput]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    check_empty(llm)
    return outputs


def assert_solo(oracle: Engine, prompt: list[int], params: Any, output: RequestOutput) -> None:
    ask = Ask("solo", prompt, params, 0, None)
    assert compare(ask, output, run_alone(oracle, ask)) == ""


def engine_of(llm: LLM) -> Engine:
    assert llm._engine is not None
    return llm._engine


# -- A. prefix cache ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_kind_01_whole_prompt_cached(length: int, model: Model, oracle: Engine) -> None:
    with model.engine(max_model_len=128) as llm:
        first, second = (generate(llm, [random_ids(length, 1)])[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.num_cached_tokens == length - 1, "at least one token is always computed"
    assert_solo(oracle, random_ids(length, 1), GREEDY, first)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_kind_03_stale_counters_after_a_hit_or_a_preemption(preemption: str, model: Model, oracle: Engine) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    prompts = [random_ids(40, 1) + random_ids(4, seed) for seed in range(4)]
    with model.engine(max_model_len=96, num_blocks=12, preemption=preemption) as llm:
        outputs = generate(llm, prompts, params)
        assert engine_of(llm).stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_solo(oracle, prompt, params, output)


def test_kind_04_a_found_block_is_not_handed_out(model: Model, oracle: Engine) -> None:
    """The pool is one block larger than the request needs; it finds three and takes one."""
    prompt = random_ids(48, 1)
    with model.engine(max_model_len=64, num_blocks=5) as llm:
        generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=2))
        engine = engine_of(llm)
        engine.add_request("again", [*prompt, 7], GREEDY_SHORT)
        engine.step()
        (tables,) = llm.pool_view().block_tables.values()
        assert len(set(tables[0])) == len(tables[0]) == 4
        output = engine.step()[0]
        while engine.has_unfinished():
            output = engine.step()[0]
        assert output.num_cached_tokens == 48
        check_empty(llm)
    assert_solo(oracle, [*prompt, 7], GREEDY_SHORT, output)


GREEDY_SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_kind_06_hashes_that_collide(model: Model, oracle: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "block_key", lambda self, parent, tokens: b"0" * 16)
    prompts = [[*random_ids(33, seed % 4), seed] for seed in range(8)] + [
        [5] * 40,
        [5] * 64,
        random_ids(16, 1) + [5] * 33,
    ]
    with model.engine(max_model_len=128) as llm:
        for prompt in [*prompts, *prompts[::-1]]:
            assert_solo(oracle, prompt, GREEDY_SHORT, generate(llm, [prompt], GREEDY_SHORT)[0])


def test_kind_08_prompt_logprobs_of_a_cached_prompt(model: Model) -> None:
    prompt = random_ids(40, 3)
    with model.engine(max_model_len=128) as llm:
        one, none, again = (
            generate(llm, [prompt], SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=k))[0]
            for k in (1, None, 1)
        )
    assert none.prompt_logprobs is None and none.num_cached_tokens == 32
    assert one.prompt_logprobs is not None and len(one.prompt_logprobs) == 40 and one.prompt_logprobs[0] is None
    assert one.prompt_logprobs == again.prompt_logprobs and again.num_cached_tokens == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_kind_09_the_cache_changes_nothing(preemption: str, model: Model, oracle: Engine) -> None:
    """Thirty prompts from five shared prefixes, a third of them aborted at random, in a pool that is short."""
    draw = random.Random(5)
    prompts = [random_ids(36, seed % 5) + random_ids(1 + seed % 7, seed) for seed in range(30)]
    last: dict[str, RequestOutput] = {}
    with model.engine(max_model_len=80, num_blocks=14, preemption=preemption, max_num_batched_tokens=40) as llm:
        engine = engine_of(llm)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, GREEDY)
        while engine.has_unfinished():
            for output in engine.step():
                last[output.request_id] = output
            if draw.random() < 0.2:
                engine.abort(str(draw.randrange(30)))
        check_empty(llm)
        stats = engine.stats()
        assert stats.preemptions > 0 and stats.prefix_hit_tokens > 0
    reasons = [last[str(i)].outputs[0].finish_reason for i in range(30)]
    assert 5 < reasons.count("abort") < 25
    for i, prompt in enumerate(prompts):
        assert_solo(oracle, prompt, GREEDY, last[str(i)])


def test_kind_11_a_prompt_larger_than_the_pool_says_so(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=256 tokens needs 16 blocks .* the pool has 8 .*fits: 128"):
        model.engine(max_model_len=256, num_blocks=8)
    with model.engine(num_blocks=8) as llm:
        with pytest.raises(PromptError, match="200 tokens; max_model_len=128"):
            llm.generate([random_ids(200, 1)], GREEDY, use_tqdm=False)
        with pytest.raises(CapacityError, match=r"120 tokens, .* 4 sequence\(s\) need 11 blocks of 16, the pool has 8"):
            llm.generate([random_ids(120, 1)], SamplingParams(n=4, max_tokens=8), use_tqdm=False)
        generate(llm, [random_ids(100, 1)])


# -- B. sliding window -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("chunk", [5, 512])
def test_kind_13_window_edges(backend: str, chunk: int, root: Path) -> None:
    """A window of 8: a token sees itself and the seven before it, at positions 7, 8, 9, 40 and everywhere else."""
    model = tiny("mistral", root / "window8", sliding_window=8)
    prompt = random_ids(42, 1)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    settings = {"attention_backend": backend, "max_num_batched_tokens": chunk, "block_size": 4}
    with model.engine(max_model_len=128, **settings) as llm:
        output = generate(llm, [prompt], params)[0]
    answer = output.outputs[0].token_ids
    right = logprobs_of(model.oracle, prompt + answer)
    assert output.prompt_logprobs is not None
    for at in (7, 8, 9, 40, *range(1, 42)):
        entry = output.prompt_logprobs[at]
        assert entry is not None and entry[prompt[at]].logprob == pytest.approx(
            float(right[at - 1, prompt[at]]), abs=1e-4
        )
    assert_greedy(model.oracle, prompt, answer)


def test_kind_13_a_window_value_that_no_layer_uses(root: Path) -> None:
    model = tiny("qwen2", root / "unused", use_sliding_window=False, sliding_window=8, max_window_layers=0)
    with model.engine(max_model_len=128) as llm:
        assert llm.pool_view().windows == (None,)
        output = generate(llm, [random_ids(40, 1)])[0]
    assert_greedy(model.oracle, random_ids(40, 1), output.outputs[0].token_ids)


# -- C. samples and seeds ----------------------------------------------------------------------------------------


def test_kind_14_seeds(model: Model) -> None:
    prompt = random_ids(20, 1)
    seeded = SamplingParams(n=4, seed=1, max_tokens=12, ignore_eos=True)
    fresh = SamplingParams(n=2, max_tokens=12, ignore_eos=True)
    with model.engine(max_model_len=128) as llm:
        first, second = (generate(llm, [prompt], seeded)[0] for _ in range(2))
        others = [random_ids(9, seed) for seed in range(7)]
        among = generate(llm, [*others[:3], prompt, *others[3:]], [fresh] * 3 + [seeded] + [fresh] * 4)[3]
        unseeded = generate(llm, [prompt, prompt], fresh)
    answers = [[o.token_ids for o in x.outputs] for x in (first, second, among)]
    assert len({tuple(a) for a in answers[0]}) == 4 and answers[0] == answers[1] == answers[2]
    assert len({tuple(o.token_ids) for x in unseeded for o in x.outputs}) == 4


@pytest.mark.parametrize("when", [0, 1, 3])
def test_kind_16_abort_of_many_samples(when: int, model: Model) -> None:
    with model.engine(max_model_len=128) as llm:
        engine, before = engine_of(llm), llm.pool_view().num_free
        engine.add_request("r", random_ids(40, 1), SamplingParams(n=8, seed=1, max_tokens=40, ignore_eos=True))
        for _ in range(when):
            engine.step()
        assert engine.abort("r") and not engine.abort("r") and not engine.abort("r", 3)
        view = llm.pool_view()
        assert view.num_free + view.num_cached == before and view.num_used == 0
        (output,) = engine.step()
        assert output.finished and [o.finish_reason for o in output.outputs] == ["abort"] * 8
        assert engine.step() == [] and not engine.has_unfinished()
        generate(llm, [random_ids(40, 1)])


def test_kind_17_huge_n(model: Model) -> None:
    for n in (1_000_000, 257, 0, -1):
        with pytest.raises(SamplingError, match=f"n={n}"):
            SamplingParams(n=n)
    with model.engine(max_model_len=128, max_num_seqs=16) as llm:
        with pytest.raises(SamplingError, match=r"=17 exceeds max_num_seqs=16"):
            llm.generate([[1]], SamplingParams(n=17), use_tqdm=False)
        assert llm.pool_view().peak_used == 0
        check_empty(llm)


# -- D. beams ----------------------------------------------------------------------------------------------------


def test_kind_19_beams(model: Model) -> None:
    prompt = random_ids(20, 4)
    with model.engine(max_model_len=128) as llm:
        for width, count, ends in ((3, 20, []), (3, 20, [17, 44]), (1, 20, []), (3, 1, [])):
            params = BeamSearchParams(beam_width=width, max_tokens=count, stop_token_ids=ends, ignore_eos=True)
            (found,) = llm.beam_search([prompt], params)
            right = beams(model.oracle, prompt, width, max_tokens=count, end_ids=ends)
            assert [b.token_ids for b in found.sequences] == [b.token_ids for b in right]
            assert [b.score for b in found.sequences] == pytest.approx([b.score for b in right], abs=1e-4)
            check_empty(llm)
            if width == 1:
                assert found.sequences[0].token_ids == greedy(model.oracle, prompt, count)


# -- E. aborts and leaks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_kind_20_abort_in_every_state(preemption: str, model: Model, oracle: Engine) -> None:
    """Sixty requests, each left after 0 to 5 of its tokens, by streams and by aborts; the rest must not notice."""
    draw = random.Random(3)
    last: dict[str, RequestOutput] = {}
    with model.engine(max_model_len=80, num_blocks=16, preemption=preemption, max_num_batched_tokens=24) as llm:
        engine = engine_of(llm)
        patience = {str(i): draw.randrange(6) for i in range(60)}
        prompts = {name: random_ids(draw.randrange(1, 50), int(name)) for name in patience}
        for name, prompt in prompts.items():
            n = 1 + int(name) % 3
            engine.add_request(name, prompt, SamplingParams(n=n, seed=1, max_tokens=30, ignore_eos=True))
        for name in list(patience)[::7]:
            patience[name] = 99  # these stay
        while engine.has_unfinished():
            for output in engine.step():
                last[output.request_id] = output
                if max(len(o.token_ids) for o in output.outputs) >= patience[output.request_id]:
                    engine.abort(output.request_id)
            if draw.random() < 0.1:
                engine.abort(draw.choice([n for n in patience if patience[n] < 99]))
        assert engine.stats().preemptions > 0
        check_empty(llm)
    for name in list(patience)[::7]:
        params = SamplingParams(n=1 + int(name) % 3, seed=1, max_tokens=30, ignore_eos=True)
        assert_solo(oracle, prompts[name], params, last[name])


def test_kind_20_closed_streams(model: Model) -> None:
    with model.engine(max_model_len=128) as llm:
        for count in range(4):
            with llm.stream(random_ids(30, count), GREEDY) as stream:
                for _ in range(count):
                    next(stream)
            check_empty(llm)


def test_kind_22_gauges_are_of_now(model: Model) -> None:
    with model.engine(max_model_len=128) as llm:
        engine = engine_of(llm)
        engine.add_request("r", random_ids(30, 1), GREEDY)
        engine.add_request("s", random_ids(30, 2), GREEDY)
        engine.step()
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (2, 0) and stats.usage > 0
        engine.abort("r")
        engine.abort("s")
        stats = engine.stats()  # no step in between
        assert (stats.running, stats.waiting, stats.usage, stats.aborted) == (0, 0, 0.0, 2)
        assert engine.has_unfinished(), "their last outputs are still to come"
        assert {o.request_id for o in engine.step()} == {"r", "s"} and not engine.has_unfinished()
        engine.add_request("r", random_ids(30, 1), GREEDY)  # the name is free again
        engine.abort("r")
        engine.add_request("r", random_ids(30, 1), GREEDY)
        finished = [o.outputs[0].finish_reason for _ in range(21) for o in engine.step() if o.finished]
        assert finished == ["abort", "length"]
        check_empty(llm)


@pytest.mark.parametrize("caching", [False, True])
def test_kind_20_a_leaked_block_is_taken_back_when_idle(
    caching: bool, model: Model, oracle: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with model.engine(max_model_len=128, num_blocks=20, enable_prefix_caching=caching, debug=False) as llm:
        engine = engine_of(llm)
        pool = engine.scheduler.memory.pool
        lost = [pool.take(), pool.take()]
        with caplog.at_level("ERROR", logger="octavo"):
            output = generate(llm, [random_ids(30, 1)])[0]
        assert f"2 blocks leaked and were taken back, the first is block {lost[0]}" in caplog.text
        assert engine.stats().leaks_repaired == 2 and llm.pool_view().num_used == 0
        assert_solo(oracle, random_ids(30, 1), GREEDY, output)
        assert_solo(oracle, random_ids(30, 1), GREEDY, generate(llm, [random_ids(30, 1)])[0])
        assert engine.stats().leaks_repaired == 2


def test_kind_20_debug_pinpoints_the_first_bad_block(model: Model) -> None:
    with model.engine(max_model_len=128, num_blocks=20, debug=True) as llm:
        engine = engine_of(llm)
        engine.add_request("r", random_ids(30, 1), GREEDY)
        engine.step()
        engine.scheduler.memory.pool.count_up(1)
        with pytest.raises(AuditError, match="block 1: count is 2, but 1 tables hold it"):
            engine.step()


# -- F. preemption -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0},
        {"seed": 5},
        {"seed": 5, "presence_penalty": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.4},
        {"temperature": 0, "repetition_penalty": 1.5, "logprobs": 2, "min_tokens": 40},
    ],
)
def test_kind_23_text_after_preemption(preemption: str, given: dict[str, Any], model: Model, oracle: Engine) -> None:
    params = SamplingParams(**{"max_tokens": 60, "ignore_eos": True, **given})
    prompts = [random_ids(20, seed) for seed in range(4)]
    shown: dict[str, int] = {}
    with model.engine(max_model_len=96, num_blocks=10, preemption=preemption) as llm:
        engine = engine_of(llm)
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            for output in engine.step():
                count = len(output.outputs[0].token_ids)
                assert count == shown.get(output.request_id, 0) + 1, "each token is sent once"
                shown[output.request_id] = count
                last[output.request_id] = output
        stats = engine.stats()
        assert stats.preemptions > 0 and (stats.swaps > 0) == (preemption == "swap")
        check_empty(llm)
    for i, prompt in enumerate(prompts):
        assert_solo(oracle, prompt, params, last[str(i)])


# -- G. length limits --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [127, 128, 129, 100_000])
def test_kind_25_longer_than_the_limit(length: int, model: Model) -> None:
    with model.engine(max_model_len=128) as llm:
        prompt = [1 + i % 250 for i in range(length)]
        if length > 127:
            with pytest.raises(PromptError, match=f"{length} tokens; max_model_len=128 .* at most 127"):
                llm.generate([prompt], GREEDY, use_tqdm=False)
        else:
            assert len(generate(llm, [prompt])[0].outputs[0].token_ids) == 1
        assert len(generate(llm, [[5, 6]])[0].outputs[0].token_ids) == 20


@pytest.mark.parametrize("tokens", [47, 48, 63, 64, 65, 66])
def test_kind_25_around_the_size_of_the_pool(tokens: int, model: Model) -> None:
    """Four blocks of 16. Two samples of a prompt need its whole blocks once and their own ones twice."""
    params = SamplingParams(n=2, seed=1, max_tokens=2)
    with model.engine(max_model_len=64, num_blocks=4) as llm:
        engine = engine_of(llm)
        # 48 and one more: three blocks and two. 63 and one more: the second token of the pair needs no block.
        fits = tokens in (47, 63)
        if fits:
            engine.add_request("large", random_ids(tokens, 1), params)
        else:
            with pytest.raises(RequestError, match=f"prompt (of|has) {tokens} tokens"):
                engine.add_request("large", random_ids(tokens, 1), params)
        engine.add_request("small", [5, 6], GREEDY_SHORT)
        finished = [o.request_id for _ in range(40) if engine.has_unfinished() for o in engine.step() if o.finished]
        assert sorted(finished) == (["large"] if fits else []) + ["small"]
        check_empty(llm)


def test_kind_27_reasons_and_counts(model: Model) -> None:
    prompt = random_ids(20, 1)
    natural = greedy(model.oracle, prompt, 12)
    stop = natural[8]
    end = natural.index(stop) + 1
    with model.engine(max_model_len=128) as llm:
        for limit in range(1, end + 2):
            params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[stop], ignore_eos=True)
            whole = generate(llm, [prompt], params)[0].outputs[0]
            deltas = list(llm.stream(prompt, params))
            assert whole.finish_reason == ("stop" if limit >= end else "length")
            assert whole.stop_reason == (stop if limit >= end else None)
            assert len(whole.token_ids) == min(limit, end)
            assert [t for d in deltas for t in d.token_ids] == whole.token_ids
            assert "".join(d.text for d in deltas) == whole.text
            assert [d.finish_reason for d in deltas if d.finish_reason] == [whole.finish_reason]
        late = generate(llm, [prompt], SamplingParams(max_tokens=50, deadline_ms=0.001))[0].outputs[0]
        assert late.finish_reason == "deadline"


# -- H. bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [-1, 320, 2**31, 2**40])
def test_kind_29_ids_outside_the_vocabulary(bad: int, model: Model) -> None:
    """The embedding has 320 rows, the tokenizer 259 tokens: 319 is fine, 320 is not. Others in the engine go on."""
    with model.engine(max_model_len=128) as llm:
        engine = engine_of(llm)
        engine.add_request("good", [5, 319], GREEDY_SHORT)
        engine.step()
        with pytest.raises(PromptError, match=str(bad)):
            engine.add_request("bad", [5, bad], GREEDY_SHORT)
        given = {"logit_bias": {bad: 1.0}, "stop_token_ids": [bad], "allowed_token_ids": [5, bad]}
        for name, value in given.items():
            with pytest.raises(SamplingError, match=str(bad)):
                engine.add_request("bad", [5], SamplingParams(**{name: value}))
        with pytest.raises(SamplingError, match=str(bad)):
            engine.add_request("bad", [5], BeamSearchParams(beam_width=2, stop_token_ids=[bad]))
        while engine.has_unfinished():
            outputs = engine.step()
        assert outputs[0].request_id == "good" and outputs[0].outputs[0].finish_reason == "length"
        assert len(generate(llm, [[319]], SamplingParams(temperature=0, logit_bias={319: 5.0}))) == 1


@pytest.mark.parametrize("family", ["llama", "gemma3-untied"])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("block_size", [1, 16])
def test_kind_29_a_row_of_nans_harms_nobody_else(family: str, backend: str, block_size: int, root: Path) -> None:
    """A token whose embedding is broken: its requests end with an error, the blocks they filled are reused safely."""
    model = tiny(family, root / "whole")
    broken = tiny(family, root / "broken")
    with torch.no_grad():
        broken.oracle.model.embed_tokens.weight[200] = float("nan")
    broken.oracle.save_pretrained(broken.path)
    prompts = [[t if t != 200 else 1 for t in random_ids(n, 3)] for n in (5, 17, 21, 40)]
    settings = {"max_model_len": 64, "attention_backend": backend, "block_size": block_size}
    with model.engine(**settings) as whole, broken.engine(num_blocks=8 * 16 // block_size, **settings) as llm:
        right = [o.outputs[0].token_ids for o in generate(whole, prompts)]
        bad = generate(llm, [[5, 200, 7] * 15])[0].outputs[0]
        assert bad.finish_reason == "error" and "no usable maximum" in str(bad.stop_reason) and not bad.token_ids
        (search,) = llm.beam_search([[5, 200, 7]], BeamSearchParams(beam_width=3, max_tokens=5))
        assert [(s.finish_reason, s.token_ids) for s in search.sequences] == [("error", [])]
        check_empty(llm)
        samples = generate(llm, [[200]], SamplingParams(n=3, seed=1))[0].outputs
        assert [o.finish_reason for o in samples] == ["error"] * 3
        for prompt, answer in zip(prompts, right, strict=True):
            assert generate(llm, [prompt])[0].outputs[0].token_ids == answer
        assert [o.outputs[0].token_ids for o in generate(llm, prompts)] == right


def test_the_command_line_gives_the_reason_of_a_failure(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from octavo.cli.main import main

    broken = tiny("llama", root / "all-broken")
    with torch.no_grad():
        broken.oracle.model.embed_tokens.weight.fill_(float("nan"))
    broken.oracle.save_pretrained(broken.path)
    write_tokenizer(broken.path)
    asked = ["generate", "-m", str(broken.path), "Hello", "-t", "0", "--num-blocks", "16", "--max-model-len", "64"]
    for more in ([], ["--json"], ["--stream"]):
        assert main([*asked, *more]) == 1
        shown = capsys.readouterr()
        assert "prompt 0, sample 0 failed: " in shown.err and "no usable maximum" in shown.err
    assert main([*(word for word in asked if word not in ("-t", "0")), "--beam-width", "2"]) == 1
    assert "beam search failed" in capsys.readouterr().err


# -- I. stops ----------------------------------------------------------------------------------------------------


def test_kind_30_stop_texts(model: Model) -> None:
    """Whatever short piece of the answer is the stop, the text ends before its first place, streamed or not."""
    prompt = random_ids(20, 1)
    with model.engine(max_model_len=128) as llm:
        ids = engine_of(llm).tokenizer.encode("abcdefghijklm ", add_special_tokens=False)  # type: ignore[union-attr]
        letters = {"allowed_token_ids": ids, "temperature": 0, "ignore_eos": True}
        text = generate(llm, [prompt], SamplingParams(max_tokens=14, **letters))[0].outputs[0].text
        assert len(text) == 14 and len(set(text)) > 3
        stops = {text[i : i + size] for size in (1, 2, 4, 6) for i in range(len(text) - size + 1)}
        for stop, include in itertools.product(sorted(stops), (False, True)):
            params = SamplingParams(max_tokens=14, stop=stop, include_stop_str_in_output=include, **letters)
            whole = generate(llm, [prompt], params)[0].outputs[0]
            cut = text.index(stop) + (len(stop) if include else 0)
            assert (whole.text, whole.finish_reason, whole.stop_reason) == (text[:cut], "stop", stop)
            assert len(whole.token_ids) == cut
            assert "".join(d.text for d in llm.stream(prompt, params)) == text[:cut]


# -- J. log-probabilities and penalties --------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_kind_32_logprobs(chunk: int, windowed: Model) -> None:
    prompt = random_ids(37, 2)
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=9, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    with windowed.engine(max_model_len=128, max_num_batched_tokens=chunk) as llm:
        output = generate(llm, [prompt], params)[0]
    sample = output.outputs[0]
    right = logprobs_of(windowed.oracle, prompt + sample.token_ids)
    assert output.prompt_logprobs is not None and sample.logprobs is not None
    assert (len(output.prompt_logprobs), len(sample.logprobs)) == (37, 9)
    for at, (token, entry) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True), 36):
        assert entry[token].logprob == pytest.approx(float(right[at, token]), abs=1e-4)
        assert set(right[at].topk(2).indices.tolist()) <= set(entry)
    for at in range(1, 37):
        entry = output.prompt_logprobs[at] or {}
        assert entry[prompt[at]].logprob == pytest.approx(float(right[at - 1, prompt[at]]), abs=1e-4)


def penalised(
    oracle: Any, prompt: list[int], count: int, presence: float, frequency: float, repetition: float
) -> list[int]:
    """Greedy search with penalties, from the definitions."""
    tokens = list(prompt)
    for _ in range(count):
        logits = logprobs_of(oracle, tokens)[-1]
        for t in set(tokens):
            logits[t] = logits[t] / repetition if logits[t] > 0 else logits[t] * repetition
        for t in set(tokens[len(prompt) :]):
            logits[t] -= presence + frequency * tokens[len(prompt) :].count(t)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_kind_33_penalties(model: Model) -> None:
    """Presence and frequency count the output, repetition the prompt too, whatever the order in the batch."""
    values = [(1.5, 0.0, 1.0), (0.0, 1.2, 1.0), (0.0, 0.0, 1.0)]
    prompts = [random_ids(12, seed) for seed in range(3)]
    right = [penalised(model.oracle, p, 16, *v) for p, v in zip(prompts, values, strict=True)]
    with model.engine(max_model_len=128) as llm:
        for order in itertools.permutations(range(3)):
            params = [
                SamplingParams(
                    temperature=0, max_tokens=16, ignore_eos=True, presence_penalty=values[i][0],
                    frequency_penalty=values[i][1], repetition_penalty=values[i][2],
                ) for i in order
            ]  # fmt: skip
            outputs = generate(llm, [prompts[i] for i in order], params)
            assert [o.outputs[0].token_ids for o in outputs] == [right[i] for i in order]


# -- K. batch influence ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_kind_34_neighbours(backend: str, model: Model) -> None:
    """Alone, among seven others, and with the others' contents changed. The last two are equal to the bit."""
    prompt = random_ids(25, 1)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=3)
    answers = []
    with model.engine(max_model_len=128, attention_backend=backend, enable_prefix_caching=False) as llm:
        for others in ([], [random_ids(25, s) for s in range(10, 17)], [random_ids(25, s) for s in range(20, 27)]):
            answers.append(generate(llm, [*others, prompt], params)[-1].outputs[0])
    alone, among, changed = answers
    assert alone.token_ids == among.token_ids == changed.token_ids
    assert among.logprobs == changed.logprobs
