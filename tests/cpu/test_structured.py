"""Structured output on tiny models: what is drawn always fits, whatever the temperature, the batch or the pool."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from helpers.grammars import CHOICES, GRAMMAR, PATTERNS, SCHEMAS, fits, matches
from helpers.tiny_models import END, write_tiny
from octavo import LLM, SamplingParams, StructuredOutputs
from octavo.core.record import replay
from octavo.core.step import SequenceStart
from octavo.errors import RequestError, SamplingError
from octavo.runner.sampler import Draw, Sampler
from octavo.runner.sampling_state import SamplingState

PROMPTS = ["hello", "x", "the answer: ", "an older and longer prompt"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny("llama", path)
    return str(path)


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, dtype="float32", num_blocks=128, max_model_len=240) as made:
        yield made


def compiler(llm: LLM) -> Any:
    return llm._engine._door.grammars  # type: ignore[union-attr]


def ask(asked: Any, **more: Any) -> SamplingParams:
    return SamplingParams(**{"structured_outputs": asked, "temperature": 1.5, "max_tokens": 200, **more})


# -- what is drawn fits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_hot_random_json_parses_and_validates(llm: LLM, name: str) -> None:
    params = [ask({"json": SCHEMAS[name]}, n=3, seed=seed) for seed in range(len(PROMPTS))]
    texts = []
    for output in llm.generate(PROMPTS, params, use_tqdm=False):
        for sample in output.outputs:
            assert sample.finish_reason == "stop", (sample.finish_reason, sample.stop_reason)
            assert fits(SCHEMAS[name], sample.text), sample.text
            texts.append(sample.text)
    assert len(set(texts)) > 3


@pytest.mark.parametrize("pattern", PATTERNS)
def test_regular_expressions_always_match(llm: LLM, pattern: str) -> None:
    for output in llm.generate(PROMPTS, ask({"regex": pattern}, n=3), use_tqdm=False):
        assert all(matches(pattern, s.text) and s.finish_reason == "stop" for s in output.outputs)


def test_choices_are_drawn_whole(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, ask({"choice": CHOICES}, n=8, seed=4), use_tqdm=False)
    texts = Counter(s.text for o in outputs for s in o.outputs)
    assert set(texts) <= set(CHOICES) and len(texts) > 3


def test_grammars_and_any_object(llm: LLM) -> None:
    for output in llm.generate(PROMPTS, ask({"grammar": GRAMMAR}, n=2), use_tqdm=False):
        assert all(matches(r"sum\(\d{1,3}(,\d{1,3}){0,2}\)", s.text) for s in output.outputs)
    # An object may be endless: what was completed must parse, what was cut must begin as one.
    for output in llm.generate(PROMPTS, ask({"json_object": True}, n=4, max_tokens=40), use_tqdm=False):
        for sample in output.outputs:
            assert sample.text.startswith("{")
            assert sample.finish_reason == "length" or isinstance(json.loads(sample.text), dict)


def test_greedy_and_filters_and_bias_stay_inside(llm: LLM) -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.1}, {"min_p": 0.9}, {"repetition_penalty": 1.8},
        {"logit_bias": {0: 100.0, 33: -100.0}}, {"presence_penalty": 2.0, "frequency_penalty": 2.0},
    ]  # fmt: skip
    for more in options:
        for output in llm.generate(PROMPTS, ask({"regex": PATTERNS[0]}, **more), use_tqdm=False):
            assert matches(PATTERNS[0], output.outputs[0].text), more


def test_the_text_ends_where_the_grammar_may_and_is_cut_by_max_tokens(llm: LLM) -> None:
    asked = {"regex": "(ab){1,50}"}
    lengths = {len(o.outputs[0].text) for s in range(20) for o in llm.generate("x", ask(asked, seed=s), use_tqdm=False)}
    assert len(lengths) > 1 and all(length % 2 == 0 for length in lengths)
    cut = llm.generate("x", ask({"regex": "a{30}"}, max_tokens=7), use_tqdm=False)[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("a" * 7, "length")


def test_stop_strings_logprobs_and_streams_go_on_working(llm: LLM) -> None:
    params = ask({"regex": "[a-d]{20}"}, stop=["c"], logprobs=2, seed=1)
    whole = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert whole.stop_reason == "c" and "c" not in whole.text and matches("[a-d]*", whole.text)
    assert whole.logprobs is not None and len(whole.logprobs) == len(whole.token_ids)
    # Log-probabilities are the model's own, before the grammar.
    free = llm.generate("x", SamplingParams(max_tokens=1, logprobs=2, seed=1), use_tqdm=False)[0].outputs[0]
    assert free.logprobs is not None
    top = {t: p.logprob for t, p in free.logprobs[0].items() if p.rank and p.rank <= 2}
    assert {t: whole.logprobs[0][t].logprob for t in top} == top
    params = ask({"json": SCHEMAS["object"]}, seed=5, n=2)
    joined = {0: "", 1: ""}
    for delta in llm.stream("x", params):
        joined[delta.index] += delta.text
    assert [joined[0], joined[1]] == [s.text for s in llm.generate("x", params, use_tqdm=False)[0].outputs]


def test_a_stop_id_that_is_text_is_text_and_a_special_one_is_an_end(llm: LLM) -> None:
    comma = llm.encode(",", add_special_tokens=False)[0]
    output = llm.generate("x", ask({"regex": "a,b"}, stop_token_ids=[comma]), use_tqdm=False)[0].outputs[0]
    assert (output.text, output.stop_reason) == ("a", comma)
    pad = 258
    ends = {
        llm.generate("x", ask({"regex": "ab"}, stop_token_ids=[pad], seed=s), use_tqdm=False)[0].outputs[0].stop_reason
        for s in range(20)
    }
    assert ends == {None, pad}


# -- the same whatever happens around it -------------------------------------------------------------------------------


def test_preempted_and_batched_answers_equal_solo_ones(model: str) -> None:
    params = [ask({"json": SCHEMAS["object"]}, seed=s, n=2, max_tokens=90) for s in range(4)]
    prompts = [f"{p} {p} {p}" for p in PROMPTS]
    with LLM(model, dtype="float32", num_blocks=128, max_model_len=240) as roomy:
        solo = [roomy.generate(p, q, use_tqdm=False)[0] for p, q in zip(prompts, params, strict=True)]
    with LLM(model, dtype="float32", num_blocks=18, max_model_len=200, debug=True) as tight:
        crowded = tight.generate(prompts, params, use_tqdm=False)
        assert tight.stats().preemptions > 0
    for alone, among in zip(solo, crowded, strict=True):
        assert [s.text for s in alone.outputs] == [s.text for s in among.outputs]
        assert all(fits(SCHEMAS["object"], s.text) for s in among.outputs)


def test_swapped_answers_equal_solo_ones(model: str) -> None:
    params = [ask({"regex": "[a-z]{60}"}, seed=s, max_tokens=80) for s in range(3)]
    with LLM(model, dtype="float32", num_blocks=128, max_model_len=240) as roomy:
        solo = [o.outputs[0].text for o in roomy.generate(PROMPTS[:3], params, use_tqdm=False)]
    tight = {"num_blocks": 11, "preemption": "swap", "enable_prefix_caching": False, "max_model_len": 120}
    with LLM(model, dtype="float32", debug=True, **tight) as crowded:
        texts = [o.outputs[0].text for o in crowded.generate(PROMPTS[:3], params, use_tqdm=False)]
        assert crowded.stats().swaps > 0
    assert texts == solo


@pytest.mark.usefixtures("free_guesses")
def test_guessed_tokens_change_nothing(model: str) -> None:
    """Speculation checks several tokens in one step; the grammar is told each of them in turn."""
    loop = {"type": "array", "items": {"enum": ["again and again"]}, "minItems": 6, "maxItems": 6}
    params = [ask({"json": loop}, seed=1), ask({"regex": "(abcd){20}x"}, seed=2), ask({"json": loop}, temperature=0.0)]
    with LLM(model, dtype="float32", num_blocks=128, max_model_len=240) as plain:
        expected = [o.outputs[0].text for o in plain.generate(PROMPTS[:3], params, use_tqdm=False)]
        steps = plain.stats().steps
    with LLM(model, dtype="float32", num_blocks=128, max_model_len=240, speculative="ngram:4", debug=True) as guessing:
        assert expected == [o.outputs[0].text for o in guessing.generate(PROMPTS[:3], params, use_tqdm=False)]
        assert guessing.stats().steps < steps


def test_a_recording_is_replayed_without_model_or_grammar(model: str, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with LLM(model, dtype="float32", num_blocks=64, max_model_len=200, record=str(file)) as recorded:
        recorded.generate(PROMPTS, ask({"json": SCHEMAS["object"]}, n=2), use_tqdm=False)
        recorded.generate("x", ask({"choice": CHOICES}), use_tqdm=False)
        recorded.embed(PROMPTS, pooling="mean", use_tqdm=False)
    report = replay(file)
    assert report.same and report.requests == 9


# -- masks -------------------------------------------------------------------------------------------------------------

ASKED = [
    *({"json": s} for s in SCHEMAS.values()),
    *({"regex": p} for p in PATTERNS),
    {"choice": CHOICES},
    {"grammar": GRAMMAR},
    {"json_object": True},
]


@given(st.sampled_from(range(len(ASKED))), st.lists(st.integers(0, 2**16), min_size=1, max_size=30), st.data())
@settings(max_examples=40, deadline=None)
def test_every_mask_is_the_librarys_own(llm: LLM, which: int, path: list[int], data: Any) -> None:
    """Walk a grammar at random; at each place the tokens we allow are exactly those the library would validate."""
    grammar = compiler(llm).compile(StructuredOutputs(**ASKED[which]))
    tokens = compiler(llm).vocabulary.tokens
    ends = {257}
    output: list[int] = []
    matcher = grammar.start((), tuple(ends))
    for choice in path:
        reference = grammar._template.deep_copy()
        assert reference.consume_tokens(output) or not output
        allowed = set(np.flatnonzero(matcher.allowed()).tolist())
        valid = {i for i, text in enumerate(tokens) if text and reference.validate_tokens([i]) == 1 and i < 256}
        assert allowed - ends == valid
        assert (ends <= allowed) == reference.is_accepting() == matcher.may_end()
        again = grammar.start(output, tuple(ends))  # as after a preemption
        assert set(np.flatnonzero(again.allowed()).tolist()) == allowed
        row = np.linspace(-3, 3, len(tokens), dtype=np.float32)
        again.restrict(row)
        assert set(np.flatnonzero(np.isfinite(row)).tolist()) == allowed
        going = sorted(allowed - ends)
        if not going:
            break
        output.append(going[choice % len(going)])
        matcher.push(output[-1])


def test_constrained_sampling_is_the_models_distribution_renormalised(llm: LLM) -> None:
    """20,000 draws against softmax over the allowed tokens, in both samplers."""
    grammar = compiler(llm).compile(StructuredOutputs(regex="[a-h]x?"))
    size = len(compiler(llm).vocabulary.tokens)
    logits = np.random.default_rng(0).normal(size=size).astype(np.float32)
    logits[:5] = 30.0  # the model would never draw anything else
    params = SamplingParams(structured_outputs={"regex": "[a-h]x?"}, temperature=0.8)
    start = SequenceStart(1, "r", 0, params, (256,), 1, 7, (257,), constraint=grammar)
    state = SamplingState(start, size)
    allowed = grammar.start((), (257,)).allowed()
    expected = np.where(allowed, np.exp(logits.astype(np.float64) / 0.8), 0.0)
    expected /= expected.sum()
    assert np.count_nonzero(allowed) == 8
    for native in (True, False):
        sampler = Sampler(size, native=native)
        draws = [Draw(0, state, position) for position in range(20000)]
        drawn = sampler.sample(torch.from_numpy(logits[None]), draws)
        counts = np.bincount([d.token_ids[0] for d in drawn], minlength=size)
        assert counts[~allowed].sum() == 0
        assert chisquare(counts[allowed], expected[allowed] * len(draws)).pvalue > 1e-3


# -- fail closed -------------------------------------------------------------------------------------------------------


def test_a_dead_end_ends_the_sequence_with_its_reason(llm: LLM) -> None:
    """The model gives every allowed token -inf: nothing else is drawn instead, and neighbours do not notice."""
    grammar = compiler(llm).compile(StructuredOutputs(regex="ab"))
    size = len(compiler(llm).vocabulary.tokens)
    logits = np.zeros((2, size), dtype=np.float32)
    logits[0, grammar.start((), (257,)).allowed()] = -np.inf
    asked = SamplingParams(structured_outputs={"regex": "ab"}, logprobs=1)
    constrained = SequenceStart(1, "r", 0, asked, (256,), 1, 7, (257,), constraint=grammar)
    for native in (True, False):
        dead = SamplingState(constrained, size)
        other = SamplingState(SequenceStart(2, "s", 0, SamplingParams(), (256,), 1, 7), size)
        first, second = Sampler(size, native=native).sample(
            torch.from_numpy(logits), [Draw(0, dead, 1), Draw(1, other, 1)]
        )
        assert first.token_ids == () and "grammar" in (first.error or "")
        assert len(second.token_ids) == 1 and second.error is None


def test_a_token_outside_the_grammar_closes_the_matcher(llm: LLM) -> None:
    matcher = compiler(llm).compile(StructuredOutputs(regex="ab")).start((), (257,))
    matcher.push(llm.encode("z", add_special_tokens=False)[0])
    assert not matcher.allowed().any() and "does not allow the text" in (matcher.error or "")
    assert not matcher.may_end()


def test_a_model_without_an_end_is_refused_unless_one_is_named(llm: LLM) -> None:
    from octavo.door import Door

    door = Door(320, (), 100, llm.get_tokenizer())
    with pytest.raises(SamplingError, match="names no end token"):
        door.prepare(ask({"regex": "ab"}))
    assert door.prepare(ask({"regex": "ab"}, stop_token_ids=[257])) is not None


def test_warming_up_says_what_the_first_grammar_would(llm: LLM, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm._engine
    assert engine is not None and engine.warm_grammars() is None
    assert compiler(llm)._vocabulary is not None
    with LLM(model, dtype="float32", num_blocks=8, max_model_len=64) as other:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        assert other._engine is not None and "octavo[structured]" in (other._engine.warm_grammars() or "")


def test_without_the_library_the_error_names_the_remedy(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.door import Door

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'octavo\[structured\]'"):
        Door(320, (257,), 100, llm.get_tokenizer()).prepare(ask({"regex": "ab"}))


def test_without_a_tokenizer_it_is_refused(model: str) -> None:
    with (
        LLM(model, dtype="float32", num_blocks=8, max_model_len=64, skip_tokenizer_init=True) as blind,
        pytest.raises(SamplingError, match="need a tokenizer"),
    ):
        blind.generate([[1, 2]], ask({"regex": "ab"}), use_tqdm=False)


def test_the_end_token_has_no_text(llm: LLM) -> None:
    output = llm.generate("x", ask({"choice": ["yes"]}, skip_special_tokens=False), use_tqdm=False)[0].outputs[0]
    assert output.text.replace(END, "") == "yes"
