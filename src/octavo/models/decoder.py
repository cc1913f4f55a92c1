"""The one decoder: a transformer with causal attention, driven by a `ModelSpec`.

It knows neither blocks nor requests: tokens of all sequences of a step come as one run of T rows, and the attention
backend, planned beforehand, knows which rows belong together. Weights arrive under the names of `models/names.py`,
are fused (q/k/v, gate/up) and handed to `Ops`; the decoder keeps no second copy. The parts of a layer are in
`models/layer.py` and `models/moe.py`.

Invariant: a row's result depends on its token, its position and what the attention backend returns for it, never on
which other rows are in the batch (up to the rounding of the matrix products of the `Ops` in use).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from octavo.kernels.ops import Linear, Ops, SizedLinear
from octavo.models.layer import (
    MLP,
    GatedMLP,
    HeadNorms,
    Layer,
    LayerNorm,
    NoNorm,
    Norm,
    PlainMLP,
    ProjectionNorms,
    RMSNorm,
)
from octavo.models.moe import ExpertList, Experts, MixtureOfExperts, StackedExperts
from octavo.models.names import num_parameters
from octavo.models.rotary import RotaryTable
from octavo.models.spec import ModelSpec
from octavo.models.stack import make_stack
from octavo.models.weight_source import WeightSource

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBackend
    from octavo.kernels.layer_stack import LayerStack

CosSin = tuple[torch.Tensor, torch.Tensor]


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
        self._ops = ops
        self._stack: LayerStack | str | None = None  # or why there is none; None: not asked yet
        self.queue: Any = ops.load_queue() if hasattr(ops, "load_queue") else None
        source = WeightSource(weights, ops, spec, dtype, self.device, self.queue)
        with torch.inference_mode():
            # The head gives its rows back: no other copy is made.
            quantizes = source.quantizes("embedding.weight")
            shared = spec.tied_head and (self.queue is not None or quantizes)
            embedding = None if shared or quantizes else source.take("embedding.weight")
            self._layers = [self._build_layer(source, index) for index in range(spec.num_layers)]
            self._final_norm = self._norm(source, "final_norm")
            if embedding is not None and spec.tied_head:
                self._head = ops.linear(embedding)
            else:
                self._head = source.fuse("", ("embedding" if spec.tied_head else "head",), False)
            apart = quantizes and not spec.tied_head
            table = source.fuse("", ("embedding",), False) if apart else embedding
            self._embed = self._lookup(table)
            self._places = source.take("positions.weight") if spec.learned_positions else None
            self._tables = [RotaryTable(rotary, spec.head_dim, self.device) for rotary in spec.rotaries]
            # Rounded to the activation dtype once, as the Gemma reference does.
            self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.activation_dtype, device=self.device)
        self.weight_bytes, self.fixed_point = source.num_bytes, source.fixed_point
        if not defer:
            self.finish_loading()

    def finish_loading(self) -> None:
        """Fill what is still queued, on all threads. A thread that helps must be joined afterwards."""
        if self.queue is not None:
            self.queue.run(True)
            self.queue.check()
            self.queue = None

    def _lookup(self, embedding: torch.Tensor | SizedLinear | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """token ids int64 [T] -> rows [T, D]. A tied head that can give its own rows back is the only copy kept."""
        source = self._head if self.spec.tied_head else embedding
        rows = getattr(source, "rows", None)
        if rows is not None:
            return lambda token_ids: rows(token_ids, self.activation_dtype)
        assert isinstance(embedding, torch.Tensor)
        return lambda token_ids: F.embedding(token_ids, embedding).to(self.activation_dtype)

    def _norm(self, source: WeightSource, name: str) -> Norm:
        spec = self.spec
        weight = source.take(f"{name}.weight")
        if spec.norm == "rms":
            return RMSNorm(self._ops, weight, spec.rms_norm_eps)
        bias = source.take(f"{name}.bias") if spec.norm_bias else None
        return LayerNorm(self._ops, weight, bias, spec.rms_norm_eps)

    def _build_layer(self, source: WeightSource, index: int) -> Layer:
        spec, prefix = self.spec, f"layers.{index}."

        def norm(name: str, present: bool) -> Norm | None:
            return self._norm(source, f"{prefix}{name}") if present else None

        q_norm, k_norm, head_norms = self._head_norms(source, prefix)
        return Layer(
            attention_norm=norm("attention_norm", spec.input_norms) or NoNorm(),
            qkv=source.fuse(prefix, ("q", "k", "v"), spec.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            head_norms=head_norms,
            rotary=spec.rotary[index],
            out=source.fuse(prefix, ("out",), spec.out_bias),
            post_attention_norm=norm("post_attention_norm", spec.sandwich_norms),
            mlp_norm=None if spec.parallel == "one_norm" else norm("mlp_norm", spec.input_norms) or NoNorm(),
            mlp=self._build_mlp(source, index),
            post_mlp_norm=norm("post_mlp_norm", spec.sandwich_norms),
            parallel=spec.parallel != "no",
        )

    def _head_norms(
        self, source: WeightSource, prefix: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, ProjectionNorms | HeadNorms | None]:
        """Norms of q and k: the weights for `ops.rotary`, or an operation of their own before it."""
        spec = self.spec
        if not spec.qk_norm:
            return None, None, None
        if spec.qk_norm_kind == "each_head":
            q, k = (
                torch.stack([source.take(f"{prefix}heads.{head}.{name}.weight") for head in range(heads)])
                for name, heads in (("q_norm", spec.num_heads), ("k_norm", spec.num_kv_heads))
            )
            return None, None, HeadNorms(self._ops, q, k, spec.rms_norm_eps)
        q, k = (source.take(f"{prefix}{name}.weight") for name in ("q_norm", "k_norm"))
        if spec.qk_norm_kind == "projection":
            return None, None, ProjectionNorms(self._ops, q, k, spec.rms_norm_eps)
        return q, k, None

    def _build_mlp(self, source: WeightSource, index: int) -> MLP | MixtureOfExperts:
        prefix, experts = f"layers.{index}.", self.spec.experts
        if experts is None or index not in experts.layers:
            return self._mlp(source, prefix)

        def router(name: str) -> Linear:
            return self._ops.dense_linear(source.take(f"{prefix}{name}.weight"))

        shared = experts.shared_intermediate_size > 0
        return MixtureOfExperts(
            router("router"),
            self._build_experts(source, prefix),
            experts.count,
            experts.per_token,
            experts.normalized,
            self._mlp(source, f"{prefix}shared.") if shared else None,
            router("shared_router") if shared else None,
        )

    def _mlp(self, source: WeightSource, prefix: str) -> MLP:
        spec, ops = self.spec, self._ops
        down = source.fuse(prefix, ("down",), spec.mlp_bias)
        if spec.gated_mlp:
            return GatedMLP(ops, source.fuse(prefix, ("gate", "up"), spec.mlp_bias), down, spec.activation)
        return PlainMLP(ops, source.fuse(prefix, ("up",), spec.mlp_bias), down, spec.activation)

    def _build_experts(self, source: WeightSource, prefix: str) -> Experts:
        """A product for each expert; on a GPU one grouped product, if weights and library allow it."""
        spec, experts = self.spec, self.spec.experts
        assert experts is not None
        inner, names = experts.intermediate_size, [f"{prefix}experts.{e}." for e in range(experts.count)]
        packed = source.quantizes(f"{names[0]}up.weight")
        fits = StackedExperts.fits(self.dtype, spec.hidden_size, inner) and spec.gated_mlp and not spec.mlp_bias
        if not StackedExperts.helps(self.device) or packed or not fits:
            return ExpertList([self._mlp(source, name) for name in names])
        gate_up = torch.empty(experts.count, 2 * inner, spec.hidden_size, dtype=self.dtype, device=self.device)
        down = torch.empty(experts.count, spec.hidden_size, inner, dtype=self.dtype, device=self.device)
        for e, name in enumerate(names):
            for part, target in (("gate", gate_up[e, :inner]), ("up", gate_up[e, inner:]), ("down", down[e])):
                target.copy_(source.take(f"{name}{part}.weight"))
        return StackedExperts(self._ops, gate_up, down, spec.activation)

    @property
    def graph_safe(self) -> bool:
        """Whether a step asks the device for nothing (single experts ask which of them have how many tokens)."""
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, MixtureOfExperts)]
        return not any(isinstance(mixture.experts, ExpertList) for mixture in mixtures)

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """One step. token_ids, positions int64 [T]; `attention.plan` was called. Returns hidden [T, D], normed.

        Where all layers run in one call, the last one computes only what the wanted tokens need
        (`AttentionBatch.wanted`): the keys and values of all, and hidden states that are NaN for the others.

        `attention` receives views with a row stride: query [T, Hq, d] may, value [T, Hkv, d] does share storage with
        the fused product.
        """
        residual = self._embedded(token_ids, positions)
        stack = self._layer_stack()
        if not isinstance(stack, str) and stack.serves(attention):
            hidden = stack.run(residual, positions, [table.cos_sin for table in self._tables], attention)
            if hidden is not None:
                return hidden
            self._reserve(positions)
            return self.forward(token_ids, positions, attention)
        self._reserve(positions)
        cos_sin = [table.lookup(positions) for table in self._tables]
        layers, scale = self._layers, self.spec.residual_scale
        normed = layers[0].attention_norm(residual)
        for index, layer in enumerate(layers):
            following = self._final_norm if index + 1 == len(layers) else layers[index + 1].attention_norm
            mixed = self._attend(index, layer, normed, cos_sin, attention)
            if layer.parallel:
                mixed = mixed + layer.mlp(normed if layer.mlp_norm is None else layer.mlp_norm(residual))
                normed, residual = following.add(mixed, residual)
                continue
            if layer.post_attention_norm is not None:
                mixed = layer.post_attention_norm(mixed)
            if scale != 1.0:
                mixed = mixed * scale
            assert layer.mlp_norm is not None
            normed, residual = layer.mlp_norm.add(mixed, residual)
            mixed = layer.mlp(normed)
            if layer.post_mlp_norm is not None:
                mixed = layer.post_mlp_norm(mixed)
            if scale != 1.0:
                mixed = mixed * scale
            normed, residual = following.add(mixed, residual)
        return normed

    def _layer_stack(self) -> LayerStack | str:
        """All layers in one call, or why not; made at the first step, of the products there are."""
        if self._stack is None:
            self._stack = make_stack(self._ops, self.spec, self._layers, self._final_norm)
        return self._stack

    def why_no_stack(self, attention: AttentionBackend) -> str:
        """Why a step with this backend goes operation by operation; empty where all layers run in one call."""
        stack = self._layer_stack()
        if isinstance(stack, str):
            return stack
        return "" if stack.serves(attention) else f"{type(attention).__name__} has no such call"

    def _embedded(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding [T, D], scaled, with learned positions added where the model has them."""
        rows = self._embed(token_ids)
        if self.spec.embedding_scale != 1.0:
            rows.mul_(self._embedding_scale)  # they are nobody else's
        if self._places is not None:
            rows = rows + F.embedding(positions + self.spec.position_offset, self._places).to(rows.dtype)
        return rows

    def _reserve(self, positions: torch.Tensor) -> None:
        """Positions past the rows of the tables of cos and sin make those grow."""
        if not self._tables:
            return
        needed = int(positions.max()) + 1 if self.device.type == "cpu" else self.spec.max_position_embeddings
        for table in self._tables:
            table.reserve(needed)

    def _attend(
        self, index: int, layer: Layer, normed: torch.Tensor, cos_sin: list[CosSin], attention: AttentionBackend
    ) -> torch.Tensor:
        """Projections, rotation, KV write, attention and output projection: [T, D] -> [T, D]."""
        spec, tokens = self.spec, normed.shape[0]
        heads = layer.qkv(normed).view(tokens, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.head_norms is not None:
            q, k = layer.head_norms(q, k)
        rotate_and_write = getattr(attention, "rotate_and_write", None)  # in one launch, where the backend can
        if layer.rotary is not None and rotate_and_write is not None:
            turn = cos_sin[layer.rotary]
            q = rotate_and_write(index, q, k, v, *turn, layer.q_norm, layer.k_norm, spec.rms_norm_eps)
        else:
            if layer.rotary is not None:
                q, k = self._ops.rotary(q, k, *cos_sin[layer.rotary], layer.q_norm, layer.k_norm, spec.rms_norm_eps)
            elif layer.q_norm is not None and layer.k_norm is not None:
                q, k = (self._ops.rms_norm(x, w, spec.rms_norm_eps) for x, w in ((q, layer.q_norm), (k, layer.k_norm)))
            attention.write(index, k, v)
        mixed = attention.attend(index, q)
        return layer.out(mixed.reshape(tokens, spec.num_heads * spec.head_dim))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] as `forward` returned it -> raw logits, float32 [N, V]."""
        logits = self._head(hidden).float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    @torch.inference_mode()
    def best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """hidden [N, D] -> first index int64 [N] and value float32 [N] of each row's largest logit, a NaN included.

        What `logits` and an argmax give, without the logits; None where the product cannot do that. A soft cap or a
        scale may round two logits to one, which would move a tie: then it is left to the logits.
        """
        exact = self.spec.logit_softcap is None and self.spec.logit_scale == 1.0
        argmax = getattr(self._head, "argmax", None) if exact else None
        return None if argmax is None else argmax(hidden)

    def screen_head(self) -> str:
        """From now on `best` looks at a small copy of the output head first; the same results. Or why it cannot."""
        if self.spec.logit_softcap is not None or self.spec.logit_scale != 1.0:
            return "its logits are capped or scaled"
        screen = getattr(self._head, "screen", None)
        if screen is None:
            return "only the native CPU kernels can"
        before = self._head.nbytes
        why: str = screen()
        self.weight_bytes += self._head.nbytes - before
        return why

    def linears(self) -> dict[str, Linear]:
        """The products that every token goes through, by canonical fused name.

        "layers.3.qkv", "….out", "….gate_up" (or "….up" without a gate), "….down"; in layers with experts
        "….shared.gate_up" and "….shared.down" if there is a shared one. Single experts are not listed: they see some
        of the rows, sorted their own way.
        """
        return {name: getattr(owner, part) for name, (owner, part) in self._owners().items()}

    def replace_linear(self, name: str, linear: Linear) -> None:
        """Use `linear` where `linears()[name]` was: same input, same output width. Raises KeyError for another name."""
        owners = self._owners()
        if name not in owners:
            known = sorted({known.split(".", 2)[2] for known in owners})
            raise KeyError(f"{name!r}: no product of this model; known: layers.<index>.<{'|'.join(known)}>")
        owner, part = owners[name]
        setattr(owner, part, linear)
        self._stack = None  # it holds the product that was there

    def _owners(self) -> dict[str, tuple[Any, str]]:
        """Name of a product -> the object that holds it, and its attribute."""
        found: dict[str, tuple[Any, str]] = {}
        for index, layer in enumerate(self._layers):
            found.update({f"layers.{index}.{part}": (layer, part) for part in ("qkv", "out")})
            shared = isinstance(layer.mlp, MixtureOfExperts)
            mlp = layer.mlp.shared if isinstance(layer.mlp, MixtureOfExperts) else layer.mlp
            if mlp is not None:
                place = f"layers.{index}.{'shared.' if shared else ''}"
                found.update({f"{place}{part}": (mlp, part) for part in mlp.linears})
        return found

    def parameter_count(self) -> int:
        """Numbers in the weights; a tied head counts once."""
        return num_parameters(self.spec)
