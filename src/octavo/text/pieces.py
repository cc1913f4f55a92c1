"""What one token adds to the text: a table from token id to bytes or characters, read off a tokenizer's own decoder.

A `tokenizers` decoder is a function of a whole list of tokens, so calling it for every new token costs the length of
the text again. The decoders that language models use are simple underneath: either every token is a run of bytes
(`ByteLevel`), or every token is a piece of text after a few substitutions, with `<0xNN>` tokens standing for single
bytes (SentencePiece style). `token_table` recognises those two and says so; for any other decoder it answers None, and
the detokenizer falls back to decoding a short window.

Knows nothing of sequences or of streaming.
"""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Decoder(Protocol):
    """All that this package needs of a tokenizer object."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`, decoded on its own (no prompt before it)."""
        ...


@dataclass
class TokenTable:
    """Lazy map from token id to what it stands for.

    kind "bytes": `piece(id)` is bytes, and the text is their concatenation read as UTF-8.
    kind "text": `piece(id)` is text, or bytes of length 1 for a byte-fallback token.
    `first(piece_text)` changes the first piece of a text (prefix space rules); `strip_first` characters
    `strip_char` are removed from the head of the whole text; `separator` stands between pieces.
    """

    kind: str
    read: Callable[[str], str | bytes]
    id_to_token: Callable[[int], str | None]
    special_ids: frozenset[int]
    read_first: Callable[[str], str | bytes] | None = None
    strip_char: str = " "
    strip_first: int = 0
    separator: str = ""
    _pieces: dict[int, str | bytes | None] = field(default_factory=dict)

    def piece(self, token_id: int) -> str | bytes | None:
        """What the token stands for; None for an id that the tokenizer does not know (it has no text)."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self.id_to_token(token_id)
            piece = None if token is None else self.read(token)
            self._pieces[token_id] = piece
            return piece

    def first_piece(self, token_id: int) -> str | bytes | None:
        """As `piece`, for the first token of a text."""
        if self.read_first is None:
            return self.piece(token_id)
        token = self.id_to_token(token_id)
        return None if token is None else self.read_first(token)


_tables: dict[int, tuple[weakref.ref[Any], TokenTable | None]] = {}


def token_table(tokenizer: Any) -> TokenTable | None:
    """The table of a tokenizer (made once, kept as long as it lives), or None when its decoder is of another kind."""
    # By identity: tokenizers compare by their contents, which is slow or impossible to hash.
    key = id(tokenizer)
    known = _tables.get(key)
    if known is not None and known[0]() is tokenizer:
        return known[1]
    table = _build(tokenizer)
    with contextlib.suppress(TypeError):  # cannot be referenced weakly: built each time rather than kept for ever
        _tables[key] = (weakref.ref(tokenizer, lambda _: _tables.pop(key, None)), table)
    return table


def _backend(tokenizer: Any) -> Any | None:
    """The `tokenizers.Tokenizer` behind an object, if there is one."""
    wrapped = (getattr(tokenizer, name, None) for name in ("backend", "backend_tokenizer", "_tokenizer"))
    for candidate in (tokenizer, *wrapped):
        if hasattr(candidate, "id_to_token") and hasattr(candidate, "get_added_tokens_decoder"):
            return candidate
    return None


def _build(tokenizer: Any) -> TokenTable | None:
    # What says the same and needs no library: its tokens by id and the state of its decoder (`KeptTokens` of models).
    reading = getattr(tokenizer, "reading", None)
    if reading is not None:
        common: dict[str, Any] = {"id_to_token": reading.id_to_token, "special_ids": reading.special_ids}
        decoder = reading.decoder
    else:
        backend = _backend(tokenizer)
        if backend is None:
            return None
        special = frozenset(i for i, t in backend.get_added_tokens_decoder().items() if t.special)
        common = {"id_to_token": _id_to_token(backend), "special_ids": special}
        decoder = None if backend.decoder is None else backend.decoder.__getstate__()
    if decoder is None:
        return TokenTable("text", _same, separator=" ", **common)
    chain = _chain(json.loads(decoder))
    if [d["type"] for d in chain] == ["ByteLevel"]:
        return TokenTable("bytes", _byte_level_reader(), **common)
    if [d["type"] for d in chain] == ["Metaspace"]:
        mark, scheme = chain[0]["replacement"], chain[0].get("prepend_scheme", "always")
        first = None if scheme == "never" else (lambda token: token.replace(mark, ""))
        return TokenTable("text", lambda token: token.replace(mark, " "), read_first=first, **common)
    return _sentencepiece_table(chain, common)


def _id_to_token(backend: Any) -> Callable[[int], str | None]:
    def lookup(token_id: int) -> str | None:
        token: str | None = backend.id_to_token(token_id)
        return token

    return lookup


def _same(token: str) -> str:
    return token


def _chain(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _chain(inner)]
    return [decoder]


def _sentencepiece_table(chain: list[dict[str, Any]], common: dict[str, Any]) -> TokenTable | None:
    """Replace* ByteFallback? Replace*, Fuse, and at most one Strip of the head after it. Anything else: None."""
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    strip_char, strip_first = " ", 0
    for step in chain:
        kind = step["type"]
        if kind == "Replace" and not fused and not byte_fallback and "String" in step["pattern"]:
            replacements.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback" and not fused:
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and not strip_first and not step["stop"]:
            strip_char, strip_first = step["content"], step["start"]
        else:
            return None

    def read(token: str) -> str | bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        if byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                return token
        return token

    return TokenTable("text", read, strip_char=strip_char, strip_first=strip_first, **common)


def _byte_level_reader() -> Callable[[str], bytes]:
    """Byte-level BPE writes each byte as one printable character (GPT-2's table); a token with any other character
    stands for its own UTF-8 bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}

    def read(token: str) -> bytes:
        try:
            return bytes(byte_of[c] for c in token)
        except KeyError:
            return token.encode()

    return read
