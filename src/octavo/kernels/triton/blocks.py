"""Copies of whole blocks for copy-on-write: all layers of a block and all pairs of a step in one launch.

It knows blocks by number only. Pairs take effect in order: where one reads what an earlier one wrote, or writes what an
earlier one touched, they are cut into runs, one launch each; the scheduler makes such chains rarely.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.errors import BoundsError
from octavo.kernels.reference import independent_runs
from octavo.kernels.triton.jit.dense import copy_kernel

WORDS = 2048  # of a program


class BlockCopier:
    """Copies inside one pool [num_blocks, ...]."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        # Copied as the widest integers that divide a block, whatever the numbers are.
        block_bytes = kv.stride(0) * kv.element_size()
        word = next(
            kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if not block_bytes % kind.itemsize
        )
        self._words = kv.view(-1).view(word).view(kv.shape[0], -1)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Raises BoundsError before anything moves where a pair leaves the pool."""
        limit = self._words.shape[0]
        for number, pair in enumerate(pairs):
            if not all(0 <= block < limit for block in pair):
                raise BoundsError(f"copy {number} of {len(pairs)}: {pair} leaves the pool's blocks 0 to {limit - 1}")
        for run in independent_runs(pairs):
            self._launch(run)

    def _launch(self, run: list[tuple[int, int]]) -> None:
        on_gpu = self._kv.device.type != "cpu"
        host = torch.tensor(run, dtype=torch.int64, pin_memory=on_gpu)
        device = host.to(self._kv.device, non_blocking=True)
        words = self._words.shape[1]
        copy_kernel[(-(-words // WORDS), len(run))](
            self._words, device, words, WORDS=WORDS, num_warps=4, enable_fp_fusion=False
        )
