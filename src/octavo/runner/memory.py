"""How much memory there is for KV blocks: of this process's share of a host, or of a GPU.

Numbers are read when asked, so ask after the weights are loaded. On a host the tightest of the machine's available
memory and every enclosing cgroup counts (containers see the machine's memory but die at the cgroup's limit). This
module allocates nothing and does not know models.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

GIB = 1 << 30
MIB = 1 << 20
CPU_KV_DEFAULT = 4 * GIB
CPU_KV_SHARE = 0.4
_HUGE_PAGE = 2 * MIB
_MADV_HUGEPAGE = 14
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes to spend on KV blocks, and the sentence that says why, for the settings report.

    activation_bytes: the largest step's, where it was measured to find the budget.
    """

    bytes: int
    reason: str
    activation_bytes: int | None = None


def available_bytes(device: torch.device | str) -> int:
    """Bytes that can be allocated on `device` now."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_cpu_bytes()


def available_cpu_bytes(root: Path = Path("/")) -> int:
    """Bytes this process can still take without swapping: MemAvailable, or less under a cgroup limit.

    `root` is where /proc and /sys/fs/cgroup are found. Systems without /proc: the free physical pages.
    """
    meminfo = _read(root / "proc/meminfo")
    limits = _cgroup_left(root)
    for line in (meminfo or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    if not limits:
        names = os.sysconf_names
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in names else "SC_PHYS_PAGES"
        limits.append(os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(limits))


def _cgroup_left(root: Path) -> list[int]:
    """Limit minus use of this process's memory cgroup and each of its ancestors, v2 and v1."""
    left = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        steps = [part for part in path.split("/") if part not in ("", "..")]
        # A container may not see its own path below the mount; what it does see is what limits it.
        for depth in range(len(steps), -1, -1):
            room = _room(base.joinpath(*steps[:depth]), *names)
            if room is not None:
                left.append(room)
    return left


def _room(folder: Path, limit_name: str, used_name: str, reclaimable: str) -> int | None:
    limit, used = _read(folder / limit_name), _read(folder / used_name)
    if limit is None or used is None or limit.strip() == "max" or int(limit) >= _UNLIMITED:
        return None
    cached = 0
    for line in (_read(folder / "memory.stat") or "").splitlines():
        if line.startswith(reclaimable + " "):
            cached = int(line.split()[1])
    return int(limit) - (int(used) - min(cached, int(used)))


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def total_cpu_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cpu_budget(utilization: float = 1.0, available: int | None = None, total: int | None = None) -> Budget:
    """KV bytes on a host when `cpu_kv_bytes` is not given: 40 % of what is available, at most 4 GiB.

    utilization: share of the whole memory that may be in use afterwards, by anybody (`gpu_memory_utilization`).
    """
    if available is None:
        available = available_cpu_bytes()
    if total is None:
        total = total_cpu_bytes()
    room = int(total * utilization) - (total - available)
    if room < min(int(available * CPU_KV_SHARE), CPU_KV_DEFAULT):
        taken = (total - available) / GIB
        return Budget(
            max(0, room), f"gpu_memory_utilization={utilization:g} of {total / GIB:.1f} GiB, {taken:.1f} in use"
        )
    share = int(available * CPU_KV_SHARE)
    if share >= CPU_KV_DEFAULT:
        return Budget(CPU_KV_DEFAULT, f"4 GiB by default ({available / GIB:.1f} GiB are available)")
    return Budget(share, f"{CPU_KV_SHARE:.0%} of the {available / GIB:.1f} GiB available after the weights")


def cuda_budget(utilization: float, activation_peak: int, device: torch.device | str = "cuda") -> Budget:
    """KV bytes on a GPU: utilization * total, minus what is taken already and the largest step's activations."""
    free, total = torch.cuda.mem_get_info(torch.device(device))
    taken = total - free
    left = int(total * utilization) - taken - activation_peak
    return Budget(
        max(0, left),
        f"gpu_memory_utilization={utilization:g} of {total / GIB:.1f} GiB, minus {taken / GIB:.2f} GiB in use "
        f"and {activation_peak / GIB:.2f} GiB for the largest step",
        activation_peak,
    )


def measure_activation_peak(run: Callable[[], object], device: torch.device | str) -> int:
    """Bytes that `run` (the largest step) takes above what was held before it.

    On a GPU the caching allocator's own high-water mark. On a host the process's (VmHWM, reset beforehand); where the
    system offers none, the result is 0 and the default budget's 60 % reserve has to do.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return max(0, int(torch.cuda.max_memory_allocated(device)) - int(before))
    if not _reset_peak():
        run()
        return 0
    held = _status_bytes("VmRSS")
    run()
    return max(0, _status_bytes("VmHWM") - held)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask for 2 MiB pages under a large host tensor (fewer address translations when streaming blocks).

    Only advice: False where the system has none to take. Must come before the memory is first touched to have effect.
    """
    address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    first = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    length = (address + size - first) // _HUGE_PAGE * _HUGE_PAGE
    madvise = getattr(ctypes.CDLL(None), "madvise", None) if os.name == "posix" else None
    if length <= 0 or madvise is None:
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return int(madvise(first, length, _MADV_HUGEPAGE)) == 0
