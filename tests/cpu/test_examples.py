"""Every program in examples/ runs and says what it should, on tiny models with random weights."""

from __future__ import annotations

import re
import runpy
import socket
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.http_server import Served
from helpers.serving import scripted_engine
from helpers.tiny_models import tiny_config, tiny_oracle, write_tokenizer
from octavo.async_engine import AsyncEngine
from octavo.server.settings import ServerSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_HERE = {"quickstart", "streaming", "branches", "prefix_cache", "lora", "server_client", "transformers_generate",
            "engine_on_paged_attention"}  # fmt: skip

DOCUMENT = (EXAMPLES.parent / "docs" / "embedding.md").read_text()
CODE = [code for code in re.findall(r"```python\n(.*?)```", DOCUMENT, re.S) if code.startswith("import")]

Run = Callable[..., list[str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_oracle(tiny_config("llama", num_hidden_layers=2, max_position_embeddings=512)).save_pretrained(path)
    write_tokenizer(path)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a program of examples/ in this process; the lines it printed."""

    def start(name: str, *arguments: object) -> list[str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        capsys.readouterr()
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out.splitlines()

    return start


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == RUN_HERE


def test_the_engine_on_paged_attention_is_sixty_lines_and_right(run: Run) -> None:
    source = (EXAMPLES / "engine_on_paged_attention.py").read_text()
    engine = source[source.index("class Request:") : source.index("# -- proof")]
    assert len([line for line in engine.splitlines() if line.strip()]) <= 60
    lines = run("engine_on_paged_attention")
    assert lines[0] == "request story: [0*, 1*, 2*]" and "request story, 2nd: [0*, 1*, 2*]" in lines
    assert lines[-1] == "2 preemptions; every token is the one that dense attention gives"
    assert "peak 12 of 12 blocks, 1 copied on write" in lines[-2]


def test_quickstart(run: Run, model: Path) -> None:
    lines = run("quickstart", "--model", model)
    assert len(lines) == 3 and lines[0].startswith("'The capital of France is' -> '")


def test_streaming(run: Run, model: Path) -> None:
    assert run("streaming", "--model", model)[-1] == "stopped early; blocks in use now: 0"


def test_branches_show_the_shared_blocks(run: Run, model: Path) -> None:
    lines = run("branches", "--model", model)
    assert sum(line.startswith("sample ") for line in lines) == sum(line.startswith("beam ") for line in lines) == 3
    assert any(line.startswith("seq ") and "0*" in line for line in lines)
    assert any("sharing alone saved" in line for line in lines)


def test_prefix_cache(run: Run, model: Path) -> None:
    lines = run("prefix_cache", "--model", model)
    cached = [int(line.split("?")[1].split()[0]) for line in lines[::2]]
    assert cached[0] == 0 and 80 < cached[1] < cached[2]


def test_lora(run: Run, model: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = transformers.AutoModelForCausalLM.from_pretrained(model)
        settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(base, settings).save_pretrained(str(tmp_path))
    lines = run("lora", "--model", model, "--adapter", f"mine={tmp_path}")
    plain, mine = lines
    assert plain.startswith("  no adapter: ") and mine.startswith("        mine: ") and plain[14:] != mine[14:]


def test_server_client(run: Run) -> None:
    with Served(scripted_engine()) as served:
        lines = run("server_client", "--url", served.url)
    assert [line.split(":")[0] for line in lines] == ["choice 0", "choice 1", "streamed"]


def test_server_client_without_a_server_says_so_in_one_line(run: Run) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and not listening
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(SystemExit) as end:
            run("server_client", "--url", url)
    assert str(end.value).startswith(f"no server answers at {url} ") and "\n" not in str(end.value)


def test_server_client_without_a_key_says_so(run: Run) -> None:
    settings = ServerSettings(api_keys=("the-right-one",))
    with Served(scripted_engine(), settings) as served, pytest.raises(SystemExit) as end:
        run("server_client", "--url", served.url)
    assert "refuses: " in str(end.value) and "\n" not in str(end.value)


def test_server_client_waits_for_a_model_that_loads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with Served(None) as served:
        with pytest.raises(SystemExit, match="still loads after 0 s; try again, or give a longer --wait"):
            run("server_client", "--url", served.url, "--wait", 0)

        def load_meanwhile(seconds: float) -> None:
            if served.app.state.engine is None:
                engine = AsyncEngine(scripted_engine())
                engine.start()
                served.app.state.server.attach(engine)

        with monkeypatch.context() as patched:
            patched.setattr("time.sleep", load_meanwhile)
            lines = run("server_client", "--url", served.url)
    assert [line.split(":")[0] for line in lines] == ["choice 0", "choice 1", "streamed"]


def test_transformers_generate(run: Run) -> None:
    lines = run("transformers_generate")
    assert lines[0] == "the same tokens: True"
    assert sum("0*, 1*, 2*, 3*, 4*, 5*" in line for line in lines) == 4
    assert all(line.endswith(", 1 blocks more") for line in lines[-2:])


@pytest.mark.parametrize("code", CODE, ids=["PagedAttention", "functions"])
def test_the_code_of_the_document_runs(code: str) -> None:
    exec(compile(code, "embedding.md", "exec"), {})


def test_names_and_links_of_the_document_are_there() -> None:
    from octavo import PagedAttention

    for target in re.findall(r"\]\(((?!http)[^)#]+)\)", DOCUMENT):
        assert (EXAMPLES.parent / "docs" / target).exists(), target
    named = set(re.findall(r"attn\.(\w+)", DOCUMENT))
    assert len(named) > 8 and all(hasattr(PagedAttention, name) for name in named)
    shown = re.search(r"`allocate`, `append`.*?`audit`", DOCUMENT, re.S)
    assert shown and all(hasattr(PagedAttention, name) for name in re.findall(r"`(\w+)`", shown[0]))
