"""The caller's side of one request: texts, ids and log-probabilities of its samples, kept in step.

Fed with the scheduler's news; owns the one `RequestOutput` that grows until the request is finished. What may still
turn into a stop string is neither in the text nor in the ids nor in the logprobs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.scheduler import SequenceNews
from octavo.core.sequence import Request, Sequence
from octavo.core.step import TokenLogprobs
from octavo.outputs import BeamSearchOutput, BeamSequence, CompletionOutput, Logprob, RequestOutput
from octavo.text.output import SequenceText

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer


class RequestText:
    """Output of one request. `output` is live."""

    def __init__(self, request: Request, prompt: str | None, tokenizer: Tokenizer | None) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._samples: dict[int, _SampleText] = {}
        if request.beam is None:
            for seq in request.sequences:
                self._samples[seq.index] = _SampleText(seq, tokenizer)
        self.output = RequestOutput(
            request.request_id,
            prompt,
            request.prompt_token_ids,
            [s.output for s in self._samples.values()],
            finished=False,
        )

    def push(self, news: SequenceNews) -> str | None:
        """Add a sequence's new tokens; returns the stop string they complete, if any."""
        sample = self._samples[news.sequence.index]
        stop = sample.push(news)
        if stop is None and news.sequence.finished:
            sample.close(news.sequence)
        return stop

    def drop_behind_stop(self, seq: Sequence) -> int:
        """A step may bring tokens behind the one that completes a stop string: they never were. Returns how many."""
        surplus = seq.num_output - self._samples[seq.index].num_taken
        del seq.token_ids[len(seq.token_ids) - surplus :]
        return surplus

    def close(self, seq: Sequence) -> None:
        """The engine ended the sequence (a stop string)."""
        self._samples[seq.index].close(seq)

    def end(self) -> None:
        """Every sequence has ended: fill in what is known only now."""
        request, output = self._request, self.output
        for seq in request.sequences:
            if seq.index in self._samples:
                self._samples[seq.index].end(seq)
        output.finished = True
        output.num_cached_tokens = request.num_cached_tokens
        output.embedding = request.embedding
        output.cache_report = request.cache_report
        if request.beam is None and request.sampling.prompt_logprobs is not None:
            # Nothing is stored for a prompt of one token, nor when the request ended before its first chunk.
            entries = request.prompt_logprobs or [None] * request.prompt_len
            output.prompt_logprobs = [None if e is None else _as_dict(e, self._tokenizer) for e in entries]
        for name, at in (
            ("queued", request.admitted_at),
            ("first_token", request.first_token_at),
            ("total", request.finished_at),
        ):
            if at is not None:
                output.metrics[f"{name}_s"] = at - request.arrival
        params = request.sampling
        if request.beam is None and params.num_sequences > params.n:
            output.outputs = sorted(output.outputs, key=lambda o: -(o.cumulative_logprob or 0.0))[: params.n]
            for index, sample in enumerate(output.outputs):
                sample.index = index
                if params.logprobs is None:
                    sample.logprobs = None

    def beams(self) -> BeamSearchOutput:
        """The result of a beam search: finished beams, best first; what ran when it was cut or failed."""
        request = self._request
        assert request.beam is not None
        penalty = request.beam.length_penalty
        found = [(h.token_ids, h.cumulative_logprob, h.score, h.finish_reason) for h in request.beam_state.finished]
        for seq in request.sequences:
            if seq.finish_reason in ("abort", "deadline", "error"):
                score = seq.cumulative_logprob / max(1, seq.num_output) ** penalty
                found.append((tuple(seq.output_token_ids), seq.cumulative_logprob, score, seq.finish_reason))
        found.sort(key=lambda f: -f[2])
        sequences = [BeamSequence(list(ids), self._decode(ids), total, score, why) for ids, total, score, why in found]
        self.output.outputs = [
            CompletionOutput(i, s.text, s.token_ids, s.cumulative_logprob, None, s.finish_reason)
            for i, s in enumerate(sequences)
        ]
        return BeamSearchOutput(request.request_id, self.output.prompt, request.prompt_token_ids, sequences)

    def _decode(self, ids: tuple[int, ...]) -> str:
        assert self._request.beam is not None
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(list(ids), skip_special_tokens=self._request.beam.skip_special_tokens)


class _SampleText:
    """One sample: tokens pushed so far, of which the first `output.token_ids` are shown."""

    def __init__(self, seq: Sequence, tokenizer: Tokenizer | None) -> None:
        params = seq.request.sampling
        self._text = SequenceText(tokenizer, params)
        self._tokenizer = tokenizer
        self._pending_ids: list[int] = []
        self._pending_logprobs: list[TokenLogprobs] = []
        self._closed = False
        wants = seq.request.runner_params.logprobs is not None
        self.output = CompletionOutput(
            seq.index, "", [], 0.0 if wants else None, [] if params.logprobs is not None else None
        )

    @property
    def num_taken(self) -> int:
        """Tokens up to the one that completed a stop string, or all so far."""
        return self._text.num_taken

    def push(self, news: SequenceNews) -> str | None:
        seq = news.sequence
        self._pending_ids += news.token_ids
        self._pending_logprobs += news.logprobs
        by_token = seq.finish_reason == "stop"
        delta = self._text.push(news.token_ids, finished=seq.finished, ended_by_token=by_token)
        self._show(delta.num_tokens)
        return delta.stop

    def _show(self, num_tokens: int) -> None:
        out = self.output
        out.text = self._text.text
        count = num_tokens - len(out.token_ids)
        if count <= 0:
            return
        out.token_ids += self._pending_ids[:count]
        del self._pending_ids[:count]
        if out.cumulative_logprob is not None:
            shown = self._pending_logprobs[:count]
            del self._pending_logprobs[:count]
            out.cumulative_logprob += sum(p.logprobs[0] for p in shown)
            if out.logprobs is not None:
                out.logprobs += [_as_dict(p, self._tokenizer) for p in shown]

    def close(self, seq: Sequence) -> None:
        self._closed = True
        self.output.finish_reason, self.output.stop_reason = seq.finish_reason, seq.stop_reason

    def end(self, seq: Sequence) -> None:
        """Ended from outside (abort, deadline): what was held back is shown after all."""
        if not self._closed:
            delta = self._text.push((), finished=True)
            self._show(delta.num_tokens)
            self.close(seq)


def _as_dict(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """token id -> Logprob: the k best and the chosen one."""
    result: dict[int, Logprob] = {}
    for place, (token, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:]), 1):
        result[token] = Logprob(logprob, place, tokenizer.token_text(token) if tokenizer else None)
    chosen = entry.token_ids[0]
    if chosen not in result:
        text = tokenizer.token_text(chosen) if tokenizer else None
        result[chosen] = Logprob(entry.logprobs[0], entry.rank, text)
    return result
