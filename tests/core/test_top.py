"""`octavo top` as text: pure functions of a report, made here from a real scheduler."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from helpers.scheduling import Rig, never_ends, prompt
from octavo.core.journal import Journal
from octavo.core.view import counters_of
from octavo.inspect.report import _report
from octavo.inspect.top import (
    header_lines,
    queue_lines,
    rates_line,
    sequence_lines,
    sparkline,
    top_lines,
    usage_bar,
    waste_lines,
)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Two samples and another sequence run over shared blocks, two requests wait."""
    rig = Rig(30, windows=(8, None), script=never_ends, enable_prefix_caching=True, max_num_seqs=3)
    journal = Journal(interval=0.01)
    rig.add(prompt(9), max_tokens=30, n=2)
    rig.add(prompt(14, 1), max_tokens=30)
    rig.add(prompt(21, 2), max_tokens=9, name="late")
    rig.add(prompt(5, 3), max_tokens=9, name="later")
    for _ in range(12):
        rig.step()
        journal.generated += 3
        journal.stepped(rig.scheduler, rig.now)
    about = {"model": {"name": "tiny"}, "hardware": {"device": "cpu"}}
    stats = {**counters_of(rig.scheduler), "generated_tokens": journal.generated, "leaks_repaired": 0}
    found = _report("engine", rig.scheduler, journal, about, stats, rig.now, 5)
    found["expected_tables"] = {
        s.seq_id: [list(t.ids) for t in s.tables] for r in rig.scheduler.running for s in r.live()
    }
    return found


def test_tables_are_those_of_the_scheduler(report: dict[str, Any]) -> None:
    assert {s["seq_id"]: s["tables"] for s in report["sequences"]} == report["expected_tables"]
    lines = sequence_lines(report, 20)
    assert [line.split(":")[0] for line in lines[:3]] == ["seq 0", "seq 1", "seq 2"]
    for seq, line in zip(report["sequences"], lines):
        for table in seq["tables"]:
            for block in table:
                mark = f"{block}*" if block in report["shared"] else str(block)
                assert block < 0 or mark in line.replace(",", " ").replace("]", " ").replace("[", " ").split()
        assert f"{seq['request_id']}, {seq['tokens']} tokens" in line
    assert "*" in lines[0] and "·" in lines[2] and lines[3].startswith("* shared by several block tables; ·")


def test_usage_and_rates(report: dict[str, Any]) -> None:
    pool = report["pool"]
    bar = usage_bar(report)
    assert f"{pool['used']} of 30 blocks used" in bar and f"{pool['free']} free" in bar
    assert round(pool["used"] / 30 * 30) == bar.count("█")
    line = rates_line(report)
    assert "2 running (3 sequences), 2 waiting" in line and "300.0 tok/s written" in line
    assert header_lines(report) == ["tiny on cpu; 0 requests finished, max_num_seqs 3, max_model_len 128"]


def test_queue_in_order(report: dict[str, Any]) -> None:
    assert queue_lines(report) == ["queue late (21 tokens, 0.1 s), later (5 tokens, 0.1 s)"]
    assert queue_lines(report, shown=1) == ["queue late (21 tokens, 0.1 s), and 1 more"]
    empty = copy.deepcopy(report)
    empty["stats"]["waiting"], empty["queue"] = 0, []
    assert queue_lines(empty) == ["queue empty"]


def test_waste_says_what_windows_saved(report: dict[str, Any]) -> None:
    waste, static = waste_lines(report)
    assert "behind windows" in waste and "by sharing" in waste
    assert f"for the {report['counterfactual']['peak_sequences']} at once" in static


def test_everything_fits_the_terminal(report: dict[str, Any]) -> None:
    for width, height in ((40, 12), (80, 24), (200, 60)):
        lines = top_lines(report, width=width, height=height)
        assert len(lines) <= height and all(len(line) <= width for line in lines)
        assert lines[-1].startswith("queue ")
    many = copy.deepcopy(report)
    many["sequences"] *= 30
    lines = top_lines(many, width=100, height=20)
    assert len(lines) <= 20 and any(line.startswith("… and ") for line in lines) and lines[-1].startswith("queue ")


def test_an_idle_engine(report: dict[str, Any]) -> None:
    rig, journal = Rig(8), Journal()
    stats = {**counters_of(rig.scheduler), "generated_tokens": 0, "leaks_repaired": 0}
    lines = top_lines(_report("engine", rig.scheduler, journal, {}, stats, 0.0, 5))
    assert "0 of 8 blocks used (0.0%)" in lines[1] and lines[-1] == "queue empty"


def test_sparklines() -> None:
    assert sparkline([0, 1, 2, 4]) == "▁▃▅█"
    assert sparkline([0.5, 1.0], top=1.0) == "▅█"
    assert sparkline([0, 0]) == "▁▁" and sparkline([]) == ""
    assert len(sparkline(list(range(100)), width=10)) == 10
