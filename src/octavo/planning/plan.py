"""What a model will need and carry on a device, before anything is loaded: from its sizes and the lengths of a load.

    usable  = memory * utilization
    KV pool = usable - weights - activations of the largest step - what the runtime itself takes

The pool is cut into blocks as the engine will cut it (`core/kv_layout.py`: groups, windows, padding), and sequences are
counted as the engine will hold them: `held(position)` blocks while the token at that position is computed. So what is
planned here and what the engine allocates are the same arithmetic; only activations are an estimate. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import floor

from octavo.core.kv_format import GROUP, check_kv_dtype
from octavo.core.kv_layout import KVLayout, largest
from octavo.errors import ConfigError
from octavo.planning.activations import activation_bytes, rotary_bytes
from octavo.planning.shapes import ModelShape, dtype_bytes

MIB, GIB = 1 << 20, 1 << 30
# CUDA's context and libraries (an NPU is planned like a GPU: nothing was measured there); on a CPU the pages of
# libraries that a first step touches, and the allocator's slack.
RUNTIME_BYTES = {"cuda": 600 * MIB, "npu": 600 * MIB, "cpu": 24 * MIB}
BLOCK_SIZES = (8, 16, 32, 64)
NPU_BLOCK_SIZES = (128, 256)  # what its fused attention reads
MOST_LENGTHS = 1024  # of a long trace, evenly chosen
POINTS = 24  # of a sequence's life, at which what it holds is counted

Length = tuple[int, int]  # prompt tokens, output tokens


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What is asked of a plan. memory: bytes of the device. weight_bytes: exact where the weights' shapes are known.

    quantized_bytes: of the weights in formats that could be asked for instead, by `EngineConfig.quantization`.
    weights_follow_dtype: they are floats, not quantised.
    lengths: (prompt, output) of the load's requests. utilization: share of the memory that the engine may take. The
    other fields are settings of the engine, with its defaults.
    """

    shape: ModelShape
    weight_bytes: int
    memory: int
    lengths: Sequence[Length]
    device: str = "cuda"
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    quantized_bytes: Mapping[str, int] = field(default_factory=dict)
    weights_follow_dtype: bool = True
    utilization: float = 0.9
    block_size: int = 16
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    hybrid_kv: bool = True

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        check_kv_dtype(self.kv_cache_dtype, self.device, self.shape.head_dim)
        if not 0.0 < self.utilization <= 1.0:
            raise ConfigError(f"utilization {self.utilization}: must lie in (0, 1]")
        if self.device not in RUNTIME_BYTES:
            raise ConfigError(f"device={self.device!r}: must be one of {', '.join(RUNTIME_BYTES)}")
        if not self.lengths or any(p < 1 or o < 1 for p, o in self.lengths):
            raise ConfigError("lengths: at least one request with at least one token in and one out is needed")
        limit = self.shape.max_position_embeddings
        if self.max_model_len is not None and not 1 <= self.max_model_len <= limit:
            raise ConfigError(f"max_model_len={self.max_model_len}: the model has {limit} positions")

    @property
    def kv_dtype(self) -> str:
        """Of keys and values: the model's, or a quantised format."""
        return self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype

    @property
    def length_limit(self) -> int:
        """max_model_len, or what the engine would choose: the model's own."""
        return self.max_model_len or self.shape.max_position_embeddings

    @cached_property
    def sampled(self) -> tuple[Length, ...]:
        """At most MOST_LENGTHS of the lengths, cut to `length_limit` as the engine cuts them."""
        every = max(1, -(-len(self.lengths) // MOST_LENGTHS))
        limit = self.length_limit
        kept = [(p, min(o, limit - p)) for p, o in list(self.lengths)[::every] if p < limit]
        if not kept:
            raise ConfigError(f"max_model_len={limit}: every prompt of the load is longer; raise it")
        return tuple(kept)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, and what they go to. `kv` is a whole number of blocks."""

    total: int
    usable: int
    weights: int
    activations: int
    runtime: int
    kv: int
    num_blocks: int

    @property
    def planned(self) -> int:
        """What the engine will have allocated at its peak."""
        return self.weights + self.activations + self.runtime + self.kv


@dataclass(frozen=True, slots=True)
class BlockRow:
    """One block size. fits: sequences at once, on average over their lives; fits_longest: if all were at their end.

    waste: share of the held slots that hold nothing, on average. table_bytes: block tables of `fits` sequences.
    """

    block_size: int
    bytes_per_block: int
    num_blocks: int
    fits: int
    fits_longest: int
    waste: float
    blocks_per_sequence: float
    table_bytes: int


@dataclass(frozen=True, slots=True)
class Change:
    """One setting, changed: sequences that then run at once."""

    setting: str
    old: object
    new: object
    sequences: int
    why: str


@dataclass(frozen=True, slots=True)
class Smaller:
    """Formats with fewer bits than those asked: bytes of the weights, and sequences that then fit, seats or not."""

    kv_cache_dtype: str
    quantization: str | None
    weights: int
    fits: int


@dataclass(frozen=True, slots=True)
class Plan:
    """rows: by block size. now: sequences at once with the settings asked. best: the change that buys most, if any.

    smaller: what fewer bits would bring, least first; empty where all seats are taken with the formats asked.
    """

    ask: Ask
    memory: Memory
    kv_bytes_per_token: int
    static_bytes_per_sequence: int
    static_fits: int
    rows: tuple[BlockRow, ...]
    now: int
    recommended: dict[str, int | float]
    changes: tuple[Change, ...]
    smaller: tuple[Smaller, ...]
    longest: int
    cut_requests: int

    @property
    def best(self) -> Change | None:
        return self.changes[0] if self.changes else None

    @property
    def row(self) -> BlockRow:
        """Of the block size asked."""
        return next(r for r in self.rows if r.block_size == self.ask.block_size)


def make_plan(ask: Ask) -> Plan:
    """Everything `octavo plan` says. Raises ConfigError with the numbers when not even one sequence fits."""
    memory = memory_of(ask)
    layout = _layout(ask)
    longest = max(p + o for p, o in ask.lengths)
    shortest = min(p + 1 for p, _ in ask.sampled)
    if memory.num_blocks < held(layout, shortest - 1):
        need = memory.planned - memory.kv + held(layout, shortest - 1) * layout.bytes_per_block
        raise ConfigError(
            f"{_gib(ask.memory)} are too little: {_gib(memory.weights)} of weights, {_gib(memory.activations)} for the "
            f"largest step and {_gib(memory.runtime)} of runtime leave {_gib(memory.kv)} of the {_gib(memory.usable)} "
            f"that may be used (utilization {ask.utilization:g}); at least {_gib(need / ask.utilization)} are needed"
            + _with_less(ask, need)
        )
    sizes = NPU_BLOCK_SIZES if ask.device == "npu" else BLOCK_SIZES
    rows = tuple(block_row(ask, size) for size in sorted({*sizes, ask.block_size}))
    static = layout.static_bytes(ask.length_limit)
    now = sequences_at_once(ask)
    changes = sorted(_changes(ask, now), key=lambda c: -c.sequences)
    return Plan(
        ask=ask,
        memory=memory,
        kv_bytes_per_token=ask.shape.kv_bytes_per_token(ask.kv_dtype),
        static_bytes_per_sequence=static,
        static_fits=memory.kv // static,
        rows=rows,
        now=now,
        recommended=_recommend(ask),
        changes=tuple(c for c in changes if c.sequences > now),
        smaller=_smaller(ask),
        longest=longest,
        cut_requests=sum(p + o > ask.length_limit for p, o in ask.lengths),
    )


def memory_of(ask: Ask) -> Memory:
    """Where the device's bytes go."""
    usable = int(ask.memory * ask.utilization)
    activations = activation_bytes(
        ask.shape, ask.dtype, device=ask.device, tokens=ask.max_num_batched_tokens, sequences=ask.max_num_seqs
    )
    runtime = RUNTIME_BYTES[ask.device] + rotary_bytes(ask.shape, ask.device, ask.length_limit)
    fixed_point = ask.shape.fixed_point_bytes if _floats_on_cpu(ask) and ask.dtype == "bfloat16" else 0
    weights = ask.weight_bytes + head_screen_bytes(ask) + fixed_point
    left = max(0, usable - weights - activations - runtime)
    num_blocks = left // _layout(ask).bytes_per_block
    kv = num_blocks * _layout(ask).bytes_per_block
    return Memory(ask.memory, usable, weights, activations, runtime, kv, num_blocks)


def head_screen_bytes(ask: Ask) -> int:
    """The copy of a large output head of floats that greedy tokens look at first, on a CPU."""
    return ask.shape.head_screen_bytes if _floats_on_cpu(ask) else 0


def _floats_on_cpu(ask: Ask) -> bool:
    return ask.device == "cpu" and ask.quantization in (None, "auto") and ask.weights_follow_dtype


def held(layout: KVLayout, position: int) -> int:
    """Blocks that a sequence holds, over all groups, while the token at `position` is computed.

    What lies behind a window is given back when the next block is begun, not at every token.
    """
    size = layout.block_size
    begun = position // size * size
    return sum(position // size + 1 - g.first_needed(begun) // size for g in layout.groups)


def block_row(ask: Ask, block_size: int) -> BlockRow:
    """The same pool in blocks of another size."""
    ask = replace(ask, block_size=block_size)
    layout, memory = _layout(ask), memory_of(ask)
    mean, longest, filled = _means(layout, ask.sampled)
    fits = floor(memory.num_blocks / mean)
    entries = sum(layout.blocks_for(p + o) for p, o in ask.sampled) / len(ask.sampled) * layout.num_groups
    return BlockRow(
        block_size=block_size,
        bytes_per_block=layout.bytes_per_block,
        num_blocks=memory.num_blocks,
        fits=fits,
        fits_longest=floor(memory.num_blocks / longest),
        waste=1 - filled / (mean * block_size),
        blocks_per_sequence=mean,
        table_bytes=round(4 * entries * fits),
    )


@lru_cache(maxsize=64)
def _means(layout: KVLayout, lengths: tuple[Length, ...]) -> tuple[float, float, float]:
    """(blocks held, blocks held at the end, slots that hold a position): means over the sequences that run at a moment.

    A sequence runs for as many steps as it has output tokens, so long outputs weigh more.
    """
    blocks = ends = filled = weight = 0.0
    for prompt, output in lengths:
        points = range(0, output, max(1, output // POINTS))
        positions = [prompt - 1 + i for i in points]
        blocks += output * sum(held(layout, p) for p in positions) / len(positions)
        filled += output * sum(_filled(layout, p) for p in positions) / len(positions)
        ends += output * held(layout, prompt + output - 1)
        weight += output
    return blocks / weight, ends / weight, filled / weight


def _filled(layout: KVLayout, position: int) -> int:
    """Slots of the held blocks with a computed position, over all groups."""
    size = layout.block_size
    begun = position // size * size
    return sum(position + 1 - g.first_needed(begun) // size * size for g in layout.groups)


def sequences_at_once(ask: Ask) -> int:
    """How many sequences of this load run at once: what fits, and no more than max_num_seqs."""
    return min(block_row(ask, ask.block_size).fits, ask.max_num_seqs)


def _recommend(ask: Ask) -> dict[str, int | float]:
    """Settings for this load on this device; each by a rule that the documentation states.

    A CPU's pool is given in bytes (`cpu_kv_bytes`), a GPU's as a share of its memory.
    """
    utilization = max(0.5, floor(100 * min(0.9, 1 - 2 * GIB / ask.memory)) / 100) if ask.device != "cpu" else 0.9
    longest = max(p + o for p, o in ask.lengths)
    length = min(ask.shape.max_position_embeddings, -(-longest // 256) * 256)
    trial = replace(ask, utilization=utilization, max_model_len=length)
    # The larger block where it costs next to nothing: half the table, the same sequences.
    sizes = NPU_BLOCK_SIZES if ask.device == "npu" else (16, 32)
    small, large = (block_row(trial, size) for size in sizes)
    block_size = sizes[large.fits >= 0.98 * small.fits]
    trial = replace(trial, block_size=block_size)
    for _ in range(2):  # more seats need more memory for their logits, and leave less for blocks
        fits = max(1, block_row(trial, block_size).fits)
        trial = replace(trial, max_num_seqs=min(512, fits if fits < 16 else fits // 8 * 8))
    # The longest length must fit alone.
    layout, blocks = _layout(trial), memory_of(trial).num_blocks
    length = largest(length, lambda n: held(layout, n - 1) <= blocks, 1)
    found: dict[str, int | float] = {"block_size": block_size, "max_num_seqs": trial.max_num_seqs}
    if ask.device == "cpu":
        found["cpu_kv_bytes"] = memory_of(trial).kv
    else:
        found["gpu_memory_utilization"] = utilization
    return found | {"max_model_len": length}


def _changes(ask: Ask, now: int) -> list[Change]:
    """Single changes, each with the sequences that then run at once."""
    fits = block_row(ask, ask.block_size).fits
    if fits > ask.max_num_seqs:
        more = replace(ask, max_num_seqs=fits)
        more = replace(ask, max_num_seqs=block_row(more, ask.block_size).fits)  # their logits take memory too
        why = "blocks are there, seats are not"
        return [Change("max_num_seqs", ask.max_num_seqs, more.max_num_seqs, sequences_at_once(more), why)]
    # With seats enough, or what a change brings would not show.
    wide = replace(ask, max_num_seqs=2 * ask.max_num_seqs)
    found: list[Change] = []

    def add(setting: str, old: object, new: object, changed: Ask, why: str) -> None:
        found.append(Change(setting, old, new, sequences_at_once(changed), why))

    if ask.dtype == "float32":
        weights = ask.weight_bytes // (2 if ask.weights_follow_dtype else 1)
        half = replace(wide, dtype="bfloat16", weight_bytes=weights)
        add("dtype", "float32", "bfloat16", half, "half of every float weight, key and value")
    if ask.utilization < 0.9:
        idle = replace(wide, utilization=0.9)
        add("gpu_memory_utilization", ask.utilization, 0.9, idle, "memory that is idle now")
    if not ask.hybrid_kv and any(w is not None for w in ask.shape.windows):
        add("hybrid_kv", False, True, replace(wide, hybrid_kv=True), "windowed layers keep only their window")
    for size in NPU_BLOCK_SIZES if ask.device == "npu" else (16, 32):
        if size < ask.block_size:
            add("block_size", ask.block_size, size, replace(wide, block_size=size), "less is lost in the last block")
    if ask.max_num_batched_tokens > 512:
        fewer = replace(wide, max_num_batched_tokens=512)
        add("max_num_batched_tokens", ask.max_num_batched_tokens, 512, fewer, "a smaller largest step")
    if not any(c.sequences > now for c in found):
        more = replace(wide, memory=ask.memory * 5 // 4)
        add("memory", _gib(ask.memory), _gib(more.memory), more, "no setting helps; a quarter more memory would")
    return found


def _smaller(ask: Ask) -> tuple[Smaller, ...]:
    """Fewer bits for keys and values, for weights, and for both, where seats stay empty for want of memory."""
    fits = block_row(ask, ask.block_size).fits
    if fits >= ask.max_num_seqs:
        return ()
    kinds = ["auto", "int8", *(["int4"] if ask.shape.head_dim % GROUP == 0 else [])]
    if ask.device == "npu":  # its fused attention reads no quantised prompts
        kinds = ["auto"]
    caches = kinds if ask.kv_cache_dtype == "auto" else [ask.kv_cache_dtype]
    found = []
    for quantization in (ask.quantization, *ask.quantized_bytes):
        for cache in caches:
            weights = ask.quantized_bytes.get(quantization or "", ask.weight_bytes)
            other = replace(ask, kv_cache_dtype=cache, quantization=quantization, weight_bytes=weights)
            found.append(Smaller(cache, quantization, memory_of(other).weights, block_row(other, ask.block_size).fits))
    return tuple(sorted((s for s in found if s.fits > fits), key=lambda s: s.fits))


def _with_less(ask: Ask, need: int) -> str:
    """What would be needed with quantised weights, as the end of a sentence."""
    needs = {
        kind: _gib((need - memory_of(ask).weights + size) / ask.utilization)
        for kind, size in ask.quantized_bytes.items()
    }
    return f", or {' and '.join(f'{text} with quantization={k!r}' for k, text in needs.items())}" if needs else ""


def _layout(ask: Ask) -> KVLayout:
    return ask.shape.layout(ask.block_size, ask.kv_dtype, hybrid=ask.hybrid_kv)


def _gib(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB // 16 else f"{count / MIB:.1f} MiB"
