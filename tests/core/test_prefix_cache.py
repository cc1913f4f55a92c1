"""Prefix cache: chains, hits at block edges, windows, salts, evictions and their reasons, collisions, audits."""

from __future__ import annotations

import pytest

from helpers.scheduling import Rig, prompt
from octavo.core.block_pool import BlockPool
from octavo.core.kv_layout import build_layout
from octavo.core.prefix_cache import Match, PrefixCache
from octavo.errors import AuditError
from octavo.sampling_params import SamplingParams

SIZE = 4


class Shelf:
    """A pool and a cache; `keep` publishes a token list as a finished sequence would."""

    def __init__(self, blocks: int = 16, windows: tuple[int | None, ...] = (None,)) -> None:
        self.pool = BlockPool(blocks)
        self.layout = build_layout(windows, block_size=SIZE, bytes_per_token_layer=1)
        self.cache = PrefixCache(self.pool, self.layout, secret=b"s" * 32)

    def keep(self, tokens: list[int], salt: str | None = None, adapter: str | None = None) -> list[int]:
        """Publish all full blocks, then release them tail first; returns the ids, group by group for each block."""
        root = self.cache.root_key(salt, adapter)
        keys: list[bytes] = []
        self.cache.extend_keys(keys, root, tokens, len(tokens))
        ids = []
        for i, key in enumerate(keys):
            for group in range(self.layout.num_groups):
                block = self.pool.take()
                part = tokens[i * SIZE : (i + 1) * SIZE]
                self.cache.publish(key, keys[i - 1] if i else root, part, i, group, block)
                ids.append(block)
        self.pool.release_all(reversed(ids))
        return ids

    def find(
        self, tokens: list[int], salt: str | None = None, adapter: str | None = None, partial: bool = False
    ) -> tuple[Match, str]:
        """The match of a prompt (one token is always left to compute) and the kind of its first miss."""
        root = self.cache.root_key(salt, adapter)
        keys: list[bytes] = []
        self.cache.extend_keys(keys, root, tokens, len(tokens))
        match = self.cache.match(keys, tokens, root, limit=len(tokens) - 1, partial=partial)
        self.miss = self.cache.explain(keys, tokens, root, match, len(tokens) - 1)
        return match, self.miss.kind


@pytest.mark.parametrize(("length", "hit"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (40, 16)])
def test_whole_blocks_are_hit_and_one_token_is_always_left(length: int, hit: int) -> None:
    shelf = Shelf()
    tokens = prompt(40)
    assert shelf.keep(tokens[:19]) == [0, 1, 2, 3]
    match, _ = shelf.find(tokens[:length])
    assert match.num_tokens == hit and match.blocks() == [0, 1, 2, 3][: hit // SIZE]


def test_a_partly_matching_block_is_shared_to_the_token() -> None:
    shelf = Shelf()
    tokens = prompt(12)
    shelf.keep(tokens)
    match, why = shelf.find([*tokens[:6], 1, 2, 3], partial=True)
    assert (match.num_tokens, match.partial, match.blocks()) == (6, True, [0, 1])
    assert (why, shelf.miss.position) == ("different token", 6)
    match, why = shelf.find(tokens, partial=True)
    assert (match.num_tokens, match.partial, why) == (11, True, "none")


def test_looking_up_changes_nothing_and_acquiring_raises_the_counts() -> None:
    shelf = Shelf()
    tokens = prompt(12)
    shelf.keep(tokens)
    before = shelf.pool.reuse_order()
    match, _ = shelf.find([*tokens, 1])
    assert shelf.pool.reuse_order() == before and shelf.pool.num_used == 0
    shelf.cache.acquire(match)
    assert shelf.pool.num_used == 3 and shelf.pool.num_cached == 0
    shelf.cache.acquire(match)
    assert [shelf.pool.count(b) for b in match.blocks()] == [2, 2, 2]


def test_a_found_block_cannot_be_handed_out_to_the_finder() -> None:
    """Kind 4: the pool is one block larger than needed; the new block is none of the found ones."""
    shelf = Shelf(blocks=4)
    tokens = prompt(12)
    shelf.keep(tokens)
    match, _ = shelf.find([*tokens, 1])
    shelf.cache.acquire(match)
    assert shelf.pool.take() == 3 and shelf.pool.num_available == 0


def test_salt_and_adapter_divide_the_cache() -> None:
    shelf = Shelf()
    tokens = prompt(9)
    shelf.keep(tokens, salt="a")
    assert shelf.find(tokens, salt="a")[0].num_tokens == 8
    assert [shelf.find(tokens, salt=s)[1] for s in (None, "b", "")] == ["salt", "salt", "salt"]
    assert shelf.find(tokens, salt="a", adapter="x")[1] == "adapter"
    assert shelf.find(tokens, salt="b")[0].num_tokens == 0


def test_fields_cannot_run_into_each_other() -> None:
    cache = Shelf().cache
    roots = [(None, None), ("", None), (None, ""), ("a", None), (None, "a"), ("a+b", None), ("a", "b"), ("-", None)]
    assert len({cache.root_key(*root) for root in roots}) == len(roots)
    keys = {cache.block_key(b"", [1, 2]), cache.block_key(b"", [1]), cache.block_key(b"\1\0\0\0", [2])}
    assert len(keys) == 3


def test_keys_depend_on_the_secret_of_the_process() -> None:
    shelf, other = Shelf(), PrefixCache(BlockPool(1), build_layout([None], block_size=4, bytes_per_token_layer=1))
    assert shelf.cache.root_key(None, None) != other.root_key(None, None)
    assert len(other.root_key(None, None)) == 16


def test_reasons_of_a_miss() -> None:
    shelf = Shelf(blocks=4)
    tokens = prompt(16)
    assert shelf.find(tokens)[1] == "never seen"
    assert shelf.find(tokens[:3])[1] == "partial block"
    shelf.keep(tokens[:12])
    assert shelf.find(tokens[:13])[1] == "none"
    assert shelf.find(tokens[:14])[1] == "partial block"
    assert shelf.find(tokens[:16])[1] == "partial block"
    assert shelf.find([*tokens[:8], *[1] * 8])[1] == "different token"
    assert (shelf.miss.block, shelf.miss.position) == (2, 8)
    assert shelf.find([*tokens[:6], *[1] * 8])[1] == "different token"
    assert (shelf.miss.block, shelf.miss.position) == (1, 6)
    shelf.cache.step = 41
    shelf.pool.take()
    shelf.pool.take()
    assert shelf.find(tokens[:13])[1] == "evicted"
    assert (shelf.miss.block, shelf.miss.detail) == (2, "evicted in step 41")


def test_the_end_of_a_chain_is_evicted_first() -> None:
    shelf = Shelf(blocks=4)
    tokens = prompt(17)
    shelf.keep(tokens[:16])
    hits = []
    for _ in range(4):
        hits.append(shelf.find(tokens)[0].num_tokens)
        shelf.pool.take()
    assert hits == [16, 12, 8, 4] and shelf.find(tokens)[0].num_tokens == 0
    assert shelf.cache.counters.evictions == 4


def test_equal_content_is_published_once() -> None:
    shelf = Shelf()
    tokens = prompt(8)
    first, second = shelf.keep(tokens), shelf.keep(tokens)
    assert first == [0, 1] and second == [2, 3]
    assert shelf.pool.num_cached == 2 and shelf.pool.reuse_order()[:2] == [2, 3]
    assert shelf.find([*tokens, 1])[0].blocks() == [0, 1]


def test_reset_forgets_everything_and_leaves_blocks_in_use_in_use() -> None:
    shelf = Shelf()
    tokens = prompt(12)
    shelf.keep(tokens)
    match, _ = shelf.find([*tokens[:4], 1, 1])
    shelf.cache.acquire(match)
    assert shelf.cache.reset() == 3
    assert (shelf.pool.num_used, shelf.pool.num_cached, shelf.find(tokens)[1]) == (1, 0, "never seen")
    shelf.cache.audit()
    shelf.pool.release(match.blocks()[0])
    assert shelf.pool.num_free == 16


# -- windows -----------------------------------------------------------------------------------------------------


def test_a_windowed_group_needs_only_what_the_next_token_reads() -> None:
    shelf = Shelf(windows=(None, 6))
    tokens = prompt(17)
    ids = shelf.keep(tokens[:16])  # full group: even places, windowed group: odd places
    full, windowed = ids[::2], ids[1::2]
    match, _ = shelf.find(tokens)
    # The token at 16 reads 11..16: blocks 2 and 3 of the windowed group.
    assert match.num_tokens == 16 and match.first == (0, 2)
    assert match.ids == (tuple(full), tuple(windowed[2:]))


def test_matching_intersects_the_kinds() -> None:
    shelf = Shelf(windows=(None, 6))
    tokens = prompt(17)
    ids = shelf.keep(tokens[:16])
    windowed = ids[1::2]
    shelf.pool.unpublish(windowed[0])
    shelf.cache._forget_block(windowed[0])
    assert shelf.find(tokens)[0].num_tokens == 16, "behind the window: not needed"
    shelf.pool.unpublish(windowed[2])
    shelf.cache._forget_block(windowed[2])
    # A prefix of 16 or 12 tokens reads block 2; one of 8 reads from 3 on, so block 0, which is lost as well.
    match, why = shelf.find(tokens)
    assert (match.num_tokens, why) == (0, "evicted")
    shelf.cache.audit()


def test_matching_ends_before_the_gap_where_the_window_allows() -> None:
    shelf = Shelf(windows=(None, 4))
    tokens = prompt(17)
    windowed = shelf.keep(tokens[:16])[1::2]
    shelf.pool.unpublish(windowed[3])
    shelf.cache._forget_block(windowed[3])
    match, _ = shelf.find(tokens)
    assert (match.num_tokens, match.first, match.ids[1]) == (12, (0, 2), (windowed[2],))


# -- collisions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_hash_that_always_collides_costs_hits_only(monkeypatch, windows) -> None:  # type: ignore[no-untyped-def]
    """Kind 6. The scripted runner would notice any block with another content."""
    monkeypatch.setattr(PrefixCache, "block_key", lambda self, parent, tokens: b"k" * 16)
    rig = Rig(64, windows=windows, enable_prefix_caching=True)
    same = [5] * 4
    prompts = [prompt(17), same * 4 + [1], prompt(8) + same * 3, same + prompt(9), same * 2 + [7], prompt(17)]
    for tokens in [*prompts, *reversed(prompts)]:
        rig.add(tokens)
        rig.run()
    requests = [rig.add(p, max_tokens=20) for p in prompts]
    rig.run()
    rig.check_answers(*requests)
    rig.check_empty()


def test_a_colliding_block_elsewhere_in_a_chain_does_not_match(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    shelf = Shelf()
    monkeypatch.setattr(PrefixCache, "block_key", lambda self, parent, tokens: b"k" * 16)
    shelf.keep([5] * 4)
    assert shelf.find([5] * 13)[0].num_tokens == 4
    assert shelf.find([5] * 13, partial=True)[0].num_tokens == 4


# -- audits ------------------------------------------------------------------------------------------------------


def test_audit_finds_an_entry_that_points_elsewhere() -> None:
    shelf = Shelf()
    shelf.keep(prompt(8))
    entry = next(iter(shelf.cache._entries.values()))
    entry.blocks[0] = 5
    with pytest.raises(AuditError, match="block 0: its cache entry points at block 5"):
        shelf.cache.audit()


def test_audit_finds_a_block_the_pool_does_not_know_as_published() -> None:
    shelf = Shelf()
    shelf.keep(prompt(8))
    shelf.pool._published[1] = 0
    with pytest.raises(AuditError, match="block 1: in the prefix cache, but not published"):
        shelf.cache.audit()


def test_audit_finds_a_published_block_nobody_can_find() -> None:
    shelf = Shelf()
    shelf.keep(prompt(8))
    shelf.pool._published[7] = 1
    with pytest.raises(AuditError, match="block 7: published in the pool, but not in the prefix cache"):
        shelf.cache.audit()


def test_audit_finds_a_stale_hash() -> None:
    shelf = Shelf()
    shelf.keep(prompt(8))
    entry = next(iter(shelf.cache._entries.values()))
    entry.tokens = (1, 2, 3, 4)
    with pytest.raises(AuditError, match=r"block\(s\) \[0\]: the key is not the hash"):
        shelf.cache.audit()


def test_audit_finds_a_table_whose_block_is_published_as_something_else() -> None:
    rig = Rig(16, enable_prefix_caching=True)
    request = rig.add(prompt(9), max_tokens=5)
    rig.step()
    table = request.sequences[0].tables[0]
    rig.scheduler.audit()
    table.ids[0], table.ids[1] = table.ids[1], table.ids[0]
    with pytest.raises(AuditError, match="sequence 0, group 0, logical block 0: block 1 is published with the hash"):
        rig.scheduler.audit()


def test_audit_finds_a_block_twice_in_a_table() -> None:
    rig = Rig(16)
    request = rig.add(prompt(9), max_tokens=5)
    rig.step()
    request.sequences[0].tables[0].ids[2] = 1
    with pytest.raises(AuditError, match="sequence 0, group 0, logical block 2: block 1 is twice in one table"):
        rig.scheduler.audit()


@pytest.mark.parametrize(("block", "message"), [(99, "block 99 is outside the pool of 16"), (-1, "contradicts first")])
def test_audit_finds_an_impossible_entry(block: int, message: str) -> None:
    rig = Rig(16)
    request = rig.add(prompt(9), max_tokens=5)
    rig.step()
    request.sequences[0].tables[0].ids[1] = block
    with pytest.raises(AuditError, match=message):
        rig.scheduler.audit()


def test_audit_finds_a_table_too_short_for_what_was_computed() -> None:
    rig = Rig(16)
    request = rig.add(prompt(9), max_tokens=5)
    rig.step()
    request.sequences[0].tables[0].truncate(8)
    with pytest.raises(AuditError, match="2 blocks cannot hold 9 computed positions"):
        rig.scheduler.audit()


# -- through the scheduler ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 4, 5, 8, 16, 17])
def test_the_same_prompt_twice(length: int) -> None:
    """Kind 1: also when the whole prompt is cached and ends at a block's edge."""
    rig = Rig(64, enable_prefix_caching=True)
    first = rig.add(prompt(length))
    rig.run()
    second = rig.add(prompt(length))
    rig.run()
    assert rig.tokens_of(first) == rig.tokens_of(second)
    # Generated blocks are cached too, so the hit runs up to the one token that is always computed.
    assert second.num_cached_tokens == (length - 1 if length + 7 >= -(-length // 4) * 4 else (length - 1) // 4 * 4)
    rig.check_empty()


def test_the_next_turn_of_a_conversation_hits_generated_blocks() -> None:
    rig = Rig(64, enable_prefix_caching=True)
    first = rig.add(prompt(10), max_tokens=15, end_ids=())
    rig.run()
    turn = first.prompt_token_ids + first.sequences[0].output_token_ids + prompt(6, 1)
    second = rig.add(turn)
    rig.run()
    assert second.num_cached_tokens == 24  # 25 known, the last one was never computed
    rig.check_answers(first, second)


def test_prompt_logprobs_compute_the_prompt_but_may_fill_the_cache() -> None:
    """Kind 8."""
    rig = Rig(64, enable_prefix_caching=True)
    hits = []
    for wanted in (1, None, 1):
        request = rig.add(prompt(17), SamplingParams(max_tokens=2, prompt_logprobs=wanted))
        rig.run()
        hits.append(request.num_cached_tokens)
        if wanted:
            assert len(request.prompt_logprobs) == 17 and request.prompt_logprobs[0] is None
            assert [p.token_ids[0] for p in request.prompt_logprobs[1:]] == prompt(17)[1:]
            assert request.cache_report is not None and request.cache_report.miss.kind == "prompt logprobs"
    assert hits == [0, 16, 0]


def test_off_is_said() -> None:
    rig = Rig(64)
    request = rig.add(prompt(9))
    rig.run()
    assert request.cache_report is not None and request.cache_report.miss.kind == "off"
