"""The largest step a configuration allows, as a plan, and the memory it takes beyond weights and KV blocks.

Run once before the KV pool is sized. It computes `max_num_batched_tokens` tokens in sequences as long as they may be
(the widest attention) and draws for as many sequences as there may be, each with filters and logprobs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from octavo.core.kv_layout import KVLayout
from octavo.core.step import ScheduledSequence, SequenceStart, StepPlan, TableUpdate
from octavo.devices import Device, device_of
from octavo.kernels.interface import AttentionBackend, KVCache
from octavo.models.spec import ModelSpec
from octavo.runner.kv_store import KVStore
from octavo.runner.memory import measure_activation_peak
from octavo.runner.model_runner import DecoderLike, ModelRunner
from octavo.sampling_params import SamplingParams

_PARAMS = SamplingParams(top_p=0.9, logprobs=8)
# On a device of its own: what adjusts logits there too, with the tables that the first such sequence brings about.
_PARAMS_ON_DEVICE = SamplingParams(
    top_p=0.9, logprobs=8, repetition_penalty=1.1, logit_bias={0: 1.0}, allowed_token_ids=[0]
)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What steps take above weights and KV blocks: the largest of all, and one token of every sequence."""

    largest: int
    decode: int


def largest_step(
    layout: KVLayout,
    *,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    params: SamplingParams = _PARAMS,
) -> tuple[StepPlan, int]:
    """(plan, blocks it needs). All its sequences share the same blocks: only the shapes matter, not the values."""
    longest = min(max_model_len, max_num_batched_tokens)
    num_blocks = layout.blocks_for(longest) * layout.num_groups
    starts, scheduled, left = [], [], max_num_batched_tokens
    for seq_id in range(max_num_seqs):
        # Every sequence that follows must still get a token.
        length = min(longest, left - (max_num_seqs - seq_id - 1))
        length = max(1, min(length, left))
        ids = tuple(1 for _ in range(length))
        per_group = layout.blocks_for(length)
        tables = tuple(
            TableUpdate(group, 0, tuple(range(group * per_group, (group + 1) * per_group)))
            for group in range(layout.num_groups)
        )
        starts.append(SequenceStart(seq_id, "largest-step", 0, params, ids, length, seed=0))
        scheduled.append(ScheduledSequence(seq_id, 0, ids, tables, (seq_id,)))
        left -= length
        if left == 0:
            break
    return StepPlan(0, tuple(scheduled), starts=tuple(starts)), num_blocks


def largest_step_bytes(
    decoder: DecoderLike,
    spec: ModelSpec,
    layout: KVLayout,
    make_backend: Callable[[KVCache, ModelSpec], AttentionBackend],
    *,
    dtype: torch.dtype,
    device: torch.device | str | Device,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
    vocab_size: int,
    make_runner: Callable[..., ModelRunner] = ModelRunner,
) -> StepBytes:
    """Peak bytes of steps above weights and KV blocks. Allocates a small KV store and drops it again.

    make_runner: the class whose steps are measured, or a function like it.
    """
    where = device_of(device)
    plan, num_blocks = largest_step(
        layout,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        params=_PARAMS if make_runner is ModelRunner else _PARAMS_ON_DEVICE,
    )
    store = KVStore.allocate(layout, spec, num_blocks, dtype=dtype, device=where.torch)
    store.cache.kv.zero_()  # touch every page now, so that the blocks are not counted as part of the step
    runner = make_runner(
        decoder,
        store,
        make_backend(store.cache, spec),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        vocab_size=vocab_size,
    )
    largest = measure_activation_peak(lambda: runner.execute(plan), where)
    again = tuple(ScheduledSequence(s.seq_id, s.num_tokens - 1, (1,), (), (s.seq_id,)) for s in plan.scheduled)
    decode = measure_activation_peak(lambda: runner.execute(StepPlan(1, again)), where)
    return StepBytes(largest, decode)
