"""From a decision to the words of a plan, and from a result to tokens: one sequence's share of a step."""

from __future__ import annotations

from octavo.core.memory import KVMemory
from octavo.core.rounds import Round, SequenceNews, end_of
from octavo.core.sequence import Sequence
from octavo.core.step import LAST_SAMPLED, Drawn, ScheduledSequence, SequenceStart, TableUpdate


def commit_sequence(memory: KVMemory, seq: Sequence, round_: Round, starts: list[SequenceStart]) -> ScheduledSequence:
    """What was decided for `seq` counts as computed from now on; siblings fork at the end of their prompt.

    Guesses count too: those that turn out wrong are taken back with the result (`KVMemory.rewind`).
    Rows that the runner must open for it are appended to `starts`.
    """
    request = seq.request
    start, end = seq.num_computed, seq.num_computed + round_.decided[seq]
    proposed = round_.proposals.get(seq, ())
    seq.num_computed = end
    seq.last_step = memory.pool.clock + 1  # the step being planned
    known = len(seq.token_ids)
    tokens = tuple(seq.token_ids[start:end])
    if proposed:
        seq.num_proposed = len(proposed)
        tokens += proposed
    elif end > known:
        tokens += (LAST_SAMPLED,) * (end - max(known, start))
    if not seq.started:
        _open_row(seq, starts)
    drawing = [seq] if end == seq.num_tokens + len(proposed) else []
    if not request.forked and end >= request.prompt_len:
        request.forked = True
        for sibling in [s for s in request.live() if s is not seq and not s.tables]:
            memory.fork(seq, sibling)
            if sibling.num_tokens == end:
                drawing.append(sibling)
                _open_row(sibling, starts)
    for s in drawing:
        s.num_pending += request.beam is None and request.pooling is None
    updates: list[TableUpdate] = []
    if seq.tables_changed:
        seq.tables_changed = False
        for table in seq.tables:
            table.take_updates(updates)
    wanted = request.sampling.prompt_logprobs if start + 1 < request.prompt_len else None
    sample_ids = tuple(s.seq_id for s in drawing)
    drafted = seq.drafted is not False
    return ScheduledSequence(seq.seq_id, start, tokens, tuple(updates), sample_ids, wanted, len(proposed), drafted)


def append_drawn(seq: Sequence, drawn: Drawn) -> tuple[SequenceNews, tuple[str, int | None] | None]:
    """Give a sample the tokens it drew, up to the one that ends it: (its news, why it must end or None)."""
    seq.num_pending -= 1
    taken, end = 0, None
    for token in drawn.token_ids:
        seq.token_ids.append(token)
        taken += 1
        if (end := end_of(seq, token)) is not None:
            break
    if drawn.logprobs:
        seq.cumulative_logprob += sum(p.logprobs[0] for p in drawn.logprobs[:taken])
    return SequenceNews(seq, drawn.token_ids[:taken], drawn.logprobs[:taken]), end


def _open_row(seq: Sequence, starts: list[SequenceStart]) -> None:
    if seq.started:
        return
    seq.started = seq.tables_changed = True
    for table in seq.tables:
        table.forget_sent()
    request = seq.request
    params = request.runner_params
    starts.append(
        SequenceStart(
            seq.seq_id,
            request.request_id,
            seq.index,
            params,
            tuple(seq.token_ids),
            request.prompt_len,
            request.seed,
            request.end_ids,
            request.bad_word_ids,
            request.beam_state.num_candidates if request.beam else 0,
            request.constraint,
            request.pooling,
            request.adapter,
        )
    )
