"""The model runner on plans made by hand, against a dense double of the same small decoder."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch

from helpers.fake_decoder import FakeDecoder, dense_logits
from helpers.paged import tiny_spec
from octavo.core.kv_layout import build_layout
from octavo.core.step import (
    LAST_SAMPLED,
    BlockTransfer,
    ScheduledSequence,
    SequenceStart,
    StepPlan,
    TableUpdate,
    TransferKind,
)
from octavo.errors import BoundsError, InternalError
from octavo.kernels.reference import ReferenceAttention
from octavo.runner import model_runner
from octavo.runner.kv_store import KVStore
from octavo.runner.largest_step import largest_step, largest_step_bytes
from octavo.runner.model_runner import ModelRunner
from octavo.runner.noise import uniforms
from octavo.sampling_params import SamplingParams

VOCAB, WINDOW, SIZE = 50, 8, 4
GREEDY = SamplingParams(temperature=0)


class Rig:
    """A runner over a tiny pool filled with NaN, and a hand that deals blocks in a scattered order."""

    def __init__(self, num_blocks=60, host=8, *, spec=None, **limits):
        self.spec = spec or tiny_spec([None, WINDOW], head_dim=8)
        self.layout = build_layout(self.spec.windows, block_size=SIZE, bytes_per_token_layer=1)
        self.store = KVStore.allocate(self.layout, self.spec, num_blocks, dtype=torch.float32, num_host_blocks=host)
        self.store.cache.kv.fill_(float("nan"))
        self.decoder = FakeDecoder(self.spec)
        limits = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 64, **limits}
        backend = ReferenceAttention(self.store.cache, self.spec)
        self.runner = ModelRunner(self.decoder, self.store, backend, vocab_size=self.spec.vocab_size, **limits)
        self.free = [(7 * i) % num_blocks for i in range(num_blocks)] if num_blocks % 7 else list(range(num_blocks))
        self.step = 0

    def tables(self, first, last):
        """Updates that give both groups blocks for logical blocks first … last - 1."""
        return tuple(
            TableUpdate(g, first, tuple(self.free.pop() for _ in range(first, last)))
            for g in range(self.layout.num_groups)
        )

    def run(self, *scheduled, **rest):
        self.step += 1
        return self.runner.execute(StepPlan(self.step, tuple(scheduled), **rest))


def start(seq_id, tokens, prompt_len=None, params=GREEDY, **rest):
    rest = {"sample_index": 0, "seed": 11, **rest}
    return SequenceStart(
        seq_id=seq_id,
        request_id=f"r{seq_id}",
        params=params,
        token_ids=tuple(tokens),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        **rest,
    )


def greedy(decoder, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


PROMPT = (3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9)


def decode(rig, seq_id, prompt_len, first, count, held, token=LAST_SAMPLED):
    """Draw `count` more tokens for a sequence that has drawn `first` already."""
    got = []
    for i in range(count):
        position = prompt_len + first - 1 + i
        need = position // SIZE + 1
        tables = rig.tables(held, need) if need > held else ()
        held = max(held, need)
        result = rig.run(ScheduledSequence(seq_id, position, (token,), tables, (seq_id,)))
        got.append(result.drawn[seq_id].token_ids[0])
    return got


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 11])
def test_greedy_text_in_any_chunking_equals_the_dense_model(chunk):
    rig = Rig()
    expected = greedy(rig.decoder, PROMPT, 12)
    starts, held, drawn = (start(0, PROMPT),), 0, None
    for low in range(0, len(PROMPT), chunk):
        part = PROMPT[low : low + chunk]
        need = -(-(low + len(part)) // SIZE)
        last = low + len(part) == len(PROMPT)
        tables = rig.tables(held, need) if need > held else ()
        held = max(held, need)
        result = rig.run(ScheduledSequence(0, low, part, tables, (0,) if last else ()), starts=starts)
        starts, drawn = (), result.drawn
        assert bool(drawn) == last
    assert drawn is not None
    assert [drawn[0].token_ids[0], *decode(rig, 0, len(PROMPT), 1, 11, held)] == expected
    assert set(rig.decoder.head_rows) == {1}, "the head runs for rows that draw, and no other"


def test_blocks_behind_the_window_may_be_released_and_overwritten():
    rig = Rig()
    prompt = tuple((5 * i) % VOCAB for i in range(30))
    expected = greedy(rig.decoder, prompt, 6)
    result = rig.run(ScheduledSequence(0, 0, prompt, rig.tables(0, 8), (0,)), starts=(start(0, prompt),))
    tokens = [result.drawn[0].token_ids[0]]
    gone = rig.runner._rows.tables[1][0, :5].tolist()  # group 1 is the windowed one; position 30 needs 23 and later
    rig.store.cache.kv[gone] = float("nan")
    update = (*rig.tables(8, 9), TableUpdate(1, 0, (-1,) * 5))
    result = rig.run(ScheduledSequence(0, 30, (LAST_SAMPLED,), update, (0,)))
    tokens.append(result.drawn[0].token_ids[0])
    tokens += decode(rig, 0, 30, 2, 4, 9)
    assert tokens == expected


def test_explicit_tokens_and_last_sampled_mean_the_same():
    texts = []
    for explicit in (True, False):
        rig = Rig()
        result = rig.run(ScheduledSequence(0, 0, PROMPT, rig.tables(0, 6), (0,)), starts=(start(0, PROMPT),))
        tokens = [result.drawn[0].token_ids[0]]
        for i in range(6):
            token = tokens[-1] if explicit else LAST_SAMPLED
            result = rig.run(ScheduledSequence(0, len(PROMPT) + i, (token,), (), (0,)))
            tokens.append(result.drawn[0].token_ids[0])
        texts.append(tokens)
    assert texts[0] == texts[1] == greedy(rig.decoder, PROMPT, 7)


def test_fork_copy_on_write_and_siblings():
    """One prefill, three samples; each gets a private copy of the shared tail block before its first write."""
    rig = Rig()
    params = SamplingParams(n=3, temperature=1.0)
    starts = tuple(start(i, PROMPT, params=params, sample_index=i) for i in range(3))
    shared = rig.tables(0, 3)  # 11 tokens: the third block has room for one more
    first = rig.run(ScheduledSequence(0, 0, PROMPT, shared, (0, 1, 2)), starts=starts).drawn
    assert rig.decoder.head_rows == [1], "siblings share one row of logits"
    tokens = {i: [first[i].token_ids[0]] for i in range(3)}
    transfers, scheduled = [], []
    for i in range(3):
        updates = []
        for update in shared:
            ids = list(update.block_ids)
            if i:
                transfers.append(BlockTransfer(TransferKind.COPY, ids[2], rig.free.pop()))
                ids[2] = transfers[-1].destination
            updates.append(TableUpdate(update.group, 0, tuple(ids)))
        scheduled.append(ScheduledSequence(i, 11, (LAST_SAMPLED,), tuple(updates) if i else (), (i,)))
    drawn = rig.run(*scheduled, transfers=tuple(transfers)).drawn
    for i in range(3):
        tokens[i].append(drawn[i].token_ids[0])
    for step in range(5):
        drawn = rig.run(
            *(
                ScheduledSequence(i, 12 + step, (LAST_SAMPLED,), rig.tables(3, 5) if step == 0 else (), (i,))
                for i in (2, 0, 1)
            )
        ).drawn
        for i in range(3):
            tokens[i].append(drawn[i].token_ids[0])
    assert len({tuple(t) for t in tokens.values()}) == 3
    for i in range(3):  # each sample alone, on a fresh engine, draws the same
        assert tokens[i] == alone(params, i, 7)


def alone(params, sample_index, count, **rest):
    rig = Rig()
    s = start(0, PROMPT, params=params, sample_index=sample_index, **rest)
    first = rig.run(ScheduledSequence(0, 0, PROMPT, rig.tables(0, 3), (0,)), starts=(s,)).drawn[0]
    return [first.token_ids[0], *decode(rig, 0, len(PROMPT), 1, count - 1, 3)]


def test_noise_belongs_to_the_tokens_place_in_the_sequence():
    params = SamplingParams(temperature=1.0)
    drawn = alone(params, 2, 3, seed=77)
    decoder, known = Rig().decoder, list(PROMPT)
    for token in drawn:
        probabilities = torch.softmax(dense_logits(decoder, known)[-1].double(), -1)
        uniform = uniforms([77], [2], [len(known)])[0]
        assert token == int((probabilities.cumsum(-1) > uniform).nonzero()[0])
        known.append(token)


def test_preempted_and_resumed_by_recompute_draws_the_same():
    """Noise and penalties come from the tokens, not from what the runner happened to keep."""
    params = SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, top_p=0.9)
    expected = alone(params, 0, 9)
    rig = Rig()
    first = rig.run(
        ScheduledSequence(0, 0, PROMPT, rig.tables(0, 3), (0,)), starts=(start(0, PROMPT, params=params),)
    ).drawn[0]
    tokens = [first.token_ids[0], *decode(rig, 0, len(PROMPT), 1, 3, 3)]
    known = (*PROMPT, *tokens)
    resumed = rig.run(
        ScheduledSequence(0, 0, known, rig.tables(0, 4), (0,)),
        starts=(start(0, known, len(PROMPT), params=params),),
        ends=(0,),
    ).drawn[0]
    tokens.append(resumed.token_ids[0])
    assert [*tokens, *decode(rig, 0, len(PROMPT), 5, 4, 4)] == expected


def test_swap_out_and_in_to_other_blocks_resumes_exactly():
    rig = Rig()
    expected = greedy(rig.decoder, PROMPT, 6)
    tables = rig.tables(0, 3)
    first = rig.run(ScheduledSequence(0, 0, PROMPT, tables, (0,)), starts=(start(0, PROMPT),)).drawn[0]
    old = [b for update in tables for b in update.block_ids]
    out = tuple(BlockTransfer(TransferKind.SWAP_OUT, b, h) for h, b in enumerate(old))
    assert rig.run(transfers=out).drawn == {}
    rig.store.cache.kv[old] = float("nan")
    new = rig.tables(0, 3)
    back = tuple(BlockTransfer(TransferKind.SWAP_IN, h, b) for h, b in enumerate(b for u in new for b in u.block_ids))
    second = rig.run(ScheduledSequence(0, 11, (LAST_SAMPLED,), new, (0,)), transfers=back).drawn[0]
    assert [first.token_ids[0], second.token_ids[0], *decode(rig, 0, 11, 2, 4, 3)] == expected


def test_rows_move_when_others_end_and_nobody_notices():
    rig = Rig(num_blocks=100)
    prompts = {i: tuple((i * 7 + j * 3 + 1) % VOCAB for j in range(5 + i)) for i in range(4)}
    expected = {i: greedy(rig.decoder, p, 6) for i, p in prompts.items()}
    drawn = rig.run(
        *(ScheduledSequence(i, 0, p, rig.tables(0, 4), (i,)) for i, p in prompts.items()),
        starts=tuple(start(i, p) for i, p in prompts.items()),
    ).drawn
    tokens = {i: [drawn[i].token_ids[0]] for i in prompts}
    # Steps leave out different sequences; 1 ends before the third, so the last row moves into its place.
    for live, ends in (([3, 1, 0, 2], ()), ([2, 0], ()), ([3, 0], (1,)), ([2, 3, 0], ()), ([3], (0,))):
        drawn = rig.run(
            *(ScheduledSequence(i, len(prompts[i]) + len(tokens[i]) - 1, (LAST_SAMPLED,), (), (i,)) for i in live),
            ends=ends,
        ).drawn
        assert sorted(drawn) == sorted(live)
        for i in live:
            tokens[i].append(drawn[i].token_ids[0])
    assert rig.runner.num_rows == 2
    # A newcomer takes the next free row, which must not be one that somebody moved out of and still uses.
    newcomer = ScheduledSequence(9, 0, PROMPT, rig.tables(0, 3), (9,))
    veterans = [
        ScheduledSequence(i, len(prompts[i]) + len(tokens[i]) - 1, (LAST_SAMPLED,), (), (i,))
        for i in (2, 3)
        if len(tokens[i]) < 6
    ]
    drawn = rig.run(newcomer, *veterans, starts=(start(9, PROMPT),)).drawn
    assert veterans and drawn[9].token_ids[0] == greedy(rig.decoder, PROMPT, 1)[0]
    for s in veterans:
        tokens[s.seq_id].append(drawn[s.seq_id].token_ids[0])
    assert sorted(row.index for row in rig.runner._rows._rows) == [0, 1, 2]
    for i in prompts:
        assert tokens[i] == expected[i][: len(tokens[i])]


@pytest.mark.parametrize("chunk", [1, 4, 11])
def test_prompt_logprobs_do_not_depend_on_chunks(chunk, monkeypatch):
    """Failure kind 32. The head sees at most `_head_rows` rows at once."""
    monkeypatch.setattr(model_runner, "LOGITS_BYTES", 3 * 4 * VOCAB)
    rig = Rig()
    params = SamplingParams(temperature=0, prompt_logprobs=2, logprobs=1)
    truth = torch.log_softmax(dense_logits(rig.decoder, list(PROMPT)).double(), -1)
    starts, entries = (start(0, PROMPT, params=params),), []
    tables = rig.tables(0, 3)
    for low in range(0, len(PROMPT), chunk):
        part = PROMPT[low : low + chunk]
        sample = (0,) if low + len(part) == len(PROMPT) else ()
        result = rig.run(ScheduledSequence(0, low, part, tables, sample, 2), starts=starts)
        starts, tables = (), ()
        entries += result.prompt_logprobs[0]
    assert max(rig.decoder.head_rows) <= 3
    assert len(entries) == len(PROMPT) - 1
    for p, entry in enumerate(entries):
        token = PROMPT[p + 1]
        assert entry.token_ids[0] == token
        assert entry.rank == 1 + int((truth[p] > truth[p, token]).sum())
        assert list(entry.token_ids[1:]) == truth[p].topk(2).indices.tolist()
        np.testing.assert_allclose(entry.logprobs, truth[p, list(entry.token_ids)], atol=1e-4)
    np.testing.assert_allclose(result.drawn[0].logprobs[0].logprobs[0], truth[-1].max(), atol=1e-4)


def test_many_drawing_rows_go_through_the_head_in_bounded_parts(monkeypatch):
    monkeypatch.setattr(model_runner, "LOGITS_BYTES", 2 * 4 * VOCAB)
    rig = Rig(num_blocks=100, max_num_seqs=2)  # the row store grows past its first size
    prompts = [(i + 1, i + 2, i + 3) for i in range(5)]
    drawn = rig.run(
        *(ScheduledSequence(i, 0, p, rig.tables(0, 1), (i,)) for i, p in enumerate(prompts)),
        starts=tuple(start(i, p) for i, p in enumerate(prompts)),
    ).drawn
    assert rig.decoder.head_rows == [2, 2, 1]
    assert [drawn[i].token_ids[0] for i in range(5)] == [greedy(rig.decoder, p, 1)[0] for p in prompts]


def test_neighbours_contents_change_no_bit():
    """Failure kind 34, through the whole runner: logprobs are compared as bits."""
    params = SamplingParams(temperature=1.0, logprobs=5)

    def answer(neighbours):
        rig = Rig(num_blocks=100)
        everyone = [*neighbours[:2], PROMPT, *neighbours[2:]]
        mine = min(2, len(neighbours))
        got = rig.run(
            *(ScheduledSequence(i, 0, p, rig.tables(0, 4), (i,)) for i, p in enumerate(everyone)),
            starts=tuple(start(i, p, params=params) for i, p in enumerate(everyone)),
        ).drawn
        more = rig.run(*(ScheduledSequence(i, len(p), (LAST_SAMPLED,), (), (i,)) for i, p in enumerate(everyone))).drawn
        return got[mine], more[mine]

    some = answer([(1, 2, 3), (4, 5, 6, 7, 8), (9,)])
    assert some == answer([(3, 2, 9), (40, 5, 16, 7, 18), (19,)])
    assert some == answer([])


# -- one sequence's trouble -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-2, VOCAB, 2**31])
def test_ids_outside_the_vocabulary_fail_their_own_sequence(token):
    """Failure kind 29, should one ever get past the door."""
    rig = Rig()
    bad = (1, token, 3)
    drawn = rig.run(
        ScheduledSequence(0, 0, bad, rig.tables(0, 1), (0,)),
        ScheduledSequence(1, 0, PROMPT, rig.tables(0, 3), (1,)),
        starts=(start(0, bad), start(1, PROMPT)),
    ).drawn
    assert drawn[0].error == f"token id {token} is outside the vocabulary; use ids 0 to {VOCAB - 1}"
    assert drawn[1].token_ids[0] == greedy(rig.decoder, PROMPT, 1)[0]
    # A step that was planned before the error was known does no harm and says the same.
    drawn = rig.run(
        ScheduledSequence(0, 3, (LAST_SAMPLED,), (), (0,)), ScheduledSequence(1, 11, (LAST_SAMPLED,), (), (1,))
    ).drawn
    assert drawn[0].error and drawn[1].error is None
    # The same for one token, as a decode step has it.
    drawn = rig.run(ScheduledSequence(1, 12, (token,), rig.tables(3, 4), (1,))).drawn
    assert f"token id {token} is outside" in drawn[1].error


def test_nan_logits_fail_their_own_sequence():
    rig = Rig()
    rig.decoder._embed[49] = float("nan")  # whoever reads token 49 gets NaN from there on
    head = rig.decoder.logits

    def logits(hidden):
        """The tied head has the broken row too: its column is put right, rows of the sequence are not."""
        result = head(hidden)
        result[:, 49] = torch.where(hidden.isnan().any(1), float("nan"), -9.0)
        return result

    rig.decoder.logits = logits
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    result = rig.run(
        ScheduledSequence(0, 0, (1, 49, 3), rig.tables(0, 1), (0,), 1),
        ScheduledSequence(1, 0, PROMPT, rig.tables(0, 3), (1,)),
        starts=(start(0, (1, 49, 3), params=params), start(1, PROMPT)),
    )
    assert "no usable maximum" in result.drawn[0].error and result.prompt_logprobs[0] == ()
    assert result.drawn[1].error is None and len(result.drawn[1].token_ids) == 1


# -- broken plans ---------------------------------------------------------------------------------------------------


def test_broken_plans_name_the_sequence_and_the_limit():
    rig = Rig()
    rig.run(ScheduledSequence(0, 0, PROMPT, rig.tables(0, 3), (0,)), starts=(start(0, PROMPT),))
    with pytest.raises(InternalError, match="sequence 5 is in the plan but was never started"):
        rig.run(ScheduledSequence(5, 0, (1,), (), (5,)))
    with pytest.raises(InternalError, match="sequence 0 is started but has a row"):
        rig.run(starts=(start(0, PROMPT),))
    with pytest.raises(BoundsError, match=r"sequence 0, group 0: position 12 needs logical block 3"):
        rig.run(ScheduledSequence(0, 12, (1,), (), (0,)))
    with pytest.raises(BoundsError, match=r"logical blocks 15 to 16 do not fit a table of 16"):
        rig.run(ScheduledSequence(0, 11, (1,), (TableUpdate(0, 15, (1, 2)),), (0,)))
    with pytest.raises(BoundsError, match=r"group 2 of 2"):
        rig.run(ScheduledSequence(0, 11, (1,), (TableUpdate(2, 0, (1,)),), (0,)))
    with pytest.raises(BoundsError, match="65 tokens, the limit is max_num_batched_tokens=64"):
        rig.run(ScheduledSequence(0, 0, (1,) * 65, (), (0,)))
    with pytest.raises(BoundsError, match="tables end at position 64"):
        rig.run(ScheduledSequence(0, 64, (1,), (), (0,)))
    with pytest.raises(InternalError, match="scheduled twice"):
        rig.run(ScheduledSequence(0, 11, (1,), (), (0,)), ScheduledSequence(0, 11, (1,), (), (0,)))
    rig.run(ends=(0, 0, 99))  # forgetting is idempotent
    assert rig.runner.num_rows == 0


def test_a_profile_sees_the_parts_of_a_step():
    class Profile:
        def __init__(self):
            self.names = []

        @contextmanager
        def section(self, name):
            self.names.append(name)
            yield

    rig = Rig()
    rig.runner.profile = Profile()
    rig.run(ScheduledSequence(0, 0, PROMPT, rig.tables(0, 3), (0,)), starts=(start(0, PROMPT),))
    assert rig.runner.profile.names == ["prepare", "model", "head", "sample"]


# -- the largest step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seqs", "length", "tokens"), [(4, 16, 64), (4, 64, 20), (3, 64, 2), (2, 8, 64), (1, 64, 64)])
def test_largest_step_fills_the_budget_and_runs(seqs, length, tokens):
    spec = tiny_spec([None, WINDOW], head_dim=8)
    layout = build_layout(spec.windows, block_size=SIZE, bytes_per_token_layer=1)
    limits = {"max_num_seqs": seqs, "max_model_len": length, "max_num_batched_tokens": tokens}
    plan, num_blocks = largest_step(layout, **limits)
    assert plan.num_tokens == min(tokens, seqs * length)
    assert len(plan.scheduled) == min(seqs, tokens)
    assert max(s.num_tokens for s in plan.scheduled) <= length
    rig = Rig(num_blocks=num_blocks, spec=spec, **limits)
    assert len(rig.runner.execute(plan).drawn) == len(plan.scheduled)
    kind = {"dtype": torch.float32, "device": "cpu", "vocab_size": VOCAB}
    peak = largest_step_bytes(FakeDecoder(spec), spec, layout, ReferenceAttention, **kind, **limits).largest
    assert 0 <= peak < 1 << 30
