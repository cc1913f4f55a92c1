"""Traces: the public CSV, conversations as JSON lines, made-up loads; errors name the line and the remedy."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planning.trace import Trace, TraceRequest, read_trace
from octavo.planning.trace_synthetic import synthetic

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_public_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "azure.csv",
        HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n\n",
    )
    trace = read_trace(path)
    assert trace.lengths() == [(374, 44), (396, 109)]
    assert trace.requests[0].arrival == 0.0
    assert trace.requests[1].arrival == pytest.approx(4.314579, abs=1e-5)
    assert (trace.prompt_tokens, trace.output_tokens, trace.longest) == (770, 153, 505)
    assert trace.describe().startswith("azure.csv: 2 requests")


def test_columns_are_found_by_name_and_rows_are_put_in_order(tmp_path: Path) -> None:
    path = write(tmp_path, "t.csv", "generatedtokens,Model,TimeStamp,contexttokens\n5,a,20.5,100\n6,b,10.0,200\n")
    assert read_trace(path).requests == [TraceRequest(0.0, 200, 6), TraceRequest(10.5, 100, 5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 1: no column TIMESTAMP, ContextTokens, GeneratedTokens in the header 'a,b'"),
        ("", "line 1: no column"),
        (HEADER, "holds no request"),
        (HEADER + "1.0,10,5\n2.0,x,5\n", "line 3: ContextTokens 'x' is no whole number"),
        (HEADER + "1.0,10,0\n", "line 2: GeneratedTokens=0 must lie between 1 and 10000000; correct or remove"),
        (HEADER + "1.0,10\n", "line 2: 2 fields, the header has 3"),
        (HEADER + "yesterday,10,5\n", "line 2: TIMESTAMP 'yesterday' is neither a number of seconds nor a time"),
        (HEADER + "nan,10,5\n", "line 2: TIMESTAMP 'nan' is not finite"),
    ],
)
def test_bad_csv_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(write(tmp_path, "t.csv", text))
    assert message in str(error.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in .csv .* or .jsonl"):
        read_trace(tmp_path / "t.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"TIMESTAMP,\xff\xfe\n")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        read_trace(tmp_path / "b.csv")


def conversation(**changes: Any) -> str:
    turns = [{"user": 35, "assistant": 210}, {"user": 18, "assistant": 160, "wait": 6.5}]
    return json.dumps({"arrival": 2.0, "system": {"name": "help", "tokens": 1200}, "turns": turns, **changes}) + "\n"


def test_a_turn_begins_with_all_earlier_ones(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "c.jsonl", conversation() + "\n" + conversation(arrival=1.0)))
    first, second = trace.requests[2], trace.requests[3]  # of the conversation that came later
    assert (first.arrival, first.prompt_tokens, first.output_tokens, first.after) == (2.0, 1235, 210, None)
    assert (second.arrival, second.prompt_tokens, second.after) == (6.5, 1200 + 35 + 210 + 18, 2)
    assert second.runs[:3] == (*first.runs, (first.output_name, 210))
    other = trace.requests[0]
    assert other.runs[0] == first.runs[0] == ("system help", 1200)
    assert other.runs[1][0] != first.runs[1][0]
    for request in trace:
        assert sum(count for _, count in request.runs) == request.prompt_tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: is no JSON"),
        ("[]", "line 1: a conversation must be an object"),
        ('{"turns": []}', '"turns" must be a non-empty list'),
        (conversation(user=3), "unknown key 'user' in a conversation; known are arrival, system, turns"),
        (conversation(turns=[{"user": 0, "assistant": 1}]), 'turn 0: "user" is 0; a whole number from 1'),
        (conversation(turns=[{"user": 1}]), '"assistant" is None'),
        (conversation(turns=[{"user": 1, "assistant": 1, "wait": 1}]), "has no effect in the first turn"),
        (conversation(arrival=-1), '"arrival" is -1; a number of seconds of at least 0'),
        (conversation(system={"tokens": 5}), '"system" needs a "name"'),
    ],
)
def test_bad_conversations_are_refused_with_their_line(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(write(tmp_path, "c.jsonl", line))
    assert message in str(error.value)


def test_a_trace_can_be_cut_repeated_and_sped_up(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, "c.jsonl", conversation() + conversation(arrival=4.0)))
    assert trace.first(1).requests == trace.requests[:1]
    with pytest.raises(ConfigError, match=r"5 requests were asked for, c\.jsonl has 4"):
        trace.first(5)
    again = trace.repeated(6)
    assert len(again) == 6
    copy = again.requests[4]
    assert copy.arrival > 4.0
    assert copy.runs[0] == ("system help", 1200)  # the system prompt stays, the talk is another
    assert copy.runs[1][0] != trace.requests[0].runs[1][0]
    assert again.requests[5].after == 4
    fast = trace.faster(2.0)
    assert [r.arrival for r in fast] == [1.0, 6.5, 2.0, 6.5]  # thinking takes as long as before
    with pytest.raises(ConfigError, match="must be a positive number"):
        trace.faster(0.0)


def test_made_up_loads_are_the_same_everywhere() -> None:
    assert synthetic(50, seed=3).requests == synthetic(50, seed=3).requests
    assert synthetic(50, seed=3).requests != synthetic(50, seed=4).requests
    assert set(synthetic(9, "fixed:7+3").lengths()) == {(7, 3)}


def test_lengths_keep_their_bounds() -> None:
    totals = [p + o for p, o in synthetic(2000, "uniform:256-2048", output_share=0.25).lengths()]
    assert min(totals) < 300 and max(totals) > 2000
    assert 256 <= min(totals) <= max(totals) <= 2048
    assert sum(totals) / 2000 == pytest.approx(1152, rel=0.05)
    assert all(o == round(0.25 * (p + o)) for p, o in synthetic(100).lengths())
    both = synthetic(500, "uniform:32-64+2-9").lengths()
    assert {p for p, _ in both} == set(range(32, 65)) and {o for _, o in both} == set(range(2, 10))
    tails = sorted(p for p, _ in synthetic(2001, "lognormal:1000+50").lengths())
    assert tails[1000] == pytest.approx(1000, rel=0.1) and tails[-1] > 5000


def test_arrivals_have_their_rate_and_their_bursts() -> None:
    def gaps(text: str) -> list[float]:
        times = [r.arrival for r in synthetic(4000, "fixed:1+1", text)]
        return [b - a for a, b in pairwise(times)]

    def variation(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return (sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5 / mean

    assert set(gaps("all")) == {0.0}
    assert gaps("constant:4") == pytest.approx([0.25] * 3999)
    for text, spread in (("poisson:4", 1.0), ("bursty:4", 3.0)):
        assert sum(gaps(text)) / 3999 == pytest.approx(0.25, rel=0.15)
        assert variation(gaps(text)) == pytest.approx(spread, rel=0.15)


def test_a_shared_prefix_leaves_at_least_one_own_token() -> None:
    trace = synthetic(20, "uniform:5-40+1-2", shared_prefix=10)
    for request in trace:
        (name, shared), (own, rest) = request.runs
        assert name == "system" and shared == min(10, request.prompt_tokens - 1)
        assert shared + rest == request.prompt_tokens and rest >= 1
        assert own != name
    assert len({r.runs[1][0] for r in trace}) == 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": "uniform:9-3"}, "9 is more than 3"),
        ({"lengths": "uniform:1-3"}, "a total of 1 leaves no room"),
        ({"lengths": "fixed:0+3"}, "0 must lie between 1"),
        ({"lengths": "zipf:3"}, "write fixed:PROMPT\\+OUTPUT"),
        ({"arrivals": "poisson:0"}, "write all, constant:RATE"),
        ({"arrivals": "poisson:x"}, "write all, constant:RATE"),
        ({"output_share": 1.0}, "must lie between 0 and 1"),
        ({"shared_prefix": -1}, "must be at least 0"),
    ],
)
def test_texts_that_say_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        synthetic(3, **options)


def test_an_empty_load_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        synthetic(0)
    assert len(Trace("x", [TraceRequest(0.0, 1, 1)])) == 1
