"""What a start does beside importing torch: the garbage collector rests, and memory for weights is cleared.

Importing torch makes some hundred thousand objects that stay; looking through them again and again for garbage that is
not there takes more than a tenth of the time. Afterwards they count as old, so that nobody looks at them all at once
when the first step is waiting. Memory for weights is cleared by another core meanwhile. Nothing here imports torch.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octavo.config import EngineConfig
from octavo.host_memory import available_cpu_bytes
from octavo.host_room import Room
from octavo.models.least_bytes import least_bytes


@contextmanager
def without_collecting() -> Iterator[None]:
    """No garbage collection in the body, unless somebody else starts one. Leaves the collector as it was."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else the program has frozen objects of its own, which are to stay frozen
            gc.freeze()  # everything alive moves out of the young generation …
            gc.unfreeze()  # … into the oldest one, where it can be collected as ever
        gc.enable()


def room_for(config: EngineConfig) -> Room:
    """Memory for the weights of `config`, to be entered before torch is imported; of no bytes where it is not certain.

    Only for native kernels at their widest: others keep weights elsewhere, or in fewer bytes. At most half of the
    memory there is, so that whoever asks how much is left finds enough.
    """
    if not _on_wide_cpu(config) or len(os.sched_getaffinity(0)) < 2:
        return Room(0)
    size, files = least_bytes(config)
    return Room(size, files) if 2 * size <= available_cpu_bytes() else Room(0)


def _on_wide_cpu(config: EngineConfig) -> bool:
    """Whether the native kernels will run, on a processor where they keep 16 bits of each weight."""
    if config.attention_backend not in ("auto", "native") or config.fixed_point or os.environ.get("OCTAVO_ISA"):
        return False
    if config.device != "cpu" and (config.device != "auto" or any(Path("/dev").glob("nvidia[0-9]*")) or _has_npu()):
        return False
    try:
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _has_npu() -> bool:
    return any(Path("/dev").glob("davinci[0-9]*"))
