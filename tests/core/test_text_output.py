"""`SequenceText`: text and ids end together, streamed or whole, whatever the stop string."""

from __future__ import annotations

import pytest
from test_text_detokenizer import byte_level, sentencepiece
from tokenizers import Tokenizer

from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.text.output import SequenceText

ANSWER = "The quick brown fox — “naïve” café 日本語 🎉 jumps"


def run(tokenizer: Tokenizer, ids: list[int], step: int, **params: object) -> tuple[str, int, str | None, list[int]]:
    """(text, tokens kept, stop, tokens shown after each push), pushing `step` tokens at a time."""
    text = SequenceText(tokenizer, SamplingParams(**params))
    parts, counts, stop = [], [], None
    for i in range(0, len(ids), step):
        delta = text.push(ids[i : i + step], finished=i + step >= len(ids))
        parts.append(delta.text)
        counts.append(delta.num_tokens)
        if delta.stop is not None:
            stop = delta.stop
            break
    assert "".join(parts) == text.text
    return text.text, text.num_tokens, stop, counts


@pytest.mark.parametrize("make", [byte_level, sentencepiece], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize("include", [False, True])
def test_every_substring_as_stop_gives_one_answer(make: object, include: bool) -> None:
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(ANSWER).ids
    full = tokenizer.decode(ids)
    substrings = {full[i : i + k] for i in range(len(full)) for k in range(1, 7) if len(full[i : i + k]) == k}
    for stop in substrings:
        cut = full.index(stop) + (len(stop) if include else 0)
        for step in (1, 3, len(ids)):
            text, kept, found, counts = run(tokenizer, ids, step, stop=stop, include_stop_str_in_output=include)
            assert (text, found) == (full[:cut], stop)
            assert counts == sorted(counts)
            # The kept tokens carry all of the text, and one token fewer would not.
            carried = tokenizer.decode(ids[:kept])
            assert len(carried.rstrip("\ufffd") if make is byte_level else carried) >= len(text)
            if kept:
                assert len(tokenizer.decode(ids[: kept - 1]).rstrip("\ufffd")) < len(text)
            assert (kept == 0) == (text == "")


def test_tokens_shown_never_run_ahead_of_text_that_may_be_a_stop() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "abcabd"]
    text = SequenceText(tokenizer, SamplingParams(stop="abd"))
    seen = [text.push((i,)) for i in ids]
    assert [(d.text, d.num_tokens, d.stop) for d in seen] == [
        ("", 0, None),
        ("", 0, None),
        ("abc", 3, None),
        ("", 3, None),
        ("", 3, None),
        ("", 3, "abd"),
    ]


def test_held_text_is_released_at_the_end() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "xab"]
    assert run(tokenizer, ids, 1, stop="abd")[:3] == ("xab", 3, None)


def test_a_token_with_kept_text_and_the_start_of_the_stop_is_kept() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("brown fox").ids
    assert len(tokenizer.decode(ids[:1])) > 1, "needs a first token of several characters"
    stop = tokenizer.decode(ids)[1:6]
    assert run(tokenizer, ids, 1, stop=stop)[:2] == ("b", 1)


def test_stop_inside_a_step_of_many_tokens_drops_the_later_ones() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "xyz123"]
    assert run(tokenizer, ids, 6, stop="z")[:3] == ("xy", 2, "z")
    assert run(tokenizer, ids, 6, stop="z", include_stop_str_in_output=True)[:3] == ("xyz", 3, "z")


def test_min_tokens_disarms_the_first_tokens() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "abxabx"]
    assert run(tokenizer, ids, 1, stop="ab", min_tokens=2, max_tokens=9)[:3] == ("abx", 3, "ab")
    assert run(tokenizer, ids, 1, stop="ab", min_tokens=1, max_tokens=9)[:3] == ("", 0, "ab")


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [None, "@"])
def test_the_end_token_counts_but_shows_its_text_only_when_asked(include: bool, stop: str | None) -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "ab"]
    params = SamplingParams(stop=stop, include_stop_str_in_output=include)
    text = SequenceText(tokenizer, params)
    text.push(ids[:1])
    delta = text.push(ids[1:], True, ended_by_token=True)
    assert (text.text, delta.num_tokens) == ("ab" if include else "a", 2)


def test_a_stop_before_the_end_token_wins() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_to_id(c) for c in "a@b"]
    delta = SequenceText(tokenizer, SamplingParams(stop="@")).push(ids, True, ended_by_token=True)
    assert (delta.text, delta.num_tokens, delta.stop) == ("a", 1, "@")


@pytest.mark.parametrize(("tokenizer", "params"), [(None, {}), (byte_level(), {"detokenize": False})])
def test_without_text_every_token_is_shown(tokenizer: Tokenizer | None, params: dict[str, bool]) -> None:
    text = SequenceText(tokenizer, SamplingParams(**params))
    assert text.push([1, 2]).num_tokens == 2
    assert text.push([3], True, ended_by_token=True).num_tokens == 3
    assert text.text == ""


def test_beams_have_text_too() -> None:
    tokenizer = byte_level()
    text = SequenceText(tokenizer, BeamSearchParams(beam_width=2))
    assert text.push(tokenizer.encode("fox").ids, True).text == "fox"
