"""Where an adapter's modules belong in a decoder: which of its products, and which rows of it.

The own decoder joins weights that read the same input (q, k, v; gate, up), so a module is a run of rows of a product;
a module that holds several weights in one (Phi-3's qkv_proj, GPT-2's c_attn, NeoX's interleaved heads) is cut as the
loader cuts the weight itself. Through transformers every linear layer is a product under its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ModelError
from octavo.models.families import FAMILIES
from octavo.models.lora_reader import AdapterFiles, LowRank
from octavo.models.tensor_names import Part, parts_of

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec


@dataclass(frozen=True)
class LinearUpdate:
    """What one module adds to a product: rows `first` to `first + len(b)`, scale * b [n, r] (a [r, in] x)."""

    first: int
    a: torch.Tensor
    b: torch.Tensor  # the scale is in it


@dataclass(frozen=True)
class _Place:
    linear: str
    first: int
    rows: int


def updates_of(adapter: AdapterFiles, decoder: Any) -> dict[str, list[LinearUpdate]]:
    """Product -> what the adapter adds to it. Raises `ModelError` for a module that is none of the decoder's."""
    known = decoder.linears()
    own = decoder.spec.extra.get("model_impl") != "transformers"
    places = _places(decoder.spec, known) if own else {}
    updates: dict[str, list[LinearUpdate]] = {}
    for module, pair in adapter.modules.items():
        if own:
            found = _own(module, pair, decoder.spec, places, adapter)
        else:
            found = _foreign(module, pair, decoder, adapter)
        for linear, update in found:
            updates.setdefault(linear, []).append(update)
    return updates


def _places(spec: ModelSpec, linears: Mapping[str, Any]) -> dict[str, _Place]:
    """Canonical weight ("layers.3.k") -> its product and rows there."""
    kv = spec.num_kv_heads * spec.head_dim
    sizes = {"q": spec.num_heads * spec.head_dim, "k": kv, "v": kv, "out": spec.hidden_size, "down": spec.hidden_size}
    places = {}
    for name in linears:
        prefix, _, joined = name.rpartition(".")
        shared = prefix.endswith(".shared") and spec.experts is not None
        inner = spec.experts.shared_intermediate_size if shared and spec.experts else spec.intermediate_size
        first = 0
        for part in {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}.get(joined, (joined,)):
            rows = sizes.get(part, inner)
            places[f"{prefix}.{part}"] = _Place(name, first, rows)
            first += rows
    return places


def _own(
    module: str, pair: LowRank, spec: ModelSpec, places: Mapping[str, _Place], adapter: AdapterFiles
) -> list[tuple[str, LinearUpdate]]:
    names = FAMILIES[spec.architecture].names
    parts = parts_of(f"{module}.weight", spec, names, names.prefix_in([module + "."]))
    targets = [places.get(part.name.removesuffix(".weight")) for part in parts or ()]
    if not parts or None in targets:
        raise _unknown(module, adapter, sorted({name.split(".", 2)[2] for name in places}))
    columns = spec.hidden_size if len(parts) > 1 else _columns(parts[0].name, spec)
    if pair.a.shape[1] != columns:
        raise _misshaped(module, adapter, f"lora_A reads {pair.a.shape[1]} numbers, the layer {columns}")
    found = []
    for part, rows in zip(parts, _rows(parts, pair.b.shape[0]), strict=True):
        place = places[part.name.removesuffix(".weight")]
        if len(rows) != place.rows:
            raise _misshaped(module, adapter, f"lora_B gives {pair.b.shape[0]} numbers, {len(rows)} for {place.rows}")
        found.append((place.linear, LinearUpdate(place.first, pair.a, pair.b[rows] * pair.scale)))
    return found


def _columns(weight: str, spec: ModelSpec) -> int:
    part = weight.removesuffix(".weight").rpartition(".")[2]
    if part == "out":
        return spec.num_heads * spec.head_dim
    if part == "down":
        shared = ".shared." in weight and spec.experts is not None
        return spec.experts.shared_intermediate_size if shared and spec.experts else spec.intermediate_size
    return spec.hidden_size


def _rows(parts: tuple[Part, ...], out: int) -> list[torch.Tensor]:
    """Which of the module's outputs each part is: the loader's cut, done to a weight whose numbers are its row."""
    numbers = torch.arange(out)
    for stored in (numbers[:, None], numbers[None]):  # [out, in], or GPT-2's [in, out]
        try:
            rows = [part.take(stored) for part in parts]
        except RuntimeError:  # a cut into heads that this orientation does not have
            continue
        if all(r.dim() == 2 and r.shape[1] == 1 for r in rows) and sum(len(r) for r in rows) == out:
            return [r[:, 0] for r in rows]
    return [numbers[:0] for _ in parts]


def _foreign(module: str, pair: LowRank, decoder: Any, adapter: AdapterFiles) -> list[tuple[str, LinearUpdate]]:
    linears = decoder.linears()
    if module not in linears:
        raise _unknown(module, adapter, sorted({name.rpartition(".")[2] for name in linears}))
    shape = decoder.linear_shape(module)
    if (pair.b.shape[0], pair.a.shape[1]) != shape:
        raise _misshaped(module, adapter, f"lora_B lora_A is {[pair.b.shape[0], pair.a.shape[1]]}, the layer {shape}")
    return [(module, LinearUpdate(0, pair.a, pair.b * pair.scale))]


def _unknown(module: str, adapter: AdapterFiles, known: list[str]) -> ModelError:
    return ModelError(
        f"{adapter.path}: module {module} is no product of this model that an adapter can change; those are "
        f"{', '.join(known)} of its layers (not the embedding, the head, norms or single experts)"
    )


def _misshaped(module: str, adapter: AdapterFiles, how: str) -> ModelError:
    return ModelError(f"{adapter.path}: module {module}: {how}; the adapter belongs to another model")
