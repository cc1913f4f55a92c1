"""A few cases of `make fuzz`; a case is the same each time; a planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from helpers.fuzzing import FAMILIES, make_case, plain_engine, run_case
from helpers.tiny_models import write_tiny
from octavo.core.block_pool import BlockPool
from octavo.core.memory import KVMemory
from octavo.errors import OctavoError

TOOL = Path(__file__).parents[2] / "tools" / "fuzz.py"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("fuzz")
    for family in FAMILIES:
        write_tiny(family, root / family)
    return {family: root / family for family in FAMILIES}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("number", range(77, 83))
def test_a_case(number: int, backend: str, models: dict[str, Path]) -> None:
    case = make_case(number)
    oracle = plain_engine(models[case.family], backend)
    figures = run_case(case, models[case.family], backend, oracle)
    assert figures["requests"] > 3 and figures["compared"] == figures["requests"]
    oracle.close()


def test_a_case_is_the_same_each_time(models: dict[str, Path]) -> None:
    first, second = make_case(78), make_case(78)
    assert (first.settings, first.asks) == (second.settings, second.asks)
    oracle = plain_engine(models[first.family], "auto")
    figures = [run_case(case, models[case.family], "auto", oracle) for case in (first, second)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("fault", ["no copy before a write", "a swapped block is not brought back"])
def test_a_planted_fault_is_found(fault: str, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "no copy before a write":
        monkeypatch.setattr(BlockPool, "is_private", lambda self, block: True)
    else:
        swap_in = KVMemory.swap_in

        def forgetful(self: KVMemory, request: object) -> None:
            swap_in(self, request)  # type: ignore[arg-type]
            self._transfers.pop()

        monkeypatch.setattr(KVMemory, "swap_in", forgetful)
    with pytest.raises((AssertionError, OctavoError)):
        run_many(range(40), models)


def run_many(numbers: range, models: dict[str, Path]) -> None:
    for number in numbers:
        case = make_case(number)
        run_case(case, models[case.family], "auto", plain_engine(models[case.family], "auto"))


def test_the_command_runs_one_case() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--case", "81", "--backend", "reference"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("cases 1 · requests ")
