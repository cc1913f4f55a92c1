"""Which matrices of an int4 model have 8 bits: by role and size, within a budget, the same in plans and in models."""

from __future__ import annotations

from math import prod

import pytest

from octavo.core.weight_format import WeightFormat, parse_weight_format
from octavo.core.weight_recipe import EIGHT, SPARE_BITS, formats_of, is_outer
from octavo.planning.shapes import KNOWN, ModelShape

MIXED = WeightFormat("int4", 32, mixed=True)


def eight_of(shape: ModelShape, text: str = "int4") -> set[str]:
    form = parse_weight_format(text)
    assert form is not None
    found = formats_of(form, shape._matrices(), shape.num_layers)
    assert set(found.values()) <= {EIGHT, WeightFormat("int4", form.group_size)}
    return {name for name, own in found.items() if own == EIGHT}


def test_gemma_270m() -> None:
    """One key and value head: both are nearly free. The tied pair is 63 % of the weights and stays in four bits."""
    shape = KNOWN["gemma-3-270m"]
    down = {f"layers.{i}.down.weight" for i in (0, 1, 4, 7, 10, 13, 16, 17)}
    rest = {f"layers.{i}.{role}.weight" for i in range(18) for role in ("k", "v", "up")}
    assert eight_of(shape) == down | rest
    count = sum(prod(s) for s in shape._matrices().values())
    assert round(8 * shape.weight_bytes("bfloat16", "int4") / count, 2) == 5.24
    assert round(8 * shape.weight_bytes("bfloat16", "int4:pure") / count, 2) == 4.75


@pytest.mark.parametrize("text", ["int4", "int4:64", "int4:128"])
@pytest.mark.parametrize("name", KNOWN)
def test_the_budget_is_kept_and_used(name: str, text: str) -> None:
    shape = KNOWN[name]
    count = sum(prod(s) for s in shape._matrices().values())
    more = shape.weight_bytes("bfloat16", text) - shape.weight_bytes("bfloat16", f"{text}:pure")
    assert 0.1 < 8 * more / count <= SPARE_BITS
    assert f"layers.{shape.num_layers - 1}.v.weight" in eight_of(shape, text)
    assert ("head.weight" in eight_of(shape, text)) == (not shape.tied_head)
    assert not eight_of(shape, f"{text}:pure")


def test_what_does_not_fit_is_passed_over() -> None:
    """A `down` that is most of the model would cost more than there is to spend; what is cheaper still gets 8 bits."""
    shapes = {"layers.0.v.weight": (16, 64), "layers.0.down.weight": (64, 4096), "layers.0.q.weight": (64, 64)}
    found = formats_of(MIXED, shapes, 1)
    assert [name for name, form in found.items() if form == EIGHT] == ["layers.0.v.weight"]
    assert set(formats_of(WeightFormat("int8"), shapes, 1).values()) == {WeightFormat("int8")}


def test_outer_layers() -> None:
    """Edges of an eighth, every third between; a model of few layers has some too."""
    assert [i for i in range(32) if is_outer(i, 32)] == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [i for i in range(3) if is_outer(i, 3)] == [2]


def test_experts_count_as_what_they_are() -> None:
    shapes = {f"layers.0.experts.{e}.down.weight": (64, 64) for e in range(8)}
    shapes |= {"layers.0.shared.up.weight": (64, 64), "layers.0.v.weight": (16, 64)}
    found = formats_of(MIXED, {**shapes, "embedding.weight": (4000, 64)}, 1)
    wide = {name for name, form in found.items() if form == EIGHT}
    assert wide == {"layers.0.shared.up.weight", "layers.0.v.weight"}  # layer 0 of 1 is no outer one
