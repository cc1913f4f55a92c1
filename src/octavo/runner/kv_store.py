"""`KVStore`: the one KV tensor of a device, the host pool that swapped-out blocks go to, and moves between them.

Allocated once, at start; nothing here allocates on the step path except the staging of a copy. It does not know who
owns a block: ids come from the plan, and are only checked against the pools' sizes.

Invariant: transfers take effect as if done one by one in the given order. They are batched only where no block of
the batch is both a source and a destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch

from octavo.core.kv_format import parse_kv_dtype
from octavo.core.kv_layout import KVLayout
from octavo.core.step import BlockTransfer, TransferKind
from octavo.devices import device_of
from octavo.errors import BoundsError, ConfigError
from octavo.kernels.interface import AttentionBackend, KVCache
from octavo.kernels.quantized_kv import quantized_shape
from octavo.kernels.reference import independent_runs
from octavo.models.spec import ModelSpec
from octavo.runner.memory import advise_huge_pages, available_bytes

MIB = 1 << 20


class KVStore:
    """Device blocks (`cache.kv`) and host blocks (`host`, None without a swap pool).

    cache.kv: [num_blocks, layers_per_group, 2, num_kv_heads, block_size, head_dim] (or bytes of quantised rows, see
    `KVCache`), zeros. host: the same shape with `num_host_blocks` in front, pinned when the device is a GPU.
    """

    def __init__(self, cache: KVCache, host: torch.Tensor | None = None) -> None:
        if host is not None and host.shape[1:] != cache.kv.shape[1:]:
            raise ValueError(f"host blocks {tuple(host.shape[1:])} are not device blocks {tuple(cache.kv.shape[1:])}")
        self.cache = cache
        self.host = host

    @classmethod
    def allocate(
        cls,
        layout: KVLayout,
        spec: ModelSpec,
        num_blocks: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
    ) -> KVStore:
        """Allocate both pools, or raise `ConfigError` with what is needed, what there is and what would fit.

        dtype: of keys and values where `layout.kv_dtype` is "auto".
        """
        device = torch.device(device)
        shape: tuple[int, ...] = (layout.layers_per_group, 2, spec.num_kv_heads, layout.block_size, spec.head_dim)
        if (kv_format := parse_kv_dtype(layout.kv_dtype)) is not None:
            shape, dtype = quantized_shape(kv_format, layout, spec.num_kv_heads, spec.head_dim), torch.uint8
        per_block = torch.Size(shape).numel() * dtype.itemsize
        kv = _allocate("num_blocks", num_blocks, shape, per_block, dtype, device)
        host = None
        if num_host_blocks:
            pinned_for = None if device.type == "cpu" else device
            host = _allocate(
                "swap_bytes", num_host_blocks, shape, per_block, dtype, torch.device("cpu"), pinned_for=pinned_for
            )
        return cls(KVCache(kv, layout), host)

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self.cache.kv.shape[0]

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the swap pool."""
        return 0 if self.host is None else self.host.shape[0]

    @property
    def device_bytes(self) -> int:
        """Bytes of the device tensor."""
        return self.cache.kv.numel() * self.cache.kv.element_size()

    @property
    def host_bytes(self) -> int:
        """Bytes of the swap pool."""
        return 0 if self.host is None else self.host.numel() * self.host.element_size()

    def transfer(self, transfers: Sequence[BlockTransfer], backend: AttentionBackend) -> None:
        """Do `transfers` in order. Raises `BoundsError` before anything moves if an id is outside its pool."""
        for number, transfer in enumerate(transfers):
            self._check(number, transfer)
        for kind, group in groupby(transfers, key=lambda t: t.kind):
            pairs = [(t.source, t.destination) for t in group]
            if kind is TransferKind.COPY:
                backend.copy_blocks(pairs)
            else:
                self._swap(kind, pairs)

    def _check(self, number: int, transfer: BlockTransfer) -> None:
        sizes = {
            TransferKind.COPY: (self.num_blocks, self.num_blocks),
            TransferKind.SWAP_OUT: (self.num_blocks, self.num_host_blocks),
            TransferKind.SWAP_IN: (self.num_host_blocks, self.num_blocks),
        }[transfer.kind]
        ends = (("source", transfer.source, sizes[0]), ("destination", transfer.destination, sizes[1]))
        for what, block, size in ends:
            if not 0 <= block < size:
                raise BoundsError(
                    f"transfer {number} ({transfer.kind.value}): {what} block {block} is not in its pool of {size}"
                )

    def _swap(self, kind: TransferKind, pairs: list[tuple[int, int]]) -> None:
        assert self.host is not None  # `_check` refuses every id when there is no host pool
        out = kind is TransferKind.SWAP_OUT
        source, destination = (self.cache.kv, self.host) if out else (self.host, self.cache.kv)
        if self.cache.kv.device.type != "cpu":
            # One block is one run of bytes: queued copies in order, and nobody waits for them.
            for s, d in pairs:
                destination[d].copy_(source[s], non_blocking=True)
            return
        # The two pools are different memory (the destination's ids are inverted to tell them apart), so only a block
        # that is written twice needs its order kept.
        for run in independent_runs((s, ~d) for s, d in pairs):
            from_ids = torch.tensor([s for s, _ in run], device=source.device)
            to_ids = torch.tensor([~d for _, d in run], device=destination.device)
            moved = source.index_select(0, from_ids).to(destination.device)
            destination.index_copy_(0, to_ids, moved)


def _allocate(
    setting: str,
    count: int,
    shape: tuple[int, ...],
    per_block: int,
    dtype: torch.dtype,
    device: torch.device,
    pinned_for: torch.device | None = None,
) -> torch.Tensor:
    needed = count * per_block
    available = available_bytes(device)
    if needed > available:
        fits = available // per_block
        raise ConfigError(
            f"{setting}: {count} blocks of {per_block / MIB:.3f} MiB need {needed / MIB:.1f} MiB of {device.type} "
            f"memory, {available / MIB:.1f} MiB are available; at most {fits} blocks fit. Lower {setting}"
        )
    try:
        if pinned_for is not None:
            kv = device_of(pinned_for).pinned((count, *shape), dtype).zero_()
        elif device.type == "cpu":
            # calloc hands out untouched zero pages; torch.zeros would write every byte of gigabytes at start.
            kv = torch.from_numpy(np.zeros(needed, np.uint8)).view(dtype).view(count, *shape)
        else:
            kv = torch.zeros((count, *shape), dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:
        raise ConfigError(
            f"{setting}: the {device.type} allocator refused {needed / MIB:.1f} MiB for {count} blocks although "
            f"{available / MIB:.1f} MiB are available ({error}). Lower {setting}"
        ) from error
    if device.type == "cpu" and pinned_for is None:
        advise_huge_pages(kv)
    return kv
