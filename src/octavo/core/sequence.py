"""Requests and sequences: what is known, what is computed, what is still in flight.

Three counters that must never drift, all in token positions:

    num_tokens     known: prompt, output, and tokens drawn by a step in flight
    num_computed   handed to a step (the KV of positions below it is written once that step is done)
    num_done       written for certain: the step has reported back

A step computes `num_tokens - num_computed` positions or a part of them; nothing else is planned anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from octavo.core.reasons import report_text
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams

if TYPE_CHECKING:
    from octavo.core.block_table import BlockTable
    from octavo.core.step import Constraint

DEFAULT_PARAMS = SamplingParams()


class RequestState(Enum):
    """WAITING: in the queue (new or preempted). RUNNING: holds blocks. FINISHED: ended for whatever reason."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Miss:
    """Why the prefix cache did not go on after the last hit.

    kind: "none" (everything usable was hit), "off", "partial block" (fewer tokens left than a block), "different
    token", "salt", "adapter", "evicted", "never seen", "prompt logprobs" or "mean pooling" (the request must compute
    its whole prompt).
    """

    kind: str
    block: int = 0
    position: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """How much of a prompt was found when the request was (last) admitted."""

    blocks_hit: int
    tokens_hit: int
    miss: Miss

    def __str__(self) -> str:
        return report_text(self)


class Sequence:
    """One stream of tokens with a block table per group."""

    __slots__ = (
        "cumulative_logprob",
        "drafted",
        "epoch",
        "finish_reason",
        "index",
        "keys",
        "last_step",
        "num_computed",
        "num_done",
        "num_pending",
        "num_proposed",
        "num_published",
        "prompt_len",
        "request",
        "seq_id",
        "speculation",
        "started",
        "stop_reason",
        "tables",
        "tables_changed",
        "token_ids",
        "writable_until",
    )

    def __init__(self, seq_id: int, request: Request, index: int, token_ids: list[int]) -> None:
        self.seq_id = seq_id
        self.request = request
        self.index = index
        self.token_ids = token_ids
        self.prompt_len = request.prompt_len
        self.tables: list[BlockTable] = []
        self.tables_changed = False  # entries that the runner has not seen
        self.num_computed = 0
        self.num_done = 0
        self.num_pending = 0  # drawn by a step in flight, value not known here yet
        self.num_proposed = 0  # the step in flight computes so many guesses behind what is known
        self.speculation: Any = None  # what `Speculator` has learnt of it
        self.drafted: bool | None = None  # a draft model computes all that the model computes; None: not decided yet
        self.keys: list[bytes] = []  # chained hashes of its full blocks, grown on demand
        self.num_published = 0
        self.writable_until = 0  # positions below need no block and no copy before they are written
        self.started = False  # the runner has a row
        self.last_step = 0  # the step that computed something for it most recently
        self.epoch = 0  # raised by preemption: results of older epochs bring tokens, not computed positions
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        """Tokens drawn and known."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, tokens={self.num_tokens}, computed={self.num_computed})"


class Request:
    """What a user sent: a prompt and one or more sequences, admitted, preempted and aborted as a whole."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        arrival: float,
        number: int,
        seed: int,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        end_ids: tuple[int, ...] = (),
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
        max_len: int = 0,
        constraint: Constraint | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.prompt_len = len(prompt_token_ids)
        self.params = params
        self.arrival = arrival
        self.number = number  # position among all arrivals: breaks ties, names the age
        self.seed = seed
        self.priority = priority
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.end_ids = end_ids
        self.bad_word_ids = bad_word_ids
        self.max_len = max_len  # prompt + output, at most; for a pooling request prompt + 1
        self.constraint = constraint
        self.embedding: list[float] | None = None  # of a finished pooling request
        self.key: tuple[float, int] = (arrival, number)
        self.state = RequestState.WAITING
        self.sequences: list[Sequence] = []
        self.forked = False  # siblings have tables of their own
        self.num_cached_tokens = 0
        self.cache_report: CacheReport | None = None
        self.num_preemptions = 0
        self.cache_root: bytes | None = None
        self.swapped: dict[int, list[list[int]]] | None = None  # seq_id -> host ids per group while swapped out
        self.beam_state: Any = None
        self.prompt_logprobs: list[Any] = []
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters; neutral ones for a beam search or a pooling request."""
        return self.params if isinstance(self.params, SamplingParams) else DEFAULT_PARAMS

    @property
    def runner_params(self) -> SamplingParams:
        """What the sampler is told: best_of ranks by log-probability, so it needs the drawn tokens' own."""
        params = self.sampling
        return replace(params, logprobs=0) if params.num_sequences > params.n and params.logprobs is None else params

    @property
    def beam(self) -> BeamSearchParams | None:
        return self.params if isinstance(self.params, BeamSearchParams) else None

    @property
    def pooling(self) -> PoolingParams | None:
        return self.params if isinstance(self.params, PoolingParams) else None

    @property
    def unread_cache(self) -> str | None:
        """Why its whole prompt must be computed, cached or not; None where cached blocks may be taken."""
        if self.sampling.prompt_logprobs is not None:
            return "prompt logprobs"
        return "mean pooling" if self.pooling is not None and self.pooling.pooling == "mean" else None

    @property
    def width(self) -> int:
        """Sequences it may run at once."""
        return self.params.beam_width if isinstance(self.params, BeamSearchParams) else self.sampling.num_sequences

    @property
    def deadline(self) -> float | None:
        """On the clock of `arrival`, in seconds."""
        ms = self.params.deadline_ms
        return None if ms is None else self.arrival + ms / 1000.0

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def live(self) -> Iterator[Sequence]:
        """Sequences that have not ended."""
        return (s for s in self.sequences if s.finish_reason is None)

    def num_live(self) -> int:
        if len(self.sequences) == 1:
            return int(self.sequences[0].finish_reason is None)
        return sum(1 for _ in self.live())

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.state.value}, sequences={len(self.sequences)})"
