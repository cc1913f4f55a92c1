"""`SequenceText`: the text of one sequence, from the tokens it drew to what its caller may see.

Joins the detokenizer and the stop checker, and keeps ids and text in step: at every moment the first `num_tokens`
tokens are exactly those that begin before the end of the text shown, and when the sequence has ended they are all that
belongs to it. A token that carries both the last kept characters and the beginning of a stop string is kept (without
it the kept characters would have no token); a token that lies wholly in the stop string, or after it, is not.

Knows nothing of logprobs: a caller cuts them at `num_tokens` too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.stop import StopChecker


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push changed: text to show, how many tokens may be shown in all, the stop string that matched."""

    text: str
    num_tokens: int
    stop: str | None = None


class SequenceText:
    """Text of one sequence under its request's parameters.

    tokenizer None, or `detokenize=False`: there is no text, and every token is shown at once.
    Never pushed to again after a delta with `stop`, or after `finished=True`.
    """

    __slots__ = ("_checker", "_detokenizer", "_hide_end_token", "_min_tokens", "_pushed", "num_tokens", "text")

    def __init__(self, tokenizer: Any | None, params: SamplingParams | BeamSearchParams) -> None:
        sampling = params if isinstance(params, SamplingParams) else None
        self.text = ""  # shown so far
        self.num_tokens = 0  # tokens shown so far
        self._pushed = 0
        self._min_tokens = sampling.min_tokens if sampling else 0
        self._hide_end_token = not (sampling and sampling.include_stop_str_in_output)
        self._detokenizer: Detokenizer | None = None
        self._checker: StopChecker | None = None
        if tokenizer is not None and (sampling is None or sampling.detokenize):
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
            if sampling and sampling.stop:
                self._checker = StopChecker(tuple(sampling.stop), include=sampling.include_stop_str_in_output)

    @property
    def num_taken(self) -> int:
        """Tokens pushed, up to the one that completed a stop string."""
        return self._pushed

    def push(self, token_ids: Sequence[int], finished: bool = False, *, ended_by_token: bool = False) -> TextDelta:
        """Add the tokens drawn in a step.

        finished: no more will come; all text held back is decided now. ended_by_token: the last of `token_ids` is an
        end or stop id; it counts as a token, but its text is shown only with `include_stop_str_in_output`.
        A stop string that is completed by one of the first `min_tokens` tokens does not count.
        """
        if self._detokenizer is None:
            self._pushed += len(token_ids)
            self.num_tokens = self._pushed
            return TextDelta("", self.num_tokens)
        visible = token_ids[:-1] if ended_by_token and self._hide_end_token else token_ids
        hidden = len(token_ids) - len(visible)
        if self._checker is None:
            delta = self._detokenizer.push(visible)
            if finished:
                delta += self._detokenizer.flush()
            self._pushed += len(token_ids)
            self.num_tokens = self._pushed
            self.text += delta
            return TextDelta(delta, self.num_tokens)
        return self._push_checked(self._detokenizer, self._checker, visible, hidden, finished)

    def _push_checked(
        self, detokenizer: Detokenizer, checker: StopChecker, visible: Sequence[int], hidden: int, finished: bool
    ) -> TextDelta:
        """As `push`, token by token: a stop string may end in any of them."""
        parts = []
        for token_id in visible:
            self._pushed += 1
            parts.append(checker.push(detokenizer.push((token_id,)), armed=self._pushed > self._min_tokens))
            if checker.stop is not None:
                break
        if finished and checker.stop is None:
            parts.append(checker.push(detokenizer.flush(), armed=self._pushed > self._min_tokens))
            if checker.stop is None:
                parts.append(checker.flush())
        delta = "".join(parts)
        self.text += delta
        if finished and checker.stop is None:
            self._pushed += hidden
            self.num_tokens = self._pushed
        else:
            self.num_tokens = bisect_left(detokenizer.starts, len(self.text))
        return TextDelta(delta, self.num_tokens, checker.stop)
