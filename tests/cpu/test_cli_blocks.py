"""`PoolView` as text: tables, marks, bar and savings, each with the numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.tiny_models import write_tiny
from octavo import LLM, SamplingParams
from octavo.cli.blocks import BlockWatch
from octavo.inspect.terminal import BAR_WIDTH, format_bytes, format_table, show_blocks, table_lines, usage_line


def view(**changes: Any) -> Any:
    """Two sequences that share blocks 3 and 7 of a pool of 40."""
    values: dict[str, Any] = {
        "num_blocks": 40,
        "num_used": 4,
        "num_shared": 2,
        "num_cached": 1,
        "num_free": 35,
        "block_size": 16,
        "bytes_per_block": 1024,
        "windows": (None,),
        "block_tables": {1: [[3, 7, 12]], 0: [[3, 7, 11]]},
        "ref_counts": {3: 2, 7: 2, 11: 1, 12: 1},
        "peak_used": 9,
        "peak_sequences": 2,
        "copies": 1,
        "forks": 1,
        "preemptions": 0,
        "static_bytes_same_load": 16 * 1024,
        "shared_saved_blocks": 2,
    }
    return SimpleNamespace(**(values | changes))


def test_the_whole_picture() -> None:
    assert show_blocks(view()) == [
        "seq 0: [3*, 7*, 11]",
        "seq 1: [3*, 7*, 12]",
        "* shared by several block tables",
        f"pool {'█' * 3}{'░' * 27} 4 of 40 blocks used (10.0%), 2 of them shared; 1 cached, 35 free; "
        "16 tokens and 1.0 KiB a block",
        "saved 12.0 KiB (75.0%) against static allocation: 4.0 KiB in blocks, 16.0 KiB if every sequence reserved its "
        "longest length",
        "sharing alone saved 2 blocks (2.0 KiB); 1 forks, 1 copies on write",
        "peak 9 blocks, 2 sequences at once",
    ]


def test_groups_of_one_kind_stand_side_by_side() -> None:
    three = view(windows=(None, 8, 8), block_tables={0: [[1, 2], [-1, 3], [-1, 4]]}, ref_counts=[1, 1, 2, 1, 2])
    assert table_lines(three) == [
        "seq 0: [1, 2*]  (full attention)",
        "       [·, 3] [·, 4*]  (window 8, 2 groups of layers)",
    ]


def test_groups_are_labelled_and_released_blocks_are_dots() -> None:
    two = view(windows=(None, 512), block_tables={5: [[1, 2, 3], [-1, -1, 9]]}, ref_counts=[1] * 10)
    assert table_lines(two) == ["seq 5: [1, 2, 3]  (full attention)", "       [·×2, 9]  (window 512)"]
    assert "· given back: behind the sliding window" in show_blocks(two)


@pytest.mark.parametrize(
    ("table", "shared", "text"),
    [
        ([], (), "[]"),
        ([-1, 4], (), "[·, 4]"),
        (list(range(24)), (), f"[{', '.join(map(str, range(24)))}]"),
        (list(range(30)), (), "[0-29]"),
        (list(range(30)), range(10), "[0-9*, 10-29]"),
        ([*range(30), 50, 40], (50,), "[0-29, 50*, 40]"),
    ],
)
def test_tables(table: list[int], shared: Any, text: str) -> None:
    assert format_table(table, {b: 2 if b in shared else 1 for b in table}) == text


@pytest.mark.parametrize(("used", "filled"), [(0, 0), (1, 1), (500, 15), (999, BAR_WIDTH - 1), (1000, BAR_WIDTH)])
def test_the_bar_is_empty_or_full_only_when_the_pool_is(used: int, filled: int) -> None:
    line = usage_line(view(num_blocks=1000, num_used=used))
    assert line.count("█") == filled and line.count("█") + line.count("░") == BAR_WIDTH


def test_nothing_shared_nothing_claimed() -> None:
    lines = "\n".join(show_blocks(view(shared_saved_blocks=0, ref_counts=[1] * 40, num_shared=0)))
    assert "*" not in lines and "sharing" not in lines


def test_a_loss_is_called_a_cost() -> None:
    assert any(line.startswith("cost  2.0 KiB (100.0%)") for line in show_blocks(view(static_bytes_same_load=2048)))
    assert not any("static" in line for line in show_blocks(view(static_bytes_same_load=0)))


def test_many_sequences_are_cut_with_a_count() -> None:
    many = view(block_tables={i: [[i]] for i in range(40)}, ref_counts=[1] * 40)
    assert table_lines(many, max_sequences=3)[2:] == ["seq 2: [2]", "… and 37 more sequences"]


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3072.0 GiB")])
def test_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_counters_come_from_the_later_view() -> None:
    lines = show_blocks(view(), totals=view(peak_used=30, copies=5, preemptions=2))
    assert lines[-1] == "peak 30 blocks, 2 sequences at once; 2 preemptions" and "5 copies on write" in lines[-2]


@pytest.mark.parametrize(("family", "groups"), [("llama", 1), ("gemma3", 2)])
@pytest.mark.parametrize(("max_tokens", "blocks"), [(1, 1), (10, 1), (11, 1), (12, 2), (13, 2)])
def test_the_picture_shows_the_last_step(
    tmp_path_factory: pytest.TempPathFactory, family: str, groups: int, max_tokens: int, blocks: int
) -> None:
    """6 + 12 tokens: the twelfth is drawn at position 16, the only step that uses a second block of 16."""
    path = tiny(family, tmp_path_factory)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    with LLM(path, max_model_len=128, num_blocks=40, skip_tokenizer_init=True) as llm:
        with BlockWatch(llm, live=False) as watch:
            llm.generate([{"prompt_token_ids": [3, 1, 4, 1, 5, 9]}], params, use_tqdm=False)
        after = llm.pool_view()
        shown, lines = watch.fullest, watch.lines()
        assert not after.block_tables and [len(t) for t in shown.block_tables[0]] == [blocks] * groups
        assert shown.num_used == after.peak_used == blocks * groups
        assert f"{shown.num_used} of 40 blocks used" in "\n".join(lines)
        assert f"peak {after.peak_used} blocks, 1 sequences at once" in lines


def tiny(family: str, factory: pytest.TempPathFactory, made: dict[str, Path] = {}) -> str:  # noqa: B006 - one a family
    if family not in made:
        made[family] = factory.mktemp(family)
        write_tiny(family, made[family])
    return str(made[family])
