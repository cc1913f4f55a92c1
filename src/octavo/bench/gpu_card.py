"""Two ceilings of a device: what it copies and what it multiplies. Used by `octavo bench gpu`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.devices import Device

REPEATS = 20


def seconds_of(run: Callable[[], object], device: Device, repeats: int = REPEATS) -> float:
    """Median seconds of one call: calls are queued in bunches, so that the queueing is not what is timed."""
    for _ in range(3):
        run()
    found = []
    for _ in range(5):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        device.synchronize()
        found.append((time.perf_counter() - begin) / repeats)
    return sorted(found)[len(found) // 2]


def measure_card(device: Device, *, copy_bytes: int = 2 << 30, side: int = 8192) -> dict[str, Any]:
    """copy_bytes_per_s: bytes read and written by a copy on the device. flops: of a bfloat16 product side x side."""
    import torch

    source = torch.randn(copy_bytes // 2, device=device.torch, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy = seconds_of(partial(target.copy_, source), device)
    del source, target
    a = torch.randn(side, side, device=device.torch, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    product = seconds_of(partial(torch.mm, a, b), device)
    return {"copy_bytes_per_s": 2 * copy_bytes / copy, "flops": 2 * side**3 / product, "device": device.name}
