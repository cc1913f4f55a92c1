"""What a transformers model asks of attention, found by running it once and listening.

The library hands every attention layer that follows its `AttentionInterface` to a function registered under a name,
and every mask to another. `examine` registers two that only write down what they are given: shapes, scale, soft cap,
and which positions the layer's mask lets a token see. It runs on the meta device too, where no weight is read. What
Octavo's paged attention cannot do (another mask than causal or sliding, sinks, biases, layers that keep another state)
is refused with the reason; nothing is guessed from the names of settings.

Invariant: whatever `examine` returns was asked for by the model's own forward pass, call by call, in its order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from octavo.errors import ModelError

NAME, PROBE = "octavo", "octavo_probe"
#: Arguments of the attention function that change nothing here: bookkeeping of the library, or handled by name below.
_WORDS = """
    position_ids cache_position position_embeddings dropout use_cache output_attentions output_hidden_states
    output_router_logits return_dict logits_to_keep sliding_window scaling softcap is_causal cache past_key_values
    past_key_value attention_dropout num_items_in_batch layer_idx deterministic training
"""
_HARMLESS = frozenset(_WORDS.split())
_lock = threading.Lock()
_listener: _Listener | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's request. window: tokens seen, itself included; None: all before it."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    window: int | None


@dataclass(slots=True)
class _Listener:
    positions: int
    calls: list[AttentionCall] = field(default_factory=list)
    modules: list[torch.nn.Module] = field(default_factory=list)
    masks: list[tuple[torch.Tensor, Callable[..., torch.Tensor]]] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)  # mask -> window


@dataclass(frozen=True, slots=True)
class Examined:
    """The calls in the order of a forward pass, who made them, and the part of the model below the output head."""

    calls: tuple[AttentionCall, ...]
    modules: tuple[torch.nn.Module, ...]
    body: str  # name of the module that turns ids into hidden states


def register(attention: Callable[..., Any]) -> None:
    """Make the names known to transformers: `attention` serves, the listener examines. Harmless when repeated."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)  # no mask function of this name: then the library makes none
    ALL_ATTENTION_FUNCTIONS.register(PROBE, _listen)
    ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE, _mark)


def examine(model: Any, positions: int) -> Examined:
    """Run `model` (its attention implementation is `PROBE`) on three tokens. Raises `ModelError` with the reason.

    positions: the longest sequence; windows are looked at up to there. Errors of the library come through as they are.
    """
    body: list[str] = []
    with _listening(positions) as heard, _first_model_inside(model, body), torch.no_grad():
        ids = torch.zeros((1, 3), dtype=torch.long, device=model.device)
        # Ones as padding mask: given one, the library does not look for several sequences in one row.
        model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            position_ids=torch.arange(3, device=ids.device)[None],
            use_cache=False,
        )
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    if not heard.calls:
        raise ModelError(
            f"{type(model).__name__} computes attention by itself (not through transformers' AttentionInterface), so "
            "nothing can take its place; ALiBi models are of this kind"
        )
    if isinstance(layers, int) and len(heard.calls) < layers:
        raise ModelError(
            f"{type(model).__name__}: {len(heard.calls)} of {layers} layers ask for attention; the others keep a state "
            "of another kind (Mamba, linear attention, convolution), for which there is no place in blocks"
        )
    if not body:
        raise ModelError(f"{type(model).__name__} has no model below its head whose hidden states could be taken")
    return Examined(tuple(heard.calls), tuple(heard.modules), body[0])


@contextmanager
def _listening(positions: int) -> Iterator[_Listener]:
    """One examination at a time: the library's functions have no other way to tell for whom they are called."""
    global _listener
    with _lock:
        _listener = _Listener(positions)
        try:
            yield _listener
        finally:
            _listener = None


@contextmanager
def _first_model_inside(model: Any, found: list[str]) -> Iterator[None]:
    """Collect the name of the first model inside `model` that is called (in OPT that is `model.decoder`)."""
    from transformers import PreTrainedModel

    handles = []
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel):
            handles.append(
                module.register_forward_pre_hook(lambda _m, _a, name=name: found.append(name) if not found else None)
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _mark(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., torch.Tensor] | None = None,
    device: Any = None,
    **_: Any,
) -> torch.Tensor:
    """In the place of a mask: a tensor that `_listen` knows again, with the function that says what it means."""
    assert _listener is not None and mask_function is not None
    mask = torch.zeros((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    _listener.masks.append((mask, mask_function))
    return mask


def _listen(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """In the place of attention: write the call down and answer with each token's own value."""
    heard = _listener
    assert heard is not None
    who = type(module).__name__
    for name, what in given.items():
        if name not in _HARMLESS and what is not None and what is not False:
            raise ModelError(f"{who} hands {name} to its attention, which paged attention does not know")
    scale = given.get("scaling")
    heard.calls.append(
        AttentionCall(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(query.shape[3] ** -0.5 if scale is None else scale),
            softcap=None if given.get("softcap") is None else float(given["softcap"]),
            window=_window_of(heard, attention_mask, who),
        )
    )
    heard.modules.append(module)
    groups = query.shape[1] // key.shape[1]
    return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous(), None


def _window_of(heard: _Listener, mask: torch.Tensor | None, who: str) -> int | None:
    for index, (known, function) in enumerate(heard.masks):
        if known is mask:
            if index not in heard.windows:
                heard.windows[index] = window_of(function, heard.positions, who)
            return heard.windows[index]
    raise ModelError(f"{who} makes or changes its attention mask itself, so what a token may see is not known")


def window_of(visible: Callable[..., torch.Tensor], positions: int, who: str) -> int | None:
    """Window of a mask function (batch, head, query, keys) -> bool, or None for plain causal attention.

    Looks at queries 0, 1 and around every power of two up to `positions`, each against all keys up to one behind it.
    """
    last = max(positions - 1, 1)
    queries = sorted({0, 1, last} | {2**k + d for k in range(1, 31) for d in (-1, 0) if 2**k + d <= last})
    counts = []
    zero = torch.tensor(0)
    for query in queries:
        keys = torch.arange(query + 2)
        try:
            seen = visible(zero, zero, torch.tensor(query), keys).expand(len(keys))
        except (RuntimeError, NotImplementedError) as error:
            raise ModelError(f"{who}: its mask depends on more than the two positions: {error}") from error
        count = int(seen.sum())
        if bool(seen[query + 1]) or not bool(seen[query + 1 - count : query + 1].all()):
            raise ModelError(
                f"{who}: its mask is neither causal nor a sliding window (bidirectional or chunked attention)"
            )
        counts.append(count)
    window = max(counts)
    if any(count != min(window, query + 1) for count, query in zip(counts, queries, strict=True)):
        raise ModelError(f"{who}: its mask is neither causal nor a sliding window (chunked attention)")
    return None if window == last + 1 else window
