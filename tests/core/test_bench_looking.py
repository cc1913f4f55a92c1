"""`octavo bench looking` runs and says what it must; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.bench.looking import _decode, _NoJournal
from octavo.cli.main import main
from octavo.core.journal import Journal


def test_the_benchmark(tmp_path: Path) -> None:
    arguments = ["--sequences", "2,3", "--steps", "8", "--turns", "1", "--json", str(tmp_path / "out.json")]
    assert main(["bench", "looking", *arguments]) in (0, 1)
    facts = json.loads((tmp_path / "out.json").read_text())
    (rows,) = facts["tables"].values()
    assert [r["sequences"] for r in rows] == [2, 3] and all(r["report_kb"] > 1 for r in rows)
    assert {g["name"] for g in facts["goals"]} == {
        "% of throughput with nobody looking", "% with one octavo top",
    }  # fmt: skip


def test_both_sides_do_the_same_work() -> None:
    (_, bare), (_, kept) = _decode(4, 40, _NoJournal()), _decode(4, 40, Journal())
    assert bare.stats() == kept.stats() and bare.stats().running == 4
    assert not bare.journal.samples_taken and kept.journal.samples_taken
