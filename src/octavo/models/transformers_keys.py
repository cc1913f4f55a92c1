"""Keys of a `config.json` that nobody reads, for models that run through transformers.

The library keeps any key as an attribute, so a misspelt or foreign one would change nothing and nobody would be told.
A key is known if the configuration class has it (annotation, attribute of a default instance, renamed key), if the
source of the class or of those it derives from names it (older spellings), or if it is bookkeeping
(`models/config_reader.py`). Knows no weights and no engine.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.config_reader import HARMLESS

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_QUOTED = re.compile(r"""["'](\w+)["']""")


def refuse_unread_keys(raw: Mapping[str, Any], kind: type, where: str) -> None:
    """Raises `ModelError` with every key of `raw` that a configuration of class `kind` does not read."""
    unread = unread_keys(raw, kind)
    if unread:
        listed = ", ".join(f"{name}={value!r}" for name, value in unread.items())
        raise ModelError(
            f"{where}: {listed}: {kind.__name__} of transformers has no such key, so it would be ignored; remove it "
            "from config.json if it changes nothing"
        )


def unread_keys(raw: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Key -> value of what is set and not read; keys of a part ("text_config") with its name before a dot."""
    known = HARMLESS | known_keys(kind)
    found = {
        key: value for key, value in raw.items() if key not in known and value not in _EMPTY and not key.startswith("_")
    }
    parts = getattr(kind, "sub_configs", None) or {}
    for name, part in parts.items():
        if isinstance(raw.get(name), Mapping) and hasattr(part, "model_type"):
            found |= {f"{name}.{key}": value for key, value in unread_keys(raw[name], part).items()}
    return found


def known_keys(kind: type) -> set[str]:
    """Every key that configurations of a class have or read."""
    known = set(getattr(kind, "attribute_map", None) or ()) | set(getattr(kind, "sub_configs", None) or ())
    for base in kind.__mro__[:-1]:
        known |= set(inspect.get_annotations(base)) | _named_in_source(base)
    try:
        default = kind()
        known |= set(vars(default)) | set(default.to_dict())
    except Exception:  # a class that has no default instance: what it declares must do
        pass
    return known


def _named_in_source(kind: type) -> set[str]:
    """Words in quotes in the class's own code, such as older spellings that it translates."""
    if kind.__module__ not in sys.modules:
        return set()
    try:
        return set(_QUOTED.findall(inspect.getsource(kind)))
    except (OSError, TypeError):
        return set()
