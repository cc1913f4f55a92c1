"""`PagedCache`: a transformers `Cache` whose keys and values lie in blocks, shared and copied on write.

For `model.generate(past_key_values=PagedCache(…))` of any decoder, and for loops of your own. Layers with full or
sliding-window attention are paged; layers that keep another kind of state (linear attention, convolutions) keep it in
transformers' own classes. It does not know tokens.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from octavo.attention import PagedStats
from octavo.errors import ConfigError
from octavo.integrations.transformers.attention import ATTENTION, tag
from octavo.integrations.transformers.pool import PagedPool
from octavo.integrations.transformers.state import PagedState
from octavo.paged.view import PagedView

PAGED = {"full_attention", "sliding_attention"}
UNPAGED = {"conv", "linear_attention", "mamba", "dummy"}


class PagedLayer(CacheLayerMixin):
    """One attention layer's place in the shared state. `keys` and `values` stay None: they are in blocks."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, state: PagedState, index: int, config: Any) -> None:
        super().__init__()
        self.state, self.index, self._config = state, index, config
        self.sliding_window = state.pool.windows[index]
        self.is_sliding = self.sliding_window is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pool is made for all layers at once."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """key, value [B, Hkv, q, d] -> what attention reads: gathered, or themselves with a note where they belong."""
        self.is_initialized = True
        if self._config._attn_implementation == ATTENTION:
            return tag(key_states, self.state, self.index), value_states
        return self.state.gather(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return self.state.seen_by(self.index)

    def get_max_length(self) -> int:
        return -1 if self.sliding_window is None else self.sliding_window

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, the first of them) that the next pass's mask covers."""
        seen = self.state.seen
        first = 0 if self.sliding_window is None else max(0, seen - self.sliding_window + 1)
        return seen + query_length - first, first

    @property
    def record_past(self) -> bool:
        return self.state.recording

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.state.recording = value

    def activate_past_recording(self) -> None:
        self.state.recording = True

    def offload(self) -> None:
        raise ConfigError("PagedCache keeps its pool on one device: offloading is not possible")

    prefetch = offload


class PagedCache(Cache):
    """Keys and values of a transformers decoder in a pool of blocks.

    Parameters
    ----------
    config : PreTrainedConfig
        The model's. Its attention implementation decides how attention reads the blocks:
        `model.set_attn_implementation(ATTENTION)` attends in place; any other one gets gathered copies, a layer at a
        time.
    num_blocks, max_tokens : int
        One of them: the size of the pool, for all rows together.
    block_size : int
        Tokens in a block.
    dtype : torch.dtype
        None: what the model computes.
    kv_cache_dtype : str
        "auto", "int8", "int4" or two of them, as `octavo.PagedAttention`.
    backend : str
        Kernels for attention in place, as `octavo.PagedAttention`.
    share_rows : bool
        Rows that were given the same so far (samples and beams of one prompt) are kept once.
    pool : PagedPool
        Instead of a size: the pool of another cache (`cache.pool`), so that several share one.

    Notes
    -----
    `copy.deepcopy(cache)` is a fork: it takes no memory until one of the two writes. A cache that is garbage gives its
    blocks back. One forward pass at a time per pool.

    Raises
    ------
    ConfigError
        A kind of layer that keeps something else (chunked or compressed attention, indexers); a model without a
        decoder of its own; sizes and names that cannot be.
    CapacityError
        From a forward pass, when the pool is full: it says how many blocks are needed.
    """

    def __init__(
        self,
        config: Any,
        *,
        num_blocks: int | None = None,
        max_tokens: int | None = None,
        block_size: int = 16,
        dtype: torch.dtype | str | None = None,
        kv_cache_dtype: str = "auto",
        backend: str = "auto",
        share_rows: bool = True,
        pool: PagedPool | None = None,
    ) -> None:
        decoder = config.get_text_config(decoder=True)
        _check_decoder(config, decoder)
        types, settings = get_layer_types_and_kwargs(decoder)
        _check_types(types)
        windows = [s.get("sliding_window") for t, s in zip(types, settings, strict=True) if t in PAGED]
        if pool is None:
            pool = PagedPool(
                windows, num_heads=decoder.num_attention_heads, num_blocks=num_blocks, max_tokens=max_tokens,
                block_size=block_size, dtype=dtype, kv_cache_dtype=kv_cache_dtype, backend=backend,
            )  # fmt: skip
        elif num_blocks is not None or max_tokens is not None:
            raise ConfigError("pool=… has its size already; leave num_blocks and max_tokens out")
        elif pool.windows != tuple(windows):
            raise ConfigError(f"this model's layers have windows {windows}, the pool was made for {list(pool.windows)}")
        state = PagedState(pool, share_rows=share_rows)
        others = [None if t in PAGED else DYNAMIC_LAYER_TYPE_MAPPING[t](**s) for t, s in zip(types, settings)]
        self._assemble(config, state, others)

    def _assemble(self, config: Any, state: PagedState, others: list[Any]) -> None:
        """others: per layer, the object that keeps its state, None for a paged one."""
        decoder = config.get_text_config(decoder=True)
        layers: list[Any] = []
        paged = 0
        for other in others:
            layers.append(PagedLayer(state, paged, decoder) if other is None else other)
            paged += other is None
        super().__init__(layers=layers)
        self._config, self._state = config, state
        weakref.finalize(self, state.free).atexit = False

    # -- looking -------------------------------------------------------------------------------------------------

    @property
    def pool(self) -> PagedPool:
        return self._state.pool

    @property
    def rows(self) -> list[int]:
        """The pool's request of each row of the batch; twins have the same one."""
        return list(self._state.rows.ids)

    def view(self) -> PagedView:
        """The pool's block tables; prints as a picture."""
        return self.pool.attention.view()

    def stats(self) -> PagedStats:
        """The pool's gauges and counters."""
        return self.pool.attention.stats()

    # -- what generate calls -------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from row beam_idx[i]: rows are renamed, nothing moves."""
        self._each_other("reorder_cache", beam_idx)
        self._state.rearrange(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._each_other("batch_repeat_interleave", repeats)
        self._state.rearrange([row for row in range(len(self.rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows; the blocks of the others are free."""
        self._each_other("batch_select_indices", indices)
        self._state.rearrange(torch.arange(len(self.rows))[torch.as_tensor(indices).cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Negative: take that many tokens back. Positive: keep so many (as transformers before 5.20 had it)."""
        self._each_other("crop", tokens_to_remove)
        seen = self._state.seen
        self._state.crop(-tokens_to_remove if tokens_to_remove <= 0 else max(0, seen - tokens_to_remove))

    def reset(self) -> None:
        """Empty: every block is given back."""
        self._each_other("reset")
        self._state.free()

    def abort(self) -> None:
        """Forget a forward pass that failed on its way."""
        self._state.abort()

    def fork(self) -> PagedCache:
        """Another cache with the same content, in the same pool: copy-on-write. `copy.deepcopy` does this too."""
        twin = PagedCache.__new__(PagedCache)
        others = [None if isinstance(layer, PagedLayer) else copy.deepcopy(layer) for layer in self.layers]
        twin._assemble(self._config, self._state.fork(), others)
        for mine, theirs in zip(self.layers, twin.layers, strict=True):
            if isinstance(mine, PagedLayer) and isinstance(theirs, PagedLayer):
                theirs.is_initialized = mine.is_initialized
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork()

    def _each_other(self, method: str, *args: Any) -> None:
        for layer in self.layers:
            if not isinstance(layer, PagedLayer):
                getattr(layer, method)(*args)


def _check_decoder(config: Any, decoder: Any) -> None:
    """Refuse models without a causal decoder alone: their `generate` keeps something else, or there is none."""
    name = type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"{name} is an encoder with a decoder, whose cache has two halves: use transformers' EncoderDecoderCache"
        )
    kind = getattr(decoder, "model_type", "")
    masked = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if masked or getattr(decoder, "is_decoder", True) is False:
        raise ConfigError(
            f"{name} is an encoder: every token sees all others, so nothing is cached. If it is meant to be a decoder, "
            f"set config.is_decoder=True where the model knows it"
        )
    if getattr(decoder, "num_attention_heads", None) is None:
        raise ConfigError(
            f"{name} has no attention heads, so no layer keeps keys and values: nothing to page; use the model's own "
            f"cache (DynamicCache)"
        )


def _check_types(types: list[str]) -> None:
    strange = sorted(
        {t for t in types if t not in PAGED | UNPAGED or (t in UNPAGED and t not in DYNAMIC_LAYER_TYPE_MAPPING)}
    )
    if strange:
        raise ConfigError(
            f"PagedCache: layers of type {', '.join(strange)} keep something other than the keys and values of full or "
            f"sliding-window attention; use transformers' DynamicCache for this model"
        )
