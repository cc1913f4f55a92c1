"""`PagedPool`: the blocks under one or several `PagedCache`s, made when the first keys say what they are like."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from octavo.attention import PagedAttention
from octavo.core.kv_format import parse_kv_dtype
from octavo.errors import ConfigError
from octavo.paged.spec import at_least_one, check_backend, float_dtype


class PagedPool:
    """Settings until the first forward pass, a `PagedAttention` after it.

    num_blocks, or max_tokens: how much there is. max_tokens is for all rows together; each row's last block may be
    partly empty, so leave `block_size` tokens a row. windows: per layer that keeps keys, None for full attention.
    num_heads: query heads. dtype: None, what the model computes.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        num_heads: int,
        num_blocks: int | None = None,
        max_tokens: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype | str | None = None,
        kv_cache_dtype: str = "auto",
        backend: str = "auto",
    ) -> None:
        if (num_blocks is None) == (max_tokens is None):
            raise ConfigError(
                f"num_blocks={num_blocks} and max_tokens={max_tokens}: give one of them; the pool is allocated at "
                f"once, for all rows together"
            )
        if not windows:
            raise ConfigError("this model has no attention layer that keeps keys and values: nothing to page")
        self.windows = tuple(windows)
        self._num_heads = num_heads
        # Checked now: at the first forward pass the mistake is far away.
        self._num_blocks = None if num_blocks is None else at_least_one("num_blocks", num_blocks)
        self._max_tokens = None if max_tokens is None else at_least_one("max_tokens", max_tokens)
        self._block_size = at_least_one("block_size", block_size)
        self._dtype = None if dtype is None or dtype == "auto" else float_dtype(dtype)
        parse_kv_dtype(kv_cache_dtype)
        check_backend(backend)
        self._kv_cache_dtype, self._backend = kv_cache_dtype, backend
        self._attention: PagedAttention | None = None
        self._shape = (0, 0)  # (num_kv_heads, head_dim)
        self._lock = threading.Lock()
        self._next_request = 0
        self.scale = 0.0
        self.softcap: float | None = None

    @property
    def attention(self) -> PagedAttention:
        """The pool itself: `view()`, `stats()`, `audit()`."""
        if self._attention is None:
            raise ConfigError("the pool is allocated by the first forward pass; there is nothing to look at yet")
        return self._attention

    @property
    def is_built(self) -> bool:
        return self._attention is not None

    def new_request(self) -> int:
        """An id that no cache over this pool has used."""
        with self._lock:
            self._next_request += 1
            return self._next_request - 1

    def build(
        self, key: torch.Tensor, head_dim: int, *, scale: float | None = None, softcap: float | None = None
    ) -> PagedAttention:
        """The pool for keys like `key` [B, num_kv_heads, q, …]; made on the first call, checked on later ones.

        head_dim: the larger one of keys and values.
        """
        shape = (key.shape[1], head_dim)
        with self._lock:
            if self._attention is None:
                self._attention = self._make(key, head_dim, scale, softcap)
                self._shape = shape
                self.scale = head_dim**-0.5 if scale is None else scale
                self.softcap = softcap
            if shape != self._shape:
                raise ConfigError(
                    f"a layer has {shape[0]} key heads of {shape[1]}, the first had {self._shape[0]} of "
                    f"{self._shape[1]}: PagedCache keeps layers of one shape; use transformers' DynamicCache"
                )
            if key.device != self._attention.kv_blocks.device:
                where = self._attention.kv_blocks.device
                raise ConfigError(
                    f"a layer's keys are on {key.device}, the pool is on {where}: PagedCache needs one device"
                )
            if scale is not None and softcap != self.softcap:
                raise ConfigError(f"a layer has softcap {softcap}, the first had {self.softcap}; use attention 'eager'")
            return self._attention

    def _make(self, key: torch.Tensor, head_dim: int, scale: float | None, softcap: float | None) -> PagedAttention:
        groups = _groups(self.windows)
        blocks = self._num_blocks
        if blocks is None:
            assert self._max_tokens is not None
            blocks = groups * -(-self._max_tokens // self._block_size)
        return PagedAttention(
            num_heads=self._num_heads if self._num_heads % key.shape[1] == 0 else key.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            block_size=self._block_size,
            num_blocks=blocks,
            num_layers=len(self.windows),
            dtype=self._dtype or key.dtype,
            device=key.device,
            scale=scale,
            sliding_window=self.windows,
            softcap=softcap,
            kv_cache_dtype=self._kv_cache_dtype,
            backend=self._backend,
        )


def _groups(windows: Sequence[int | None]) -> int:
    from octavo.core.kv_layout import build_layout

    return build_layout(windows, block_size=1, bytes_per_token_layer=1).num_groups
