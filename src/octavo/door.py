"""The door: turns what a caller asked into a `Request`, or refuses with the value, the limit and the remedy.

Checks what needs the model: ids against the embedding's rows, parameters against the vocabulary, lengths. Whether the
request fits the pool is the scheduler's check. Pure but for the numbering of requests and the seeds of unseeded ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from secrets import randbits
from threading import Lock
from typing import TYPE_CHECKING

from octavo.core.sequence import Request
from octavo.errors import PromptError, RequestError, SamplingError
from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from octavo.grammar.compiler import CompiledGrammar, GrammarCompiler
    from octavo.models.tokenizer import Tokenizer

_MASK = (1 << 64) - 1


class Door:
    """One per engine. seed: makes the noise of unseeded requests repeatable; they still never share a stream."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        tokenizer: Tokenizer | None,
        *,
        seed: int | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        self._seed = seed
        self._number = 0
        self._grammars: GrammarCompiler | None = None
        self._lock = Lock()

    def admit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams | PoolingParams,
        *,
        arrival: float,
        priority: int,
        cache_salt: str | None,
        adapter: str | None = None,
    ) -> Request:
        """A checked request. Raises `PromptError` or `SamplingError`."""
        self._check_prompt(prompt_token_ids)
        if isinstance(params, SamplingParams):
            self._check_sampling(params)
        elif isinstance(params, BeamSearchParams):
            self._check_ids("stop_token_ids", params.stop_token_ids or ())
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
            raise RequestError(f"cache_salt={cache_salt!r}: must be a non-empty string")
        prompt_len = len(prompt_token_ids)
        max_tokens = 1 if isinstance(params, PoolingParams) else self._max_tokens(params, prompt_len)
        constraint = self.prepare(params)
        number = self._number
        self._number += 1
        return Request(
            request_id,
            prompt_token_ids,
            params,
            arrival=arrival,
            number=number,
            seed=self._seed_of(params, number),
            priority=priority,
            cache_salt=cache_salt,
            adapter=adapter,
            end_ids=self._end_ids(params),
            bad_word_ids=self._bad_words(params) if isinstance(params, SamplingParams) else (),
            max_len=prompt_len + max_tokens,
            constraint=constraint,
        )

    def prepare(
        self, params: SamplingParams | BeamSearchParams | PoolingParams, isolated: bool = False
    ) -> CompiledGrammar | None:
        """The grammar of a request, made or found; None without one. Raises `SamplingError`. For any thread.

        A caller that must not wait in `admit` calls this first, on another thread. isolated: see `GrammarCompiler`.
        """
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return None
        assert isinstance(params.structured_outputs, StructuredOutputs)
        ends = self._end_ids(params)
        grammar = self.grammars.compile(params.structured_outputs, isolated=isolated)
        if not grammar.can_end_with(ends):
            raise SamplingError(
                "structured_outputs: the model names no end token, so the text could never end; name a special token "
                "in stop_token_ids"
            )
        return grammar

    @property
    def grammars(self) -> GrammarCompiler:
        """Compiles and keeps grammars for this model. Raises `SamplingError` without a tokenizer."""
        if self._tokenizer is None:
            raise SamplingError("structured_outputs need a tokenizer, and the engine has none")
        with self._lock:
            if self._grammars is None:
                from octavo.grammar.compiler import GrammarCompiler  # only for those who use it

                self._grammars = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos)
            return self._grammars

    def _max_tokens(self, params: SamplingParams | BeamSearchParams, prompt_len: int) -> int:
        """Tokens that may be generated: as asked, at most what the context has room for."""
        room = self._max_model_len - prompt_len
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if isinstance(params, SamplingParams) and room > 0 and params.min_tokens > max_tokens:
            raise SamplingError(
                f"min_tokens={params.min_tokens}: only {max_tokens} tokens fit after a prompt of {prompt_len} "
                f"(max_model_len={self._max_model_len})"
            )
        return max_tokens

    def _end_ids(self, params: SamplingParams | BeamSearchParams | PoolingParams) -> tuple[int, ...]:
        if isinstance(params, PoolingParams):
            return ()
        ends = () if params.ignore_eos else self._eos
        return tuple(dict.fromkeys((*ends, *(params.stop_token_ids or ()))))

    def _seed_of(self, params: SamplingParams | BeamSearchParams | PoolingParams, number: int) -> int:
        given = params.seed if isinstance(params, SamplingParams) else 0
        if given is not None:
            return given & _MASK
        if self._seed is None:
            return randbits(64)
        digest = blake2b(f"{self._seed}|{number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _check_prompt(self, ids: list[int]) -> None:
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        try:
            low, high = min(ids), max(ids)
        except TypeError:
            raise PromptError("prompt_token_ids must be integers") from None
        if not all(type(i) is int for i in ids):
            raise PromptError("prompt_token_ids must be integers")
        if low < 0 or high >= self._vocab_size:
            bad = low if low < 0 else high
            raise PromptError(
                f"prompt token id {bad} (position {ids.index(bad)}) is outside the vocabulary: "
                f"ids run from 0 to {self._vocab_size - 1}"
            )

    def _check_sampling(self, params: SamplingParams) -> None:
        self._check_ids("stop_token_ids", params.stop_token_ids or ())
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logit_bias", params.logit_bias or ())
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > self._vocab_size:
                raise SamplingError(f"{name}={value}: the vocabulary has {self._vocab_size} tokens")
        if self._tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise SamplingError(f"{name}={getattr(params, name)!r} needs a tokenizer, and the engine has none")

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        for i in ids:
            if not 0 <= i < self._vocab_size:
                raise SamplingError(f"{name}: id {i} is outside the vocabulary (0 to {self._vocab_size - 1})")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell a bad word: at the start of a text, and after a space (as vLLM does)."""
        if not params.bad_words:
            return ()
        assert self._tokenizer is not None
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word, " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if ids:
                    found[ids] = None
        return tuple(found)
