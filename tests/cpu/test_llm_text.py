"""Incremental text with a real vocabulary: Gemma's 262,144 pieces, byte fallback and 6,000 added tokens."""

from __future__ import annotations

import random

import pytest

from octavo.models.load import load_tokenizer
from octavo.models.tokenizer import Tokenizer
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.output import SequenceText
from octavo.text.pieces import token_table

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "Grüße aus Köln, naïve café — “quotes” … €5",
    "日本語のテキストと 中文 한국어 ไทย हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇩🇪 🎉🎉 and hieroglyphs 𓀀𓂀 and runes ᚠᛇᚻ",
    "  leading spaces\n\n\ttabs   and runs                     of spaces      ",
    "def f(x):\n    return {'a': [1, 2, 3]}  # code\n",
    "e\u0301 combining, zero\u200bwidth",
]


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    return load_tokenizer("gemma-3-270m")


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.push((i,)) for i in ids), detokenizer.flush()]


def test_it_takes_the_fast_way(gemma: Tokenizer) -> None:
    table = token_table(gemma)
    assert table is not None and table.kind == "text"
    assert token_table(gemma) is table


@pytest.mark.parametrize("text", TEXTS)
def test_real_text(gemma: Tokenizer, text: str) -> None:
    ids = gemma.encode(text)
    deltas = stream(gemma, ids)
    assert "".join(deltas) == gemma.decode(ids) == text
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids(gemma: Tokenizer, skip: bool) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    byte_ids = [gemma.token_id(f"<0x{b:02X}>") for b in range(256)]
    special = sorted(gemma.special_ids)
    for _ in range(200):
        ids = [rng.choice([rng.randrange(262_144), rng.choice(byte_ids), rng.choice(special)]) for _ in range(30)]
        deltas = stream(gemma, ids, skip)
        assert "".join(deltas) == gemma.decode(ids, skip_special_tokens=skip), f"seed {seed}"


def test_every_substring_as_stop(gemma: Tokenizer) -> None:
    answer = " is Paris — the city of light ✨ 𓀀. It has"
    ids = gemma.encode(answer, add_special_tokens=False)
    for i in range(len(answer)):
        for k in range(1, 7):
            stop = answer[i : i + k]
            cut = answer.index(stop)
            for step in (1, len(ids)):
                text = SequenceText(gemma, SamplingParams(stop=stop))
                for at in range(0, len(ids), step):
                    delta = text.push(ids[at : at + step], at + step >= len(ids))
                    if delta.stop is not None:
                        break
                assert (text.text, delta.stop) == (answer[:cut], stop)
                assert len(gemma.decode(ids[: text.num_tokens])) >= cut
