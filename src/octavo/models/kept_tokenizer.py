"""`KeptTokenizer`: a tokenizer that starts from the user's cache and loads the library's own when it has to encode.

`kept_or_made` is the way in: it answers from the cache if the very files have been loaded before, and else loads them
and keeps what they say. The invariant: nobody can tell a kept tokenizer from a loaded one but by the time it takes.

A file of the cache is found under a hash of everything the tokenizer was made from, the library's version and the code
that put it together, so it is never out of date. OCTAVO_TOKENIZER_CACHE=0 in the environment switches all this off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path
from threading import Lock

import tokenizers
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError
from octavo.host_memory import give_memory_back
from octavo.models.cache import cache_dir
from octavo.models.kept_tokens import KeptTokens, read_kept, tokens_of, write_kept
from octavo.models.tokenizer import Tokenizer

logger = logging.getLogger("octavo.models")
#: What decides what files are made into, and what is kept of it: modules beside this one.
CODE = ("tokenizer", "tokenizer_files", "gguf_tokenizer", "gguf_reader", "kept_tokens", "kept_tokenizer")
#: Bytes of a tokenizer's files from which on it is worth keeping: smaller ones load in a tenth of a second.
WORTH_KEEPING = 4 << 20
SWITCH = "OCTAVO_TOKENIZER_CACHE"


class KeptTokenizer(Tokenizer):
    """A `Tokenizer` of kept tokens. `backend` is loaded on first use, once, whatever the number of threads."""

    reading: KeptTokens
    _load: Callable[[], Backend]
    _lock: Lock
    _backend: Backend | None

    def __init__(self, tokens: KeptTokens, load: Callable[[], Backend]) -> None:
        facts = tokens.facts
        for name, value in {
            "reading": tokens,
            "bos_token_id": facts["bos_token_id"],
            "eos_token_ids": tuple(facts["eos_token_ids"]),
            "special_tokens": facts["special_tokens"],
            "chat_templates": facts["chat_templates"],
            "special_ids": tokens.special_ids,
            "_load": load,
            "_lock": Lock(),
            "_backend": None,
        }.items():
            object.__setattr__(self, name, value)  # frozen, as every tokenizer

    @property
    def backend(self) -> Backend:
        """The `tokenizers.Tokenizer` underneath. Raises `ModelError` if its files are others than at the start."""
        with self._lock:
            backend = self._backend
            if backend is None:
                backend = self._load()
                object.__setattr__(self, "_backend", backend)
            return backend

    def prepare(self) -> None:
        _ = self.backend

    @property
    def vocab_size(self) -> int:
        return int(self.reading.facts["vocab_size"])

    def token_text(self, token_id: int) -> str | None:
        return self.reading.id_to_token(token_id)

    def __repr__(self) -> str:
        return f"KeptTokenizer({self.vocab_size} tokens)"


def kept_or_made(
    make: Callable[[], Tokenizer], contents: Callable[[], Iterable[bytes | memoryview]], where: str
) -> Tokenizer:
    """What `make` makes, from the cache if that is possible.

    contents: everything that the result depends on; called again when `make` has to be. where: the files, for messages.
    """
    if os.environ.get(SWITCH) == "0":
        return make()
    key = _key(contents)
    if key is None:
        return make()

    def load() -> Backend:
        backend = make().backend
        give_memory_back()
        if _key(contents) != key:
            raise ModelError(f"{where}: the tokenizer's files have changed since the start; start anew")
        return backend

    try:
        path = cache_dir() / "tokenizers" / f"{key}.safetensors"
    except RuntimeError:  # nobody's home
        return make()
    if (tokens := read_kept(path)) is not None:
        return KeptTokenizer(tokens, load)
    tokenizer = make()
    if _key(contents) == key:  # else the files changed meanwhile, and it is not what they say
        _keep(tokenizer, path)
    return tokenizer


def _key(contents: Callable[[], Iterable[bytes | memoryview]]) -> str | None:
    """The name under which it is kept; None where something that decides it cannot be read (code without sources)."""
    found = sha256(tokenizers.__version__.encode())
    try:
        code = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in CODE]
        for part in (*code, *contents()):
            found.update(memoryview(part).nbytes.to_bytes(8, "little"))
            found.update(part)
    except OSError:
        return None
    return found.hexdigest()


def _keep(tokenizer: Tokenizer, path: Path) -> None:
    """For the next time; where nothing can be written, that time takes as long as this one."""
    decoder = tokenizer.backend.decoder
    tokens = tokens_of(tokenizer.backend)
    if tokens is None:
        return
    facts = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_ids": tokenizer.eos_token_ids,
        "special_tokens": tokenizer.special_tokens,
        "chat_templates": tokenizer.chat_templates,
        "special_ids": sorted(tokenizer.special_ids),
        "vocab_size": tokenizer.vocab_size,
        "decoder": None if decoder is None else decoder.__getstate__().decode(),
    }
    try:
        write_kept(path, tokens, facts)
    except OSError as error:
        logger.debug("cannot keep the tokens of a tokenizer in %s: %s", path, error)
