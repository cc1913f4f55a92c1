"""JSON and server-sent events as bytes. Text that is no Unicode (a lone surrogate) becomes ? instead of an error."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"


def dumps(value: Any) -> bytes:
    """Compact JSON in UTF-8."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(_cleaned(value))


def event(value: Any, name: str | None = None) -> bytes:
    """One server-sent event with JSON data."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + dumps(value) + b"\n\n"


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_cleaned(str(k)): _cleaned(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_cleaned(v) for v in value]
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    return str(value)
