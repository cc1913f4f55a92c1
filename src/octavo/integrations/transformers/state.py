"""`PagedState`: one forward pass after another over the rows of a `PagedCache`.

Each layer comes once per pass, in order, by one of two ways:

    gather   `write` then `read`: keys and values as a dense tensor, for any attention of transformers. Padding is
             stored like tokens, as `DynamicCache` does; it is the mask that hides it.
    in place `attend`: nothing is gathered. The padding mask is known here, so padding is neither stored nor computed.

A pass begins with the first layer that keeps keys and ends with the last one; contexts grow at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from octavo.attention import PagedAttention
from octavo.errors import CapacityError, ConfigError, RequestError
from octavo.integrations.transformers.pool import PagedPool
from octavo.integrations.transformers.rows import CacheRows

TWINS_DIFFER = 0.02  # of the largest number: beyond rounding


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass. Row `first[i]` stands for all rows that are request i; `of_row[b]` is that i.

    taken: bool [requests, q], which of the new positions are tokens and not padding.
    """

    requests: list[int]
    first: list[int]
    of_row: list[int]
    taken: torch.Tensor
    padded: bool  # some positions are padding
    writes: bool  # False: all of them are

    @property
    def no_twins(self) -> bool:
        return len(self.requests) == len(self.of_row)

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        """[B, H, q, d] -> the tokens of the distinct rows [T, H, d]."""
        x = (x if self.no_twins else x[self.first]).transpose(1, 2)
        return x[self.taken] if self.padded else x.reshape(-1, *x.shape[2:])

    def spread(self, out: torch.Tensor) -> torch.Tensor:
        """[T, H, d] -> [B, q, H, d], zeros where there is padding."""
        if self.padded:
            full = out.new_zeros(*self.taken.shape, *out.shape[1:])
            full[self.taken] = out
        else:
            full = out.view(*self.taken.shape, *out.shape[1:])
        return full if self.no_twins else full[self.of_row]


class PagedState:
    """What the layers of one cache share. seen: columns of the padded batch, the same for all rows."""

    def __init__(self, pool: PagedPool, *, share_rows: bool) -> None:
        self.pool = pool
        self.rows = CacheRows(pool, share=share_rows)
        self.seen = 0
        self.recording = False  # assisted generation takes back more than one pass
        self._real: torch.Tensor | None = None  # bool [B, seen]; None: no padding was left out
        self._pass: _Pass | None = None
        self._next = 0  # the layer whose turn it is

    @property
    def num_layers(self) -> int:
        return len(self.pool.windows)

    def seen_by(self, layer: int) -> int:
        """Columns that a layer has: in the middle of a pass, the first ones have more."""
        return self.seen + (self._pass.taken.shape[1] if self._pass is not None and layer < self._next else 0)

    # -- a pass --------------------------------------------------------------------------------------------------

    def gather(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store key, value [B, Hkv, q, d]; returns all that the layer's mask covers, [B, Hkv, n, d] each."""
        if self._real is not None and not bool(self._real.all()):
            raise RequestError(
                "this cache left the padding out when the model attended in place, so it cannot be laid out as a "
                "padded batch now; keep one attention implementation for the life of a cache"
            )
        attention = self.pool.build(key, max(key.shape[-1], value.shape[-1]))
        first = self.seen
        step = self._write(attention, layer, key, value, None)
        window = self.pool.windows[layer]
        start = 0 if window is None else max(0, first - window + 1)
        rows = [step.requests[i] for i in step.of_row]
        keys, values = attention.read(rows, start, first + key.shape[2], layer)
        self._finish(attention, layer)
        dense = [x.transpose(1, 2).to(key.dtype) for x in (keys, values)]
        return dense[0][..., : key.shape[-1]], dense[1][..., : value.shape[-1]]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Store key, value [B, Hkv, q, d] and attend with query [B, Hq, q, d] -> [B, q, Hq, value's d].

        mask: bool [B, columns], False where there is padding.
        """
        head_dim = max(key.shape[-1], value.shape[-1])
        attention = self.pool.build(key, head_dim, scale=scale, softcap=softcap)
        step = self._write(attention, layer, key, value, mask)
        if query.shape[1] != attention.num_heads:
            raise ConfigError(f"layer {layer} has {query.shape[1]} query heads, the first had {attention.num_heads}")
        if scale != self.pool.scale:
            query = query * (scale / self.pool.scale)
        packed = step.pack(_widened(query, head_dim))
        out = step.spread(attention.attend(layer, packed) if step.writes else packed)
        self._finish(attention, layer)
        return out[..., : value.shape[-1]]

    def _write(
        self,
        attention: PagedAttention,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> _Pass:
        if key.requires_grad and torch.is_grad_enabled():
            raise RequestError("PagedCache keeps no gradients: run the model under torch.no_grad()")
        if layer != self._next:
            raise RequestError(
                f"attention layer {layer} came when it was layer {self._next}'s turn: a forward pass must go through "
                f"all {self.num_layers} of them. After a pass that failed, cache.abort() (or reset()) goes back"
            )
        if layer == 0:
            self._pass = self._begin(attention, key, value, mask)
        step = self._pass
        assert step is not None
        if (key.shape[0], key.shape[2]) != (len(step.of_row), step.taken.shape[1]):
            raise RequestError(f"layer {layer} has keys of shape {tuple(key.shape)}, unlike the layers before it")
        if layer == self.num_layers - 1:
            self._check_twins(step, key)
        if step.writes:
            wide = max(key.shape[-1], value.shape[-1])
            attention.write(layer, step.pack(_widened(key, wide)), step.pack(_widened(value, wide)))
        self._next = layer + 1
        return step

    def _begin(
        self, attention: PagedAttention, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> _Pass:
        batch, _, count, _ = key.shape
        if self.rows.ids and len(self.rows.ids) != batch:
            raise RequestError(f"the cache holds {len(self.rows.ids)} rows, this pass has {batch}; reset() empties it")
        taken = self._taken(batch, count, mask, key.device)
        if not self.rows.ids:
            self.rows.open(attention, batch)
        self.rows.part(attention, torch.cat([key.flatten(1), value.flatten(1), taken], 1))
        requests = self.rows.requests
        of_row = [requests.index(request) for request in self.rows.ids]
        first = [of_row.index(i) for i in range(len(requests))]
        mine = taken[first]
        counts = mine.sum(1).tolist()
        written = [(r, n) for r, n in zip(requests, counts, strict=True) if n]
        if written:
            try:
                attention.begin([r for r, _ in written], [n for _, n in written])
            except CapacityError:
                if not self.seen:
                    self.rows.free()  # another batch may fit
                raise
        self._note(taken)
        return _Pass(requests, first, of_row, mine, sum(counts) < mine.numel(), bool(written))

    def _taken(self, batch: int, count: int, mask: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """bool [B, count], which new positions are tokens. Refuses a mask that says something else of earlier ones."""
        end = self.seen + count
        if mask is None:
            mask = torch.ones(batch, end, dtype=torch.bool, device=device)
        if tuple(mask.shape) != (batch, end):
            raise RequestError(
                f"attention_mask of shape {tuple(mask.shape)}: [{batch}, {end}] is needed, cached columns too"
            )
        mask = mask.to(device).bool()
        before = mask[:, : self.seen]
        known = before.new_ones(()) if self._real is None else self._real
        if not bool((before == known).all()):
            raise RequestError(
                f"attention_mask differs from the one that came before in the {self.seen} columns that are cached: "
                f"what was hidden is not stored, what was shown cannot be hidden. Give the whole mask each "
                f"time, or set eager or sdpa, for which blocks are gathered"
            )
        self._check_padding(mask)
        return mask[:, self.seen :]

    def _check_padding(self, mask: torch.Tensor) -> None:
        """Refuse padding that changes results when it is left out. mask: bool [B, columns].

        In front of a row it never does. Behind its tokens, the row's newest output would be that of a position that
        is not computed. Between them, a window, which counts columns, would reach further back than it should.
        """
        begun = mask.cummax(1).values  # columns at or behind a row's first token
        late = (begun & ~mask)[:, self.seen :]
        ends = late[:, -1]
        if bool(ends.any()):
            raise RequestError(
                f"attention_mask ends with padding in row {int(ends.nonzero()[0])}, behind its tokens: padding is not "
                f"computed in place, so its newest output would mean nothing. Pad on the left "
                f"(tokenizer.padding_side='left'), or set eager or sdpa, for which blocks are gathered"
            )
        windows = sorted({window for window in self.pool.windows if window is not None})
        if windows and bool(late.any()):
            row, column = late.nonzero()[0].tolist()
            raise RequestError(
                f"attention_mask[{row}, {column + self.seen}] is padding between tokens, and this model has sliding "
                f"windows ({', '.join(map(str, windows))}), which count columns: padding is not stored in place, so "
                f"they would reach too far. Set eager or sdpa, for which blocks are gathered, or leave the padding out"
            )

    def _note(self, taken: torch.Tensor) -> None:
        """Remember which columns are padding. Undone by `abort`, which cuts back to `seen`."""
        if self._real is None and bool(taken.all()):
            return
        if self._real is None:
            self._real = taken.new_ones(len(taken), self.seen)
        self._real = torch.cat([self._real[:, : self.seen], taken], 1)

    def _check_twins(self, step: _Pass, key: torch.Tensor) -> None:
        """Rows taken for the same in the first layer must still be so in the last."""
        if step.no_twins:
            return
        leaders = key[[step.first[i] for i in step.of_row]]
        if float((key - leaders).abs().max()) > TWINS_DIFFER * float(key.abs().max()):
            raise RequestError(
                "rows that looked the same to the first layer differ in the last one; make this cache with "
                "share_rows=False"
            )

    def _finish(self, attention: PagedAttention, layer: int) -> None:
        if layer < self.num_layers - 1 or self._pass is None:
            return
        if self._pass.writes:
            attention.end(keep_windows=self.recording)
        self.seen += self._pass.taken.shape[1]
        self._pass, self._next = None, 0

    # -- between passes ------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Forget a pass that did not reach the last layer."""
        if self._pass is not None and self._pass.writes:
            self.pool.attention.abort()
        self._pass, self._next = None, 0
        if self._real is not None:
            self._real = self._real[:, : self.seen]

    def crop(self, remove: int) -> None:
        """Take back the last `remove` columns of every row."""
        remove = min(remove, self.seen)
        if not self.rows.ids:
            return
        attention, keep = self.pool.attention, self.seen - remove
        for request in self.rows.requests:
            length = keep
            if self._real is not None:
                length = int(self._real[self.rows.ids.index(request), :keep].sum())
            if remove:
                attention.truncate(request, length)
            if self.recording:
                attention.release_behind_windows(request)
        self.seen = keep
        if self._real is not None:
            self._real = self._real[:, :keep]

    def rearrange(self, sources: list[int]) -> None:
        """Row i goes on from what row sources[i] has."""
        if self.rows.ids:
            self.rows.rearrange(sources)
            if self._real is not None:
                self._real = self._real[sources]

    def fork(self) -> PagedState:
        """The same state again, copy-on-write."""
        twin = PagedState(self.pool, share_rows=self.rows.share)
        twin.rows = self.rows.fork()
        twin.seen, twin.recording = self.seen, self.recording
        twin._real = None if self._real is None else self._real.clone()
        return twin

    def free(self) -> None:
        """Give every block back."""
        self.abort()
        self.rows.free()
        self.seen, self._real = 0, None


def _widened(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Zeros behind heads that are narrower than the pool's (keys and values of different width)."""
    return x if x.shape[-1] == head_dim else F.pad(x, (0, head_dim - x.shape[-1]))
