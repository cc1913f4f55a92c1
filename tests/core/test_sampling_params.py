"""Sampling parameters: vLLM's defaults, every limit with its value in the message, no field ignored or shared."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from octavo.errors import RequestError, SamplingError
from octavo.sampling_params import MAX_LOGPROBS, MAX_N, MAX_STOP_STRINGS, BeamSearchParams, SamplingParams


def test_defaults_are_those_users_know() -> None:
    p = SamplingParams()
    assert (p.n, p.best_of, p.temperature, p.top_k, p.top_p, p.min_p) == (1, None, 1.0, 0, 1.0, 0.0)
    assert (p.max_tokens, p.min_tokens, p.seed, p.ignore_eos, p.detokenize) == (16, 0, None, False, True)
    assert (p.presence_penalty, p.frequency_penalty, p.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (p.stop, p.bad_words, p.stop_token_ids, p.logprobs, p.prompt_logprobs) == ((), (), (), None, None)
    assert p.skip_special_tokens and not p.include_stop_str_in_output and p.deadline_ms is None


BAD: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n=0: must be at least 1"),
    ({"n": -1}, "n=-1"),
    ({"n": MAX_N + 1}, f"n={MAX_N + 1}: must be at least 1 and at most {MAX_N}"),
    ({"n": 1.5}, r"n=1\.5: must be an integer"),
    ({"n": True}, "n=True: must be an integer"),
    ({"n": None}, "n=None: must be an integer"),
    ({"n": 3, "best_of": 2}, "best_of=2: must be at least n=3"),
    ({"best_of": 257}, "best_of=257"),
    ({"temperature": -0.1}, r"temperature=-0\.1: must lie in \[0, 100\]"),
    ({"temperature": math.nan}, "temperature=nan: must be a finite number"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"temperature": False}, "temperature=False"),
    ({"top_k": -2}, "top_k=-2"),
    ({"top_p": 0.0}, r"top_p=0\.0: must lie in \(0, 1\]"),
    ({"top_p": 1.01}, r"top_p=1\.01"),
    ({"min_p": -0.1}, r"min_p=-0\.1"),
    ({"presence_penalty": 2.1}, r"presence_penalty=2\.1: must lie in \[-2, 2\]"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, r"repetition_penalty=0: must lie in \(0, 10\]"),
    ({"logit_bias": {1: 101}}, r"logit_bias\[1\]=101"),
    ({"logit_bias": {-1: 1}}, "logit_bias key=-1"),
    ({"logit_bias": {"x": 1}}, "logit_bias key='x'"),
    ({"allowed_token_ids": []}, "allowed_token_ids=.*allows nothing"),
    ({"allowed_token_ids": [-3]}, "allowed_token_ids entry=-3"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids entry='a'"),
    ({"stop": ""}, "stop='': must be a non-empty string"),
    ({"stop": ["a", 3]}, "stop=3"),
    ({"stop": ["a"] * (MAX_STOP_STRINGS + 1)}, f"at most {MAX_STOP_STRINGS} are allowed"),
    ({"stop": "a", "detokenize": False}, "needs detokenize=True"),
    ({"bad_words": ["a"], "detokenize": False}, "needs detokenize=True"),
    ({"bad_words": [""]}, "bad_words=''"),
    ({"seed": 2**64}, "seed="),
    ({"seed": "x"}, "seed='x': must be an integer or None"),
    ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 17}, "min_tokens=17: must not exceed max_tokens=16"),
    ({"logprobs": MAX_LOGPROBS + 1}, f"logprobs={MAX_LOGPROBS + 1}"),
    ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
    ({"deadline_ms": 0}, "deadline_ms=0"),
    ({"ignore_eos": 1}, "ignore_eos=1: must be True or False"),
    ({"n": 2, "temperature": 0}, "greedy samples .* are all the same; use n=1"),
    ({"best_of": 2, "temperature": 0}, "greedy samples"),
]


@pytest.mark.parametrize(("given", "message"), BAD, ids=lambda x: str(x)[:50])
def test_bad_values_name_the_value_and_the_limit(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message) as caught:
        SamplingParams(**given)
    assert isinstance(caught.value, RequestError) and isinstance(caught.value, ValueError)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SamplingError, match=r"unknown sampling parameters length_penalty, use_beam_search; known: n, "):
        SamplingParams(use_beam_search=True, length_penalty=1.0)
    with pytest.raises(SamplingError, match="unknown sampling parameter temprature;"):
        SamplingParams(temprature=1)


def test_good_values_at_the_limits() -> None:
    SamplingParams(
        n=MAX_N, best_of=MAX_N, top_p=1e-9, min_p=1.0, temperature=100, logprobs=MAX_LOGPROBS, seed=2**64 - 1
    )
    SamplingParams(
        seed=-(2**63), max_tokens=None, min_tokens=10**6, logprobs=MAX_LOGPROBS, logit_bias={0: -100}, deadline_ms=0.01
    )
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams(logit_bias={"17": 1.0}).logit_bias == {17: 1.0}
    assert SamplingParams(stop="x").stop == SamplingParams(stop=["x"]).stop == ("x",)


def test_a_callers_later_edits_change_nothing() -> None:
    stop, bias, ids = ["a"], {1: 2.0}, [3]
    params = SamplingParams(stop=stop, logit_bias=bias, stop_token_ids=ids, allowed_token_ids=ids)
    stop.append("b")
    bias[2] = 1.0
    ids.append(4)
    assert (params.stop, params.logit_bias, params.stop_token_ids, params.allowed_token_ids) == (
        ("a",),
        {1: 2.0},
        (3,),
        (3,),
    )
    with pytest.raises(FrozenInstanceError):
        params.n = 3  # type: ignore[misc]


def test_what_follows_from_the_fields() -> None:
    assert SamplingParams(n=2, best_of=5).num_sequences == 5 and SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(temperature=0).greedy and not SamplingParams().greedy
    for given in (
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"bad_words": "x"},
    ):
        assert SamplingParams(**given).needs_history
    assert not SamplingParams(logit_bias={1: 1.0}).needs_history


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"beam_width": 0}, "beam_width=0"),
        ({"beam_width": 65}, "beam_width=65: must be at least 1 and at most 64"),
        ({"beam_width": 2, "max_tokens": None}, "max_tokens=None"),
        ({"beam_width": 2, "length_penalty": math.nan}, "length_penalty=nan"),
        ({"beam_width": 2, "early_stopping": "always"}, "early_stopping='always': must be True, False or \"never\""),
        ({"beam_width": 2, "early_stopping": 1}, "early_stopping=1"),
        ({"beam_width": 2, "stop_token_ids": [-1]}, "stop_token_ids entry=-1"),
        ({"beam_width": 2, "deadline_ms": -1}, "deadline_ms=-1"),
        ({"beam_width": 2, "ignore_eos": "no"}, "ignore_eos='no'"),
    ],
)
def test_beam_parameters(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SamplingError, match=message):
        BeamSearchParams(**given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stop": 5}, "stop=5: must be a string or a list of strings"),
        ({"bad_words": 4}, "bad_words=4: must be a string or a list of strings"),
        ({"stop_token_ids": 5}, "stop_token_ids=5: must be a list of token ids"),
        ({"allowed_token_ids": "12"}, "allowed_token_ids='12': must be a list of token ids"),
        ({"logit_bias": 3}, "logit_bias=3: must map token ids to numbers"),
    ],
)
def test_wrong_types_are_named(given: dict[str, object], says: str) -> None:
    with pytest.raises(SamplingError, match=re.escape(says)):
        SamplingParams(**given)
