"""How much memory there is for KV blocks: of this process's share of a host, or of a GPU.

Numbers are read when asked, so ask after the weights are loaded. It allocates nothing and does not know models.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.devices import Device, device_of
from octavo.errors import ConfigError
from octavo.host_memory import available_cpu_bytes, total_cpu_bytes

GIB = 1 << 30
MIB = 1 << 20
CPU_KV_DEFAULT = 4 * GIB
CPU_KV_SHARE = 0.4
_HUGE_PAGE = 2 * MIB
_MADV_HUGEPAGE = 14


@dataclass(frozen=True, slots=True)
class Budget:
    """Bytes to spend on KV blocks, and the sentence that says why, for the settings report.

    activation_bytes: the largest step's, where it was measured to find the budget.
    """

    bytes: int
    reason: str
    activation_bytes: int | None = None


def available_bytes(device: torch.device | str | Device) -> int:
    """Bytes that can be allocated on `device` now."""
    return device_of(device).available_bytes()


def check_host_arrays(num_groups: int, max_blocks: int, max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise ConfigError where the runner's own arrays (block tables, a step's tokens) could not be had.

    The tables are kept twice, whole: as they are, and as the step at hand reads them.
    """
    available = available_bytes("cpu")
    table_bytes, token_bytes = 8 * num_groups * max_blocks, 8 * (3 + num_groups)
    tables = f"block tables of {max_blocks} blocks in {num_groups} group{'s' * (num_groups > 1)}"
    for name, value, what, needed in (
        ("max_num_seqs", max_num_seqs, tables, max_num_seqs * table_bytes),
        ("max_num_batched_tokens", max_num_batched_tokens, "tokens of a step", max_num_batched_tokens * token_bytes),
    ):
        if needed > available:
            raise ConfigError(
                f"{name}={value}: so many {what} need {needed / MIB:.0f} MiB of memory, {available / MIB:.0f} MiB are "
                f"available; lower {name}{' or max_model_len' if name == 'max_num_seqs' else ''}"
            )


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


def cuda_budget(
    utilization: float, activation_peak: int, device: torch.device | str | Device = "cuda", graph_bytes: int = 0
) -> Budget:
    """KV bytes on a GPU: utilization * total, minus what is taken already (by whomever), the largest step's
    activations, and what recorded steps keep."""
    where = device_of(device)
    where.release_cached()  # what torch keeps for later is not taken
    free, total = where.available_bytes(), where.total_bytes()
    taken = total - free
    left = int(total * utilization) - taken - activation_peak - graph_bytes
    others = taken - where.held_bytes()
    graphs = f", {graph_bytes / GIB:.2f} GiB for graphs" if graph_bytes else ""
    return Budget(
        max(0, left),
        f"gpu_memory_utilization={utilization:g} of {total / GIB:.1f} GiB, minus {taken / GIB:.2f} GiB in use "
        f"({others / GIB:.2f} GiB not by this engine){graphs} and {activation_peak / GIB:.2f} GiB for the largest step",
        activation_peak,
    )


def measure_activation_peak(run: Callable[[], object], device: torch.device | str | Device) -> int:
    """Bytes that `run` (the largest step) takes above what was held before it.

    On a GPU the caching allocator's own high-water mark. On a host the process's (VmHWM, reset beforehand); where the
    system offers none, the result is 0 and the default budget's 60 % reserve has to do.
    """
    return device_of(device).peak_bytes_of(run)


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
