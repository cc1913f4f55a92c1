"""`octavo view` and `generate --view`: recorded runs as pages; no model, no FastAPI."""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import view_server
from octavo.cli.main import main
from octavo.cli.view_demo import demo_text, record_demo
from octavo.core.record import replay
from octavo.errors import ConfigError
from octavo.inspect.block_map import BlockMap
from octavo.inspect.recorded_run import recorded_run
from octavo.server.page import page_with_run


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.jsonl"
    record_demo(path)
    return path


def carried(page: str) -> dict[str, Any]:
    """The run inside a page."""
    data = re.search(r'<script type="application/json" id="octavo-run">([^<]*)</script>', page)
    assert data is not None
    run: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(data[1])))
    return run


def test_the_demo_has_a_little_of_everything(recording: Path) -> None:
    assert replay(recording).same
    run = recorded_run(recording, text_of=demo_text)
    kinds = {event[2] for frame in run["frames"] for event in frame["events"]}
    last = dict(zip(run["frames"][0]["pool"]["stats"], run["frames"][-1]["stats"]))
    assert {"fork", "copy"} <= kinds
    for name in ("hit_tokens", "preemptions", "evictions", "forks", "copies", "finished"):
        assert last[name] > 0, name
    assert run["report"]["counterfactual"]["peak_sequences"] > 1


def test_frames_of_a_recording_follow_each_other_to_its_end(recording: Path) -> None:
    run = recorded_run(recording)
    block_map = BlockMap(run["frames"][0])
    for frame in run["frames"][1:]:
        block_map.apply(frame)
    assert block_map.stats["used"] == 0 and block_map.stats["finished"] == 28
    assert block_map.stats["steps"] == len(run["frames"]) and run["frames"][0]["time"] == 0.0
    assert block_map.stats["generated_tokens"] > 1000


def test_long_runs_are_thinned_evenly_and_keep_their_end(recording: Path) -> None:
    every, few = recorded_run(recording), recorded_run(recording, max_frames=50)
    assert len(few["frames"]) <= 51 < len(every["frames"])
    assert few["frames"][-1]["step"] == every["frames"][-1]["step"]
    assert few["frames"][-1]["stats"] == every["frames"][-1]["stats"]
    events = [e for f in few["frames"] for e in f["events"]]
    assert len(events) + sum(f["missed"] for f in few["frames"]) == sum(len(f["events"]) for f in every["frames"])


def test_a_page_is_one_file_that_allows_only_itself(recording: Path) -> None:
    run = recorded_run(recording)
    page = page_with_run(run)
    assert carried(page) == json.loads(json.dumps(run))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src &#x27;none&#x27;; script-src &#x27;sha256-")
    script = re.search(r"<script>(.*)</script>\n</body>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(sha256(script[1].encode()).digest()).decode()
    assert f"sha256-{digest}" in policy[1]
    assert "/blocks/static" not in page and "import " not in script[1].split("class BlockMap")[0]
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", page), "the file asks for another"


def test_text_is_in_the_page_only_if_asked_for(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.html"
    assert main(["view", str(recording), "--html", str(out)]) == 0
    assert "opens in any browser" in capsys.readouterr().err
    assert carried(out.read_text())["tokens"] is None
    assert main(["view", str(recording), "--html", str(out), "--show-tokens"]) == 0
    tokens = carried(out.read_text())["tokens"]
    assert re.fullmatch(r"‹\d+›", tokens["0"][0]), "without a tokenizer the ids are shown"
    assert main(["view", "--demo", "--html", str(out), "--max-frames", "20"]) == 0
    demo = carried(out.read_text())
    assert len(demo["frames"]) <= 21 and demo["tokens"]["0"][0].strip().isalpha()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["view"], "name a recording, or give --demo"),
        (["view", "--demo", "x.jsonl"], "name a recording, or give --demo"),
        (["view", "no-such-file.jsonl"], "no-such-file.jsonl: cannot be read"),
        (["view", "{readme}", "--html", "{readme}.html"], "readme.txt: not a recording (line 1 is no JSON)"),
        (["view", "{empty}"], "empty.jsonl: not a recording (the file is empty)"),
        (["view", "{begun}"], "begun.jsonl: the recording holds no step"),
        (["view", "--demo", "--max-frames", "1"], "--max-frames 1: must be at least 2"),
        (["view", "x.jsonl", "--model", "gemma-3-270m"], "--model: only needed to read the tokens"),
        (["view", "--demo", "--html", "/no/such/folder/x.html"], "cannot be written"),
        (["view", "--demo", "--port", "70000"], "--port 70000: cannot listen on 127.0.0.1"),
        (["view", "x.jsonl", "--html", "/no/such/folder/x.html"], "cannot be written"),  # before the file is read
        (["generate", "x", "--model", "/no/model", "--view", "/no/such/folder/x.html"], "cannot be written"),
        (["generate", "x", "--model", "/no/model", "--view", "{folder}"], "cannot be written (Is a directory)"),
        (["generate", "x", "--show-tokens"], "--show-tokens: no effect without --view"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[str], message: str, recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {
        "readme.txt": "no recording\n",
        "empty.jsonl": "",
        "begun.jsonl": recording.read_text().partition("\n")[0] + "\n",
    }
    paths = {name.partition(".")[0]: tmp_path / name for name in texts}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert main([a.format(**paths, folder=tmp_path) for a in arguments]) == 2
    assert message in capsys.readouterr().err
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == texts, "a refused command leaves nothing"


def test_a_damaged_recording_is_named(recording: Path, tmp_path: Path) -> None:
    lines = recording.read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith('{"event":"step"') and i > 60)
    bad = tmp_path / "bad.jsonl"
    step = json.loads(lines[place])
    step["plan"]["ends"].append(77)
    bad.write_text("\n".join([*lines[:place], json.dumps(step, separators=(",", ":")), *lines[place + 1 :]]) + "\n")
    with pytest.raises(ConfigError, match="the recording differs at step"):
        recorded_run(bad)


def test_served_from_a_port(
    recording: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers: list[view_server.ThreadingHTTPServer] = []

    class Server(view_server.ThreadingHTTPServer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            servers.append(self)

    monkeypatch.setattr(view_server, "ThreadingHTTPServer", Server)
    thread = threading.Thread(target=main, args=(["view", str(recording), "--port", "0"],))
    thread.start()
    # Not by reading what it says meanwhile: what is printed while `capsys` is read can be lost.
    while not servers:
        assert thread.is_alive()
        time.sleep(0.01)
    address = f"http://127.0.0.1:{servers[0].server_port}/"
    try:
        with urllib.request.urlopen(address + "blocks", timeout=10) as answer:
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert carried(answer.read().decode())["frames"]
        with (
            pytest.raises(urllib.error.HTTPError, match="404"),
            contextlib.closing(urllib.request.urlopen(address + "etc/passwd", timeout=10)),
        ):
            pass
    finally:
        servers[0].shutdown()
        thread.join(10)
    said = capsys.readouterr().out
    assert address in said and "Ctrl-C" in said


def test_nothing_of_the_server_is_needed(recording: Path, tmp_path: Path) -> None:
    program = (
        "import sys\nfor n in ('fastapi', 'uvicorn', 'orjson', 'torch', 'prometheus_client'): sys.modules[n] = None\n"
        f"from octavo.cli.main import main\nargs = ['view', {str(recording)!r}, '--html', {str(tmp_path / 'o')!r}]\n"
        "sys.exit(main(args))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_run_of_a_model_can_be_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from helpers.tiny_models import write_tiny

    write_tiny("llama", tmp_path / "model")
    out = tmp_path / "run.html"
    command = [
        "generate",
        "Once upon a time there was",
        "--n",
        "3",
        "--max-tokens",
        "12",
        "--seed",
        "1",
        "--ignore-eos",
    ]
    engine = ["--model", str(tmp_path / "model"), "--dtype", "float32", "--num-blocks", "40", "--block-size", "8"]
    assert main([*command, *engine, "--view", str(out), "--show-tokens"]) == 0
    run = carried(out.read_text())
    assert run["title"] == "model" and run["frames"][0]["pool"]["num_blocks"] == 40
    assert any(event[2] == "fork" for frame in run["frames"] for event in frame["events"])
    assert "".join(run["tokens"]["0"]).lstrip("<s>").startswith("Once upon a time")


def test_what_being_looked_at_costs_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from helpers.tiny_models import write_tiny

    write_tiny("llama", tmp_path / "model")
    command = ["bench", "views", "--rounds", "1", "--sequences", "2", "--prompt", "8", "--output", "4", "--json", "-"]
    assert main([*command, "--model", str(tmp_path / "model"), "--dtype", "float32", "--num-blocks", "64"]) == 0
    said = json.loads(capsys.readouterr().out)
    loads, alone = said["tables"].values()
    assert [row["mode"] for row in loads] == ["records muted", "nobody watching", "one watcher"]
    assert loads[0]["cost"] == loads[0]["processor_cost"] == 0 and all(row["seconds"] > 0 for row in loads)
    assert alone[1]["num_blocks"] == 20_000 and alone[1]["delta_bytes"] < 10_000
    assert [goal["limit"] for goal in said["goals"]] == [0.01, 0.03]
