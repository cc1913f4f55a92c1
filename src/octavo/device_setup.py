"""Which runner a device gets, and whether its decode steps are recorded as graphs. Used by the builder only.

A device that works through a queue of its own gets a `DeviceRunner`; a processor, and every engine that speculates
(whose steps bring a number of tokens that only the host knows), a `ModelRunner`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from octavo.config import Choice, EngineConfig, Resolved
from octavo.core.kv_layout import KVLayout
from octavo.devices import Device
from octavo.errors import ConfigError
from octavo.kernels import triton
from octavo.kernels.interface import AttentionBackend, KVCache
from octavo.models.load import LoadedModel
from octavo.models.spec import ModelSpec
from octavo.runner.graphs import ALLOWANCE, GraphStore, buckets_up_to
from octavo.runner.largest_step import StepBytes, largest_step_bytes
from octavo.runner.memory import GIB, Budget, cuda_budget
from octavo.runner.model_runner import ModelRunner

if TYPE_CHECKING:
    from octavo.kernels.adjusting import Adjusting
    from octavo.runner.device_sampler import Draw, Listing

RECORDABLE = ("triton",)  # attention backends whose work depends on no value of the host


def queues_steps(device: Device, config: EngineConfig) -> bool:
    """Does the engine get a `DeviceRunner`?"""
    return device.is_asynchronous and device.kind != "npu" and config.speculative is None


def may_record(device: Device, config: EngineConfig) -> bool:
    """Could decode steps be recorded, if backend and model allow it? Then the pool needs a block more."""
    return device.has_graphs and queues_steps(device, config) and not config.enforce_eager


def why_not_recorded(backend: AttentionBackend, model: LoadedModel) -> str:
    """Why steps with this backend and model cannot be recorded; empty when they can."""
    if not getattr(backend, "graph_safe", backend.name in RECORDABLE):
        return f"attention_backend={backend.name!r} looks at its tables on the host"
    if not getattr(model.decoder, "graph_safe", model.spec.experts is None and model.impl == "octavo"):
        return "the model decides on the host which products a step needs"
    return ""


def settle_graphs(
    resolved: Resolved, device: Device, backend: AttentionBackend, model: LoadedModel
) -> tuple[GraphStore | None, Resolved]:
    """The store of recorded steps, or None; and a report that says which and why."""
    config = resolved.config
    if not may_record(device, config):
        return None, resolved
    why = why_not_recorded(backend, model)
    if why:
        choice = Choice("enforce_eager", False, True, f"{why}: steps run kernel by kernel")
        return None, Resolved(replace(config, enforce_eager=True), (*resolved.choices, choice))
    words = f"decode steps of up to {config.max_num_seqs} sequences are recorded as graphs when they come again"
    choice = Choice("enforce_eager", False, False, words)
    return GraphStore(device, config.max_num_seqs), Resolved(config, (*resolved.choices, choice))


def make_device_runner(
    device: Device, config: EngineConfig, graphs: GraphStore | None = None, spare_block: int = 0
) -> Callable[..., ModelRunner]:
    """As the class `DeviceRunner`, for one device."""
    from octavo.runner.device_runner import DeviceRunner  # a processor does without it, and starts sooner

    drawing, listing, adjusting = _sampling(device, config)
    return partial(
        DeviceRunner,
        device=device,
        graphs=graphs,
        spare_block=spare_block,
        drawing=drawing,
        listing=listing,
        adjusting=adjusting,
    )


def _sampling(device: Device, config: EngineConfig) -> tuple[Draw, Listing, Adjusting]:
    """Triton's kernels where they run and nobody asked for another backend, else torch operations."""
    wanted = config.attention_backend == "triton" or (config.attention_backend == "auto" and device.kind == "cuda")
    if wanted and not triton.why_unusable(device.kind):
        from octavo.kernels.triton import sampling

        return sampling.draw, sampling.list_logprobs, sampling.TritonAdjusting()
    from octavo.kernels.adjusting import Adjusting
    from octavo.runner.device_sampler import draw, list_logprobs

    return draw, list_logprobs, Adjusting()


@contextmanager
def weights_must_fit(config: EngineConfig, device: Device) -> Iterator[None]:
    """Inside, weights are loaded. Where the device has no room for them, `ConfigError` with the numbers."""
    free, total = (device.available_bytes(), device.total_bytes()) if device.kind != "cpu" else (0, 0)
    try:
        yield
    except torch.OutOfMemoryError as error:
        held = device.held_bytes()
        raise ConfigError(
            f"the weights of {config.model} do not fit {device.name}: {free / GIB:.2f} of {total / GIB:.2f} GiB were "
            f"free, {held / GIB:.2f} GiB of them were taken when there was no more. Free the device, use another one, "
            "or load smaller weights (dtype='bfloat16', quantization='int8' or 'int4')"
        ) from error


def measured_budget(
    config: EngineConfig,
    model: LoadedModel,
    layout: KVLayout,
    dtype: torch.dtype,
    device: Device,
    make_backend: Callable[[KVCache, ModelSpec], AttentionBackend],
) -> Budget:
    """KV bytes of a device with memory of its own: the share asked for, minus what was measured and set aside."""
    found: StepBytes = largest_step_bytes(
        model.decoder,
        model.spec,
        layout,
        make_backend,
        dtype=dtype,
        device=device,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len or model.spec.max_position_embeddings,
        max_num_batched_tokens=config.max_num_batched_tokens,
        vocab_size=model.spec.vocab_size,
        make_runner=make_device_runner(device, config) if queues_steps(device, config) else ModelRunner,
    )
    # Graphs keep scratch memory of their own, as much as the largest decode step needs, and a description of each step.
    graphs = found.decode + ALLOWANCE * len(buckets_up_to(config.max_num_seqs)) if may_record(device, config) else 0
    return cuda_budget(config.gpu_memory_utilization, found.largest, device, graphs)
