"""A decoder's layers as `StackParts`, for operations that run them all in one call; or why they cannot be told so.

What has no place there (experts, layer norms, parallel layers, a plain MLP, rotation of a part of a head) stays with
the decoder. It knows the records of `models/layer.py`, not who runs the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.kernels.layer_stack import LayerStack, StackLayer, StackParts
from octavo.kernels.ops import Ops
from octavo.models.layer import GatedMLP, HeadNorms, Layer, NoNorm, Norm, ProjectionNorms, RMSNorm
from octavo.models.spec import ModelSpec


def make_stack(ops: Ops, spec: ModelSpec, layers: Sequence[Layer], final_norm: Norm) -> LayerStack | str:
    """All layers in one call, where operations and layers allow it; else why they go operation by operation."""
    make = getattr(ops, "layer_stack", None)
    if make is None:
        return f"the {ops.name} operations have none"
    parts = stack_parts(spec, layers, final_norm)
    stack: LayerStack | str = parts if isinstance(parts, str) else make(parts)
    return stack


def stack_parts(spec: ModelSpec, layers: Sequence[Layer], final_norm: Norm) -> StackParts | str:
    """The parts, or a reason in one sentence."""
    if any(rotary.dim is not None and rotary.dim != spec.head_dim for rotary in spec.rotaries):
        return "only a part of each head is rotated"
    if spec.norm != "rms" or not isinstance(final_norm, RMSNorm):
        return "its norms are layer norms"
    parts = []
    for index, layer in enumerate(layers):
        found = _layer(layer)
        if isinstance(found, str):
            return f"layer {index}: {found}"
        parts.append(found)
    return StackParts(
        layers=tuple(parts),
        final_norm=final_norm.weight,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        eps=spec.rms_norm_eps,
        activation=spec.activation,
        residual_scale=spec.residual_scale,
        whole_norms=isinstance(layers[0].head_norms, ProjectionNorms),
    )


def _layer(layer: Layer) -> StackLayer | str:
    if layer.parallel or layer.mlp_norm is None:
        return "attention and MLP run side by side"
    if not isinstance(layer.mlp, GatedMLP):
        return f"its MLP is a {type(layer.mlp).__name__}"
    if isinstance(layer.head_norms, HeadNorms):
        return "each head has a norm of its own"
    q_norm, k_norm = (layer.q_norm, layer.k_norm) if layer.head_norms is None else layer.head_norms.weights
    if layer.rotary is None and layer.head_norms is None and q_norm is not None:
        return "heads are normed but not rotated"
    return StackLayer(
        attention_norm=_weight(layer.attention_norm),
        qkv=layer.qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        rotary=layer.rotary,
        out=layer.out,
        post_attention_norm=_weight(layer.post_attention_norm),
        mlp_norm=_weight(layer.mlp_norm),
        gate_up=layer.mlp.gate_up,
        down=layer.mlp.down,
        post_mlp_norm=_weight(layer.post_mlp_norm),
    )


def _weight(norm: Norm | None) -> torch.Tensor | None:
    """None where nothing is normed. Only RMS norms come here: a model has one kind of norm."""
    if norm is None or isinstance(norm, NoNorm):
        return None
    assert isinstance(norm, RMSNorm)
    return norm.weight
