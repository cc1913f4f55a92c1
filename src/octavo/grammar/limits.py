"""Bounds on what a grammar may be, checked before any of it is compiled: size, depth, references, arithmetic.

A schema comes from outside; what these bounds let through compiles in well under a second (the library's own fuel,
`FUEL`, bounds the rest). Each refusal is a `SamplingError` with the value, the limit and the place.
"""

from __future__ import annotations

import json
from fractions import Fraction
from math import lcm
from typing import Any

from octavo.errors import SamplingError
from octavo.sampling_params import StructuredOutputs

MAX_BYTES = 64 << 10
MAX_DEPTH = 60  # nested objects and arrays of a schema; brackets of a regex or a grammar
MAX_REFERENCES = 500
MAX_CHOICES = 2000
MAX_MULTIPLE = 4096  # numerator of multipleOf in lowest terms
#: llguidance's own limits: work while compiling, work for one mask, states, size.
FUEL = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def check(asked: StructuredOutputs) -> None:
    """Raise `SamplingError` for what is too large to be compiled."""
    kind = asked.kind
    if kind == "choice":
        choices = asked.choice or ()
        if len(choices) > MAX_CHOICES:
            raise SamplingError(f"choice: {len(choices)} strings; at most {MAX_CHOICES} are allowed")
        _size("choice", "".join(choices))
    elif kind == "json":
        schema_of(asked)
    elif kind in ("regex", "grammar"):
        text = asked.regex if kind == "regex" else asked.grammar
        assert text is not None
        _size(kind, text)
        _brackets(kind, _without_schemas(text) if kind == "grammar" else text)


def schema_of(asked: StructuredOutputs) -> Any:
    """The schema as plain values, checked. A schema is an object, or `true`."""
    text = asked.json
    if text is True:
        return {}
    assert isinstance(text, str)
    _size("json", text)
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise SamplingError(f"json: the schema is not JSON ({error})") from None
    if not isinstance(schema, dict) and schema is not True:
        raise SamplingError(f"json: a schema is an object, not {type(schema).__name__}")
    check_schema(schema)
    return {} if schema is True else schema


def _without_schemas(text: str) -> str:
    """A grammar without the JSON schemas in it (%json {…}), which keep the same limits."""
    rest, done = [], 0
    while (at := text.find("%json", done)) >= 0:
        start = text.find("{", at)
        try:
            schema, end = json.JSONDecoder(parse_constant=_no_constant).raw_decode(text, start if start >= 0 else at)
        except (ValueError, RecursionError) as error:
            raise SamplingError(f"grammar: %json is followed by no JSON object ({error})") from None
        check_schema(schema)
        rest.append(text[done:at])
        done = end
    return "".join([*rest, text[done:]])


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _size(name: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise SamplingError(f"{name}: {size} bytes; at most {MAX_BYTES} are allowed")


def _brackets(name: str, text: str) -> None:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    if deepest > MAX_DEPTH:
        raise SamplingError(f"{name}: {deepest} nested brackets; at most {MAX_DEPTH} are allowed")


def check_schema(schema: Any) -> None:
    """Depth, references and multiples of a schema, without recursion."""
    references, multiple = 0, 1
    stack: list[tuple[Any, int]] = [(schema, 1)]
    while stack:
        value, depth = stack.pop()
        if depth > MAX_DEPTH:
            raise SamplingError(f"json: the schema is nested deeper than {MAX_DEPTH} levels")
        if isinstance(value, dict):
            references += isinstance(value.get("$ref"), str)
            multiple = _multiple(value.get("multipleOf"), multiple)
            stack += ((inner, depth + 1) for inner in value.values() if isinstance(inner, (dict, list)))
        elif isinstance(value, list):
            stack += ((inner, depth + 1) for inner in value if isinstance(inner, (dict, list)))
    if references > MAX_REFERENCES:
        raise SamplingError(f"json: {references} references ($ref); at most {MAX_REFERENCES} are allowed")


def _multiple(value: Any, others: int) -> int:
    """The common multiple of the values so far (they may meet in one number)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return others
    common = lcm(others, abs(Fraction(str(value)).numerator)) if 1e-9 <= abs(value) <= 1e9 else 0
    if not 0 < common <= MAX_MULTIPLE:
        raise SamplingError(
            f"json: multipleOf={value}: the digits of its multiples cannot be checked one by one; use at most "
            f"{MAX_MULTIPLE} (for all multipleOf of the schema together), or a fraction such as 0.01"
        )
    return common
