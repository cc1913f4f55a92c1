"""What a caller may ask of one request. Names and defaults are vLLM's, so existing programs keep working.

Everything is checked here, at construction, against fixed limits; checks that need the model (vocabulary size,
`max_model_len`, pool size) happen when the request arrives. There is no field that is accepted and ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from octavo.errors import SamplingError

MAX_N = 256  # samples of one request; vLLM allows 16384, which only ever meant an out-of-memory error
MAX_LOGPROBS = 128
MAX_STOP_STRINGS = 64


def _fail(name: str, value: object, rule: str) -> SamplingError:
    return SamplingError(f"{name}={value!r}: {rule}")


def _int(name: str, value: object, low: int, high: int | None = None, *, none: bool = False) -> None:
    if value is None and none:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise _fail(name, value, "must be an integer" + (" or None" if none else ""))
    if value < low or (high is not None and value > high):
        raise _fail(name, value, f"must be at least {low}" + (f" and at most {high}" if high is not None else ""))


def _real(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(float(value)):
        raise _fail(name, value, "must be a finite number")
    if float(value) > high or float(value) < low or (open_low and float(value) == low):
        raise _fail(name, value, f"must lie in {'(' if open_low else '['}{low:g}, {high:g}]")


def _ids(name: str, value: Iterable[int] | None) -> tuple[int, ...]:
    if value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
        raise _fail(name, value, "must be a list of token ids")
    ids = () if value is None else tuple(value)
    for i in ids:
        _int(f"{name} entry", i, 0)
    return ids


def _strings(name: str, value: str | Iterable[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable):
        raise _fail(name, value, "must be a string or a list of strings")
    strings = (value,) if isinstance(value, str) else tuple(value)
    for s in strings:
        if not isinstance(s, str) or not s:
            raise _fail(name, s, "must be a non-empty string")
    return strings


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What a text must look like; exactly one of the five. Names are vLLM's.

    json: a JSON schema (a mapping, or its text). json_object: any JSON object. regex: the whole text matches
    (Rust's syntax, no look-around and no back-references). choice: one of these strings. grammar: a context-free
    grammar in llguidance's Lark dialect. Needs the extra octavo[structured] and a tokenizer; what cannot be compiled
    is refused when the request arrives, see docs/structured.md.
    """

    json: Mapping[str, Any] | bool | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise _fail("json_object", self.json_object, "must be True or False")
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if self.json is False:
            raise _fail("json", False, "a schema that allows nothing; leave it out")
        if len(given) != 1:
            known = ", ".join(f.name for f in fields(self))
            raise SamplingError(f"structured_outputs: give exactly one of {known}; got {', '.join(given) or 'none'}")
        if self.choice is not None:
            choices = () if isinstance(self.choice, str) else _strings("choice", self.choice)
            if not choices:
                raise _fail("choice", self.choice, "must be a non-empty list of strings")
            object.__setattr__(self, "choice", tuple(dict.fromkeys(choices)))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise _fail(name, value, "must be a non-empty string")
        if self.json is not None and not isinstance(self.json, str):
            try:
                text = json.dumps(self.json, ensure_ascii=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise SamplingError(f"json: the schema is not plain JSON ({error})") from None
            object.__setattr__(self, "json", text)

    @property
    def kind(self) -> str:
        """Name of the field that was given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) not in (None, False))


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """What a prompt is to be turned into: one vector. Nothing is generated.

    pooling: "mean" of the model's final hidden states (after the last norm) over all prompt tokens, or "last": the
    state of the last one. normalize: scaled to length 1. deadline_ms as in `SamplingParams`.
    """

    pooling: str = "mean"
    normalize: bool = True
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "last"):
            raise _fail("pooling", self.pooling, 'must be "mean" or "last"')
        if not isinstance(self.normalize, bool):
            raise _fail("normalize", self.normalize, "must be True or False")
        if self.deadline_ms is not None:
            _real("deadline_ms", self.deadline_ms, 0.0, 1e12, open_low=True)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request.

    n: samples to return. best_of: samples to draw, of which the n with the highest cumulative logprob are kept
    (None: n). temperature 0 is greedy. top_k 0 or -1, top_p 1, min_p 0 switch a filter off; the filters apply in
    that order, after penalties and temperature. presence and frequency penalties count output tokens only,
    repetition_penalty counts prompt and output. seed None: fresh noise for every request. stop / stop_token_ids
    end the text (the stop string is cut unless include_stop_str_in_output). max_tokens None: the rest of the
    context. logprobs k: the k most likely tokens and the chosen one, raw and in float32. prompt_logprobs k:
    the same for prompt tokens (such a request does not read the prefix cache). structured_outputs: what the text must
    look like (`StructuredOutputs`, or a mapping of its fields); the end is then the grammar's to decide.
    deadline_ms: the request ends with finish_reason "deadline" that many milliseconds after it arrived.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    deadline_ms: float | None = None

    def __init__(self, **given: Any) -> None:
        known = {f.name: f.default for f in fields(self)}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise SamplingError(
                f"unknown sampling parameter{'s' * (len(unknown) > 1)} {', '.join(unknown)}; known: {', '.join(known)}"
            )
        for name, default in known.items():
            object.__setattr__(self, name, given.get(name, default))
        self._normalise()
        self._check()

    def _normalise(self) -> None:
        """Freeze containers so that a caller's later edit changes nothing. Only called while constructing."""
        put = object.__setattr__
        put(self, "stop", _strings("stop", self.stop))
        put(self, "bad_words", _strings("bad_words", self.bad_words))
        put(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise _fail("logit_bias", self.logit_bias, "must map token ids to numbers")
            put(self, "logit_bias", {_as_id(k): v for k, v in self.logit_bias.items()})
        if self.top_k == -1:
            put(self, "top_k", 0)
        if self.structured_outputs is not None:
            put(self, "structured_outputs", _structured(self.structured_outputs))

    def _check(self) -> None:
        _int("n", self.n, 1, MAX_N)
        _int("best_of", self.best_of, 1, MAX_N, none=True)
        if self.best_of is not None and self.best_of < self.n:
            raise _fail("best_of", self.best_of, f"must be at least n={self.n}")
        _real("temperature", self.temperature, 0.0, 100.0)
        _int("top_k", self.top_k, 0)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, 10.0, open_low=True)
        _int("seed", self.seed, -(2**63), 2**64 - 1, none=True)
        _int("max_tokens", self.max_tokens, 1, none=True)
        _int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _fail("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        _int("logprobs", self.logprobs, 0, MAX_LOGPROBS, none=True)
        _int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, none=True)
        if self.deadline_ms is not None:
            _real("deadline_ms", self.deadline_ms, 0.0, 1e12, open_low=True)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "must be True or False")
        for token, bias in (self.logit_bias or {}).items():
            _int("logit_bias key", token, 0)
            _real(f"logit_bias[{token}]", bias, -100.0, 100.0)
        self._check_contradictions()

    def _check_contradictions(self) -> None:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise _fail("allowed_token_ids", [], "allows nothing; leave it None to allow every token")
        if len(self.stop or ()) > MAX_STOP_STRINGS:
            raise _fail("stop", f"{len(self.stop or ())} strings", f"at most {MAX_STOP_STRINGS} are allowed")
        if self.stop and not self.detokenize:
            raise _fail("stop", self.stop, "needs detokenize=True: stop strings are found in the text")
        if self.bad_words and not self.detokenize:
            raise _fail("bad_words", self.bad_words, "needs detokenize=True and a tokenizer")
        if self.structured_outputs is not None:
            self._check_structured()
        if self.temperature == 0 and self.num_sequences > 1:
            raise _fail("n", self.num_sequences, "greedy samples (temperature=0) are all the same; use n=1")

    def _check_structured(self) -> None:
        """What would take the last way out of a grammar is refused, so that every text can be completed."""
        given = {
            "min_tokens": (self.min_tokens > 0, "the grammar decides where the text may end; write the length into it"),
            "ignore_eos": (self.ignore_eos, "the text ends where the grammar ends"),
            "allowed_token_ids": (self.allowed_token_ids is not None, "it could forbid every token that fits"),
            "bad_words": (bool(self.bad_words), "they could forbid every token that fits; exclude them in the grammar"),
        }
        for name, (present, reason) in given.items():
            if present:
                raise SamplingError(f"{name}: does not go together with structured_outputs: {reason}")

    @property
    def num_sequences(self) -> int:
        """Sequences this request runs: best_of, or n."""
        return self.best_of or self.n

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """The sampler must know the tokens so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0 or self.bad_words)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search with the semantics of transformers' `generate(num_beams=beam_width, do_sample=False)`.

    Scores are sums of log-probabilities divided by (generated length ** length_penalty). early_stopping True ends
    when beam_width texts are finished, False when no running beam can still win by the usual estimate, "never" when
    none can win at all (transformers' three modes). deadline_ms as in `SamplingParams`.
    """

    beam_width: int
    max_tokens: int = 16
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        _int("beam_width", self.beam_width, 1, 64)
        _int("max_tokens", self.max_tokens, 1)
        _real("length_penalty", self.length_penalty, -10.0, 10.0)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":  # 1 == True, but is not it
            raise _fail("early_stopping", self.early_stopping, 'must be True, False or "never"')
        object.__setattr__(self, "stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "must be True or False")
        if self.deadline_ms is not None:
            _real("deadline_ms", self.deadline_ms, 0.0, 1e12, open_low=True)


def _structured(value: object) -> StructuredOutputs:
    if isinstance(value, StructuredOutputs):
        return value
    if not isinstance(value, Mapping):
        raise _fail("structured_outputs", value, "must be StructuredOutputs, or a mapping of its fields")
    known = [f.name for f in fields(StructuredOutputs)]
    if unknown := sorted(str(k) for k in value if k not in known):
        raise SamplingError(f"structured_outputs: unknown {', '.join(unknown)}; known: {', '.join(known)}")
    return StructuredOutputs(**value)


def _as_id(key: object) -> object:
    """JSON objects have string keys: "50256" means 50256."""
    return int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key
