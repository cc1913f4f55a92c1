"""`LLM.embed` against transformers' hidden states in float32, whatever the batch, the chunks or the pool."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from helpers.tiny_models import write_tiny
from octavo import LLM, PoolingParams, SamplingParams
from octavo.core.step import Drawn
from octavo.errors import PromptError, RequestError, SamplingError
from octavo.runner.pooling import Pool

TEXTS = ["a", "hello world", "the quick brown fox jumps over the lazy dog " * 4, "x" * 100, "hello world, again"]
FAMILIES = ("llama", "gemma3", "qwen3", "mistral")
CLOSE = 1e-4


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    path = tmp_path_factory.mktemp(request.param)
    return write_tiny(request.param, path), str(path)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("llama")
    write_tiny("llama", path)
    with LLM(str(path), dtype="float32", num_blocks=64, max_model_len=200) as made:
        yield made


def expected(oracle: Any, ids: list[int], pooling: str, normalize: bool) -> np.ndarray:
    with torch.no_grad():
        states = oracle(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states[-1][0].double()
    vector = states.mean(0) if pooling == "mean" else states[-1]
    return (vector / vector.norm() if normalize else vector).numpy()


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 64}, {"block_size": 8, "max_num_seqs": 2}], ids=str
)
def test_as_the_oracle_in_batches_and_chunks(pair: tuple[Any, str], settings: dict[str, Any]) -> None:
    oracle, path = pair
    with LLM(path, dtype="float32", num_blocks=128, max_model_len=200, debug=True, **settings) as llm:
        for pooling in ("mean", "last"):
            for normalize in (True, False):
                outputs = llm.embed(TEXTS, pooling=pooling, normalize=normalize, use_tqdm=False)
                for text, output in zip(TEXTS, outputs, strict=True):
                    assert output.prompt == text and output.prompt_token_ids == llm.encode(text)
                    wanted = expected(oracle, output.prompt_token_ids, pooling, normalize)
                    assert np.abs(wanted - np.array(output.embedding)).max() < CLOSE
                    if normalize:
                        assert abs(np.linalg.norm(output.embedding) - 1) < 1e-6


def test_alone_in_a_batch_and_again(llama: LLM) -> None:
    together = llama.embed(TEXTS, use_tqdm=False)
    for text, among in zip(TEXTS, together, strict=True):
        for _ in range(2):
            alone = llama.embed(text, use_tqdm=False)[0]
            assert np.abs(np.array(alone.embedding) - np.array(among.embedding)).max() < 1e-6


def test_the_mean_computes_every_token_and_the_last_reads_the_cache(llama: LLM) -> None:
    llama.reset_prefix_cache()
    text = TEXTS[2]
    count = len(llama.encode(text))
    before = llama.stats().computed_tokens
    assert llama.embed(text, use_tqdm=False)[0].num_cached_tokens == 0
    assert llama.embed(text, use_tqdm=False)[0].num_cached_tokens == 0
    assert llama.stats().computed_tokens - before == 2 * count
    fresh = llama.embed(text + "?", pooling="last", use_tqdm=False)[0]
    assert fresh.num_cached_tokens == count // 16 * 16
    llama.reset_prefix_cache()
    computed = llama.embed(text + "?", pooling="last", use_tqdm=False)[0]
    assert np.abs(np.array(fresh.embedding) - np.array(computed.embedding)).max() < 1e-5


def test_mixed_with_generation_and_preempted(tmp_path: Path) -> None:
    oracle = write_tiny("llama", tmp_path)
    settings = {"dtype": "float32", "max_model_len": 200, "max_num_batched_tokens": 64, "debug": True}
    with LLM(str(tmp_path), num_blocks=14, enable_prefix_caching=False, max_num_seqs=3, **settings) as llm:
        engine = llm._engine
        assert engine is not None
        alone = llm.generate("x" * 40, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True), use_tqdm=False)
        engine.add_request("g", llm.encode("x" * 40), SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
        done = {}
        number = 0
        while engine.has_unfinished():
            if number < 12:
                engine.add_request(f"e{number}", llm.encode("y" * 150), PoolingParams(normalize=False))
                number += 1
            done |= {o.request_id: o for o in engine.step() if o.finished}
        assert llm.stats().preemptions > 0 and llm.pool_view().num_used == 0
        assert done["g"].outputs[0].token_ids == alone[0].outputs[0].token_ids
        wanted = expected(oracle, llm.encode("y" * 150), "mean", False)
        for name in (f"e{i}" for i in range(12)):
            assert done[name].outputs[0].finish_reason == "stop" and done[name].outputs[0].token_ids == []
            assert np.abs(wanted - np.array(done[name].embedding)).max() < CLOSE


def test_what_cannot_be_is_refused(llama: LLM) -> None:
    llama.embed([[5] * 200], use_tqdm=False)  # as long as the context: nothing has to follow
    with pytest.raises(PromptError, match="201 tokens; max_model_len=200"):
        llama.embed([[5] * 201], use_tqdm=False)
    with pytest.raises(PromptError, match=r"prompt 1: .* outside the vocabulary"):
        llama.embed([[5], [320]], use_tqdm=False)
    with pytest.raises(SamplingError, match="pooling='max'"):
        llama.embed("a", pooling="max", use_tqdm=False)
    with pytest.raises(SamplingError, match="must be SamplingParams"):
        llama.generate("a", PoolingParams(), use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match="must be SamplingParams"):
        llama.stream("a", PoolingParams())  # type: ignore[arg-type]
    assert llama.embed([], use_tqdm=False) == []


def test_a_deadline_and_an_abort_leave_nothing(llama: LLM) -> None:
    engine = llama._engine
    assert engine is not None
    engine.add_request("late", [5] * 100, PoolingParams(deadline_ms=1e-6))
    engine.add_request("gone", [5] * 100, PoolingParams())
    engine.abort("gone")
    done = {}
    while engine.has_unfinished():
        done |= {o.request_id: o for o in engine.step() if o.finished}
    assert {n: (done[n].embedding, done[n].outputs[0].finish_reason) for n in ("late", "gone")} == {
        "late": (None, "deadline"), "gone": (None, "abort"),
    }  # fmt: skip
    assert llama.pool_view().num_used == 0


def test_states_that_are_not_finite_are_an_error_of_their_own() -> None:
    pool = Pool(PoolingParams(), 2)
    pool.add(torch.tensor([[1.0, float("nan")], [0.0, 0.0]]))
    assert pool.result() == Drawn((), error="the model's hidden states are not finite")
    short = Pool(PoolingParams(), 3)
    short.add(torch.ones(2, 4))
    assert "2 of 3 tokens" in (short.result().error or "")
    zero = Pool(PoolingParams(), 1)
    zero.add(torch.zeros(1, 4))
    assert zero.result().embedding == [0.0] * 4


def test_a_model_in_trouble_names_the_prompt(llama: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pool, "result", lambda self: Drawn((), error="broken"))
    with pytest.raises(RequestError, match="prompt 0 has no embedding: broken"):
        llama.embed(["a", "b"], use_tqdm=False)


def test_the_longest_prompt_fits_a_pool_of_its_own_size(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    with LLM(str(tmp_path), dtype="float32", num_blocks=4, max_model_len=64, max_num_seqs=1) as small:
        assert len(small.embed([[5] * 64] * 2, use_tqdm=False)) == 2
