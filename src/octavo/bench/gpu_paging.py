"""The paging experiment of `octavo bench gpu`: static reservations against blocks, and block sizes, in equal bytes."""

from __future__ import annotations

from typing import Any

from octavo.bench.drive import warm_up
from octavo.bench.gpu_session import Session, median_run, running
from octavo.bench.gpu_work import Workload, workload
from octavo.bench.report import Column, Table, fixed, percent

GIB = 1 << 30
CARD_BYTES = 80 * GIB  # KV gets what a card of this size would leave at 0.9
BLOCK_SIZES = (8, 16, 32, 64)
COLUMNS = [
    Column("memory", "memory"), Column("peak_sequences", "most sequences at once"),
    Column("ms_per_token", "ms per token", fixed(2)), Column("peak_use", "peak use of KV", percent),
    Column("output_rate", "output tok/s", fixed(1)), Column("preemptions", "preemptions"),
]  # fmt: skip


def _kv_blocks(session: Session, settings: dict[str, Any]) -> int:
    """Blocks of 16 tokens that a card of 80 GiB would have at 0.9, once weights and the largest step are in."""
    if session.small:
        return 24
    found = session.once("paging/sizes", lambda: _sizes(settings))
    left = int(0.9 * CARD_BYTES) - found["weight_bytes"] - found["activation_bytes"]
    return int(left // found["bytes_per_block"])


def _sizes(settings: dict[str, Any]) -> dict[str, Any]:
    with running(settings) as (engine, _):
        facts = engine.hardware
        view = engine.pool_view()
        return {
            "weight_bytes": facts["weight_bytes"],
            "activation_bytes": facts["activation_bytes"] or 0,
            "bytes_per_block": view.bytes_per_block,
        }


def paging_table(session: Session) -> Table:
    """Static reservations against blocks, the same bytes of KV each time."""
    model, size = "llama-2-7b", 16
    longest = (128, 256) if session.small else (2048, 4096)
    load = workload("seed2048", session.scale())
    blocks = _kv_blocks(session, session.settings(model, block_size=size))
    cases: list[tuple[str, dict[str, Any]]] = [
        *(
            (f"static, max_model_len {n}", {"allocation": "static", "max_model_len": n, "block_size": size})
            for n in longest
        ),
        *((f"paged, blocks of {n}", {"max_model_len": longest[1], "block_size": n}) for n in (16, 32)),
    ]
    rows = []
    for name, more in cases:
        count = blocks * size // more["block_size"]
        settings = session.settings(model, **more, num_blocks=count)
        rows.append({"memory": name, **session.once(f"paging/{name}", lambda s=settings: _pressed(s, load))})  # type: ignore[misc]
    return Table("Llama-2-7B, the KV bytes of an 80 GiB card", COLUMNS, rows)


def block_sizes_table(session: Session) -> Table:
    """The same load and bytes in blocks of several sizes."""
    model = "llama-2-7b"
    longest = 256 if session.small else 4096
    load = workload("seed2048", session.scale())
    blocks = _kv_blocks(session, session.settings(model, block_size=16))
    rows = []
    for size in BLOCK_SIZES:
        settings = session.settings(model, block_size=size, num_blocks=blocks * 16 // size, max_model_len=longest)
        rows.append(
            {"memory": f"blocks of {size}", **session.once(f"blocks/{size}", lambda s=settings: _pressed(s, load))}  # type: ignore[misc]
        )
    return Table("Block sizes", COLUMNS, rows)


def _pressed(settings: dict[str, Any], load: Workload) -> dict[str, Any]:
    with running({**settings, "enable_prefix_caching": False}) as (engine, _):
        warm_up(engine)
        found, _ = median_run(engine, load, sample=True)
    return {
        "peak_sequences": found.peak_sequences,
        "ms_per_token": found.ms_per_token(),
        "peak_use": found.peak_use,
        "output_rate": found.output_rate,
        "preemptions": found.preemptions,
        "seconds": found.seconds,
    }
