"""From a config to a running engine: device, dtype, weights, KV pool, backend, scheduler.

The only place that decides sizes. What is chosen for the caller, and why, goes into the settings report.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from octavo.attention_settings import settle_blocks
from octavo.config import DEFAULT_BLOCK_SIZE, Choice, EngineConfig, Facts, Resolved, resolve
from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.kv_format import check_kv_dtype, kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.weight_format import check_weight_format
from octavo.device_setup import (
    make_device_runner,
    may_record,
    measured_budget,
    queues_steps,
    settle_graphs,
    weights_must_fit,
)
from octavo.devices import Device, find_device
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.kernels import cpu, triton
from octavo.kernels.interface import AttentionBackend, make_backend
from octavo.kernels.ops import Ops, TorchOps
from octavo.logs import logger
from octavo.lora import load_adapters
from octavo.models.load import LoadedModel, load_model, pick_dtype
from octavo.models.spec import ModelSpec
from octavo.overlapping import overlapped, overlapping_settings, settle_overlap
from octavo.runner.kv_store import KVStore
from octavo.runner.memory import Budget, available_cpu_bytes, cpu_budget
from octavo.runner.model_runner import ModelRunner, Profile
from octavo.speculation import load_draft, settle_speculation

# The cost rule of preemption ("auto"), in rough figures of the device: bytes/s of a block move, FLOP/s of a product.
MOVE_BYTES_PER_S = {"cpu": 8e9, "accelerator": 20e9}
FLOPS = {"cpu": 100e9, "accelerator": 100e12}


class Instrument(Profile, Protocol):
    """Watches an engine from inside: gets the sections of a step, and may stand in front of operations and backend."""

    def ops(self, inner: Ops) -> Ops: ...

    def backend(self, inner: AttentionBackend) -> AttentionBackend: ...


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None] | None = None,
    instrument: Instrument | None = None,
) -> Engine:
    """Everything `Engine.build` promises. Raises `ConfigError` or `ModelError` with the numbers."""
    if "blocks" in os.environ.get("OCTAVO_DEBUG", ""):
        config = replace(config, debug=True)
    where = find_device(config.device)
    device = where.kind
    check_kv_dtype(config.kv_cache_dtype, device)
    dtype = pick_dtype(config.dtype, device)
    report = None if on_progress is None else lambda done, total: on_progress("weights", done, total)
    ops = _ops(config, device, dtype)
    if instrument is not None:
        ops = instrument.ops(ops)
    with weights_must_fit(config, where):
        model = load_model(config, dtype=dtype, device=device, ops=ops, on_progress=report)
    check_kv_dtype(config.kv_cache_dtype, device, model.spec.head_dim)
    config, chosen = settle_blocks(config, model.spec, dtype, where)
    target_layout = layout = layout_for(config, model.spec, dtype.itemsize)
    guide = load_draft(config, model, layout, dtype, device, ops, report)
    if guide is not None:
        target_layout, layout = guide.pool.target, guide.pool.whole
    budget = _budget(config, model, target_layout, dtype, where)
    specs = [m.spec for m in ((model,) if guide is None else (model, guide.model))]
    facts = _facts(config, min(spec.max_position_embeddings for spec in specs), layout, budget, device, dtype)
    windowed = any(window is not None for spec in specs for window in spec.windows)
    resolved = resolve(config, replace(facts, has_windows=windowed))
    resolved = Resolved(resolved.config, (*chosen, *resolved.choices))
    resolved = _settle_swap(_settle_impl(resolved, model), layout, device)
    final = resolved.config
    assert final.num_blocks is not None and final.max_model_len is not None and final.swap_bytes is not None
    host_blocks = final.swap_bytes // layout.bytes_per_block
    num_blocks = final.num_blocks + may_record(where, final)  # one more, where rows of graphs that are nobody's write
    store = KVStore.allocate(
        target_layout, model.spec, num_blocks, dtype=dtype, device=where.torch, num_host_blocks=host_blocks
    )
    backend = make_backend(final.attention_backend, store.cache, model.spec)
    if final.attention_backend == "auto":
        why = "fastest that fits" if backend.name != "reference" or device != "cpu" else cpu.why_unavailable()
        final = replace(final, attention_backend=backend.name)
        resolved = Resolved(final, (*resolved.choices, Choice("attention_backend", "auto", backend.name, why)))
    graphs, resolved = settle_graphs(resolved, where, backend, model)
    final = resolved.config
    make_runner = partial(
        make_device_runner(where, final, graphs, final.num_blocks)  # type: ignore[arg-type]
        if queues_steps(where, final)
        else ModelRunner,
        max_num_seqs=final.max_num_seqs,
        max_model_len=final.max_model_len,  # type: ignore[arg-type]
        max_num_batched_tokens=final.max_num_batched_tokens,
        vocab_size=model.spec.vocab_size,
    )
    draft = None if guide is None else guide.place(store, final.attention_backend)
    words = "" if guide is None else str(guide.pool)
    speculation, resolved = settle_speculation(resolved, model, store, make_runner, draft, words)
    watched = backend if instrument is None else instrument.backend(backend)
    guided = {} if draft is None else {"draft": draft}
    runner = make_runner(model.decoder, store, watched, profile=instrument, **guided)
    adapters = load_adapters(final, model, runner, where)
    overlap, resolved = settle_overlap(resolved, where)
    settings = replace(scheduler_settings(final, layout, model.spec, host_blocks, device), speculation=speculation)
    scheduler = Scheduler(overlapping_settings(settings, overlap), layout)
    steps, asynchronous = overlapped(scheduler, runner) if overlap else (None, None)
    eos = model.tokenizer.eos_token_ids if model.tokenizer is not None else model.spec.eos_token_ids
    logger.info(
        "%s: %d blocks of %d tokens (%.1f MiB), %s attention, %s on %s",
        config.model,
        final.num_blocks,
        final.block_size,
        final.num_blocks * layout.bytes_per_block / (1 << 20),  # type: ignore[operator]
        backend.name,
        dtype,
        device,
    )
    return Engine(
        resolved,
        scheduler,
        asynchronous or runner,
        spec=model.spec,
        tokenizer=model.tokenizer,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=tuple(eos),
        hardware=_hardware(where, model, store, budget),
        overlap=steps,
        adapters=adapters,
    )


def _settle_impl(resolved: Resolved, model: LoadedModel) -> Resolved:
    choice = Choice("model_impl", resolved.config.model_impl, model.impl, model.impl_why)
    return Resolved(replace(resolved.config, model_impl=model.impl), (*resolved.choices, choice))


def _hardware(where: Device, model: LoadedModel, store: KVStore, budget: Budget) -> dict[str, object]:
    """The device and what its memory went to, in bytes, for reports."""
    return {
        "device": where.kind,
        "name": where.name,
        "cores": os.cpu_count(),
        "total_bytes": where.total_bytes(),
        "available_bytes": where.available_bytes(),
        "weight_bytes": model.weight_bytes,
        "kv_bytes": store.device_bytes,
        "activation_bytes": budget.activation_bytes,
    }


def layout_for(config: EngineConfig, spec: ModelSpec, itemsize: int) -> KVLayout:
    """Groups of layers over the pool; the static baseline and `hybrid_kv=False` keep one table for all layers."""
    return build_layout(
        spec.windows,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        bytes_per_token_layer=kv_bytes_per_token_layer(
            config.kv_cache_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=itemsize
        ),
        hybrid=config.hybrid_kv and config.allocation == "paged",
        kv_dtype=config.kv_cache_dtype,
    )


def scheduler_settings(
    config: EngineConfig, layout: KVLayout, spec: ModelSpec, host_blocks: int, device: str
) -> SchedulerSettings:
    """The scheduler's share of a resolved config."""
    assert config.num_blocks is not None and config.max_model_len is not None
    return SchedulerSettings(
        num_blocks=config.num_blocks,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        allocation=config.allocation,
        copy_on_write=config.copy_on_write,
        enable_prefix_caching=bool(config.enable_prefix_caching),
        preemption=config.preemption,
        num_host_blocks=host_blocks,
        swap_block_tokens=swap_block_tokens(layout, spec, device),
        max_preemptions=config.max_preemptions,
        max_queue=config.max_queue,
    )


def swap_block_tokens(layout: KVLayout, spec: ModelSpec, device: str) -> float:
    """What moving one block out and back costs, in tokens computed in the same time."""
    kind = "cpu" if device == "cpu" else "accelerator"
    width = spec.num_heads * spec.head_dim + 2 * spec.num_kv_heads * spec.head_dim + spec.num_heads * spec.head_dim
    per_layer = spec.hidden_size * (width + 3 * spec.intermediate_size)
    token_seconds = 2 * spec.num_layers * per_layer / FLOPS[kind]
    return 2 * layout.bytes_per_block / MOVE_BYTES_PER_S[kind] / token_seconds


def _ops(config: EngineConfig, device: str, dtype: torch.dtype) -> Ops:
    kind = device.partition(":")[0]
    quantization = check_weight_format(config.quantization, kind)
    if config.attention_backend == "triton" or (kind == "cuda" and config.attention_backend == "auto"):
        if not (reason := triton.why_unusable(kind)):
            return triton.make_ops(quantization)
        logger.warning("%s: norms and activations run through torch, one small operation after the other", reason)
    if device != "cpu" or config.attention_backend == "reference":
        return TorchOps(quantization)
    if cpu.why_unavailable():
        logger.warning("%s", cpu.why_unavailable())
    return cpu.make_ops(dtype, quantization)


def _budget(config: EngineConfig, model: LoadedModel, layout: KVLayout, dtype: torch.dtype, where: Device) -> Budget:
    """Bytes for KV blocks: as asked, or what the device can spare once the weights are in."""
    if config.num_blocks is not None:
        return Budget(config.num_blocks * layout.bytes_per_block, "as asked")
    if where.kind == "cpu":
        if config.cpu_kv_bytes is None:
            return cpu_budget(config.gpu_memory_utilization)
        if config.cpu_kv_bytes > (available := available_cpu_bytes()):
            raise ConfigError(f"cpu_kv_bytes={config.cpu_kv_bytes}: {available} bytes are available; ask for less")
        return Budget(config.cpu_kv_bytes, f"cpu_kv_bytes={config.cpu_kv_bytes}")
    make = partial(make_backend, config.attention_backend)
    return measured_budget(config, model, layout, dtype, where, make)


def blocks_for_longest(config: EngineConfig, layout: KVLayout, length: int) -> int:
    """Most blocks, of all groups, that one sequence of `length` positions holds at once."""
    if config.allocation == "paged":
        return PagedAllocation(BlockPool(1), layout).worst_case(length - 1, length, 1)
    return layout.blocks_for(length) * layout.num_groups


def _facts(
    config: EngineConfig, longest: int, layout: KVLayout, budget: Budget, device: str, dtype: torch.dtype
) -> Facts:
    counter = PagedAllocation(BlockPool(1), layout)
    return Facts(
        model_max_len=longest,
        bytes_per_block=layout.bytes_per_block,
        num_groups=layout.num_groups,
        blocks_for_longest=partial(blocks_for_longest, config, layout),
        longest_for_blocks=counter.longest,
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        kv_budget_bytes=budget.bytes,
        budget_reason=budget.reason,
    )


def _settle_swap(resolved: Resolved, layout: KVLayout, device: str) -> Resolved:
    """Host memory for swapped blocks: none by default on a CPU (it is the same memory), else a quarter of the pool."""
    config = resolved.config
    assert config.num_blocks is not None
    pool_bytes = config.num_blocks * layout.bytes_per_block
    if config.swap_bytes is not None:
        if config.swap_bytes and (config.preemption == "recompute" or config.allocation == "static"):
            other = "allocation='static'" if config.allocation == "static" else "preemption='recompute'"
            raise ConfigError(f"swap_bytes={config.swap_bytes} has no effect with {other}")
        if config.preemption == "swap" and config.swap_bytes < layout.bytes_per_block:
            raise ConfigError(
                f"preemption='swap' needs swap_bytes of at least one block ({layout.bytes_per_block} bytes)"
            )
        return resolved
    if config.preemption == "swap":
        chosen, why = pool_bytes, "preemption='swap': as large as the pool"
    elif device == "cpu" or config.preemption == "recompute" or config.allocation == "static":
        chosen, why = 0, "swapping on a CPU moves within the same memory" if device == "cpu" else "nothing is swapped"
    else:
        chosen, why = pool_bytes // 4, "a quarter of the pool"
    choice = Choice("swap_bytes", None, chosen, why)
    return Resolved(replace(config, swap_bytes=chosen), (*resolved.choices, choice))
