"""A transformers model in the place of the decoder: its own code computes, Octavo's paged attention attends.

All tokens of a step go through the model as one row of T tokens with their positions; its attention layers call
`attention` below, which writes keys and values into blocks and attends through the tables. What comes above the
hidden states (head, scales, soft caps) is run by the model's own class too, over hidden states handed to it. The
library keeps no cache and makes no mask.

Linear layers go through `Ops` where that is faster (the native kernels), so a row's bits do not depend on the batch
there either.

Invariant: every forward pass makes exactly the attention calls that were found when the model was examined, in their
order; anything else is an error, never a silent answer. Before anything is served,
`check_parity` has shown that the answer is that of the library's own attention, and `check_rows` that a row's result
depends on its token, its position and what attention returns, and on nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from octavo.errors import InternalError, ModelError
from octavo.kernels.ops import Linear, Ops
from octavo.models.spec import ModelSpec
from octavo.models.transformers_probe import NAME, AttentionCall, Examined

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBackend

#: Share of the weights outside linear layers and embeddings up to which 16-bit weights run with wide activations.
_SMALL = 0.02


class _Pass:
    """The forward pass under way: whose attention it is and how many calls it has made."""

    def __init__(self, spec: ModelSpec, calls: tuple[AttentionCall, ...]) -> None:
        self.spec, self.calls = spec, calls
        self.backend: Any = None
        self.made = 0

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [1, Hq, T, d], key [1, Hkv, T, d], value [1, Hkv, T, dv] -> [1, T, Hq, dv]."""
        index, spec = self.made, self.spec
        if index >= len(self.calls):
            raise InternalError(f"the model asks for attention more often than when it was examined ({index} times)")
        self.made += 1
        call = self.calls[index]
        if call.scale != spec.scale:
            query = query * (call.scale / spec.scale)
        q, k, v = (_rows(x, spec.head_dim) for x in (query, key, value))
        self.backend.write(index, k, v)
        mixed: torch.Tensor = self.backend.attend(index, q)
        return mixed[None, :, :, : call.value_dim].contiguous()


def _rows(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[1, H, T, d] -> contiguous [T, H, head_dim]; zeros behind a smaller d change no score and no sum."""
    rows = x[0].transpose(0, 1)
    return (rows if rows.shape[2] == head_dim else F.pad(rows, (0, head_dim - rows.shape[2]))).contiguous()


def attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    """What transformers calls under the name "octavo". The decoder has left its pass on every attention layer."""
    return module.octavo_pass.attend(query, key, value), None  # type: ignore[operator, union-attr]


class _OpsLinear(nn.Module):
    """A linear layer computed by `Ops`, over a weight packed once.

    Some models ask a layer for its weight's dtype or device; what is left here tells them, and has no numbers.
    """

    def __init__(self, product: Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.product = product
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        return self.product(rows).view(*x.shape[:-1], -1)


class _Rows(nn.Module):
    """An embedding that reads the rows of the tied head."""

    def __init__(self, product: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.product, self.dtype = product, dtype

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., D]."""
        rows: torch.Tensor = self.product.rows(token_ids.reshape(-1), self.dtype)
        return rows.view(*token_ids.shape, -1)


class _Given(nn.Module):
    """In the place of the model below the head: hands over hidden states, in the same kind of output."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: torch.Tensor | None = None
        self.kind: type | None = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return (self.hidden,) if self.kind is None else self.kind(last_hidden_state=self.hidden)


class TransformersDecoder:
    """The interface of `models.decoder.Decoder` over a loaded transformers model. See the module.

    Raises `ModelError` when one of the checks fails, see `check_parity` and `check_rows`.
    """

    def __init__(
        self, model: Any, spec: ModelSpec, examined: Examined, ops: Ops, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = torch.device(device)
        self.queue: Any = None
        self._ops = ops
        self._model = model
        self._pass = _Pass(spec, examined.calls)
        expected = self._plain_logits()
        model.set_attn_implementation(NAME)
        for module in examined.modules:
            module.octavo_pass = self._pass  # type: ignore[assignment]
        self._body: Any = model.get_submodule(examined.body)
        self._given = _Given()
        self._count = sum(p.numel() for p in model.parameters())
        self._linears: dict[str, Linear] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        with torch.inference_mode():
            called = self._check_head(examined.body)
            packed_bytes = self._pack(called)
        self.activation_dtype: torch.dtype = self._body_dtype
        kept = {id(p): p for module in (model, self._body) for p in module.parameters()}
        self.weight_bytes = packed_bytes + sum(p.numel() * p.element_size() for p in kept.values())
        self.check_parity(expected)
        self.check_rows()

    def finish_loading(self) -> None:
        """Nothing is queued: the library has loaded everything."""

    def parameter_count(self) -> int:
        """Numbers in the weights; a tied head counts once."""
        return self._count

    # -- a step ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """One step. token_ids, positions int64 [T]; `attention.plan` was called. Returns hidden [T, D]."""
        self._pass.backend, self._pass.made = attention, 0
        try:
            out = self._body(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        finally:
            self._pass.backend = None
        if self._pass.made != len(self._pass.calls):
            raise InternalError(
                f"{self._pass.made} of {len(self._pass.calls)} attention layers went through paged attention"
            )
        hidden: torch.Tensor = out[0] if isinstance(out, tuple) else out.last_hidden_state
        return hidden[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [N, D] as `forward` returned it -> raw logits, float32 [N, V], by the model's own class."""
        self._given.hidden = hidden[None]
        try:
            ids = torch.zeros((1, hidden.shape[0]), dtype=torch.long, device=hidden.device)
            out = self._model(input_ids=ids, use_cache=False)
        finally:
            self._given.hidden = None
        logits: torch.Tensor = out.logits[0]
        return logits.float()

    # -- linear layers ---------------------------------------------------------------------------------------------

    def linears(self) -> dict[str, Linear]:
        """Name in the library -> product of every linear layer below the head: "model.layers.3.self_attn.q_proj", …"""
        return dict(self._linears)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """(outputs, inputs) of one of `linears()`."""
        return self._shapes[name]

    def replace_linear(self, name: str, linear: Linear) -> None:
        """Put another product in the place of one of `linears()`."""
        if name not in self._linears:
            raise KeyError(name)
        path, _, last = name.removeprefix(self._prefix).rpartition(".")
        setattr(self._body.get_submodule(path) if path else self._body, last, _OpsLinear(linear, self.activation_dtype))
        self._linears[name] = linear

    # -- before serving --------------------------------------------------------------------------------------------

    def _check_head(self, body: str) -> list[str]:
        """Cut the model in two below its head, and see that the halves give the same logits as the whole did.

        Returns the names of the linear layers that were called (and not only had their weight read).
        """
        called: list[str] = []
        handles = [
            module.register_forward_hook(lambda *_, name=name: called.append(name))
            for name, module in self._model.named_modules()
            if type(module) is nn.Linear
        ]
        ids = torch.tensor([[1, 2, 3]], device=self.device) % self.spec.vocab_size
        kinds: list[type] = []
        handles.append(self._body.register_forward_hook(lambda _m, _a, out: kinds.append(type(out))))
        self._pass.backend, self._pass.made = _Local(self.spec), 0
        whole = self._model(input_ids=ids, position_ids=torch.arange(3, device=self.device)[None], use_cache=False)
        for handle in handles:
            handle.remove()
        self._given.kind = None if issubclass(kinds[0], tuple) else kinds[0]
        parent, _, last = body.rpartition(".")
        setattr(self._model.get_submodule(parent) if parent else self._model, last, self._given)
        self._prefix = f"{body}."
        hidden = self.forward(ids[0], torch.arange(3, device=self.device), _Local(self.spec))  # type: ignore[arg-type]
        if _distance(self.logits(hidden), whole.logits[0].float()) > 1e-3:
            raise ModelError(f"{type(self._model).__name__}: its head needs more than the last hidden states")
        self._body_dtype = hidden.dtype
        return list(dict.fromkeys(called))

    def _pack(self, called: list[str]) -> int:
        """Hand linear layers to the native kernels; with 16-bit weights only if hardly anything else has weights."""
        names = [name for name in called if self._module(name) is not None]
        for name in names:
            module = self._module(name)
            if name.startswith(self._prefix):
                self._linears[name] = module
                self._shapes[name] = (module.out_features, module.in_features)
        wide: torch.dtype | None = getattr(self._ops, "activation_dtype", None)
        if wide is None:
            return 0
        if wide != self.dtype and not self._widen(names, wide):
            return 0
        total = 0
        for name in names:
            module = self._module(name)
            assert isinstance(module, nn.Linear)
            product = self._ops.linear(module.weight.detach(), module.bias)
            total += module.weight.numel() * module.weight.element_size()
            self._share_rows(module.weight, product)
            self._set(name, _OpsLinear(product, self._body_dtype))
            if name in self._linears:
                self._linears[name] = product
        return total

    def _share_rows(self, weight: torch.Tensor, product: Any) -> None:
        """A plain embedding tied to a product that can give its rows back needs no copy of its own."""
        embedding = self._body.get_input_embeddings()
        if type(embedding) is nn.Embedding and embedding.weight is weight and hasattr(product, "rows"):
            self._body.set_input_embeddings(_Rows(product, self._body_dtype))

    def _widen(self, names: list[str], wide: torch.dtype) -> bool:
        """Everything but linear layers and the embedding to `wide`, if that is little; the embedding's rows too."""
        embedding = self._body.get_input_embeddings()
        linear = {id(self._module(name).weight) for name in names} | {id(embedding.weight)}
        rest = [p for m in (self._body, self._model) for p in m.parameters() if id(p) not in linear]
        if sum(p.numel() for p in rest) > _SMALL * self._count:
            return False
        for p in rest:
            p.data = p.data.to(wide)
        for module in (self._body, self._model):
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(wide)
        embedding.register_forward_hook(lambda _m, _a, out: out.to(wide))
        self._body_dtype = wide
        return True

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        root, rest = (
            (self._body, name.removeprefix(self._prefix)) if name.startswith(self._prefix) else (self._model, name)
        )
        path, _, last = rest.rpartition(".")
        return (root.get_submodule(path) if path else root), last

    def _module(self, name: str) -> Any:
        owner, last = self._owner(name)
        return getattr(owner, last, None)

    def _set(self, name: str, module: nn.Module) -> None:
        owner, last = self._owner(name)
        setattr(owner, last, module)

    def _some_ids(self) -> torch.Tensor:
        return torch.arange(1, 9, device=self.device) % self.spec.vocab_size

    @torch.inference_mode()
    def _plain_logits(self) -> torch.Tensor:
        """float32 [8, V] of a few tokens, by the library alone."""
        self._model.set_attn_implementation("eager")
        ids = self._some_ids()
        logits: torch.Tensor = self._model(input_ids=ids[None], use_cache=False).logits[0]
        return logits.float()

    @torch.inference_mode()
    def check_parity(self, expected: torch.Tensor) -> None:
        """The logits of a few tokens are `expected`, those of the library's own attention. Raises `ModelError`."""
        ids = self._some_ids()
        hidden = self.forward(ids, torch.arange(len(ids), device=self.device), _Dense(self.spec))  # type: ignore[arg-type]
        distance = _distance(self.logits(hidden), expected)
        if not distance <= (1e-3 if self.dtype == torch.float32 else 0.1):
            raise ModelError(
                f"{type(self._model).__name__}: with paged attention its logits differ from the library's own by "
                f"{distance:.1e} of the largest: its attention does something that nothing here knows of"
            )

    @torch.inference_mode()
    def check_rows(self) -> None:
        """Two tokens in two batches: other neighbours, another order, one neighbour as far back as positions go.

        With attention that gives every token its own value, all that layers compute for the two must be the same.
        What is not (a convolution, a recurrent state, positions counted in the batch, frequencies that follow the
        longest row) would be wrong in a batch of several requests. Raises `ModelError`.
        """
        far, vocabulary = self.spec.max_position_embeddings - 1, self.spec.vocab_size
        one = self._watched([1, 2, 3], [1, 4, min(9, far)], vocabulary)
        two = self._watched([4, 2, 1], [far, 4, 1], vocabulary)
        tolerance = 1e-3 if self.activation_dtype == torch.float32 and self.dtype == torch.float32 else 5e-2
        for a, b in zip(one, two, strict=True):
            if max(_distance(a[0], b[2]), _distance(a[1], b[1])) > tolerance:
                raise ModelError(
                    f"{type(self._model).__name__}: what it computes for a token depends on the other tokens of the "
                    "batch beyond attention (another state than keys and values, its own count of positions, or rotary "
                    "frequencies that follow the longest sequence); it cannot run in shared batches"
                )

    def _watched(self, ids: list[int], positions: list[int], vocabulary: int) -> list[torch.Tensor]:
        local = _Local(self.spec)
        where = self.device
        tokens = torch.tensor(ids, device=where) % vocabulary
        hidden = self.forward(tokens, torch.tensor(positions, device=where), local)  # type: ignore[arg-type]
        return [*local.seen, hidden]


class _Dense:
    """Causal attention over the tokens of one pass, by the definition, for `check_parity`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key, value [T, Hkv, d]."""
        groups = self._spec.num_heads // self._spec.num_kv_heads
        self._key, self._value = (x.float().repeat_interleave(groups, dim=1) for x in (key, value))

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, Hq, d] -> the same."""
        spec = self._spec
        scores = torch.einsum("qhd,khd->hqk", query.float(), self._key) * spec.scale
        if (cap := spec.attention_softcap) is not None:
            scores = torch.tanh(scores / cap) * cap
        place = torch.arange(len(query), device=query.device)
        behind = place[:, None] - place[None]
        window = spec.windows[layer]
        hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, self._value).to(query.dtype)


class _Local:
    """Attention that gives each token its own value; remembers what it was given."""

    def __init__(self, spec: ModelSpec) -> None:
        self._groups = spec.num_heads // spec.num_kv_heads
        self.seen: list[torch.Tensor] = []

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.seen += [key.flatten(1), value.flatten(1)]
        self._value = value

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        self.seen.append(query.flatten(1))
        return self._value.repeat_interleave(self._groups, dim=1)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    a, b = a.float(), b.float()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
