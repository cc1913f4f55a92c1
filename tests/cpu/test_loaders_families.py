"""Files whose tensors are not one weight each: fused, transposed, interleaved, stacked (kinds 43 and 44)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from helpers.dense_attention import run_chunks
from helpers.tiny_models import oracle_logits, write_tiny
from octavo.config import EngineConfig
from octavo.errors import ModelError
from octavo.kernels import cpu
from octavo.kernels.ops import Ops, TorchOps
from octavo.models.load import LoadedModel, load_model, read_spec

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
WEIGHTS = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def load(path: Path, ops: Ops | None = None, dtype: torch.dtype = torch.float32, **settings: Any) -> LoadedModel:
    config = EngineConfig(model=str(path), skip_tokenizer_init=True, **settings)
    return load_model(config, dtype=dtype, device="cpu", ops=ops or TorchOps())


def logits(path: Path, ops: Ops | None = None) -> torch.Tensor:
    return run_chunks(load(path, ops).decoder, IDS, len(IDS))


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = change(load_file(path / WEIGHTS))
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, path / WEIGHTS)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def test_gpt2_as_it_is_on_the_hub(tmp_path: Path) -> None:
    """Names without a prefix, and the causal masks that old files carry."""
    expected = oracle_logits(write_tiny("gpt2", tmp_path), IDS)

    def old(tensors: Tensors) -> Tensors:
        bare = {name.removeprefix("transformer."): t for name, t in tensors.items()}
        masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8).tril() for i in range(3)}
        return {**bare, **masks, "h.0.attn.masked_bias": torch.tensor(-1e4)}

    rewrite(tmp_path, old)
    close(logits(tmp_path), expected)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_stacked_experts(family: str, tmp_path: Path) -> None:
    """One tensor for all experts of a layer, as the library keeps them in memory."""
    oracle = write_tiny(family, tmp_path)
    state = oracle.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    rewrite(tmp_path, lambda _: state)
    for ops in (TorchOps(), cpu.make_ops(torch.float32)):
        close(logits(tmp_path, ops), oracle_logits(oracle, IDS))


@pytest.mark.parametrize("family", ["phi3", "gpt_neox", "falcon-new", "gpt2", "mixtral"])
def test_shards_of_bfloat16_by_the_native_loader(family: str, tmp_path: Path) -> None:
    """Parts of a fused tensor go from its file straight into their place."""
    write_tiny(family, tmp_path)
    tensors = {name: t.bfloat16() for name, t in load_file(tmp_path / WEIGHTS).items()}
    (tmp_path / WEIGHTS).unlink()
    table = {}
    for part in range(3):
        own = {name: t for i, (name, t) in enumerate(sorted(tensors.items())) if i % 3 == part}
        save_file(own, tmp_path / f"part-{part}.safetensors")
        table.update(dict.fromkeys(own, f"part-{part}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    close(logits(tmp_path, cpu.make_ops(torch.float32)), logits(tmp_path))
    floats = cpu.make_ops(torch.bfloat16, fixed_point=False)
    sizes = [load(tmp_path, ops, torch.bfloat16).weight_bytes for ops in (TorchOps(), floats)]
    assert sizes[0] == sizes[1]


def cut(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mixtral", without("model.layers.1.block_sparse_moe.experts.2.w3.weight"),
         r"1 tensor missing: model\.layers\.1\.block_sparse_moe\.experts\.2\.w3\.weight"),
        ("mixtral", without("model.layers.0.block_sparse_moe.gate.weight"),
         r"missing: model\.layers\.0\.block_sparse_moe\.gate\.weight"),
        ("qwen2_moe", without("model.layers.2.mlp.shared_expert_gate.weight"),
         r"layers\.2\.mlp\.shared_expert_gate\.weight"),
        ("phi3", cut("model.layers.0.self_attn.qkv_proj.weight", lambda t: torch.cat((t, t[:1]))),
         r"another shape: model\.layers\.0\.self_attn\.qkv_proj\.weight is \[129, 64\]"),
        ("phi3", cut("model.layers.0.mlp.gate_up_proj.weight", lambda t: t[:-1]), r"another shape.*gate_up_proj"),
        ("gpt_neox", cut("gpt_neox.layers.1.attention.query_key_value.weight", lambda t: t[:-1]),
         r"another shape.*query_key_value\.weight is \[191, 64\]"),
        ("gpt2", cut("transformer.h.0.attn.c_attn.weight", lambda t: t.T), r"another shape.*c_attn\.weight"),
        ("gpt2", without("transformer.wpe.weight"), r"1 tensor missing: transformer\.wpe\.weight"),
        ("opt", cut("model.decoder.embed_positions.weight", lambda t: t[2:]), r"positions\.weight is \[256, 64\]"),
        ("stablelm-parallel", without("model.layers.0.self_attn.k_layernorm.norms.1.weight"),
         r"layers\.0\.self_attn\.k_layernorm\.norms\.1\.weight"),
        ("olmo2", lambda t: {**t, "model.layers.0.input_layernorm.weight": torch.ones(64)},
         r"1 tensor not used by this model: model\.layers\.0\.input_layernorm\.weight"),
        ("falcon", lambda t: {**t, "transformer.h.0.self_attention.dense.bias": torch.ones(64)},
         r"1 tensor not used by this model: transformer\.h\.0\.self_attention\.dense\.bias"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_listed(
    family: str, change: Callable[[Tensors], Tensors], message: str, tmp_path: Path
) -> None:
    write_tiny(family, tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("flag", [True, False, ...])
@pytest.mark.parametrize("head", ["own", "absent"])
@pytest.mark.parametrize(("family", "name"), [("gpt2", "lm_head"), ("gpt_neox", "embed_out"), ("falcon", "lm_head")])
def test_tied_by_flag_and_files(family: str, name: str, head: str, flag: Any, tmp_path: Path) -> None:
    """Kind 43 with the other names of heads and embeddings: as the library reads the files, or refused."""
    write_tiny(family, tmp_path, tie_word_embeddings=False)
    if head == "absent":
        rewrite(tmp_path, without(f"{name}.weight"))
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_word_embeddings"] = flag
    if flag is ...:
        del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tied = flag is True or (flag is ... and family != "gpt_neox")
    if head == "absent" and not tied:
        with pytest.raises(ModelError, match=f"tie_word_embeddings is false but the weight files hold no {name}"):
            load(tmp_path)
        return
    model = load(tmp_path)
    assert model.spec.tied_head == (head == "absent")  # a head that differs from the embedding is used
    if tied == (head == "absent"):
        expected = oracle_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), IDS)
        close(run_chunks(model.decoder, IDS, len(IDS)), expected)


def test_pickles_are_refused_with_the_remedy(tmp_path: Path) -> None:
    write_tiny("opt", tmp_path)
    (tmp_path / WEIGHTS).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, but pickled weights are never read: save the model"):
        load(tmp_path)


def test_vocabulary_larger_than_the_tokenizers_and_several_ends(tmp_path: Path) -> None:
    """259 tokens in the tokenizer, 320 rows; ends from generation_config.json, else from config.json."""
    write_tiny("gpt_neox", tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [257, 300]}))
    model = load_model(EngineConfig(model=str(tmp_path)), dtype=torch.float32, device="cpu", ops=TorchOps())
    assert model.tokenizer is not None and model.tokenizer.vocab_size == 259
    assert model.spec.vocab_size == 320 and model.spec.eos_token_ids == (257, 300)
    path.unlink()
    assert read_spec(str(tmp_path)).eos_token_ids == (257,)
