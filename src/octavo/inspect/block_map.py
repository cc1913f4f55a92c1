"""`BlockMap`: reads the frames of `octavo.inspect.feed` and answers what a block is, who holds it, and how full it is.

    block_map = BlockMap(full_frame(view))
    block_map.apply(delta_frame(view, later, 1))
    block_map.owners(7)             [Owner(seq_id=0, group=0, logical=1), …]

The same as the browser does in `static/map.js`. It knows the format of the feed and nothing of an engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from octavo.errors import ConfigError
from octavo.inspect.feed import FEED_VERSION, Frame

STATE_NAMES = {"f": "free", "c": "cached", "u": "used", "s": "shared", "p": "pending"}


class Owner(NamedTuple):
    """One table entry: `table[group][logical]` of the sequence."""

    seq_id: int
    group: int
    logical: int


class Key(NamedTuple):
    """Short hashes of a published block and of the block before it in its chain."""

    group: int
    hash: str
    parent: str


@dataclass(slots=True)
class SequenceState:
    """What the frames said about one sequence; tables are per group, -1 for released entries."""

    seq_id: int
    request_id: str
    sample_index: int
    prompt_len: int
    num_tokens: int = 0
    num_computed: int = 0
    last_step: int = 0
    tables: list[list[int]] = field(default_factory=list)


class BlockMap:
    """State after the frames applied so far. Starts with a full frame; a delta must follow its predecessor."""

    def __init__(self, frame: Frame) -> None:
        self.waiting: list[list[Any]] = []
        self.events: list[list[Any]] = []
        self.stats: dict[str, int] = {}
        self.apply(frame)

    def apply(self, frame: Frame) -> None:
        """Take the next frame in. Raises ConfigError for another version of the feed or a frame out of order."""
        if frame.get("v") != FEED_VERSION:
            raise ConfigError(f"feed version {frame.get('v')!r}: this Octavo reads version {FEED_VERSION}")
        if "pool" in frame:
            self._begin(frame["pool"])
        elif frame["frame"] != self.frame + 1:
            raise ConfigError(
                f"frame {frame['frame']} does not fit on frame {self.frame}; ask for a full one (/blocks/snapshot)"
            )
        self.frame: int = frame["frame"]
        self.step: int = frame["step"]
        self.time: float = frame["time"]
        for block, state, at in zip(*frame["blocks"], strict=True):
            self.states[block], self.last_used[block] = state, at
        keys = frame["keys"]
        for block, group, name, parent in zip(keys[::4], keys[1::4], keys[2::4], keys[3::4], strict=True):
            if group < 0:
                self.keys.pop(block, None)
            else:
                self.keys[block] = Key(group, name, parent)
        for seq_id in frame["gone"]:
            self._drop(self.sequences.pop(seq_id))
        for seq_id, request_id, index, prompt_len in frame["new"]:
            tables: list[list[int]] = [[] for _ in self.windows]
            self.sequences[seq_id] = SequenceState(seq_id, request_id, index, prompt_len, tables=tables)
        progress = frame["progress"]
        for seq_id, *values in zip(progress[::4], progress[1::4], progress[2::4], progress[3::4], strict=True):
            seq = self.sequences[seq_id]
            seq.num_tokens, seq.num_computed, seq.last_step = values
        for seq_id, group, first, *ids in frame["tables"]:
            self._set_tail(self.sequences[seq_id], group, first, ids)
        if frame["waiting"] is not None:
            self.waiting = frame["waiting"]
        self.events = frame["events"]
        self.stats = dict(zip(self.stat_names, frame["stats"], strict=True))

    def _begin(self, pool: dict[str, Any]) -> None:
        self.num_blocks: int = pool["num_blocks"]
        self.block_size: int = pool["block_size"]
        self.bytes_per_block: int = pool["bytes_per_block"]
        self.windows: list[int | None] = pool["windows"]
        self.max_model_len: int = pool["max_model_len"]
        self.max_num_seqs: int = pool["max_num_seqs"]
        self.stat_names: list[str] = pool["stats"]
        self.states = ["f"] * self.num_blocks
        self.last_used = [0] * self.num_blocks
        self.keys: dict[int, Key] = {}
        self.sequences: dict[int, SequenceState] = {}
        self.waiting = []
        self._owners: dict[int, set[Owner]] = {}

    def _set_tail(self, seq: SequenceState, group: int, first: int, ids: list[int]) -> None:
        table = seq.tables[group]
        for logical in range(first, len(table)):
            self._disown(table[logical], Owner(seq.seq_id, group, logical))
        table[first:] = ids
        for logical, block in enumerate(ids, first):
            if block >= 0:
                self._owners.setdefault(block, set()).add(Owner(seq.seq_id, group, logical))

    def _drop(self, seq: SequenceState) -> None:
        for group, table in enumerate(seq.tables):
            for logical, block in enumerate(table):
                self._disown(block, Owner(seq.seq_id, group, logical))

    def _disown(self, block: int, owner: Owner) -> None:
        if block >= 0:
            self._owners[block].discard(owner)

    # -- questions about a block ---------------------------------------------------------------------------------

    def state(self, block: int) -> str:
        """ "free", "cached", "used", "shared" or "pending"."""
        return STATE_NAMES[self.states[block]]

    def owners(self, block: int) -> list[Owner]:
        """The table entries that point at the block, by sequence."""
        return sorted(self._owners.get(block, ()))

    def count(self, block: int) -> int:
        """Tables that hold the block."""
        return len(self._owners.get(block, ()))

    def fill(self, block: int) -> int:
        """Slots that hold a computed position. Cached blocks are full; free and pending ones hold nothing of use."""
        if self.states[block] == "c":
            return self.block_size
        reach = (self.sequences[o.seq_id].num_computed - o.logical * self.block_size for o in self.owners(block))
        return max(0, min(self.block_size, max(reach, default=0)))

    def age(self, block: int) -> int | None:
        """Steps since the block was last read or written; None for one that never was."""
        owners = self.owners(block)
        at = max((self.sequences[o.seq_id].last_step for o in owners), default=self.last_used[block])
        return self.step - at if at else None

    def parent(self, block: int) -> int | None:
        """The block with the content before this one's, for the same layers; None: none that is known."""
        key = self.keys.get(block)
        if key is None:
            return None
        return next((b for b, k in self.keys.items() if k.hash == key.parent and k.group == key.group), None)
