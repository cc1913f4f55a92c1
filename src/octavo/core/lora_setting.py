"""`lora=`: which adapters an engine loads at its start, name -> directory. Plain values only.

{"poet": "/adapters/poet", "clerk": "/adapters/clerk"}     "poet=/adapters/poet,clerk=/adapters/clerk"
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.errors import ConfigError

MAX_LORAS = 8
_SHOW = 'write {"name": "directory"}, or "name=directory,name=directory"'


def parse_lora(given: Any) -> dict[str, str] | None:
    """The mapping, or None for None and for none. Raises `ConfigError`."""
    if given is None:
        return None
    pairs: list[tuple[Any, Any]]
    if isinstance(given, str):
        pairs = [tuple(part.strip().partition("=")[::2]) for part in given.split(",") if part.strip()]  # type: ignore[misc]
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        raise ConfigError(f"lora={given!r}: {_SHOW}")
    found: dict[str, str] = {}
    for name, path in pairs:
        if not isinstance(name, str) or not isinstance(path, str) or not name.strip() or not path:
            raise ConfigError(f"lora={given!r}: {_SHOW}")
        if name in found:
            raise ConfigError(f"lora: the name {name!r} is given twice")
        found[name] = path
    return found or None
