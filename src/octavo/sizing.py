"""How large everything is: bytes for KV blocks, the layout of a block, swap space, and the scheduler's limits.

Used by the builder (and by benchmarks that need its sizes). It loads and allocates nothing. What is chosen for the
caller, and why, goes into the settings report.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from octavo.config import DEFAULT_BLOCK_SIZE, Choice, EngineConfig, Facts, Resolved
from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.settings import SchedulerSettings
from octavo.device_setup import measured_budget
from octavo.devices import Device
from octavo.errors import ConfigError
from octavo.kernels.interface import make_backend
from octavo.models.load import LoadedModel
from octavo.models.spec import ModelSpec
from octavo.runner.memory import Budget, available_cpu_bytes, cpu_budget

# The cost rule of preemption ("auto"), in rough figures of the device: bytes/s of a block move, FLOP/s of a product.
MOVE_BYTES_PER_S = {"cpu": 8e9, "accelerator": 20e9}
FLOPS = {"cpu": 100e9, "accelerator": 100e12}


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


def kv_budget(config: EngineConfig, model: LoadedModel, layout: KVLayout, dtype: torch.dtype, where: Device) -> Budget:
    """Bytes for KV blocks: as asked, or what the device can spare once the weights are in."""
    if config.num_blocks is not None:
        return Budget(config.num_blocks * layout.bytes_per_block, "as asked")
    if where.kind == "cpu":
        if config.cpu_kv_bytes is None:
            # The output head's screen comes with the first greedy tokens.
            return cpu_budget(config.gpu_memory_utilization, available_cpu_bytes() - model.screen_bytes)
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


def facts_of(
    config: EngineConfig, longest: int, layout: KVLayout, budget: Budget, device: str, dtype: torch.dtype
) -> Facts:
    """What `resolve` must know."""
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


def settle_swap(resolved: Resolved, layout: KVLayout, device: str) -> Resolved:
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
