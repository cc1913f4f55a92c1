"""Devices by name: bytes/s, FLOP/s and bytes from public data sheets. No device is asked, except for this CPU.

FLOP/s are dense, without sparsity. What a real kernel reaches of them is `bandwidth_share` and `flops_share`: rough,
common shares, to be replaced by a calibration where one can be had.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.errors import ConfigError

GIB = 1 << 30
THIS_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """memory: bytes. bandwidth: bytes/s of its memory. flops: dtype -> FLOP/s. link: bytes/s to host memory."""

    name: str
    memory: int
    bandwidth: float
    flops: Mapping[str, float]
    link: float
    bandwidth_share: float = 0.8
    flops_share: float = 0.6


def _gpu(name: str, gib: float, bandwidth: float, half: float, single: float, link: float) -> Device:
    flops = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    return Device(name, int(gib * GIB), bandwidth * 1e9, flops, link * 1e9)


#: name -> figures of the makers' data sheets (SXM boards for A100, H100, H200).
DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        _gpu("a100-40gb", 40, 1555, 312, 19.5, 25),
        _gpu("a100-80gb", 80, 2039, 312, 19.5, 25),
        _gpu("h100", 80, 3350, 989, 67, 50),
        _gpu("h200", 141e9 / GIB, 4800, 989, 67, 50),
        _gpu("l4", 24, 300, 121, 30.3, 25),
        _gpu("l40s", 48, 864, 362, 91.6, 25),
        _gpu("rtx-4090", 24, 1008, 165, 82.6, 25),
        _gpu("rtx-3090", 24, 936, 71, 35.6, 25),
    )
}


def device(name: str) -> Device:
    """By name, in any case; "cpu" measures the machine that asks. Raises `ConfigError` with the list."""
    key = name.lower()
    if key == THIS_CPU:
        return this_cpu()
    if key not in DEVICES:
        raise ConfigError(f"device {name!r}: known are {', '.join(DEVICES)}, and {THIS_CPU} (this machine, measured)")
    return DEVICES[key]


def this_cpu() -> Device:
    """This machine, measured for about half a second with NumPy in its own number of threads."""
    import numpy as np

    big = np.ones(64 << 20 >> 3)
    into = np.empty_like(big)
    bandwidth = 2 * big.nbytes / _best(lambda: np.copyto(into, big))
    size = 768
    left = np.ones((size, size), dtype=np.float32)
    flops = 2 * size**3 / _best(lambda: left @ left)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    rates = {"float32": flops, "bfloat16": flops, "float16": flops}
    # Measured, not promised: nothing more is taken off.
    return Device(THIS_CPU, memory, bandwidth, rates, bandwidth, bandwidth_share=1.0, flops_share=1.0)


def _best(run: object, times: int = 5) -> float:
    """Seconds of the fastest of a few calls."""
    assert callable(run)
    best = float("inf")
    for _ in range(times):
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best
