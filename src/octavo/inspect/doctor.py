"""`octavo doctor`: a report in, findings out. Pure: it reads a report (`octavo.inspect.report`) and nothing else.

Every finding has evidence (the numbers it rests on) and exactly one remedy. Findings come most serious first. A run
that is too short says nothing either way, and the diagnosis says so instead of calling it healthy.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from octavo.inspect.doctor_facts import Facts
from octavo.inspect.doctor_rules import RULES, Finding
from octavo.inspect.explain import reasons_lines

ORDER = {"error": 0, "warning": 1, "info": 2}
ENOUGH_STEPS = 20
ENOUGH_REQUESTS = 4


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`enough`: has enough happened to judge? `summary`: one line on what was looked at."""

    findings: tuple[Finding, ...]
    enough: bool
    summary: str
    misses: tuple[str, ...] = ()

    @property
    def healthy(self) -> bool:
        return self.enough and not self.findings

    def as_json(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "enough": self.enough,
            "summary": self.summary,
            "findings": [asdict(f) for f in self.findings],
        }


def diagnose(report: dict[str, Any]) -> Diagnosis:
    """Apply every rule to a report."""
    facts = Facts(report)
    enough = facts.stats["steps"] >= ENOUGH_STEPS and facts.totals["requests"] >= ENOUGH_REQUESTS
    found = [finding for rule in RULES if enough and (finding := rule(facts)) is not None]
    found.sort(key=lambda f: ORDER[f.severity])  # stable: the rules' order within a severity
    return Diagnosis(tuple(found), enough, _summary(facts), tuple(reasons_lines(report["miss_reasons"])))


def _summary(f: Facts) -> str:
    model = f.model.get("name", "unknown model")
    device = f" on {f.hardware['device']}" if "device" in f.hardware else ""
    others = f.stats["finished"] - f.totals["requests"]
    not_judged = f" ({others} of them never began, or were embeddings)" if others else ""
    return (
        f"{model}{device}: {f.stats['finished']} requests finished{not_judged} in {f.stats['steps']} steps, "
        f"{f.stats['generated_tokens']} tokens written; {f.pool['num_blocks']} blocks of {f.pool['block_size']}, "
        f"at most {f.pool['peak_used'] / f.pool['num_blocks']:.0%} used, {f.stats['peak_sequences']} sequences at once"
    )


def diagnosis_lines(diagnosis: Diagnosis, *, misses: bool = True) -> list[str]:
    """For people: what was looked at, then each finding in three lines."""
    lines = [diagnosis.summary]
    if not diagnosis.enough:
        lines.append(
            f"too little to judge: at least {ENOUGH_STEPS} steps and {ENOUGH_REQUESTS} finished requests that wrote "
            "something are needed"
        )
    elif not diagnosis.findings:
        lines.append("no findings: this run is healthy")
    for finding in diagnosis.findings:
        lines += [
            "",
            f"{finding.severity}: {finding.title}  [{finding.code}]",
            f"  evidence  {finding.evidence}",
            f"  remedy    {finding.remedy}",
        ]
    if misses and diagnosis.misses:
        lines += ["", "where prefix look-ups ended:", *diagnosis.misses]
    return lines
