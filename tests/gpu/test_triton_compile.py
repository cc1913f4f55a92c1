"""The kernels compile for GPUs, and fit their shared memory: the interpreter accepts more than the compiler does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PROGRAM = Path(__file__).parent.parent / "helpers" / "triton_compile.py"
SOURCE = Path(__file__).parent.parent.parent / "src"


def compile_kernels(which: str, cache: Path, timeout: float) -> str:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), which], capture_output=True, text=True, timeout=timeout, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def test_the_kernels_that_decide_compile_for_hopper(tmp_path):
    lines = compile_kernels("few", tmp_path, 300).splitlines()
    assert len(lines) == 5 and lines[-1] == "fine"


@pytest.mark.slow
def test_every_kernel_compiles_with_every_tile_of_the_table(tmp_path):
    lines = compile_kernels("all", tmp_path, 3000).splitlines()
    assert len(lines) > 70 and lines[-1] == "fine"
