"""The doctor: every prepared trouble is named first, with evidence and one remedy; a healthy run has no finding."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from octavo.bench.troubles import TROUBLES, record_trouble
from octavo.core.record import replay
from octavo.errors import ConfigError
from octavo.inspect.doctor import diagnose, diagnosis_lines
from octavo.inspect.doctor_rules import RULES
from octavo.inspect.report import recording_report
from octavo.inspect.top import header_lines


@cache
def _report(name: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        record_trouble(name, path)
        assert replay(path).same
        return recording_report(path)


def report_of(name: str) -> dict[str, Any]:
    return copy.deepcopy(_report(name))


@pytest.mark.parametrize("name", [n for n, t in TROUBLES.items() if t.expected])
def test_each_trouble_is_named_first(name: str) -> None:
    findings = diagnose(report_of(name)).findings
    assert findings[0].code == TROUBLES[name].expected
    assert len({f.code for f in findings}) == len(findings)
    for finding in findings:
        assert any(c.isdigit() for c in finding.evidence), "evidence is numbers"
        assert finding.remedy and "; or " not in finding.remedy, "one remedy"


def test_a_healthy_run_has_no_finding() -> None:
    diagnosis = diagnose(report_of("healthy"))
    assert diagnosis.findings == () and diagnosis.healthy
    lines = diagnosis_lines(diagnosis)
    assert lines[1] == "no findings: this run is healthy"
    assert lines[0].startswith("demo:healthy: 40 requests finished in ")


def test_the_summary_counts_what_top_counts() -> None:
    report = copy.deepcopy(report_of("healthy"))
    report["stats"]["finished"] += 3  # aborted while they waited
    assert "healthy: 43 requests finished (3 of them never began, or were embeddings) in " in diagnose(report).summary
    assert header_lines(report)[0].startswith("demo:healthy") and "43 requests finished" in header_lines(report)[0]


def test_every_finding_of_the_rules_has_its_trouble() -> None:
    """A rule whose finding no run shows would not be known to work. (Leaks are a bug, so they are made up below.)"""
    shown = {t.expected for t in TROUBLES.values() if t.expected}
    assert len(RULES) == len(shown | {"blocks-leaked"}) - 1  # usage_fraction has two
    assert "usage-fraction-low" in shown and "usage-fraction-high" in shown


@pytest.mark.parametrize(
    ("trouble", "setting", "value"),
    [
        ("preemption-thrash", "max_num_seqs", 3),
        ("throughput-capped", "max_num_seqs", 40),
        ("memory-short", "num_blocks", None),
        ("evicted-early", "num_blocks", None),
        ("block-size", "block_size", 16),
        ("window-unused", "hybrid_kv", True),
        ("static-allocation", "allocation", "paged"),
    ],
)
def test_the_remedy_cures(trouble: str, setting: str, value: object, tmp_path: Path, monkeypatch: Any) -> None:
    """The same load with the one change that the doctor names: the finding is gone."""
    ill = TROUBLES[trouble]
    remedy = diagnose(report_of(trouble)).findings[0].remedy
    value = int(re.findall(r"\d+", remedy)[-1]) if value is None else value
    assert setting in remedy and (isinstance(value, bool) or str(value) in remedy)
    cured = replace(ill, settings={**ill.settings, setting: value})
    if setting == "block_size":  # as many bytes as before
        cured = replace(cured, settings={**cured.settings, "num_blocks": ill.settings["num_blocks"] * 16})
    monkeypatch.setitem(TROUBLES, trouble, cured)
    record_trouble(trouble, tmp_path / "cured.jsonl")
    codes = [f.code for f in diagnose(recording_report(tmp_path / "cured.jsonl")).findings]
    assert ill.expected not in codes


def test_leaks_come_first() -> None:
    report = report_of("preemption-thrash")
    report["stats"]["leaks_repaired"] = 3
    findings = diagnose(report).findings
    assert (findings[0].code, findings[0].severity) == ("blocks-leaked", "error")
    assert "3 blocks" in findings[0].evidence and "debug=True" in findings[0].remedy


def test_too_little_is_not_called_healthy() -> None:
    report = report_of("preemption-thrash")
    report["totals"]["requests"] = 3
    diagnosis = diagnose(report)
    assert not diagnosis.enough and not diagnosis.healthy and diagnosis.findings == ()
    assert "too little to judge" in diagnosis_lines(diagnosis)[1]


def test_as_json() -> None:
    facts = json.loads(json.dumps(diagnose(report_of("evicted-early")).as_json()))
    assert facts["healthy"] is False and facts["enough"] is True
    assert set(facts["findings"][0]) == {"code", "severity", "title", "evidence", "remedy"}


def test_the_remedy_names_the_setting_that_made_the_pool() -> None:
    """num_blocks if it was given, the GPU's share on a GPU, the bytes on a CPU."""
    report = report_of("memory-short")
    for device, asked, word in (
        ("cuda", 72, "num_blocks"), ("cuda", None, "gpu_memory_utilization"), ("cpu", None, "cpu_kv_bytes"),
    ):  # fmt: skip
        report["settings"]["num_blocks"] = {"asked": asked, "chosen": 72, "why": "as asked"}
        report["hardware"] = {"device": device}
        assert diagnose(report).findings[0].remedy.startswith(f"raise {word}")


def test_idle_memory_is_named_instead_of_a_short_pool() -> None:
    """One cause, one finding: with memory to spare the share is at fault, not the memory."""
    report = report_of("memory-short")
    report["settings"]["num_blocks"] = {"asked": None, "chosen": 72, "why": "4 GiB by default"}
    report["hardware"] = {"device": "cpu", "total_bytes": 64 << 30, "available_bytes": 40 << 30}
    finding = diagnose(report).findings[0]
    assert (finding.code, finding.remedy) == ("usage-fraction-low", "set cpu_kv_bytes to 33GiB")
    assert "memory-short" not in [f.code for f in diagnose(report).findings]


def test_tiny_blocks_are_too_small() -> None:
    report = report_of("healthy")
    report["pool"]["block_size"] = 4
    finding = diagnose(report).findings[0]
    assert (finding.code, finding.remedy) == ("block-size", "set block_size=16")


def test_blocks_that_an_npu_reads_are_not_called_too_large() -> None:
    report = report_of("block-size")
    assert "block-size" in {finding.code for finding in diagnose(report).findings}
    report["pool"]["block_size"], report["hardware"]["device"] = 128, "npu"
    assert "block-size" not in {finding.code for finding in diagnose(report).findings}


def test_an_unknown_trouble_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trouble is called 'gout'; prepared: healthy, memory-short"):
        record_trouble("gout", tmp_path / "run")
