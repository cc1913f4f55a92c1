"""Strict reading of a `quantization_config`: every key is read, known to change nothing, or refused by name.

Formats read what they need through `Settings` and call `finish` with the keys that only tell how the file was made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import ModelError

#: What to do about a checkpoint that cannot be read.
REMEDY = (
    "use the unquantised checkpoint (octavo quantize makes int8 and int4 of it), a GGUF file, "
    "or an AWQ, GPTQ or compressed-tensors integer checkpoint"
)
_EMPTY: tuple[Any, ...] = (None, False, "", [], {}, ())


class Settings:
    """Typed access to one mapping of the config. where: its name in messages, such as "quantization_config"."""

    def __init__(self, given: Any, where: str) -> None:
        if not isinstance(given, Mapping):
            raise ModelError(f"{where}: must be a JSON object, got {given!r}")
        self._given, self.where = given, where
        self._read: set[str] = set()

    def get(self, *keys: str, default: Any = None) -> Any:
        """The value under the first of several spellings that is there and not null."""
        self._read.update(keys)
        for key in keys:
            if self._given.get(key) is not None:
                return self._given[key]
        return default

    def whole(self, *keys: str, default: int | None = None) -> int:
        value = self.get(*keys, default=default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(keys[0], value, "must be a whole number")
        return int(value)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self.get(*keys, default=default)
        if not isinstance(value, bool):
            self.refuse(keys[0], value, "must be true or false")
        return bool(value)

    def text(self, *keys: str, default: str) -> str:
        value = self.get(*keys, default=default)
        if not isinstance(value, str):
            self.refuse(keys[0], value, "must be a name")
        return str(value)

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names; absent or null: none."""
        value = self.get(key, default=[])
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self.refuse(key, value, "must be a list of names")
        return tuple(value)

    def one_of(self, *keys: str, default: str, allowed: Sequence[str]) -> str:
        """A name of a list, in any case."""
        value = self.text(*keys, default=default).lower()
        if value not in allowed:
            self.refuse(keys[0], value, f"supported: {', '.join(allowed)}; {REMEDY}")
        return value

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but `allowed` and an empty one: it would be ignored otherwise."""
        value = self.get(key)
        if value not in _EMPTY and value not in allowed:
            self.refuse(key, value, f"is not supported; {REMEDY}")

    def group_size(self, *keys: str, default: int) -> int:
        """Inputs that share a scale: -1 for all of a row, else a positive number."""
        value = self.whole(*keys, default=default)
        if value != -1 and value < 1:
            self.refuse(keys[0], value, "must be -1 or at least 1")
        return value

    def finish(self, harmless: Sequence[str]) -> None:
        """Refuse keys with a value that were neither read nor are `harmless`."""
        unknown = {k: v for k, v in self._given.items() if k not in self._read and k not in harmless}
        listed = [f"{k}={v!r}" for k, v in unknown.items() if v not in _EMPTY]
        if listed:
            raise ModelError(
                f"{self.where}: {', '.join(listed)}: not known, so it may change how the weights are meant; {REMEDY}"
            )

    def refuse(self, key: str, value: Any, why: str) -> None:
        raise ModelError(f"{self.where}: {key}={value!r}: {why}")


def names_part(module: str, patterns: Sequence[str]) -> bool:
    """Does one of the names stand in the module's, as whole words between dots? ("mlp.gate" is not "mlp.gate_proj".)"""
    return any(f".{pattern}." in f".{module}." for pattern in patterns)


def matches(module: str, kind: str, pattern: str) -> bool:
    """Does a target or ignore entry name the module? By class (`kind`), whole name, or "re:" and an expression."""
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ModelError(f"quantization_config: {pattern!r} is not a regular expression: {error}") from None
    return pattern in (module, kind)
