"""`octavo info` on the configs of well-known models: nothing but config.json, sizes as their makers publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main
from octavo.models.load import read_spec
from octavo.planning.shapes import ModelShape


def config(
    kind: str, width: int, layers: int, heads: int, vocabulary: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocabulary, "max_position_embeddings": positions, "torch_dtype": "bfloat16", **more,
    }  # fmt: skip


LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
          "rope_type": "llama3"}  # fmt: skip
LONG = {"type": "longrope", "long_factor": [1.5] * 48, "short_factor": [1.1] * 48}

#: name -> (config, millions of parameters, of those a token meets, KV bytes of a token in bfloat16, words of the table)
MODELS: dict[str, tuple[dict[str, Any], float, float, int, tuple[str, ...]]] = {
    "llama-3.1-8b": (
        config("llama", 4096, 32, 32, 128256, 131072, intermediate_size=14336, num_key_value_heads=8,
               rope_scaling=LLAMA3, rope_theta=500000.0, rms_norm_eps=1e-5, architectures=["LlamaForCausalLM"]),
        8030.3, 8030.3, 131072, ("llama3, base 500000",)),
    "mistral-7b": (
        config("mistral", 4096, 32, 32, 32000, 32768, intermediate_size=14336, num_key_value_heads=8,
               sliding_window=4096), 7241.7, 7241.7, 131072, ("32 with a window of 4096",)),
    "mixtral-8x7b": (
        config("mixtral", 4096, 32, 32, 32000, 32768, intermediate_size=14336, num_key_value_heads=8,
               num_local_experts=8, num_experts_per_tok=2, sliding_window=None, router_aux_loss_coef=0.02),
        46702.8, 12879.9, 131072, ("2 of 8 in every layer, of 14336", "12879.9 million for a token")),
    "qwen2.5-0.5b": (
        config("qwen2", 896, 24, 14, 151936, 32768, intermediate_size=4864, num_key_value_heads=2,
               tie_word_embeddings=True, use_sliding_window=False, sliding_window=32768, max_window_layers=24,
               rope_theta=1e6), 494.0, 494.0, 12288, ("head tied",)),
    "qwen3-30b-a3b": (
        config("qwen3_moe", 2048, 48, 32, 151936, 40960, intermediate_size=6144, num_key_value_heads=4, head_dim=128,
               num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True,
               decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False, sliding_window=None,
               max_window_layers=48, rope_theta=1e6), 30532.1, 3353.0, 98304, ("8 of 128 in every layer, of 768",)),
    "qwen1.5-moe-a2.7b": (
        config("qwen2_moe", 2048, 24, 16, 151936, 8192, intermediate_size=5632, num_key_value_heads=16,
               num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
               shared_expert_intermediate_size=5632, norm_topk_prob=False, use_sliding_window=False,
               max_window_layers=21), 14315.8, 2689.2, 196608, ("and one of 5632 for all",)),
    "gemma-3-1b": (
        config("gemma3_text", 1152, 26, 4, 262144, 32768, intermediate_size=6912, num_key_value_heads=1,
               head_dim=256, sliding_window=512, sliding_window_pattern=6, query_pre_attn_scalar=256),
        999.9, 999.9, 26624, ("22 with a window of 512",)),
    "phi-3-mini-128k": (
        config("phi3", 3072, 32, 32, 32064, 131072, intermediate_size=8192, num_key_value_heads=32,
               original_max_position_embeddings=4096, rope_scaling=LONG, sliding_window=262144),
        3821.1, 3821.1, 393216, ("longrope",)),
    "phi-4-mini": (
        config("phi3", 3072, 32, 24, 200064, 131072, intermediate_size=8192, num_key_value_heads=8,
               partial_rotary_factor=0.75, original_max_position_embeddings=4096, tie_word_embeddings=True,
               rope_scaling=LONG), 3836.0, 3836.0, 131072, ("96 of 128 numbers of a head",)),
    "smollm3-3b": (
        config("smollm3", 2048, 36, 16, 128256, 65536, intermediate_size=11008, num_key_value_heads=4,
               no_rope_layer_interval=4, rope_theta=5e6, use_sliding_window=False), 3075.1, 3075.1, 73728,
        ("9 layers without",)),
    "granite-3.1-2b": (
        config("granite", 2048, 40, 32, 49155, 131072, intermediate_size=8192, num_key_value_heads=8,
               tie_word_embeddings=True, attention_multiplier=0.015625, embedding_multiplier=12.0,
               residual_multiplier=0.22, logits_scaling=8.0), 2533.5, 2533.5, 81920, ()),
    "olmo-2-7b": (
        config("olmo2", 4096, 32, 32, 100352, 4096, intermediate_size=11008, num_key_value_heads=32,
               rope_theta=500000), 7298.6, 7298.6, 524288, ("normed",)),
    "stablelm-2-1.6b": (
        config("stablelm", 2048, 24, 32, 100352, 4096, intermediate_size=5632, num_key_value_heads=32,
               use_qkv_bias=True, partial_rotary_factor=0.25, rope_theta=10000), 1644.5, 1644.5, 196608,
        ("16 of 64 numbers of a head",)),
    "gpt2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_ctx": 1024,
         "vocab_size": 50257, "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
         "task_specific_params": {"text-generation": {"max_length": 50}}}, 124.4, 124.4, 36864,
        ("no gate", "1024, learned")),
    "opt-125m": (
        config("opt", 768, 12, 12, 50272, 2048, ffn_dim=3072, word_embed_proj_dim=768, prefix="</s>"),
        125.2, 125.2, 36864, ("no gate", "2048, learned")),
    "pythia-1.4b": (
        config("gpt_neox", 2048, 24, 16, 50304, 2048, intermediate_size=8192, rotary_pct=0.25,
               rotary_emb_base=10000, use_parallel_residual=True), 1414.6, 1414.6, 196608,
        ("32 of 128 numbers of a head",)),
    "falcon-7b": (
        config("falcon", 4544, 32, 71, 65024, 2048, multi_query=True, parallel_attn=True, bias=False, alibi=False,
               new_decoder_architecture=False), 6921.7, 6921.7, 8192, ("71 query heads, 1 key/value heads of 64",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_those_their_makers_publish(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, millions, active, kv_bytes, table = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert main(["info", str(tmp_path), "--load-format", "dummy", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] / 1e6 == pytest.approx(millions, abs=0.06)
    assert facts["active_parameters"] / 1e6 == pytest.approx(active, abs=0.06)
    assert facts["kv_bytes_per_token"] == kv_bytes
    assert facts["model_impl"] == "octavo"
    assert main(["info", str(tmp_path), "--load-format", "dummy"]) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in table), text


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt2"])
def test_the_planner_knows_the_bytes(name: str, tmp_path: Path) -> None:
    """The shape that plans are made of has the model's weights, experts included, to a percent."""
    written, millions, *_ = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(written))
    shape = ModelShape.of(read_spec(str(tmp_path), "dummy"), name)
    assert shape.num_parameters / 1e6 == pytest.approx(millions, rel=0.011)
