"""What a format costs in quality: a model's next-token distributions against those of the same model without it.

The text goes through the decoder once per candidate, in chunks, each candidate over a KV cache of its own; the first
candidate is what the others are compared with, position by position. No engine, no sampling: the numbers are exact and
repeatable. Used by `octavo bench quantization` and by the tests that hold the formats to their promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import build_layout
from octavo.kernels.interface import AttentionBackend, AttentionBatch, KVCache, make_backend
from octavo.runner.kv_store import KVStore

if TYPE_CHECKING:
    from octavo.models.load import AnyDecoder
    from octavo.models.spec import ModelSpec

_BLOCK = 16


@dataclass
class Quality:
    """One candidate over the text. cosines: of its logits with the first candidate's, per position."""

    losses: list[float] = field(default_factory=list)  # natural logarithm, per predicted token
    divergences: list[float] = field(default_factory=list)  # KL(first || this), nats
    cosines: list[float] = field(default_factory=list)
    agreements: int = 0  # positions with the same most likely token as the first candidate

    @property
    def perplexity(self) -> float:
        return math.exp(sum(self.losses) / len(self.losses))

    @property
    def mean_cosine(self) -> float:
        return sum(self.cosines) / len(self.cosines)

    @property
    def worst_cosine(self) -> float:
        return min(self.cosines)

    @property
    def divergence(self) -> float:
        return sum(self.divergences) / len(self.divergences)

    @property
    def agreement(self) -> float:
        return self.agreements / len(self.cosines)


class Candidate:
    """A decoder over a KV cache of its own, filled as the text goes through."""

    def __init__(
        self,
        decoder: AnyDecoder,
        spec: ModelSpec,
        length: int,
        *,
        kv_dtype: str = "auto",
        dtype: torch.dtype = torch.float32,
        backend: str = "auto",
        wrap: Callable[[AttentionBackend], AttentionBackend] = lambda inner: inner,
    ) -> None:
        """dtype: of keys and values if kv_dtype is "auto". wrap: may stand between decoder and attention."""
        per_token = kv_bytes_per_token_layer(
            kv_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=dtype.itemsize
        )
        layout = build_layout(
            spec.windows, block_size=_BLOCK, bytes_per_token_layer=per_token, hybrid=False, kv_dtype=kv_dtype
        )
        blocks = layout.blocks_for(length)
        cache: KVCache = KVStore.allocate(layout, spec, blocks, dtype=dtype, device=decoder.device).cache
        self._decoder = decoder
        self._table = torch.arange(blocks, dtype=torch.int32, device=decoder.device)[None]
        self.attention = wrap(make_backend(backend, cache, spec))

    def logits(self, token_ids: Sequence[int], start: int) -> torch.Tensor:
        """float32 [n, vocabulary] for the n tokens at positions start, start + 1, …; earlier ones were given before."""
        n, device = len(token_ids), self._decoder.device
        positions = torch.arange(start, start + n, device=device)
        self.attention.plan(
            AttentionBatch(
                query_start=torch.tensor([0, n], dtype=torch.int32, device=device),
                context_len=torch.tensor([start + n], dtype=torch.int32, device=device),
                block_tables=[self._table],
                slots=[positions],
                max_query=n,
                max_context=start + n,
            )
        )
        hidden = self._decoder.forward(torch.tensor(token_ids, device=device), positions, self.attention)
        return self._decoder.logits(hidden)


def compare(
    candidates: Mapping[str, Candidate],
    token_ids: Sequence[int],
    *,
    chunk: int = 128,
    tick: Callable[[str], None] = lambda text: None,
) -> dict[str, Quality]:
    """Send the text through all candidates; the first is what the others are compared with.

    Memory: the logits of two candidates for `chunk` positions.
    """
    found = {name: Quality() for name in candidates}
    for start in range(0, len(token_ids) - 1, chunk):
        ids = token_ids[start : start + chunk]
        targets = torch.tensor(token_ids[start + 1 : start + len(ids) + 1])
        base = expected = None
        for name, candidate in candidates.items():
            logits = candidate.logits(ids, start).cpu()[: len(targets)]
            likely = logits.log_softmax(-1)
            if base is None or expected is None:
                base, expected = logits, likely
            _add(found[name], logits, likely, base, expected, targets)
            tick(name)
    return found


def _add(
    quality: Quality,
    logits: torch.Tensor,
    likely: torch.Tensor,
    base: torch.Tensor,
    expected: torch.Tensor,
    targets: torch.Tensor,
) -> None:
    quality.losses += (-likely.gather(1, targets[:, None])[:, 0]).tolist()
    quality.divergences += (expected.exp() * (expected - likely)).sum(-1).tolist()
    quality.cosines += torch.cosine_similarity(logits, base, dim=-1).tolist()
    quality.agreements += int((logits.argmax(-1) == base.argmax(-1)).sum())
