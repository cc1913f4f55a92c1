"""A `Plan` as lines for people and as plain values. Pure."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import Any

from octavo.planning.plan import GIB, MIB, BlockRow, Plan, head_screen_bytes

CHECKPOINT = "path/to/checkpoint"


def plan_lines(plan: Plan, name: str, lengths: str, *, by_name: bool = False) -> list[str]:
    """Everything, in the order in which one decides: what it takes, what it carries, what to set.

    by_name: the sizes came from a list of known models, so `name` is nothing that could be loaded.
    """
    ask, memory, best = plan.ask, plan.memory, plan.best
    weights = "" if ask.quantization is None else f", {ask.quantization} weights"
    device = "GPU" if ask.device == "cuda" else ask.device.upper()
    screen = head_screen_bytes(ask)
    lines = [
        f"{name}, {ask.dtype}{weights}, {device} with {_bytes(ask.memory)}; load: {lengths}",
        "",
        "memory",
        f"  may be used       {_bytes(memory.usable):>11}  {ask.utilization:.0%} of it",
        f"  weights           {_bytes(memory.weights):>11}"
        + f"  {_bytes(screen)} of it screen the output head" * (screen > 0),
        f"  activations       {_bytes(memory.activations):>11}  the largest step: {ask.max_num_batched_tokens} tokens, "
        f"{ask.max_num_seqs} sequences",
    ]
    if memory.runtime:
        lines.append(f"  runtime           {_bytes(memory.runtime):>11}  libraries, position tables")
    lines += [
        f"  KV pool           {_bytes(memory.kv):>11}  {memory.num_blocks} blocks of {ask.block_size} tokens",
        f"  KV of a token     {_bytes(plan.kv_bytes_per_token):>11}  in all {ask.shape.num_layers} layers",
        f"  KV of a block     {_bytes(plan.row.bytes_per_block):>11}",
        "",
        "sequences at once",
        f"  static            {plan.static_fits:>6}  {_bytes(plan.static_bytes_per_sequence)} reserved for each "
        f"(max_model_len {ask.length_limit})",
        *_table(plan),
    ]
    if plan.cut_requests:
        lines.append(f"  {plan.cut_requests} of {len(ask.lengths)} requests are longer than max_model_len and are cut")
    lines += ["", "recommended", *(f"  {setting}={value}" for setting, value in plan.recommended.items())]
    options = " ".join(f"--{setting.replace('_', '-')} {value}" for setting, value in plan.recommended.items())
    kv = "" if ask.kv_cache_dtype == "auto" else f" --kv-cache-dtype {ask.kv_cache_dtype}"
    kv += "" if ask.quantization is None else f" --quantization {ask.quantization}"
    option = "" if ask.device == "cuda" else f" --device {ask.device}"
    model = CHECKPOINT if by_name else shlex.quote(name)
    lines.append(f"  octavo serve --model {model}{option} --dtype {ask.dtype}{kv} {options}")
    if by_name:
        lines.append(f"  ({CHECKPOINT}: the directory, .gguf file or hub id of your {name} weights)")
    lines += ["", f"with the settings asked {plan.now} sequences run at once"]
    if best is None:
        lines.append("no single change lets more of them in")
    else:
        lines.append(
            f"the single change that buys most: {best.setting} from {best.old} to {best.new}, {best.why}: "
            f"{best.sequences} sequences (+{best.sequences - plan.now})"
        )
    return lines + _smaller_lines(plan)


def _smaller_lines(plan: Plan) -> list[str]:
    """What fewer bits would bring."""
    if not plan.smaller:
        return []
    lines = ["", "with fewer bits (docs/quantization.md says what they cost)"]
    for s in plan.smaller:
        cache = "" if s.kv_cache_dtype == plan.ask.kv_cache_dtype else f"kv_cache_dtype={s.kv_cache_dtype}"
        weights = "" if s.quantization == plan.ask.quantization else f"quantization={s.quantization}"
        setting = ", ".join(text for text in (weights, cache) if text)
        lines.append(f"  {setting:<38} {s.fits:>6} sequences fit   weights {_bytes(s.weights):>10}")
    return lines


def _table(plan: Plan) -> list[str]:
    """One row per block size."""
    head = "  paged, block      fits   at their longest   blocks   lost in last block   block tables"
    return [head, *(_row(row, row.block_size == plan.ask.block_size) for row in plan.rows)]


def _row(row: BlockRow, asked: bool) -> str:
    mark = "*" if asked else " "
    return (
        f"  {row.block_size:>11}{mark}     {row.fits:>6}   {row.fits_longest:>16}   {row.num_blocks:>6}   "
        f"{row.waste:>18.1%}   {_bytes(row.table_bytes):>12}"
    )


def plan_as_json(plan: Plan, name: str) -> dict[str, Any]:
    """The same as plain values; bytes are whole numbers."""
    ask = plan.ask
    return {
        "model": name,
        "device": ask.device,
        "dtype": ask.dtype,
        "kv_cache_dtype": ask.kv_cache_dtype,
        "quantization": ask.quantization,
        "settings": {
            "block_size": ask.block_size,
            "max_num_seqs": ask.max_num_seqs,
            "max_num_batched_tokens": ask.max_num_batched_tokens,
            "gpu_memory_utilization": ask.utilization,
            "max_model_len": ask.length_limit,
            "hybrid_kv": ask.hybrid_kv,
        },
        "memory": {**asdict(plan.memory), "planned": plan.memory.planned},
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "static": {"bytes_per_sequence": plan.static_bytes_per_sequence, "fits": plan.static_fits},
        "paged": [asdict(row) for row in plan.rows],
        "sequences_at_once": plan.now,
        "recommended": plan.recommended,
        "best_change": None if plan.best is None else asdict(plan.best),
        "changes": [asdict(change) for change in plan.changes],
        "smaller": [asdict(smaller) for smaller in plan.smaller],
        "longest": plan.longest,
        "cut_requests": plan.cut_requests,
    }


def _bytes(count: float) -> str:
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / 1024:.1f} KiB"
