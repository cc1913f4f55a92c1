"""What every test may rely on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

#: Tests with a browser, sockets and processes of their own: a machine that stalls at the wrong moment is no bug.
WITH_A_WORLD = (Path(__file__).parent / "browser", Path(__file__).parent / "server")

# Triton decides when it is first imported, whoever does that, whether its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A process that was started in the background by a shell ignores Ctrl-C; tests press it, wherever they run.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Such a test gets three more tries, a moment later each; every rerun is shown in the summary."""
    for item in items:
        if any(folder in item.path.parents for folder in WITH_A_WORLD):
            item.add_marker(pytest.mark.flaky(reruns=3, reruns_delay=2))


@pytest.fixture
def free_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speculation guesses as much as it may: costs measured on a busy machine could say that it does not pay."""
    monkeypatch.setattr("octavo.speculation.measure_row_costs", lambda *runner, **limits: ())
