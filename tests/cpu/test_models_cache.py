"""Files in the cache: whole or not there, and nothing left of killed runs."""

import os
from pathlib import Path

import pytest

from octavo.models.cache import write_atomically


def _write_whole(path: Path) -> None:
    path.write_bytes(b"whole")


def test_leftovers_of_killed_runs_are_removed_when_old(tmp_path: Path) -> None:
    old, young, other = (tmp_path / n for n in (".model.gguf.abc", ".model.gguf.def", ".another.gguf.abc"))
    for path in (old, young, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (1, 1))
    write_atomically(tmp_path / "model.gguf", _write_whole)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".another.gguf.abc", ".model.gguf.def", "model.gguf"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "model.gguf", fail)
    assert not list(tmp_path.iterdir())
