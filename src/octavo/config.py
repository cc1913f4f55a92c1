"""`EngineConfig`: what a caller asked for, and `resolve`: what the engine uses and why.

A config is frozen. `resolve` returns a new, complete copy (no None left where a number is needed) and a report with
one line per setting that was chosen for the caller. After that no code asks whether a field is None. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from os import PathLike
from typing import Any

from octavo.core.kv_format import parse_kv_dtype
from octavo.core.lora_setting import MAX_LORAS, parse_lora
from octavo.core.speculative_setting import parse_speculative
from octavo.core.weight_format import parse_weight_format
from octavo.errors import ConfigError

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = 16  # tokens; where the device's operators have a size of their own, that one
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Every field has a default; None means "choose for me and say so".

    model: "gemma-3-270m" (the embedded default), a directory, a .gguf file, or a hub id. dtype: auto, float32,
    bfloat16, float16. kv_cache_dtype: "auto" (as dtype), "int8", "int4", "fp8" (GPU), or two of them for keys and
    values ("int8,int4"), see docs/quantization.md. quantization: of weights: None or "auto" (as the file is), "int8",
    "int4" (what loses most in int8), "int4:128", "int4:pure", "gguf" (a GGUF file's own blocks), "fp8" (GPU).
    device: auto, cpu, cuda, npu (docs/hardware.md).
    block_size: tokens of a block; None: 16, on an NPU what its attention reads (128). num_blocks: physical
    blocks of the pool; None derives it from cpu_kv_bytes (CPU) or gpu_memory_utilization (on a CPU: at most that share
    of the memory, what others use included). max_model_len: longest prompt plus output; None: what the
    model and the pool allow. allocation:
    "paged", or "static" (the classic baseline: max_model_len positions reserved per sequence). hybrid_kv: layers with
    a sliding window keep only their window. preemption: auto, recompute, swap. swap_bytes: host memory for
    swapped-out blocks. max_queue: most waiting requests (None: no limit). enforce_eager: no graphs, no compilation.
    model_impl: "octavo" (its own decoder), "transformers" (that library's code around paged attention, slower), or
    "auto": the own decoder where it covers the model (docs/transformers.md).
    speculative: tokens are guessed ahead and checked together ("ngram", "ngram:5", "draft:PATH:4", or a mapping; see
    docs/speculative.md). overlap: the next step is planned while one runs; "auto": on a GPU, without speculation (see
    docs/gpu.md). screen_head: greedy tokens look at a copy of the output head in six bits first, and are the same
    (docs/screening.md); None: where the native CPU kernels run and the head is large. fixed_point: bfloat16 matrices of
    the layers are multiplied as integers of 14 bits (docs/fixed-point.md); None: on a CPU where that is faster.
    lora: adapters to load, name -> directory; max_loras: most of them in memory (docs/lora.md).
    record: file that receives arrivals and decisions for `octavo replay`.
    debug: audit the whole pool after every step.
    """

    model: str = "gemma-3-270m"
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    device: str = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    gpu_memory_utilization: float = 0.9
    cpu_kv_bytes: int | None = None
    enable_prefix_caching: bool | None = None
    allocation: str = "paged"
    hybrid_kv: bool = True
    load_format: str = "auto"
    model_impl: str = "auto"
    skip_tokenizer_init: bool = False
    seed: int | None = None
    enforce_eager: bool = False
    attention_backend: str = "auto"
    preemption: str = "auto"
    swap_bytes: int | None = None
    max_preemptions: int = 8
    max_queue: int | None = None
    copy_on_write: bool = True
    speculative: Mapping[str, Any] | str | None = None
    overlap: bool | str = "auto"
    screen_head: bool | None = None
    fixed_point: bool | None = None
    lora: Mapping[str, str] | str | None = None
    max_loras: int = MAX_LORAS
    record: str | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (name == "tokenizer" and value is None):
                raise ConfigError(f"{name}={value!r}: must be a name or a path, as a string")
        self._choice("dtype", ("auto", "float32", "bfloat16", "float16"))
        self._choice("device", ("auto", "cpu", "cuda", "npu"))
        parse_kv_dtype(self.kv_cache_dtype)
        parse_weight_format(self.quantization)
        object.__setattr__(self, "speculative", parse_speculative(self.speculative))
        object.__setattr__(self, "lora", parse_lora(self.lora))
        self._positive("max_loras")
        if self.lora is not None and len(self.lora) > self.max_loras:
            raise ConfigError(f"lora: {len(self.lora)} adapters, max_loras={self.max_loras}; raise it")
        self._choice("allocation", ("paged", "static"))
        self._choice("load_format", ("auto", "safetensors", "gguf", "dummy"))
        self._choice("model_impl", ("auto", "octavo", "transformers"))
        self._choice("attention_backend", ("auto", "reference", "native", "triton", "ascend"))
        self._choice("preemption", ("auto", "recompute", "swap"))
        if self.overlap != "auto" and not isinstance(self.overlap, bool):
            raise ConfigError(f"overlap={self.overlap!r}: must be auto, True or False")
        # Not by `in` alone: True is equal to 1, and 16.0 to 16.
        if self.block_size is not None and (type(self.block_size) is not int or self.block_size not in BLOCK_SIZES):
            raise ConfigError(f"block_size={self.block_size!r}: must be one of {', '.join(map(str, BLOCK_SIZES))}")
        for name in (
            "num_blocks",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "cpu_kv_bytes",
            "max_queue",
        ):
            self._positive(name)
        for name in ("swap_bytes", "max_preemptions"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name}={value!r}: must be an integer of at least 0")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 < share <= 1.0:
            raise ConfigError(f"gpu_memory_utilization={share!r}: must be a number in (0, 1]")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type in ("bool", "bool | None") and not (isinstance(value, bool) or value is f.default is None):
                raise ConfigError(f"{f.name}={value!r}: must be True or False")
        if self.seed is not None and (type(self.seed) is not int or not -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed={self.seed!r}: must be a whole number of 64 bits")
        if self.record is not None and not isinstance(self.record, str | PathLike):
            raise ConfigError(f"record={self.record!r}: must be the path of a file to write")
        if self.allocation == "static":
            if self.enable_prefix_caching:
                raise ConfigError(
                    "enable_prefix_caching=True has no effect with allocation='static' (nothing is shared); "
                    "leave it out or use allocation='paged'"
                )
            if self.preemption == "swap":
                raise ConfigError("preemption='swap' has no effect with allocation='static': it never preempts")
            if not self.copy_on_write:
                raise ConfigError("copy_on_write=False has no effect with allocation='static': it never shares")

    def _choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ConfigError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(allowed)}")

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name not in ("max_num_seqs", "max_num_batched_tokens", "max_loras"):
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}={value!r}: must be an integer of at least 1")


def make_config(**given: Any) -> EngineConfig:
    """`EngineConfig(**given)` with an error that lists the known names when one is unknown."""
    known = {f.name for f in fields(EngineConfig)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise ConfigError(
            f"unknown setting{'s' * (len(unknown) > 1)} {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    return EngineConfig(**given)


@dataclass(frozen=True)
class Facts:
    """What `resolve` must know of the model and the machine; gathered by the engine builder."""

    model_max_len: int
    bytes_per_block: int
    num_groups: int
    blocks_for_longest: Any  # (max_model_len) -> blocks one sequence can hold at once, all groups
    longest_for_blocks: Any  # (num_blocks) -> longest sequence that fits
    device: str
    dtype: str
    kv_budget_bytes: int  # what the machine can spare for KV
    budget_reason: str
    has_windows: bool = True  # has a layer a sliding window?


@dataclass(frozen=True)
class Choice:
    """One line of the settings report."""

    name: str
    asked: Any
    chosen: Any
    why: str


@dataclass(frozen=True)
class Resolved:
    """A complete config and how it came about."""

    config: EngineConfig
    choices: tuple[Choice, ...] = field(default=())

    def report(self) -> dict[str, dict[str, Any]]:
        """setting -> {asked, chosen, why}, for every field."""
        why = {c.name: c for c in self.choices}
        result = {}
        for f in fields(self.config):
            chosen = getattr(self.config, f.name)
            c = why.get(f.name)
            result[f.name] = {
                "asked": c.asked if c else chosen,
                "chosen": chosen,
                "why": c.why if c else ("default" if chosen == f.default else "as asked"),
            }
        return result


def resolve(config: EngineConfig, facts: Facts) -> Resolved:
    """Settle every open field, or refuse with the numbers: what is needed, what there is, what would fit."""
    choices: list[Choice] = []

    def choose(name: str, chosen: Any, why: str) -> None:
        choices.append(Choice(name, getattr(config, name), chosen, why))

    choose("dtype", facts.dtype, "as asked" if config.dtype != "auto" else "fastest exact dtype of this device")
    choose("device", facts.device, "as asked" if config.device != "auto" else "the device found")
    if config.block_size is None:
        choose("block_size", DEFAULT_BLOCK_SIZE, "the default")
    if config.kv_cache_dtype == "auto":
        choose("kv_cache_dtype", "auto", f"keys and values in {facts.dtype}, as they are computed")
    if config.cpu_kv_bytes is not None:
        asked = f"cpu_kv_bytes={config.cpu_kv_bytes}"
        if config.num_blocks is not None:
            raise ConfigError(f"{asked} and num_blocks={config.num_blocks} both size the pool; give one of them")
        if config.gpu_memory_utilization != EngineConfig.gpu_memory_utilization:
            share = f"gpu_memory_utilization={config.gpu_memory_utilization}"
            raise ConfigError(f"{asked} and {share} both size the pool; give one of them")
        if facts.device != "cpu":
            raise ConfigError(f"{asked} has no effect on {facts.device}; use gpu_memory_utilization or num_blocks")
    if config.max_model_len is not None and config.max_model_len > facts.model_max_len:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's {facts.model_max_len} positions; "
            f"use at most {facts.model_max_len}"
        )
    if config.enable_prefix_caching is None:
        on = config.allocation == "paged"
        choose("enable_prefix_caching", on, "on by default" if on else "static allocation shares nothing")
    if config.enforce_eager and facts.device == "cpu":  # which programs for vLLM set as a matter of course
        choose("enforce_eager", True, "as asked; no effect on a CPU, where nothing is recorded or compiled")
    if not config.hybrid_kv and not facts.has_windows:
        choose("hybrid_kv", False, "as asked; no effect on this model: no layer has a window")
    num_blocks = config.num_blocks
    if num_blocks is None:
        num_blocks = facts.kv_budget_bytes // facts.bytes_per_block
        choose("num_blocks", num_blocks, facts.budget_reason)
    wanted = config.max_model_len or facts.model_max_len
    needed = facts.blocks_for_longest(wanted)
    if needed > num_blocks:
        fits = facts.longest_for_blocks(num_blocks)
        if config.max_model_len is not None or fits < 1:
            remedy = "Lower max_model_len, or raise"
            if fits < 1:
                remedy = f"Even the shortest sequence needs {facts.blocks_for_longest(2)} blocks: raise"
            raise ConfigError(
                f"the KV pool is too small: one sequence of max_model_len={wanted} tokens needs {needed} blocks "
                f"({needed * facts.bytes_per_block / MIB:.1f} MiB), the pool has {num_blocks} "
                f"({num_blocks * facts.bytes_per_block / MIB:.1f} MiB). Longest length that fits: {fits}. "
                f"{remedy} num_blocks or {'cpu_kv_bytes' if facts.device == 'cpu' else 'gpu_memory_utilization'}."
            )
        choose("max_model_len", fits, f"the pool holds {fits} of the model's {facts.model_max_len} positions")
    elif config.max_model_len is None:
        choose("max_model_len", wanted, "the model's own limit")
    return Resolved(replace(config, **{c.name: c.chosen for c in choices}), tuple(choices))
