"""`LLM` over a scripted engine: prompt forms, order, all or nothing, streams, Ctrl-C, and what is left behind."""

from __future__ import annotations

import gc
import inspect
import os
import signal
from dataclasses import fields
from typing import Any

import pytest

from helpers.fake_engine import FakeEngine, FakeTokenizer
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InternalError, PromptError, RequestError, SamplingError
from octavo.llm import LLM
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.vllm_names import NEUTRAL, config_from


def make(tokenizer: FakeTokenizer | None = None, **options: Any) -> tuple[LLM, FakeEngine]:
    engine = FakeEngine(tokenizer or FakeTokenizer(), **options)
    return LLM.from_engine(engine), engine  # type: ignore[arg-type]


def texts(outputs: list[Any]) -> list[str]:
    return [o.outputs[0].text for o in outputs]


IDS = [ord("a"), ord("b")]


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ba"]),
        (["ab", "xyz", "q"], ["ba", "zyx", "q"]),
        (IDS, ["ba"]),
        ([IDS, [ord("c")]], ["ba", "c"]),
        ({"prompt": "ab"}, ["ba"]),
        ({"prompt_token_ids": IDS, "cache_salt": "s"}, ["ba"]),
        (["ab", {"prompt": "cd"}, IDS, {"prompt_token_ids": IDS}], ["ba", "dc", "ba", "ba"]),
        ((p for p in ["ab", "c"]), ["ba", "c"]),
        ([], []),
    ],
)
def test_prompt_forms(prompts: Any, expected: list[str]) -> None:
    llm, engine = make()
    assert texts(llm.generate(prompts)) == expected
    assert not engine.live


def test_numpy_ids_are_ids() -> None:
    numpy = pytest.importorskip("numpy")
    llm, _ = make()
    assert texts(llm.generate({"prompt_token_ids": numpy.array(IDS)})) == ["ba"]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (3, "got int"),
        (None, "got NoneType"),
        (["a", 3.5], "prompt 1: a prompt is"),
        ({"prompts": "a"}, "unknown prompt key prompts"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
        ({}, "exactly one"),
        ({"prompt": 3}, "must be a string"),
        ({"prompt_token_ids": "ab"}, "must be a list of integers"),
        ({"prompt_token_ids": [1.5]}, "must be a list of integers"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt=''"),
        (["a", [True]], "prompt 1"),
    ],
)
def test_prompts_of_no_form_are_refused(prompts: Any, message: str) -> None:
    llm, engine = make()
    with pytest.raises(PromptError, match=message):
        llm.generate(prompts)
    assert not engine.live and engine.steps == 0


@pytest.mark.parametrize(
    ("ids", "shown"), [([1, 1.5], "float 1.5"), ([True], "bool True"), ("ab", "str 'ab'"), ({}, "dict")]
)
def test_ids_that_are_none_are_shown(ids: Any, shown: str) -> None:
    llm, _ = make()
    with pytest.raises(PromptError, match=f"must be a list of integers, got {shown}"):
        llm.generate({"prompt_token_ids": ids})


def test_options_reach_the_engine() -> None:
    llm, engine = make()
    seen: list[Any] = []
    engine.before_step = lambda e: seen.extend(e.live.values())
    params = [SamplingParams(max_tokens=1, seed=i) for i in range(2)]
    llm.generate(["a", {"prompt_token_ids": IDS, "cache_salt": "s"}], params, priority=[3, -1])
    assert [(r.params.seed, r.priority, r.cache_salt, r.prompt) for r in seen] == [
        (0, 3, None, "a"),
        (1, -1, "s", None),
    ]


@pytest.mark.parametrize("given", ["params", "priority"])
def test_one_for_all_or_one_each(given: str) -> None:
    llm, engine = make()
    options: dict[str, Any] = {"params": {"sampling_params": [SamplingParams()] * 2}, "priority": {"priority": [1, 2]}}
    with pytest.raises(RequestError, match=r"2 .* for 3 prompts"):
        llm.generate(["a", "b", "c"], **options[given])
    assert not engine.live


def test_wrong_kinds_of_parameters_are_refused() -> None:
    llm, engine = make()
    with pytest.raises(SamplingError, match="dict"):
        llm.generate("a", {"n": 2})  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match="beam_search"):
        llm.generate("a", BeamSearchParams(beam_width=2))  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match="BeamSearchParams"):
        llm.beam_search("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="priority='x'"):
        llm.generate("a", priority=["x"])  # type: ignore[list-item]
    assert not engine.live


def test_one_bad_prompt_refuses_all_and_names_its_index() -> None:
    llm, engine = make()
    with pytest.raises(PromptError, match="prompt 2: empty prompt"):
        llm.generate(["ab", "cd", {"prompt_token_ids": []}, "ef"])
    assert not engine.live and engine.steps == 0 and len(engine.aborted) == 2
    assert texts(llm.generate("ab")) == ["ba"]


def test_a_single_bad_prompt_has_no_index() -> None:
    llm, _ = make()
    with pytest.raises(PromptError, match=r"^empty prompt"):
        llm.generate({"prompt_token_ids": []})


def test_without_a_tokenizer() -> None:
    engine = FakeEngine(None)
    llm = LLM.from_engine(engine)  # type: ignore[arg-type]
    assert texts(llm.generate(IDS)) == ["ba"]
    for call in (lambda: llm.generate("a"), lambda: llm.encode("a"), lambda: llm.decode([1]), llm.get_tokenizer):
        with pytest.raises(RequestError, match=r"no tokenizer.*skip_tokenizer_init"):
            call()


def test_stream_deltas_join_to_the_whole_answer() -> None:
    llm, engine = make()
    params = SamplingParams(n=2, max_tokens=99)
    whole = llm.generate("hello", params)[0]
    deltas = list(llm.stream("hello", params))
    for sample in whole.outputs:
        mine = [d for d in deltas if d.index == sample.index]
        assert "".join(d.text for d in mine) == sample.text
        assert [i for d in mine for i in d.token_ids] == sample.token_ids
        assert [d.finish_reason for d in mine] == [None] * (len(mine) - 1) + ["stop"]
    assert len(deltas) == 10 and not engine.live


@pytest.mark.parametrize("how", ["close", "drop", "with", "never started"])
def test_leaving_a_stream_aborts_it(how: str) -> None:
    llm, engine = make()
    stream = llm.stream("hello")
    if how != "never started":
        next(stream)
    assert len(engine.live) == 1
    if how == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif how == "with":
        with stream:
            next(stream)
    else:
        del stream
        gc.collect()
    assert not engine.live and len(engine.aborted) == 1
    assert texts(llm.generate("ab")) == ["ba"]


def test_a_finished_stream_aborts_nothing() -> None:
    llm, engine = make()
    stream = llm.stream("hello")
    assert "".join(d.text for d in stream) == "olleh"
    stream.close()
    assert not engine.aborted


def test_a_stream_dropped_while_the_engine_steps_is_aborted_after_the_step() -> None:
    llm, engine = make()
    box = [llm.stream("hello")]
    aborted_inside: list[int] = []

    def drop(engine: FakeEngine) -> None:
        box.clear()
        gc.collect()
        aborted_inside.append(len(engine.aborted))

    engine.before_step = drop
    llm.generate("ab")
    assert aborted_inside[0] == 0 and engine.aborted == ["0"] and not engine.live


def test_streams_and_generate_may_overlap() -> None:
    llm, engine = make()
    first, second = llm.stream("hello"), llm.stream("xyz")
    text = next(first).text
    assert texts(llm.generate(["ab", "longer than all"], SamplingParams(max_tokens=None))) == ["ba", "lla naht regnol"]
    assert text + "".join(d.text for d in first) == "olleh"
    assert "".join(d.text for d in second) == "zyx"
    assert not engine.live


def test_stream_refuses_at_the_call() -> None:
    llm, engine = make()
    with pytest.raises(PromptError, match="empty"):
        llm.stream({"prompt_token_ids": []})
    with pytest.raises(SamplingError, match="best_of=3 cannot be streamed"):
        llm.stream("a", SamplingParams(best_of=3))
    with pytest.raises(PromptError, match="got list"):
        llm.stream(["a", "b"])
    assert not engine.live


def test_an_error_in_a_step_leaves_nothing() -> None:
    llm, engine = make()

    def fail(engine: FakeEngine) -> None:
        if engine.steps == 2:
            raise InternalError("broken")

    engine.before_step = fail
    with pytest.raises(InternalError, match="broken"):
        llm.generate(["hello", "world"])
    assert not engine.live
    engine.steps = 0
    stream = llm.stream("hello")
    with pytest.raises(InternalError, match="broken"):
        list(stream)
    assert not engine.live


def test_lost_requests_are_an_error_and_not_an_endless_loop() -> None:
    llm, engine = make()
    engine.before_step = lambda e: e.live.clear()
    with pytest.raises(InternalError, match="lost"):
        llm.generate("hello")


def test_ctrl_c_waits_for_the_step_aborts_and_leaves_the_engine_usable() -> None:
    llm, engine = make()
    whole_steps: list[int] = []

    def press(engine: FakeEngine) -> None:
        if engine.steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        whole_steps.append(engine.steps)  # reached only if the signal did not tear the step

    engine.before_step = press
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "world"])
    assert whole_steps == [1, 2]
    assert not engine.live
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.before_step = None
    assert texts(llm.generate("ab")) == ["ba"]


def test_ctrl_c_at_the_door_leaves_nothing() -> None:
    llm, engine = make()
    add = engine.add_request

    def press(request_id: str, *args: Any, **options: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        add(request_id, *args, **options)

    engine.add_request = press  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["hello", "world"])
    assert not engine.live and engine.steps == 0


def test_beam_search_in_order() -> None:
    llm, engine = make()
    results = llm.beam_search(["ab", "xyz"], BeamSearchParams(beam_width=2))
    assert [r.sequences[0].text for r in results] == ["ba", "zyx"]
    assert not engine.beams


def test_chat_uses_the_template_and_adds_no_second_begin_token() -> None:
    llm, engine = make()
    message = {"role": "user", "content": "hi"}
    one = llm.chat([message], SamplingParams(max_tokens=1))
    assert one[0].prompt_token_ids == [ord(c) for c in "\x02<user>hi<assistant>"]
    two = llm.chat([[message], [message, message]], SamplingParams(max_tokens=1))
    assert [len(o.prompt_token_ids) for o in two] == [20, 28]
    assert engine.tokenizer is not None
    llm.chat([message], chat_template="{{x}}", add_generation_prompt=False, chat_template_kwargs={"x": 1})
    assert engine.tokenizer.options == {"add_generation_prompt": False, "tools": None, "template": "{{x}}", "x": 1}


def test_chat_without_a_template_names_the_remedy() -> None:
    llm, engine = make(FakeTokenizer(chat_template=False))
    with pytest.raises(RequestError, match=r"no chat template.*generate.*chat_template="):
        llm.chat([{"role": "user", "content": "hi"}])
    assert llm.chat([{"role": "user", "content": "hi"}], chat_template="…")
    for bad in ([], [[]], [{"content": "x"}]):
        with pytest.raises(PromptError, match="non-empty list"):
            llm.chat_prompt(bad)
    assert not engine.live


def test_close_once_and_then_every_call_says_so() -> None:
    llm, engine = make()
    with llm:
        stream = llm.stream("hello")
        next(stream)
    llm.close()
    assert engine.closed == 1
    for call in (lambda: llm.generate(IDS), llm.settings, lambda: llm.config, lambda: list(stream)):
        with pytest.raises(ConfigError, match="closed"):
            call()


def test_signature_repeats_the_defaults_of_the_config() -> None:
    defaults = {f.name: f.default for f in fields(EngineConfig)}
    for name, parameter in inspect.signature(LLM.__init__).parameters.items():
        if name in ("self", "settings", "on_progress", "texts"):
            continue
        assert parameter.default == defaults[name], name


def test_settings_of_vllm_without_effect_accept_only_their_neutral_value() -> None:
    assert config_from(model="m", enforce_eager=True, **NEUTRAL) == EngineConfig(model="m", enforce_eager=True)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 .*leave it out \(or give tensor_parallel_size=1\)"):
        LLM(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"unknown setting block_sise; known: .*block_size"):
        LLM(block_sise=16)
