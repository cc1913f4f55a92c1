"""A `tokenizers` tokenizer from GGUF metadata.

The header stores a vocabulary and says which of two machines it is for:
"llama": SentencePiece BPE with byte fallback. The file lists no merges; they are recovered from the vocabulary: every
way to split a token into two tokens is a merge, ranked by the token's score. (Gemma's scores do not follow its merge
order; the order of the tokens does.)
"gpt2": byte-level BPE with its merges; the pre-tokeniser's name decides how text is cut first.
The results encode as the transformers library's conversion does; tests compare the two.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import ModelError
from octavo.models.cache import cache_dir, write_atomically
from octavo.models.gguf_file import GGUFFile

logger = logging.getLogger("octavo.models")
#: Vocabularies smaller than this are quicker to work out than to look up.
WORTH_CACHING = 20000
CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"
GEMMA = ("gemma", "gemma2", "gemma3")

_LETTERS_AND_RUNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = _CONTRACTIONS + r"|\p{N}{1,3}" + _LETTERS_AND_RUNS
_QWEN2 = _CONTRACTIONS + r"|\p{N}" + _LETTERS_AND_RUNS
#: `tokenizer.ggml.pre` -> how text is cut before merging; None: the GPT-2 rule built into ByteLevel.
SPLITS: dict[str, str | None] = {
    "llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "smaug-bpe": _LLAMA3, "dbrx": _LLAMA3,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "gpt-2": None, "default": None,
}  # fmt: skip


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Build it anew (seconds for 262,144 tokens: see `models/tokenizer.py` for the cache). Raises `ModelError`."""
    kind, tokens = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path}: the header holds no vocabulary (tokenizer.ggml.tokens)")
    if kind == "llama":
        tokenizer = _sentencepiece(file, tokens)
    elif kind == "gpt2":
        tokenizer = _byte_level(file, tokens)
    else:
        raise ModelError(f"{file.path}: tokenizer.ggml.model={kind!r} is not supported; known: llama, gpt2")
    _add_special(tokenizer, file, kind)
    _add_begin_and_end(tokenizer, file, tokens, kind)
    return tokenizer


def _sentencepiece(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    gemma = file.get("general.architecture") in GEMMA
    if gemma:
        # Runs of spaces are stored as real spaces here, while text is looked up with the visible one.
        tokens = [SPACE * len(t) if " " in t and not t.strip() else t for t in tokens]
        ranks: list[float] | None = None
    else:
        scores = file.get("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise ModelError(f"{file.path}: a 'llama' vocabulary needs one entry of tokenizer.ggml.scores per token")
        ranks = scores.tolist()
    vocabulary = {token: i for i, token in enumerate(tokens)}
    cuts = cached_cuts(tokens, vocabulary, ranks)
    merges: Any = _Merges(tokens, cuts)
    unknown = tokens[file.get("tokenizer.ggml.unknown_token_id", 3)] if gemma else None
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True, unk_token=unknown)
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prefix = file.get("tokenizer.ggml.add_space_prefix", True)
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, "first" if prefix else "never", split=False)
        if prefix:
            steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


class _Merges(Sequence[tuple[str, str]]):
    """Merges made while they are read: half a million tuples kept alive cost the garbage collector 0.7 s."""

    def __init__(self, tokens: list[str], cuts: np.ndarray) -> None:
        self._tokens, self._cuts = tokens, cuts

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, index: Any) -> Any:
        token, cut = self._cuts[index].tolist()
        return self._tokens[token][:cut], self._tokens[token][cut:]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for index, cut in zip(self._cuts[:, 0].tolist(), self._cuts[:, 1].tolist(), strict=True):
            token = self._tokens[index]
            yield token[:cut], token[cut:]


def recovered_cuts(tokens: list[str], vocabulary: dict[str, int], ranks: list[float] | None) -> np.ndarray:
    """Merges that a vocabulary implies, most urgent first: uint32 [M, 2] of (index of the merged token, cut).

    ranks: score per token; order is score, then length of the left part, then of the right part, all descending.
    None: the order of the tokens is the order of the merges.
    """
    indices, cuts = [], []
    # A token that appears twice counts once, at its first place and with its last score.
    for token in vocabulary:
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                indices.append(vocabulary[token])
                cuts.append(cut)
    found = np.array((indices, cuts), dtype=np.uint32).T
    if ranks is None or not len(found):
        return found.reshape(-1, 2)
    scores = np.asarray(ranks)[found[:, 0]]
    lengths = np.array([len(t) for t in tokens], dtype=np.int64)[found[:, 0]]
    left = found[:, 1].astype(np.int64)
    return found[np.lexsort((left - lengths, -left, -scores))]


def cached_cuts(tokens: list[str], vocabulary: dict[str, int], ranks: list[float] | None) -> np.ndarray:
    """`recovered_cuts`, kept in the user's cache under a hash of its inputs: 0.6 s less at each start for Gemma."""
    key = blake2b("\0".join(tokens).encode(), digest_size=16)
    key.update(b"order" if ranks is None else np.asarray(ranks, dtype=np.float64).tobytes())
    path = cache_dir() / "merges" / f"{key.hexdigest()}.npy"
    try:
        cuts: np.ndarray = np.load(path, allow_pickle=False)
        if (
            cuts.dtype == np.uint32
            and cuts.ndim == 2
            and cuts.shape[1] == 2
            and cuts[:, 0].max(initial=0) < len(tokens)
        ):
            return cuts
    except (OSError, ValueError, EOFError):
        pass  # not there yet, or damaged: make it again
    cuts = recovered_cuts(tokens, vocabulary, ranks)
    if len(tokens) >= WORTH_CACHING:
        try:
            write_atomically(path, lambda target: _save(target, cuts))
        except OSError as error:
            logger.debug("cannot keep the recovered merges in %s: %s", path, error)
    return cuts


def _save(target: Path, cuts: np.ndarray) -> None:
    with target.open("wb") as stream:
        np.save(stream, cuts, allow_pickle=False)


def byte_alphabet() -> dict[int, str]:
    """Byte -> the printable character that stands for it in byte-level vocabularies (Radford et al. 2019, GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    for offset, byte in enumerate(b for b in range(256) if b not in table):
        table[byte] = chr(256 + offset)
    return table


def _byte_level(file: GGUFFile, tokens: list[str]) -> Tokenizer:
    merges = file.get("tokenizer.ggml.merges")
    if not merges:
        raise ModelError(f"{file.path}: a 'gpt2' vocabulary needs tokenizer.ggml.merges, which is missing")
    pre = file.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS:
        raise ModelError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported; known: {', '.join(SPLITS)}. "
            "Give a directory with tokenizer.json as `tokenizer`"
        )
    letters = byte_alphabet()
    alphabet = set(letters.values())

    def spelled(token: str) -> str:
        return token if set(token) <= alphabet else "".join(letters[b] for b in token.encode("utf-8"))

    vocabulary = {spelled(token): i for i, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False))
    split = SPLITS[pre]
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        steps: list[Any] = [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_special(tokenizer: Tokenizer, file: GGUFFile, kind: str) -> None:
    """Control tokens and those with a role are special; user-defined ones are only kept whole."""
    tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if types is None:
        return
    alphabet = set(byte_alphabet().values()) if kind == "gpt2" else None
    roles = [file.get(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos", "unknown", "padding")]
    named = [tokens[i] for i in roles if i is not None and i < len(tokens)]
    control, whole = [AddedToken(token, normalized=False, special=True) for token in named], []
    for token, token_type in zip(tokens, types.tolist(), strict=True):
        # In a byte-level vocabulary a control token outside the byte alphabet is a mislabelled ordinary one.
        if token_type == CONTROL and (alphabet is None or set(token) <= alphabet):
            control.append(AddedToken(token, normalized=False, special=True))
        elif token_type == USER_DEFINED and tokenizer.token_to_id(token) is not None:
            whole.append(AddedToken(token, normalized=False, special=False))
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(whole)


def _add_begin_and_end(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str], kind: str) -> None:
    """What `encode` puts around a text. A SentencePiece file without the flag gets a begin token."""
    begin, end = file.get("tokenizer.ggml.bos_token_id"), file.get("tokenizer.ggml.eos_token_id")
    add_begin = file.get("tokenizer.ggml.add_bos_token", kind == "llama") and begin is not None
    add_end = file.get("tokenizer.ggml.add_eos_token", False) and end is not None
    set_begin_and_end(
        tokenizer,
        (tokens[begin], begin) if add_begin else None,
        (tokens[end], end) if add_end else None,
    )


def set_begin_and_end(tokenizer: Tokenizer, begin: tuple[str, int] | None, end: tuple[str, int] | None) -> None:
    """Replace the post-processor by one that adds these (token, id)."""
    template = [f"{begin[0]}:0"] if begin else []
    template += ["$A:0"] + ([f"{end[0]}:0"] if end else [])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=None, special_tokens=[pair for pair in (begin, end) if pair]
    )
