"""The door of the whole engine: what is refused, with the value, the limit and the remedy, and that nothing is harmed.

Kinds 11, 17, 25 and 29. After each refusal a good request is answered as before and no block is missing. Then the other
side: programs written for vLLM run with only their import changed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from helpers.oracle import Model, assert_greedy, random_ids, tiny
from octavo import (
    LLM,
    BeamSearchParams,
    CapacityError,
    ConfigError,
    ModelError,
    OctavoError,
    PromptError,
    RequestError,
    SamplingError,
    SamplingParams,
)

GOOD = random_ids(10, 1)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
BIG = 2**31


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny("llama", tmp_path_factory.mktemp("door"), max_position_embeddings=128)


@pytest.fixture(scope="module")
def llm(model: Model) -> LLM:
    return model.engine(num_blocks=64)


@pytest.fixture(scope="module")
def good(model: Model, llm: LLM) -> list[int]:
    answer = llm.generate([GOOD], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert_greedy(model.oracle, GOOD, answer)
    return answer


def assert_harmless(llm: LLM, good: list[int]) -> None:
    view = llm.pool_view()
    assert view.num_used == view.num_running == view.num_waiting == 0
    assert view.num_free + view.num_cached == view.num_blocks
    assert llm.generate([GOOD], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == good


def message(kind: type[OctavoError], act: Any, *words: str) -> None:
    with pytest.raises(kind) as caught:
        act()
    text = str(caught.value)
    assert all(word in text for word in words), f"{text!r} lacks {[w for w in words if w not in text]}"


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([[]], ("empty", "at least one token")),
        ([-1], ("-1", "outside the vocabulary", "0 to 319")),
        ([3, 320], ("320", "position 1", "0 to 319")),
        ([BIG], (str(BIG), "0 to 319")),
        ([1] * 128, ("128", "max_model_len=128", "at most 127", "raise max_model_len")),
        ([1] * 129, ("129", "max_model_len=128", "at most 127")),
        ([1] * 100_000, ("100000", "max_model_len=128", "at most 127")),
        ({"prompt_token_ids": []}, ("empty",)),
        ({"prompt": "a", "prompt_token_ids": [1]}, ("exactly one",)),
        ({"prompt": "a", "image": 1}, ("image", "known: prompt")),
        ({"prompt": "a", "cache_salt": ""}, ("cache_salt=''", "non-empty")),
        ([1.5, 2.0], ("float",)),
        (17, ("int",)),
        ("\ud800", ("Unicode",)),
    ],
    ids=lambda v: str(v)[:24],
)
@pytest.mark.parametrize("how", ["generate", "stream", "beam_search"])
def test_bad_prompts(how: str, prompt: Any, words: tuple[str, ...], llm: LLM, good: list[int]) -> None:
    def act() -> Any:
        if how == "beam_search":
            return llm.beam_search(prompt, BeamSearchParams(beam_width=2, max_tokens=2))
        return getattr(llm, how)(prompt, GREEDY)

    if how == "stream" and prompt == [[]]:
        prompt = []
    if how == "stream" and prompt == [1.5, 2.0]:
        words = ()
    message(PromptError, act, *words)
    assert_harmless(llm, good)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"n": 0}, ("n=0", "at least 1")),
        ({"n": -1}, ("n=-1", "at least 1")),
        ({"n": 1_000_000}, ("n=1000000", "at most 256")),
        ({"n": 2.0}, ("n=2.0", "integer")),
        ({"n": True}, ("n=True", "integer")),
        ({"n": 3, "best_of": 2}, ("best_of=2", "n=3")),
        ({"n": 2, "temperature": 0}, ("temperature=0", "n=1")),
        ({"temperature": -0.1}, ("temperature=-0.1", "[0, 100]")),
        ({"temperature": float("nan")}, ("temperature=nan", "finite")),
        ({"top_p": 0.0}, ("top_p=0.0", "(0, 1]")),
        ({"top_p": 1.5}, ("top_p=1.5", "(0, 1]")),
        ({"top_k": -2}, ("top_k=-2", "at least 0")),
        ({"min_p": 2}, ("min_p=2", "[0, 1]")),
        ({"presence_penalty": 3}, ("presence_penalty=3", "[-2, 2]")),
        ({"frequency_penalty": -3}, ("frequency_penalty=-3", "[-2, 2]")),
        ({"repetition_penalty": 0}, ("repetition_penalty=0", "(0, 10]")),
        ({"max_tokens": 0}, ("max_tokens=0", "at least 1")),
        ({"min_tokens": 9, "max_tokens": 8}, ("min_tokens=9", "max_tokens=8")),
        ({"logprobs": 1000}, ("logprobs=1000", "at most 128")),
        ({"stop": ""}, ("stop=''", "non-empty")),
        ({"stop": ["x"] * 65}, ("65 strings", "at most 64")),
        ({"stop": "x", "detokenize": False}, ("stop", "detokenize=True")),
        ({"bad_words": ["x"], "detokenize": False}, ("bad_words", "detokenize=True")),
        ({"allowed_token_ids": []}, ("allowed_token_ids", "None")),
        ({"allowed_token_ids": [-1]}, ("allowed_token_ids", "-1")),
        ({"stop_token_ids": [-1]}, ("stop_token_ids", "-1")),
        ({"logit_bias": {-1: 1.0}}, ("logit_bias", "-1")),
        ({"logit_bias": {1: float("inf")}}, ("logit_bias[1]", "finite")),
        ({"logit_bias": {1: 1000.0}}, ("logit_bias[1]=1000.0", "[-100, 100]")),
        ({"seed": 2**65}, ("seed=", "at most")),
        ({"deadline_ms": 0}, ("deadline_ms=0", "(0,")),
        ({"ignore_eos": 1}, ("ignore_eos=1", "True or False")),
        ({"temprature": 0.5}, ("unknown", "temprature", "temperature")),
        ({"use_beam_search": True}, ("unknown", "use_beam_search")),
    ],
    ids=lambda v: str(v)[:30],
)
def test_bad_parameters(given: dict[str, Any], words: tuple[str, ...]) -> None:
    message(SamplingError, lambda: SamplingParams(**given), *words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"beam_width": 0}, ("beam_width=0", "at least 1")),
        ({"beam_width": 65}, ("beam_width=65", "at most 64")),
        ({"beam_width": 2, "max_tokens": 0}, ("max_tokens=0", "at least 1")),
        ({"beam_width": 2, "early_stopping": "always"}, ("early_stopping='always'", "never")),
        ({"beam_width": 2, "early_stopping": 1}, ("early_stopping=1", "True, False")),
        ({"beam_width": 2, "length_penalty": float("inf")}, ("length_penalty=inf", "finite")),
        ({"beam_width": 2, "ignore_eos": "no"}, ("ignore_eos='no'", "True or False")),
    ],
    ids=lambda v: str(v)[:40],
)
def test_bad_beam_parameters(given: dict[str, Any], words: tuple[str, ...]) -> None:
    message(SamplingError, lambda: BeamSearchParams(**given), *words)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"allowed_token_ids": [320]}, ("allowed_token_ids", "320", "0 to 319")),
        ({"allowed_token_ids": [BIG]}, ("allowed_token_ids", str(BIG))),
        ({"stop_token_ids": [320]}, ("stop_token_ids", "320", "0 to 319")),
        ({"stop_token_ids": [BIG]}, ("stop_token_ids", str(BIG))),
        ({"logit_bias": {320: 1.0}}, ("logit_bias", "320", "0 to 319")),
        ({"logit_bias": {BIG: 1.0}}, ("logit_bias", str(BIG))),
        ({"n": 65}, ("65", "max_num_seqs=64", "raise max_num_seqs")),
        ({"min_tokens": 125, "max_tokens": None}, ("min_tokens=125", "118", "max_model_len=128")),
        ({"n": 60, "max_tokens": 100}, ("10 tokens", "60", "64", "lower")),
    ],
    ids=lambda v: str(v)[:40],
)
def test_parameters_the_model_or_pool_cannot_serve(
    given: dict[str, Any], words: tuple[str, ...], llm: LLM, good: list[int]
) -> None:
    message(RequestError, lambda: llm.generate([GOOD], SamplingParams(**given), use_tqdm=False), *words)
    assert_harmless(llm, good)


@pytest.mark.parametrize("wrong", [-1, 320, 10**12])
def test_decode_refuses_ids_that_are_none(wrong: int, llm: LLM, good: list[int]) -> None:
    message(PromptError, lambda: llm.decode([5, wrong]), f"id {wrong}", "outside the vocabulary", "0 to 319")
    assert_harmless(llm, good)


def test_the_last_id_of_the_vocabulary_works(llm: LLM, good: list[int]) -> None:
    """Kind 29: the limit is the embedding's rows (320), not the tokenizer's size (259)."""
    given = {"logit_bias": {319: 1.0}, "stop_token_ids": [319], "allowed_token_ids": [318, 319]}
    (output,) = llm.generate([[319]], SamplingParams(max_tokens=3, **given), use_tqdm=False)
    assert set(output.outputs[0].token_ids) <= {318, 319}
    assert_harmless(llm, good)


def test_bans_that_leave_nothing(llm: LLM, good: list[int]) -> None:
    """Allowed minus end ids before min_tokens is nothing: the answer keeps to the allowed id, others do not mind."""
    given = SamplingParams(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=4, max_tokens=6)
    both = llm.generate([GOOD, GOOD], [given, GREEDY], use_tqdm=False)
    assert set(both[0].outputs[0].token_ids) == {5} and both[1].outputs[0].token_ids == good
    assert_harmless(llm, good)


def test_one_bad_prompt_of_many_starts_nothing(llm: LLM, good: list[int]) -> None:
    steps = llm.stats().steps
    message(PromptError, lambda: llm.generate([GOOD, [999], GOOD], GREEDY), "prompt 1", "999")
    message(RequestError, lambda: llm.generate([GOOD, GOOD], [GREEDY] * 3), "3 sampling parameters", "2 prompts")
    message(SamplingError, lambda: llm.generate([GOOD], {"n": 1}), "SamplingParams", "dict")  # type: ignore[arg-type]
    message(RequestError, lambda: llm.generate([GOOD], GREEDY, priority=1.5), "priority=1.5", "integer")  # type: ignore[arg-type]
    assert llm.stats().steps == steps
    assert_harmless(llm, good)


@pytest.mark.parametrize("length", [126, 127])
def test_prompts_up_to_the_limit_finish(length: int, model: Model, llm: LLM) -> None:
    """Kind 25 on the other side: 126 leaves room for two tokens, 127 for one."""
    prompt = random_ids(length, 1)
    (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 128 - length and output.outputs[0].finish_reason == "length"
    assert_greedy(model.oracle, prompt, output.outputs[0].token_ids)


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("caching", [False, True])
def test_exactly_the_pool(block_size: int, caching: bool, model: Model) -> None:
    """Kinds 11 and 25: what needs exactly all of a pool finishes, what needs one token more is refused, and a small
    request sent behind each finishes."""
    blocks = 64 // block_size
    small = random_ids(3, 3)
    with model.engine(block_size=block_size, num_blocks=blocks, enable_prefix_caching=caching) as llm:
        limit = llm.config.max_model_len
        assert limit is not None and limit in (64, 65)
        for length in (limit - block_size - 1, limit - 2, limit - 1):
            for count in (1, 8):
                params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
                both = llm.generate([random_ids(length, 1), small], params, use_tqdm=False)
                assert len(both[0].outputs[0].token_ids) == min(count, limit - length)
                assert len(both[1].outputs[0].token_ids) == count
        for length in (limit, limit + 1, 100, 200):
            stream = llm.stream(small, GREEDY)
            message(
                PromptError, lambda n=length: llm.generate([[1] * n], GREEDY), str(length), str(limit), "max_model_len"
            )
            assert sum(len(d.token_ids) for d in stream) == 8
        # Samples own their tails: 20 + 4 x 12 tokens need 16 own slots and more.
        samples = SamplingParams(n=4, seed=1, max_tokens=44 if block_size == 16 else 40)
        message(
            CapacityError,
            lambda: llm.generate([[1] * 20], samples),
            "20 tokens",
            "4",
            str(blocks),
            "lower",
            "num_blocks",
        )
        assert llm.pool_view().num_used == 0


def test_a_full_queue_says_so(model: Model) -> None:
    with model.engine(max_queue=2) as llm:
        message(CapacityError, lambda: llm.generate([GOOD] * 3, GREEDY), "queue is full", "max_queue=2")
        assert len(llm.generate([GOOD] * 2, GREEDY, use_tqdm=False)) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"num_blocks": 2, "max_model_len": 128},
            ("128", "8 blocks", "the pool has 2", "that fits: 32", "raise num_blocks"),
        ),
        ({"cpu_kv_bytes": 1000}, ("too small", "MiB", "cpu_kv_bytes")),
        ({"max_model_len": 129}, ("max_model_len=129", "128", "at most 128")),
        ({"block_size": 17}, ("block_size=17", "16, 32")),
        ({"num_blocks": 0}, ("num_blocks=0", "at least 1")),
        ({"max_num_seqs": 0}, ("max_num_seqs=0", "at least 1")),
        ({"gpu_memory_utilization": 1.5}, ("gpu_memory_utilization=1.5", "(0, 1]")),
        ({"dtype": "int3"}, ("dtype='int3'", "float32")),
        ({"allocation": "buddy"}, ("allocation='buddy'", "paged, static")),
        ({"allocation": "static", "enable_prefix_caching": True}, ("enable_prefix_caching=True", "no effect")),
        ({"tensor_parallel_size": 2}, ("tensor_parallel_size=2", "no effect")),
        ({"blocksize": 16}, ("unknown setting blocksize", "block_size")),
        ({"swap_bytes": 1 << 20, "preemption": "recompute"}, ("swap_bytes", "no effect", "recompute")),
    ],
    ids=lambda v: str(v)[:40],
)
def test_settings_that_cannot_be_honoured(given: dict[str, Any], words: tuple[str, ...], model: Model) -> None:
    message(ConfigError, lambda: LLM(model=str(model.path), dtype=given.pop("dtype", "float32"), **given), *words)


def test_too_little_memory_names_a_length_that_fits(model: Model) -> None:
    """The remedy in the message works: the length it names starts, and one block's worth more does not."""
    with pytest.raises(ConfigError, match="Longest length that fits: 48") as caught:
        LLM(model=str(model.path), dtype="float32", num_blocks=3, max_model_len=100)
    assert "7 blocks" in str(caught.value) and "the pool has 3" in str(caught.value)
    with LLM(model=str(model.path), dtype="float32", num_blocks=3, max_model_len=48) as llm:
        (output,) = llm.generate([[1] * 40], GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 8
    with pytest.raises(ConfigError):
        LLM(model=str(model.path), dtype="float32", num_blocks=3, max_model_len=50)


def test_missing_and_broken_model_files(model: Model, tmp_path: Path) -> None:
    message(ModelError, lambda: LLM(model="nowhere"), "nowhere", "gemma-3-270m")
    empty = tmp_path / "empty"
    empty.mkdir()
    message(ModelError, lambda: LLM(model=str(empty)), "config.json", "no such file")
    for name, damage in (
        ("config.json", b"{not json"),
        ("model.safetensors", b"\x10\x00"),
        ("model.safetensors", (model.path / "model.safetensors").read_bytes()[:-1000]),
        ("tokenizer.json", b"{}"),
    ):
        broken = tmp_path / f"broken-{name}-{len(damage)}"
        shutil.copytree(model.path, broken)
        (broken / name).write_bytes(damage)
        message(ModelError, lambda path=broken: LLM(model=str(path), num_blocks=16), name)
    without = tmp_path / "without-weights"
    shutil.copytree(model.path, without)
    (without / "model.safetensors").unlink()
    message(ModelError, lambda: LLM(model=str(without), num_blocks=16), "safetensors")
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"GGUF but not really")
    message(ModelError, lambda: LLM(model=str(file)), "bad.gguf")


def test_without_a_tokenizer(model: Model, good: list[int], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model.path, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    for path, skip in ((model.path, True), (bare, True)):
        with LLM(model=str(path), dtype="float32", num_blocks=64, skip_tokenizer_init=skip) as llm:
            message(RequestError, lambda llm=llm: llm.generate("text", GREEDY), "tokenizer", "token ids")
            for given in ({"stop": "x"}, {"bad_words": ["x"]}):
                params = SamplingParams(**given)
                message(SamplingError, lambda llm=llm, p=params: llm.generate([GOOD], p), *given, "tokenizer")
            (output,) = llm.generate([GOOD], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == good and output.outputs[0].text == ""


def test_closed(model: Model) -> None:
    llm = model.engine()
    llm.close()
    llm.close()
    message(ConfigError, lambda: llm.generate([GOOD], GREEDY), "closed", "make a new one")


def test_a_program_written_for_vllm(model: Model) -> None:
    """Only the import is changed: names, defaults and shapes of the results are those it expects."""
    prompts = ["Hello, my name is", "The future of AI is"]
    sampling_params = SamplingParams(n=3, temperature=0.8, top_p=0.95, max_tokens=512)
    llm = LLM(model=str(model.path), enforce_eager=True)
    outputs = llm.generate(prompts, sampling_params)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert output.finished and output.prompt_token_ids
        assert [c.index for c in output.outputs] == [0, 1, 2]
        assert len({c.text for c in output.outputs}) == 3
        for c in output.outputs:
            # 512 is more than the context holds: the rest of it.
            assert c.finish_reason == "stop" or len(c.token_ids) == 128 - len(output.prompt_token_ids)
    del llm


def test_vllm_options(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {
        "enforce_eager": True, "seed": 0, "max_model_len": 100, "max_num_seqs": 8, "gpu_memory_utilization": 0.5,
        "enable_prefix_caching": False, "tensor_parallel_size": 1, "trust_remote_code": False, "dtype": "float32",
    }  # fmt: skip
    with LLM(str(model.path), **options) as llm:
        (raw,) = llm.generate(
            {"prompt_token_ids": GOOD}, SamplingParams(detokenize=False, max_tokens=20, seed=7), use_tqdm=False
        )
        (read,) = llm.generate({"prompt_token_ids": GOOD}, SamplingParams(max_tokens=20, seed=7), use_tqdm=True)
        assert raw.outputs[0].text == "" and raw.outputs[0].token_ids == read.outputs[0].token_ids
        assert read.outputs[0].text == llm.decode(read.outputs[0].token_ids)
        assert raw.outputs[0].logprobs is None and raw.prompt_logprobs is None
        assert llm.settings()["enforce_eager"]["chosen"] is True
        default = llm.generate("x")[0].outputs[0]  # temperature 1, 16 tokens
        assert len(default.token_ids) == 16 or default.finish_reason == "stop"
    captured = capsys.readouterr()
    assert captured.out == ""  # bars go to stderr, and only to a terminal
