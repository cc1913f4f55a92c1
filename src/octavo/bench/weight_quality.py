"""What formats of the weights cost in quality: the weights part of `octavo bench quantization`.

The model is loaded once per format, all from the same files, and reads a text; perplexity, and its next-token
distributions against those of the float32 weights. Keys and values are float32 throughout, nothing is drawn: the same
numbers at each run. A format that the model or the machine cannot have is left out, with the reason as a note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from octavo.bench.report import Column, Goal, Report, Table, bar, fixed, mebibytes, percent
from octavo.core.weight_format import parse_weight_format
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.models.load import LoadedModel

GOAL_INT8 = 0.005
CHUNK = 128


@dataclass(frozen=True)
class Weights:
    """quantization, dtype, fixed_point: as an engine takes them."""

    name: str
    quantization: str | None = None
    dtype: str = "float32"
    fixed_point: bool = False


FORMATS = (
    Weights("float32"),
    Weights("bfloat16", None, "bfloat16"),
    Weights("fixed point", None, "bfloat16", fixed_point=True),
    Weights("gguf", "gguf"),
    Weights("int8", "int8"),
    Weights("int4", "int4"),
    Weights("int4:128", "int4:128"),
    Weights("int4:pure", "int4:pure"),
    Weights("int4:64:pure", "int4:64:pure"),
    Weights("int4:128:pure", "int4:128:pure"),
)
COLUMNS = (
    Column("format", "weights"),
    Column("bytes", "in memory", mebibytes),
    Column("bits", "bits per weight", fixed(2)),
    Column("perplexity", "perplexity", fixed(3)),
    Column("change", "against float32", lambda x: f"{100 * x:+.2f} %"),
    Column("mean_cosine", "logit cosine, mean", fixed(5)),
    Column("worst_cosine", "worst", fixed(4)),
    Column("divergence", "KL, nats", fixed(6)),
    Column("agreement", "same first token", percent),
)


def weights_text() -> str:
    """A tale in plain English (E. A. Poe, "The Tell-Tale Heart", 1843), then some technical pages."""
    names = ("story.txt", "prose.txt")
    return "\n\n".join(resources.files("octavo.bench").joinpath(n).read_text(encoding="utf-8") for n in names)


def add_weights(report: Report, model: str, text: str, tokens: int | None) -> None:
    """Measure, and add table, goal and notes to the report. tokens: the most that are read; None: all of the text."""
    from octavo.bench.quality import Candidate, compare

    loaded: dict[str, LoadedModel] = {}
    with bar(len(FORMATS), "loading") as tick:
        for form in FORMATS:
            try:
                loaded[form.name] = load_weights(model, form, tokenizer=not loaded)
            except ConfigError as error:
                if form.name == "float32":
                    raise
                report.notes.append(f"weights: {form.name} left out: {error}")
            tick(form.name)
    base = loaded["float32"]
    assert base.tokenizer is not None
    ids: Sequence[int] = list(base.tokenizer.encode(text))[: None if tokens is None else tokens + 1]
    if len(ids) < 2:
        raise ConfigError("--text: at least two tokens are needed")
    candidates = {name: Candidate(m.decoder, m.spec, len(ids)) for name, m in loaded.items()}
    with bar(len(candidates) * -(-(len(ids) - 1) // CHUNK), "weights") as tick:
        found = compare(candidates, ids, chunk=CHUNK, tick=tick)
    count = base.decoder.parameter_count()
    rows: list[dict[str, Any]] = [
        {
            "format": name,
            "bytes": loaded[name].weight_bytes,
            "bits": 8 * loaded[name].weight_bytes / count,
            "perplexity": quality.perplexity,
            "change": quality.perplexity / found["float32"].perplexity - 1,
            "mean_cosine": quality.mean_cosine,
            "worst_cosine": quality.worst_cosine,
            "divergence": quality.divergence,
            "agreement": quality.agreement,
        }
        for name, quality in found.items()
    ]
    report.tables.append(Table(f"weights: {model} over {len(ids) - 1} tokens", COLUMNS, rows))
    change = abs(next(row["change"] for row in rows if row["format"] == "int8"))
    report.goals.append(Goal("int8 weights, perplexity against float32", change, GOAL_INT8))
    report.notes.append("weights: logits at every position against those of the float32 weights of the same run")


def load_weights(model: str, form: Weights, *, tokenizer: bool = False) -> LoadedModel:
    """One model on the CPU in one format. Raises `ConfigError` where that cannot be."""
    import torch

    from octavo.config import make_config
    from octavo.kernels import cpu
    from octavo.models.load import load_model

    dtype = getattr(torch, form.dtype)
    bare = {"skip_tokenizer_init": not tokenizer, "screen_head": False}  # the screen is no part of a format
    config = make_config(model=model, quantization=form.quantization, **bare)
    if form.fixed_point and (why := cpu.why_not_fixed_point(dtype, True)):
        raise ConfigError(f"fixed_point=True: {why}")
    ops = cpu.make_ops(dtype, parse_weight_format(form.quantization), form.fixed_point)
    return load_model(config, dtype=dtype, device="cpu", ops=ops)
