"""Draws of a step, guesses included: behind each guess a sequence goes on drawing for as long as it drew the guess.

Every token is drawn from the model's own distribution at its place, with the sequence's own noise for that place, and a
guess only decides whether the next place's logits can be used. So the tokens are those of a run without guesses: the
same text under greedy decoding, and under sampling not just the same distribution but the same draw from it.

A sequence's state (penalties, grammar, counts) is told each token as soon as it is drawn and never anything else, so
there is nothing to undo. Sequences whose draws depend on that state draw place by place; all others draw at all their
places at once.

It knows neither logits nor the sampler: `answer` turns draws into results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.core.step import Drawn
from octavo.runner.rows import SequenceRow
from octavo.runner.sampler import Draw


class Pick(NamedTuple):
    """One sequence's draws: from logit row `logit_row` the token at `position`, from the next the one behind, …"""

    row: SequenceRow
    logit_row: int
    position: int
    guesses: tuple[int, ...] = ()


def draw_picks(answer: Callable[[list[Draw]], list[Drawn]], picks: Sequence[Pick]) -> list[Drawn]:
    """One `Drawn` per pick, in order; the rows know of their tokens, or of the error that ends them."""
    found: list[list[Drawn]] = [[] for _ in picks]
    going = list(range(len(picks)))
    place = 0
    while going:
        owners: list[int] = []
        draws: list[Draw] = []
        for i in going:
            pick = picks[i]
            last = place if pick.row.state.adjusts else len(pick.guesses)
            for p in range(place, last + 1):
                owners.append(i)
                draws.append(Draw(pick.logit_row + p, pick.row.state, pick.position + p))
        open_ = dict.fromkeys(going)
        for i, result in zip(owners, answer(draws), strict=True):
            if i in open_ and not _goes_on(picks[i], found[i], result):
                del open_[i]
        going = list(open_)
        place += 1
    return [_joined(results) for results in found]


def _goes_on(pick: Pick, found: list[Drawn], result: Drawn) -> bool:
    """Take one result; does what it drew make the next place's logits usable?"""
    row, place = pick.row, len(found)
    error = row.error or result.error
    if error is not None and place:
        return False  # the tokens before it count; it is met again in the next step, at its own place
    if error is not None:
        row.error, row.last_token = error, None
        found.append(Drawn((), error=error))
        return False
    found.append(result)
    for token in result.token_ids:
        row.push(token)
    if place == len(pick.guesses):
        return False
    guess = pick.guesses[place]
    return result.token_ids == (guess,) and guess not in row.end_ids


def _joined(results: list[Drawn]) -> Drawn:
    if len(results) == 1:
        return results[0]
    return Drawn(tuple(t for r in results for t in r.token_ids), tuple(p for r in results for p in r.logprobs))
