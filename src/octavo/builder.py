"""From a config to a running engine: device, dtype, weights, KV pool, backend, runner, scheduler.

The order is the point: each stage needs what the ones before have settled, and adds what it chose to the settings
report. How large things are is decided in `sizing.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from octavo.attention_settings import settle_blocks
from octavo.config import Choice, EngineConfig, Resolved, resolve
from octavo.core.kv_format import check_kv_dtype
from octavo.core.kv_layout import KVLayout
from octavo.core.scheduler import Scheduler
from octavo.core.weight_format import check_weight_format
from octavo.device_setup import make_device_runner, may_record, queues_steps, settle_graphs, weights_must_fit
from octavo.devices import Device, find_device
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.host_room import Room
from octavo.kernels import cpu, triton
from octavo.kernels.interface import AttentionBackend, make_backend
from octavo.kernels.ops import Ops, TorchOps
from octavo.logs import logger
from octavo.lora import load_adapters
from octavo.models.load import LoadedModel, load_model, pick_dtype
from octavo.overlapping import overlapped, overlapping_settings, settle_overlap
from octavo.runner.graphs import GraphStore
from octavo.runner.kv_store import KVStore
from octavo.runner.memory import Budget
from octavo.runner.model_runner import ModelRunner, Profile
from octavo.sizing import facts_of, kv_budget, layout_for, scheduler_settings, settle_swap
from octavo.speculation import LoadedDraft, load_draft, settle_speculation


class Instrument(Profile, Protocol):
    """Watches an engine from inside: gets the sections of a step, and may stand in front of operations and backend."""

    def ops(self, inner: Ops) -> Ops: ...

    def backend(self, inner: AttentionBackend) -> AttentionBackend: ...


def build_engine(
    config: EngineConfig,
    on_progress: Callable[[str, int, int], None] | None = None,
    instrument: Instrument | None = None,
    texts: bool = False,
    room: Room | None = None,
) -> Engine:
    """Everything `Engine.build` promises. room: for weights. Raises `ConfigError` or `ModelError` with the numbers."""
    room = room or Room(0)
    room.stop()
    if "blocks" in os.environ.get("OCTAVO_DEBUG", ""):
        config = replace(config, debug=True)
    where = find_device(config.device)
    check_kv_dtype(config.kv_cache_dtype, where.kind)
    dtype = pick_dtype(config.dtype, where.kind)
    ops = _ops(config, where.kind, dtype)
    if instrument is not None:
        ops = instrument.ops(ops)
    report = None if on_progress is None else lambda done, total: on_progress("weights", done, total)
    with weights_must_fit(config, where), cpu.weights_in(room):
        model = load_model(config, dtype=dtype, device=where.kind, ops=ops, on_progress=report, texts=texts)
    check_kv_dtype(config.kv_cache_dtype, where.kind, model.spec.head_dim)
    config, chosen = settle_blocks(config, model.spec, dtype, where)
    layout = layout_for(config, model.spec, dtype.itemsize)
    guide = load_draft(config, model, layout, dtype, where.kind, ops, report)
    target, whole = (layout, layout) if guide is None else (guide.pool.target, guide.pool.whole)
    budget = kv_budget(config, model, target, dtype, where)
    resolved = _resolved(config, chosen, model, guide, whole, budget, where, dtype)

    host_blocks = resolved.config.swap_bytes // whole.bytes_per_block  # type: ignore[operator]
    store = _allocate(resolved.config, model, target, host_blocks, where, dtype)
    backend, resolved = _backend(resolved, model, store, where)
    graphs, resolved = settle_graphs(resolved, where, backend, model)
    make_runner = _runner_maker(resolved.config, model, graphs, where)
    draft = None if guide is None else guide.place(store, resolved.config.attention_backend)
    words = "" if guide is None else str(guide.pool)
    speculation, resolved = settle_speculation(resolved, model, store, make_runner, draft, words)
    watched = backend if instrument is None else instrument.backend(backend)
    guided = {} if draft is None else {"draft": draft}
    runner = make_runner(model.decoder, store, watched, profile=instrument, **guided)
    adapters = load_adapters(resolved.config, model, runner, where)

    overlap, resolved = settle_overlap(resolved, where)
    settings = scheduler_settings(resolved.config, whole, model.spec, host_blocks, where.kind)
    scheduler = Scheduler(overlapping_settings(replace(settings, speculation=speculation), overlap), whole)
    steps, asynchronous = overlapped(scheduler, runner) if overlap else (None, None)
    _log(resolved.config, whole, backend, where, dtype)
    return Engine(
        resolved,
        scheduler,
        asynchronous or runner,
        spec=model.spec,
        tokenizer=model.tokenizer,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=tuple((model.tokenizer or model.spec).eos_token_ids),
        hardware=_hardware(where, model, store, budget),
        overlap=steps,
        adapters=adapters,
    )


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
    return cpu.make_ops(dtype, quantization, config.fixed_point)


def _fixed_point(config: EngineConfig, model: LoadedModel, where: Device, dtype: torch.dtype) -> Choice:
    """Whether layers were kept as fixed-point numbers. Raises `ConfigError`: True has no effect."""
    asked = config.fixed_point
    if getattr(model.decoder, "fixed_point", False):
        return Choice("fixed_point", asked, True, "integers multiply faster, and bfloat16 numbers keep their digits")
    if asked is not False and (where.kind != "cpu" or config.attention_backend == "reference"):
        why = "only the native CPU kernels can"
    else:
        why = cpu.why_not_fixed_point(dtype, asked) or "no matrix of its layers is kept in bfloat16"
    if asked:
        raise ConfigError(f"fixed_point=True has no effect: {why}; leave it out")
    return Choice("fixed_point", asked, False, why)


def _resolved(
    config: EngineConfig,
    chosen: tuple[Choice, ...],
    model: LoadedModel,
    guide: LoadedDraft | None,
    layout: KVLayout,
    budget: Budget,
    where: Device,
    dtype: torch.dtype,
) -> Resolved:
    """Every setting decided. chosen: what was settled before. Raises `ConfigError` for what does not fit together."""
    specs = [m.spec for m in ((model,) if guide is None else (model, guide.model))]
    facts = facts_of(config, min(spec.max_position_embeddings for spec in specs), layout, budget, where.kind, dtype)
    windowed = any(window is not None for spec in specs for window in spec.windows)
    resolved = resolve(config, replace(facts, has_windows=windowed))
    choice = Choice("model_impl", resolved.config.model_impl, model.impl, model.impl_why)
    screen = Choice("screen_head", config.screen_head, model.screen_bytes > 0, model.screen_why)
    fixed = _fixed_point(config, model, where, dtype)
    settled = replace(resolved.config, model_impl=model.impl, screen_head=screen.chosen, fixed_point=fixed.chosen)
    resolved = Resolved(settled, (*chosen, *resolved.choices, choice, screen, fixed))
    return settle_swap(resolved, layout, where.kind)


def _allocate(
    config: EngineConfig, model: LoadedModel, layout: KVLayout, host_blocks: int, where: Device, dtype: torch.dtype
) -> KVStore:
    """The pool; where steps are recorded with one block more, for the rows of a graph that are nobody's."""
    assert config.num_blocks is not None
    num_blocks = config.num_blocks + may_record(where, config)
    return KVStore.allocate(
        layout, model.spec, num_blocks, dtype=dtype, device=where.torch, num_host_blocks=host_blocks
    )


def _backend(
    resolved: Resolved, model: LoadedModel, store: KVStore, where: Device
) -> tuple[AttentionBackend, Resolved]:
    """The attention backend, and which one "auto" became."""
    asked = resolved.config.attention_backend
    backend = make_backend(asked, store.cache, model.spec)
    if asked != "auto":
        return backend, resolved
    why = "fastest that fits" if backend.name != "reference" or where.kind != "cpu" else cpu.why_unavailable()
    choice = Choice("attention_backend", "auto", backend.name, why)
    return backend, Resolved(replace(resolved.config, attention_backend=backend.name), (*resolved.choices, choice))


def _runner_maker(
    config: EngineConfig, model: LoadedModel, graphs: GraphStore | None, where: Device
) -> Callable[..., ModelRunner]:
    """(decoder, cache, backend, …) -> the runner that this device gets."""
    assert config.num_blocks is not None and config.max_model_len is not None
    queued = queues_steps(where, config)
    make: Callable[..., ModelRunner] = (
        make_device_runner(where, config, graphs, config.num_blocks) if queued else ModelRunner
    )
    limits: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": config.max_model_len,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "vocab_size": model.spec.vocab_size,
    }
    return partial(make, **limits)


def _log(config: EngineConfig, layout: KVLayout, backend: AttentionBackend, where: Device, dtype: torch.dtype) -> None:
    assert config.num_blocks is not None
    logger.info(
        "%s: %d blocks of %d tokens (%.1f MiB), %s attention, %s on %s",
        config.model,
        config.num_blocks,
        config.block_size,
        config.num_blocks * layout.bytes_per_block / (1 << 20),
        backend.name,
        dtype,
        where.kind,
    )


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
