"""Two models over one pool of blocks: the layers of a draft model become further groups of the target's layout.

A block is a number of bytes, and both models' groups must fill it exactly, so that any group of either can take any
block. With t and d bytes per token and layer, `layers_per_group` of the target is raised to the next number for which
layers x t is a multiple of d; a draft group then holds layers x t / d layers. Unused places at the end of a group are
padding, as in a layout of one model. Nothing else in the memory core knows that there are two models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from octavo.core.kv_layout import KVGroup, KVLayout
from octavo.errors import ConfigError

MOST_PADDING = 2.0  # a block may grow to so many times what the target alone would choose


@dataclass(frozen=True, slots=True)
class SharedPool:
    """whole: for scheduler and memory, target groups first. target, draft: what each model's attention is built on."""

    whole: KVLayout
    target: KVLayout
    draft: KVLayout

    def __str__(self) -> str:
        """How the memory is shared, in words."""
        block = self.whole.bytes_per_block
        both, own = self.whole.num_groups, self.target.num_groups
        return (
            f"one pool: a block of {block} bytes holds {self.target.layers_per_group} layers of the model or "
            f"{self.draft.layers_per_group} of the draft; a sequence has {own} tables for the model and {both - own} "
            "for the draft"
        )


def share_pool(target: KVLayout, windows: Sequence[int | None], bytes_per_token_layer: int) -> SharedPool:
    """windows: of the draft's layers. Raises `ConfigError` where no block fits both without too much padding."""
    t, d = target.bytes_per_token_layer, bytes_per_token_layer
    unit = d // gcd(t, d)
    layers = -(-target.layers_per_group // unit) * unit
    if layers > MOST_PADDING * target.layers_per_group:
        raise ConfigError(
            f"speculative: the draft's {d} bytes per token and layer do not fit the model's blocks of "
            f"{target.layers_per_group} layers of {t} bytes: they would grow to {layers} layers. Use a draft whose "
            "num_key_value_heads * head_dim divides the model's, or method ngram"
        )
    grown = replace(target, layers_per_group=layers)
    size = layers * t // d
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    groups = [
        KVGroup(tuple(of_kind[i : i + size]), window)
        for window, of_kind in kinds.items()
        for i in range(0, len(of_kind), size)
    ]
    draft = KVLayout(target.block_size, tuple(groups), size, d)
    first = sum(len(g.layers) for g in target.groups)
    further = tuple(KVGroup(tuple(first + layer for layer in g.layers), g.window) for g in groups)
    return SharedPool(replace(grown, groups=(*target.groups, *further)), grown, draft)
