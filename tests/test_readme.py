"""The README's Python examples run, and the commands it names exist."""

import re
from pathlib import Path

import pytest

from octavo.cli.main import main

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"<!-- test: runs -->\n```python\n(.*?)```", README, re.S)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("code", EXAMPLES)
def test_example_runs(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 3


COMMANDS = r"octavo (generate|chat|serve|info|plan|simulate|replay|view|doctor|top|quantize|bench [\w-]+)"


@pytest.mark.parametrize("command", sorted(set(re.findall(COMMANDS, README))))
def test_named_command_exists(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*command.split(), "--help"])
    assert end.value.code == 0
    assert command.split()[-1] in capsys.readouterr().out


def test_named_files_exist() -> None:
    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (Path(__file__).parent.parent / target).exists(), target
