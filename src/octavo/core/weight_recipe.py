"""Which matrices of an int4 model are kept in 8 bits: those whose rounding to four costs most for the bytes it saves.

Decided by a matrix's role and size alone, so a plan knows it before a file is read, and two loads agree. What the
roles lose was measured once (`ROLES`); what 8 bits cost is a model's own: with few key and value heads `v` and `k` are
nearly free, with a small vocabulary the output head is. The dearest per byte come first, and what would go past
`SPARE_BITS` is passed over: `int4` stays near four bits, whatever the model.

Invariant: pure in the names and shapes. A name is "<where>.<role>.weight", within a layer "layers.<index>.…" first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from octavo.core.weight_format import WeightFormat

#: Bits per weight, over all quantised matrices, that an int4 model may take more than one wholly in four bits.
SPARE_BITS = 0.75
EIGHT = WeightFormat("int8")


@dataclass(frozen=True, slots=True)
class Role:
    """Matrices that get 8 bits together. outer: only those of the layers of `is_outer`.

    loss: KL against the unrounded model, nats per 1,000 tokens, that goes when they have 8 bits instead of 4.
    """

    name: str
    loss: float
    outer: bool = False


#: Measured on Gemma 3 270M, see docs/quantization.md. The head's is its own share of what a tied pair loses. Gates,
#: queries, attention's output projection and `down` of the inner layers lose too little for their bytes.
ROLES = (Role("v", 55), Role("k", 14), Role("head", 45), Role("down", 27, outer=True), Role("up", 37))


def is_outer(layer: int, layers: int) -> bool:
    """Of `layers`, the first and the last eighth and every third between: where wider numbers bring most."""
    edge = layers // 8
    return layer < edge or layer >= layers - edge or (layer - edge) % 3 == 2


def formats_of(form: WeightFormat, shapes: Mapping[str, tuple[int, ...]], layers: int) -> dict[str, WeightFormat]:
    """The format of each matrix. shapes: of everything that is quantised; layers: how many the model has."""
    if not form.mixed:
        return dict.fromkeys(shapes, form)
    plain = WeightFormat(form.kind, form.group_size)
    chosen: dict[str, WeightFormat] = dict.fromkeys(shapes, plain)
    spare = SPARE_BITS / 8 * sum(prod(shape) for shape in shapes.values())
    members = {role: [name for name in shapes if _plays(name, role, layers)] for role in ROLES}
    cost = {role: sum(_more_bytes(plain, shapes[name]) for name in names) for role, names in members.items()}
    for role in sorted(ROLES, key=lambda role: -role.loss / max(cost[role], 1)):
        if cost[role] <= spare:
            spare -= cost[role]
            chosen.update(dict.fromkeys(members[role], EIGHT))
    return chosen


def _plays(name: str, role: Role, layers: int) -> bool:
    where = name.split(".")
    if where[-2] != role.name:
        return False
    return not role.outer or is_outer(int(where[1]), layers)


def _more_bytes(plain: WeightFormat, shape: tuple[int, ...]) -> int:
    """What int8 takes more than four bits."""
    rows, columns = shape
    eight, four = EIGHT.matrix_bytes(rows, columns), plain.matrix_bytes(rows, columns)
    assert eight is not None and four is not None
    return eight - four
