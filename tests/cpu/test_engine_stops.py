"""How answers end, through the whole engine: stop strings, stop ids, limits, finish reasons, counts (kinds 27, 30).

The tiny model's tokenizer has tokens of one to three characters, so that stop strings begin and end inside tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from helpers.oracle import Model, random_ids, tiny
from helpers.tiny_models import BEGIN, END, PAD
from octavo import LLM, SamplingParams
from octavo.outputs import CompletionOutput

END_ID = 257
PIECES = ["ab", "ba", "bc", "ca", "abc", "cab", "bca", "aa", "bb", "cc", "acc", "bab"]


def write_pieces(path: Path) -> None:
    """A byte-level vocabulary with longer pieces at 259 and up (merges make them all reachable)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {name: 256 + i for i, name in enumerate((BEGIN, END, PAD))}
    vocabulary |= {piece: 259 + i for i, piece in enumerate(PIECES)}
    merges = [(piece[:-1], piece[-1]) for piece in PIECES]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[m for m in merges if m[0] in vocabulary]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (BEGIN, END, PAD)])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": PAD}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    made = tiny("llama", tmp_path_factory.mktemp("stops"))
    write_pieces(made.path)
    return made


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return model.engine()


PROMPT = random_ids(20, 1)
LETTERS = list(range(259, 259 + len(PIECES)))
EOS_ALWAYS: dict[str, Any] = {  # the end token as soon as it is allowed
    "allowed_token_ids": [*LETTERS, END_ID],
    "logit_bias": {END_ID: 100.0},
    "ignore_eos": False,
}


def params(**given: Any) -> SamplingParams:
    """Greedy over pieces, so that the text is plain and pieces overlap a lot."""
    given = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "allowed_token_ids": LETTERS, **given}
    return SamplingParams(**given)


def answer(llm: LLM, **given: Any) -> CompletionOutput:
    (output,) = llm.generate([PROMPT], params(**given), use_tqdm=False)
    assert llm.pool_view().num_used == 0
    return output.outputs[0]


def streamed(llm: LLM, **given: Any) -> CompletionOutput:
    """The same answer put together from its deltas; exactly one reason, with the last of them."""
    deltas = list(llm.stream(PROMPT, params(**given)))
    assert all(d.finish_reason is None for d in deltas[:-1])
    text, ids = "".join(d.text for d in deltas), [i for d in deltas for i in d.token_ids]
    assert llm.pool_view().num_used == 0
    return CompletionOutput(0, text, ids, None, None, deltas[-1].finish_reason, deltas[-1].stop_reason)


def assert_same(one: CompletionOutput, other: CompletionOutput) -> None:
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    assert [getattr(one, n) for n in names] == [getattr(other, n) for n in names]


def test_the_text_is_worth_stopping(llm: LLM) -> None:
    whole = answer(llm)
    assert len(whole.text) > 36 and len(set(whole.token_ids)) > 5 and whole.text == llm.decode(whole.token_ids)


@pytest.mark.parametrize("include", [False, True])
def test_every_short_substring_as_stop(include: bool, llm: LLM) -> None:
    """Kind 30: text, ids and logprobs end together, at the first occurrence, streamed or not."""
    whole = answer(llm)
    starts = [len(llm.decode(whole.token_ids[:i])) for i in range(len(whole.token_ids) + 1)]
    found = {whole.text[i : i + n] for n in range(1, 7) for i in range(len(whole.text) - n + 1)}
    stops = sorted(found)
    assert len(stops) > 60
    each = [params(stop=stop, include_stop_str_in_output=include, logprobs=0) for stop in stops]
    outputs = llm.generate([PROMPT] * len(stops), each, use_tqdm=False)
    for stop, output in zip(stops, outputs, strict=True):
        got = output.outputs[0]
        cut = whole.text.index(stop) + (len(stop) if include else 0)
        assert got.text == whole.text[:cut]
        count = next(i for i, start in enumerate(starts) if start >= cut)  # tokens that begin before the cut
        assert got.token_ids == whole.token_ids[:count]
        assert got.logprobs is not None and len(got.logprobs) == count
        assert got.cumulative_logprob == pytest.approx(
            sum(e[t].logprob for e, t in zip(got.logprobs, got.token_ids, strict=True)), abs=1e-5
        )
        assert (got.finish_reason, got.stop_reason) == ("stop", stop)
        assert_same(streamed(llm, stop=stop, include_stop_str_in_output=include), got)
    assert llm.pool_view().num_used == 0


def test_first_match_by_position_not_by_list_order(llm: LLM) -> None:
    text = answer(llm).text
    early, late = text[6:9], text[20:26]
    assert text.index(early) + 3 < text.index(late) + 6
    for stops in ([early, late], [late, early], [late, "never there", early]):
        got = answer(llm, stop=stops)
        assert got.text == text[: text.index(early)] and got.stop_reason == early


def test_nothing_is_shown_that_may_become_a_stop(llm: LLM) -> None:
    """After every delta the text so far ends before any beginning of the stop string."""
    text = answer(llm).text
    stop = text[10:15]
    shown = ""
    for delta in llm.stream(PROMPT, params(stop=stop)):
        shown += delta.text
        if delta.finish_reason is None:
            assert not any(shown.endswith(stop[:n]) for n in range(1, len(stop)))
    assert shown == text[: text.index(stop)]


def test_a_stop_that_never_comes_loses_nothing(llm: LLM) -> None:
    text = answer(llm).text
    for tail in (1, 2, 3):
        got = answer(llm, stop=text[-tail:] + "zzz")
        assert got.text == text and got.finish_reason == "length" and len(got.token_ids) == 24


@pytest.mark.parametrize("ending", ["eos", "stop id", "stop string"])
def test_max_tokens_swept_over_a_natural_end(ending: str, llm: LLM) -> None:
    """Kind 27: from 1 to the end and one more; streamed or not; the count is that of ids really produced."""
    whole = answer(llm)
    natural: dict[str, Any] = {
        "eos": {**EOS_ALWAYS, "min_tokens": 8},
        "stop id": {"stop_token_ids": [whole.token_ids[9]]},
        "stop string": {"stop": whole.text[14:18]},
    }[ending]
    end = answer(llm, **natural)
    assert end.finish_reason == "stop"
    length = len(end.token_ids)
    assert 3 < length < 24
    for limit in range(1, length + 3):
        given = {**natural, "max_tokens": limit, "min_tokens": min(natural.get("min_tokens", 0), limit)}
        got = answer(llm, **given)
        assert_same(streamed(llm, **given), got)
        if got.finish_reason == "length":
            assert len(got.token_ids) == limit and got.stop_reason is None
            assert got.token_ids == whole.token_ids[:limit]
        else:
            assert_same(got, end)
    assert got.finish_reason == "stop"


def test_end_of_text_and_stop_ids(llm: LLM) -> None:
    """The end token counts as a token and has no text; a stop id is named in stop_reason."""
    plain = answer(llm)
    ended = answer(llm, **EOS_ALWAYS, min_tokens=5)
    assert ended.token_ids == [*plain.token_ids[:5], END_ID]
    assert ended.text == llm.decode(plain.token_ids[:5]) and ended.stop_reason is None
    shown = answer(llm, **EOS_ALWAYS, min_tokens=5, include_stop_str_in_output=True, skip_special_tokens=False)
    assert shown.text == ended.text + END
    at_once = answer(llm, **EOS_ALWAYS)
    assert at_once.token_ids == [END_ID] and at_once.text == "" and at_once.finish_reason == "stop"
    ignored = answer(llm, **{**EOS_ALWAYS, "ignore_eos": True}, max_tokens=4)
    assert ignored.token_ids == [END_ID] * 4 and ignored.finish_reason == "length"
    stop_id = plain.token_ids[7]
    first = plain.token_ids.index(stop_id)
    by_id = answer(llm, stop_token_ids=[stop_id])
    assert by_id.token_ids == plain.token_ids[: first + 1] and by_id.stop_reason == stop_id
    assert by_id.text == llm.decode(plain.token_ids[:first])


@pytest.mark.parametrize("least", [1, 3, 10, 24])
def test_min_tokens(least: int, llm: LLM) -> None:
    """No end before min_tokens: not by the end token, a stop id or a stop string."""
    plain = answer(llm)
    first = plain.token_ids[0]
    by_id = answer(llm, stop_token_ids=[first], min_tokens=least)
    assert len(by_id.token_ids) >= least and first not in by_id.token_ids[:least]
    by_text = answer(llm, stop=[plain.text[0]], min_tokens=least)
    assert len(by_text.token_ids) >= least or by_text.finish_reason == "stop"
    shown = len(llm.decode(plain.token_ids[:least]))
    where = plain.text.find(plain.text[0], shown)
    assert by_text.text == (plain.text if where < 0 else plain.text[:where])
    eos = answer(
        llm, min_tokens=least, ignore_eos=False, allowed_token_ids=[*LETTERS, END_ID], logit_bias={END_ID: 100.0}
    )
    assert eos.token_ids == [*plain.token_ids[:least], END_ID][:24]
    assert eos.finish_reason == ("stop" if least < 24 else "length")


def test_stop_in_one_sample_leaves_the_others(llm: LLM) -> None:
    """Four samples, one stop: those that meet it end, and their blocks are free while the others run."""
    four = {"n": 4, "seed": 3, "temperature": 1.0, "max_tokens": 30}
    (free,) = llm.generate([PROMPT], params(**four), use_tqdm=False)
    stop = free.outputs[1].text[8:14]
    (cut,) = llm.generate([PROMPT], params(**four, stop=stop), use_tqdm=False)
    reasons = []
    for whole, got in zip(free.outputs, cut.outputs, strict=True):
        assert got.text == whole.text.split(stop)[0]
        reasons.append(got.finish_reason)
    assert "stop" in reasons and "length" in reasons
    used = []
    llm.watch(lambda: used.append((llm.pool_view().num_used, llm.pool_view().num_running)))
    try:
        llm.generate([PROMPT], params(**four, stop=[o.text[:3] for o in free.outputs]), use_tqdm=False)
    finally:
        llm.watch(None)
    assert used[-1] == (0, 0) and all(used_now > 0 for used_now, running in used[:-1] if running)


def test_stop_survives_preemption(model: Model) -> None:
    """Kind 23: a resumed answer keeps what it had matched and never shows a character twice."""
    prompts = [random_ids(9 + i, 4) for i in range(5)]
    with model.engine(block_size=4) as llm:
        free = [o.outputs[0].text for o in llm.generate(prompts, params(max_tokens=30), use_tqdm=False)]
        each = [params(max_tokens=30, stop=text[30:35]) for text in free]
        expected = [o.outputs[0] for o in llm.generate(prompts, each, use_tqdm=False)]
    with model.engine(block_size=4, num_blocks=14, max_model_len=48) as small:
        found = [o.outputs[0] for o in small.generate(prompts, each, use_tqdm=False)]
        assert small.stats().preemptions > 0
    for text, one, other in zip(free, expected, found, strict=True):
        assert_same(one, other)
        assert one.text == text[: text.index(text[30:35])]


def test_bytes_that_form_no_character(llm: LLM) -> None:
    """Any byte may follow any: what is streamed, and what is cut by a limit, is what decoding all ids gives."""
    for count in (1, 2, 3, 40):
        given: dict[str, Any] = {"allowed_token_ids": None, "max_tokens": count}
        got = answer(llm, **given)
        assert got.text == llm.decode(got.token_ids)
        assert_same(streamed(llm, **given), got)
    assert "\ufffd" in got.text
