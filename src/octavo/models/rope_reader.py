"""Rotary settings from a Hugging Face config: every spelling in use, one parser.

Spellings: flat `rope_theta` and `rope_scaling` (kind under "type" or "rope_type"), nested `rope_parameters`, and
`rope_parameters` per layer type. Order of belief: nested, flat, the family's default; a contradiction is logged as a
warning. A kind that is not known, a field that a kind needs and does not get, and a field that no kind here uses are
refused: falling back to plain rotary gives fluent nonsense.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelError
from octavo.models.spec import RotarySpec

logger = logging.getLogger("octavo.models")

#: kind -> fields it needs; fields it may have.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
}
LAYER_TYPES = ("full_attention", "sliding_attention")


def rotary_specs(
    config: Mapping[str, Any], layer_types: tuple[str, ...], default_bases: Mapping[str, float], local_key: str | None
) -> tuple[tuple[RotarySpec, ...], tuple[int, ...]]:
    """(distinct specs, index per layer) for `ModelSpec.rotaries` and `ModelSpec.rotary`.

    layer_types: "full_attention" or "sliding_attention" per layer. default_bases: base per layer type when the config
    gives none. local_key: the flat key that holds the base of sliding layers (Gemma 3), whose sliding layers do not
    take `rope_scaling`; None when all layers share one rotary.
    """
    by_type = {
        kind: _for_layer_type(config, kind, default_bases[kind], local_key) for kind in dict.fromkeys(layer_types)
    }
    distinct = tuple(dict.fromkeys(by_type.values()))
    return distinct, tuple(distinct.index(by_type[kind]) for kind in layer_types)


def _for_layer_type(config: Mapping[str, Any], layer_type: str, default: float, local_key: str | None) -> RotarySpec:
    local = local_key is not None and layer_type == "sliding_attention"
    base_key = local_key if local and local_key is not None else "rope_theta"
    flat_base = config.get(base_key)
    flat_scaling = None if local else config.get("rope_scaling")
    nested = _nested(config, layer_type, per_type=local_key is not None)
    fields: dict[str, Any] = {}
    if nested is not None:
        fields = _checked_fields("rope_parameters", nested)
    if flat_scaling is not None:
        flat = _checked_fields("rope_scaling", flat_scaling)
        if "rope_type" not in fields:
            fields = {**flat, **fields}  # nothing but a base is nested, so the flat form is the only word on scaling
        elif any(fields.get(key) != value for key, value in flat.items()):
            logger.warning(
                "config: rope_parameters %r contradicts rope_scaling %r; using rope_parameters", fields, flat
            )
    nested_base = fields.pop("rope_theta", None)
    if nested_base is not None and flat_base is not None and float(nested_base) != float(flat_base):
        logger.warning(
            "config: rotary base %r inside rope_parameters contradicts %s=%r; using %r",
            nested_base,
            base_key,
            flat_base,
            nested_base,
        )
    base = next((b for b in (nested_base, flat_base) if b is not None), default)
    return build_rotary(fields.pop("rope_type", "default"), _number(base_key, base), fields)


def _nested(config: Mapping[str, Any], layer_type: str, per_type: bool) -> Mapping[str, Any] | None:
    """The part of `rope_parameters` that speaks of this layer type; None when there is none."""
    nested = config.get("rope_parameters")
    if nested is None:
        return None
    if not isinstance(nested, Mapping):
        raise ModelError(f"config: rope_parameters={nested!r}: must be a mapping")
    if any(kind in nested for kind in LAYER_TYPES):
        unknown = sorted(set(nested) - set(LAYER_TYPES))
        if unknown:
            raise ModelError(
                f"config: rope_parameters mixes layer types and {', '.join(unknown)}; it must hold one or the other"
            )
        part = nested.get(layer_type)
        if part is not None and not isinstance(part, Mapping):
            raise ModelError(f"config: rope_parameters[{layer_type!r}]={part!r}: must be a mapping")
        return part
    if per_type:
        raise ModelError(
            "config: rope_parameters must hold one entry per layer type "
            f"({', '.join(LAYER_TYPES)}) for this architecture, got keys {', '.join(sorted(nested))}"
        )
    return nested


def _checked_fields(where: str, given: Any) -> dict[str, Any]:
    """The non-null fields with the kind under "rope_type"; an unknown kind or field is refused."""
    if not isinstance(given, Mapping):
        raise ModelError(f"config: {where}={given!r}: must be a mapping")
    fields = {key: value for key, value in given.items() if value is not None}
    old, new = fields.pop("type", None), fields.get("rope_type")
    if old is not None and new is not None and old != new:
        logger.warning("config: %s has rope_type=%r and type=%r; using rope_type", where, new, old)
    if new is None and old is not None:
        fields["rope_type"] = old
    if where == "rope_scaling":
        fields.setdefault("rope_type", "default")
    kind = fields.get("rope_type", "default")
    if kind not in KINDS:
        raise ModelError(f"config: rotary kind {kind!r} in {where} is not supported; known: {', '.join(KINDS)}")
    if fields.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"config: partial_rotary_factor={given['partial_rotary_factor']!r} in {where} is not supported"
        )
    needed, optional = KINDS[kind]
    unknown = sorted(set(fields) - {"rope_type", "rope_theta", *needed, *optional})
    # A plain rotary may carry a leftover factor of 1; anything else would be ignored mathematics.
    unknown = [key for key in unknown if not (kind == "default" and key == "factor" and fields[key] == 1)]
    if unknown:
        raise ModelError(f"config: {where} of kind {kind!r} has fields it does not use: {', '.join(unknown)}")
    return {key: value for key, value in fields.items() if not (kind == "default" and key == "factor")}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"config: {name}={value!r}: must be a positive number")
    return float(value)


def build_rotary(kind: str, base: float, fields: Mapping[str, Any]) -> RotarySpec:
    """A checked `RotarySpec`: needed fields present and positive, defaults of optional ones filled in."""
    if kind not in KINDS:
        raise ModelError(f"rotary kind {kind!r} is not supported; known: {', '.join(KINDS)}")
    missing = [key for key in KINDS[kind][0] if fields.get(key) is None]
    if missing:
        raise ModelError(f"config: rotary kind {kind!r} needs {', '.join(missing)}, which the model does not give")
    numbers: dict[str, float | bool] = {key: _number(key, fields[key]) for key in KINDS[kind][0]}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise ModelError(
            f"config: high_freq_factor={numbers['high_freq_factor']} must exceed "
            f"low_freq_factor={numbers['low_freq_factor']}"
        )
    if kind == "yarn":
        numbers["beta_fast"] = _number("beta_fast", fields.get("beta_fast") or 32)
        numbers["beta_slow"] = _number("beta_slow", fields.get("beta_slow") or 1)
        numbers["truncate"] = bool(fields.get("truncate", True))
        numbers["attention_factor"] = _yarn_attention_factor(float(numbers["factor"]), fields)
    return RotarySpec(kind, base, tuple(sorted(numbers.items())))


def _yarn_attention_factor(factor: float, fields: Mapping[str, Any]) -> float:
    """Given outright, or 0.1 · m · ln(factor) + 1 (paper, equation 22), as a ratio when both mscales are given."""
    if fields.get("attention_factor") is not None:
        return _number("attention_factor", fields["attention_factor"])

    def stretch(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    m, m_all = fields.get("mscale"), fields.get("mscale_all_dim")
    return stretch(m) / stretch(m_all) if m and m_all else stretch(1.0)
