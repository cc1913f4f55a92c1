"""`BlockReader`: keys and values out of blocks, as dense tensors. The one place that gathers; attention does not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from octavo.kernels.interface import KVCache
from octavo.kernels.quantized_kv import QuantizedRows
from octavo.models.spec import ModelSpec


class BlockReader:
    """Reads one pool, in any of its number formats."""

    def __init__(self, cache: KVCache, spec: ModelSpec) -> None:
        self._cache, self._spec = cache, spec
        quantised = cache.layout.kv_dtype != "auto"
        self._rows = QuantizedRows(cache.kv, cache.layout, spec.num_kv_heads, spec.head_dim) if quantised else None

    def read(self, slots: Sequence[npt.NDArray[np.int64]], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """slots: per row int64 [n], equally many. -> (keys, values) [B, n, Hkv, d], copies."""
        kv, size = self._cache.kv, self._cache.layout.block_size
        place = self._cache.layout.place(layer)[1]
        where = torch.from_numpy(np.stack(slots)).to(kv.device)
        blocks, offsets = where // size, where % size
        if self._rows is None:
            pair = kv[blocks, place, :, :, offsets]  # [B, n, 2, Hkv, d]
            return pair[:, :, 0], pair[:, :, 1]
        heads = self._spec.num_kv_heads
        per_block = self._cache.layout.layers_per_group * 2 * heads
        keys = (blocks[..., None] * per_block + torch.arange(heads, device=kv.device)) * size + offsets[..., None]
        index = torch.stack([keys, keys + heads * size]).reshape(-1)
        found = self._rows.gather(index, place).view(2, *keys.shape, self._spec.head_dim)
        return found[0], found[1]
