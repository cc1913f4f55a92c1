"""Record and replay: every decision again, the first difference named, broken and cut files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.core.record import Recorder, replay
from octavo.errors import ConfigError


class RecordedRig(Rig):
    """A rig that records what it does, as the engine does."""

    def __init__(self, path: Path, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.recorder = Recorder(str(path), self.settings, self.layout, {"model": "none"})

    def add(self, *args: Any, **given: Any) -> Any:
        request = super().add(*args, **given)
        self.recorder.arrival(request)
        return request

    def step(self) -> Any:
        plan = self.plan()
        result = self.runner.execute(plan)
        self.take(result)
        self.recorder.step(self.now, plan, result)
        return plan

    def abort(self, request_id: str, index: int | None = None) -> None:
        if self.scheduler.abort(request_id, index):
            self.recorder.abort(request_id, index)

    def finish(self, seq: Any, reason: str, stop: str) -> None:
        self.scheduler.finish(seq, reason, stop)
        self.recorder.finish(seq.seq_id, reason, stop)


def busy_run(path: Path) -> RecordedRig:
    """Shared prefixes, samples, beams, preemption, swap, windows, priorities, deadlines, aborts, a stop, a reset."""
    rig = RecordedRig(
        path, 40, windows=(8, None), script=never_ends, enable_prefix_caching=True, num_host_blocks=30,
        max_num_batched_tokens=9, swap_block_tokens=2.0,
    )  # fmt: skip
    rig.add(prompt(10), max_tokens=20)
    rig.add(prompt(10), n=3, max_tokens=9, seed=-4, logit_bias={5: 1.5}, priority=2, salt="x")
    search = rig.add(prompt(9, 1), beam(3, 8, early_stopping="never"))
    for _ in range(4):
        rig.step()
    rig.add(prompt(12, 2), max_tokens=None, deadline_ms=90.0, stop_token_ids=[900], min_tokens=2)
    rig.add([*prompt(10), 4, 5], max_tokens=9, priority=-1, prompt_logprobs=1)
    rig.abort("r1", 1)
    for _ in range(8):
        rig.step()
    seq = next(s for q in rig.scheduler.running if not q.beam for s in q.live())
    rig.finish(seq, "stop", "a stop string")
    rig.run()
    assert search.beam_state.finished and rig.scheduler.memory.cache is not None
    rig.scheduler.memory.cache.reset()
    rig.recorder.reset_cache()
    rig.add(prompt(10), max_tokens=3)
    rig.run()
    assert rig.scheduler.counters.preemptions and rig.scheduler.counters.deadlines == 1
    rig.recorder.close()
    return rig


def test_a_busy_run_is_reproduced(tmp_path: Path) -> None:
    rig = busy_run(tmp_path / "run")
    report = replay(tmp_path / "run")
    assert report.same, str(report)
    assert (report.steps, report.requests) == (len(rig.plans), 6)
    assert str(report) == f"same: {len(rig.plans)} steps, 6 requests, every decision equal"


def edit(path: Path, change: Any) -> None:
    events = [json.loads(line) for line in path.read_text().splitlines()]
    change(events)
    path.write_text("".join(json.dumps(e) + "\n" for e in events))


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    busy_run(tmp_path / "run")

    def change(events: list[dict[str, Any]]) -> None:
        step = next(e for e in events if e["event"] == "step" and e["plan"]["step"] == 7)
        step["plan"]["scheduled"][0][2] += 1

    edit(tmp_path / "run", change)
    report = replay(tmp_path / "run")
    assert not report.same and (report.step, report.steps) == (7, 6)
    assert "differs at step 7 (after 6 equal steps): scheduled: recorded" in str(report)


def test_another_token_leads_to_another_plan(tmp_path: Path) -> None:
    rig = RecordedRig(tmp_path / "run", script=never_ends)
    rig.add(prompt(5), max_tokens=8)
    rig.run()
    rig.recorder.close()

    def change(events: list[dict[str, Any]]) -> None:
        next(e for e in events if e["event"] == "step")["drawn"]["0"] = [3]  # the end token

    edit(tmp_path / "run", change)
    assert replay(tmp_path / "run").step == 2


def test_other_settings_lead_to_another_plan(tmp_path: Path) -> None:
    busy_run(tmp_path / "run")
    edit(tmp_path / "run", lambda events: events[0]["settings"].update(max_num_batched_tokens=8))
    assert not replay(tmp_path / "run").same


def test_a_killed_run_can_be_replayed_up_to_its_last_line(tmp_path: Path) -> None:
    busy_run(tmp_path / "run")
    text = (tmp_path / "run").read_text()
    (tmp_path / "run").write_text(text[: len(text) * 2 // 3])
    report = replay(tmp_path / "run")
    assert report.same and report.steps > 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a recording \\(the file is empty\\)"),
        ("hello\n", "line 1 is no JSON"),
        ('{"event":"header","version":99}\n', "not a recording"),
        ("[1]\n", "not a recording"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ConfigError, match=message):
        replay(tmp_path / "x")


def test_a_broken_line_in_the_middle_is_not_taken_for_the_end(tmp_path: Path) -> None:
    busy_run(tmp_path / "run")
    lines = (tmp_path / "run").read_bytes().splitlines(keepends=True)
    lines[5] = b"\xff\xfe broken\n"
    (tmp_path / "run").write_bytes(b"".join(lines))
    with pytest.raises(ConfigError, match="line 6 is no JSON, and it is not the last"):
        replay(tmp_path / "run")


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "nowhere")
    rig = Rig()
    with pytest.raises(ConfigError, match=r"cannot be written.*name a writable file"):
        Recorder(str(tmp_path / "no" / "where"), rig.settings, rig.layout, {})
