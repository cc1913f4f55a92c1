"""A report as the lines of `octavo top`: usage, rates, waste, block tables, queue. Pure functions of the report.

gemma-3-270m on cpu, up 12 s
pool ██████░░░░ 4 of 32 blocks used (12.5%), 2 of them shared; 3 cached, 25 free
now      2 running (5 sequences), 3 waiting   182.0 tok/s written, 190.2 computed   hits 71% …
seq 0: [3*, 7*, 11]
seq 1: [3*, 7*, 12]
queue    r7 (44 tokens, waits 1.2 s), r8 …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from octavo.inspect.report import rate_of
from octavo.inspect.terminal import BAR_WIDTH, format_bytes, format_table, legend

SPARKS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 40


def top_lines(report: dict[str, Any], *, width: int = 120, height: int = 40) -> list[str]:
    """At most `height` lines of at most `width` characters; the tables give way first when there is no room."""
    above = [
        *header_lines(report), usage_bar(report), rates_line(report), *trend_lines(report), *waste_lines(report),
    ]  # fmt: skip
    below = queue_lines(report)
    room = max(3, height - len(above) - len(below) - 1)
    return [_cut(line, width) for line in [*above, *sequence_lines(report, room), *below]][:height]


def header_lines(report: dict[str, Any]) -> list[str]:
    """What is looked at."""
    model, hardware, limits = report["model"], report["hardware"], report["limits"]
    device = f" on {hardware['device']}" if "device" in hardware else ""
    text = f"{model.get('name', 'engine')}{device}; {report['stats']['finished']} requests finished, "
    return [text + f"max_num_seqs {limits['max_num_seqs']}, max_model_len {limits['max_model_len']}"]


def usage_bar(report: dict[str, Any]) -> str:
    """`pool ███░░░ 12 of 40 blocks used (30.0%), …`: used blocks full, cached ones half-toned, free ones light."""
    pool = report["pool"]
    total, used, cached = pool["num_blocks"], pool["used"], pool["cached"]
    full = min(BAR_WIDTH - (used < total), max(used > 0, round(used / total * BAR_WIDTH)))
    half = min(BAR_WIDTH - full, round(cached / total * BAR_WIDTH))
    bar = "█" * full + "▒" * half + "░" * (BAR_WIDTH - full - half)
    shared = f", {pool['shared']} of them shared" if pool["shared"] else ""
    swapped = f", {pool['swapped']} swapped out" if pool["swapped"] else ""
    return (
        f"pool {bar} {used} of {total} blocks used ({used / total:.1%}){shared}; {cached} cached, {pool['free']} free"
        f"{swapped}; peak {pool['peak_used']}"
    )


def rates_line(report: dict[str, Any]) -> str:
    """Who runs, who waits, and how fast."""
    stats, recent = report["stats"], report["recent"]
    parts = [f"{stats['running']} running ({_count(stats['sequences'], 'sequence')}), {stats['waiting']} waiting"]
    parts.append(f"{rate_of(recent):.1f} tok/s written, {rate_of(recent, 'computed'):.1f} computed")
    if stats["prefix_queried_tokens"]:
        parts.append(f"cache hits {stats['prefix_hit_tokens'] / stats['prefix_queried_tokens']:.0%}")
    parts.append(f"{_count(stats['preemptions'], 'preemption')}, {stats['forks']} forks, {stats['copies']} copies")
    return "   ".join(["now ", *parts])


def trend_lines(report: dict[str, Any]) -> list[str]:
    """The last minute as little bars: usage, and tokens per second."""
    recent = report["recent"]
    if len(recent) < 3:
        return []
    total = report["pool"]["num_blocks"]
    usage = sparkline([s["used"] / total for s in recent], top=1.0)
    rates = [s["tokens_per_s"] for s in recent]
    return [f"use  {usage}", f"tok/s {sparkline(rates)} at most {max(rates):.0f}"]


def sparkline(values: Sequence[float], *, top: float | None = None, width: int = SPARK_WIDTH) -> str:
    """The last `width` values as bars of eight heights; `top` is a full bar (None: the largest value)."""
    values = values[-width:]
    top = max(values, default=0.0) if top is None else top
    if not values or top <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(7, max(0, round(v / top * 7)))] for v in values)


def waste_lines(report: dict[str, Any]) -> list[str]:
    """Where the bytes are that hold nothing, and what static allocation would have needed."""
    w, c = report["waste"], report["counterfactual"]
    waste = f"waste {format_bytes(w['fragmented_bytes'])} in part-filled blocks"
    waste += (
        f", {format_bytes(w['reserved_unused_bytes'])} reserved, {format_bytes(w['cached_idle_bytes'])} cached idle"
    )
    waste += f"; saved {format_bytes(w['shared_saved_bytes'])} by sharing"
    if any(g["window"] is not None for g in w["groups"]):
        waste += f", {format_bytes(w['window_saved_bytes'])} behind windows"
    static = (
        f"static allocation would have needed {format_bytes(c['static_peak_bytes'])} for the {c['peak_sequences']} "
        f"at once that took {format_bytes(c['paged_peak_bytes'])}; this pool would hold {c['static_sequences']}"
    )
    return [waste, static]


def sequence_lines(report: dict[str, Any], room: int) -> list[str]:
    """`seq 0: [3, 7*, 11]`, one line each (layers of several kinds side by side), the legend behind them."""
    shared = dict.fromkeys(report["shared"], 2)
    lines = []
    for seq in report["sequences"]:
        tables = "  ".join(dict.fromkeys(format_table(table, shared) for table in seq["tables"]))
        lines.append(f"seq {seq['seq_id']}: {tables}  {seq['request_id']}, {seq['tokens']} tokens")
    hidden = len(lines) - (room - 1)
    if hidden > 1:
        lines = [*lines[: room - 2], f"… and {hidden + 1} more sequences"]
    return [*lines, *legend(lines)]


def queue_lines(report: dict[str, Any], shown: int = 6) -> list[str]:
    """Who waits, in order."""
    queue, waiting = report["queue"], report["stats"]["waiting"]
    if not waiting:
        return ["queue empty"]
    rows = [_queued(r) for r in queue[:shown]]
    more = f", and {waiting - len(rows)} more" if waiting > len(rows) else ""
    return [f"queue {', '.join(rows)}{more}"]


def _queued(row: dict[str, Any]) -> str:
    again = f", preempted {row['preemptions']}×" if row["preemptions"] else ""
    return f"{row['request_id']} ({row['prompt_tokens'] + row['output_tokens']} tokens, {row['waited_s']:.1f} s{again})"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"
