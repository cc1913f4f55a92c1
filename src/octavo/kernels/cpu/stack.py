"""`NativeStack`: all layers of a decoder step in one call of C++ (csrc/layer_stack.h), and when that is possible.

Between two products of a small step Python and small tensors would cost more than the products. The kernels are those
that `NativeOps`, `NativeLinear` and `NativeAttention` call one by one, on the same numbers, so the bits are the same.
It takes addresses from those objects; anything that stands in front of one of them (a wrapper, an adapter, a profile)
is not known here and keeps the decoder on its own path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import BoundsError, ConfigError
from octavo.kernels.cpu.attention import MOST_ROTARY_DIM, NativeAttention
from octavo.kernels.cpu.linear import NativeLinear
from octavo.kernels.cpu.loader import native
from octavo.kernels.cpu.ops import ACTIVATIONS
from octavo.kernels.cpu.quantized import NativeQuantizedLinear
from octavo.kernels.layer_stack import StackLayer, StackParts
from octavo.kernels.quantized_weights import JoinedLinear

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBackend
    from octavo.kernels.layer_stack import CosSin

#: Part of a step -> its place in the seconds that csrc/layer_stack.h counts.
PARTS = ("products", "attention", "rotation", "small")


def layer_stack(parts: StackParts) -> NativeStack | str:
    """The stack, or why these layers cannot be one."""
    if parts.activation not in ACTIVATIONS:
        return f"activation {parts.activation} has no native kernel"
    if any(layer.rotary is not None for layer in parts.layers) and parts.head_dim > MOST_ROTARY_DIM:
        return f"head_dim={parts.head_dim} is more than the {MOST_ROTARY_DIM} that are turned on their way to the cache"
    for index, layer in enumerate(parts.layers):
        for name in ("qkv", "out", "gate_up", "down"):
            if reason := _not_native(getattr(layer, name)):
                return f"layer {index}: {name} {reason}"
    return NativeStack(parts)


def _not_native(linear: object) -> str:
    for part in _parts_of(linear):
        if reason := _not_packed(part):
            return reason
    return ""


def _parts_of(linear: object) -> list[Any]:
    """What lies side by side in a product: itself, or its parts in turn."""
    if type(linear) is not JoinedLinear:
        return [linear]
    return [part for inner in linear.parts for part in _parts_of(inner)]


def _not_packed(linear: object) -> str:
    if type(linear) is NativeQuantizedLinear:
        return "puts its inputs into an order of its own" if linear.reorders else ""
    return "" if type(linear) is NativeLinear else f"is a {type(linear).__name__}, not one packed weight"


class NativeStack:
    """See the module. Raises ConfigError for weights whose shapes do not fit together."""

    def __init__(self, parts: StackParts) -> None:
        self._shape = (len(parts.layers), parts.num_heads, parts.num_kv_heads, parts.head_dim)
        self._hidden, self._head_dim = parts.hidden_size, parts.head_dim
        self._tables = 1 + max((layer.rotary for layer in parts.layers if layer.rotary is not None), default=-1)
        self._kept: list[object] = []  # what the native side has the address of
        self._parts = parts
        kind = ACTIVATIONS[parts.activation]
        final = self._norm(parts.final_norm, parts.hidden_size)
        whole, scale = parts.whole_norms, parts.residual_scale
        self._native = native().LayerStack(
            parts.hidden_size, parts.intermediate_size, parts.eps, scale, whole, kind, final
        )
        for layer in parts.layers:
            self._add(layer)

    def _add(self, layer: StackLayer) -> None:
        parts, dim = self._parts, self._head_dim
        queries, keys, inner = parts.num_heads * dim, parts.num_kv_heads * dim, parts.intermediate_size
        products = [_parts_of(linear) for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        hidden = parts.hidden_size
        shapes = ((queries + 2 * keys, hidden), (hidden, queries), (2 * inner, hidden), (hidden, inner))
        for linears, (outputs, inputs) in zip(products, shapes, strict=True):
            found = [sum(linear.out_features for linear in linears), *{linear.in_features for linear in linears}]
            if found != [outputs, inputs]:
                raise ConfigError(f"a weight {found} where the layers need [{outputs}, {inputs}]")
        heads = (queries, keys) if parts.whole_norms else (dim, dim)
        both = layer.q_norm is not None and layer.k_norm is not None
        norms = [
            *(
                self._norm(weight, hidden)
                for weight in (layer.attention_norm, layer.mlp_norm, layer.post_attention_norm, layer.post_mlp_norm)
            ),
            *(self._norm(weight if both else None, n) for weight, n in zip((layer.q_norm, layer.k_norm), heads)),
        ]
        self._kept += products
        native_parts = [[linear.native_parts for linear in linears] for linears in products]
        self._native.add(norms, native_parts, -1 if layer.rotary is None else layer.rotary)

    def _norm(self, weight: torch.Tensor | None, size: int) -> int:
        """The address of a norm's weight, 0 for none."""
        if weight is None:
            return 0
        if weight.shape != (size,):
            raise ConfigError(f"a norm of shape {tuple(weight.shape)} where the layers need ({size},)")
        weight = weight.to(torch.float32).contiguous()
        self._kept.append(weight)
        return weight.data_ptr()

    def serves(self, attention: AttentionBackend) -> bool:
        """Only `NativeAttention` itself, over a cache of this model's shape."""
        return type(attention) is NativeAttention and attention.shape == self._shape

    def run(
        self, residual: torch.Tensor, positions: torch.Tensor, tables: Sequence[CosSin], attention: AttentionBackend
    ) -> torch.Tensor | None:
        """See `LayerStack`. Raises BoundsError for slots and blocks outside the pool, as the backend does."""
        assert isinstance(attention, NativeAttention)
        tokens = residual.shape[0]
        if residual.dtype != torch.float32 or not residual.is_contiguous() or residual.shape[1] != self._hidden:
            found = f"{tuple(residual.shape)} of {residual.dtype}"
            raise ConfigError(f"hidden states {found}: contiguous float32 [T, {self._hidden}] needed")
        if positions.shape != (tokens,) or positions.dtype != torch.int64 or not positions.is_contiguous():
            raise ConfigError(f"positions {tuple(positions.shape)} of {positions.dtype}: int64 ({tokens},) needed")
        places = []
        for cos, sin in tables[: self._tables]:
            if cos.shape[1] != self._head_dim or cos.shape != sin.shape:
                raise ConfigError(f"cos {tuple(cos.shape)}, sin {tuple(sin.shape)}: [rows, {self._head_dim}] needed")
            places.append((cos.data_ptr(), sin.data_ptr(), cos.shape[0]))
        out = torch.empty_like(residual)
        try:
            done = self._native.run(
                attention.native, tokens, positions.data_ptr(), places, residual.data_ptr(), out.data_ptr()
            )
        except IndexError as error:
            raise BoundsError(str(error)) from None
        return out if done else None

    def watch(self) -> None:
        """Count seconds from now on."""
        self._native.watch()

    def seconds(self) -> dict[str, float]:
        """What went into each of `PARTS` since `watch`."""
        return dict(zip(PARTS, self._native.seconds, strict=True))
