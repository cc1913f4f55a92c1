"""`make fuzz MINUTES=10 SEED=1`: the whole engine on tiny random models against the same requests alone.

    python tools/fuzz.py --minutes 10 --seed 1        many cases, figures as they go
    python tools/fuzz.py --case 1000017 --backend native   one case again

What a case is, what is compared and how rounding is treated: tests/helpers/fuzzing.py. Needs the development extra
(transformers writes the models). Exit code 1 at the first case that fails, with the command that runs it again.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
import transformers

from helpers.fuzzing import FAMILIES, make_case, plain_engine, run_case
from helpers.tiny_models import write_tiny
from octavo.engine import Engine
from octavo.kernels import cpu

CASES_PER_SEED = 1_000_000
SHOWN = (
    "requests", "steps", "preemptions", "swaps", "copies", "forks", "aborts", "deadlines", "refused", "resets",
    "prefix_hit_tokens", "evictions", "compared", "near_ties",
)  # fmt: skip


class Fuzzer:
    """Models, oracles and totals of one run. An oracle has no cache and an empty pool between requests."""

    def __init__(self, root: Path, backends: list[str]) -> None:
        self.backends = backends
        self.total: Counter[str] = Counter()
        self.models = {family: root / family for family in FAMILIES}
        transformers.utils.logging.disable_progress_bar()
        for family, path in self.models.items():
            write_tiny(family, path)
        self._oracles: dict[tuple[str, str], Engine] = {}

    def oracle(self, family: str, backend: str) -> Engine:
        key = (family, backend)
        if key not in self._oracles:
            self._oracles[key] = plain_engine(self.models[family], backend)
        return self._oracles[key]

    def run(self, number: int) -> bool:
        """One case on each backend; False, and the reason printed, when it fails."""
        for backend in self.backends:
            case = make_case(number)
            try:
                self.total += run_case(case, self.models[case.family], backend, self.oracle(case.family, backend))
            except Exception:
                traceback.print_exc()
                print(f"\ncase {number} failed ({case.family}, {backend}). Run it again:", flush=True)
                print(f"    python tools/fuzz.py --case {number} --backend {backend}", flush=True)
                return False
            self.total["cases"] += 1
        return True

    def figures(self) -> str:
        return f"cases {self.total['cases']} · " + " · ".join(f"{name} {self.total[name]}" for name in SHOWN)


def backends_of(asked: str) -> list[str]:
    """Those to run; `both` is native and reference where the native kernels are there."""
    problem = cpu.why_unavailable()
    if asked == "native" and problem:
        sys.exit(f"--backend native: {problem}")
    if asked == "both" and problem:
        print(f"the reference backend only: {problem}")
    return (
        ["reference"]
        if asked == "reference" or (asked == "both" and problem)
        else (["native"] if asked == "native" else ["native", "reference"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="run for so long (default: 10)")
    parser.add_argument("--seed", type=int, default=1, help="case numbers are seed * 1,000,000 + 0, 1, 2, …")
    parser.add_argument("--case", type=int, help="run this one case only")
    parser.add_argument("--backend", choices=("both", "native", "reference"), default="both")
    given = parser.parse_args()
    torch.set_num_threads(1)  # models this small only lose by more
    with tempfile.TemporaryDirectory(prefix="octavo-fuzz-") as root:
        fuzzer = Fuzzer(Path(root), backends_of(given.backend))
        if given.case is not None:
            good = fuzzer.run(given.case)
            print(fuzzer.figures())
            return 0 if good else 1
        end, shown = time.monotonic() + 60 * given.minutes, time.monotonic()
        for number in itertools.count(given.seed * CASES_PER_SEED):
            if time.monotonic() >= end:
                break
            if not fuzzer.run(number):
                print(fuzzer.figures())
                return 1
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                print(f"up to case {number}: {fuzzer.figures()}", flush=True)
        print(f"seed {given.seed} clean: {fuzzer.figures()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
