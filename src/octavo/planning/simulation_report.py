"""Outcomes of simulations as text: one line per policy, times in units that people read, a picture of the timeline.

Pure functions of `Outcome.summary()` and samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from octavo.planning.outcome import Outcome, Sample

Column = tuple[str, Callable[[dict[str, Any]], str]]
SHADES = " ▁▂▃▄▅▆▇█"


def seconds_text(value: float | None) -> str:
    """ "870 ms", "12.3 s", "4.1 min": three digits."""
    if value is None:
        return "-"
    if value < 0.9995:
        return f"{1e3 * value:.3g} ms" if value < 0.09995 else f"{1e3 * value:.0f} ms"
    if value < 600:
        return f"{value:.3g} s" if value < 99.95 else f"{value:.0f} s"
    return f"{value / 60:.3g} min" if value < 5997 else f"{value / 60:,.0f} min"


def percent_text(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _latency(kind: str, which: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: seconds_text((row["latency"][kind] or {}).get(which))


POOL_COLUMNS: tuple[Column, ...] = (
    ("policy", lambda r: r["policy"]),
    ("blocks", lambda r: f"{r['num_blocks']:,}"),
    ("most at once", lambda r: f"{r['peak_running']:,}"),
    ("mean", lambda r: f"{r['mean_running']:.1f}"),
    ("KV use, peak", lambda r: percent_text(r["peak_filled"])),
    ("mean", lambda r: percent_text(r["mean_filled"])),
    ("held empty", lambda r: percent_text(r["held_but_empty"])),
    ("output tok/s", lambda r: f"{r['output_rate']:,.0f}"),
    ("preempt.", lambda r: f"{r['preemptions']:,}"),
    ("recomputed", lambda r: f"{r['recomputed_tokens']:,}"),
    ("prefix hits", lambda r: percent_text(r["hit_rate"])),
)
LATENCY_COLUMNS: tuple[Column, ...] = (
    ("policy", lambda r: r["policy"]),
    ("first token p50", _latency("ttft", "p50")),
    ("p90", _latency("ttft", "p90")),
    ("p99", _latency("ttft", "p99")),
    ("between tokens p50", _latency("itl", "p50")),
    ("p90", _latency("itl", "p90")),
    ("p99", _latency("itl", "p99")),
    ("whole answer p50", _latency("e2e", "p50")),
    ("p99", _latency("e2e", "p99")),
    ("all done in", lambda r: seconds_text(r["seconds"])),
)


def table(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> str:
    """Left column flush left, the others flush right, a rule under the titles."""
    cells = [[title for title, _ in columns], *[[show(row) for _, show in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = []
    for line in cells:
        text = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        lines.append("  ".join(text).rstrip())
    lines.insert(1, "─" * max(map(len, lines)))
    return "\n".join(lines)


def report_text(outcomes: Sequence[Outcome]) -> str:
    """Both tables, and what was refused."""
    rows = [o.summary() for o in outcomes]
    parts = [table(_useful(POOL_COLUMNS, rows), rows), table(LATENCY_COLUMNS, rows)]
    for outcome in outcomes:
        if outcome.refused:
            index, why = next(iter(outcome.refused.items()))
            parts.append(
                f"{outcome.policy}: {len(outcome.refused):,} of {len(outcome.end):,} requests were refused; "
                f"request {index}: {why}"
            )
    parts.append(
        "KV use: slots of the pool that hold a token; held empty: slots in block tables that hold none (the mean over "
        "the time in which anything ran)"
    )
    return "\n\n".join(parts)


def _useful(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Without counters that are zero everywhere."""
    idle = {
        "preempt.": not any(r["preemptions"] for r in rows),
        "recomputed": not any(r["recomputed_tokens"] for r in rows),
        "prefix hits": not any(r["hit_rate"] for r in rows),
    }
    return [c for c in columns if not idle.get(c[0])]


# -- a picture in the terminal ---------------------------------------------------------------------------------------


def timeline_text(outcomes: Sequence[Outcome], width: int = 72) -> str:
    """Use of the pool, running and waiting over time, one line each per policy, on one time axis."""
    end = max((o.seconds for o in outcomes), default=0.0)
    if end <= 0:
        return ""
    blocks = []
    most = max((s.running for o in outcomes for s in o.samples), default=0)
    longest = max((s.waiting for o in outcomes for s in o.samples), default=0)
    label = max(len(o.policy) for o in outcomes)
    series: list[tuple[str, Callable[[Sample], float], float, str]] = [
        ("KV use", lambda s: s.filled, 1.0, "100 %"),
        ("running", lambda s: float(s.running), float(most), f"{most:,}"),
        ("waiting", lambda s: float(s.waiting), float(longest), f"{longest:,}"),
    ]
    for title, value, top, top_text in series:
        if not top:
            continue
        lines = [f"{title} (a full column is {top_text})"]
        lines += [f"  {o.policy:<{label}} │{spark(o.samples, value, top, end, width)}│" for o in outcomes]
        blocks.append("\n".join(lines))
    axis = f"  {'':<{label}}  0 s{seconds_text(end).rjust(width - 3)}"
    return "\n\n".join(blocks) + "\n" + axis


def spark(samples: Sequence[Sample], value: Callable[[Sample], float], top: float, end: float, width: int) -> str:
    """Means of `value` in `width` equal parts of 0..end as columns of eighths; a part without samples repeats."""
    sums, counts = [0.0] * width, [0] * width
    for sample in samples:
        at = min(width - 1, int(sample.time / end * width))
        sums[at] += value(sample)
        counts[at] += 1
    last_part = min(width - 1, int(samples[-1].time / end * width)) if samples else -1
    text, level = "", 0.0
    for at in range(width):
        if counts[at]:
            level = sums[at] / counts[at]
        elif at > last_part:
            level = 0.0
        step = min(len(SHADES) - 1, round(level / top * (len(SHADES) - 1)))
        text += SHADES[max(1, step)] if level > 0 else " "
    return text
