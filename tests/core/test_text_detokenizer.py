"""Deltas joined equal the tokenizer's own decode, whatever the ids; nothing broken is ever shown on the way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.text.detokenizer import REPLACEMENT, Detokenizer
from octavo.text.pieces import _tables, token_table

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus Köln, naïve café — “quotes” … €5",
    "日本語のテキストと 中文 한국어",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 🎉🎉",
    "  leading spaces\n\n\ttabs   and runs      ",
    "def f(x):\n    return {'a': [1, 2, 3]}  # code",
    "e\u0301 combining, zero\u200bwidth, \x00 nul, \ufffd itself",
]
TEXTS = st.one_of(st.sampled_from(CORPUS), st.text(max_size=60))


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


@cache
def sentencepiece(strip: int = 0) -> Tokenizer:
    """Byte fallback as in Gemma (strip=0) and Llama 2 (strip=1)."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = ["▁", "▁▁", "▁▁▁", "e", "a", "é", "▁the", "t", "h", "q", "▁日", "本", "<0xZZ>", "\ufffd"]
    vocabulary = {t: i for i, t in enumerate([*specials, *(f"<0x{b:02X}>" for b in range(256)), *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.add_special_tokens(specials)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    chain: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        chain.append(decoders.Strip(" ", strip, 0))
    tokenizer.decoder = decoders.Sequence(chain)
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"▁a": 0, "b▁c": 1, "▁": 2, "▁▁d": 3, "<s>": 4}, unk_token="▁"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


@cache
def plain_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


@cache
def word_piece() -> Tokenizer:
    """A decoder that no table describes: goes through the window."""
    tokenizer = Tokenizer(models.WordPiece({"un": 0, "##aff": 1, "##able": 2, "dog": 3, "[UNK]": 4}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


ALL = {
    "byte_level": byte_level,
    "gemma_like": sentencepiece,
    "llama2_like": lambda: sentencepiece(1),
    "strip_two": lambda: sentencepiece(2),
    "metaspace": metaspace,
    "plain_words": plain_words,
    "word_piece": word_piece,
}


def stream(tokenizer: Any, ids: list[int], skip: bool = True, step: int = 1) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    deltas = [detokenizer.push(ids[i : i + step]) for i in range(0, len(ids), step)]
    deltas.append(detokenizer.flush())
    return deltas, detokenizer


@pytest.mark.parametrize("name", ALL)
@given(data=st.data(), skip=st.booleans(), step=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_random_ids(name: str, data: st.DataObject, skip: bool, step: int) -> None:
    tokenizer = ALL[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    deltas, detokenizer = stream(tokenizer, ids, skip, step)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert len(detokenizer.starts) == len(ids)
    assert detokenizer.starts == sorted(detokenizer.starts)


@pytest.mark.parametrize("name", ["byte_level", "gemma_like", "llama2_like"])
@given(text=TEXTS)
@settings(max_examples=150, deadline=None)
def test_real_text_never_shows_half_a_character(name: str, text: str) -> None:
    tokenizer = ALL[name]()
    ids = tokenizer.encode(text).ids
    deltas, _ = stream(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    if REPLACEMENT not in tokenizer.decode(ids):
        assert all(REPLACEMENT not in d for d in deltas)


@given(ids=st.lists(st.integers(4, 259 + 14), max_size=30))
@settings(max_examples=200, deadline=None)
def test_starts_split_a_byte_fallback_text_where_its_tokens_do(ids: list[int]) -> None:
    """Each prefix that ends on a finished character decodes to the text before the next token's start."""
    tokenizer = sentencepiece()
    _, detokenizer = stream(tokenizer, ids)
    whole = tokenizer.decode(ids)
    for i, start in enumerate(detokenizer.starts):
        before = tokenizer.decode(ids[:i])
        if REPLACEMENT not in whole:
            # In valid text a prefix is whole text plus, at most, the bytes of one unfinished character.
            assert start == len(before.split(REPLACEMENT)[0]) or REPLACEMENT in before


def test_a_run_of_bytes_is_judged_as_a_whole() -> None:
    tokenizer = sentencepiece()
    euro = [tokenizer.token_to_id(t) for t in ("<0xE2>", "<0x82>", "<0xAC>")]
    e = tokenizer.token_to_id("e")
    deltas, detokenizer = stream(tokenizer, [e, *euro, e])
    assert deltas == ["e", "", "", "", "€e", ""]
    assert detokenizer.starts == [0, 1, 1, 1, 2]
    deltas, detokenizer = stream(tokenizer, [*euro, tokenizer.token_to_id("<0xFF>")])
    assert deltas == ["", "", "", "", REPLACEMENT * 4]
    assert detokenizer.starts == [0, 1, 2, 3]


def test_a_broken_end_is_shown_only_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("日").ids
    half = [tokenizer.token_to_id(c) for c in "æĹ"]  # two of the three bytes
    assert len(half) == 2 and ids
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(half) == ""
    assert detokenizer.flush() == REPLACEMENT == tokenizer.decode(half)


def test_kinds_are_recognised() -> None:
    kinds = {name: (table.kind if (table := token_table(make())) else None) for name, make in ALL.items()}
    assert kinds == dict.fromkeys(ALL, "text") | {"byte_level": "bytes", "word_piece": None}


def test_a_table_is_made_once_even_for_a_tokenizer_that_cannot_be_hashed() -> None:
    class Wrapped:
        __hash__ = None  # type: ignore[assignment]

        def __init__(self) -> None:
            self.backend = byte_level()

    tokenizer = Wrapped()
    assert token_table(tokenizer) is token_table(tokenizer)
    before = len(_tables)
    del tokenizer
    assert len(_tables) == before - 1


def test_an_object_that_only_decodes_goes_through_the_window() -> None:
    class Only:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return str(byte_level().decode(ids, skip_special_tokens=skip_special_tokens))

    for text in CORPUS:
        ids = byte_level().encode(text).ids
        deltas, _ = stream(Only(), ids)
        assert "".join(deltas) == byte_level().decode(ids)
    broken = [byte_level().token_to_id("æ")] * 100  # can never become characters: not held for ever
    detokenizer = Detokenizer(Only())
    assert detokenizer.push(broken)


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """Lines of Python run per token, counted: the same after 20 tokens and after 4,000."""
    tokenizer = byte_level()
    ids = tokenizer.encode("the quick brown fox " * 500).ids
    detokenizer = Detokenizer(tokenizer)
    lines = 0

    def count(frame: FrameType, event: str, arg: object) -> Callable[..., object]:
        nonlocal lines
        lines += event == "line"
        return count

    def push(number: int) -> int:
        nonlocal lines
        lines = 0
        before = sys.gettrace()
        sys.settrace(count)
        try:
            for i in range(number):
                detokenizer.push((ids[i % len(ids)],))
        finally:
            sys.settrace(before)
        return lines

    push(20)
    early = push(100)
    push(4_000)
    assert push(100) <= early * 1.5
