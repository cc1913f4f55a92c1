"""Which full blocks of tokens are in the pool already, found by a chained hash.

    root  = H("root",  salt, adapter)
    key 0 = H("block", root,  tokens of block 0)
    key 1 = H("block", key 0, tokens of block 1)   ...

H is BLAKE2b, 128 bits, keyed with a secret of this process, every field tagged with its kind and length, so a key
names one prefix under one salt and one adapter and cannot be guessed from outside. Parent, depth and tokens are
compared on a hit all the same: a collision may cost a hit, never a wrong answer. The same content may live in two
blocks; only the first is published, so a block table is only ever appended to.

Each group of layers has its own block for a key. A hit needs: for a group that sees everything, every block from the
start; for a windowed group, the blocks that the next token still reads. `match` intersects them.

Invariant: a block is in here exactly while the pool says it is published. Looking up and raising counts are one act
(`match` is pure, `acquire` follows at once, before anything else is taken from the pool).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from secrets import token_bytes

from octavo.core.block_pool import BlockPool
from octavo.core.kv_layout import KVLayout
from octavo.core.sequence import Miss
from octavo.errors import AuditError

_EVICTIONS_REMEMBERED = 65536
_SIBLINGS_COMPARED = 8
_ROOTS_REMEMBERED = 4096


@dataclass(slots=True)
class _Entry:
    """Content of one key: `blocks[group]` is its block in that group, -1 where there is none (any more)."""

    parent: bytes
    tokens: tuple[int, ...]
    blocks: list[int]
    depth: int  # logical block index
    drafted: bool = True  # a draft model's groups hold what they should

    def is_at(self, depth: int, parent: bytes) -> bool:
        """Is this the block at that place of a chain? Only a collision of hashes can make it another."""
        return self.depth == depth and self.parent == parent


@dataclass(frozen=True, slots=True)
class Match:
    """What can be taken over: `num_tokens` positions; per group the ids from logical block `first[group]` on.

    `partial`: the last block is used only in part and will be copied when it is written. `drafted`: of all its blocks,
    see `_Entry`.
    """

    num_tokens: int = 0
    num_blocks: int = 0
    first: tuple[int, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    partial: bool = False
    drafted: bool = True

    def blocks(self) -> list[int]:
        return [b for group in self.ids for b in group]


@dataclass(slots=True)
class CacheCounters:
    """Since the start: blocks asked for and found at admission, and the reasons of the first misses."""

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    miss_reasons: dict[str, int] = field(default_factory=dict)


class PrefixCache:
    """Keys of published blocks. Owns the map, never the counts."""

    def __init__(self, pool: BlockPool, layout: KVLayout, *, secret: bytes | None = None) -> None:
        self._pool = pool
        self._size = layout.block_size
        self._windows = [g.window for g in layout.groups]
        self._full = [i for i, w in enumerate(self._windows) if w is None]
        self._windowed = [(i, w) for i, w in enumerate(self._windows) if w is not None]
        self._secret = token_bytes(32) if secret is None else secret
        self._entries: dict[bytes, _Entry] = {}
        self._where: dict[int, tuple[bytes, int, bytes]] = {}  # block -> (key, group, parent)
        self._children: dict[bytes, dict[int, dict[bytes, None]]] = {}  # parent -> first token -> keys
        self._roots: dict[bytes, tuple[str | None, str | None]] = {}
        self._first_blocks: dict[tuple[int, ...], dict[bytes, None]] = {}  # tokens of block 0 -> keys
        self._evicted: OrderedDict[bytes, int] = OrderedDict()  # key -> step of its eviction
        self.step = 0  # told by the scheduler; dates evictions
        self.counters = CacheCounters()
        pool.on_evict = self._forget_block

    # -- keys --------------------------------------------------------------------------------------------------

    def root_key(self, salt: str | None, adapter: str | None) -> bytes:
        s, a = (b"-" if part is None else b"+" + part.encode() for part in (salt, adapter))
        text = b"root|salt:%d|adapter:%d|%b%b" % (len(s), len(a), s, a)
        key = blake2b(text, digest_size=16, key=self._secret).digest()
        if key not in self._roots:
            if len(self._roots) >= _ROOTS_REMEMBERED:
                del self._roots[next(iter(self._roots))]
            self._roots[key] = (salt, adapter)
        return key

    def extend_keys(self, keys: list[bytes], root: bytes, token_ids: Seq[int], num_tokens: int) -> None:
        """Grow `keys` to all full blocks of the first `num_tokens` tokens."""
        size = self._size
        for i in range(len(keys), num_tokens // size):
            tokens = token_ids[i * size : (i + 1) * size]
            keys.append(self.block_key(keys[-1] if keys else root, tokens))

    def block_key(self, parent: bytes, tokens: Seq[int]) -> bytes:
        packed = array("I", tokens).tobytes()
        text = b"block|parent:%d|tokens:%d|%b%b" % (len(parent), len(packed), parent, packed)
        return blake2b(text, digest_size=16, key=self._secret).digest()

    # -- looking up ----------------------------------------------------------------------------------------------

    def match(self, keys: Seq[bytes], token_ids: Seq[int], root: bytes, *, limit: int, partial: bool = True) -> Match:
        """The longest usable prefix of at most `limit` tokens. Pure: acquire it before touching the pool.

        keys: of the sequence's full blocks. limit: at least one token must be left to compute, so at most len - 1.
        """
        size = self._size
        whole = self._longest(keys, token_ids, root, min(len(keys), limit // size))
        count = whole * size
        extra = b""
        if partial and count < limit:
            parent = keys[whole - 1] if whole else root
            extra, shared = self._best_child(parent, token_ids, count, limit)
            if extra and self._windows_ok(keys, extra, whole, count + shared):
                count += shared
            else:
                extra = b""
        if not count:
            return Match()
        first, ids = [], []
        chain = [*keys[:whole], extra] if extra else keys[:whole]
        for group, window in enumerate(self._windows):
            begin = 0 if window is None else max(0, count - window + 1) // size
            begin = min(begin, len(chain))
            first.append(begin)
            ids.append(tuple(self._entries[k].blocks[group] for k in chain[begin:]))
        drafted = all(self._entries[k].drafted for k in chain)
        return Match(count, len(chain), tuple(first), tuple(ids), bool(extra), drafted)

    def _longest(self, keys: Seq[bytes], token_ids: Seq[int], root: bytes, limit: int) -> int:
        """Number of leading full blocks that every group can serve."""
        entries, size, full = self._entries, self._size, self._full
        found = 0
        while found < limit:
            entry = entries.get(keys[found])
            if entry is None or (full and any(entry.blocks[g] < 0 for g in full)):
                break
            if not entry.is_at(found, keys[found - 1] if found else root):
                break
            if entry.tokens != tuple(token_ids[found * size : (found + 1) * size]):
                break
            found += 1
        # Walk down: at a block that a windowed group has lost, only ends before it are left.
        end = found
        while end > 0 and self._windowed:
            bad = self._window_gap(keys, end, end * size)
            if bad is None:
                break
            end = bad
        return end

    def _window_gap(self, keys: Seq[bytes], end: int, count: int) -> int | None:
        """The last block before `end` that a windowed group lacks and the token at position `count` would read."""
        worst: int | None = None
        for group, window in self._windowed:
            for i in range(end - 1, max(0, count - window + 1) // self._size - 1, -1):
                if self._entries[keys[i]].blocks[group] < 0:
                    worst = i if worst is None else min(worst, i)
                    break
        return worst

    def _windows_ok(self, keys: Seq[bytes], extra: bytes, whole: int, count: int) -> bool:
        """Can every group serve `count` tokens that end inside the block `extra`?"""
        return all(b >= 0 for b in self._entries[extra].blocks) and self._window_gap(keys, whole, count) is None

    def _best_child(self, parent: bytes, token_ids: Seq[int], start: int, limit: int) -> tuple[bytes, int]:
        """The cached continuation of `parent` that shares most tokens with ours; (key, shared) or (b"", 0)."""
        if start >= len(token_ids):
            return b"", 0
        ours = tuple(token_ids[start : min(start + self._size, limit)])
        best, most = b"", 0
        siblings = self._children.get(parent, {}).get(token_ids[start], {})
        for key in islice(reversed(siblings), _SIBLINGS_COMPARED):
            entry = self._entries[key]
            shared = _common(entry.tokens, ours) if entry.is_at(start // self._size, parent) else 0
            if shared > most:
                best, most = key, shared
        return best, most

    def acquire(self, match: Match) -> None:
        """Raise the count of every block of the match. Follows `match` with nothing in between."""
        for block in match.blocks():
            self._pool.share(block)

    # -- publishing and forgetting ---------------------------------------------------------------------------------

    def publish(
        self, key: bytes, parent: bytes, tokens: Seq[int], depth: int, group: int, block: int, drafted: bool = True
    ) -> bool:
        """`block` holds the KV of `tokens` after `parent` for `group`; False if that content is published already.

        Not `drafted`: unless the group is a draft model's, which has not computed them.
        """
        entry = self._entries.get(key)
        if entry is None:
            entry = _Entry(parent, tuple(tokens), [-1] * len(self._windows), depth)
            self._entries[key] = entry
            self._children.setdefault(parent, {}).setdefault(entry.tokens[0], {})[key] = None
            if depth == 0:
                self._first_blocks.setdefault(entry.tokens, {})[key] = None
            self._evicted.pop(key, None)
        elif entry.blocks[group] >= 0 or not entry.is_at(depth, parent) or entry.tokens != tuple(tokens):
            return False
        if self._pool.is_published(block):
            return False
        entry.blocks[group] = block
        entry.drafted &= drafted
        self._where[block] = (key, group, parent)
        self._pool.publish(block)
        return True

    def _forget_block(self, block: int) -> None:
        """The pool gave the block's content up."""
        key, group, _ = self._where.pop(block)
        self.counters.evictions += 1
        entry = self._entries[key]
        entry.blocks[group] = -1
        if group in self._full or all(b < 0 for b in entry.blocks):
            self._evicted[key] = self.step
            self._evicted.move_to_end(key)
            if len(self._evicted) > _EVICTIONS_REMEMBERED:
                self._evicted.popitem(last=False)
        if all(b < 0 for b in entry.blocks):
            self._drop(key, entry)

    def _drop(self, key: bytes, entry: _Entry) -> None:
        del self._entries[key]
        by_token = self._children[entry.parent]
        del by_token[entry.tokens[0]][key]
        if not by_token[entry.tokens[0]]:
            del by_token[entry.tokens[0]]
            if not by_token:
                del self._children[entry.parent]
        if entry.depth == 0:
            same = self._first_blocks[entry.tokens]
            del same[key]
            if not same:
                del self._first_blocks[entry.tokens]

    def reset(self) -> int:
        """Forget everything; blocks in use stay in use, cached ones become free. Returns how many were published."""
        blocks = list(self._where)
        for block in blocks:
            self._pool.unpublish(block)
        for table in (self._where, self._entries, self._children, self._first_blocks, self._evicted):
            table.clear()
        return len(blocks)

    # -- explaining --------------------------------------------------------------------------------------------

    def explain(self, keys: Seq[bytes], token_ids: Seq[int], root: bytes, match: Match, limit: int) -> Miss:
        """Why the chain did not go on after `match`. Costs a few dictionary look-ups."""
        size = self._size
        if match.num_tokens >= limit:
            return Miss("none", match.num_blocks)
        at = match.num_tokens // size
        if match.partial:
            return Miss("different token", at, match.num_tokens, "the cached block differs from this position on")
        start = at * size
        if at < len(keys):
            key = keys[at]
            if key in self._evicted:
                return Miss("evicted", at, start, f"evicted in step {self._evicted[key]}")
            if key in self._entries:
                return Miss("evicted", at, start, "a windowed group of layers has lost the blocks the next token reads")
        parent = keys[at - 1] if at else root
        child, shared = self._best_child(parent, token_ids, start, start + size)
        if child:
            return Miss("different token", at, start + shared, "the cached block differs from this position on")
        if at == 0 and (other := self._other_root(tuple(token_ids[:size]), root)):
            return Miss(other, 0, 0, f"the same tokens are cached under another {other}")
        if at >= len(keys) or start + size > limit:
            return Miss("partial block", at, start, f"fewer than {size} tokens left; only full blocks are kept")
        if at and parent in self._children:  # at the very beginning nothing was shared: it is simply new
            return Miss("different token", at, start, "cached prefixes go on with another token")
        return Miss("never seen", at, start)

    def _other_root(self, tokens: tuple[int, ...], root: bytes) -> str | None:
        ours = self._roots.get(root, (None, None))
        for key in self._first_blocks.get(tokens, ()):
            theirs = self._roots.get(self._entries[key].parent, (None, None))
            if theirs[1] != ours[1]:
                return "adapter"
            if theirs[0] != ours[0]:
                return "salt"
        return None

    # -- trust ---------------------------------------------------------------------------------------------------

    def block_info(self, block: int) -> tuple[bytes, int] | None:
        """(key, group) of a published block, for views."""
        place = self._where.get(block)
        return place[:2] if place is not None else None

    def places(self) -> dict[int, tuple[bytes, int, bytes]]:
        """A copy for views: published block -> (key, group, key of the block before it)."""
        return self._where.copy()

    def tokens(self, block: int) -> tuple[int, ...]:
        """What a published block holds; empty for any other."""
        place = self._where.get(block)
        return self._entries[place[0]].tokens if place is not None else ()

    def audit(self) -> None:
        """Every entry points at a published block with that key, and back."""
        for block, (key, group, _) in self._where.items():
            if self._entries[key].blocks[group] != block:
                raise AuditError(f"block {block}: its cache entry points at block {self._entries[key].blocks[group]}")
            if not self._pool.is_published(block):
                raise AuditError(f"block {block}: in the prefix cache, but not published in the pool")
        for block in range(self._pool.num_blocks):
            if self._pool.is_published(block) and block not in self._where:
                raise AuditError(f"block {block}: published in the pool, but not in the prefix cache")
        listed = sum(b >= 0 for e in self._entries.values() for b in e.blocks)
        if listed != len(self._where):
            raise AuditError(f"the prefix cache lists {listed} blocks, but knows the place of {len(self._where)}")
        for key, entry in self._entries.items():
            if self.block_key(entry.parent, entry.tokens) != key:
                raise AuditError(f"block(s) {entry.blocks}: the key is not the hash of parent and tokens")


def _common(a: Seq[int], b: Seq[int]) -> int:
    """Length of the common prefix."""
    n = 0
    for x, y in zip(a, b):
        if x != y:
            break
        n += 1
    return n
