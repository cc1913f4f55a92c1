"""How the tensors of a Hugging Face file map onto the canonical weights of `models/names.py`.

A tensor may be one weight, or hold several: q, k and v in one matrix, all experts stacked, columns where rows are
meant. `parts_of` says for each what part of it is which weight. It reads no tensors and knows no files; a family's
`TensorNames` is data, in `models/families/`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec

#: Buffers that old checkpoints carry and that are computed from the config here.
HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?\d+\.(self_attn|attention|attn)\.(masked_bias|bias)")
_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Part:
    """The weight `name` as a part of a tensor: `index` cuts along the first dimensions, `change` rearranges the rest.

    Without `change` and with an index of numbers and at most one final slice, the part is a run of whole rows.
    """

    name: str
    index: tuple[int | slice, ...] = ()
    change: Callable[[Any], Any] | None = None

    def take(self, tensor: Any) -> Any:
        """The weight, from the whole tensor."""
        return self.arranged(tensor[self.index] if self.index else tensor)

    def arranged(self, piece: Any) -> Any:
        """The weight, from what `index` cut out."""
        return piece if self.change is None else self.change(piece)


#: (spec, "weight" or "bias") -> the parts, named inside their layer.
Cut = Callable[["ModelSpec", str], tuple[Part, ...]]


@dataclass(frozen=True)
class TensorNames:
    """Names of one family. Modules of a layer: name -> canonical name, or how the tensor is cut; "#" is any number."""

    modules: Mapping[str, str | Cut]
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    layers: str = "layers"
    positions: str | None = None
    heads: tuple[str, ...] = ("lm_head",)
    prefixes: tuple[str, ...] = ("model.",)  # of everything but the head; files of the bare model may have another
    transposed: frozenset[str] = field(default_factory=frozenset)  # modules whose weight is [in, out]

    def prefix_in(self, names: Iterable[str]) -> str:
        """The prefix that the tensors `names` have."""
        known = list(names)
        for prefix in self.prefixes:
            if any(name.startswith((f"{prefix}{self.embedding}.", f"{prefix}{self.layers}.")) for name in known):
                return prefix
        return self.prefixes[0]

    def head_in(self, names: Container[str]) -> str | None:
        """Name of the output head's weight among `names`."""
        return next((f"{head}.weight" for head in self.heads if f"{head}.weight" in names), None)


def parts_of(name: str, spec: ModelSpec, names: TensorNames, prefix: str) -> tuple[Part, ...] | None:
    """What the tensor `name` of a file holds; None when it belongs to no weight of the model."""
    stem, _, kind = name.rpartition(".")
    if kind in ("weight", "bias"):
        top = {f"{prefix}{names.embedding}": "embedding", f"{prefix}{names.final_norm}": "final_norm"}
        if names.positions is not None:
            top[f"{prefix}{names.positions}"] = "positions"
        top.update(dict.fromkeys(names.heads, "head"))
        if stem in top:
            return (Part(f"{top[stem]}.{kind}"),)
    else:
        stem, kind = name, "weight"  # stacked experts have no suffix
    if not stem.startswith(f"{prefix}{names.layers}."):
        return None
    index, _, module = stem[len(prefix) + len(names.layers) + 1 :].partition(".")
    if not index.isdecimal():
        return None
    return _module_parts(f"layers.{index}.", module, kind, spec, names)


def tensor_of(weight: str, spec: ModelSpec, names: TensorNames, prefix: str) -> str:
    """The tensor that a file of this family would hold the canonical `weight` in; `weight` itself if there is none."""
    stem, _, kind = weight.rpartition(".")
    top = {"embedding": f"{prefix}{names.embedding}", "final_norm": f"{prefix}{names.final_norm}"}
    top |= {"positions": f"{prefix}{names.positions}", "head": names.heads[0] if names.heads else stem}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, index, inner = stem.split(".", 2)
    numbers = _NUMBER.findall(inner)
    for module in names.modules:
        for number in numbers:
            module = module.replace("#", number, 1)
        for name in (f"{prefix}{names.layers}.{index}.{module}.{kind}", f"{prefix}{names.layers}.{index}.{module}"):
            if any(part.name == weight for part in parts_of(name, spec, names, prefix) or ()):
                return name
    return weight


def _module_parts(layer: str, module: str, kind: str, spec: ModelSpec, names: TensorNames) -> tuple[Part, ...] | None:
    numbers = _NUMBER.findall(module)
    target = names.modules.get(_NUMBER.sub(".#", module))
    if target is None:
        return None
    if callable(target):
        parts = target(spec, kind)
    else:
        for number in numbers:
            target = target.replace("#", number, 1)
        change = _turned if kind == "weight" and module in names.transposed else None
        parts = (Part(f"{target}.{kind}", (), change),)
    return tuple(Part(layer + part.name, part.index, part.change) for part in parts)


def _turned(matrix: Any) -> Any:
    return matrix.T


# Ways to cut


def rows(*sizes: tuple[str, Callable[[ModelSpec], int]]) -> Cut:
    """Weights one below the other: (canonical name, number of rows) of each."""

    def cut(spec: ModelSpec, kind: str) -> tuple[Part, ...]:
        parts, first = [], 0
        for name, size in sizes:
            parts.append(Part(f"{name}.{kind}", (slice(first, first + size(spec)),)))
            first += size(spec)
        return tuple(parts)

    return cut


def columns_of_qkv(spec: ModelSpec, kind: str) -> tuple[Part, ...]:
    """GPT-2: a weight [in, 3 · out], its bias [3 · out]; q, k and v side by side."""
    size = spec.num_heads * spec.head_dim
    parts = []
    for place, name in enumerate("qkv"):
        cut = slice(place * size, (place + 1) * size)
        index = (cut,) if kind == "bias" else (slice(None), cut)
        parts.append(Part(f"{name}.{kind}", index, None if kind == "bias" else _turned))
    return tuple(parts)


def grouped_qkv(spec: ModelSpec, kind: str) -> tuple[Part, ...]:
    """Rows in groups, one for each key/value head: its query heads, its key, its value (GPT-NeoX, Falcon)."""
    groups, per, d = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim

    def taken(first: int, last: int) -> Callable[[Any], Any]:
        def change(tensor: Any) -> Any:
            heads = tensor.view(groups, per + 2, d, *tensor.shape[1:])[:, first:last]
            return heads.reshape(-1, *tensor.shape[1:])

        return change

    places = {"q": (0, per), "k": (per, per + 1), "v": (per + 1, per + 2)}
    return tuple(Part(f"{name}.{kind}", (), taken(*place)) for name, place in places.items())


def stacked_gate_up(spec: ModelSpec, kind: str) -> tuple[Part, ...]:
    """All experts in one tensor [E, 2 · I, D]: gate above up."""
    assert spec.experts is not None
    inner = spec.experts.intermediate_size
    places = {"gate": slice(0, inner), "up": slice(inner, 2 * inner)}
    return tuple(
        Part(f"experts.{e}.{name}.{kind}", (e, place))
        for e in range(spec.experts.count)
        for name, place in places.items()
    )


def stacked(name: str) -> Cut:
    """All experts in one tensor [E, out, in]."""

    def cut(spec: ModelSpec, kind: str) -> tuple[Part, ...]:
        assert spec.experts is not None
        return tuple(Part(f"experts.{e}.{name}.{kind}", (e,)) for e in range(spec.experts.count))

    return cut


# Names of the Llama family, which most others take over

ATTENTION: Mapping[str, str | Cut] = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "out",
    "self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm",
}  # fmt: skip
MLP: Mapping[str, str | Cut] = {"mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down"}
NORMS: Mapping[str, str | Cut] = {
    "input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm",
}  # fmt: skip
LLAMA = TensorNames({**ATTENTION, **MLP, **NORMS})
