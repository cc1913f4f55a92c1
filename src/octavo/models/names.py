"""The canonical names and shapes of a decoder's weights: one table that every loader maps onto.

Norm weights are *final multipliers*: where a family scales by (1 + w), the loader has added the 1. They are float32
whatever the model's dtype, so that the sum loses nothing. Linear weights are [out, in]. D hidden, I intermediate,
V vocabulary, d head_dim, Hq query heads, Hkv key/value heads.

    embedding.weight                      [V, D]
    layers.{i}.attention_norm.weight      [D]
    layers.{i}.{q,k,v}.weight (.bias)     [Hq·d or Hkv·d, D]     bias with `qkv_bias`
    layers.{i}.{q_norm,k_norm}.weight     [d]                    with `qk_norm`
    layers.{i}.out.weight (.bias)         [D, Hq·d]              bias with `out_bias`
    layers.{i}.post_attention_norm.weight [D]                    with `sandwich_norms`
    layers.{i}.mlp_norm.weight            [D]
    layers.{i}.{gate,up}.weight (.bias)   [I, D]                 bias with `mlp_bias`
    layers.{i}.down.weight (.bias)        [D, I]                 bias with `mlp_bias`
    layers.{i}.post_mlp_norm.weight       [D]                    with `sandwich_norms`
    final_norm.weight                     [D]
    head.weight                           [V, D]                 unless `tied_head`

No tensors here: the planner counts bytes from this table.
"""

from __future__ import annotations

from math import prod

from octavo.models.spec import ModelSpec

Shape = tuple[int, ...]


def layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name inside a layer -> shape; the same for every layer of a model."""
    d, hidden, inner = spec.head_dim, spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * d, spec.num_kv_heads * d
    shapes: dict[str, Shape] = {"attention_norm.weight": (hidden,), "mlp_norm.weight": (hidden,)}
    if spec.sandwich_norms:
        shapes["post_attention_norm.weight"] = shapes["post_mlp_norm.weight"] = (hidden,)
    if spec.qk_norm:
        shapes["q_norm.weight"] = shapes["k_norm.weight"] = (d,)
    linears = {
        "q": (q_rows, hidden, spec.qkv_bias),
        "k": (kv_rows, hidden, spec.qkv_bias),
        "v": (kv_rows, hidden, spec.qkv_bias),
        "out": (hidden, q_rows, spec.out_bias),
        "gate": (inner, hidden, spec.mlp_bias),
        "up": (inner, hidden, spec.mlp_bias),
        "down": (hidden, inner, spec.mlp_bias),
    }
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes


def weight_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every canonical name of the model -> shape."""
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab_size, spec.hidden_size)}
    per_layer = layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in per_layer.items()})
    shapes["final_norm.weight"] = (spec.hidden_size,)
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def is_norm(name: str) -> bool:
    """True for the norm weights, which stay float32."""
    return name.endswith("norm.weight")


def weight_bytes(spec: ModelSpec, bytes_per_value: int) -> int:
    """Bytes of all weights with `bytes_per_value` each, float32 for norms. A tied head counts once."""
    return sum(prod(shape) * (4 if is_norm(name) else bytes_per_value) for name, shape in weight_shapes(spec).items())
