"""The forms in which callers hand over prompts, brought into one: a list of `Prompt`.

Accepted: a string; a list of token ids; {"prompt": str} or {"prompt_token_ids": [int]}, each with an optional
"cache_salt" and "lora" (the name of an adapter); and lists of any of these. Knows no tokenizer and no limits: encoding
and length checks come later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.errors import PromptError, RequestError

KEYS = ("prompt", "prompt_token_ids", "cache_salt", "lora")
FORMS = 'a string, a list of token ids, {"prompt": …} or {"prompt_token_ids": …}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text still to be encoded, or ids as they are; lora: the adapter it runs with."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    cache_salt: str | None = None
    lora: str | None = None


def read_prompts(prompts: Any) -> list[Prompt]:
    """Every accepted form as a list; an error names the index of the first prompt that has none of the forms."""
    if isinstance(prompts, (str, Mapping)) or _is_ids(prompts):
        return [read_prompt(prompts)]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Iterable):
        raise PromptError(f"a prompt is {FORMS}, or a list of those; got {type(prompts).__name__}")
    result = []
    for index, prompt in enumerate(prompts):
        try:
            result.append(read_prompt(prompt))
        except PromptError as error:
            raise PromptError(f"prompt {index}: {error}") from None
    return result


def read_prompt(prompt: Any) -> Prompt:
    """One prompt in any form."""
    if isinstance(prompt, str):
        return Prompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    ids = _ids(prompt)
    if ids is None:
        raise PromptError(f"a prompt is {FORMS}; got {type(prompt).__name__}")
    return Prompt(token_ids=ids)


def one_each(values: Any, count: int, what: str) -> list[Any]:
    """One value for all, or a sequence of one each. Raises RequestError with both numbers when they differ."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise RequestError(f"{len(values)} {what} for {count} prompts: give one for all, or one each")
    return list(values)


def _from_mapping(prompt: Mapping[str, Any]) -> Prompt:
    unknown = sorted(str(k) for k in prompt if k not in KEYS)
    if unknown:
        raise PromptError(
            f"unknown prompt key{'s' * (len(unknown) > 1)} {', '.join(unknown)}; known: {', '.join(KEYS)}"
        )
    text, given, salt, lora = (prompt.get(key) for key in KEYS)
    if (text is None) == (given is None):
        raise PromptError('a prompt mapping needs exactly one of "prompt" and "prompt_token_ids"')
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise PromptError(f"cache_salt={salt!r}: must be a non-empty string")
    if lora is not None and (not isinstance(lora, str) or not lora):
        raise PromptError(f"lora={lora!r}: must be the name of a loaded adapter")
    if text is not None:
        if not isinstance(text, str):
            raise PromptError(f'"prompt" must be a string, got {type(text).__name__}')
        return Prompt(text=text, cache_salt=salt, lora=lora)
    ids = _ids(given)
    if ids is None:
        wrong = next((i for i in given if not _is_id(i)), given) if isinstance(given, list | tuple) else given
        raise PromptError(f'"prompt_token_ids" must be a list of integers, got {_shown(wrong)}')
    return Prompt(token_ids=ids, cache_salt=salt, lora=lora)


def _is_ids(value: Any) -> bool:
    """A flat, non-empty list of numbers is one prompt; an empty list is no prompts at all."""
    return _ids(value) not in (None, ())


def _ids(value: Any) -> tuple[int, ...] | None:
    """The value as a tuple of ints (NumPy arrays and tensors too), or None when it is not a sequence of integers."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        return None
    if not all(map(_is_id, value)):
        return None
    return tuple(i.__index__() for i in value)


def _is_id(value: Any) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A wrong value as a message names it."""
    text = f"{type(value).__name__} {value!r}" if isinstance(value, int | float | str) else type(value).__name__
    return text if len(text) < 80 else f"{text[:80]}…"
