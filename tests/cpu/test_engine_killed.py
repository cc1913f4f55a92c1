"""kill -9 in the middle of a run: the recording can be replayed up to there, and the same command runs again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from helpers.tiny_models import write_tiny
from octavo.core.record import replay
from octavo.models import gguf_tokenizer
from octavo.models.cache import write_atomically

PROGRAM = """
import sys
from octavo import LLM, SamplingParams
with LLM(model=sys.argv[1], dtype="float32", record=sys.argv[2], num_blocks=40, max_model_len=200) as llm:
    while True:
        prompts = [[5 + i, 6, 7, 8] * 6 for i in range(6)]
        llm.generate(prompts, SamplingParams(n=2, max_tokens=60, seed=1), use_tqdm=False)
        print("round", flush=True)
        if len(sys.argv) > 3:
            break
"""


def run(model: Path, record: Path, *more: str, **options: object) -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(model), str(record), *more]


def test_a_killed_run_stops_nothing(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path / "model")
    record = tmp_path / "run.jsonl"
    environment = {**os.environ, "OCTAVO_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        run(tmp_path / "model", record), env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "round\n"
            time.sleep(0.05)  # somewhere in the next round
        finally:
            process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
    report = replay(record)
    assert report.same and report.steps > 20 and report.requests >= 6, str(report)

    again = subprocess.run(
        run(tmp_path / "model", record, "once"), env=environment, capture_output=True, text=True, timeout=200
    )
    assert again.returncode == 0, again.stderr
    report = replay(record)
    assert report.same and report.requests == 6, "the second run's own recording, from its beginning"


def test_a_write_that_was_killed_leaves_no_half_file(tmp_path: Path) -> None:
    """The cache is written beside its place and renamed: what a killed writer leaves is never taken for the file."""
    target = tmp_path / "models" / "weights"
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom octavo.models.cache import write_atomically\n"
        "def write(path):\n    path.write_bytes(b'half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "write_atomically(Path(sys.argv[1]), write)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(target)], timeout=100)
    assert done.returncode == -signal.SIGKILL and not target.exists()
    write_atomically(target, lambda path: path.write_bytes(b"whole"))  # type: ignore[arg-type]
    assert target.read_bytes() == b"whole"


@pytest.mark.parametrize("content", [b"", b"half of a file", b"\x93NUMPY\x01\x00v\x00"])
def test_a_damaged_entry_of_the_tokenizer_cache_is_made_again(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    monkeypatch.setattr(gguf_tokenizer, "WORTH_CACHING", 2)
    tokens = ["a", "b", "ab", "abab"]
    vocabulary = {t: i for i, t in enumerate(tokens)}
    right = gguf_tokenizer.cached_cuts(tokens, vocabulary, None)
    (path,) = (tmp_path / "merges").iterdir()
    path.write_bytes(content)
    assert np.array_equal(gguf_tokenizer.cached_cuts(tokens, vocabulary, None), right)
    assert np.array_equal(np.load(path), right)
