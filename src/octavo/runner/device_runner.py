"""`DeviceRunner`: a `ModelRunner` whose steps are queued on a device and read back later.

`submit` prepares a step on the host and queues everything it takes: one copy of all inputs, the table entries that
changed, the model, the draws, and one copy of what was drawn. It waits for nothing. `collect` waits for the oldest
step's event and turns what was drawn into a `StepResult`. A token that the next step needs never visits the host: it
lies in the sequence's slot (`DeviceTables.last_tokens`), and a plan that says `LAST_SAMPLED` reads it there.

Penalties, biases and bans are applied there too, from tables that stay there (`device_adjust.py`). A step that must be
drawn for on the host (`device_sampler.why_not`, prompt log-probabilities, guesses) is finished
inside `submit`, after what was drawn before it has been read back, because its draws may depend on it.

Steps in which every sequence computes one token and draws one go through recorded graphs (`graphs.py`), if there are.
Invariant: which way a step goes changes no token, up to the rounding of products of another shape.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from octavo.core.step import SequenceStart, StepPlan, StepResult
from octavo.devices import Device, device_of
from octavo.errors import InternalError
from octavo.kernels.adjusting import Adjusting
from octavo.kernels.interface import AttentionBackend, AttentionBatch, KVCache
from octavo.runner.batch import HostBatch, StepBatch
from octavo.runner.device_adjust import Adjustments, Need, Wanted
from octavo.runner.device_inputs import CHANGES, DeviceTables, Staging, input_bytes, padded
from octavo.runner.device_results import Flight, ResultBuffers
from octavo.runner.device_sampler import Draw, DrawInputs, Listing, Mode, draw, list_logprobs, why_not
from octavo.runner.draws import DrawParameters, Draws
from octavo.runner.graphs import GraphStore
from octavo.runner.kv_store import KVStore
from octavo.runner.model_runner import DecoderLike, ModelRunner, Profile

SHORTEST_CLASS = 1024  # tokens of context: graphs are recorded for contexts of up to this, four times it, …


class DeviceRunner(ModelRunner):
    """See the module. Arguments are those of `ModelRunner`.

    device: where the pool lies. graphs: recorded steps, None without. spare_block: a block of the pool that the
    scheduler does not know; rows that only fill up a batch write there. drawing, listing:
    functions of `device_sampler`, or faster ones. adjusting: `kernels/adjusting.py`, or a faster one.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        cache: KVStore | KVCache,
        backend: AttentionBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        profile: Profile | None = None,
        device: Device | None = None,
        graphs: GraphStore | None = None,
        spare_block: int = 0,
        drawing: Draw = draw,
        listing: Listing = list_logprobs,
        adjusting: Adjusting | None = None,
    ) -> None:
        super().__init__(
            decoder,
            cache,
            backend,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            vocab_size=vocab_size,
            profile=profile,
        )
        layout = self.store.cache.layout
        self.device = device or device_of(self.store.cache.kv.device)
        self.graphs = graphs
        self._drawing, self._listing = drawing, listing
        self.host_steps: Counter[str] = Counter()  # steps that were drawn for on the host, by reason
        self._batches.late = []
        self._groups = layout.num_groups
        self._block_size = layout.block_size
        self._max_model_len = max_model_len
        self._tables = DeviceTables(
            self.device, layout.num_groups, 2 * max_num_seqs, layout.blocks_for(max_model_len), spare_block
        )
        self._params = DrawParameters(2 * max_num_seqs + 1)
        self._staging = Staging(self.device, input_bytes(max_num_batched_tokens, 2 * max_num_seqs, self._groups))
        self._adjust = Adjustments(self.device, adjusting or Adjusting(), vocab_size, max_model_len)
        self._results = ResultBuffers(self.device, 2 * max_num_seqs)
        self._outputs: dict[tuple[int, int], torch.Tensor] = {}  # per bucket and `listed`: what its graph leaves
        self._generation = (0, 0)
        self._on_host: dict[int, str] = {}  # sequences that are drawn for on the host, and why
        self._flights: deque[Flight] = deque()

    # -- the interface of `core/overlap.py` ----------------------------------------------------------------------------

    def needs_host(self, start: SequenceStart) -> str | None:
        return why_not(start)

    def execute(self, plan: StepPlan) -> StepResult:
        """One step, waited for. Nothing may be in flight."""
        if self._flights:
            raise InternalError(f"{len(self._flights)} steps are in flight; collect them first")
        self.submit(plan)
        return self.collect()

    @torch.inference_mode()
    def submit(self, plan: StepPlan) -> None:
        """Queue the plan's step."""
        section = self.profile.section
        with section("prepare"):
            self._obey(plan)
            if not plan.scheduled:
                self._flights.append(Flight(plan.step_id, result=StepResult(plan.step_id)))
                return
            host = self._batches.arrays(plan.scheduled)
            why = self._host_reason(host)
            slots = np.fromiter((self._tables.slot(r.seq_id) for r in host.rows), np.int64, count=len(host.rows))
        if why is not None:
            self.host_steps[why] += 1
            self._flights.append(Flight(plan.step_id, result=self._finish_now(plan.step_id, host, slots)))
            return
        with section("prepare"):
            draws = Draws.of(host, self._rows, self._tables, self._params)
            bucket = self._bucket(host, draws)
        drawn = self._queue(host, slots, draws) if bucket is None else self._replay(host, slots, draws, bucket)
        self._flights.append(self._results.read_back(plan.step_id, draws, drawn))

    def collect(self) -> StepResult:
        """What came of the oldest step that was submitted; waits for it."""
        if not self._flights:
            raise InternalError("no step is in flight")
        return self._flights.popleft().settle()

    def close(self) -> None:
        """Wait for everything that was queued."""
        self._flights.clear()
        self.device.synchronize()

    # -- the plan ------------------------------------------------------------------------------------------------------

    def _obey(self, plan: StepPlan) -> None:
        tables = self._tables
        for seq_id in plan.ends:
            tables.close(seq_id)
            self._adjust.close(seq_id)
            self._on_host.pop(seq_id, None)
        super()._obey(plan)
        for start in plan.starts:
            self._begin(start)
        self._adjust.send()
        for scheduled in plan.scheduled:
            for update in scheduled.tables:
                tables.note(scheduled.seq_id, update.group, update.first, update.block_ids)
        generation = (tables.generation, self._adjust.generation)
        if self._generation != generation and self.graphs is not None:
            self._generation = generation
            self.graphs.forget()

    def _begin(self, start: SequenceStart) -> None:
        """A slot and, for logits that must be changed on the device, a place of its own."""
        slot = self._tables.open(start.seq_id)
        self._params.set(slot, start, self._vocab_size)
        reason = why_not(start)
        if reason is not None:
            self._on_host[start.seq_id] = reason
            return
        wanted = Wanted.of(start)
        # One that names ids outside the vocabulary draws nothing but its error.
        if wanted.anything and self._rows.get(start.seq_id).state.error is None:
            self._params.adjust(slot, wanted, self._adjust.open(start, wanted))

    def _host_reason(self, host: HostBatch) -> str | None:
        """Why the step's draws must be made on the host, or None."""
        for s, row in zip(host.scheduled, host.rows, strict=True):
            if s.prompt_logprobs is not None:
                return "prompt logprobs"
            if s.num_proposed:
                return "speculation"
            if row.pool is not None:
                return "pooling"
            for seq_id in s.sample_ids if self._on_host else ():
                if seq_id in self._on_host:
                    return self._on_host[seq_id]
        return None

    def _bucket(self, host: HostBatch, draws: Draws) -> int | None:
        """The graph size for a step of nothing but decoding sequences; None for any other."""
        if self.graphs is None or not self._backend_records() or host.max_query > 1 or not draws.in_row_order:
            return None
        return self.graphs.bucket(len(host.rows))

    def _backend_records(self) -> bool:
        """May the decoder's and the backend's work be recorded? A decoder may say no for the step at hand."""
        safe = getattr(self._backend, "graph_safe", True) and getattr(self._decoder, "graph_safe", True)
        return bool(safe and self._recordable())

    # -- a step, kernel by kernel --------------------------------------------------------------------------------------

    def _queue(self, host: HostBatch, slots: npt.NDArray[np.int64], draws: Draws) -> torch.Tensor:
        """Queue everything; float64 [R, D] on the device."""
        with self.profile.section("prepare"):
            sent, batch = self._send(host, slots, draws.arrays())
            self._backend.plan(batch.attention)
        with self.profile.section("model"):
            hidden = self._decoder.forward(batch.token_ids, batch.positions, self._backend)
        if not len(draws):
            return torch.empty((2, 0), dtype=torch.float64, device=hidden.device)
        logit_rows, draw_slots, *numbers = sent
        with self.profile.section("head"):
            logits = self._decoder.logits(hidden[logit_rows])[:, : self._vocab_size].float()
        with self.profile.section("sample"):
            return self._draw_lines(logits, draw_slots, numbers, draws.mode, draws.listed, draws.need)

    def _draw_lines(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        numbers: list[torch.Tensor],
        mode: Mode,
        listed: int,
        need: Need,
    ) -> torch.Tensor:
        """Draw, leave the tokens in their slots, and return what the host will want to know, float64 [R, D]:

        tokens, largest logits, and if any draw lists log-probabilities: ranks, 1 + listed ids, 1 + listed values.
        numbers: the fields of `DrawInputs` and, if there is a need, places and lengths.
        """
        inputs = DrawInputs(*numbers[:5])
        if need:
            places, lengths = numbers[5:]
            tokens, highest = self._adjust.draw(logits, inputs, mode, need, places, lengths, self._drawing)
        else:
            tokens, highest = self._drawing(logits, inputs, mode)
        self._tables.last_tokens.index_copy_(0, slots, tokens)
        lines = torch.stack((tokens.double(), highest.double()))
        if listed < 0:
            return lines
        ids, values, ranks = self._listing(logits, tokens, min(listed, self._vocab_size))
        return torch.cat((lines, ranks.double()[None], ids.double().t(), values.double().t()))

    def _send(
        self, host: HostBatch, slots: npt.NDArray[np.int64], more: Sequence[npt.NDArray[Any]]
    ) -> tuple[list[torch.Tensor], StepBatch]:
        """Everything to the device in one copy; (the tensors of `more`, the batch)."""
        tables = self._tables
        self._send_surplus()
        late = self._batches.late or []
        late_places = np.fromiter((place for place, _ in late), np.int64, count=len(late))
        late_slots = np.fromiter((tables.slot(row.seq_id) for _, row in late), np.int64, count=len(late))
        changes = tables.take_changes(CHANGES)
        fixed: list[npt.NDArray[Any]]
        fixed = [host.token_ids, host.positions, host.query_start, host.context_len, slots, late_places, late_slots]
        views = self._staging.send([*fixed, *changes, *host.slots, *more])
        token_ids, positions, query_start, context_len, row_slots, places, sources, where, what = views[:9]
        tables.apply(where, what)
        if late:
            token_ids.index_copy_(0, places, tables.last_tokens[sources])
        attention = AttentionBatch(
            query_start=query_start,
            context_len=context_len,
            block_tables=[table.index_select(0, row_slots) for table in tables.tables],
            slots=views[9 : 9 + self._groups],
            max_query=host.max_query,
            max_context=host.max_context,
        )
        batch = StepBatch(host.scheduled, host.rows, host.query_start.tolist(), token_ids, positions, attention)
        return views[9 + self._groups :], batch

    def _send_surplus(self) -> None:
        """Table entries that do not fit beside a step's inputs (many long prompts found in the cache at once)."""
        while self._tables.pending > CHANGES:
            self._tables.apply(*self._staging.send(self._tables.take_changes(CHANGES)))

    # -- a step through a graph ----------------------------------------------------------------------------------------

    def _replay(self, host: HostBatch, slots: npt.NDArray[np.int64], draws: Draws, bucket: int) -> torch.Tensor:
        """The same for a step of decoding sequences, padded to `bucket` rows; float64 [R, D] of them."""
        assert self.graphs is not None
        tables, count = self._tables, len(host.rows)
        with self.profile.section("prepare"):
            self._send_surplus()
            late = np.zeros(bucket, dtype=np.uint8)
            late[[place for place, _ in self._batches.late or ()]] = 1
            spare = tables.spare_block * self._block_size
            fixed = [
                padded(host.token_ids, bucket, 0),
                padded(host.positions, bucket, 0),
                np.arange(bucket + 1, dtype=np.int32),
                padded(host.context_len, bucket, 1),
                padded(slots, bucket, tables.spare_slot),
                late,
                *(padded(group, bucket, spare) for group in host.slots),
                *draws.padded(bucket),
            ]
            *views, where, what = self._staging.send([*fixed, *tables.take_changes(CHANGES)])
            tables.apply(where, what)
        longest = self._context_class(host.max_context)
        mode, listed, need = draws.mode, draws.listed, draws.need
        out = self._outputs.get((bucket, listed))
        if out is None:
            lines = 2 if listed < 0 else 5 + 2 * min(listed, self._vocab_size)
            out = torch.zeros((lines, bucket), dtype=torch.float64, device=self.device.torch)
            self._outputs[bucket, listed] = out
        with self.profile.section("model"):
            variant = (mode, longest, listed, need)
            self.graphs.run(bucket, variant, lambda: self._decode(views, mode, longest, listed, need, out))
        return out[:, :count]

    def _decode(
        self, views: list[torch.Tensor], mode: Mode, longest: int, listed: int, need: Need, out: torch.Tensor
    ) -> None:
        """Queue a padded decode step; reads and writes the same memory each time and depends on no host value."""
        token_ids, positions, query_start, context_len, slots, late = views[:6]
        tables, groups = self._tables, self._groups
        ids = torch.where(late.bool(), tables.last_tokens[slots], token_ids)
        attention = AttentionBatch(
            query_start=query_start,
            context_len=context_len,
            block_tables=[table.index_select(0, slots) for table in tables.tables],
            slots=views[6 : 6 + groups],
            max_query=1,
            max_context=longest,
        )
        self._backend.plan(attention)
        hidden = self._decoder.forward(ids, positions, self._backend)
        logits = self._decoder.logits(hidden)[:, : self._vocab_size].float()
        out.copy_(self._draw_lines(logits, slots, views[6 + groups :], mode, listed, need))

    def _context_class(self, context: int) -> int:
        """The longest context that a graph for `context` is recorded for; few values, so that there are few graphs."""
        size = SHORTEST_CLASS
        while size < context:
            size *= 4
        return min(size, self._max_model_len)

    # -- on the host ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _finish_now(self, step_id: int, host: HostBatch, slots: npt.NDArray[np.int64]) -> StepResult:
        """Queue the step, wait for it, and draw on the host."""
        for flight in self._flights:
            flight.settle()
        with self.profile.section("prepare"):
            _, batch = self._send(host, slots, ())
            self._backend.plan(batch.attention)
        result = self._finish(step_id, batch)
        known = [(self._tables.slot(seq_id), d.token_ids[-1]) for seq_id, d in result.drawn.items() if d.token_ids]
        if known:
            where = torch.tensor([slot for slot, _ in known], device=self.device.torch)
            self._tables.last_tokens[where] = torch.tensor([token for _, token in known], device=self.device.torch)
        self._adjust.count([(seq_id, d.token_ids[-1]) for seq_id, d in result.drawn.items() if d.token_ids])
        return result
