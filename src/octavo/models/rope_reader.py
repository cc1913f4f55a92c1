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
from dataclasses import replace
from typing import Any

from octavo.errors import ModelError
from octavo.models.families.base import RotaryForm
from octavo.models.spec import ModelSpec, RotarySpec

logger = logging.getLogger("octavo.models")

#: kind -> fields it needs; fields it may have.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        ("short_factor", "long_factor", "original_max_position_embeddings"),
        ("factor", "attention_factor"),
    ),
    "proportional": ((), ("factor", "partial_rotary_factor")),
}
LAYER_TYPES = ("full_attention", "sliding_attention")
SHARE = "partial_rotary_factor"


def rotary_specs(
    config: Mapping[str, Any], layer_types: tuple[str, ...], form: RotaryForm, head_dim: int, longest: int
) -> tuple[tuple[RotarySpec, ...], tuple[int, ...]]:
    """(distinct specs, index per layer) for `ModelSpec.rotaries` and `ModelSpec.rotary`.

    layer_types: "full_attention" or "sliding_attention" per layer. longest: max_position_embeddings.
    """
    by_type = {kind: _for_layer_type(config, kind, form, head_dim, longest) for kind in dict.fromkeys(layer_types)}
    distinct = tuple(dict.fromkeys(by_type.values()))
    return distinct, tuple(distinct.index(by_type[kind]) for kind in layer_types)


def _for_layer_type(
    config: Mapping[str, Any], layer_type: str, form: RotaryForm, head_dim: int, longest: int
) -> RotarySpec:
    local = form.local_key is not None and layer_type == "sliding_attention"
    nested = _nested(config, layer_type, per_type=form.local_key is not None)
    flat_scaling = None if local else config.get("rope_scaling")
    fields: dict[str, Any] = {}
    if nested is not None:
        fields = _checked_fields("rope_parameters", nested, form)
    if flat_scaling is not None:
        flat = _checked_fields("rope_scaling", flat_scaling, form)
        if "rope_type" not in fields:
            fields = {**flat, **fields}  # nothing but a base is nested, so the flat form is the only word on scaling
        elif any(fields.get(key) != value for key, value in flat.items()):
            logger.warning(
                "config: rope_parameters %r contradicts rope_scaling %r; using rope_parameters", fields, flat
            )
    keys = [form.local_key] if local else list(dict.fromkeys((form.base_key, "rope_theta")))
    base = _settled(config, fields.pop("rope_theta", None), keys, form.bases[layer_type], "base")
    kind = fields.pop("rope_type", "default")
    if kind == "longrope":
        _settle_original(config, fields, form, longest)
    dim = None
    if kind != "proportional":
        dim = _rotated(config, fields.pop(SHARE, None), form, head_dim)
    return build_rotary(kind, base, fields, dim=dim, head_dim=head_dim)


def _settled(config: Mapping[str, Any], nested: Any, keys: list[Any], default: float, what: str) -> float:
    """A number given nested, flat under one of `keys`, or not at all; a contradiction is logged, nested wins."""
    key = next((k for k in keys if config.get(k) is not None), keys[0])
    flat = config.get(key)
    if nested is not None and flat is not None and float(nested) != float(flat):
        logger.warning(
            "config: rotary %s %r inside rope_parameters contradicts %s=%r; using %r", what, nested, key, flat, nested
        )
    return _number(key, next((value for value in (nested, flat) if value is not None), default))


def _rotated(config: Mapping[str, Any], nested: Any, form: RotaryForm, head_dim: int) -> int | None:
    """How many numbers of a head are rotated; None for all."""
    if form.share is None:
        if nested not in (None, 1, 1.0):
            raise ModelError(f"config: {SHARE}={nested!r} is not supported for this architecture, which rotates all")
        return None
    share = _settled(config, nested, list(dict.fromkeys((form.share_key, SHARE))), form.share, "share")
    dim = int(head_dim * share)
    if not 2 <= dim <= head_dim or dim % 2:
        raise ModelError(
            f"config: {SHARE}={share:g} of head_dim={head_dim} rotates {dim} numbers; it must be even, 2 to {head_dim}"
        )
    return None if dim == head_dim else dim


def _settle_original(config: Mapping[str, Any], fields: dict[str, Any], form: RotaryForm, longest: int) -> None:
    """LongRoPE: the length of pretraining (Phi-3 keeps it outside, and that wins), and the factor that follows."""
    name = "original_max_position_embeddings"
    if form.original is not None:
        outside, inside = config.get(name), fields.get(name)
        if None not in (outside, inside) and outside != inside:
            logger.warning("config: %s=%r inside the rotary settings contradicts the outer %r; using the outer",
                           name, inside, outside)  # fmt: skip
        fields[name] = outside or inside or form.original
    if fields.get(name) is not None and fields.get("factor") is None:
        fields["factor"] = longest / _number(name, fields[name])
    fields["long"] = fields.get(name) is not None and longest > fields[name]


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


def _checked_fields(where: str, given: Any, form: RotaryForm) -> dict[str, Any]:
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
    if "rope_type" in fields:
        kind = fields["rope_type"] = form.kinds.get(kind, kind)
    if kind not in KINDS:
        raise ModelError(f"config: {where}: rope_type={kind!r} is not supported; known: {', '.join(KINDS)}")
    needed, optional = KINDS[kind]
    unknown = sorted(set(fields) - {"rope_type", "rope_theta", SHARE, *needed, *optional})
    # A plain rotary may carry a leftover factor of 1; anything else would be ignored mathematics.
    unknown = [key for key in unknown if not (kind == "default" and key == "factor" and fields[key] == 1)]
    if unknown:
        raise ModelError(f"config: {where} of kind {kind!r} has fields it does not use: {', '.join(unknown)}")
    return {key: value for key, value in fields.items() if not (kind == "default" and key == "factor")}


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"config: {name}={value!r}: must be a positive number")
    return float(value)


def build_rotary(
    kind: str, base: float, fields: Mapping[str, Any], *, dim: int | None = None, head_dim: int = 0
) -> RotarySpec:
    """A checked `RotarySpec`: needed fields present and positive, defaults of optional ones filled in.

    dim: numbers of a head that are rotated, None for all. head_dim is asked for only by LongRoPE and proportional.
    """
    if kind not in KINDS:
        raise ModelError(f"rotary kind {kind!r} is not supported; known: {', '.join(KINDS)}")
    missing = [key for key in KINDS[kind][0] if fields.get(key) is None]
    if missing:
        raise ModelError(f"config: rotary kind {kind!r} needs {', '.join(missing)}, which the model does not give")
    if kind == "longrope":
        return RotarySpec(kind, base, _longrope(fields, dim or head_dim), dim)
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
    if kind == "proportional":
        numbers["factor"] = _number("factor", fields.get("factor") or 1.0)
        numbers["share"] = _number(SHARE, fields.get(SHARE) or 1.0)
    return RotarySpec(kind, base, tuple(sorted(numbers.items())), dim)


def _longrope(fields: Mapping[str, Any], dim: int) -> tuple[tuple[str, float | bool | tuple[float, ...]], ...]:
    """Divisors for short and for long texts, one a frequency; `long` says which are used, see `for_length`."""
    lists = {}
    for key in ("short_factor", "long_factor"):
        given = fields[key]
        if not isinstance(given, list | tuple) or len(given) != dim // 2:
            raise ModelError(f"config: {key} must be a list of {dim // 2} numbers, one for each pair that is rotated")
        lists[key] = tuple(_number(key, value) for value in given)
    original = _number("original_max_position_embeddings", fields["original_max_position_embeddings"])
    if fields.get("attention_factor") is not None:
        factor = _number("attention_factor", fields["attention_factor"])
    else:
        stretch = _number("factor", fields.get("factor") or 1.0)
        factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    return (
        ("attention_factor", factor),
        ("long", bool(fields.get("long", False))),
        ("long_factor", lists["long_factor"]),
        ("original_max_position_embeddings", original),
        ("short_factor", lists["short_factor"]),
    )


def for_length(spec: ModelSpec, max_model_len: int | None) -> ModelSpec:
    """`spec` for an engine whose sequences have at most `max_model_len` tokens (None: the model's own limit).

    LongRoPE has two sets of frequencies: one for texts up to the length of pretraining and one beyond. Keys in the
    cache are already rotated, so one set must serve all sequences from their first token: the long one if sequences
    may become long. Other kinds do not depend on the length; a dynamic one is plain up to the model's own limit, and
    beyond that every new token would turn all earlier keys, so longer sequences are refused.
    """
    limit = spec.max_position_embeddings if max_model_len is None else max_model_len
    rotaries = []
    for rotary in spec.rotaries:
        if rotary.kind == "longrope":
            fields = dict(rotary.parameters)
            original = fields["original_max_position_embeddings"]
            assert not isinstance(original, tuple)
            fields["long"] = limit > original
            if fields["long"] and max_model_len is None:
                logger.info("longrope: the long factors serve all texts, since the model takes %d tokens; "
                            "max_model_len=%d uses the short ones", limit, int(original))  # fmt: skip
            rotary = replace(rotary, parameters=tuple(sorted(fields.items())))
        rotaries.append(rotary)
    return replace(spec, rotaries=tuple(rotaries))


def _yarn_attention_factor(factor: float, fields: Mapping[str, Any]) -> float:
    """Given outright, or 0.1 · m · ln(factor) + 1 (paper, equation 22), as a ratio when both mscales are given."""
    if fields.get("attention_factor") is not None:
        return _number("attention_factor", fields["attention_factor"])

    def stretch(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    m, m_all = fields.get("mscale"), fields.get("mscale_all_dim")
    return stretch(m) / stretch(m_all) if m and m_all else stretch(1.0)
