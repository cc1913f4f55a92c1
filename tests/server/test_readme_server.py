"""The README's server examples run against a real server: those behind the marker `test: server`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.http_server import Served
from helpers.tiny_models import write_tiny
from octavo.config import make_config
from octavo.engine import Engine
from octavo.server.settings import ServerSettings

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- test: server -->\n```(sh|python)\n(.*?)```", README, re.S)
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model under the name of the embedded one."""
    path = tmp_path_factory.mktemp("model")
    write_tiny("llama", path)
    settings = ServerSettings(served_model_name=("gemma-3-270m",), chat_template="plain")
    with Served(Engine.build(make_config(model=str(path), num_blocks=200)), settings) as server:
        yield server
        server.wait_idle()


def test_there_are_examples_of_both_kinds() -> None:
    if "octavo serve" not in README:
        pytest.skip("the README has no section on the server yet")
    assert {kind for kind, _ in EXAMPLES} == {"sh", "python"}
    assert all(ADDRESS in code for _, code in EXAMPLES)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    kind, code = EXAMPLES[number]
    code = code.replace(ADDRESS, served.url)
    if kind == "python":
        exec(compile(code, "README.md", "exec"), {})
        out = capsys.readouterr().out
    else:
        done = subprocess.run(["bash", "-e", "-c", code], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        out = done.stdout
    assert out.count("\n") >= 2
    assert '"error"' not in out
