"""The command over a scripted engine: what it prints, what it refuses, how it exits, how fast it starts."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from test_cli_blocks import view

import octavo.cli.loading
from helpers.fake_engine import FakeEngine, FakeTokenizer
from octavo.cli import options
from octavo.cli.chat import Conversation, transcript
from octavo.cli.main import build_parser, main
from octavo.config import EngineConfig
from octavo.errors import InternalError, SamplingError
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams

SOURCE = Path(__file__).parents[2] / "src"


class Engine(FakeEngine):
    """With a pool to look at: one block per live request."""

    def pool_view(self) -> Any:
        tables = {int(i): [[int(i)]] for i in self.live}
        return view(block_tables=tables, num_used=len(tables), ref_counts=[1] * 99, num_shared=0)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    made = Engine(FakeTokenizer())
    monkeypatch.setattr(octavo.cli.loading, "load", lambda args: LLM.from_engine(made))  # type: ignore[arg-type]
    monkeypatch.delenv("OCTAVO_DEBUG", raising=False)
    return made


def out(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_one_prompt_prints_the_text_alone(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello"]) == 0
    assert out(capsys) == "olleh\n"
    assert engine.closed == 1


def test_samples_and_prompts_are_told_apart(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ab", "c", "--n", "2"]) == 0
    assert out(capsys).splitlines() == ["── 0: ab", "[0] ba", "[1] bbaa", "── 1: c", "[0] c", "[1] cc"]


def test_json_is_one_object_a_prompt(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ab", "ü", "--json"]) == 0
    answers = [json.loads(line) for line in out(capsys).splitlines()]
    assert [a["outputs"][0]["text"] for a in answers] == ["ba", "ü"]
    assert answers[0]["prompt"] == "ab" and answers[0]["outputs"][0]["finish_reason"] == "stop"


def test_stream(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ab", "--stream"]) == 0
    assert out(capsys) == "ba\n"
    assert main(["generate", "ab", "--stream", "--json", "--n", "2"]) == 0
    deltas = [json.loads(line) for line in out(capsys).splitlines()]
    assert "".join(d["text"] for d in deltas if d["index"] == 0) == "ba"
    assert main(["generate", "ab", "c", "--stream"]) == 2


@pytest.mark.parametrize("extra", [[], ["--stream"], ["--beam-width", "2"]])
def test_show_blocks(engine: Engine, capsys: pytest.CaptureFixture[str], extra: list[str]) -> None:
    assert main(["generate", "hello", "--show-blocks", *extra]) == 0
    text = out(capsys)
    assert "olleh" in text and "\nseq 0: [0]\n" in text and "1 of 40 blocks used" in text


def test_show_blocks_keeps_the_fullest_moment(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ab", "hello", "q", "--show-blocks", "--json"]) == 0
    blocks = json.loads(out(capsys).splitlines()[-1])["blocks"]
    assert blocks[:3] == ["seq 0: [0]", "seq 1: [1]", "seq 2: [2]"]
    assert main(["generate", "q", "--show-blocks"]) == 0  # begins and ends in one step
    assert "seq 0: [0]\n" in out(capsys)


def test_beams(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "ab", "--beam-width", "2"]) == 0
    assert out(capsys) == "[-1.000] ba\n"
    assert main(["generate", "ab", "cd", "--beam-width", "2", "--json"]) == 0
    assert [json.loads(s)["sequences"][0]["text"] for s in out(capsys).splitlines()] == ["ba", "dc"]


def test_prompts_from_a_file_and_from_standard_input(
    engine: Engine, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts"
    file.write_text('ab\n\n{"prompt_token_ids": [99, 100]}\n{not json\n')
    assert main(["generate", "xy", "--prompts-file", str(file)]) == 0
    assert out(capsys).splitlines()[1::2] == ["yx", "ba", "dc", "nosj ton{"]
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    assert main(["generate"]) == 0
    assert out(capsys) == "senil\nowt\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    assert main(["generate", "--prompts-file", "-"]) == 0
    assert out(capsys).splitlines()[1::2] == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x", "--prompts-file", "/no/such/file"], "/no/such/file"),
        (["x", "--n", "0"], "n=0: must be at least 1"),
        (["x", "--num-blocks", "0"], "num_blocks=0"),
        (["x", "--temperature", "0", "--n", "2"], "n=2: greedy"),
        (["x", "--beam-width", "2", "--top-p", "0.5"], "--top-p: no effect with --beam-width"),
        (["x", "--beam-width", "2", "--stream"], "--stream: no effect"),
        (["x", "--length-penalty", "2"], "--length-penalty: no effect without --beam-width"),
        (["x", "--logprobs", "2"], "--logprobs: no effect without --json"),
        (["x", "--prompt-logprobs", "2"], "--prompt-logprobs: no effect without --json"),
        (["x", "--early-stopping", "never"], "--early-stopping: no effect without --beam-width"),
        (["x", "--allocation", "static", "--prefix-caching"], "enable_prefix_caching=True has no effect"),
        ([""], "no prompt"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    engine: Engine, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("octavo: ") and message in captured.err
    assert engine.steps == 0


def test_failures_exit_with_1_and_show_a_traceback_only_when_asked(
    engine: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> None:
        raise InternalError("block 7\nis lost")

    engine.before_step = fail
    assert main(["generate", "x"]) == 1
    error = capsys.readouterr().err
    assert "internal error: block 7 is lost" in error and "Traceback" not in error
    monkeypatch.setenv("OCTAVO_DEBUG", "1")
    with pytest.raises(InternalError):
        main(["generate", "x"])


def test_ctrl_c_exits_with_130(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    def press(_: Any) -> None:
        raise KeyboardInterrupt

    engine.before_step = press
    assert main(["generate", "x"]) == 130
    assert not engine.live and engine.closed == 1


def test_every_engine_setting_has_an_option_that_reaches_it() -> None:
    values = {
        "block_size": ("32", 32), "num_blocks": ("7", 7), "max_model_len": ("9", 9), "max_num_seqs": ("3", 3),
        "max_num_batched_tokens": ("5", 5), "gpu_memory_utilization": ("0.5", 0.5), "cpu_kv_bytes": ("2MiB", 2 << 20),
        "swap_bytes": ("1k", 1000), "dtype": ("float32", "float32"), "device": ("cpu", "cpu"),
        "allocation": ("static", "static"), "load_format": ("dummy", "dummy"), "preemption": ("swap", "swap"),
        "attention_backend": ("native", "native"), "max_preemptions": ("4", 4), "max_queue": ("6", 6),
        "engine_seed": ("8", 8), "speculative": ("ngram:3", "ngram:3"), "kv_cache_dtype": ("int8,int4", "int8,int4"),
        "model_impl": ("transformers", "transformers"), "lora": ("a=/b", {"a": "/b"}), "max_loras": ("2", 2),
    }  # fmt: skip
    switches = {"prefix_caching": False, "hybrid_kv": False, "copy_on_write": False, "enforce_eager": True,
                "engine_debug": True, "skip_tokenizer_init": True, "overlap": False, "screen_head": False,
                "fixed_point": False}  # fmt: skip
    given = ["generate", "x"]
    expected: dict[str, Any] = {}
    for name in options.ENGINE_SETTINGS:
        setting = options.RENAMED.get(name, name)
        spelled = name if name == "engine_seed" else setting  # --seed is the request's
        option = "--" + spelled.removeprefix("enable_").replace("_", "-")
        if name in switches:
            given.append(option if switches[name] else option.replace("--", "--no-", 1))
            expected[setting] = switches[name]
        else:
            text, expected[setting] = values.get(name, ("name", "name"))
            given += [option, text]
    settings = options.engine_settings(build_parser().parse_args(given))
    assert settings == expected
    left_out = {f.name for f in fields(EngineConfig)} - set(settings)
    assert not left_out


ALL_SAMPLING = (
    "--n 2 --best-of 3 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --presence-penalty 0.1 "
    "--frequency-penalty 0.2 --repetition-penalty 1.1 --seed 3 --max-tokens rest --min-tokens 2 --stop a --stop \\n "
    "--stop-token-id 4 --include-stop --ignore-eos --logprobs 1 --prompt-logprobs 2 --deadline-ms 5 "
    "--logit-bias 3=-1.5 --logit-bias 4=2 --allowed-token-id 7 --bad-word damn --no-skip-special-tokens"
)


def test_every_sampling_option_reaches_its_parameter() -> None:
    given = build_parser().parse_args(["generate", "x", *ALL_SAMPLING.split()])
    settings = options.sampling_settings(given)
    assert set(settings) == set(options.SAMPLING_PARAMETERS)
    assert settings["stop"] == ["a", "\n"] and settings["max_tokens"] is None
    assert settings["logit_bias"] == {3: -1.5, 4: 2.0} and settings["skip_special_tokens"] is False
    SamplingParams(**settings)
    left_out = {f.name for f in fields(SamplingParams)} - set(settings)
    assert left_out == {"detokenize", "structured_outputs"}


def test_the_shape_of_the_text_reaches_its_parameter(tmp_path: Path) -> None:
    def shape(*more: str) -> Any:
        return options.sampling_settings(build_parser().parse_args(["generate", "x", *more])).get("structured_outputs")

    (tmp_path / "schema.json").write_text('{"type": "integer"}')
    assert shape() is None
    assert shape("--json-schema", str(tmp_path / "schema.json")) == {"json": '{"type": "integer"}'}
    assert shape("--json-schema", ' {"type": "null"}') == {"json": ' {"type": "null"}'}
    assert shape("--json-object") == {"json_object": True}
    assert shape("--regex", "a+") == {"regex": "a+"}
    assert shape("--choice", "yes", "--choice", "no") == {"choice": ["yes", "no"]}
    (tmp_path / "g.lark").write_text('start: "a"')
    assert shape("--grammar", str(tmp_path / "g.lark")) == {"grammar": 'start: "a"'}
    with pytest.raises(SamplingError, match="No such file"):
        shape("--grammar", str(tmp_path / "none"))


def test_beams_take_no_shape(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "x", "--beam-width", "2", "--regex", "a"]) == 2
    assert "--regex: no effect with --beam-width" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "count"), [("10", 10), ("1k", 1000), ("1KiB", 1024), ("1.5 GiB", 3 << 29), ("2mb", 2_000_000)]
)
def test_byte_counts(text: str, count: int) -> None:
    assert options.byte_count(text) == count


def chat(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: str, *more: str
) -> tuple[list[str], str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    assert main(["chat", *more]) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def test_chat_keeps_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.config = EngineConfig(max_model_len=400)
    answers, _ = chat(engine, monkeypatch, capsys, "hi\n\nyo\n/reset\nhi\n/exit\nnever\n", "--max-tokens", "999")
    assert answers[0] == answers[2] == "<user>hi<assistant>"[::-1]
    assert answers[1].startswith(">tnatsissa<oy>resu<") and answers[1].endswith("ih>resu<")
    assert len(answers) == 3 and not engine.live


def test_chat_without_a_template_says_so_and_writes_a_transcript(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.tokenizer = FakeTokenizer(chat_template=False)
    seen: list[Any] = []
    engine.before_step = lambda e: seen.extend(e.live.values())
    answers, errors = chat(engine, monkeypatch, capsys, "hi\n", "--system", "Be brief.")
    assert "no chat template" in errors and answers == [
        "Be brief.\nUser: hi\nAssistant:"[::-1].split("\n")[0],
        *answers[1:],
    ]
    assert seen[0].params.stop == ("\nUser:",)
    assert seen[0].prompt == "Be brief.\nUser: hi\nAssistant:"


def test_chat_forgets_the_oldest_turns_and_refuses_what_never_fits(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.config = EngineConfig(max_model_len=70)
    answers, errors = chat(engine, monkeypatch, capsys, f"one\ntwo\n{'x' * 99}\ntwo\n", "--max-tokens", "5")
    assert len(answers) == 3
    assert "the oldest 2 messages are forgotten" in errors
    assert "refused: the message has" in errors and "raise --max-model-len" in errors


def test_chat_refuses_several_samples(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--n", "2"]) == 2
    assert "--n: no effect in a conversation" in capsys.readouterr().err


def test_an_interrupted_answer_stays_in_the_conversation(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(engine: FakeEngine) -> None:
        if engine.steps == 3:
            raise KeyboardInterrupt

    engine.before_step = press
    answers, errors = chat(engine, monkeypatch, capsys, "hello\nbye\n")
    assert answers[0] == ">t" and "(stopped)" in errors and len(answers) == 2
    assert not engine.live


def test_transcript() -> None:
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c")]
    messages = [{"role": r, "content": c} for r, c in turns]
    assert transcript(messages) == "S\nUser: a\nAssistant: b\nUser: c\nAssistant:"
    conversation = Conversation(LLM.from_engine(Engine(FakeTokenizer())), "S")  # type: ignore[arg-type]
    conversation.messages.append({"role": "user", "content": "a"})
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "S"}]


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["chat", "--help"], ["version"]])
def test_help_needs_no_heavy_import(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['octavo', *{arguments}]\n"
        "from octavo.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_import_octavo_is_light_and_public_names_are_there() -> None:
    done = run_python(
        "import sys, octavo\n"
        "assert octavo.__all__ == sorted(octavo.__all__)\n"
        "from octavo import SamplingParams, LLM, OctavoError\n"
        "heavy = {'torch', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert set(dir(octavo)) == set(octavo.__all__)\n"
        "try: octavo.nothing\n"
        "except AttributeError as e: assert 'SamplingParams' in str(e)\n"
        "else: raise SystemExit('no error')\n"
    )
    assert done.returncode == 0, done.stderr


def test_every_public_name_can_be_loaded() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None


def test_log_level_from_the_environment() -> None:
    code = "from octavo import logs; logs.setup(); logs.setup(); logs.logger.info('hello'); logs.logger.debug('deep')"
    assert run_python(code, OCTAVO_LOG="info").stderr.count("hello") == 1
    assert "deep" not in run_python(code, OCTAVO_LOG="info").stderr
    assert "deep" in run_python(code, OCTAVO_LOG="debug").stderr
    assert run_python(code, OCTAVO_LOG="").stderr == ""
    bad = run_python("from octavo.cli.main import main; raise SystemExit(main(['version']))", OCTAVO_LOG="loud")
    assert bad.returncode == 2 and "OCTAVO_LOG='loud'" in bad.stderr


def test_a_closed_pipe_is_no_error() -> None:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(
        [sys.executable, "-m", "octavo", "version"], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 0
