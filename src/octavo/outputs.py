"""What a finished (or streaming) request looks like to its caller. Field names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Logprob:
    """Raw log-probability of one token, its rank (1 = most likely) and its text when there is a tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample. `token_ids`, `logprobs` and `text` end together.

    finish_reason: "stop" (an end token, stop id or stop string; which one is in stop_reason), "length",
    "abort", "deadline", "error" (what went wrong is in stop_reason), or None while it runs. `logprobs[i]` maps token
    id to `Logprob`, the chosen one always in.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """One request. `num_cached_tokens`: prompt tokens that were taken from the prefix cache.

    cache_report says how the prompt's blocks were found: blocks hit, and why the first miss missed. embedding: the
    vector of a finished pooling request (whose one output has neither text nor tokens, but the finish_reason).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    cache_report: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    embedding: list[float] | None = None


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt. `embedding`: one number for each hidden dimension of the model, float32 precision."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What is new in one sample since the delta before: deltas joined are exactly the full text and ids."""

    request_id: str
    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSequence:
    """One finished beam: tokens (prompt not included), text, sum of logprobs and length-penalised score."""

    token_ids: list[int]
    text: str
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass(slots=True)
class BeamSearchOutput:
    """Beams of one prompt, best first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSequence]
