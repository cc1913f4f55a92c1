"""A tokenizer's vocabulary as bytes, in the form that llguidance wants: the bytes that each token adds to the text.

The bytes come from the same table as the detokenizer's (`text/pieces.py`), so a grammar is matched against exactly the
text that a caller sees, byte-fallback tokens and byte-level alphabets included. Some tokenizers write the first token
of a text differently (they drop its leading space); `first_alias` maps such tokens to those they turn into.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from octavo.errors import RequestError, SamplingError
from octavo.text.pieces import TokenTable, token_table

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

INSTALL = "structured outputs need the package llguidance; install it with: pip install 'octavo[structured]'"


def import_llguidance() -> Any:
    """The module. Raises `RequestError` with the remedy where it is not installed."""
    try:
        import llguidance
    except ImportError as error:
        raise RequestError(INSTALL) from error
    return llguidance


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each id below `vocab_size`; b"" for an id without text. Raises `SamplingError` for a tokenizer whose
    tokens have no fixed bytes."""
    table = _table(tokenizer)
    pieces = (table.piece(i) for i in range(vocab_size))
    return [b"" if p is None else p if isinstance(p, bytes) else p.encode("utf-8", "replace") for p in pieces]


def _table(tokenizer: Tokenizer) -> TokenTable:
    table = token_table(tokenizer)
    if table is None or table.separator:
        raise SamplingError(
            "structured_outputs: this tokenizer's decoder gives tokens no text of their own; supported are byte-level "
            "and SentencePiece tokenizers"
        )
    return table


class Vocabulary:
    """One tokenizer for one model. ends: ids that end a text, allowed exactly where a grammar may stop."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: Iterable[int]) -> None:
        library = import_llguidance()
        self.size = vocab_size
        self.ends = tuple(i for i in ends if 0 <= i < vocab_size)
        self.tokens = token_bytes(tokenizer, vocab_size)
        # An id without a token can be drawn like any other: it must never count as text.
        empty = {i for i, text in enumerate(self.tokens) if not text}
        self._special = frozenset(i for i in {*tokenizer.special_ids, *self.ends, *empty} if i < vocab_size)
        self.first_alias = _first_alias(_table(tokenizer), self.tokens, self._special)
        # llguidance names one end of its own; where the model has none, one behind the vocabulary.
        spare = [] if self.ends else [b"<|end of grammar|>"]
        source = _Source(tokenizer, self.tokens + spare, self.ends or (vocab_size,), sorted(self._special))
        self.backend = library.LLTokenizer(library.TokenizerWrapper(source), eos_token=list(self.ends) or [vocab_size])

    def without_text(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Those of `ids` that can end a text because they are none themselves, each once."""
        return tuple(i for i in dict.fromkeys(ids) if i in self._special)


class ByteVocabulary(Vocabulary):
    """The 256 bytes and an end, for trying grammars without a model."""

    def __init__(self) -> None:
        library = import_llguidance()
        self.size = 257
        self.ends = (256,)
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<|end|>"]
        self.first_alias = None
        self._special = frozenset(self.ends)
        source = _Source(None, self.tokens, self.ends, [256])
        self.backend = library.LLTokenizer(library.TokenizerWrapper(source), eos_token=[256])


class _Source:
    """What llguidance reads a tokenizer from; without one, text is its bytes."""

    def __init__(
        self, tokenizer: Tokenizer | None, tokens: list[bytes], ends: tuple[int, ...], special: list[int]
    ) -> None:
        self._tokenizer = tokenizer
        self.tokens = [token or b"<|no text %d|>" % i for i, token in enumerate(tokens)]
        self.eos_token_id = ends[0]
        self.bos_token_id = None if tokenizer is None else tokenizer.bos_token_id
        self.special_token_ids = [*special, *ends]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text only")  # llguidance then sends no bytes
        if self._tokenizer is None:
            return list(text.encode())
        return self._tokenizer.encode(text, add_special_tokens=False)


def _first_alias(table: TokenTable, tokens: list[bytes], special: frozenset[int]) -> npt.NDArray[np.int64] | None:
    """alias[i]: the token that i stands for at the very start of a text; -1: none does. None: no token changes there.

    "▁the" at the start of a text reads "the": it is allowed where the token "the" would be, and counts as that one.
    """
    if table.read_first is None and not table.strip_first:
        return None
    by_bytes: dict[bytes, int] = {}
    for i, token in enumerate(tokens):
        if i not in special:
            by_bytes.setdefault(token, i)
    alias = np.arange(len(tokens), dtype=np.int64)
    strip = table.strip_char.encode()
    for i, token in enumerate(tokens):
        if i in special:
            continue
        first = token
        if table.read_first is not None:
            piece = table.first_piece(i)
            first = piece.encode() if isinstance(piece, str) else piece or b""
        for _ in range(table.strip_first):
            first = first.removeprefix(strip)
        if first != token:
            alias[i] = by_bytes.get(first, -1) if first else -1
    return alias
