"""A two-layer random decoder with just enough of a model to run plans, and a dense double of it for comparison."""

from __future__ import annotations

import torch

from octavo.kernels.interface import AttentionBackend
from octavo.models.spec import ModelSpec


class FakeDecoder:
    """Random weights, additive positions, no norms. `calls` counts rows that went through the head."""

    def __init__(self, spec: ModelSpec, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.spec = spec
        self.head_rows: list[int] = []
        self._sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        size = spec.hidden_size
        self._embed = torch.randn(spec.vocab_size, size, generator=g)
        self._qkv = [torch.randn(size, sum(self._sizes), generator=g) / size**0.5 for _ in range(spec.num_layers)]
        self._out = [torch.randn(self._sizes[0], size, generator=g) / size**0.5 for _ in range(spec.num_layers)]

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        spec = self.spec
        # A row at a time, so that the fake's own products do not depend on the batch.
        h = self._embed[token_ids] + torch.sin(positions.float()[:, None] * torch.arange(1, spec.hidden_size + 1))
        for layer in range(spec.num_layers):
            product = torch.cat([row @ self._qkv[layer] for row in h.split(1)])
            q, k, v = product.split(self._sizes, -1)
            key_shape = (-1, spec.num_kv_heads, spec.head_dim)
            attention.write(layer, k.reshape(key_shape), v.reshape(key_shape))
            mixed = attention.attend(layer, q.reshape(-1, spec.num_heads, spec.head_dim)).reshape(len(h), -1)
            h = torch.tanh(h + torch.cat([row @ self._out[layer] for row in mixed.split(1)]))
        return h

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.head_rows.append(len(hidden))
        return 3 * torch.cat([row @ self._embed.T for row in hidden.split(1)])


class DenseAttention:
    """An `AttentionBackend` for one sequence computed whole from position 0: no blocks, no tables."""

    name = "dense"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._kv: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._kv[layer] = (key, value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        key, value = (t.repeat_interleave(self._spec.num_heads // self._spec.num_kv_heads, 1) for t in self._kv[layer])
        t = torch.arange(len(query))
        seen = t[:, None] >= t
        window = self._spec.windows[layer]
        if window is not None:
            seen &= t[:, None] - t < window
        scores = torch.einsum("qhd,khd->hqk", query, key) * self._spec.scale
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def dense_logits(decoder: FakeDecoder, tokens: list[int]) -> torch.Tensor:
    """float32 [len(tokens), V] of a sequence computed at once, without any of the engine."""
    counted = decoder.head_rows
    decoder.head_rows = []
    ids = torch.tensor(tokens)
    result = decoder.logits(decoder.forward(ids, torch.arange(len(tokens)), DenseAttention(decoder.spec)))
    decoder.head_rows = counted
    return result
