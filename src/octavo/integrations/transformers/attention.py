"""Attention in place: the function that transformers' `AttentionInterface` calls when a model is set to `ATTENTION`.

`PagedCache.update` hands new keys on as they are, with a note where they belong; this function stores them and attends
through the block tables. Masks stay what they are in this library's flash attention: the padding, [B, columns], and
nothing where there is none. What is not causal or sliding-window attention is refused, not approximated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from octavo.errors import RequestError

if TYPE_CHECKING:
    from octavo.integrations.transformers.state import PagedState

ATTENTION = "octavo_paged_cache"
#: Arguments that change the result and are not computed here.
FOREIGN = ("s_aux", "sinks", "position_bias", "head_mask", "alibi")


def register() -> None:
    """Make `ATTENTION` known to transformers. Importing the package does it."""
    AttentionInterface.register(ATTENTION, paged_cache_attention)
    AttentionMaskInterface.register(ATTENTION, padding_mask)


def tag(key: torch.Tensor, state: PagedState, layer: int) -> torch.Tensor:
    """The same keys, with a note for `paged_cache_attention`."""
    key.octavo_place = (state, layer)  # type: ignore[attr-defined]
    return key


def paged_cache_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, Hq, q, d], key and value [B, Hkv, q, d] of the new tokens -> ([B, q, Hq, d], no weights)."""
    place = getattr(key, "octavo_place", None)
    if place is None:
        raise RequestError(
            f"attn_implementation={ATTENTION!r} attends to the blocks of a PagedCache and {type(module).__name__} came "
            f"without: pass past_key_values=PagedCache(model.config, …) with use_cache=True. If you did, this model "
            f"changes keys after they are cached (latent attention): set eager or sdpa, for which blocks are gathered"
        )
    del key.octavo_place  # type: ignore[attr-defined]
    foreign = [name for name in FOREIGN if kwargs.get(name) is not None]
    if dropout or kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        foreign.append("dropout" if dropout else "attention that is not causal")
    if foreign or (attention_mask is not None and attention_mask.dim() != 2):
        what = ", ".join(foreign) or f"a mask of shape {tuple(attention_mask.shape)}"  # type: ignore[union-attr]
        raise RequestError(
            f"{type(module).__name__} asks for {what}, which {ATTENTION!r} does not compute; set another attention "
            f"implementation (eager, sdpa): PagedCache then gathers for it"
        )
    state, layer = place
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return state.attend(layer, query, key, value, attention_mask, scale=scale, softcap=softcap), None


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """bool [B, columns up to the last new one], False where there is padding; None where there is none."""
    if not _is_plain(mask_function):
        raise RequestError(
            f"this model or input needs a mask that is neither causal nor a sliding window (packed sequences, tokens "
            f"that see ahead): {ATTENTION!r} does not compute it; set eager or sdpa, for which blocks are gathered"
        )
    if attention_mask is None:
        return None
    columns = attention_mask[:, : q_offset + q_length]
    return None if bool(columns.all()) else columns


def _is_plain(mask_function: Callable[..., Any]) -> bool:
    """Is it the library's causal mask, or its causal sliding window? Told by what the function is made of."""
    if mask_function is causal_mask_function:
        return True
    return _parts(mask_function) == _parts(sliding_window_causal_mask_function(1))


def _parts(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Names of a function and of the functions it closes over; other values (a window) do not count."""
    inner: list[Any] = []
    for cell in getattr(function, "__closure__", None) or ():
        values = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        inner += [_parts(v) for v in values if callable(v)]
    return (getattr(function, "__qualname__", ""), *inner)
