"""Loads to measure with: prompts as token ids and how many tokens each shall produce.

Everything is drawn from `random.Random(seed)`, so that a load is the same on every machine and for every engine.
No engine is known here, no tensor, no clock.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

LOW_ID, HIGH_ID = 1000, 100_000  # token ids of random prompts, where the vocabulary has that many
MIXED_PROMPT, MIXED_OUTPUT = (32, 512), (32, 256)
MIXED_COUNT = 64


@dataclass(frozen=True, slots=True)
class Item:
    """One request: its prompt and the exact number of tokens it produces (the end of text is ignored).

    lora: the adapter it runs with.
    """

    token_ids: tuple[int, ...]
    output: int
    lora: str | None = None

    @property
    def total(self) -> int:
        return len(self.token_ids) + self.output


def random_ids(count: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    """`count` token ids; the special ids at the beginning of a large vocabulary are left out."""
    stream = random.Random(seed)
    low, high = (LOW_ID, HIGH_ID) if vocab_size >= HIGH_ID else (1, vocab_size)
    return tuple(stream.randrange(low, high) for _ in range(count))


def items_of(lengths: Sequence[tuple[int, int]], vocab_size: int, seed: int = 0) -> list[Item]:
    """Random prompts of given (prompt, output) lengths; every prompt is different."""
    return [Item(random_ids(p, 10_000 * (seed + 1) + i, vocab_size), o) for i, (p, o) in enumerate(lengths)]


def mixed_lengths(count: int = MIXED_COUNT, seed: int = 0) -> list[tuple[int, int]]:
    """The mixed load: prompts of 32 to 512 tokens, outputs of 32 to 256, both uniform."""
    stream = random.Random(seed)
    return [(stream.randint(*MIXED_PROMPT), stream.randint(*MIXED_OUTPUT)) for _ in range(count)]


def spread_lengths(
    count: int, shortest: int, longest: int, *, output_share: float = 0.25, seed: int = 0
) -> list[tuple[int, int]]:
    """Total lengths evenly spread over shortest..longest, in random order; `output_share` of each is output."""
    if not 2 <= shortest <= longest:
        raise ConfigError(f"lengths from {shortest} to {longest}: the shortest must be at least 2 and no longer")
    step = (longest - shortest) / max(1, count - 1)
    totals = [round(shortest + i * step) for i in range(count)]
    random.Random(seed).shuffle(totals)
    outputs = [min(total - 1, max(1, round(total * output_share))) for total in totals]
    return [(total - output, output) for total, output in zip(totals, outputs)]


def shared_prefix(count: int, prefix: int, tail: int, output: int, vocab_size: int, seed: int = 0) -> list[Item]:
    """`count` requests whose prompts begin with the same `prefix` tokens and go on with `tail` of their own."""
    head = random_ids(prefix, 70 + seed, vocab_size)
    return [Item(head + random_ids(tail, 100_000 + 1000 * seed + i, vocab_size), output) for i in range(count)]


def read_lengths(path: str) -> list[tuple[int, int]]:
    """Lengths from a JSON file: a list of [prompt tokens, output tokens], or an object that has it as "mixed".

    Raises `ConfigError` that says what is wrong and where.
    """
    try:
        given = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"workload {path}: {error}") from None
    pairs: Any = given.get("mixed") if isinstance(given, Mapping) else given
    if not isinstance(pairs, list) or not pairs:
        raise ConfigError(f'workload {path}: needs a non-empty list of [prompt, output] lengths, or {{"mixed": [...]}}')
    for index, pair in enumerate(pairs):
        good = isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 1 for n in pair)
        if not good:
            raise ConfigError(f"workload {path}: entry {index} is {pair!r}; two whole numbers of at least 1 are needed")
    return [(p, o) for p, o in pairs]


def check_lengths(lengths: Sequence[tuple[int, int]], max_model_len: int) -> None:
    """Raise `ConfigError` if a request is longer than the engine allows: it would be refused half-way through a run."""
    longest = max(p + o for p, o in lengths)
    if longest > max_model_len:
        raise ConfigError(
            f"the load has a request of {longest} tokens, max_model_len is {max_model_len}; "
            "raise --max-model-len or use shorter lengths"
        )
