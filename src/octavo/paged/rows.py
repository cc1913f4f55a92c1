"""The tokens of a call: ragged [T, heads, head_dim], or dense [B, S, heads, head_dim], and how many are whose.

Pure functions of shapes; nothing here knows a request or a block. Inside, everything is ragged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from octavo.core.whole_numbers import RequestId, request_ids_of, wholes
from octavo.errors import RequestError


@dataclass(frozen=True, slots=True)
class Rows:
    """Row b owns `counts[b]` tokens. `dense`: the (B, S) of a dense call, whose rows are filled from the left."""

    counts: tuple[int, ...]
    dense: tuple[int, int] | None = None

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, d] or [B, S, H, d] -> [T, H, d]: the padding of a dense call is left out."""
        if self.dense is None:
            return x
        if self._is_full():
            return x.reshape(-1, *x.shape[2:])
        return x[self._taken(x.device)]

    def unpack(self, out: torch.Tensor) -> torch.Tensor:
        """[T, H, d] -> the shape of the call; padding reads zero."""
        if self.dense is None:
            return out
        if self._is_full():
            return out.view(*self.dense, *out.shape[1:])
        full = out.new_zeros(*self.dense, *out.shape[1:])
        full[self._taken(out.device)] = out
        return full

    def _is_full(self) -> bool:
        assert self.dense is not None
        return all(count == self.dense[1] for count in self.counts)

    def _taken(self, device: torch.device) -> torch.Tensor:
        """bool [B, S]"""
        assert self.dense is not None
        return torch.arange(self.dense[1], device=device) < torch.tensor(self.counts, device=device)[:, None]


def rows_of(query: torch.Tensor, num_rows: int, query_lens: Sequence[int] | None, rooms: Sequence[int]) -> Rows:
    """Whose the tokens of a call are. rooms: per row, positions with room that are not written yet.

    Without `query_lens` the answer must follow from the shape: [B, S, …] has S each; of [T, …], one row owns all, and
    T = B is one token each. Otherwise a prompt each, if the rooms that were allocated come to exactly T.
    """
    if query.dim() not in (3, 4):
        raise RequestError(
            f"query of shape {tuple(query.shape)}: must be ragged [tokens, heads, head_dim] or dense "
            f"[requests, tokens, heads, head_dim]"
        )
    if query.dim() == 4:
        return _dense_rows(query, num_rows, query_lens)
    total = query.shape[0]
    if query_lens is not None:
        counts = _as_counts(query_lens, num_rows)
        if sum(counts) != total:
            raise RequestError(f"query_lens={list(counts)} come to {sum(counts)} tokens, query has {total}")
        return Rows(counts)
    if num_rows == 1 and total:
        return Rows((total,))
    if total == num_rows:
        return Rows((1,) * num_rows)
    if min(rooms, default=0) >= 1 and sum(rooms) == total:
        return Rows(tuple(rooms))
    raise RequestError(
        f"{total} tokens for {num_rows} requests: how many are whose? It is neither one each nor what was allocated "
        f"and is not written yet ({list(rooms)}, {sum(rooms)} in all); give query_lens=[…], one number per request"
    )


def _dense_rows(query: torch.Tensor, num_rows: int, query_lens: Sequence[int] | None) -> Rows:
    dense = (query.shape[0], query.shape[1])
    if dense[0] != num_rows or dense[1] < 1:
        raise RequestError(f"a dense query of shape {tuple(query.shape)} for {num_rows} requests: one row each")
    counts = (dense[1],) * num_rows if query_lens is None else _as_counts(query_lens, num_rows)
    if max(counts, default=0) > dense[1]:
        raise RequestError(f"query_lens={list(counts)}: the dense query has {dense[1]} tokens a row")
    return Rows(counts, dense)


def _as_counts(query_lens: Sequence[int] | torch.Tensor, num_rows: int) -> tuple[int, ...]:
    counts = tuple(wholes("query_lens", query_lens))
    if len(counts) != num_rows or min(counts, default=0) < 1:
        raise RequestError(
            f"query_lens={list(counts)} for {num_rows} requests: one number per request, each at least 1"
        )
    return counts


def check_tokens(
    name: str, x: torch.Tensor, like: torch.Tensor, heads: int, head_dim: int, device: torch.device
) -> None:
    """`x` must have the leading dimensions of `like` (the query), and these heads; else `RequestError`."""
    check_tensor(name, x)
    if tuple(x.shape) != (*like.shape[:-2], heads, head_dim):
        shape = ", ".join(map(str, (*like.shape[:-2], heads, head_dim)))
        raise RequestError(f"{name} of shape {tuple(x.shape)}: [{shape}] is needed")
    if x.device != device:
        raise RequestError(f"{name} is on {x.device}, the blocks are on {device}; move one of them")
    if not x.is_floating_point():
        raise RequestError(f"{name} is {x.dtype}: a float type is needed")
    check_no_gradient(name, x)


def check_tensor(name: str, x: Any) -> None:
    """`RequestError` for anything but a tensor."""
    if not isinstance(x, torch.Tensor):
        raise RequestError(f"{name} is a {type(x).__name__}: a torch.Tensor is needed")


def check_no_gradient(name: str, x: torch.Tensor) -> None:
    """Blocks are written in place and shared: nothing could flow back through them."""
    if x.requires_grad and torch.is_grad_enabled():
        raise RequestError(f"{name} requires a gradient, and paged attention has none: call it under torch.no_grad()")


@contextmanager
def plainly() -> Iterator[None]:
    """What the pool keeps must be usable under torch.inference_mode() and outside of it alike."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def pairs_of(request_ids: Sequence[RequestId], query_lens: Sequence[int]) -> list[tuple[RequestId, int]]:
    """(request, new tokens); `RequestError` unless there is one number for each."""
    ids, counts = request_ids_of("request_ids", request_ids), wholes("query_lens", query_lens)
    if len(ids) != len(counts):
        raise RequestError(f"query_lens={counts} for {len(ids)} requests: one number per request")
    return list(zip(ids, counts, strict=True))
