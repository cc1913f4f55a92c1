"""Memory policies to compare, by short names, and what each of them makes of the same bytes.

    static              max_model_len positions reserved for each sequence (the classic baseline)
    paged:16            blocks of 16 tokens on demand; "paged" alone means 16
    paged:16+prefix     with the prefix cache
    paged:16+swap       preempted sequences move to host memory as large as the pool, instead of being recomputed
    paged:16+auto       swap or recompute, whichever the cost model says is cheaper

Everything else (model, bytes, limits) is the `Setup`, so that only the policy differs.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.config import BLOCK_SIZES
from octavo.core.kv_layout import KVLayout
from octavo.core.settings import SchedulerSettings
from octavo.errors import ConfigError
from octavo.planning.cost_model import CostModel
from octavo.planning.devices import Device
from octavo.planning.shapes import ModelShape, dtype_bytes

BLOCK_COMPARISON = ("paged:8", "paged:16", "paged:32", "paged:64")


@dataclass(frozen=True, slots=True)
class Policy:
    """How memory is handed out. preemption: "recompute", "swap" or "auto"."""

    name: str
    allocation: str = "paged"
    block_size: int = 16
    prefix_caching: bool = False
    preemption: str = "recompute"


@dataclass(frozen=True, slots=True)
class Setup:
    """What all policies share. kv_bytes: for blocks. dtype: of weights and KV, unless quantization (int8, int4[:group])
    or kv_dtype say otherwise."""

    shape: ModelShape
    kv_bytes: int
    max_model_len: int
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    quantization: str | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048


def parse_policy(text: str) -> Policy:
    """From its name. Raises `ConfigError` that says what is known."""
    base, *extras = text.strip().split("+")
    kind, _, size = base.partition(":")
    unknown = [e for e in extras if e not in ("prefix", "swap", "auto")]
    if kind not in ("static", "paged") or unknown:
        raise ConfigError(
            f"policy {text!r}: {(unknown or [kind])[0]!r} is unknown; write static, paged:BLOCK_SIZE, and after paged "
            "+prefix, and +swap or +auto"
        )
    if kind == "static":
        if size or extras:
            raise ConfigError(f"policy {text!r}: static has no block size, shares nothing and never preempts; omit it")
        return Policy("static", "static")
    if size and (not size.isdigit() or int(size) not in BLOCK_SIZES):
        raise ConfigError(f"policy {text!r}: block size {size!r} must be one of {', '.join(map(str, BLOCK_SIZES))}")
    if "swap" in extras and "auto" in extras:
        raise ConfigError(f"policy {text!r}: swap and auto exclude each other; keep one")
    preemption = "swap" if "swap" in extras else "auto" if "auto" in extras else "recompute"
    block_size = int(size) if size else 16
    name = "+".join([f"paged:{block_size}", *sorted(set(extras))])
    return Policy(name, "paged", block_size, "prefix" in extras, preemption)


def settings_of(policy: Policy, setup: Setup, model: CostModel | None = None) -> tuple[SchedulerSettings, KVLayout]:
    """What the policy makes of the bytes. model: prices swapping for "auto". Raises `ConfigError` if nothing fits."""
    layout = setup.shape.layout(policy.block_size, setup.kv_dtype or setup.dtype, hybrid=policy.allocation == "paged")
    num_blocks = setup.kv_bytes // layout.bytes_per_block
    need = layout.blocks_for(setup.max_model_len) * layout.num_groups if policy.allocation == "static" else 1
    if num_blocks < need:
        raise ConfigError(
            f"policy {policy.name}: {setup.kv_bytes} bytes hold {num_blocks} blocks of {layout.bytes_per_block} bytes, "
            f"it needs at least {need}; give more bytes or a smaller max_model_len"
        )
    swapping = policy.preemption != "recompute"
    price = 1.0
    if swapping and model is not None and model.above > 0:
        price = 2 * model.swap / model.above
    settings = SchedulerSettings(
        num_blocks=num_blocks,
        max_model_len=setup.max_model_len,
        max_num_seqs=setup.max_num_seqs,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        allocation=policy.allocation,
        enable_prefix_caching=policy.prefix_caching,
        preemption=policy.preemption,
        num_host_blocks=num_blocks if swapping else 0,
        swap_block_tokens=price,
    )
    return settings, layout


def kv_budget(
    shape: ModelShape,
    device: Device,
    dtype: str,
    *,
    utilization: float = 0.9,
    max_num_batched_tokens: int = 2048,
    quantization: str | None = None,
) -> int:
    """Bytes left for blocks: `utilization` of the device, less the weights and a large step's activations.

    Activations are estimated: per token of the step the widest layer's inputs and outputs and the residual stream, and
    float32 logits for an eighth of the tokens. Raises `ConfigError` if nothing is left.
    """
    size = dtype_bytes(dtype)
    weights = shape.weight_bytes(dtype, quantization)
    per_token = (2 * shape.intermediate_size + 4 * shape.hidden_size + 3 * shape.num_heads * shape.head_dim) * size
    activations = max_num_batched_tokens * (per_token + 4 * shape.vocab_size // 8)
    left = int(device.memory * utilization) - weights - activations
    if left <= 0:
        raise ConfigError(
            f"{shape.name} in {dtype} needs {weights} bytes of weights and about {activations} of activations; "
            f"{utilization:.0%} of {device.name} is {int(device.memory * utilization)}. Take a larger device, or give "
            "--kv-bytes to simulate one"
        )
    return left
