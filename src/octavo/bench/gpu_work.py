"""What `octavo bench gpu` measures: models by their configs, workloads, goals, and the least a workload can take.

Workloads are drawn as the reference figures were: token ids and lengths come from one `random.Random(0)` in one order,
so both engines compute the same prompts. The figures of the reference engine (vLLM 0.24.0, FlashAttention 3, CUDA
graphs and torch.compile, on one NVIDIA H200) and the goals are those of the project's plan; they say nothing about any
other card. No engine is known here, no clock, no tensor.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.bench.workloads import Item
from octavo.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
REFERENCE_ENGINE = "vLLM 0.24.0 on one H200"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of a workload is run: lengths divided by `shorter`, at most `most` requests, ids low..high."""

    shorter: int = 1
    most: int = 1 << 30
    low: int = 10
    high: int = 10_000

    def length(self, tokens: int) -> int:
        return max(1, tokens // self.shorter)


FULL = Scale()
TINY = Scale(shorter=64, most=5, low=1, high=255)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests handed over at once; n samples each. runs: the median of so many is the figure."""

    name: str
    items: tuple[Item, ...]
    n: int
    temperature: float
    runs: int

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return self.n * sum(item.output for item in self.items)


def _mix256(ids: Callable[[int], tuple[int, ...]], rng: random.Random) -> list[tuple[tuple[int, ...], int]]:
    return [(ids(rng.randint(100, 1024)), rng.randint(100, 1024)) for _ in range(256)]


def _seed2048(ids: Callable[[int], tuple[int, ...]], rng: random.Random) -> list[tuple[tuple[int, ...], int]]:
    requests = []
    for _ in range(256):
        total = rng.randint(256, 2048)
        requests.append((ids(total // 2), total - total // 2))
    return requests


def _prefix(ids: Callable[[int], tuple[int, ...]], rng: random.Random) -> list[tuple[tuple[int, ...], int]]:
    shared = ids(4096)
    return [(shared + ids(64), 64) for _ in range(128)]


#: name -> (requests, samples each, temperature, runs). What it is, in `ABOUT`.
_MAKERS: dict[str, tuple[Callable[..., list[tuple[tuple[int, ...], int]]], int, float, int]] = {
    "mix256": (_mix256, 1, 0.6, 1),
    "seed2048": (_seed2048, 1, 0.6, 1),
    "b16": (lambda ids, rng: [(ids(1024), 1024) for _ in range(16)], 1, 0.0, 1),
    "single": (lambda ids, rng: [(ids(128), 512)], 1, 0.0, 3),
    "prefill": (lambda ids, rng: [(ids(8192), 1)], 1, 0.0, 3),
    "prefill1k": (lambda ids, rng: [(ids(1024), 1)], 1, 0.0, 3),
    "n8": (lambda ids, rng: [(ids(2048), 256) for _ in range(8)], 8, 1.0, 3),
    "prefix": (_prefix, 1, 0.6, 3),
}
ABOUT = {
    "mix256": "256 requests, in and out 100..1024",
    "seed2048": "256 requests, total 256..2048, half of it prompt",
    "b16": "16 x (1024 + 1024)",
    "single": "one sequence, 128 + 512",
    "prefill": "8,192-token prompt to first token",
    "prefill1k": "1,024-token prompt to first token",
    "n8": "8 prompts of 2,048 x n = 8 x 256 tokens",
    "prefix": "128 requests sharing 4,096 tokens, 64 out",
}


def workload(name: str, scale: Scale = FULL) -> Workload:
    """A workload by name. Raises `ConfigError` for an unknown one."""
    if name not in _MAKERS:
        raise ConfigError(f"workload {name!r}: must be one of {', '.join(_MAKERS)}")
    make, n, temperature, runs = _MAKERS[name]
    rng = random.Random(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(rng.randint(scale.low, scale.high) for _ in range(scale.length(count)))

    requests = make(ids, rng)[: scale.most]
    return Workload(name, tuple(Item(p, scale.length(o)) for p, o in requests), n, temperature, runs)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. figure, goal: output tokens per second, or seconds for workloads of one token ("ms")."""

    model: str
    workload: str
    figure: float | None
    goal: float | None
    kv_blocks: int | None = None

    @property
    def key(self) -> str:
        return f"{self.model}/{self.workload}" + ("" if self.kv_blocks is None else f"/{self.kv_blocks}")

    @property
    def in_seconds(self) -> bool:
        return self.workload.startswith("prefill")


ROWS = (
    Row("qwen3-0.6b", "mix256", 22_769, 30_000),
    Row("qwen3-0.6b", "single", 529, 900),
    Row("qwen3-0.6b", "b16", 7_207, 11_000),
    Row("qwen3-0.6b", "n8", 14_103, None),
    Row("qwen3-0.6b", "prefix", 8_137, None),
    Row("qwen3-0.6b", "prefill", 0.0364, None),
    Row("llama-3.1-8b", "single", 205, 230),
    Row("llama-3.1-8b", "b16", 2_632, 2_900),
    Row("llama-3.1-8b", "mix256", 9_817, 11_000),
    Row("llama-3.1-8b", "prefill", 0.2114, 0.205),
    Row("llama-3.1-8b", "prefill1k", 0.0267, 0.025),
    Row("llama-3.1-8b", "n8", 6_435, 8_000),
    Row("llama-3.1-8b", "prefix", 5_381, 7_000),
    Row("llama-2-7b", "seed2048", 5_047, 5_600),
    Row("llama-2-7b", "b16", 2_028, 2_300),
    Row("llama-2-7b", "single", 226, None),
    Row("llama-2-7b", "seed2048", 3_034, 3_500, kv_blocks=2_048),
)
#: Seconds from nothing to ready: (the reference engine's, goal).
START = {"qwen3-0.6b": (64.6, None), "llama-3.1-8b": (47.1, 15.0), "llama-2-7b": (51.3, None)}


def model_config(name: str, *, tiny: bool = False) -> dict[str, Any]:
    """config.json of a model of the table. tiny: the same family with numbers that any processor computes at once."""
    path = CONFIGS / f"{name}.json"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.json")))
        raise ConfigError(f"model {name!r}: must be one of {known}")
    config: dict[str, Any] = json.loads(path.read_text())
    if tiny:
        heads = 4
        config |= {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": heads,
            "num_key_value_heads": 2 if config["num_key_value_heads"] < config["num_attention_heads"] else heads,
            "head_dim": 16, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512,
            "torch_dtype": "float32",
        }  # fmt: skip
        if "max_window_layers" in config:
            config["max_window_layers"] = 2
    return config


def write_model(name: str, folder: Path, *, tiny: bool = False) -> Path:
    """A directory that `load_format="dummy"` can open."""
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(model_config(name, tiny=tiny)))
    return target


@dataclass(frozen=True, slots=True)
class Card:
    """What was measured of the device: bytes read and written per second in a copy, FLOP per second of a product."""

    copy_bytes_per_s: float
    flops: float


@dataclass(frozen=True, slots=True)
class Floor:
    """The least seconds a workload can take, and what says so."""

    seconds: float
    by: str  # "bandwidth" or "arithmetic"


def floor(load: Workload, config: dict[str, Any], card: Card, itemsize: int) -> Floor:
    """Perfect kernels on `card`: every product at its rate, every weight read once per step, every key and value once.

    Shared prompts are computed once; a step advances every sequence by one token, so there are as many steps as the
    longest output has tokens. The larger of the two times is the floor.
    """
    hidden, layers, vocab = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    body = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * config["intermediate_size"])
    prompts = _distinct_prompt_tokens(load)
    drawn = load.output_tokens
    attended = sum(_pairs(len(i.token_ids), i.output, load.n) for i in load.items)
    flops = 2 * body * (prompts + drawn) + 2 * vocab * hidden * drawn + 4 * layers * heads * head_dim * attended
    steps = max(i.output for i in load.items)
    kv_token = 2 * layers * kv_heads * head_dim * itemsize
    read = steps * (body + vocab * hidden) * itemsize + kv_token * sum(
        load.n * (len(i.token_ids) * i.output + i.output * i.output // 2) for i in load.items
    )
    by_bytes, by_flops = read / card.copy_bytes_per_s, flops / card.flops
    return Floor(by_bytes, "bandwidth") if by_bytes > by_flops else Floor(by_flops, "arithmetic")


def _distinct_prompt_tokens(load: Workload) -> int:
    """Prompt tokens that must be computed: what a request shares with the one before it at the front counts once."""
    total = 0
    before: tuple[int, ...] = ()
    for item in load.items:
        same = next((k for k, (a, b) in enumerate(zip(before, item.token_ids)) if a != b), min(len(before), item.total))
        total += len(item.token_ids) - min(same, len(item.token_ids))
        before = item.token_ids
    return total


def _pairs(prompt: int, output: int, n: int) -> int:
    """Query-key pairs that are attended to: causal over the prompt, then one query per token of each sample."""
    return prompt * prompt // 2 + n * (prompt * output + output * output // 2)
