"""Prepared troubles for `octavo doctor`: small runs of the real engine and scheduler in which one thing is wrong.

Each is recorded as any run is (`record=`), over scripted tokens and a clock that a cost per step drives, so they take a
moment, need no model, and come out the same everywhere. `octavo doctor --demo NAME` shows what the doctor says to one;
the tests check that each is named and that the healthy one has no finding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import DEFAULT_BLOCK_SIZE, EngineConfig, Facts, resolve
from octavo.core.allocation import PagedAllocation
from octavo.core.block_pool import BlockPool
from octavo.core.fake_runner import FakeRunner
from octavo.core.kv_layout import KVLayout, build_layout
from octavo.core.scheduler import Scheduler
from octavo.core.settings import SchedulerSettings
from octavo.core.step import StepPlan, StepResult
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.models.spec import ModelSpec, RotarySpec
from octavo.sampling_params import BeamSearchParams, SamplingParams

GIB = 1 << 30
VOCABULARY = 997
MODEL_LEN = 1024
#: A model of 8 layers with 2 key/value heads of 64 in bfloat16.
LAYERS, BYTES_PER_TOKEN_LAYER = 8, 2 * 2 * 64 * 2


@dataclass(frozen=True)
class Ask:
    """One request of a load: when, which prompt, how many tokens (of how many samples, or how wide a beam search)."""

    at: float
    prompt: list[int]
    tokens: int
    n: int = 1
    beams: int = 0
    salt: str | None = None


@dataclass(frozen=True)
class Trouble:
    """`expected`: the code of the finding that names it; None for the healthy run. The rest is the run."""

    name: str
    expected: str | None
    about: str
    load: Callable[[], list[Ask]]
    settings: dict[str, Any] = field(default_factory=dict)
    windows: tuple[int | None, ...] = (None,) * LAYERS
    hardware: dict[str, Any] = field(default_factory=dict)
    step_seconds: Callable[[int], float] = lambda tokens: 0.004 + 0.0001 * tokens


def _text(length: int, name: int, begin: Sequence[int] = ()) -> list[int]:
    """A prompt: `begin`, then tokens that only this name has."""
    rest = length - len(begin)
    return [*begin, *(1 + (name * 7919 + i * 31 + i * i * (name % 13 + 1)) % (VOCABULARY - 1) for i in range(rest))]


SYSTEM = _text(96, 1)


def _chat(count: int = 40, every: float = 0.05) -> list[Ask]:
    """A common beginning, questions and answers of several lengths, in a steady stream."""
    return [Ask(i * every, _text(150 + i * 37 % 200, i + 2, SYSTEM), 30 + i * 17 % 60) for i in range(count)]


def _all_at_once(count: int, prompt: int, tokens: int, **more: Any) -> list[Ask]:
    return [Ask(0.0, _text(prompt + i % 7, i + 2), tokens + i % 5, **more) for i in range(count)]


def _in_turn(prefixes: int, rounds: int) -> list[Ask]:
    """Long documents, asked about one after the other, round after round."""
    return [
        Ask(0.2 * (r * prefixes + p), _text(340, 50 + r, _text(320, p + 2)), 20)
        for r in range(rounds)
        for p in range(prefixes)
    ]


def _growing() -> list[Ask]:
    """Ever more long answers at once."""
    return [Ask(0.25 * i, _text(20, i + 2), 400 - 8 * i) for i in range(32)]


def _salted() -> list[Ask]:
    """One text, a salt for every caller."""
    return [Ask(0.06 * i, _text(200, 1), 30, salt=f"caller {i}") for i in range(40)]


TROUBLES: dict[str, Trouble] = {
    t.name: t
    for t in (
        Trouble("healthy", None, "a steady stream of chats with room to spare", _chat),
        Trouble(
            "memory-short", "memory-short", "long prompts, a pool for three of them",
            lambda: _all_at_once(40, 300, 24), {"num_blocks": 72, "max_num_seqs": 32},
        ),
        Trouble(
            "preemption-thrash", "preemption-thrash", "short prompts let many in, long answers push them out again",
            lambda: _all_at_once(32, 32, 220), {"num_blocks": 64, "max_num_seqs": 32},
        ),
        Trouble(
            "copies-frequent", "copies-frequent", "eight samples of a few tokens each",
            lambda: [Ask(0.05 * i, _text(45 + i % 13, i + 2), 5, n=8) for i in range(30)],
        ),
        Trouble(
            "evicted-early", "evicted-early", "twelve documents in turn, a pool for five of them",
            lambda: _in_turn(12, 5), {"num_blocks": 120},
        ),
        Trouble(
            "block-size", "block-size", "blocks of 256 tokens for texts of 60",
            lambda: [Ask(0.03 * i, _text(30 + i * 11 % 25, i + 2), 20 + i % 9) for i in range(60)],
            {"block_size": 256, "num_blocks": 64},
        ),
        Trouble(
            "free-blocks-zero", "free-blocks-zero", "six sequences fill the pool to the last block, the rest waits",
            lambda: [Ask(0.0, _text(130, i + 2), 20 + i * 11 % 40) for i in range(60)],
            {"block_size": 64, "num_blocks": 18, "max_model_len": 512, "enable_prefix_caching": False},
        ),
        Trouble(
            "throughput-capped", "throughput-capped", "two seats, blocks for a hundred sequences",
            lambda: _all_at_once(40, 60, 40), {"num_blocks": 1000, "max_num_seqs": 2},
        ),
        Trouble(
            "throughput-flat", "throughput-flat", "a processor that is busy with eight sequences",
            _growing, {"num_blocks": 2000, "max_num_seqs": 64}, step_seconds=lambda tokens: 0.001 * max(8, tokens),
        ),
        Trouble(
            "short-lengths", "short-lengths", "two words an answer, one request after the other",
            lambda: [Ask(0.05 * i, _text(120, i + 2), 2) for i in range(60)],
        ),
        Trouble(
            "window-unused", "window-unused", "windowed layers that keep everything",
            lambda: [Ask(0.2 * i, _text(500 + i, i + 2), 60) for i in range(24)],
            {"hybrid_kv": False, "num_blocks": 1000}, windows=(64, 64, 64, None) * 2,
        ),
        Trouble(
            "static-allocation", "static-allocation", "the longest length reserved for every sequence",
            _chat, {"allocation": "static", "num_blocks": 640},
        ),
        Trouble("salts-split", "salts-split", "one text under as many salts as callers", _salted),
        Trouble(
            "usage-fraction-low", "usage-fraction-low", "a tenth of the device for the pool, the rest idle",
            lambda: _all_at_once(40, 300, 24),
            {"gpu_memory_utilization": 0.1, "max_num_seqs": 32},
            hardware={"device": "cuda", "total_bytes": 80 * GIB, "available_bytes": 70 * GIB, "kv_blocks": 72},
        ),
        Trouble(
            "usage-fraction-high", "usage-fraction-high", "nothing left for anybody else on the device",
            _chat, {"gpu_memory_utilization": 0.99},
            hardware={"device": "cuda", "total_bytes": 80 * GIB, "available_bytes": GIB, "kv_blocks": 600},
        ),
    )
}  # fmt: skip


class _PacedRunner:
    """Scripted tokens; every step moves the clock on by what it would cost."""

    def __init__(self, inner: FakeRunner, seconds: Callable[[int], float]) -> None:
        self._inner, self._seconds = inner, seconds
        self.now = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        self.now += self._seconds(plan.num_tokens)
        return self._inner.execute(plan)


def record_trouble(name: str, path: Path | str) -> Trouble:
    """Run a trouble and write its recording to `path`. Raises ConfigError for a name that is not prepared."""
    trouble = TROUBLES.get(name)
    if trouble is None:
        raise ConfigError(f"no trouble is called {name!r}; prepared: {', '.join(TROUBLES)}")
    engine, runner = trouble_engine(trouble, str(path))
    waiting = sorted(trouble.load(), key=lambda ask: ask.at)
    number = 0
    while number < len(waiting) or engine.has_unfinished():
        while number < len(waiting) and (waiting[number].at <= runner.now or not engine.has_unfinished()):
            ask = waiting[number]
            runner.now = max(runner.now, ask.at)
            engine.add_request(f"r{number}", ask.prompt, params_of(ask), cache_salt=ask.salt)
            number += 1
        engine.step()
    engine.close()
    return trouble


def params_of(ask: Ask) -> SamplingParams | BeamSearchParams:
    if ask.beams:
        return BeamSearchParams(beam_width=ask.beams, max_tokens=ask.tokens)
    return SamplingParams(temperature=0.0 if ask.n == 1 else 1.0, n=ask.n, max_tokens=ask.tokens, ignore_eos=True)


def trouble_engine(trouble: Trouble, path: str) -> tuple[Engine, _PacedRunner]:
    """The engine that `Engine.build` would make, but for the model."""
    given = {"num_blocks": 600, "max_model_len": MODEL_LEN, "max_num_seqs": 16, **trouble.settings}
    if "gpu_memory_utilization" in trouble.settings:
        del given["num_blocks"]
    config = EngineConfig(model=f"demo:{trouble.name}", record=path, **given)
    layout = build_layout(
        trouble.windows,
        block_size=config.block_size or DEFAULT_BLOCK_SIZE,
        bytes_per_token_layer=BYTES_PER_TOKEN_LAYER,
        hybrid=config.hybrid_kv and config.allocation == "paged",
    )  # fmt: skip
    hardware = dict(trouble.hardware)
    blocks = hardware.pop("kv_blocks", 0)
    resolved = resolve(config, _facts(layout, str(hardware.get("device", "cpu")), blocks * layout.bytes_per_block))
    final = resolved.config
    assert final.num_blocks is not None and final.max_model_len is not None
    settings = SchedulerSettings(
        num_blocks=final.num_blocks,
        max_model_len=final.max_model_len,
        max_num_seqs=final.max_num_seqs,
        max_num_batched_tokens=final.max_num_batched_tokens,
        allocation=final.allocation,
        enable_prefix_caching=bool(final.enable_prefix_caching),
        preemption=final.preemption,
    )
    fake = FakeRunner(layout, final.num_blocks, vocab_size=VOCABULARY, check=False)
    runner = _PacedRunner(fake, trouble.step_seconds)
    engine = Engine(
        resolved,
        Scheduler(settings, layout),
        runner,
        spec=_spec(trouble.windows),
        vocab_size=VOCABULARY,
        clock=lambda: runner.now,
        hardware=hardware,
    )
    return engine, runner


def _spec(windows: tuple[int | None, ...]) -> ModelSpec:
    """A small model of the shape that the pool's bytes are those of; nothing computes with it."""
    return ModelSpec(
        architecture="llama",
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1536,
        num_layers=LAYERS,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        max_position_embeddings=MODEL_LEN,
        rms_norm_eps=1e-6,
        windows=windows,
        rotaries=(RotarySpec(),),
        rotary=(0,) * LAYERS,
    )


def _facts(layout: KVLayout, device: str, kv_bytes: int) -> Facts:
    counter = PagedAllocation(BlockPool(1), layout)
    return Facts(
        model_max_len=MODEL_LEN,
        bytes_per_block=layout.bytes_per_block,
        num_groups=layout.num_groups,
        blocks_for_longest=lambda length: counter.worst_case(length - 1, length, 1),
        longest_for_blocks=counter.longest,
        device=device,
        dtype="bfloat16",
        kv_budget_bytes=kv_bytes,
        budget_reason="gpu_memory_utilization",
    )
