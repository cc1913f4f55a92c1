"""A runner without a model: scripted tokens, and a memory that checks what a real one would silently get wrong.

`FakeRunner` keeps, for every slot of every block, which token content it stands for (a hash of everything before it),
moves those through copies and swaps, and on every step compares what a kernel would read through the block table with
the sequence's true tokens. A block reused too early, a missing copy, a stale table entry: each fails at the step that
does it. It can also run one step behind, as a GPU does.

Public: tests of the scheduler, the server and the views use it, and so can yours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from octavo.core.kv_layout import KVLayout
from octavo.core.step import (
    LAST_SAMPLED,
    PROPOSED,
    Drawn,
    ScheduledSequence,
    SequenceStart,
    StepPlan,
    StepResult,
    TokenLogprobs,
    TransferKind,
)
from octavo.errors import InternalError

Script = Callable[[Sequence[int], int], int]  # (tokens so far, sample index) -> next token


def default_script(tokens: Sequence[int], sample_index: int, vocab: int = 997) -> int:
    """A token that depends on the whole sequence, so any mistake changes what follows. Never 0."""
    state = 17 + 31 * sample_index
    for t in tokens[-8:]:
        state = (state * 1000003 + t + 1) & 0xFFFFFFFF
    return 1 + (state + len(tokens)) % (vocab - 1)


class Read(NamedTuple):
    """One slot that a step reads."""

    seq_id: int
    group: int
    position: int
    block: int
    offset: int
    content: int


class _Row:
    """What the runner keeps of one sequence."""

    def __init__(self, start: SequenceStart, num_groups: int) -> None:
        self.start = start
        self.tokens = list(start.token_ids)
        self.tables: list[list[int]] = [[] for _ in range(num_groups)]
        self.drawn = 0


class FakeRunner:
    """Executes plans over imaginary KV. `script` decides the tokens; `vocab_size` bounds beam candidates.

    draft: what a draft model would propose; None: `script` itself, so everything it proposes is right. draft_groups:
    its groups, last of the layout's; they are neither written nor read for sequences that it does not follow.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        script: Script = default_script,
        num_host_blocks: int = 0,
        vocab_size: int = 997,
        check: bool = True,
        draft: Script | None = None,
        draft_groups: int = 0,
    ) -> None:
        self.layout = layout
        self.draft_groups = draft_groups
        self.script = script
        self.draft = draft or script
        self.vocab_size = vocab_size
        self.check = check
        self._kv: list[list[int]] = [[-1] * layout.block_size for _ in range(num_blocks if check else 0)]
        self._host: list[list[int]] = [[-1] * layout.block_size for _ in range(num_host_blocks if check else 0)]
        self._rows: dict[int, _Row] = {}
        self.steps = 0
        self.computed_tokens = 0
        self.last_reads: list[Read] = []  # of the step executed last

    def execute(self, plan: StepPlan) -> StepResult:
        """Obey the plan in the documented order, checking every read."""
        self.steps += 1
        for seq_id in plan.ends:
            self._rows.pop(seq_id, None)
        for start in plan.starts:
            self._rows[start.seq_id] = _Row(start, self.layout.num_groups)
        self.last_reads = []
        if self.check:
            self._transfer(plan)
        drawn: dict[int, Drawn] = {}
        prompt_logprobs = {}
        for item in plan.scheduled:
            self._compute(item)
        if self.check:
            for item in plan.scheduled:  # after all writes: nobody may have written into another's block
                self._verify(item)
        for item in plan.scheduled:
            row = self._rows[item.seq_id]
            if item.prompt_logprobs is not None:
                end = min(item.start + item.num_tokens, row.start.prompt_len - 1)
                prompt_logprobs[item.seq_id] = tuple(
                    TokenLogprobs((row.tokens[p + 1],), (-1.0,), 1) for p in range(item.start, end)
                )
            known = row.tokens[: item.start + item.num_tokens]
            for seq_id in item.sample_ids:
                drawn[seq_id] = self._verify_guesses(item, known) if item.num_proposed else self._draw(seq_id, known)
        return StepResult(plan.step_id, drawn, prompt_logprobs)

    def block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """The table as the runner knows it, to compare with the scheduler's."""
        return list(self._rows[seq_id].tables[group])

    # -- imaginary KV --------------------------------------------------------------------------------------------

    def _transfer(self, plan: StepPlan) -> None:
        pools = {
            TransferKind.COPY: (self._kv, self._kv),
            TransferKind.SWAP_OUT: (self._kv, self._host),
            TransferKind.SWAP_IN: (self._host, self._kv),
        }
        for move in plan.transfers:
            source, destination = pools[move.kind]
            destination[move.destination][:] = source[move.source]

    def _compute(self, item: ScheduledSequence) -> None:
        row = self._rows[item.seq_id]
        for update in item.tables:
            table = row.tables[update.group]
            end = update.first + len(update.block_ids)
            if update.first > len(table):
                raise InternalError(f"sequence {item.seq_id}: table update leaves a gap at {len(table)}")
            table[update.first : end] = update.block_ids
        for offset, token in enumerate(item.token_ids):
            position = item.start + offset
            if token == PROPOSED:
                if not item.drafted:
                    raise InternalError(f"sequence {item.seq_id}: guesses wanted of a draft that does not follow it")
                token = self.draft(row.tokens[:position], row.start.sample_index)
            if token == LAST_SAMPLED:
                if position >= len(row.tokens):
                    raise InternalError(f"sequence {item.seq_id}: no token was drawn for position {position}")
            elif position < len(row.tokens):
                if row.tokens[position] != token:
                    raise InternalError(f"sequence {item.seq_id}: token at {position} is {row.tokens[position]}")
            else:
                row.tokens.append(token)
        self.computed_tokens += item.num_tokens
        if self.check:
            size = self.layout.block_size
            marks = self._marks(row, item.start + item.num_tokens)
            for group, table in enumerate(row.tables[: self._groups(item)]):
                for position in range(item.start, item.start + item.num_tokens):
                    self._kv[table[position // size]][position % size] = hash((marks[position], group))

    def _groups(self, item: ScheduledSequence) -> int:
        """Leading groups that the item computes and reads."""
        return self.layout.num_groups - (0 if item.drafted else self.draft_groups)

    def _marks(self, row: _Row, end: int) -> list[int]:
        """What the KV at each position stands for: all tokens up to it."""
        marks, mark = [], 0
        for token in row.tokens[:end]:
            mark = hash((mark, token))
            marks.append(mark)
        return marks

    def _verify(self, item: ScheduledSequence) -> None:
        reads = self.reads(item)
        self.last_reads += reads
        self.check_reads(reads)

    def reads(self, item: ScheduledSequence) -> list[Read]:
        """Every slot a kernel reads for the item, and what must be in it."""
        row = self._rows[item.seq_id]
        size = self.layout.block_size
        end = item.start + item.num_tokens
        marks = self._marks(row, end)
        return [
            Read(item.seq_id, group, position, table[position // size], position % size, hash((marks[position], group)))
            for group, (table, kind) in enumerate(zip(row.tables[: self._groups(item)], self.layout.groups))
            for position in range(kind.first_needed(item.start), end)
        ]

    def check_reads(self, reads: Sequence[Read], when: str = "") -> None:
        """Raise `InternalError` for the first slot that holds another content."""
        for read in reads:
            if self._kv[read.block][read.offset] != read.content:
                raise InternalError(
                    f"sequence {read.seq_id}, group {read.group}: position {read.position} reads block {read.block}, "
                    f"which holds another content{when}"
                )

    def _verify_guesses(self, item: ScheduledSequence, computed: list[int]) -> Drawn:
        """Draw behind each guess as long as the guess is what was drawn."""
        end = len(computed) - item.num_proposed
        drawn = [self._draw(item.seq_id, computed[:end])]
        while end < len(computed) and drawn[-1].token_ids == (computed[end],):
            end += 1
            drawn.append(self._draw(item.seq_id, computed[:end]))
        return Drawn(tuple(d.token_ids[0] for d in drawn), tuple(p for d in drawn for p in d.logprobs))

    def _draw(self, seq_id: int, known: list[int]) -> Drawn:
        row = self._rows[seq_id]
        start = row.start
        if start.pooling is not None:
            return Drawn((), embedding=[float(t % 7 - 3) for t in known[:4]])
        if start.num_candidates:
            first = self.script(known, 0)
            ids = [1 + (first + 7 * i) % (self.vocab_size - 1) for i in range(start.num_candidates)]
            ids = list(dict.fromkeys(ids))
            logprobs = tuple(-0.5 - 0.37 * i - (known[-1] % 5) * 0.01 for i in range(len(ids)))
            return Drawn((), (TokenLogprobs(tuple(ids), logprobs, 0),))
        token = self.script(known, start.sample_index)
        del row.tokens[len(known) :]
        row.tokens.append(token)
        entry = () if start.params.logprobs is None else (TokenLogprobs((token,), (-0.5,), 1),)
        return Drawn((token,), entry)


class DelayedRunner:
    """Runs plans as a device does whose results are seen `delay` steps late: submit, then collect in order.

    Until a result is seen, its step may still be reading. So after each submitted plan the reads of all steps whose
    result is out are checked once more: a block that was handed out again too early has been overwritten by then.
    """

    def __init__(self, runner: FakeRunner, delay: int = 1) -> None:
        self.runner = runner
        self.delay = delay
        self._results: deque[tuple[StepResult, list[Read]]] = deque()

    def submit(self, plan: StepPlan) -> StepResult | None:
        """Execute the plan; returns the result that is due now, if any."""
        result = self.runner.execute(plan)
        for late, reads in self._results:
            self.runner.check_reads(
                reads, f": step {late.step_id} was still in flight when step {plan.step_id} wrote it"
            )
        self._results.append((result, self.runner.last_reads))
        return self.collect() if len(self._results) > self.delay else None

    def collect(self) -> StepResult | None:
        """The oldest result not seen yet."""
        return self._results.popleft()[0] if self._results else None
