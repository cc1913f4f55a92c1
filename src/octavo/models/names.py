"""The canonical names and shapes of a decoder's weights: one table that every loader maps onto.

Norm weights are *final multipliers*: where a family scales by (1 + w), the loader has added the 1. Norms and routers
are float32 whatever the model's dtype, so that sums lose nothing. Linear weights are [out, in]. D hidden,
I intermediate, V vocabulary, d head_dim, Hq query heads, Hkv key/value heads, E experts.

    embedding.weight                      [V, D]
    positions.weight                      [P, D]                 with `learned_positions` P
    layers.{i}.attention_norm.weight      [D]                    with `input_norms`
    layers.{i}.{q,k,v}.weight (.bias)     [Hq·d or Hkv·d, D]     bias with `qkv_bias`
    layers.{i}.{q_norm,k_norm}.weight     [d] or [H·d]           with `qk_norm`, by `qk_norm_kind`; of "each_head":
    layers.{i}.heads.{h}.q_norm.weight    [d]                    (and k_norm), one for each head
    layers.{i}.out.weight (.bias)         [D, Hq·d]              bias with `out_bias`
    layers.{i}.post_attention_norm.weight [D]                    with `sandwich_norms`
    layers.{i}.mlp_norm.weight            [D]                    with `input_norms`, unless `parallel` is "one_norm"
    layers.{i}.{gate,up}.weight (.bias)   [I, D]                 bias with `mlp_bias`; gate with `gated_mlp`
    layers.{i}.down.weight (.bias)        [D, I]                 bias with `mlp_bias`
    layers.{i}.post_mlp_norm.weight       [D]                    with `sandwich_norms`
    final_norm.weight                     [D]
    head.weight                           [V, D]                 unless `tied_head`

Every norm but q_norm and k_norm has a .bias with `norm_bias`. In a layer with experts, instead of gate, up and down:

    layers.{i}.router.weight                            [E, D]
    layers.{i}.experts.{e}.{gate,up,down}.weight        [I_expert, D], down [D, I_expert]
    layers.{i}.shared.{gate,up,down}.weight             the expert that sees every token, if there is one
    layers.{i}.shared_router.weight                     [1, D]

No tensors here: the planner counts bytes from this table.
"""

from __future__ import annotations

from math import prod

from octavo.models.spec import ModelSpec

Shape = tuple[int, ...]


def layer_shapes(spec: ModelSpec, index: int) -> dict[str, Shape]:
    """Name inside layer `index` -> shape."""
    shapes: dict[str, Shape] = {}
    norms = ["attention_norm"] if spec.input_norms else []
    norms += ["mlp_norm"] if spec.input_norms and spec.parallel != "one_norm" else []
    norms += ["post_attention_norm", "post_mlp_norm"] if spec.sandwich_norms else []
    for name in norms:
        shapes.update(_norm(spec, name))
    shapes.update(_attention(spec))
    experts = spec.experts
    if experts is None or index not in experts.layers:
        shapes.update(_mlp(spec, "", spec.intermediate_size))
        return shapes
    shapes["router.weight"] = (experts.count, spec.hidden_size)
    for expert in range(experts.count):
        shapes.update(_mlp(spec, f"experts.{expert}.", experts.intermediate_size))
    if experts.shared_intermediate_size:
        shapes.update(_mlp(spec, "shared.", experts.shared_intermediate_size))
        shapes["shared_router.weight"] = (1, spec.hidden_size)
    return shapes


def _norm(spec: ModelSpec, name: str) -> dict[str, Shape]:
    kinds = ("weight", "bias") if spec.norm_bias else ("weight",)
    return {f"{name}.{kind}": (spec.hidden_size,) for kind in kinds}


def _linear(name: str, rows: int, columns: int, bias: bool) -> dict[str, Shape]:
    return {f"{name}.weight": (rows, columns), **({f"{name}.bias": (rows,)} if bias else {})}


def _attention(spec: ModelSpec) -> dict[str, Shape]:
    d, hidden = spec.head_dim, spec.hidden_size
    shapes: dict[str, Shape] = {}
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
        if spec.qk_norm and spec.qk_norm_kind == "each_head":
            shapes.update({f"heads.{head}.{name}_norm.weight": (d,) for head in range(heads)})
        elif spec.qk_norm:
            shapes[f"{name}_norm.weight"] = (d if spec.qk_norm_kind == "head" else heads * d,)
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        shapes.update(_linear(name, heads * d, hidden, spec.qkv_bias))
    return {**shapes, **_linear("out", hidden, spec.num_heads * d, spec.out_bias)}


def _mlp(spec: ModelSpec, prefix: str, inner: int) -> dict[str, Shape]:
    shapes = _linear(f"{prefix}gate", inner, spec.hidden_size, spec.mlp_bias) if spec.gated_mlp else {}
    shapes.update(_linear(f"{prefix}up", inner, spec.hidden_size, spec.mlp_bias))
    return {**shapes, **_linear(f"{prefix}down", spec.hidden_size, inner, spec.mlp_bias)}


def weight_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every canonical name of the model -> shape."""
    shapes: dict[str, Shape] = {"embedding.weight": (spec.vocab_size, spec.hidden_size)}
    if spec.learned_positions:
        shapes["positions.weight"] = (spec.learned_positions, spec.hidden_size)
    for index in range(spec.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer_shapes(spec, index).items()})
    shapes.update(_norm(spec, "final_norm"))
    if not spec.tied_head:
        shapes["head.weight"] = (spec.vocab_size, spec.hidden_size)
    return shapes


def is_norm(name: str) -> bool:
    """True for the weights and biases of norms."""
    return name.endswith(("norm.weight", "norm.bias"))


def is_float32(name: str) -> bool:
    """True for what stays float32 whatever the model's dtype: norms, and routers, whose choice is all or nothing."""
    return is_norm(name) or name.endswith("router.weight")


def matrices(spec: ModelSpec) -> dict[str, Shape]:
    """What `quantization=` applies to: all matrices but routers and learned positions, which are only looked up."""
    shapes = weight_shapes(spec)
    return {n: s for n, s in shapes.items() if len(s) == 2 and not is_float32(n) and n != "positions.weight"}


def weight_bytes(spec: ModelSpec, bytes_per_value: int) -> int:
    """Bytes of all weights with `bytes_per_value` each, float32 for norms and routers. A tied head counts once."""
    return sum(
        prod(shape) * (4 if is_float32(name) else bytes_per_value) for name, shape in weight_shapes(spec).items()
    )


def num_parameters(spec: ModelSpec) -> int:
    """Numbers in the weights; a tied head counts once."""
    return sum(prod(shape) for shape in weight_shapes(spec).values())


def active_parameters(spec: ModelSpec) -> int:
    """Numbers a token is multiplied with: as `num_parameters`, but only the experts it goes to."""
    if spec.experts is None:
        return num_parameters(spec)
    idle = spec.experts.count - spec.experts.per_token
    per_expert = (3 if spec.gated_mlp else 2) * spec.hidden_size * spec.experts.intermediate_size
    return num_parameters(spec) - idle * per_expert * len(spec.experts.layers)
