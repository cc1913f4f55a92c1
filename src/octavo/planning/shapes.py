"""What a simulation must know of a model: the sizes that decide bytes and operations. No weights, no tokens.

`ModelShape.of(spec)` takes them from a `ModelSpec`; a few well-known models are here by name, so that a plan or a
simulation needs no files at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.weight_format import FIXED, parse_weight_format, screen_bytes, worth_screening
from octavo.core.weight_recipe import formats_of
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


def _mlp_width(spec: ModelSpec) -> int:
    """Intermediate size of gated MLPs in all layers that have as many weights as the model's."""
    experts = spec.experts
    dense = spec.intermediate_size if spec.gated_mlp else spec.intermediate_size * 2 // 3
    if experts is None:
        return dense
    sparse = len(experts.layers)
    inner = experts.count * experts.intermediate_size + experts.shared_intermediate_size
    return (sparse * inner + (spec.num_layers - sparse) * dense) // spec.num_layers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder of the Llama family. windows[i]: window of layer i in tokens, None for full attention."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tied_head: bool = False
    windows: tuple[int | None, ...] = ()

    @classmethod
    def of(cls, spec: ModelSpec, name: str) -> ModelShape:
        """The shape of a model whose config or weights were read.

        All MLPs of a layer count as one gated MLP of as many weights: all experts, as if each had tokens.
        """
        return cls(
            name,
            spec.num_layers,
            spec.hidden_size,
            _mlp_width(spec),
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.vocab_size,
            spec.max_position_embeddings,
            spec.tied_head,
            spec.windows,
        )

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers that every token is multiplied with (norms and biases are left out: < 0.1 %)."""
        query, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (query + 2 * kv) + query * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, read once a step and multiplied once for each token drawn."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them; a tied head counts once."""
        return self.layer_parameters + self.head_parameters * (1 if self.tied_head else 2)

    def weight_bytes(self, dtype: str, quantization: str | None = None, *, step: bool = False) -> int:
        """Bytes of the weights in memory. step: of those that a step reads (a tied head once, an embedding not).

        quantization: int8 or int4[:group][:pure], as `EngineConfig.quantization`.
        """
        form, size = parse_weight_format(quantization), dtype_bytes(dtype)
        shapes = self._matrices()
        formats = {} if form is None else formats_of(form, shapes, self.num_layers)
        total = 0
        for name, (rows, columns) in shapes.items():
            if step and name == "embedding.weight" and not self.tied_head:
                continue
            found = formats[name].matrix_bytes(rows, columns) if formats else rows * columns * size
            if found is None:
                raise ConfigError(f"quantization={quantization!r} needs a GGUF file; {self.name} is a name only")
            total += found
        return total

    @property
    def head_screen_bytes(self) -> int:
        """The copy that screens an output head of floats, 0 for a small one (`EngineConfig.screen_head`).

        As large as on a processor with AMX, where it takes a quarter more than elsewhere.
        """
        rows, columns = self.vocab_size, self.hidden_size
        return screen_bytes(rows, columns, on_tiles=True) if worth_screening(rows, columns) else 0

    @property
    def fixed_point_bytes(self) -> int:
        """What the layers take more as fixed-point numbers than in bfloat16 (`EngineConfig.fixed_point`)."""
        layers = [shape for name, shape in self._matrices().items() if name.startswith("layers.")]
        return sum((FIXED.matrix_bytes(*shape) or 0) - 2 * shape[0] * shape[1] for shape in layers)

    def _matrices(self) -> dict[str, tuple[int, int]]:
        """The weights by the names of `models/names.py`."""
        hidden, inner, query = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        layer = {"q": (query, hidden), "k": (kv, hidden), "v": (kv, hidden), "out": (hidden, query)}
        layer |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        shapes = {f"layers.{i}.{name}.weight": shape for i in range(self.num_layers) for name, shape in layer.items()}
        ends = ("embedding",) if self.tied_head else ("embedding", "head")
        return shapes | {f"{name}.weight": (self.vocab_size, hidden) for name in ends}

    def kv_bytes_per_token_layer(self, dtype: str) -> int:
        """Bytes of the key and the value of one token in one layer. dtype: of a model, or a `kv_cache_dtype`."""
        heads, size = self.num_kv_heads, self.head_dim
        if dtype in DTYPE_BYTES:
            return kv_bytes_per_token_layer("auto", num_kv_heads=heads, head_dim=size, itemsize=DTYPE_BYTES[dtype])
        return kv_bytes_per_token_layer(dtype, num_kv_heads=heads, head_dim=size, itemsize=0)

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token in all layers, before windows give anything back."""
        return self.num_layers * self.kv_bytes_per_token_layer(dtype)

    def layout(self, block_size: int, dtype: str, *, hybrid: bool = True) -> KVLayout:
        """How the layers share a pool of blocks."""
        windows = self.windows or (None,) * self.num_layers
        per_layer = self.kv_bytes_per_token_layer(dtype)
        return build_layout(windows, block_size=block_size, bytes_per_token_layer=per_layer, hybrid=hybrid)


#: Public configurations.
KNOWN: Mapping[str, ModelShape] = {
    s.name: s
    for s in (
        ModelShape("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000, 4096),
        ModelShape("llama-2-13b", 40, 5120, 13824, 40, 40, 128, 32000, 4096),
        ModelShape("llama-2-70b", 80, 8192, 28672, 64, 8, 128, 32000, 4096),
        ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072),
        ModelShape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, 131072),
        ModelShape("mistral-7b", 32, 4096, 14336, 32, 8, 128, 32000, 32768, windows=(4096,) * 32),
        ModelShape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, 32768),
        ModelShape("gemma-3-270m", 18, 640, 2048, 4, 1, 256, 262144, 32768, True, windows=((512,) * 5 + (None,)) * 3),
    )
}


def known_shape(name: str) -> ModelShape | None:
    """A model of the list, by its name in any case; None for others."""
    return KNOWN.get(name.lower().rpartition("/")[2].removesuffix("-hf").removesuffix("-chat"))


def dtype_bytes(dtype: str) -> int:
    """Raises `ConfigError` for a dtype that nobody here computes in."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype={dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]
