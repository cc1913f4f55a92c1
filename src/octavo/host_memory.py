"""What a process may still take of its host's memory, and what it has taken: /proc and control groups, read when asked.

The tightest of the machine's available memory and every enclosing cgroup counts (containers see the machine's memory
but die at the cgroup's limit). It allocates nothing and knows neither torch nor models.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"


def total_cpu_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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


def peak_bytes_of(run: Callable[[], object]) -> int:
    """Bytes that `run` takes above what the process held before it (VmHWM, reset beforehand).

    0 where the system has no such mark; `run` is run all the same.
    """
    if not reset_peak():
        run()
        return 0
    held = status_bytes("VmRSS")
    run()
    return max(0, status_bytes("VmHWM") - held)


def reset_peak() -> bool:
    """Set the process's high-water mark back to what it holds now; False where the system cannot."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def status_bytes(name: str) -> int:
    """A size of /proc/self/status in bytes; 0 where there is none."""
    for line in (_read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def give_memory_back() -> None:
    """Free memory that the C library keeps for later goes back to the system: 190 MiB after Gemma's tokenizer."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


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
