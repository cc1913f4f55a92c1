"""How long a step takes: a few positive coefficients times what the step does.

    seconds = step                                     launching, scheduling, text: whatever does not grow
            + tokens(T)                                T tokens through the layers (see below)
            + draw  * tokens drawn                     head and sampler
            + read  * key/value positions read         layers x context of every decoding sequence
            + pair  * query-key pairs of prompts       layers x (query, key) of chunks
            + copy  * blocks copied + swap * blocks moved to or from the host

    tokens(T) = below * min(T, knee) + above * max(0, T - knee)

A roofline is such a model: reading all weights takes as long for 1 as for `knee` tokens (step grows, below = 0), beyond
the knee computing takes longer. A calibration (`calibrate.py`) finds the coefficients of one engine by least squares.
Nothing here knows schedulers or traces; work is counted by `WorkCounter` from plans.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from octavo.core.kv_layout import KVLayout
from octavo.core.step import ScheduledSequence, StepPlan, TransferKind
from octavo.errors import ConfigError
from octavo.planning.devices import Device
from octavo.planning.shapes import ModelShape

FORMAT = "octavo cost model 1"


class Work(NamedTuple):
    """What one step does. reads: layer-positions read by decoding sequences and by chunks; pairs: see above."""

    tokens: int
    draws: int
    reads: int
    pairs: int
    copies: int = 0
    swaps: int = 0


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of each piece of work. `source` says where the figures are from, for reports."""

    step: float
    below: float
    above: float
    knee: float
    draw: float
    read: float
    pair: float
    copy: float = 0.0
    swap: float = 0.0
    source: str = ""
    facts: dict[str, Any] = field(default_factory=dict, compare=False)

    def seconds(self, work: Work) -> float:
        """Time of a step."""
        tokens, draws, reads, pairs, copies, swaps = work
        knee = self.knee
        if tokens <= knee:
            through = self.below * tokens
        else:
            through = self.below * knee + self.above * (tokens - knee)
        time = self.step + through + self.draw * draws + self.read * reads
        if pairs:
            time += self.pair * pairs
        if copies or swaps:
            time += self.copy * copies + self.swap * swaps
        return time

    def save(self, path: str | Path) -> None:
        """As JSON, for `load`."""
        Path(path).write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Raises `ConfigError` for a file that is no cost model."""
        try:
            given = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cost model {path}: cannot be read ({error})") from None
        if not isinstance(given, Mapping) or given.get("format") != FORMAT:
            raise ConfigError(f"cost model {path}: is not one; write it with octavo simulate --save-model")
        names = {f.name for f in fields(cls)}
        values = {k: v for k, v in given.items() if k != "format"}
        if set(values) != names:
            odd = sorted(set(values) ^ names)
            raise ConfigError(f"cost model {path}: {odd[0]!r} is missing or unknown; write the file again")
        for name in names - {"source", "facts"}:
            if not isinstance(values[name], (int, float)) or not values[name] >= 0:
                raise ConfigError(f"cost model {path}: {name} is {values[name]!r}; it must be a number of at least 0")
        return cls(**values)


def roofline(
    shape: ModelShape,
    device: Device,
    dtype: str,
    *,
    block_bytes: int,
    overhead: float = 0.0,
    kv_dtype: str | None = None,
    quantization: str | None = None,
) -> CostModel:
    """The time of a step if it is bound by memory or arithmetic alone, plus `overhead` seconds a step.

    Bytes: all weights once, every key and value that is read. FLOPs: 2 per weight and token, 4 per query head, head
    dimension and (query, key) pair. block_bytes: bytes of a block, for copies and swaps. quantization: of the weights
    (int8, int4[:group][:pure]), which are then fewer bytes; products are still counted in `dtype`.
    """
    bandwidth = device.bandwidth * device.bandwidth_share
    flops = device.flops[dtype] * device.flops_share
    weights = shape.weight_bytes(dtype, quantization, step=True) / bandwidth
    token = 2 * shape.layer_parameters / flops
    pair = 4 * shape.num_heads * shape.head_dim / flops
    read = max(shape.kv_bytes_per_token_layer(kv_dtype or dtype) / bandwidth, pair)
    return CostModel(
        step=overhead + weights,
        below=0.0,
        above=token,
        knee=weights / token,
        draw=2 * shape.head_parameters / flops,
        read=read,
        pair=pair,
        copy=2 * block_bytes / bandwidth,
        swap=block_bytes / device.link,
        source=f"roofline of {device.name} for {shape.name} in {dtype}"
        + ("" if quantization is None else f", {quantization} weights"),
        facts={
            "weights_s": weights,
            "overhead_s": overhead,
            "bandwidth_share": device.bandwidth_share,
            "flops_share": device.flops_share,
        },
    )


class WorkCounter:
    """Counts the work of plans for one layout: which layers read how far."""

    def __init__(self, layout: KVLayout) -> None:
        layers: dict[int | None, int] = {}
        for group in layout.groups:
            layers[group.window] = layers.get(group.window, 0) + len(group.layers)
        #: (window, number of layers that have it): smallest window first, None last, as `RestingScheduler.windows`.
        self.layers = sorted(layers.items(), key=lambda item: (item[0] is None, item[0] or 0))

    def plan(self, plan: StepPlan, resting: int = 0, resting_reads: Sequence[int] = ()) -> Work:
        """Work of a plan, and of `resting` sequences that get a token each and read `resting_reads` positions."""
        return self.count(plan.scheduled, self.moves(plan), resting, resting_reads)

    @staticmethod
    def moves(plan: StepPlan) -> tuple[int, int]:
        """(copies, swaps) of blocks."""
        copies = sum(t.kind is TransferKind.COPY for t in plan.transfers)
        return copies, len(plan.transfers) - copies

    def count(
        self,
        scheduled: Sequence[ScheduledSequence],
        moves: tuple[int, int] = (0, 0),
        resting: int = 0,
        resting_reads: Sequence[int] = (),
    ) -> Work:
        """The same from a plan's parts."""
        tokens = draws = resting
        reads = self.resting(resting_reads) if resting else 0
        pairs = 0
        layers = self.layers
        for item in scheduled:
            count, start = len(item.token_ids), item.start
            tokens += count
            draws += len(item.sample_ids)
            end = start + count
            for window, number in layers:
                reads += number * (end if window is None else min(end, window + count - 1))
                if count > 1:
                    pairs += number * pairs_of(start, end, window)
        return Work(tokens, draws, reads, pairs, *moves)

    def resting(self, resting_reads: Sequence[int]) -> int:
        """Layer-positions of sequences that rest."""
        return sum(number * reads for (_, number), reads in zip(self.layers, resting_reads, strict=True))


def pairs_of(start: int, end: int, window: int | None) -> int:
    """(query, key) pairs of one layer for queries at positions start..end-1 that see at most `window` keys each."""
    if window is None:
        return (end * (end + 1) - start * (start + 1)) // 2
    full = min(max(window, start), end)  # queries from here on see `window` keys
    return (full * (full + 1) - start * (start + 1)) // 2 + (end - full) * window
