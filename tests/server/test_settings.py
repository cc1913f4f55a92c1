"""Settings: a flag wins over the environment, that over the file, that over the default; what is in force is told."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main as command_line
from octavo.cli.main import build_parser, main
from octavo.errors import ConfigError
from octavo.server import run as server_run
from octavo.server.settings import Loaded, ServerSettings, load


@pytest.fixture(autouse=True)
def signals_are_given_back() -> Iterator[None]:
    """A server takes its process's signals for good; here the process is the tests'."""
    before = {sig: signal.getsignal(sig) for sig in (signal.SIGINT, signal.SIGTERM)}
    yield
    for sig, handler in before.items():
        signal.signal(sig, handler)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_precedence(tmp_path: Path) -> None:
    file = write(
        tmp_path / "octavo.toml",
        'port = 1111\nhost = "0.0.0.0"\n[server]\nmax_n = 3\nmax_waiting = 7\n'
        "[engine]\nblock_size = 32\nnum_blocks = 9\n",
    )
    environment = {"OCTAVO_PORT": "2222", "OCTAVO_MAX_N": "4", "OCTAVO_NUM_BLOCKS": "10", "HOME": "/"}
    loaded = load({"port": 3333, "num_blocks": 11}, environment, file)
    assert (loaded.server.port, loaded.server.max_n, loaded.server.max_waiting) == (3333, 4, 7)
    assert (loaded.server.host, loaded.server.max_prompts) == ("0.0.0.0", 256)
    assert loaded.engine == {"block_size": 32, "num_blocks": 11}
    assert {n: loaded.sources.get(n) for n in ("port", "max_n", "max_waiting", "num_blocks", "max_prompts")} == {
        "port": "flag", "max_n": "environment", "max_waiting": "file", "num_blocks": "flag", "max_prompts": None,
    }  # fmt: skip
    assert load({}, {"OCTAVO_CONFIG": file}).server.port == 1111


def test_the_report_names_every_setting_and_hides_keys() -> None:
    loaded = load({"api_keys": ("a-secret-key",), "port": 1}, {"OCTAVO_MAX_N": "2"})
    lines = loaded.report({"block_size": {"asked": 16, "chosen": 16, "why": "default"}})
    text = "\n".join(lines)
    assert "port = 1  (flag)" in lines
    assert "max_n = 2  (environment)" in lines
    assert "max_prompts = 256  (default)" in lines
    assert "block_size = 16  (default)" in lines
    assert "api_keys = 1 given  (flag)" in lines
    assert "a-secret-key" not in text + repr(loaded)
    for name in ServerSettings.__dataclass_fields__:
        assert f"{name} = " in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "unknown setting prot"),
        ("[sever]\nport = 1", r"unknown table \[sever\]"),
        ("port = ", "config file"),
        ("max_queue = 3", "use max_waiting"),
        ('port = "8000"', "must be of type int"),
        ("access_log = 1", "must be of type bool"),
        ("api_keys = [1]", "list of strings"),
        ("port = 70000", "between 0 and 65535"),
        ('api_keys = ["short"]', "at least 8"),
        ("drain_seconds = -1", "between 0"),
        ("[engine]\nblokc_size = 16", r"\[engine\] unknown setting blokc_size"),
        ("[engine]\nport = 1", r"\[engine\] port belongs into \[server\]"),
        ("[server]\nblock_size = 16", r"\[server\] block_size belongs into \[engine\]"),
        ("[engine]\nblock_size = true", "block_size=True: must be of type int"),
        ('[engine]\nhybrid_kv = "yes"', "hybrid_kv='yes': must be of type bool"),
        ("[engine]\ngpu_memory_utilization = true", "must be of type float"),
        ("[engine]\nspeculative = 3", "speculative=3: must be of type str"),
        ("[engine]\ndebug = true", "use OCTAVO_DEBUG=blocks"),
        ("port = 1\n[server]\nport = 2", "port is there twice"),
        ('cors_origins = ["foo"]', r"'foo' is no origin.*https://host\[:port\]"),
        ('cors_origins = ["https://foo/"]', "without a path"),
    ],
)
def test_mistakes_in_the_file_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load({}, {}, write(tmp_path / "x.toml", text))
    with pytest.raises(ConfigError, match="nowhere"):
        load({}, {}, str(tmp_path / "nowhere.toml"))


def test_settings_of_the_engine_may_stand_at_the_top_and_hold_a_table(tmp_path: Path) -> None:
    text = 'block_size = 32\nspeculative = "ngram"\ncors_origins = ["*", "http://localhost:3000"]\n'
    loaded = load({}, {}, write(tmp_path / "x.toml", text))
    assert loaded.engine == {"block_size": 32, "speculative": "ngram"}
    assert loaded.server.cors_origins == ("*", "http://localhost:3000")
    loaded = load({}, {}, write(tmp_path / "y.toml", '[engine.speculative]\nmethod = "ngram"\n'))
    assert loaded.engine == {"speculative": {"method": "ngram"}}


def test_the_environment_is_read_by_type_and_its_mistakes_are_named() -> None:
    given = {
        "OCTAVO_API_KEY": "key-number-1, key-number-2", "OCTAVO_ACCESS_LOG": "yes", "OCTAVO_DRAIN_SECONDS": "1.5",
        "OCTAVO_MODEL": "x", "OCTAVO_ENABLE_PREFIX_CACHING": "off", "OCTAVO_LOG": "info", "OCTAVO_PROT": "1",
    }  # fmt: skip
    loaded = load({}, given)
    assert loaded.server.api_keys == ("key-number-1", "key-number-2")
    assert loaded.server.access_log is True
    assert loaded.server.drain_seconds == 1.5
    assert loaded.engine == {"model": "x", "enable_prefix_caching": False}
    assert loaded.warnings == ("OCTAVO_PROT is set, but there is no setting prot; it has no effect",)
    for name, text in {"OCTAVO_PORT": "many", "OCTAVO_BLOCKS": "perhaps", "OCTAVO_STALL_SECONDS": "x"}.items():
        with pytest.raises(ConfigError, match=name):
            load({}, {name: text})


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "# those who may\nfirst-secret-key\n\n  second-secret-key \n")
    settings = ServerSettings(api_keys=("zeroth-secret-key",), api_key_file=path)
    assert settings.all_keys() == ("zeroth-secret-key", "first-secret-key", "second-secret-key")
    with pytest.raises(ConfigError, match="no key in it"):
        ServerSettings(api_key_file=write(tmp_path / "empty", "# nobody\n")).all_keys()
    with pytest.raises(ConfigError, match=r"api_key_file=.*short, line 3: a key has at least 8") as caught:
        ServerSettings(api_key_file=write(tmp_path / "short", "first-secret-key\n\nbrief\n")).all_keys()
    assert "brief" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        ServerSettings(api_key_file=str(tmp_path / "none")).all_keys()


def test_every_setting_has_an_option_and_flags_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Loaded] = []
    monkeypatch.setattr(server_run, "serve", lambda loaded: seen.append(loaded) or 0)
    monkeypatch.setattr(command_line.os, "environ", {**command_line.os.environ, "OCTAVO_LOG": ""})
    arguments = "serve some/model --port 9 --host ::1 --api-key one-secret-key --api-key two-secret-key --max-n 5"
    assert main([*arguments.split(), "--no-blocks", "--max-body-bytes", "1MiB", "--num-blocks", "77"]) == 0
    server, engine = seen[0].server, seen[0].engine
    assert (server.port, server.host, server.max_n, server.blocks) == (9, "::1", 5, False)
    assert server.api_keys == ("one-secret-key", "two-secret-key")
    assert server.max_body_bytes == 1 << 20
    assert engine == {"model": "some/model", "num_blocks": 77}
    options = {a.dest for a in _subparser("serve")._actions}
    assert set(ServerSettings.__dataclass_fields__) <= options


def _subparser(name: str) -> Any:
    actions: list[Any] = build_parser(full_bench=False)._actions
    return next(a.choices[name] for a in actions if a.choices and name in a.choices)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("a --model b", "two models"),
        ("--max-queue 3", "use --max-waiting"),
        ("--port 99999", "between 0 and 65535"),
        ("--api-key x", "at least 8"),
        ("--chat-template nowhere.jinja", "No such file"),
        ("--config nowhere.toml", "nowhere.toml"),
        ("--model nowhere/at/all", "nowhere/at/all"),
        ("--host 300.1.1.1", "octavo: host='300.1.1.1': "),
        ("--cors-origin foo", "'foo' is no origin"),
    ],
)
def test_mistakes_on_the_command_line_end_it_with_2(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments.split(), *([] if "--port" in arguments else ["--port", "0"])]) == 2
    assert words in capsys.readouterr().err


def test_a_port_in_use_is_named_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port={port}: Address already in use; choose another port"):
            server_run.check_address("127.0.0.1", port)
    server_run.check_address("localhost", 0)
    with pytest.raises(ConfigError, match=r"host='192\.0\.2\.1': .*give an address of this machine"):
        server_run.check_address("192.0.2.1", 0)  # kept for documentation: nobody has it


def test_help_is_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    for group in ("serving:", "who may come in:", "limits:", "watching:", "engine:", "examples:"):
        assert f"\n{group}" in text
    assert text.startswith("usage: octavo serve [MODEL] [options]\n")
