"""What a tokenizer says of its tokens, kept in a file of the user's cache: their texts by id, and its settings.

A large vocabulary takes the `tokenizers` library more than a second to read, most of it for merges, which only encoding
needs. This file holds what everything else needs, and is read in milliseconds. The invariant: what is read equals what
was written, or nothing is read: a file that is damaged, cut short or of another kind counts as absent.

The file is safetensors: `text`, the UTF-8 of all tokens; `ends`, where each one ends in it; the rest as JSON beside
them, with a hash of the two. It knows neither models nor directories.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from octavo.models.cache import write_atomically


@dataclass(frozen=True)
class KeptTokens:
    """Tokens by id, and what JSON can hold: `facts`. missing: ids below the number of ids that have no token.

    facts["decoder"]: the JSON state of the library's decoder, None without one. facts["special_ids"]: see `Tokenizer`.
    """

    text: bytes
    ends: np.ndarray  # int64, one per id
    missing: frozenset[int]
    facts: Mapping[str, Any]

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""
        return frozenset(self.facts["special_ids"])

    @property
    def decoder(self) -> str | None:
        """The JSON state of the library's decoder."""
        state: str | None = self.facts["decoder"]
        return state

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None for an id without one."""
        if not 0 <= token_id < len(self.ends) or token_id in self.missing:
            return None
        begin = int(self.ends[token_id - 1]) if token_id else 0
        return self.text[begin : int(self.ends[token_id])].decode()


def tokens_of(backend: Any) -> list[str | None] | None:
    """Token of every id, as `backend.id_to_token` would say; None where that cannot be kept.

    That is where two tokens share an id (which of them the library names is its own affair), or where ids are so
    sparse that a list of them would be mostly empty.
    """
    vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)
    added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
    count = max(max(vocabulary.values(), default=-1), max(added, default=-1)) + 1
    if len(set(vocabulary.values())) < len(vocabulary) or count > 2 * (len(vocabulary) + len(added)):
        return None
    tokens: list[str | None] = [None] * count
    for token, i in vocabulary.items():
        tokens[i] = token
    for i, token in added.items():  # the library asks these first
        tokens[i] = token
    return tokens


def write_kept(path: Path, tokens: list[str | None], facts: Mapping[str, Any]) -> None:
    """Keep them. Raises OSError."""
    pieces = [b"" if token is None else token.encode() for token in tokens]
    text = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    about = {
        "facts": facts,
        "missing": [i for i, token in enumerate(tokens) if token is None],
        "hash": _hash(text, ends),
    }
    write_atomically(path, lambda target: save_file({"text": text, "ends": ends}, target, {"about": json.dumps(about)}))


def read_kept(path: Path) -> KeptTokens | None:
    """What `write_kept` wrote; None if there is no such file, or it is not whole."""
    try:
        with safe_open(str(path), framework="np") as file:
            about = json.loads(file.metadata()["about"])
            text, ends = file.get_tensor("text"), file.get_tensor("ends")
        if about["hash"] != _hash(text, ends):
            return None
        return KeptTokens(text.tobytes(), ends, frozenset(about["missing"]), about["facts"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _hash(text: np.ndarray, ends: np.ndarray) -> str:
    found = sha256(text.tobytes())
    found.update(ends.tobytes())
    return found.hexdigest()
