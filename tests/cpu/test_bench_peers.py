"""`octavo bench peers`: loads, counts, goals, and one run against transformers on a tiny model. Never times."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_config
from octavo.bench import peer_engines, peers
from octavo.bench.peer_engines import Peer, PeerError, Request
from octavo.cli.main import main
from octavo.errors import ConfigError
from octavo.kernels import cpu

NOTHING = dict.fromkeys(peers.OPTIONS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with weights and no tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    config = tiny_config("llama", num_hidden_layers=1, max_position_embeddings=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def test_rows_of_two_engines_side_by_side(model: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    given = ["--model", model, "--hf-model", model, "--transformers-python", sys.executable]
    small = ["--rows", "d", "--repeat", "1", "--shrink", "16", "--dtype", "float32", "--threads", "1"]
    assert main(["bench", "peers", *given, *small, "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    (rows,) = said["tables"].values()
    assert [row["engine"] for row in rows] == ["octavo", "transformers"], said["notes"]
    measured = set() if cpu.why_unavailable() else {"reading"}
    assert all(measured <= row.keys() and row.get("reading", 1) > 0 for row in rows)
    for row in rows:
        assert all(isinstance(row[key], float) for key in ("d1", "d8")), said["notes"]
        assert row["d1"] > 0 and row["d8"] > 0
    assert said["goals"] == []  # a shrunk load says nothing about them
    missing = [note.split(" ")[0] for note in said["notes"]]
    assert missing == ["vllm", "openvino", "llama.cpp"]


def test_quantised_weights_of_octavo_in_the_row_of_equal_sequences(model: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    small = ["--rows", "g", "--repeat", "1", "--shrink", "16", "--dtype", "float32", "--threads", "1"]
    assert main(["bench", "peers", "--model", model, "--quantization", "int8", *small, "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    ((row,),) = said["tables"].values()
    assert isinstance(row["g"], float), said["notes"]  # the difference of two noisy times: any sign
    assert said["facts"]["quantization"] == "int8"


def test_a_format_that_does_not_exist_is_refused_at_the_door(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--rows", "g", "--quantization", "int3"]) == 2
    assert "int3" in capsys.readouterr().err


def test_quantised_weights_reach_the_engine(model: str) -> None:
    peer = Peer("octavo", sys.executable, model, quantization="nonsense")
    with pytest.raises(PeerError, match="nonsense"):
        peer_engines.start(peer, dtype="float32", threads=1, prefix=False, max_len=64, slots=1)


def test_llamas_own_measure_is_used_where_it_lies_beside_the_server(tmp_path: Path) -> None:
    server, bench = tmp_path / "llama-server", tmp_path / "llama-batched-bench"
    server.touch()
    peer = Peer("llama.cpp", str(server), "model.gguf")
    assert peer_engines.batched_bench(peer) is None  # not built
    said = tmp_path / "said"
    bench.write_text(f"""#!/bin/sh
echo "$@" > {said}
echo 'main: about to start'
echo '{{"pp": 128, "tg": 64, "pl": 64, "speed_pp": 9.0, "speed_tg": 123.5}}'
""")
    bench.chmod(0o755)
    measure = peer_engines.batched_bench(peer)
    assert measure is not None and measure(2, 64, 128, 64) == 123.5
    assert said.read_text().split()[:2] == ["-m", "model.gguf"]
    assert "-npp 128 -ntg 64 -npl 64" in said.read_text() and f"-c {64 * 192}" in said.read_text()
    assert peer_engines.batched_bench(Peer("vllm", str(server), "model")) is None
    bench.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(PeerError, match="status 3 and 0 lines"):
        measure(2, 64, 128, 64)


def test_an_engine_that_cannot_start_is_a_note_and_no_end(model: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    given = ["--model", model, "--llama-server", "/bin/false", "--llama-model", model, "--threads", "1"]
    assert main(["bench", "peers", *given, "--rows", "b", "--repeat", "1", "--shrink", "64", "--json", str(file)]) == 0
    said = json.loads(file.read_text())
    (rows,) = said["tables"].values()
    assert rows[1]["engine"] == "llama.cpp" and rows[1]["b"] == "failed"
    assert "llama.cpp, b: /bin/false ended with status 1" in said["notes"]


def test_loads_have_the_shape_of_the_rows_and_differ_between_repetitions() -> None:
    loads = peers.Loads(262_144, 1)
    mixed = loads.mixed(0)
    assert len(mixed) == 64
    assert all(32 <= len(r.ids) <= 512 and 32 <= r.output <= 256 for r in mixed)
    assert loads.mixed(1)[0].ids != mixed[0].ids and len(loads.mixed(1)[0].ids) == len(mixed[0].ids)
    sharing = loads.sharing(0)
    assert len(sharing) == 32 and len({r.ids[:1024] for r in sharing}) == 1
    assert len({r.ids for r in sharing}) == 32 and {len(r.ids) for r in sharing} == {1056}
    assert loads.sharing(1)[0].ids[:1024] != sharing[0].ids[:1024]
    together = loads.together(64, 0)
    assert len(together) == 64 and {(len(r.ids), r.output) for r in together} == {(128, 64)}
    assert len({r.ids for r in together}) == 64 and {r.output for r in loads.together(1, 0)} == {1}
    (many,) = loads.samples(8, 0)
    assert (len(many.ids), many.output, many.samples, many.temperature) == (512, 64, 8, 1.0)
    assert [r.output for r in loads.one(1, 0) + loads.one(128, 0) + loads.first(1024, 0)] == [1, 128, 1]


def test_wrong_token_counts_are_refused() -> None:
    request = Request((1, 2), 5, samples=2)
    peer_engines.check_counts("x", [request], [[5, 5]])
    for produced in ([[5, 4]], [[5]], [[5, 5, 5]]):
        with pytest.raises(PeerError, match="request 0 has"):
            peer_engines.check_counts("x", [request], produced)


def test_peers_are_found_when_all_their_parts_are_given(tmp_path: Path) -> None:
    found = peer_engines.find_peers(model="m", **{**NOTHING, "vllm_python": sys.executable})
    assert list(found) == ["octavo"]  # vLLM lacks its model
    given = {**NOTHING, "vllm_python": sys.executable, "hf_model": str(tmp_path)}
    assert peer_engines.find_peers(model="m", **given)["vllm"] == Peer("vllm", sys.executable, str(tmp_path))
    with pytest.raises(ConfigError, match="openvino: /not/there does not exist"):
        peer_engines.find_peers(
            model="m", **{**NOTHING, "openvino_python": "/not/there", "openvino_model": str(tmp_path)}
        )


def test_goals_are_ratios_to_the_best_peer() -> None:
    rows = [
        {"engine": "octavo", "a": 10.0, "c": 300.0, "d8": 1.0},
        {"engine": "x", "a": 20.0, "c": 100.0, "d8": "failed"},
        {"engine": "y", "a": 40.0, "c": 150.0},
    ]
    found = {goal.name[0]: goal for goal in peers.goals([rows])}
    assert set(found) == {"a", "c"}
    assert found["a"].value == 0.5 and found["a"].met
    assert found["c"].value == 2.0 and not found["c"].met


def test_rounds_give_the_median_of_their_ratios() -> None:
    def turn(own: float, other: float | str) -> list[dict[str, object]]:
        return [{"engine": "octavo", "c": own}, {"engine": "x", "c": other}]

    rounds = [turn(300.0, 100.0), turn(200.0, 100.0), turn(100.0, 100.0), turn(900.0, "failed")]
    assert peers.ratios(rounds, "c") == [3.0, 2.0, 1.0]
    (goal,) = peers.goals(rounds)
    assert goal.value == 2.0 and not goal.met
    assert peers.typical_of([turn[0] for turn in rounds[:3]]) == {"engine": "octavo", "c": 200.0}
    assert peers.typical_of([turn[1] for turn in rounds]) == {"engine": "x", "c": "failed"}
    assert peers.goals([turn(1.0, "failed")]) == []


def test_rounds_start_every_engine_anew(model: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    small = ["--rows", "b", "--repeat", "1", "--rounds", "2", "--shrink", "16", "--dtype", "float32", "--threads", "1"]
    others = ["--hf-model", model, "--transformers-python", sys.executable]
    assert main(["bench", "peers", "--model", model, *others, *small, "--json", str(file)]) == 0
    ((title, rows),) = json.loads(file.read_text())["tables"].items()
    assert "2 rounds" in title and [row["engine"] for row in rows] == ["octavo", "transformers"]
    assert all(isinstance(row["b"], float) for row in rows)


def test_unknown_rows_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "peers", "--rows", "ax"]) != 0
    assert "--rows 'ax'" in capsys.readouterr().err
