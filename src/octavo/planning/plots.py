"""Plots of simulations, through matplotlib (extra `plot`): SVG, PNG or PDF, by the name. Pure functions of outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.planning.outcome import Outcome

FORMATS = (".svg", ".png", ".pdf")
#: Distinct also without colour vision (Okabe and Ito).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000")


def check_target(path: str | Path) -> Path:
    """The path, if a plot can be written there. Raises `ConfigError` before anything is simulated."""
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"plot {path}: the name must end in {', '.join(FORMATS)}")
    if not path.parent.is_dir():
        raise ConfigError(f"plot {path}: there is no folder {path.parent}")
    _pyplot()
    return path


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'octavo[plot]'") from None
    matplotlib.use("Agg")
    # No date and no random ids in the file: the same run, the same plot.
    matplotlib.rcParams.update(
        {"svg.hashsalt": "octavo", "svg.fonttype": "none", "font.size": 9, "axes.axisbelow": True}
    )
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        figure.savefig(path, metadata=metadata, dpi=150)
    except OSError as error:
        raise ConfigError(f"plot {path}: cannot be written ({error.strerror})") from error
    finally:
        _pyplot().close(figure)


def plot_outcomes(outcomes: Sequence[Outcome], path: str | Path, title: str = "") -> None:
    """Four panels: use of the pool over time, sequences over time, throughput and concurrency, latency."""
    path = check_target(path)
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=10)
    _over_time(axes[0][0], outcomes, [lambda s: 100 * s.filled], "slots that hold a token, % of the pool")
    axes[0][0].set_ylim(0, 101)
    _over_time(axes[0][1], outcomes, [lambda s: s.running], "running sequences")
    _bars(axes[1][0], outcomes)
    _latencies(axes[1][1], outcomes)
    _save(figure, path)


def _over_time(axis: Any, outcomes: Sequence[Outcome], values: Sequence[Any], label: str) -> None:
    for outcome, colour in zip(outcomes, _colours(outcomes)):
        for value in values:
            times = [s.time for s in outcome.samples]
            axis.plot(times, [value(s) for s in outcome.samples], color=colour, linewidth=1.2, label=outcome.policy)
    axis.set_xlabel("seconds")
    axis.set_ylabel(label)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, frameon=False)


def _bars(axis: Any, outcomes: Sequence[Outcome]) -> None:
    places = range(len(outcomes))
    axis.bar(places, [o.output_rate for o in outcomes], color=_colours(outcomes), width=0.6)
    axis.set_xticks(list(places), [o.policy.replace("+", "\n+") for o in outcomes], fontsize=8)
    axis.set_ylabel("output tokens per second")
    for place, outcome in zip(places, outcomes):
        text = f"{outcome.output_rate:,.0f}\n{outcome.peak_running} at once"
        axis.annotate(text, (place, outcome.output_rate), ha="center", va="bottom", fontsize=8)
    axis.margins(y=0.22)
    axis.grid(alpha=0.3, axis="y")


def _latencies(axis: Any, outcomes: Sequence[Outcome]) -> None:
    """Median as a bar, p99 as a whisker, for the first token and the whole answer."""
    kinds = (("ttft", "first token"), ("e2e", "whole answer"))
    width = 0.8 / max(1, len(outcomes))
    lowest = float("inf")
    for number, (outcome, colour) in enumerate(zip(outcomes, _colours(outcomes))):
        latency = outcome.latencies()
        for place, (kind, _) in enumerate(kinds):
            found = latency[kind]
            if found is None:
                continue
            x = place + (number - (len(outcomes) - 1) / 2) * width
            axis.bar(x, found["p50"], width=0.9 * width, color=colour)
            lowest = min(lowest, found["p50"])
            axis.plot([x, x], [found["p50"], found["p99"]], color="black", linewidth=1)
            axis.plot([x], [found["p99"]], marker="_", color="black", markersize=6)
    axis.set_xticks(range(len(kinds)), [name for _, name in kinds])
    axis.set_ylabel("seconds, median and p99")
    axis.set_yscale("log")
    if lowest < float("inf"):
        axis.set_ylim(bottom=lowest / 3)
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: "")
    axis.grid(alpha=0.3, axis="y")


def _colours(outcomes: Sequence[Outcome]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(outcomes))]
