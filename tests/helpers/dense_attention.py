"""A dense attention backend for one sequence: keys and values in plain growing tensors, no blocks.

Written from the definition, apart from the engine's backends, so that it can judge decoders on its own. It has the
`AttentionBackend` methods a decoder calls; there is nothing to plan.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from octavo.models.decoder import Decoder
from octavo.models.spec import ModelSpec


class DenseAttention:
    """Causal attention of one sequence whose tokens come in order, in any number of chunks."""

    name = "dense"

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._keys: dict[int, torch.Tensor] = {}
        self._values: dict[int, torch.Tensor] = {}

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for store, new in ((self._keys, key), (self._values, value)):
            store[layer] = torch.cat((store[layer], new)) if layer in store else new.clone()

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        spec = self._spec
        keys, values = self._keys[layer].float(), self._values[layer].float()
        total, rows, repeat = len(keys), len(query), spec.num_heads // spec.num_kv_heads
        keys, values = keys.repeat_interleave(repeat, dim=1), values.repeat_interleave(repeat, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * spec.scale
        if spec.attention_softcap is not None:
            scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
        behind = torch.arange(total - rows, total)[:, None] - torch.arange(total)[None]
        hidden = behind < 0
        if (window := spec.windows[layer]) is not None:
            hidden |= behind >= window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)

    def plan(self, batch: Any) -> None:
        raise AssertionError("a dense sequence needs no plan")

    def copy_blocks(self, pairs: Any) -> None:
        raise AssertionError("a dense sequence has no blocks")


def run_chunks(decoder: Decoder, token_ids: list[int], chunk: int) -> torch.Tensor:
    """Logits float32 [T, V] of a prompt computed `chunk` tokens at a time."""
    attention, parts = DenseAttention(decoder.spec), []
    for first in range(0, len(token_ids), chunk):
        ids = torch.tensor(token_ids[first : first + chunk])
        hidden = decoder.forward(ids, torch.arange(first, first + len(ids)), attention)
        parts.append(decoder.logits(hidden))
    return torch.cat(parts)


def greedy(decoder: Decoder, token_ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens: one prefill, then one token at a time."""
    attention, out = DenseAttention(decoder.spec), []
    ids, position = torch.tensor(token_ids), 0
    for _ in range(count):
        hidden = decoder.forward(ids, torch.arange(position, position + len(ids)), attention)
        position += len(ids)
        out.append(int(decoder.logits(hidden[-1:])[0].argmax()))
        ids = torch.tensor(out[-1:])
    return out
