"""How the layers of a model share one pool of blocks.

Layers that see the same tokens need the same blocks for as long, layers with another window do not. So the
layers are cut into *groups* of equal size; each group has a block table of its own, and one block holds
`block_size` token positions for the layers of *one* group. Equal sizes make every block interchangeable:
any group of any sequence can take any block of the one pool.

A model whose layers all attend to everything has one group. Gemma 3 270M (15 windowed and 3 full layers)
has six groups of three: five windowed, one full.

This module knows no tensors; the planner and the simulator use it as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table. `window` is in tokens, the current one included; None sees all."""

    layers: tuple[int, ...]
    window: int | None = None

    def first_needed(self, position: int) -> int:
        """First token position that a query at `position` still reads."""
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Groups of one model over one pool. `layers_per_group` counts padding slots too."""

    block_size: int
    groups: tuple[KVGroup, ...]
    layers_per_group: int
    bytes_per_token_layer: int  # key + value of one token in one layer, scales included
    kv_dtype: str = "auto"  # as `kv_format.parse_kv_dtype` reads it

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one physical block (the layers of one group)."""
        return self.layers_per_group * self.block_size * self.bytes_per_token_layer

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks *per group* that hold `num_tokens` positions."""
        return -(-num_tokens // self.block_size)

    def static_bytes(self, max_model_len: int) -> int:
        """Bytes that static allocation reserves for one sequence: every layer, the longest length, no padding."""
        layers = sum(len(g.layers) for g in self.groups)
        return self.blocks_for(max_model_len) * self.block_size * layers * self.bytes_per_token_layer

    def place(self, layer: int) -> tuple[int, int]:
        """(group, index inside the block) of a model layer."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise IndexError(f"layer {layer} is in no KV group")


def build_layout(
    windows: Seq[int | None],
    *,
    block_size: int,
    bytes_per_token_layer: int,
    hybrid: bool = True,
    kv_dtype: str = "auto",
) -> KVLayout:
    """Group layers by window. `windows[i]` is layer i's window, None for full attention.

    The group size is the one that wastes least: candidates are the gcd of the kind counts and the smallest
    count (padding the last group of a kind). `hybrid=False` keeps one table for all layers.
    """
    kinds: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window, []).append(layer)
    if not hybrid or len(kinds) == 1:
        window = next(iter(kinds)) if len(kinds) == 1 and hybrid else None
        whole = KVGroup(tuple(range(len(windows))), window)
        return KVLayout(block_size, (whole,), len(windows), bytes_per_token_layer, kv_dtype)
    counts = [len(layers) for layers in kinds.values()]
    size = _group_size(counts)
    groups = [
        KVGroup(tuple(layers[i : i + size]), window)
        for window, layers in kinds.items()
        for i in range(0, len(layers), size)
    ]
    # Full groups first: prefix matching starts with them.
    groups.sort(key=lambda g: (g.window is not None, g.layers))
    return KVLayout(block_size, tuple(groups), size, bytes_per_token_layer, kv_dtype)


def _group_size(counts: Seq[int]) -> int:
    """Divide exactly when that keeps groups few (at most 8), else pad to the smallest kind."""
    exact = gcd(*counts)
    if sum(counts) // exact <= 8:
        return exact
    return min(counts)


def largest(high: int, fits: Callable[[int], bool], low: int = 0) -> int:
    """The largest n of low..high for which `fits(n)`; `fits` never holds again once it fails, and holds for `low`."""
    if low < high and fits(high):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
