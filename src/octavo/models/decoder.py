"""The one decoder: a pre-norm transformer with rotary positions, driven by a `ModelSpec`.

It knows neither blocks nor requests: tokens of all sequences of a step come as one run of T rows, and the attention
backend, planned beforehand, knows which rows belong together. Weights arrive under the names of `models/names.py`,
are fused (q/k/v, gate/up) and handed to `Ops`; the decoder keeps no second copy.

Invariant: a row's result depends on its token, its position and what the attention backend returns for it, never on
which other rows are in the batch (up to the rounding of the matrix products of the `Ops` in use).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from octavo.kernels.ops import Linear, Ops, SizedLinear, StoredRows
from octavo.kernels.quantized_weights import JoinedLinear
from octavo.models.names import is_norm, weight_shapes
from octavo.models.rotary import RotaryTable
from octavo.models.spec import ModelSpec

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBackend

#: Products of a layer, as `linears` names them; q, k and v are one product, gate and up another.
LAYER_LINEARS = ("qkv", "out", "gate_up", "down")


@dataclass(slots=True)
class _Layer:
    """Products and norms of one layer. Norm weights are float32 final multipliers."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """See the module. `dtype` is that of the weights; activations are `ops.activation_dtype` if it says so.

    weights: canonical name -> tensor of any float dtype, read exactly once each, so a lazy mapping that reads from a
    mapped file needs no second copy of the model. Where the operations can unpack stored rows themselves, matrices
    go from the file into their final place on a queue. defer: leave the queue to the caller, who may run `queue` on
    threads of its own and then must call `finish_loading`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        defer: bool = False,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.activation_dtype: torch.dtype = getattr(ops, "activation_dtype", None) or dtype
        self.weight_bytes = 0
        self._ops = ops
        self.queue: Any = ops.load_queue() if hasattr(ops, "load_queue") else None
        with torch.inference_mode():
            # The head gives its rows back: no other copy is made.
            quantizes = getattr(ops, "quantization", None) is not None
            shared = spec.tied_head and (self.queue is not None or quantizes)
            embedding = None if shared or quantizes else self._take(weights, "embedding.weight")
            self._layers = [self._build_layer(weights, index) for index in range(spec.num_layers)]
            self._final_norm = self._take(weights, "final_norm.weight")
            if embedding is not None and spec.tied_head:
                self._head = ops.linear(embedding)
            else:
                self._head = self._fuse(weights, "", ("embedding" if spec.tied_head else "head",), False)
            apart = quantizes and not spec.tied_head
            table = self._fuse(weights, "", ("embedding",), False) if apart else embedding
            self._embed = self._lookup(table)
            self._tables = [RotaryTable(rotary, spec.head_dim, self.device) for rotary in spec.rotaries]
            # Rounded to the activation dtype once, as the Gemma reference does.
            self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.activation_dtype, device=self.device)
        if not defer:
            self.finish_loading()

    def finish_loading(self) -> None:
        """Fill what is still queued, on all threads. A thread that helps must be joined afterwards."""
        if self.queue is not None:
            self.queue.run(True)
            self.queue = None

    def _take(self, weights: Mapping[str, torch.Tensor], name: str, count: bool = True) -> torch.Tensor:
        """One weight in its final dtype and place, counted unless it goes on into something that is."""
        tensor = weights[name].to(device=self.device, dtype=torch.float32 if is_norm(name) else self.dtype)
        if count:
            self.weight_bytes += tensor.numel() * tensor.element_size()
        return tensor

    def _fuse(
        self, weights: Mapping[str, torch.Tensor], prefix: str, names: tuple[str, ...], bias: bool
    ) -> SizedLinear:
        """One product for several weights that read the same input. Its bytes are counted as they will be kept."""
        offsets = [self._take(weights, f"{prefix}{name}.bias") for name in names] if bias else []
        offset = (offsets[0] if len(offsets) == 1 else torch.cat(offsets)) if bias else None
        linear = self._product(weights, [f"{prefix}{name}.weight" for name in names], offset)
        self.weight_bytes += linear.nbytes
        return linear

    def _product(
        self, weights: Mapping[str, torch.Tensor], names: list[str], offset: torch.Tensor | None
    ) -> SizedLinear:
        """As the weights are given: quantised already, as rows of a file, or as tensors."""
        find = getattr(weights, "quantized", None)
        given = [None if find is None else find(name) for name in names]
        quantized = [part.to(self.device) for part in given if part is not None]
        if quantized and len(quantized) == len(names):
            return self._ops.quantized_linear(quantized, offset)
        if quantized:  # some of them only
            shapes = weight_shapes(self.spec)
            sizes = [shapes[name][0] for name in names]
            parts = [None] * len(names) if offset is None else list(offset.split(sizes))
            products = [self._product(weights, [name], part) for name, part in zip(names, parts, strict=True)]
            return JoinedLinear(products)
        if self.queue is None:
            tensors = [self._take(weights, name, count=False) for name in names]
            return self._ops.linear(tensors[0] if len(tensors) == 1 else torch.cat(tensors), offset)
        rows = [self._rows(weights, name) for name in names]
        linear: SizedLinear = self._ops.queued_linear(self.queue, rows, offset)  # type: ignore[attr-defined]
        return linear

    def _rows(self, weights: Mapping[str, torch.Tensor], name: str) -> StoredRows | torch.Tensor:
        """One matrix as it is stored, if the operations can unpack that, else as a tensor in its final dtype."""
        find = getattr(weights, "stored", None)
        stored: StoredRows | None = None if find is None else find(name)
        if stored is None or not self._ops.can_load(stored.kind, stored.columns):  # type: ignore[attr-defined]
            return self._take(weights, name, count=False)
        return stored

    def _lookup(self, embedding: torch.Tensor | SizedLinear | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """token ids int64 [T] -> rows [T, D]. A tied head that can give its own rows back is the only copy kept."""
        source = self._head if self.spec.tied_head else embedding
        rows = getattr(source, "rows", None)
        if rows is not None:
            return lambda token_ids: rows(token_ids, self.activation_dtype)
        assert isinstance(embedding, torch.Tensor)
        return lambda token_ids: F.embedding(token_ids, embedding).to(self.activation_dtype)

    def _build_layer(self, weights: Mapping[str, torch.Tensor], index: int) -> _Layer:
        spec, prefix = self.spec, f"layers.{index}."

        def norm(name: str, present: bool = True) -> torch.Tensor | None:
            return self._take(weights, f"{prefix}{name}.weight") if present else None

        attention_norm, mlp_norm = norm("attention_norm"), norm("mlp_norm")
        assert attention_norm is not None and mlp_norm is not None
        return _Layer(
            attention_norm=attention_norm,
            qkv=self._fuse(weights, prefix, ("q", "k", "v"), spec.qkv_bias),
            q_norm=norm("q_norm", spec.qk_norm),
            k_norm=norm("k_norm", spec.qk_norm),
            out=self._fuse(weights, prefix, ("out",), spec.out_bias),
            post_attention_norm=norm("post_attention_norm", spec.sandwich_norms),
            mlp_norm=mlp_norm,
            gate_up=self._fuse(weights, prefix, ("gate", "up"), spec.mlp_bias),
            down=self._fuse(weights, prefix, ("down",), spec.mlp_bias),
            post_mlp_norm=norm("post_mlp_norm", spec.sandwich_norms),
        )

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """One step. token_ids, positions int64 [T]; `attention.plan` was called. Returns hidden [T, D], normed.

        `attention` receives views with a row stride: query [T, Hq, d] may, value [T, Hkv, d] does share storage with
        the fused product.
        """
        spec, ops, eps = self.spec, self._ops, self.spec.rms_norm_eps
        residual = self._embed(token_ids)
        if spec.embedding_scale != 1.0:
            residual = residual * self._embedding_scale
        cos_sin = self._rotary(positions)
        normed = ops.rms_norm(residual, self._layers[0].attention_norm, eps)
        for index, layer in enumerate(self._layers):
            mixed = self._attend(index, layer, normed, *cos_sin[spec.rotary[index]], attention)
            if layer.post_attention_norm is not None:
                mixed = ops.rms_norm(mixed, layer.post_attention_norm, eps)
            normed, residual = ops.add_rms_norm(mixed, residual, layer.mlp_norm, eps)
            mixed = layer.down(ops.gated_activation(layer.gate_up(normed), spec.activation))
            if layer.post_mlp_norm is not None:
                mixed = ops.rms_norm(mixed, layer.post_mlp_norm, eps)
            last = index + 1 == len(self._layers)
            following = self._final_norm if last else self._layers[index + 1].attention_norm
            normed, residual = ops.add_rms_norm(mixed, residual, following, eps)
        return normed

    def _rotary(self, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """cos and sin of this step, once per kind of layer. Positions past the reserved rows make the tables grow."""
        needed = int(positions.max()) + 1 if self.device.type == "cpu" else self.spec.max_position_embeddings
        for table in self._tables:
            table.reserve(needed)
        return [table.lookup(positions) for table in self._tables]

    def _attend(
        self,
        index: int,
        layer: _Layer,
        normed: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Projections, rotation, KV write, attention and output projection: [T, D] -> [T, D]."""
        spec, tokens = self.spec, normed.shape[0]
        heads = layer.qkv(normed).view(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        q, k = self._ops.rotary(q, k, cos, sin, layer.q_norm, layer.k_norm, spec.rms_norm_eps)
        attention.write(index, k, v)
        mixed = attention.attend(index, q)
        return layer.out(mixed.reshape(tokens, spec.num_heads * spec.head_dim))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] as `forward` returned it -> raw logits, float32 [N, V]."""
        logits = self._head(hidden).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.inference_mode()
    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """hidden [N, D] -> first index int64 [N] and value float32 [N] of each row's largest logit, a NaN included.

        What `logits` and an argmax give, without the logits; None where the product cannot do that. A soft cap may
        round two logits to one, which would move a tie: then it is left to the logits.
        """
        argmax = getattr(self._head, "argmax", None)
        return None if argmax is None or self.spec.logit_softcap is not None else argmax(hidden)

    def linears(self) -> dict[str, Linear]:
        """The products of all layers by canonical fused name: "layers.3.qkv", "….out", "….gate_up", "….down"."""
        return {
            f"layers.{index}.{name}": getattr(layer, name)
            for index, layer in enumerate(self._layers)
            for name in LAYER_LINEARS
        }

    def replace_linear(self, name: str, linear: Linear) -> None:
        """Use `linear` where `linears()[name]` was: same input, same output width. Raises KeyError for another name."""
        match name.split("."):
            case ["layers", index, part] if (
                part in LAYER_LINEARS and index.isdecimal() and int(index) < len(self._layers)
            ):
                setattr(self._layers[int(index)], part, linear)
            case _:
                raise KeyError(f"{name!r}: no product of this model; known: layers.<index>.<{'|'.join(LAYER_LINEARS)}>")

    def parameter_count(self) -> int:
        """Numbers in the weights; a tied head counts once."""
        total = 0
        for shape in weight_shapes(self.spec).values():
            size = 1
            for side in shape:
                size *= side
            total += size
        return total
