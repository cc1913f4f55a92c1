"""A `PoolView` as lines of text for a terminal: block tables, a usage bar, and what paging and sharing saved.

    seq 0: [3*, 7*, 11]
    seq 1: [3*, 7*, 12]
    * shared by several tables
    pool  ██████░░░░░░░░░░░░░░  4 of 32 blocks used (12.5 %), 2 of them shared; 0 cached, 28 free
    saved 1.2 MiB of 1.6 MiB (75.0 %) against reserving max_model_len for each sequence …

Pure functions of the view; nothing here draws, colours or knows an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.core.view import PoolView

RELEASED_MARK = "·"
SHARED_MARK = "*"
LONG_TABLE = 24  # entries; longer tables are shown as ranges
BAR_WIDTH = 30


def show_blocks(
    view: PoolView,
    *,
    max_sequences: int = 32,
    totals: PoolView | None = None,
    labels: Mapping[int, str] | None = None,
) -> list[str]:
    """Everything `--show-blocks` prints: tables, legend, usage, savings.

    totals: a later view, for what is counted over the whole run (peaks, forks, copies, preemptions).
    labels: seq_id -> what stands in front of its table instead of "seq 3".
    """
    lines = table_lines(view, max_sequences=max_sequences, labels=labels)
    return [*lines, *legend(lines), usage_line(view), *savings_lines(view, totals or view)]


def table_lines(view: PoolView, *, max_sequences: int = 32, labels: Mapping[int, str] | None = None) -> list[str]:
    """Tables in the order of sequence ids: one line per sequence and kind of layer, groups of a kind side by side."""
    lines: list[str] = []
    ids = sorted(view.block_tables)
    kinds = list(dict.fromkeys(view.windows))
    for seq_id in ids[:max_sequences]:
        head = f"{labels[seq_id] if labels else f'seq {seq_id}'}: "
        for number, window in enumerate(kinds):
            tables = [t for t, w in zip(view.block_tables[seq_id], view.windows, strict=True) if w == window]
            text = " ".join(format_table(table, view.ref_counts) for table in tables)
            label = f"  ({_kind_label(window, len(tables))})" if len(view.windows) > 1 else ""
            lines.append(f"{' ' * len(head) if number else head}{text}{label}")
    if len(ids) > max_sequences:
        lines.append(f"… and {len(ids) - max_sequences} more sequences")
    return lines


def format_table(table: Sequence[int], ref_counts: Mapping[int, int] | Sequence[int]) -> str:
    """`[3*, 7, 11]`: shared blocks marked, released ones (-1) as `·`, their number behind it when there are several.

    More than LONG_TABLE entries: runs of neighbours with the same mark become `12-40*`.
    """
    entries = [(block, block >= 0 and _count(ref_counts, block) > 1) for block in table]
    runs: list[list[tuple[int, bool]]] = []
    for entry in entries:
        if runs and _continues(runs[-1][-1], entry, long=len(entries) > LONG_TABLE):
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return f"[{', '.join(_run_text(run) for run in runs)}]"


def legend(lines: Sequence[str]) -> list[str]:
    """What the marks that occur in `lines` mean."""
    text = "\n".join(lines)
    marks = []
    if SHARED_MARK in text:
        marks.append(f"{SHARED_MARK} shared by several block tables")
    if RELEASED_MARK in text:
        marks.append(f"{RELEASED_MARK} given back: behind the sliding window")
    return ["; ".join(marks)] if marks else []


def usage_line(view: PoolView) -> str:
    """`pool ███░░░ 12 of 40 blocks used (30.0 %), …`"""
    share = view.num_used / view.num_blocks if view.num_blocks else 0.0
    # A used block is always visible, and a bar is full only when the pool is.
    filled = min(BAR_WIDTH - (view.num_used < view.num_blocks), max(view.num_used > 0, round(share * BAR_WIDTH)))
    bar = "█" * filled + "░" * (BAR_WIDTH - filled)
    shared = f", {view.num_shared} of them shared" if view.num_shared else ""
    return (
        f"pool {bar} {view.num_used} of {view.num_blocks} blocks used ({share:.1%}){shared}; "
        f"{view.num_cached} cached, {view.num_free} free; {view.block_size} tokens and "
        f"{format_bytes(view.bytes_per_block)} a block"
    )


def savings_lines(view: PoolView, totals: PoolView) -> list[str]:
    """What the used blocks cost against static allocation, what sharing has to do with it, and the run's counters."""
    used = view.num_used * view.bytes_per_block
    static = view.static_bytes_same_load
    lines = []
    if static:
        saved = static - used
        word = "saved" if saved >= 0 else "cost "
        lines.append(
            f"{word} {format_bytes(abs(saved))} ({abs(saved) / static:.1%}) against static allocation: "
            f"{format_bytes(used)} in blocks, {format_bytes(static)} if every sequence reserved its longest length"
        )
    if view.shared_saved_blocks:
        lines.append(
            f"sharing alone saved {view.shared_saved_blocks} blocks "
            f"({format_bytes(view.shared_saved_blocks * view.bytes_per_block)}); "
            f"{totals.forks} forks, {totals.copies} copies on write"
        )
    peak = f"peak {totals.peak_used} blocks, {totals.peak_sequences} sequences at once"
    lines.append(peak + (f"; {totals.preemptions} preemptions" if totals.preemptions else ""))
    return lines


def format_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def _kind_label(window: int | None, groups: int) -> str:
    kind = "full attention" if window is None else f"window {window}"
    return kind if groups == 1 else f"{kind}, {groups} groups of layers"


def _count(ref_counts: Mapping[int, int] | Sequence[int], block: int) -> int:
    return ref_counts.get(block, 0) if isinstance(ref_counts, Mapping) else ref_counts[block]


def _continues(last: tuple[int, bool], entry: tuple[int, bool], *, long: bool) -> bool:
    if last[0] < 0 or entry[0] < 0:
        return last[0] < 0 and entry[0] < 0
    return long and entry == (last[0] + 1, last[1])


def _run_text(run: list[tuple[int, bool]]) -> str:
    (first, shared), count = run[0], len(run)
    if first < 0:
        return RELEASED_MARK if count == 1 else f"{RELEASED_MARK}×{count}"
    mark = SHARED_MARK if shared else ""
    assert all(b == a + 1 for (a, _), (b, _) in pairwise(run))
    return f"{first}{mark}" if count == 1 else f"{first}-{run[-1][0]}{mark}"
