"""`PagedAttention`: paged KV memory and exact attention over it, for people who keep their own model code.

It owns one pool of blocks, who holds which of them, and a kernel that attends through the block tables. It does not
know tokens, weights, layers beyond their number, or when a request should run: that is your engine's part.

    attn = PagedAttention(num_heads=32, num_kv_heads=8, head_dim=128, block_size=16, num_blocks=1024)
    attn.allocate(request_id=1, seq_len=128)
    out = attn.forward(query, key, value, request_ids=[1])   # writes keys and values, attends
    attn.fork(1, 2)                                          # two answers to one prompt; the first write copies
    print(attn.view())

Several layers. A *step* is one pass through layers 0 to num_layers - 1, for the same requests. Layer 0 opens it (takes
blocks, runs copies), the last layer ends it, and only then do contexts grow. A layer out of turn, other requests in
the middle, or a change to a request of the open step is an error; `abort` forgets an open step.

Threads. Everything that asks or changes who holds which blocks (`allocate`, `append`, `fork`, `truncate`, `free`,
`block_table`, `view`, `stats`, …) is atomic and may be called from any thread, also while a step computes. With one
layer `forward` may be too: calls take turns. With several layers one step is open at a time; a second thread that
begins one meanwhile gets a `RequestError`, so put a lock of your own round a whole step, or keep steps on one thread.

Invariant: a call that raises has changed nothing (but that a step which fails in its kernels keeps the room it took).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from octavo.core.kv_format import check_kv_dtype, kv_bytes_per_token_layer
from octavo.core.kv_layout import build_layout
from octavo.core.request_tables import PagedRequest
from octavo.core.whole_numbers import RequestId, request_ids_of, whole
from octavo.errors import ConfigError, RequestError
from octavo.kernels.interface import AttentionBackend, make_backend
from octavo.paged.batch import attention_batch, slots_of
from octavo.paged.read import BlockReader
from octavo.paged.requests import BlockIds, PagedRequests, PagedStats
from octavo.paged.rows import Rows, check_tensor, check_tokens, pairs_of, plainly, rows_of
from octavo.paged.spec import at_least_one, attention_spec, check_backend, float_dtype, pool_device
from octavo.runner.kv_store import KVStore

__all__ = ["PagedAttention", "PagedStats", "RequestId"]


class PagedAttention(PagedRequests):
    """Paged keys and values of `num_layers` layers, and exact attention over them.

    Parameters
    ----------
    num_heads, num_kv_heads, head_dim : int
        Query heads; key and value heads (a divisor of num_heads; None: as many); numbers of one head.
    block_size : int
        Token positions in a block.
    num_blocks : int
        Blocks of the pool, allocated at once. One block holds `block_size` positions of all layers (if sliding windows
        differ from layer to layer: of the layers of one group, see `num_groups`).
    num_layers : int
        Layers of one step; their keys and values lie side by side in a block and share its table.
    dtype, device : torch.dtype or str, torch.device or str
        Of keys and values in the pool; names as in the engine's settings. None: torch's default.
    scale : float
        Factor on query · key; None: head_dim ** -0.5.
    sliding_window : int or sequence of (int or None)
        Tokens a query sees, itself included; one number for all layers or one per layer. None sees all.
    softcap : float
        Scores become softcap * tanh(score / softcap); None: they stay.
    kv_cache_dtype : str
        "auto" keeps `dtype`; "int8" or "int4" (or "int8,int4" for keys, values) quantises rows in the blocks.
    backend : str
        "auto" (the fastest that is built and fits), "reference" (plain torch), or the name of another one.

    Raises
    ------
    ConfigError
        Numbers that do not fit together; more memory than there is.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int = 128,
        block_size: int = 16,
        num_blocks: int = 1024,
        num_layers: int = 1,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        *,
        scale: float | None = None,
        sliding_window: int | Sequence[int | None] | None = None,
        softcap: float | None = None,
        kv_cache_dtype: str = "auto",
        backend: str = "auto",
    ) -> None:
        number_type, where = float_dtype(dtype), pool_device(device)
        check_backend(backend)
        spec = attention_spec(
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        block_size, num_blocks = at_least_one("block_size", block_size), at_least_one("num_blocks", num_blocks)
        check_kv_dtype(kv_cache_dtype, where.kind, spec.head_dim)
        row = kv_bytes_per_token_layer(
            kv_cache_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=number_type.itemsize
        )
        layout = build_layout(spec.windows, block_size=block_size, bytes_per_token_layer=row, kv_dtype=kv_cache_dtype)
        with plainly():
            self._store = KVStore.allocate(layout, spec, num_blocks, dtype=number_type, device=where.torch)
        super().__init__(layout, num_blocks, self._store.cache.kv.device)
        self._spec = spec
        try:
            with plainly():
                self._backend: AttentionBackend = make_backend(backend, self._store.cache, spec)
                self._reader = BlockReader(self._store.cache, spec)
        except ValueError as error:
            raise ConfigError(str(error).replace("attention_backend=", "backend=")) from None
        self._turn = threading.Lock()  # round a whole step of one layer
        self._written = 0  # layers of the open step that are written
        self._rows = Rows(())  # of the open step, when `forward` opened it

    # -- what it is --------------------------------------------------------------------------------------------

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self._spec.num_heads

    @property
    def kv_blocks(self) -> torch.Tensor:
        """The pool: [num_blocks, layers of a group, 2, num_kv_heads, block_size, head_dim], or bytes if quantised."""
        return self._store.cache.kv

    @property
    def backend(self) -> str:
        """Name of the kernels in use."""
        return self._backend.name

    # -- a step ------------------------------------------------------------------------------------------------

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        block_ids: BlockIds | None = None,
        *,
        request_ids: Sequence[RequestId] | None = None,
        query_lens: Sequence[int] | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Write new keys and values behind each request's context, then attend: causally, to all it has.

        Prompts, chunks of prompts, single tokens and guesses are one thing: a request with n new tokens. Takes blocks
        where room lacks, and copies shared blocks before it writes into them.

        Parameters
        ----------
        query : Tensor [T, num_heads, head_dim], or [B, S, num_heads, head_dim]
            Ragged: the tokens of request 0, of request 1, …; or dense, S tokens each, filled from the left.
        key, value : Tensor [T, num_kv_heads, head_dim], or [B, S, num_kv_heads, head_dim]
        block_ids : list of int, or list of lists
            Instead of `request_ids`: a request by its block table, or as much of its beginning as is unique.
        request_ids : list of int or str
            B requests, each once.
        query_lens : list of int
            New tokens per request. None: as the shape says, see `octavo.paged.rows.rows_of`.
        layer : int
            0, 1, … num_layers - 1 in turn; contexts grow after the last.

        Returns
        -------
        Tensor
            Shape and dtype of `query`; padding of a dense call reads zero.
        """
        layer = whole("layer", layer)
        with self._turn if self.num_layers == 1 else nullcontext():
            with self._lock:
                requests = self._requests_of(block_ids, request_ids)
                rows = self._open(query, key, value, requests, query_lens, layer)
            try:
                self.write(layer, rows.pack(key), rows.pack(value))
                out = rows.unpack(self.attend(layer, rows.pack(query)))
            except BaseException:
                self.abort()
                raise
            if layer == self.num_layers - 1:
                self.end()
            return out

    def begin(self, request_ids: Sequence[RequestId], query_lens: Sequence[int]) -> None:
        """Open a step by hand: take blocks, run copies, plan. Then `write` and `attend` per layer, then `end`.

        What `forward` does, for engines whose keys and queries come at different moments.
        """
        counts = pairs_of(request_ids, query_lens)
        with self._lock, plainly():
            copies = self._memory.begin(counts)
            batch = attention_batch(self._memory.step, self._layout, self._device)
            self._written = 0
        try:
            with plainly():
                if copies:
                    self._backend.copy_blocks(copies)
                self._backend.plan(batch)
        except BaseException:
            self.abort()
            raise

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store key, value [T, num_kv_heads, head_dim] of the open step's tokens. Layers come in turn."""
        layer = whole("layer", layer)
        with self._lock:
            self._check_turn(layer, self._written, "written")
        with plainly():
            self._backend.write(layer, key, value)
        with self._lock:
            self._written = layer + 1

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """query [T, num_heads, head_dim] of the open step -> the same shape. The layer's keys were written before."""
        layer = whole("layer", layer)
        with self._lock:
            if not self._memory.step or not 0 <= layer < self._written:
                raise RequestError(f"attend(layer={layer}): {self._where()}; write(layer) comes first")
        with plainly():
            return self._backend.attend(layer, query)

    def end(self, *, keep_windows: bool = False) -> None:
        """All layers are written: the step's tokens are part of their contexts now.

        keep_windows: give nothing back behind sliding windows, so that more than this step can be truncated later;
        `release_behind_windows` makes up for it.
        """
        with self._lock:
            if not self._memory.step or self._written != self.num_layers:
                raise RequestError(f"end: {self._where()}; a step ends after its last layer, or is aborted")
            self._memory.commit(keep_windows=keep_windows)

    def abort(self) -> None:
        """Forget the open step, if there is one: no context grew. The room it took stays with its requests."""
        with self._lock:
            self._memory.abort()

    def read(
        self, request_ids: Sequence[RequestId], start: int, end: int, layer: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather positions start..end-1 of each request: (keys, values) [B, end - start, num_kv_heads, head_dim].

        A copy, for other attention code; float32 if the blocks are quantised. In an open step the layer's new
        positions can be read once they are written.
        """
        start, end = whole("start", start), whole("end", end)
        with self._lock:
            group = self._group(layer)
            written = layer < self._written
            ends = {row.request.seq_id: row.end for row in self._memory.step if written}
            tables = []
            for request in map(self._memory.get, request_ids_of("request_ids", request_ids)):
                table = request.tables[group]
                first = table.first_live * self.block_size
                last = ends.get(request.seq_id, request.context_len)
                if not first <= start <= end <= last:
                    raise RequestError(f"read({request.request_id!r}, {start}, {end}): {first} to {last} is written")
                tables.append(slots_of(table, start, end))
            return self._reader.read(tables, layer)

    # -- inside ------------------------------------------------------------------------------------------------

    def _where(self) -> str:
        if not self._memory.step:
            return "no step is open"
        return f"{self._memory.describe_step()} is open, {self._written} of {self.num_layers} layers are written"

    def _check_turn(self, layer: int, expected: int, verb: str) -> None:
        if not self._memory.step or layer != expected:
            raise RequestError(
                f"layer={layer} cannot be {verb} now: {self._where()}. Layers come in turn, 0 to "
                f"{self.num_layers - 1}; abort() forgets a step that cannot go on"
            )

    def _open(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        requests: list[PagedRequest],
        query_lens: Sequence[int] | None,
        layer: int,
    ) -> Rows:
        """Check everything `forward` was given; at layer 0 begin the step."""
        check_tensor("query", query)
        self._group(layer)
        rooms = [r.seq_len - r.context_len for r in requests]
        if layer:
            self._check_turn(layer, self._written, "computed")
            open_ids = [row.request for row in self._memory.step]
            if open_ids != requests:
                raise RequestError(f"layer={layer} of other requests: {self._where()}; abort() forgets a step")
            if query_lens is None and query.dim() == 3:
                query_lens = self._rows.counts
        rows = rows_of(query, len(requests), query_lens, rooms)
        for name, x, heads in (
            ("query", query, self._spec.num_heads),
            ("key", key, self._spec.num_kv_heads),
            ("value", value, self._spec.num_kv_heads),
        ):
            check_tokens(name, x, query, heads, self._spec.head_dim, self._device)
        if layer and rows.counts != self._rows.counts:
            raise RequestError(f"layer={layer} has {list(rows.counts)} tokens, layer 0 had {list(self._rows.counts)}")
        if not layer:
            self.begin([r.request_id for r in requests], rows.counts)
            self._rows = rows
        return rows
