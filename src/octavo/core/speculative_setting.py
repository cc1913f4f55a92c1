"""`speculative=`: what a user may write, checked and completed. Plain values only, so a config can be stored and shown.

    "ngram"  "ngram:5"                                     what followed the same tokens before, up to 5 at once
    "draft:PATH"  "draft:PATH:4"                           a smaller model with the same vocabulary
    {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    {"method": "draft", "model": PATH, "num_speculative_tokens": 4, "quantization": "int4"}

A draft's own quantization may be left out: it is then that of the engine.

The names are vLLM's. A string that begins with { is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.core.weight_format import parse_weight_format
from octavo.errors import ConfigError

DEFAULTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "draft": {"method": "draft", "model": None, "num_speculative_tokens": 4},
}
#: Keys that may be left out.
OPTIONAL = {"ngram": (), "draft": ("quantization",)}
MOST_TOKENS = 64
_SHOW = 'write "ngram", "ngram:5", "draft:PATH:4", or a mapping with method, num_speculative_tokens, …'


def parse_speculative(given: Any) -> dict[str, Any] | None:
    """The complete mapping, or None for None. Raises `ConfigError` that names the value, the limit and the remedy."""
    if given is None:
        return None
    asked = _from_text(given) if isinstance(given, str) else given
    if not isinstance(asked, Mapping) or not asked:
        raise ConfigError(f"speculative={given!r}: {_SHOW}")
    method = asked.get("method", "draft" if "model" in asked else None)
    method = {"draft_model": "draft", "prompt_lookup": "ngram"}.get(method, method)
    if method not in DEFAULTS:
        raise ConfigError(f"speculative: method {method!r} is not known; methods are ngram and draft")
    defaults = DEFAULTS[method]
    known = (*defaults, *OPTIONAL[method])
    if unknown := sorted(str(name) for name in asked if name not in known):
        raise ConfigError(
            f"speculative: {', '.join(unknown)} {'have' if len(unknown) > 1 else 'has'} no effect with method "
            f"{method!r}; known: {', '.join(known)}"
        )
    chosen = {**defaults, **asked, "method": method}
    try:
        parse_weight_format(chosen.get("quantization"))
    except ConfigError as error:
        raise ConfigError(f"speculative: the draft's {error}") from None
    for name, most in (("num_speculative_tokens", MOST_TOKENS), ("prompt_lookup_min", 32), ("prompt_lookup_max", 32)):
        value = chosen.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"speculative: {name}={value!r} must be a whole number from 1 to {most}")
    if method == "ngram" and chosen["prompt_lookup_min"] > chosen["prompt_lookup_max"]:
        if "prompt_lookup_max" in asked:
            raise ConfigError(
                f"speculative: prompt_lookup_min={chosen['prompt_lookup_min']} exceeds "
                f"prompt_lookup_max={chosen['prompt_lookup_max']}"
            )
        chosen["prompt_lookup_max"] = chosen["prompt_lookup_min"]
    if method == "draft" and not (isinstance(chosen["model"], str) and chosen["model"]):
        raise ConfigError('speculative: method "draft" needs "model", the name or path of the smaller model')
    return chosen


def _from_text(text: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative={text!r}: not JSON ({error})") from None
    method, said, rest = text.partition(":")
    asked: dict[str, Any] = {"method": method}
    if method == "draft":
        model, colon, count = rest.rpartition(":")
        if not colon or not count.isdigit():
            model, count = rest, ""
        asked["model"] = model
    else:
        count = rest or said  # "ngram:" says that a number follows
    if count:
        if not count.isdigit():
            raise ConfigError(f"speculative={text!r}: {_SHOW}")
        asked["num_speculative_tokens"] = int(count)
    return asked
