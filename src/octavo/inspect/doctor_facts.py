"""What the doctor's rules look at: a report with the derived numbers that several rules need. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.inspect.terminal import format_bytes


class Facts:
    """A report with the derived numbers that several rules need."""

    def __init__(self, report: dict[str, Any]) -> None:
        self.report = report
        self.stats: dict[str, Any] = report["stats"]
        self.totals: dict[str, Any] = report["totals"]
        self.pool: dict[str, Any] = report["pool"]
        self.limits: dict[str, Any] = report["limits"]
        self.hardware: dict[str, Any] = report["hardware"]
        self.model: dict[str, Any] = report["model"]
        self.samples: list[dict[str, Any]] = report["overall"]
        self.steps = max(1, self.stats["steps"])
        self.finished = max(1, self.totals["requests"])
        self.lookups = sum(report["miss_reasons"].values())

    def asked(self, setting: str) -> Any:
        """What the user gave for a setting, None when it was left to the engine (or is not known)."""
        entry = self.report["settings"].get(setting)
        return None if entry is None or entry["why"] == "default" else entry["asked"]

    def short_of(self, what: str) -> float:
        """Share of the steps that left somebody waiting for "blocks", "seats" or "budget"."""
        return float(self.stats[f"steps_short_of_{what}"] / self.steps)

    def missed(self, *reasons: str) -> float:
        """Share of the look-ups that ended for one of these reasons."""
        found = sum(self.report["miss_reasons"].get(r, 0) for r in reasons)
        return found / self.lookups if self.lookups else 0.0

    def time_share(self, holds: Callable[[dict[str, Any]], bool]) -> float:
        """Share of the sampled time, from one sample to the next, at whose begin and end something holds."""
        total = kept = 0.0
        for a, b in zip(self.samples, self.samples[1:]):
            total += b["time"] - a["time"]
            kept += (b["time"] - a["time"]) * (holds(a) and holds(b))
        return kept / total if total else 0.0

    @property
    def blocks_per_sequence(self) -> float:
        return float(self.stats["mean_used_blocks"] / max(1.0, self.stats["mean_sequences"]))

    def blocks_of(self, length: int) -> int:
        """Most blocks that one sequence of `length` tokens holds, over all groups."""
        size = self.pool["block_size"]
        whole = max(1, -(-length // size))
        # A window that begins inside a block touches one block more than it fills.
        touched = [whole if w is None else min(whole, -(-w // size) + 1) for w in self._windows]
        return sum(touched)

    @property
    def _windows(self) -> list[int | None]:
        return [g["window"] for g in self.pool["groups"]]

    @property
    def wanted_sequences(self) -> int:
        """The most that ran and waited at once, in requests and their sequences."""
        return max((s["sequences"] + s["waiting"] for s in self.samples), default=0)

    @property
    def memory_left(self) -> float | None:
        """Share of the device's memory that nobody uses; None if unknown."""
        total, left = self.hardware.get("total_bytes"), self.hardware.get("available_bytes")
        return left / total if total and left is not None else None

    @property
    def pool_setting(self) -> str:
        """The setting that decides the size of the pool here."""
        if self.asked("num_blocks") is not None:
            return "num_blocks"
        on_host = self.hardware.get("device", "cpu") == "cpu"
        return "cpu_kv_bytes" if on_host else "gpu_memory_utilization"

    def more_blocks(self, blocks: int) -> str:
        """The remedy of a pool that is too small, in the words of the setting that made it."""
        size = blocks * self.pool["bytes_per_block"]
        if self.pool_setting == "num_blocks":
            return f"raise num_blocks to about {blocks}"
        return f"raise {self.pool_setting} so that the pool has about {blocks} blocks ({format_bytes(size)})"
