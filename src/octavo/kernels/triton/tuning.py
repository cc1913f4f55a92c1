"""Sizes of tiles, warps and stages per kernel: a table instead of a search, so that the first step needs no tuning.

Shared memory decides: a stage of the loop holds one tile of keys and one of values, `2 * keys * head_dim * bytes`, and
several programs should fit a multiprocessor. A load of keys depends on a load of the block table, so the compiler keeps
one tile in flight per two stages: five stages of a decode kernel are two tiles of 16 KiB of keys and two of values, and
three such programs fit the 227 KiB of Hopper. Nothing here was measured; `octavo bench gpu` is there to change it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """rows: of the query tile (0: as many as the packed heads need). keys: positions read per turn of the loop."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """split: rows with few queries. tile: prompts. programs: what fills the device, for the number of splits."""

    split: Tile
    tile: Tile
    programs: int


#: (head_dim up to, bytes of an operand of a product) -> (decode, prompt), with 160 KiB or more of shared memory
_LARGE = {
    (64, 2): (Tile(0, 128, 4, 5), Tile(128, 128, 8, 3)),
    (128, 2): (Tile(0, 64, 4, 5), Tile(128, 64, 8, 3)),
    (256, 2): (Tile(0, 32, 4, 5), Tile(64, 64, 8, 2)),
    (64, 4): (Tile(0, 64, 4, 2), Tile(64, 32, 8, 2)),
    (128, 4): (Tile(0, 32, 8, 2), Tile(32, 32, 8, 2)),
    (256, 4): (Tile(0, 16, 4, 2), Tile(16, 32, 8, 2)),
}
#: The same for devices with about 100 KiB (8.6, 8.9, 12.x) or 64 KiB (7.5)
_SMALL = {
    (64, 2): (Tile(0, 64, 4, 2), Tile(128, 64, 4, 2)),
    (128, 2): (Tile(0, 32, 4, 2), Tile(64, 32, 4, 2)),
    (256, 2): (Tile(0, 16, 4, 2), Tile(32, 32, 4, 1)),
    (64, 4): (Tile(0, 32, 4, 2), Tile(32, 32, 4, 1)),
    (128, 4): (Tile(0, 16, 4, 2), Tile(32, 16, 4, 1)),
    (256, 4): (Tile(0, 16, 4, 1), Tile(16, 16, 4, 1)),
}
PROGRAMS_PER_PROCESSOR = 4  # of a decode kernel: enough in flight to hide the latency of memory
ROWS_AT_LEAST = 16  # of a tensor core's product


def pick_tiles(head_dim: int, operand_bytes: int, capability: tuple[int, int], processors: int) -> Tiles:
    """capability: (major, minor) as CUDA counts; (0, 0) for the interpreter. processors: of the device."""
    large = capability in ((0, 0), (8, 0), (8, 7)) or capability[0] in (9, 10)
    table = _LARGE if large else _SMALL
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    split, tile = table[(width, operand_bytes)]
    return Tiles(split, tile, PROGRAMS_PER_PROCESSOR * processors)


def next_power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
