"""Log-probabilities in the two forms of OpenAI's protocol, with tokens as the text they stand for.

A token that is a part of a character is spelled "bytes:\\xe2\\x9c", as OpenAI does; its bytes stand beside it in the
chat form.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.outputs import Logprob
from octavo.text.pieces import token_table

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer  # torch comes with it, and the port should answer before that

LOWEST = -9999.0  # JSON has no minus infinity


class TokenSpeller:
    """Text and bytes of single tokens. tokenizer None: the id itself is the text."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._table = token_table(tokenizer) if tokenizer is not None else None
        self._known: dict[int, tuple[str, bytes]] = {}

    def spell(self, token_id: int) -> tuple[str, bytes]:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def text(self, token_id: int) -> str:
        return self.spell(token_id)[0]

    def is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and token_id in self._tokenizer.special_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids together, special tokens left out."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids)

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        if self._tokenizer is None:
            text = f"token_id:{token_id}"
            return text, text.encode()
        if token_id in self._tokenizer.special_ids or self._table is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            return text, text.encode()
        piece = self._table.piece(token_id)
        if piece is None:
            return "", b""
        raw = piece.encode("utf-8", "replace") if isinstance(piece, str) else bytes(piece)
        try:
            return raw.decode(), raw
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw


def _number(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(
    speller: TokenSpeller, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob]], top: int
) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one object per token, with the `top` most likely ones."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        content.append({**_chat_entry(speller, token, entry[token]), "top_logprobs": _best(speller, entry, top)})
    return content


def _best(speller: TokenSpeller, entry: Mapping[int, Logprob], top: int) -> list[dict[str, Any]]:
    ranked = sorted(entry.items(), key=lambda item: (item[1].rank or 0, item[0]))
    return [_chat_entry(speller, other, found) for other, found in ranked[:top]]


def _chat_entry(speller: TokenSpeller, token: int, found: Logprob) -> dict[str, Any]:
    text, raw = speller.spell(token)
    return {"token": text, "logprob": _number(found.logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """`choices[].logprobs` of /v1/completions: four lists that grow together. offset: characters before it.

    Special tokens are no characters of the text.
    """

    def __init__(self, speller: TokenSpeller, offset: int = 0) -> None:
        self._speller = speller
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, token_ids: Sequence[int], entries: Sequence[Mapping[int, Logprob] | None]) -> dict[str, Any]:
        """The lists for some more tokens; an entry of None (the first of a prompt) has no value."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, entry in zip(token_ids, entries, strict=True):
            text, raw = self._speller.spell(token)
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += 0 if self._speller.is_special(token) else len(self._utf8.decode(raw))
            if entry is None:
                values.append(None)
                tops.append(None)
                continue
            values.append(_number(entry[token].logprob))
            best: dict[str, float] = {}
            for other, found in sorted(entry.items(), key=lambda item: (item[1].rank or 0, item[0])):
                best.setdefault(self._speller.text(other), _number(found.logprob))
            tops.append(best)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
