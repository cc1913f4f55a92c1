"""The doctor's rules: each looks at the facts of a report and gives one finding with its evidence and remedy, or None.

A rule is a pure function `Facts -> Finding | None`; `RULES` lists them in the order in which their findings are shown
within one severity. Thresholds are named constants: a finding must be worth acting on, and a run that works well has
none. A rule gives exactly one remedy, the change that helps most where it fires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean, median
from typing import Literal

from octavo.inspect.doctor_facts import Facts
from octavo.inspect.terminal import format_bytes

Severity = Literal["error", "warning", "info"]
GIB = 1 << 30

STEPS_SHORT = 0.2  # share of steps that left somebody waiting
FULL_TIME = 0.3  # share of the time without a block to hand out
RECOMPUTED = 0.15  # share of computed tokens that had been computed before
PREEMPTED = 0.5  # preemptions per finished request
COPIES_PER_TOKEN = 0.15
TAIL_LOST = 0.12  # share of the slots of finished sequences that held nothing
TAIL_GAINED = 0.08  # what another block size must save of it
LONG_TABLE = 1024  # entries of an average table from which a larger block is worth it
EVICTED = 0.2  # share of look-ups that ended at an evicted block
SHORT_OUTPUT = 16.0  # tokens
IDLE_SEATS = 0.5  # share of max_num_seqs that ran on average
FLAT = 1.1  # throughput at twice the sequences
MEMORY_LEFT_LOW = 0.03  # of the device
MEMORY_LEFT_HIGH = 0.25
SALTED = 0.3  # share of look-ups that would have hit under another salt


@dataclass(frozen=True, slots=True)
class Finding:
    """`code` is stable, for scripts. evidence: the numbers it rests on. remedy: one change."""

    code: str
    severity: Severity
    title: str
    evidence: str
    remedy: str


Rule = Callable[[Facts], Finding | None]


def memory_short(f: Facts) -> Finding | None:
    """Requests wait because there are no blocks for them."""
    share = f.short_of("blocks")
    if share < STEPS_SHORT or f.limits["allocation"] == "static" or _memory_idle(f):
        return None
    wanted = max(f.pool["num_blocks"] + 1, round(f.wanted_sequences * f.blocks_per_sequence))
    return Finding(
        "memory-short",
        "warning",
        "memory is still short: requests wait for KV blocks",
        f"{share:.0%} of the steps left a request waiting for blocks; {f.stats['mean_sequences']:.1f} sequences ran on "
        f"average in {f.pool['num_blocks']} blocks, at most {f.wanted_sequences} wanted to run at once",
        f.more_blocks(wanted),
    )


def free_at_zero(f: Facts) -> Finding | None:
    """Not a single block to hand out for a long time: concurrency has reached its end."""
    # A handful of blocks is nothing to work with either: one step of a few sequences takes as many.
    few = max(0, f.pool["num_blocks"] // 100)
    share = f.time_share(lambda s: s["free"] + s["cached"] <= few and s["running"] > 0)
    if share < FULL_TIME or f.limits["allocation"] == "static":
        return None
    held = max(1, int(f.stats["mean_sequences"]))
    return Finding(
        "free-blocks-zero",
        "warning",
        "free blocks stay at 0: the pool is full for long",
        f"for {share:.0%} of the time at most {few} of {f.pool['num_blocks']} blocks could be handed out; "
        f"the pool carried {held} sequences on average",
        f"send at most {held} sequences at once; more of them only queue here",
    )


def preemption_thrash(f: Facts) -> Finding | None:
    """Work is thrown away and done again."""
    preemptions, again = f.stats["preemptions"], f.stats["recomputed_tokens"] / max(1, f.stats["computed_tokens"])
    per_request = preemptions / max(f.finished, 1)
    if preemptions < 4 or (per_request < PREEMPTED and again < RECOMPUTED):
        return None
    longest = f.blocks_of(f.totals["longest"])
    fits = max(1, f.pool["num_blocks"] // longest)
    remedy = (
        f"lower max_num_seqs from {f.limits['max_num_seqs']} to {fits}: so many sequences of the longest length fit"
    )
    if fits >= f.limits["max_num_seqs"]:
        remedy = f.more_blocks(longest * (f.limits["max_num_seqs"] + 1))
    return Finding(
        "preemption-thrash",
        "error" if again >= 2 * RECOMPUTED else "warning",
        "preemption thrash: requests push each other out",
        f"{preemptions} preemptions for {f.finished} finished requests; {f.stats['recomputed_tokens']} tokens "
        f"({again:.0%} of all that was computed) were computed again, {f.stats['swaps']} victims were swapped",
        remedy,
    )


def throughput_flat(f: Facts) -> Finding | None:
    """Twice the sequences, hardly more tokens."""
    levels: dict[int, list[tuple[int, float]]] = {}  # power of two -> (sequences, tokens/s) while decoding
    for a, b in zip(f.samples, f.samples[1:]):
        drawn, computed = b["generated"] - a["generated"], b["computed"] - a["computed"]
        low, high = sorted((a["sequences"], b["sequences"]))
        if drawn > 0 and computed <= 1.1 * drawn and b["time"] > a["time"] and 0 < high < 1.5 * low:
            levels.setdefault(low.bit_length(), []).append((low, drawn / (b["time"] - a["time"])))
    seen = {k: (mean(n for n, _ in v), median(r for _, r in v)) for k, v in levels.items() if len(v) >= 3}
    top = max(seen, default=0)
    if top - 1 not in seen:
        return None
    (few, slow), (many, fast) = seen[top - 1], seen[top]
    if many < 8 or many < 1.6 * few or fast >= FLAT * slow:
        return None
    return Finding(
        "throughput-flat",
        "info",
        "throughput does not rise with more sequences",
        f"{slow:.0f} tokens/s with about {few:.0f} sequences at once, {fast:.0f} with about {many:.0f}: the "
        "processor is busy, and more sequences only make each of them slower",
        f"lower max_num_seqs from {f.limits['max_num_seqs']} to {1 << (top - 1)}: as many tokens/s, less time each",
    )


def seats_short(f: Facts) -> Finding | None:
    """Blocks are there, seats are not."""
    share = f.short_of("seats")
    room = 1 - f.stats["mean_used_blocks"] / f.pool["num_blocks"]
    if share < STEPS_SHORT or room < 0.3 or f.limits["allocation"] == "static":
        return None
    fits = int(0.9 * f.pool["num_blocks"] / max(1.0, f.blocks_per_sequence))
    seats = min(max(f.wanted_sequences, f.limits["max_num_seqs"] + 1), fits)
    if seats <= f.limits["max_num_seqs"]:
        return None
    return Finding(
        "throughput-capped",
        "warning",
        "throughput cannot rise: max_num_seqs keeps requests out while blocks are free",
        f"{share:.0%} of the steps left a request waiting for a seat although {room:.0%} of the blocks were free on "
        f"average; max_num_seqs={f.limits['max_num_seqs']}, a sequence held {f.blocks_per_sequence:.1f} blocks",
        f"raise max_num_seqs to {seats}",
    )


def short_lengths(f: Facts) -> Finding | None:
    """Requests end before batching pays."""
    mean, running = f.totals["mean_output"], f.stats["mean_sequences"] / f.limits["max_num_seqs"]
    computed_per_token = f.stats["computed_tokens"] / max(1, f.stats["generated_tokens"])
    if f.totals["requests"] < 16 or mean >= SHORT_OUTPUT or running >= IDLE_SEATS or computed_per_token < 2:
        return None
    return Finding(
        "short-lengths",
        "info",
        "the mean length is short: requests end before many run together",
        f"{mean:.1f} tokens were written per sequence after a prompt of {f.totals['mean_prompt']:.0f}; "
        f"{f.stats['mean_sequences']:.1f} of {f.limits['max_num_seqs']} sequences ran at once, and "
        f"{computed_per_token:.1f} tokens were computed for each one written",
        "send more requests at once (a longer queue keeps every step full)",
    )


def copies_frequent(f: Facts) -> Finding | None:
    """Copy-on-write at every turn: many branches, each writing into what it shares."""
    copies, tokens = f.stats["copies"], max(1, f.stats["generated_tokens"])
    if copies < 32 or copies / tokens < COPIES_PER_TOKEN:
        return None
    moved = copies * f.pool["bytes_per_block"]
    forks = f.stats["forks"]
    if forks >= copies / 2:
        per = forks / f.finished
        remedy = f"lower n or beam_width: {per:.1f} forks per request is more branching than this load pays for"
    else:
        remedy = (
            f"lower block_size from {f.pool['block_size']}: prompts part inside cached blocks, which are copied then"
        )
    return Finding(
        "copies-frequent",
        "warning",
        "copies on write are too frequent",
        f"{copies} blocks ({format_bytes(moved)}) were copied for {tokens} tokens written, {copies / tokens:.2f} each, "
        f"after {forks} forks",
        remedy,
    )


def block_size(f: Facts) -> Finding | None:
    """Blocks too large for the lengths, or so small that the tables grow."""
    size, sizes = f.pool["block_size"], f.totals["by_block_size"]
    sequences = f.totals["sequences"]
    if sequences < 4 or f.limits["allocation"] == "static":
        return None
    lost = {int(s): v["tail_slots"] / max(1, v["tail_slots"] + f.totals["tokens"]) for s, v in sizes.items()}
    # With blocks of another size than those that were counted, the loss is half a block a sequence on average.
    here = lost.get(size, sequences * (size - 1) / 2 / max(1, sequences * (size - 1) / 2 + f.totals["tokens"]))
    entries = f.totals["tokens"] / size / sequences
    if size < 8 or (entries > LONG_TABLE and size < 32):
        better = 16 if size < 16 else 32
        return Finding(
            "block-size",
            "warning" if size < 8 else "info",
            "block_size is too small",
            f"with {size} tokens a block a table has {entries:.0f} entries on average, and every step takes and "
            f"publishes more blocks; blocks of {better} would lose {lost[better]:.1%} of their slots, not {here:.1%}",
            f"set block_size={better}",
        )
    # Never below 16: what smaller blocks gain, longer tables and more copies cost. An NPU's attention reads 128 and up.
    least = 128 if f.hardware.get("device") == "npu" and size >= 128 else 16
    smaller = [s for s in lost if least <= s < size and here - lost[s] >= TAIL_GAINED]
    if here < TAIL_LOST or not smaller:
        return None
    better = min(smaller, key=lambda s: (lost[s] > TAIL_LOST, -s if lost[s] <= TAIL_LOST else s))
    return Finding(
        "block-size",
        "warning",
        "block_size is too large for these lengths",
        f"the last blocks of {sequences} sequences of {f.totals['mean_length']:.0f} tokens left {here:.0%} of their "
        f"slots empty with blocks of {size}; with {better} it would be {lost[better]:.0%}",
        f"set block_size={better}",
    )


def window_unused(f: Facts) -> Finding | None:
    """The model has windowed layers, but every layer keeps everything."""
    layers, windowed, window = (f.model.get(k) or 0 for k in ("layers", "windowed_layers", "window"))
    if not windowed or any(g["window"] is not None for g in f.pool["groups"]) or f.limits["max_model_len"] <= window:
        return None
    length = max(f.totals["longest"], window)
    kept = (length * (layers - windowed) + min(length, window) * windowed) / (length * layers)
    static = f.limits["allocation"] == "static"
    return Finding(
        "window-unused",
        "info" if f.totals["longest"] <= window else "warning",
        "windowed layers keep everything",
        f"{windowed} of {layers} layers read only the last {window} tokens, but all keep every token; a sequence of "
        f"{length} tokens would need {kept:.0%} of what it holds now",
        "set allocation='paged': static reservations free nothing" if static else "set hybrid_kv=True (the default)",
    )


def evicted_early(f: Facts) -> Finding | None:
    """Prefixes are given up before they are asked for again."""
    share = f.missed("evicted")
    if f.lookups < 8 or share < EVICTED:
        return None
    hit = f.stats["prefix_hit_tokens"] / max(1, f.stats["prefix_queried_tokens"])
    # What was asked for the first time, all at once; more than four pools would be a guess.
    distinct = round(f.lookups * (1 - share)) * f.blocks_of(round(f.totals["mean_length"]))
    blocks = min(max(distinct, f.pool["num_blocks"] * 3 // 2), 4 * f.pool["num_blocks"])
    return Finding(
        "evicted-early",
        "warning",
        "cached prefixes are evicted before they are used again",
        f"{share:.0%} of {f.lookups} look-ups ended at a block that had been cached and given away; "
        f"{f.stats['evictions']} evictions, {hit:.0%} of the prompt tokens were hits",
        f.more_blocks(blocks),
    )


def salts_split(f: Facts) -> Finding | None:
    """The same beginnings under different salts: each tenant computes and keeps its own."""
    share = f.missed("salt")
    if f.lookups < 8 or share < SALTED:
        return None
    return Finding(
        "salts-split",
        "info",
        "equal prompts do not share: their cache_salt differs",
        f"{share:.0%} of {f.lookups} look-ups found the same tokens cached under another cache_salt",
        "give requests that may know of each other the same cache_salt",
    )


def static_allocation(f: Facts) -> Finding | None:
    """The classic baseline, left on."""
    if f.limits["allocation"] != "static" or f.totals["sequences"] < 4:
        return None
    share = f.totals["mean_length"] / f.limits["max_model_len"]
    if share > 0.8:
        return None
    return Finding(
        "static-allocation",
        "warning",
        "static allocation reserves what is never used",
        f"every sequence reserves {f.limits['max_model_len']} positions and used {f.totals['mean_length']:.0f} of "
        f"them on average ({share:.0%}); {f.stats['peak_sequences']} ran at once",
        "set allocation='paged' (the default)",
    )


def _memory_idle(f: Facts) -> bool:
    """Would a larger share of the device's memory be there for a pool that is too small?"""
    left = f.memory_left
    return left is not None and left > MEMORY_LEFT_HIGH and f.pool_setting != "num_blocks"


def usage_fraction(f: Facts) -> Finding | None:
    """gpu_memory_utilization (or the bytes on a CPU) leaves nothing, or leaves what the pool would need."""
    left = f.memory_left
    if left is None:
        return None
    total, setting = f.hardware["total_bytes"], f.pool_setting
    numbers = (
        f"{format_bytes(left * total)} of {format_bytes(total)} ({left:.0%}) were left when the engine had started"
    )
    if left < MEMORY_LEFT_LOW:
        remedy = "lower gpu_memory_utilization to 0.8" if setting != "cpu_kv_bytes" else "lower cpu_kv_bytes"
        if setting == "num_blocks":
            remedy = f"lower num_blocks to {int(0.9 * f.pool['num_blocks'])}"
        return Finding("usage-fraction-high", "warning", "the usage fraction is too high", numbers, remedy)
    if _memory_idle(f) and f.short_of("blocks") >= STEPS_SHORT:
        kv = f.pool["num_blocks"] * f.pool["bytes_per_block"]
        more = int(kv + (left - 0.1) * total)
        if setting == "cpu_kv_bytes":
            remedy = f"set cpu_kv_bytes to {more // GIB or 1}GiB" if more >= GIB else f"set cpu_kv_bytes to {more}"
        else:
            remedy = "raise gpu_memory_utilization to 0.9"
        return Finding(
            "usage-fraction-low",
            "warning",
            "the usage fraction is too low: requests wait for blocks while memory is free",
            f"{numbers}; {f.short_of('blocks'):.0%} of the steps left a request waiting for blocks",
            remedy,
        )
    return None


def leaks(f: Facts) -> Finding | None:
    """Blocks whose owner was lost: never right."""
    count = f.stats["leaks_repaired"]
    if not count:
        return None
    return Finding(
        "blocks-leaked",
        "error",
        "blocks leaked and were taken back",
        f"{count} blocks had no owner when nothing was running: a bug in the engine",
        "run again with debug=True (OCTAVO_DEBUG=blocks) and record=FILE, and report what it says",
    )


RULES: tuple[Rule, ...] = (
    leaks,
    preemption_thrash,
    evicted_early,
    copies_frequent,
    static_allocation,
    usage_fraction,
    free_at_zero,
    memory_short,
    seats_short,
    block_size,
    window_unused,
    throughput_flat,
    short_lengths,
    salts_split,
)
