"""`GrammarMatcher`: which tokens may come next in one sequence. It follows the sequence, as its sampling state does.

Fail closed: once a matcher is in error (a limit of the library was reached, or a state was reached that no token
continues) it allows nothing any more and says why; it never allows a token that the grammar does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.grammar.vocabulary import Vocabulary


class GrammarMatcher:
    """One sequence's place in a grammar. end_ids: the request's own ends, allowed exactly where the grammar may stop.

    error: why nothing is allowed any more, or None.
    """

    __slots__ = ("_backend", "_ends", "_started", "_vocabulary", "error")

    def __init__(self, backend: Any, vocabulary: Vocabulary, end_ids: Sequence[int] = ()) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._started = False
        self.error: str | None = None
        # A stop id that is text is text, and allowed where the grammar allows it; one without text is an end.
        self._ends = vocabulary.without_text(end_ids)

    def push(self, token: int) -> None:
        """The sequence drew `token`."""
        if self.error is not None or token in self._ends:
            return
        if not self._started:
            self._started = True
            alias = self._vocabulary.first_alias
            if alias is not None:
                token = int(alias[token])
        if token < 0 or not self._backend.consume_token(token):
            self.error = f"the grammar does not allow the text so far: {self._reason()}"

    def allowed(self) -> npt.NDArray[np.bool_]:
        """bool [V]: may this token come next? All False only with an `error`."""
        size = self._vocabulary.size
        if self.error is None:
            bits = np.frombuffer(self._backend.compute_bitmask(), dtype=np.uint8)
            mask: npt.NDArray[np.bool_] = np.unpackbits(bits, bitorder="little", count=size).view(np.bool_)
            if self._backend.is_error():
                self.error = f"the grammar cannot be followed here: {self._reason()}"
            else:
                return self._finish(mask)
        return np.zeros(size, dtype=np.bool_)

    def _finish(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """The ends and the first token's own spelling; an empty mask is an error."""
        alias = self._vocabulary.first_alias
        if alias is not None and not self._started:
            mask = np.where(alias >= 0, mask[alias], False)
        mask[list(self._vocabulary.ends)] = False
        if self._ends and self._backend.is_accepting():
            mask[list(self._ends)] = True
        if not mask.any():
            self.error = "the grammar has come to a place where no token of the vocabulary may follow"
        return mask

    def restrict(self, row: npt.NDArray[np.float32]) -> None:
        """Set the logits [V] of tokens that may not come next to -inf, in place."""
        allowed = self.allowed()
        count = int(np.count_nonzero(allowed))
        if count < len(row) // 8:  # a few kept numbers are cheaper to put back than many to overwrite
            ids = np.flatnonzero(allowed)
            kept = row[ids]
            row.fill(-np.inf)
            row[ids] = kept
        else:
            row[np.flatnonzero(~allowed)] = -np.inf

    def may_end(self) -> bool:
        """Is the text complete as it stands?"""
        return self.error is None and bool(self._backend.is_accepting())

    def _reason(self) -> str:
        return str(self._backend.get_error()).split("\n<non-verbose/>")[0].strip() or "no such text"
