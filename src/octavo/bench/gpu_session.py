"""One run of `octavo bench gpu`: where it measures, what earlier runs of the same file have measured, and how."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench import gpu_work
from octavo.bench.drive import Run, build, run_load
from octavo.bench.gpu_work import FULL, TINY, Workload
from octavo.bench.workloads import Item
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.devices import Device
    from octavo.engine import Engine

Measure = Callable[[], dict[str, Any]]


@dataclass
class Session:
    """One run of the command: where it measures, what it may skip, and what is known so far."""

    device: Device
    folder: Path
    small: bool
    path: Path | None  # the JSON file
    known: dict[str, dict[str, Any]] = field(default_factory=dict)  # key -> row
    facts: dict[str, Any] = field(default_factory=dict)
    measured: int = 0

    def once(self, key: str, measure: Measure) -> dict[str, Any]:
        """The row of `key`: from an earlier run, or measured now and written down."""
        if key not in self.known:
            self.known[key] = measure()
            self.measured += 1
            self.save()
        return self.known[key]

    def save(self) -> None:
        """Everything so far, as a file that the next run goes on from."""
        if self.path is not None:
            state = {"benchmark": "gpu", "facts": self.facts, "rows": self.known}
            self.path.write_text(json.dumps(state, indent=1, ensure_ascii=False) + "\n")

    def scale(self) -> gpu_work.Scale:
        return TINY if self.small else FULL

    def settings(self, model: str, **more: Any) -> dict[str, Any]:
        """Of an engine for one model, as the reference engine was set up."""
        longest = 512 if self.small else 4096 if model == "llama-2-7b" else 8448
        given: dict[str, Any] = {
            "model": str(gpu_work.write_model(model, self.folder, tiny=self.small)), "load_format": "dummy",
            "skip_tokenizer_init": True, "device": "cpu" if self.small else str(self.device.torch), "seed": 0,
            "max_model_len": longest, "max_num_seqs": 256, "max_num_batched_tokens": 8192,
        }  # fmt: skip
        given |= {"num_blocks": 2048, "dtype": "float32"} if self.small else {"dtype": "bfloat16"}
        return {**given, **more}


def earlier_rows(session: Session) -> dict[str, dict[str, Any]]:
    """Rows of the file, if they were measured on such a device with these versions; refuses any other file."""
    if session.path is None or not session.path.is_file():
        return {}
    try:
        state = json.loads(session.path.read_text())
        facts, rows = state["facts"], state["rows"]
        conditions = facts["device"], facts["versions"], facts["dry_run"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--json {session.path}: exists and is no run of this command; name another file") from error
    if conditions != (session.facts["device"], session.facts["versions"], session.facts["dry_run"]):
        raise ConfigError(
            f"--json {session.path}: was measured on {facts['device']} with {facts['versions']}; name another file, or "
            "give --fresh to measure everything again"
        )
    return dict(rows)


@contextmanager
def running(settings: dict[str, Any]) -> Iterator[tuple[Engine, float]]:
    """An engine and the seconds it took to start; its memory is given back."""
    begin = time.perf_counter()
    engine = build(settings)
    ready = time.perf_counter() - begin
    try:
        yield engine, ready
    finally:
        engine.close()
        del engine
        gc.collect()


def params_of(load: Workload) -> Callable[[Item], SamplingParams]:
    return lambda item: SamplingParams(
        n=load.n, temperature=load.temperature, max_tokens=item.output, ignore_eos=True, seed=1 if load.n > 1 else None
    )


def median_run(engine: Engine, load: Workload, *, sample: bool = False) -> tuple[Run, list[float]]:
    """Of `load.runs` runs the one of median length; the prefix cache is empty before each."""
    runs = []
    for _ in range(load.runs):
        engine.reset_prefix_cache()
        runs.append(run_load(engine, load.items, params_of(load), sample=sample))
    runs.sort(key=lambda r: r.seconds)
    return runs[len(runs) // 2], [r.seconds for r in runs]
