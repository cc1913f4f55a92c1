"""Grammars for tests, and independent judges of what they give: jsonschema_rs for JSON, `re` for patterns."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema_rs

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None, 3]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
#: Schemas whose every text is short.
SCHEMAS: dict[str, dict[str, Any]] = {
    "object": PERSON,
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "nested": {
        "type": "object",
        "properties": {"inner": {"$ref": "#/$defs/pair"}, "either": {"anyOf": [{"type": "null"}, {"const": "x"}]}},
        "required": ["inner", "either"],
        "additionalProperties": False,
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"type": "string", "pattern": "^[a-c]{2}$"}, {"enum": [1, 2]}],
                "items": False,
                "minItems": 2,
            }
        },
    },
    "number": {"type": "number", "minimum": -2, "maximum": 2, "multipleOf": 0.25},
    "format": {"type": "string", "format": "date"},
}
PATTERNS = ["[a-z]{2,4}@[a-z]{1,3}[.](com|org)", "(yes|no)!{0,3}", "[αβγ]{1,3}|日本語?", r"\d{3}-\d{4}"]
CHOICES = ["yes", "no", "yes and no", 'a "quoted" word', "naïve\n", "日本"]
GRAMMAR = 'start: "sum(" NUMBER ("," NUMBER)~0..2 ")"\nNUMBER: /[0-9]{1,3}/\n'


def fits(schema: dict[str, Any], text: str) -> bool:
    """Does the text parse and validate?"""
    return bool(jsonschema_rs.is_valid(schema, json.loads(text)))


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern, text) is not None
