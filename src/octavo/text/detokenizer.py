"""Incremental detokenisation: token ids of one sequence go in, text that will not change any more comes out.

The invariant: the deltas joined (flush included) equal `tokenizer.decode(all ids)`. So a character is held back until
its last byte has come, U+FFFD appears only for bytes that can never become a character, and the prefix-space rule of
the tokenizer applies to the head of the text. Work per token does not depend on how much text there is.

Two subtleties, both taken over from the tokenizers so that the invariant holds:
byte-level BPE replaces each maximal broken part by one U+FFFD (Unicode 15, section 3.9, table 3-8); SentencePiece byte
fallback judges a whole run of byte tokens, and one bad byte turns every byte of the run into U+FFFD. A run is
therefore shown when the first ordinary token after it arrives.

Does not know stop strings; but it tells at which character each token starts, so that others can cut text and ids at
the same place.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from octavo.text.pieces import TokenTable, token_table

REPLACEMENT = "\ufffd"


class Detokenizer:
    """Text of one sequence.

    tokenizer: anything with `decode(ids, skip_special_tokens)`; if it wraps a `tokenizers.Tokenizer` (attribute
    `backend`) of a known kind, tokens are looked up in a table, otherwise a short window is decoded for each token.

    starts[i] is the offset, in characters of the whole text, at which token i begins (for a token without text: where
    the next text begins). It never decreases. The last entries may still grow while a run of bytes is held back.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self.starts: list[int] = []
        self.length = 0  # characters given out so far
        table = token_table(tokenizer)
        if table is None:
            self._form: _Form = _WindowForm(self, tokenizer, skip_special_tokens)
        elif table.kind == "bytes":
            self._form = _BytesForm(self, table, skip_special_tokens)
        else:
            self._form = _PiecesForm(self, table, skip_special_tokens)

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens; returns the text that has become certain (often "" or several characters)."""
        parts = []
        feed = self._form.feed
        for token_id in token_ids:
            self.starts.append(self.length)
            text = feed(token_id)
            if text:
                self.length += len(text)
                parts.append(text)
        return parts[0] if len(parts) == 1 else "".join(parts)

    def flush(self) -> str:
        """The text still held back; call once, when no more tokens will come."""
        text = self._form.flush()
        self.length += len(text)
        return text


class _Form:
    """One way to turn tokens into text. `feed` is called after the token's provisional start was noted."""

    def feed(self, token_id: int) -> str:
        raise NotImplementedError

    def flush(self) -> str:
        raise NotImplementedError


class _BytesForm(_Form):
    """Byte-level BPE: an incremental UTF-8 decoder is all there is to it."""

    def __init__(self, owner: Detokenizer, table: TokenTable, skip_special: bool) -> None:
        self._piece = table.piece
        self._skip = table.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        piece = self._piece(token_id)
        assert piece is None or isinstance(piece, bytes)
        return self._utf8.decode(piece) if piece else ""

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _PiecesForm(_Form):
    """SentencePiece style: pieces of text, and runs of single bytes that are judged as a whole."""

    def __init__(self, owner: Detokenizer, table: TokenTable, skip_special: bool) -> None:
        self._owner = owner
        self._table = table
        self._skip = table.special_ids if skip_special else frozenset()
        self._first = True
        self._to_strip = table.strip_first
        self._run = bytearray()
        self._run_tokens: list[tuple[int, bool]] = []  # (index of the token, whether it is a byte of the run)

    def feed(self, token_id: int) -> str:
        piece = None if token_id in self._skip else self._next_piece(token_id)
        index = len(self._owner.starts) - 1
        if isinstance(piece, bytes):
            self._run += piece
            self._run_tokens.append((index, True))
            return ""
        if piece is None:  # no text: does not even end a run
            if self._run:
                self._run_tokens.append((index, False))
            return ""
        if not self._run:
            return self._strip(piece)
        before = self._end_run()
        self._owner.starts[index] = self._owner.length + len(before)
        return before + self._strip(piece)

    def flush(self) -> str:
        return self._end_run() if self._run else ""

    def _next_piece(self, token_id: int) -> str | bytes | None:
        table = self._table
        if self._first:
            piece = table.first_piece(token_id)
            self._first = piece is None
            return piece
        piece = table.piece(token_id)
        if table.separator and isinstance(piece, str):
            return table.separator + piece
        return piece

    def _end_run(self) -> str:
        """Text of the run; gives each of its tokens the start that it has in that text."""
        run, base = bytes(self._run), self._owner.length
        try:
            text = run.decode()
            # A byte belongs to the character that the last leading byte before it (or itself) began.
            widths = [b & 0xC0 != 0x80 for b in run]
        except UnicodeDecodeError:
            text = REPLACEMENT * len(run)
            widths = [True] * len(run)
        stripped = self._strip(text)
        base -= len(text) - len(stripped)
        begun = position = 0
        for index, is_byte in self._run_tokens:
            # A token without text begins where the next byte's character does, or behind the run.
            starts_new = position == len(widths) or widths[position]
            self._owner.starts[index] = max(self._owner.length, base + begun - (not starts_new))
            if is_byte:
                begun += widths[position]
                position += 1
        self._run.clear()
        self._run_tokens.clear()
        return stripped

    def _strip(self, text: str) -> str:
        """Remove what the tokenizer strips from the head of the whole text."""
        if not self._to_strip or not text:
            return text
        while self._to_strip and text.startswith(self._table.strip_char):
            text = text[len(self._table.strip_char) :]
            self._to_strip -= 1
        if text:
            self._to_strip = 0
        return text


class _WindowForm(_Form):
    """Any other tokenizer: decode the last tokens with and without the new one, show the difference.

    Exact when a token's text depends on no more than the tokens shown just before it. A text that ends in U+FFFD is
    held back for at most `MAX_HELD` tokens: then the bytes are broken and waiting longer would not mend them.
    """

    MAX_HELD = 8

    def __init__(self, owner: Detokenizer, tokenizer: Any, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []  # tokens shown last
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._difference()
        if not text or (text.endswith(REPLACEMENT) and len(self._held) < self.MAX_HELD):
            # A token without text (a special one) must not push the useful context out.
            return ""
        self._context, self._held = self._held, []
        return text

    def flush(self) -> str:
        text = self._difference() if self._held else ""
        self._held = []
        return text

    def _difference(self) -> str:
        before = self._decode(self._context) if self._context else ""
        return self._decode(self._context + self._held)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text
