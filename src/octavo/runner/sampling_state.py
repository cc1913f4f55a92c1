"""`SamplingState`: everything a sequence's next draw depends on besides its logits. It follows the sequence.

Built once from a `SequenceStart` and then told each drawn token (`push`), so a batch may be reordered, a row moved
or a neighbour replaced without any effect. The cost of a draw grows with the number of *different* tokens seen, and
only for sequences that asked for a penalty.

It does not know the batch, the block tables, or where noise comes from.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from octavo.core.step import SequenceStart

Row = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class TokenCounts:
    """The different tokens seen so far and how often each was *generated*. Adding a token is O(1)."""

    __slots__ = ("_counts", "_ids", "_place", "_size")

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        different = np.unique(np.asarray([*prompt, *output], dtype=np.int64))
        self._size = len(different)
        self._ids = different
        self._counts = np.zeros(len(different), dtype=np.float32)
        self._place = {token: place for place, token in enumerate(different.tolist())}
        for token in output:
            self._counts[self._place[token]] += 1

    def add(self, token: int) -> None:
        """Count one generated token."""
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = self._size
            if self._size == len(self._ids):
                room = max(16, self._size)
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[place] = token
            self._size += 1
        self._counts[place] += 1

    @property
    def ids(self) -> Ids:
        """Tokens seen, in no particular order."""
        return self._ids[: self._size]

    @property
    def counts(self) -> Row:
        """How often each of `ids` was generated; 0 for a token of the prompt only."""
        return self._counts[: self._size]


class SamplingState:
    """The sampling side of one sequence.

    error: set when the parameters name ids outside the vocabulary, or when no token continues the grammar; the sequence
    then draws nothing but this message.
    adjusts: `adjust` changes logits (so a caller must hand it a private copy of the row).
    """

    def __init__(self, start: SequenceStart, vocab_size: int) -> None:
        params = start.params
        self.seed = start.seed
        self.sample_index = start.sample_index
        self.num_candidates = start.num_candidates
        self.greedy = params.greedy
        self.temperature = params.temperature
        self.top_k = params.top_k if params.top_k < vocab_size else 0
        self.top_p = params.top_p
        self.min_p = params.min_p
        self.logprobs = params.logprobs
        self.num_output = len(start.token_ids) - start.prompt_len
        self._min_tokens = params.min_tokens
        self._end_ids = _ids(start.end_ids)
        self._grammar = (
            None
            if start.constraint is None
            else start.constraint.start(start.token_ids[start.prompt_len :], start.end_ids)
        )
        self._allowed = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
        self._bias_ids = _ids(params.logit_bias or ())
        self._bias = np.array(list((params.logit_bias or {}).values()), dtype=np.float32)
        self._bad_words = start.bad_word_ids
        longest = max(map(len, self._bad_words), default=1)
        output = start.token_ids[start.prompt_len :]
        self._recent = list(output[-(longest - 1) :]) if longest > 1 else []
        self._keep_recent = longest - 1
        self._repetition = params.repetition_penalty
        self._presence = params.presence_penalty
        self._frequency = params.frequency_penalty
        self._counts: TokenCounts | None = None
        self.error = self._outside(start, vocab_size)
        penalised = self._repetition != 1.0 or bool(self._presence) or bool(self._frequency)
        if penalised and self.error is None:
            prompt = start.token_ids[: start.prompt_len] if self._repetition != 1.0 else ()
            self._counts = TokenCounts(prompt, output)
        self._always_adjusts = bool(
            penalised
            or self._allowed is not None
            or self._bad_words
            or len(self._bias_ids)
            or self._grammar is not None
        )

    def _outside(self, start: SequenceStart, vocab_size: int) -> str | None:
        named: list[tuple[str, Sequence[int] | Ids]] = [
            ("logit_bias", self._bias_ids),
            ("allowed_token_ids", self._allowed if self._allowed is not None else ()),
            ("stop_token_ids", self._end_ids),
            *(("bad_words", word) for word in self._bad_words),
        ]
        if start.params.needs_history:
            named.append(("token", start.token_ids))
        for name, ids in named:
            for token in (min(ids), max(ids)) if len(ids) else ():
                if not 0 <= token < vocab_size:
                    return f"{name} id {int(token)} is outside the vocabulary; use ids 0 to {vocab_size - 1}"
        return None

    @property
    def adjusts(self) -> bool:
        """Whether `adjust` would change anything for the next draw."""
        return self._always_adjusts or (self.num_output < self._min_tokens and len(self._end_ids) > 0)

    @property
    def filters(self) -> bool:
        """Whether a filter (top_k, top_p, min_p) may remove tokens."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def plain_greedy(self) -> bool:
        """The draw is the argmax of the raw logits and nothing else was asked for."""
        return (
            self.greedy
            and self.logprobs is None
            and not self.num_candidates
            and self.error is None
            and not self.adjusts
        )

    def unadjusted(self) -> SamplingState:
        """The same draw without all that depends on the text so far: what a draft model guesses with."""
        plain = copy(self)
        plain._always_adjusts, plain._min_tokens, plain.logprobs, plain.error = False, 0, None, None
        return plain

    def push(self, token: int) -> None:
        """The sequence drew `token`."""
        self.num_output += 1
        if self._grammar is not None:
            self._grammar.push(token)
        if self._counts is not None:
            self._counts.add(token)
        if self._keep_recent:
            self._recent.append(token)
            del self._recent[: -self._keep_recent]

    def adjust(self, row: Row) -> None:
        """Change a private copy of the raw logits [V] in place, in this order.

        The grammar's tokens, allowed ids, bad words (matched against generated tokens), end ids before min_tokens,
        logit_bias, then penalties: repetition over prompt and output (divides a positive logit, multiplies a negative
        one; Keskar et al. 2019, section 4.1), frequency times count, presence once. A banned token becomes -inf and
        stays it.
        """
        if self._grammar is not None:
            self._grammar.restrict(row)
            self.error = self.error or self._grammar.error
        if self._allowed is not None:
            kept = row[self._allowed]
            row.fill(-np.inf)
            row[self._allowed] = kept
        for word in self._bad_words:
            # The tail of the right length must exist: an empty slice would match a longer word's start.
            before = len(word) - 1
            if before == 0 or (len(self._recent) >= before and tuple(self._recent[-before:]) == tuple(word[:-1])):
                row[word[-1]] = -np.inf
        if self.num_output < self._min_tokens:
            row[self._end_ids] = -np.inf
        if len(self._bias_ids):
            row[self._bias_ids] += self._bias
        if self._counts is not None:
            self._penalise(row, self._counts)

    def _penalise(self, row: Row, counts: TokenCounts) -> None:
        values: Row = row[counts.ids]
        if self._repetition != 1.0:
            factor = np.float32(self._repetition)
            values = np.where(values > 0, values / factor, values * factor)
        if self._frequency:
            values = values - np.float32(self._frequency) * counts.counts
        if self._presence:
            values = values - np.float32(self._presence) * (counts.counts > 0).astype(np.float32)
        row[counts.ids] = values

    def fallback(self, raw: Row) -> int:
        """The token to draw when the bans left nothing: the likeliest allowed id, or the likeliest of all.

        Bans that contradict each other must not stop the step; the choice is deterministic and keeps the strongest
        promise (allowed_token_ids) over the weaker ones (bad words, min_tokens). A grammar has no fallback: the
        sequence gets an `error`, and what is returned is no token.
        """
        if self._grammar is not None:
            self.error = self.error or "the grammar allows only tokens to which the model gives no finite logit"
            return -1
        if self._allowed is None:
            return int(raw.argmax())
        allowed = np.sort(self._allowed)
        return int(allowed[raw[allowed].argmax()])


def _ids(values: object) -> Ids:
    return np.array(list(values), dtype=np.int64)  # type: ignore[call-overload]
