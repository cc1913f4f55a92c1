"""Every family against the transformers library: the same files, the same logits, the same greedy text.

Prompts whole, in chunks and token by token, with the torch and with the native operations, and through the engine.
`test_models_parity.py` goes deeper into the families that came first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.dense_attention import greedy, run_chunks
from helpers.oracle import assert_greedy, random_ids
from helpers.oracle import greedy as oracle_greedy
from helpers.tiny_models import FAMILIES, FIRST, oracle_logits, tiny_config, write_tiny
from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.kernels import cpu
from octavo.kernels.ops import Ops, TorchOps
from octavo.models.config_reader import FAMILIES as KINDS
from octavo.models.decoder import Decoder
from octavo.models.dummy_loader import open_dummy
from octavo.models.load import LoadedModel, load_model
from octavo.models.spec import ModelSpec

LATER = [family for family in FAMILIES if family not in FIRST]
TOLERANCE = 1e-4
LENGTH = 45  # beyond every window of the tiny models


def load(path: Path, ops: Ops) -> LoadedModel:
    config = EngineConfig(model=str(path), skip_tokenizer_init=True)
    return load_model(config, dtype=torch.float32, device="cpu", ops=ops)


@pytest.mark.parametrize("family", LATER)
def test_logits_and_greedy_text_equal(family: str, tmp_path: Path) -> None:
    oracle = write_tiny(family, tmp_path)
    ids = random_ids(LENGTH, 3)
    expected, text = oracle_logits(oracle, ids), oracle_greedy(oracle, ids, 16)
    assert len(set(text)) > 3  # an oracle that repeats itself would prove nothing
    for ops in (TorchOps(), cpu.make_ops(torch.float32)):
        model = load(tmp_path, ops)
        for chunk in (LENGTH, 7, 1):
            torch.testing.assert_close(run_chunks(model.decoder, ids, chunk), expected, atol=TOLERANCE, rtol=0)
        assert greedy(model.decoder, ids, 16) == text
        assert model.weight_bytes == 4 * sum(p.numel() for p in oracle.parameters())


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "phi3", "gpt2", "falcon-new", "olmo2", "smollm3"])
def test_greedy_text_through_the_engine(family: str, tmp_path: Path) -> None:
    """Several requests in one batch, in chunks, with blocks audited."""
    oracle = write_tiny(family, tmp_path)
    prompts = [random_ids(length, 5) for length in (3, 40, 17)]
    with LLM(
        model=str(tmp_path), dtype="float32", num_blocks=64, max_num_batched_tokens=32, debug=True,
        skip_tokenizer_init=True,
    ) as engine:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        answers = engine.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    for ids, answer in zip(prompts, answers, strict=True):
        assert_greedy(oracle, ids, list(answer.outputs[0].token_ids))


def tiny_spec(family: str) -> ModelSpec:
    from octavo.models.config_reader import spec_from_config

    return spec_from_config(tiny_config(family).to_dict() | {"architectures": None})


class Alone:
    """Attention in which every token sees itself only: what is left is the decoder's own work, row by row."""

    name = "alone"

    def __init__(self, spec: ModelSpec) -> None:
        self._repeat = spec.num_heads // spec.num_kv_heads

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        self._value = value

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        return self._value.repeat_interleave(self._repeat, dim=1) + query


@pytest.mark.parametrize("family", LATER)
def test_a_row_depends_on_no_other_row(family: str) -> None:
    """Native operations: to the bit, whatever the batch (kind 34)."""
    if cpu.why_unavailable():
        pytest.skip("the native kernels are not built")
    spec = tiny_spec(family)
    decoder = Decoder(spec, open_dummy(spec, torch.float32), cpu.make_ops(torch.float32), torch.float32)
    ids, positions = torch.tensor(random_ids(37, 8)), torch.arange(37)

    def rows(first: int, last: int) -> torch.Tensor:
        attention: Any = Alone(spec)
        return decoder.forward(ids[first:last], positions[first:last], attention)

    whole = rows(0, 37)
    for first, last in ((0, 1), (36, 37), (5, 8), (3, 20)):
        assert torch.equal(rows(first, last), whole[first:last])


def test_products_of_every_kind_of_layer_are_listed() -> None:
    """What adapters may wrap: all but the single experts."""

    def names(family: str) -> set[str]:
        spec = tiny_spec(family)
        decoder = Decoder(spec, open_dummy(spec, torch.float32), TorchOps(), torch.float32)
        for name, linear in decoder.linears().items():
            decoder.replace_linear(name, linear)
        return {name.removeprefix("layers.1.") for name in decoder.linears() if name.startswith("layers.1.")}

    assert names("gpt2") == {"qkv", "out", "up", "down"}
    assert names("mixtral") == {"qkv", "out"}
    assert names("qwen2_moe") == {"qkv", "out", "shared.gate_up", "shared.down"}
    assert names("qwen3_moe") == {"qkv", "out", "gate_up", "down"}  # layer 1 is dense there


def test_scaled_logits_leave_greedy_to_the_logits() -> None:
    spec = tiny_spec("granite")
    decoder = Decoder(spec, open_dummy(spec, torch.float32), cpu.make_ops(torch.float32), torch.float32)
    assert decoder.best(torch.randn(2, spec.hidden_size)) is None


def test_dummy_weights_of_every_family_vary() -> None:
    """`load_format="dummy"`: nothing degenerate, and a layer norm is about one."""
    for family in LATER:
        spec = tiny_spec(family)
        decoder = Decoder(spec, open_dummy(spec, torch.float32), TorchOps(), torch.float32)
        text: list[Any] = [greedy(decoder, random_ids(8, seed), 8) for seed in range(3)]
        assert len({tuple(t) for t in text}) > 1, family
        assert torch.isfinite(run_chunks(decoder, random_ids(8, 1), 8)).all(), family


def test_the_page_lists_every_family_and_every_row() -> None:
    """docs/models.md: a family that is added is written down, and the parity table is written anew."""
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.partition("<!-- parity: begin -->")[2].partition("<!-- parity: end -->")[0]
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []
    assert [family for family in FAMILIES if f"| {family} |" not in table] == []
    for line in table.splitlines()[3 : 3 + len(FAMILIES)]:
        assert line.rstrip(" |").endswith("6 of 6"), line
