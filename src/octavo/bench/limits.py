"""What the machine could do at most, measured in the same run, and the share of it that a step reaches.

A step of few sequences waits for the weights to be read, one of many or of a prompt for their products. The yardsticks
are the plainest native loops on all threads (csrc/limits.h): memory on huge pages read once, multiply-adds in
registers. Both vary with what the machine's other guests do: they are measured beside the figures, not noted once. On
virtual machines reading varies with the pages that an allocation gets from the host, by half: a share above one is no
mistake, and no proof that nothing is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from octavo.bench.instrument import HEAD, PRODUCTS
from octavo.bench.report import Column, Table, fixed, percent

if TYPE_CHECKING:
    from octavo.engine import Engine

PROBE_BYTES = 256 << 20  # much more than the caches hold
_ROUNDS = 100_000


@dataclass(frozen=True)
class Limits:
    """reading: bytes/s. arithmetic: operations/s in the dtype, or of fixed-point numbers. Each: best of its passes, and
    median.
    """

    reading: tuple[float, float]
    arithmetic: tuple[float, float]
    fixed_point: bool = False

    def note(self) -> str:
        read, reads = (rate / 1e9 for rate in self.reading)
        flops, most = (rate / 1e9 for rate in self.arithmetic)
        return (
            f"limits measured in this run on the same threads: memory is read at {reads:.1f} GB/s in the median pass "
            f"over {PROBE_BYTES >> 20} MiB ({read:.1f} in the best), "
            f"{'products of 16-bit integers' if self.fixed_point else 'multiply-adds'} reach {most:.0f} G/s "
            f"({flops:.0f}). What is read fast depends on the pages that an allocation got, so weights can be read "
            "faster than this memory"
        )


def measure_limits(dtype: str, seconds: float = 0.4, fixed_point: bool = False) -> Limits | None:
    """None where the native kernels are not built. seconds: for each of the two. fixed_point: `EngineConfig`'s."""
    from octavo.kernels import cpu

    if cpu.why_unavailable():
        return None
    from octavo.kernels.cpu.loader import native

    kind = 3 if fixed_point else {"float32": 0, "bfloat16": 1, "float16": 2}[dtype]
    reading = native().read_rate(PROBE_BYTES, seconds)
    return Limits(reading, native().arithmetic_rate(kind, _ROUNDS, seconds), fixed_point)


@dataclass(frozen=True)
class StepWork:
    """weights: bytes that a step reads whatever it computes. layers: weights that every row is multiplied with.

    last, head: those that only drawing rows are: of the last layer all but keys and values (operation by operation more
    is computed, see `AttentionBatch.wanted`), and the head. With a screened head (`EngineConfig.screen_head`) `weights`
    has the screen in its place, and `head` is 0: its products are no float products.
    """

    weights: int
    layers: int
    last: int
    head: int
    floats: bool  # not quantised: products are float products

    @classmethod
    def of(cls, engine: Engine) -> StepWork | None:
        """None where bytes and products are not known beforehand: experts, foreign decoders, untied GGUF heads."""
        from octavo.core.weight_format import parse_weight_format
        from octavo.models.names import matrices
        from octavo.models.weight_size import matrix_formats

        spec = engine.spec
        if spec is None or spec.experts is not None or not engine.hardware:
            return None
        if spec.extra.get("model_impl") == "transformers":
            return None
        sizes = {name: prod(shape) for name, shape in matrices(spec).items()}
        head, total = spec.vocab_size * spec.hidden_size, engine.hardware["weight_bytes"]
        itemsize = 4 if engine.config.dtype == "float32" else 2
        looked_up: int | None = 0  # an embedding of its own: only rows of it are read
        if not spec.tied_head:
            form = matrix_formats(spec, parse_weight_format(engine.config.quantization)).get("embedding.weight")
            looked_up = head * itemsize if form is None else form.matrix_bytes(spec.vocab_size, spec.hidden_size)
        if looked_up is None:
            return None
        prefix = f"layers.{spec.num_layers - 1}."
        written = (f"{prefix}k.weight", f"{prefix}v.weight")
        last = sum(size for name, size in sizes.items() if name.startswith(prefix) and name not in written)
        layers = sum(sizes.values()) - head * (1 if spec.tied_head else 2) - last
        floats = total >= sum(sizes.values()) * itemsize
        if engine.config.screen_head:
            return cls(total - looked_up - head * itemsize, layers, last, 0, floats)
        return cls(total - looked_up, layers, last, head, floats)

    def operations(self, rows: int, drawing: int) -> float:
        """Of a step of `rows` tokens of which `drawing` get logits."""
        return 2.0 * (rows * self.layers + drawing * (self.last + self.head))


def limit_table(limits: Limits, work: StepWork, measured: Mapping[str, dict[str, Any]]) -> Table:
    """measured: case -> its parts in ms, `sequences` and `context`; a case named "prompt …" computes its context."""
    rows = []
    for name, parts in measured.items():
        prompt = name.startswith("prompt")
        tokens, drawing = (parts["context"], 1) if prompt else (parts["sequences"],) * 2
        seconds = (parts[PRODUCTS] + parts[HEAD]) / 1e3
        flops = work.operations(tokens, drawing) / (seconds if work.head else parts[PRODUCTS] / 1e3)
        rows.append(
            {
                "case": name,
                "ms": seconds * 1e3,
                "gbs": work.weights / seconds / 1e9,
                "of_reading": work.weights / seconds / limits.reading[1],
                "gflops": flops / 1e9,
                "of_arithmetic": flops / limits.arithmetic[1] if work.floats else None,
            }
        )
    columns = (
        Column("case", "products and head of"),
        Column("ms", "ms", fixed(2)),
        Column("gbs", "GB/s of weights", fixed(1)),
        Column("of_reading", "of the read limit", percent),
        Column("gflops", "10⁹ operations/s", fixed(0)),
        Column("of_arithmetic", "of the arithmetic limit", percent),
    )
    return Table(f"share of the machine's limits ({work.weights / 1e6:.0f} MB of weights a step)", columns, rows)
