"""What an engine remembers of its run: bounded, cheap, and the same from a recording as from the run itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.scheduling import Rig, beam, never_ends, prompt
from octavo.bench.troubles import TROUBLES, params_of, trouble_engine
from octavo.core.journal import RECENT_SAMPLES, WHOLE_SAMPLES, Journal
from octavo.core.sequence import Request
from octavo.errors import ConfigError, RequestError
from octavo.inspect.report import engine_report, rate_of, recording_report, samples_as_json
from octavo.sampling_params import PoolingParams


def test_samples_are_bounded_and_cover_the_run() -> None:
    rig = Rig(script=never_ends)
    journal = Journal(interval=1.0)
    for i in range(20_000):
        journal.stepped(rig.scheduler, i * 0.1)
    assert len(journal.recent) == RECENT_SAMPLES
    assert [b.time - a.time for a, b in zip(journal.recent, list(journal.recent)[1:])] == pytest.approx([1.0] * 599)
    assert journal.recent[-1].time == pytest.approx(1999.0)
    assert WHOLE_SAMPLES / 2 <= len(journal.whole) <= WHOLE_SAMPLES
    gaps = [b.time - a.time for a, b in zip(journal.whole, journal.whole[1:])]
    assert journal.whole[0].time == 0.0 and journal.whole[-1].time > 1990 and max(gaps) < 2.5 * journal.whole_interval


def test_a_step_that_is_not_due_looks_at_nothing() -> None:
    """The cost with nobody watching: samples are taken per time, not per step."""
    journal = Journal(interval=0.1)
    rig = Rig(script=never_ends)
    for i in range(10_000):
        journal.stepped(rig.scheduler, i * 0.0001)  # a second of very short steps
    assert journal.samples_taken <= 10 + 80 + 2
    taken = journal.samples_taken
    journal.stepped(None, 0.9999)  # type: ignore[arg-type]  # the scheduler is not touched
    assert journal.samples_taken == taken


def test_finished_requests_are_counted_and_the_oldest_forgotten() -> None:
    rig = Rig(100, script=never_ends, enable_prefix_caching=True)
    journal = Journal(finished=3)
    for i in range(5):
        rig.add(prompt(9 + i, i), max_tokens=6, name=f"r{i}", n=2 if i == 4 else 1)
    search = rig.add(prompt(7, 9), beam(3, 5))
    rig.run()
    ended = rig.scheduler.take_ended()
    assert len(ended) == 6
    for request in sorted(ended, key=lambda r: r.number):
        journal.ended(request)
    assert [r.request_id for r in journal.latest()] == [search.request_id, "r4", "r3"]
    assert journal.find("r0") is None
    record = journal.find("r4")
    assert record is not None and record.output_tokens == (6, 6) and record.finish_reasons == ("length", "length")
    beams = journal.find(search.request_id)
    assert beams is not None and "beam lost" not in beams.finish_reasons
    t = journal.totals
    sequences = [9 + i + 6 for i in range(4)] + [19, 19] + [7 + n for n in beams.output_tokens]
    assert (t.requests, t.sequences, t.tokens, t.longest) == (6, len(sequences), sum(sequences), max(sequences))
    for size in (8, 16, 64):
        assert t.tail_slots[size] == sum(-n % size for n in sequences)
        assert t.table_entries[size] == sum(-(-n // size) for n in sequences)


def test_a_request_that_never_ran_is_kept_but_not_counted() -> None:
    rig = Rig(40, script=never_ends, max_num_seqs=1)
    rig.add(prompt(9), max_tokens=20)
    rig.add(prompt(9, 1), max_tokens=20, name="waits")
    rig.step()
    rig.scheduler.abort("waits")
    journal = Journal()
    record = journal.ended(rig.scheduler.take_ended()[0])
    assert journal.totals.requests == 0 and record.admitted_at is None
    assert str(record) == "waits: the request ended before it began to run"


def test_a_recording_gives_the_report_of_the_run(tmp_path: Path) -> None:
    trouble = TROUBLES["preemption-thrash"]
    engine, _ = trouble_engine(trouble, str(tmp_path / "run.jsonl"))
    for number, ask in enumerate(trouble.load()[:12]):
        engine.add_request(f"r{number}", ask.prompt, params_of(ask))
    engine.abort("r11")
    while engine.has_unfinished():
        engine.step()
    report = engine_report(engine)
    engine.close()
    replayed = recording_report(tmp_path / "run.jsonl")
    assert (report.pop("source"), replayed.pop("source")) == ("engine", "recording")
    # The clock of the engine has gone on by one step since the last one began.
    assert report.pop("time") >= replayed.pop("time")
    for ring in ("recent", "overall"):
        assert report.pop(ring)[:-1] == replayed.pop(ring)[:-1]
    stats = report.pop("stats")  # the run's own also count what only a runner knows
    assert replayed.pop("stats").items() <= stats.items()
    assert report == replayed
    assert stats["preemptions"] > 0 and stats["aborted"] == 1
    with pytest.raises(RequestError, match=r"r99.*not known"):
        engine.explain("r99")


def test_a_damaged_recording_is_refused(tmp_path: Path) -> None:
    trouble = TROUBLES["healthy"]
    engine, _ = trouble_engine(trouble, str(tmp_path / "run.jsonl"))
    engine.add_request("a", [1, 2, 3], params_of(trouble.load()[0]))
    engine.step()
    engine.step()
    engine.close()
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:-1], lines[-1].replace("[[0,", "[[1,")]))
    with pytest.raises(ConfigError, match=r"bad.jsonl: the recording differs at step 2"):
        recording_report(tmp_path / "bad.jsonl")
    (tmp_path / "empty.jsonl").write_text(lines[0] + "\n")
    report = recording_report(tmp_path / "empty.jsonl")
    assert report["stats"]["steps"] == 0 and report["finished"] == []


def test_rates_are_differences() -> None:
    journal, rig = Journal(interval=1.0), Rig(script=never_ends)
    for second in range(8):
        journal.generated = 10 * second
        journal.stepped(rig.scheduler, float(second))
    rows = samples_as_json(journal.recent)
    assert [r["tokens_per_s"] for r in rows] == [0.0] + [10.0] * 7
    assert rate_of(rows) == 10.0 and rate_of(rows[:1]) == 0.0
    assert all(r["hit_rate"] is None for r in rows)


def test_a_report_can_be_asked_to_be_short(tmp_path: Path) -> None:
    trouble = TROUBLES["healthy"]
    engine, _ = trouble_engine(trouble, str(tmp_path / "run.jsonl"))
    for number, ask in enumerate(trouble.load()):
        engine.add_request(f"r{number}", ask.prompt, params_of(ask))
    while engine.has_unfinished():
        engine.step()
    long, short = engine_report(engine), engine_report(engine, finished=2, samples=5)
    engine.close()
    assert len(long["recent"]) > 5 and len(long["overall"]) > 20 and len(long["finished"]) == 32
    assert short["recent"] == long["recent"][-5:] and len(short["overall"]) <= 5 and len(short["finished"]) == 2
    assert engine_report(engine, samples=0)["overall"] == []


def test_embeddings_do_not_count_as_short_answers() -> None:
    rig = Rig(40, script=never_ends)
    rig.scheduler.add(Request("embedding", prompt(9), PoolingParams(), arrival=0.0, number=0, seed=0, max_len=10))
    rig.run()
    journal = Journal()
    for ended in rig.scheduler.take_ended():
        journal.ended(ended)
    assert journal.find("embedding") is not None and journal.totals.requests == 0
