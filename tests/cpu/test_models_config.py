"""Hugging Face configs: every spelling read as the transformers library reads it, everything else refused by name."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers

from helpers.dense_attention import run_chunks
from helpers.tiny_models import FAMILIES, tiny_config, tiny_oracle
from octavo.errors import ModelError
from octavo.kernels.ops import TorchOps
from octavo.models.config_reader import FAMILIES as FAMILIES_READ
from octavo.models.config_reader import is_supported, spec_from_config
from octavo.models.decoder import Decoder
from octavo.models.names import weight_shapes
from octavo.models.safetensors_loader import canonical_name
from octavo.models.spec import ModelSpec
from octavo.models.tensor_names import parts_of

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 64,
    "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def rotary(**keys: Any) -> tuple[str, float, dict[str, Any]]:
    spec = spec_from_config({**LLAMA, **keys}).rotaries[0]
    return spec.kind, spec.base, dict(spec.parameters)


def qwen(**keys: Any) -> ModelSpec:
    return spec_from_config({**LLAMA, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], **keys})


def gemma3(**keys: Any) -> ModelSpec:
    return spec_from_config(
        {**LLAMA, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7, **keys}
    )


CLASSES = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
    "gemma": "GemmaConfig", "gemma2": "Gemma2Config", "gemma3_text": "Gemma3TextConfig", "smollm3": "SmolLM3Config",
    "mixtral": "MixtralConfig", "qwen2_moe": "Qwen2MoeConfig", "qwen3_moe": "Qwen3MoeConfig", "phi3": "Phi3Config",
    "granite": "GraniteConfig", "olmo2": "Olmo2Config", "stablelm": "StableLmConfig", "gpt2": "GPT2Config",
    "opt": "OPTConfig", "gpt_neox": "GPTNeoXConfig", "falcon": "FalconConfig",
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(CLASSES))
@pytest.mark.parametrize("written", ["empty", "all"])
def test_class_defaults_equal(kind: str, written: str) -> None:
    """A config that says nothing, and one that says everything, give what the configuration class gives."""
    theirs = getattr(transformers, CLASSES[kind])()
    spec = spec_from_config({"model_type": kind} if written == "empty" else {**theirs.to_dict(), "model_type": kind})
    heads, hidden = theirs.num_attention_heads, theirs.hidden_size
    for ours, names, absent in (
        ("vocab_size", ["vocab_size"], None), ("hidden_size", ["hidden_size"], None),
        ("intermediate_size", ["intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"], 4 * hidden),
        ("num_layers", ["num_hidden_layers"], None), ("num_heads", ["num_attention_heads"], None),
        ("num_kv_heads", ["num_key_value_heads"], 1 if kind == "falcon" else heads),
        ("rms_norm_eps", ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"], 1e-5),
        ("max_position_embeddings", ["max_position_embeddings"], None), ("tied_head", ["tie_word_embeddings"], None),
    ):  # fmt: skip
        found = next((getattr(theirs, name) for name in names if getattr(theirs, name, None) is not None), absent)
        assert getattr(spec, ours) == found, ours
    assert spec.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert spec.bos_token_id == theirs.bos_token_id
    assert spec.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    assert spec.logit_softcap == getattr(theirs, "final_logit_softcapping", None)
    assert spec.attention_softcap == getattr(theirs, "attn_logit_softcapping", None)
    types = getattr(theirs, "layer_types", None)
    window = getattr(theirs, "sliding_window", None)
    for layer, ours_window in enumerate(spec.windows):
        slides = types[layer] == "sliding_attention" if types else kind == "mistral"
        assert ours_window == (window if slides else None)
    for layer, index in enumerate(spec.rotary):
        if index is None:
            assert kind in ("gpt2", "opt") or not theirs.no_rope_layers[layer]
            continue
        rope = theirs.rope_parameters
        rope = rope[types[layer]] if types and types[layer] in rope else rope
        assert spec.rotaries[index].base == rope["rope_theta"]
        turned = int(spec.head_dim * rope.get("partial_rotary_factor", 1.0))
        assert (spec.rotaries[index].dim or spec.head_dim) == turned


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"model_type": "gpt2", "num_key_value_heads": 2}, "num_key_value_heads=2: not known for gpt2"),
        ({"model_type": "gpt2", "n_head": 7}, "hidden_size=768 is not a multiple of num_attention_heads=7"),
        ({"model_type": "gpt2", "n_embd": 0}, "n_embd=0: must be an integer"),
        ({"model_type": "opt", "do_layer_norm_before": False}, "do_layer_norm_before=False.*transformers"),
        ({"model_type": "opt", "word_embed_proj_dim": 512}, "word_embed_proj_dim=512.*another size"),
        ({"model_type": "falcon", "alibi": True}, "alibi=True.*model_impl='transformers'"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
        ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok=9 exceeds the 8 experts"),
        ({"model_type": "mixtral", "num_local_experts": 0}, "num_local_experts=0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "1"}, "mlp_only_layers='1'"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ({"model_type": "qwen3_moe", "n_shared_experts": 1}, "n_shared_experts=1: not known"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier=0"),
        ({"model_type": "stablelm", "head_dim": 100}, "head_dim=100: not known for stablelm"),
        ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv=8.0"),
        ({"model_type": "phi3", "mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "gpt_neox", "hidden_act": "gelu_10"}, "gelu_10"),
        ({"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 64}, "write layer_types out"),
    ],
)
def test_what_a_family_cannot_do_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(config)
    assert is_supported(config) is not None


def test_supported_says_nothing_and_otherwise_why() -> None:
    assert is_supported(LLAMA) is None
    reason = is_supported({"model_type": "mamba"})
    assert reason is not None and "model_type='mamba'" in reason and "model_impl='transformers'" in reason


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"model_type": "llama", "is_llama_config": True, "rope_interleaved": False,
          "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}}, {"rope_interleaved": True}),
        ({"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
         {"full_attn_mod": 2}),
        ({"model_type": "stablelm", "rotary_scaling_factor": 1.0}, {"rotary_scaling_factor": 2.0}),
        ({"model_type": "falcon", "apply_residual_connection_post_layernorm": False},
         {"apply_residual_connection_post_layernorm": True}),
    ],
)  # fmt: skip
def test_keys_that_makers_write_beside_the_librarys(config: dict[str, Any], changed: dict[str, Any]) -> None:
    """With the value that changes nothing they are read over, with another one refused."""
    assert is_supported(config) is None
    reason = is_supported({**config, **changed})
    assert reason is not None and next(iter(changed)) in reason


def test_layers_with_and_without_experts() -> None:
    """Every second layer, but those that mlp_only_layers names."""
    spec = spec_from_config({"model_type": "qwen3_moe", "num_hidden_layers": 6, "decoder_sparse_step": 2,
                             "mlp_only_layers": [3]})  # fmt: skip
    assert spec.experts is not None and spec.experts.layers == (1, 5)
    dense = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "mlp_only_layers": [0, 1]}
    assert spec_from_config(dense).experts is None


def test_windows_of_qwen_with_experts() -> None:
    on = {"use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 6}
    two = spec_from_config({"model_type": "qwen2_moe", "max_window_layers": 3, **on})
    assert two.windows == (64, None, 64, None, None, None)
    assert spec_from_config({"model_type": "qwen3_moe", **on}).windows == (64,) * 6
    off = {"model_type": "qwen2_moe", "use_sliding_window": False, "sliding_window": 0}  # as the library writes it
    assert set(spec_from_config(off).windows) == {None}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weight_names_and_shapes_equal_the_model(family: str) -> None:
    config = tiny_config(family)
    spec = spec_from_config(config.to_dict() | {"architectures": None})
    names = FAMILIES_READ[spec.architecture].names
    theirs: dict[str, tuple[int, ...]] = {}
    for name, parameter in transformers.AutoModelForCausalLM.from_config(config).named_parameters():
        parts = parts_of(name, spec, names, names.prefixes[0])
        assert parts is not None, name
        theirs |= {part.name: tuple(part.take(parameter).shape) for part in parts}
    assert theirs == weight_shapes(spec)


# Rotary spellings: kinds 40 and 41


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_both_names_of_the_kind_in_both_places(key: str, place: str) -> None:
    kind, base, parameters = rotary(**{place: {key: "llama3", **LLAMA3}, "rope_theta": 5e5})
    assert (kind, base) == ("llama3", 5e5)
    assert parameters == LLAMA3


def test_base_in_each_form_gives_equal_logits() -> None:
    """Kind 41: the same weights, base 1,000,000 written flat, nested, and by the library itself."""
    oracle = tiny_oracle(tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    forms: list[dict[str, Any]] = [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6},
    ]
    ids = list(range(40))
    expected = oracle(torch.tensor([ids])).logits[0].detach()
    results = []
    for form in forms:
        spec = spec_from_config({**LLAMA, **form})
        weights = {canonical_name(n, spec) or n: p.detach() for n, p in oracle.named_parameters()}
        results.append(run_chunks(Decoder(spec, weights, TorchOps(), torch.float32), ids, 40))
        torch.testing.assert_close(results[-1], expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(results[0], r) for r in results)
    assert spec_from_config(LLAMA).rotaries[0].base == 10000.0


def test_conflicts_are_logged_and_the_nested_form_wins(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "octavo.models"):
        assert rotary(rope_theta=1e4, rope_parameters={"rope_theta": 1e6})[1] == 1e6
    assert "contradicts rope_theta=10000.0" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "octavo.models"):
        nested = {"rope_type": "linear", "factor": 2.0}
        assert rotary(rope_parameters=nested, rope_scaling={"type": "linear", "factor": 4.0})[2] == {"factor": 2.0}
    assert "contradicts rope_scaling" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "octavo.models"):
        assert rotary(rope_theta=1e6, rope_parameters={"rope_theta": 1e6})[1] == 1e6
        assert rotary(rope_scaling={"type": "linear", "factor": 4.0}, rope_parameters={"rope_theta": 1e6})[2]
    assert not caplog.text


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "ntk", "factor": 2.0}, "'ntk'.*default, linear, dynamic, llama3, yarn, longrope"),
        ({"rope_type": "longrope"}, "'longrope'"),
        ({"type": "linear"}, "needs factor"),
        ({"type": "linear", "factor": -1}, "factor=-1"),
        ({"type": "linear", "factor": "2"}, "factor='2'"),
        ({"type": "linear", "factor": 2.0, "beta": 1}, "does not use: beta"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor, high_freq_factor, original_max"),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "must exceed"),
        ({"rope_type": "yarn", "factor": 4.0}, "needs original_max_position_embeddings"),
        ({"rope_type": "default", "factor": 4.0}, "does not use: factor"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("linear", "must be a mapping"),
    ],
)
def test_rotary_settings_that_are_refused(scaling: Any, message: str) -> None:
    for place in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ModelError, match=message):
            rotary(**{place: scaling})


def test_yarn_extends_the_positions() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert spec_from_config({**LLAMA, "rope_scaling": yarn}).max_position_embeddings == 1024


def test_gemma3_rotary_per_layer_type() -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    new = gemma3(rope_parameters={"full_attention": full, "sliding_attention": {"rope_theta": 1e4}})
    old = gemma3(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"factor": 8.0, "rope_type": "linear"})
    assert (old.rotaries, old.rotary) == (new.rotaries, new.rotary)
    assert [(r.kind, r.base) for r in old.rotaries] == [("default", 1e4), ("linear", 1e6)]
    assert old.rotary == (0, 0, 0, 0, 0, 1, 0)
    with pytest.raises(ModelError, match="one entry per layer type"):
        gemma3(rope_parameters={"rope_theta": 1e6})
    with pytest.raises(ModelError, match="mixes layer types"):
        gemma3(rope_parameters={"full_attention": {}, "rope_theta": 1e6})


# Windows: kind 13


def test_windows_only_where_the_config_says() -> None:
    assert qwen(sliding_window=16).windows == (None,) * 3
    assert qwen(sliding_window=16, use_sliding_window=True, max_window_layers=1).windows == (None, 16, 16)
    assert qwen(sliding_window=None, use_sliding_window=True, max_window_layers=0).windows == (None,) * 3
    full = ["full_attention"] * 3
    assert qwen(sliding_window=16, use_sliding_window=True, layer_types=full).windows == (None,) * 3
    mistral = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16}
    assert spec_from_config(mistral).windows == (16,) * 3
    assert spec_from_config({**mistral, "layer_types": full}).windows == (None,) * 3
    assert spec_from_config({**mistral, "sliding_window": None}).windows == (None,) * 3
    # A window that holds every position the model has is full attention.
    assert spec_from_config({**mistral, "sliding_window": 256}).windows == (None,) * 3
    assert gemma3(sliding_window=8).windows == (8, 8, 8, 8, 8, None, 8)
    assert gemma3(sliding_window=8, sliding_window_pattern=2).windows == (8, None, 8, None, 8, None, 8)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["full_attention"]}, "3 entries"),
        ({"layer_types": ["full_attention", "chunked_attention", "x"]}, "chunked_attention, x"),
        ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "sliding_window is missing"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window=0"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers=-1"),
        ({"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
    ],
)
def test_windows_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        qwen(**keys)


# Everything else


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "bloom"}, "bloom.*supported: llama, mistral, .*model_impl='transformers' may run it"),
        ({"model_type": None}, "model_type=None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"head_dim": 15}, "head_dim=15"),
        ({"hidden_act": "mish"}, "mish.*silu"),
        ({"rms_norm_eps": 0}, "rms_norm_eps=0"),
        ({"tie_word_embeddings": "true"}, "tie_word_embeddings='true'"),
        ({"attention_bias": 1}, "attention_bias=1"),
        ({"eos_token_id": "2"}, "eos_token_id='2'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"sliding_window": 16}, "sliding_window=16: not known for llama"),
        ({"attn_temperature_tuning": True}, "attn_temperature_tuning=True"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ],
)
def test_keys_that_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({**LLAMA, **keys})


def test_null_and_absent_values() -> None:
    spec = spec_from_config({**LLAMA, "head_dim": None, "num_key_value_heads": None, "rope_scaling": None})
    assert (spec.head_dim, spec.num_kv_heads) == (16, 4)
    assert spec_from_config({**LLAMA, "eos_token_id": [5, 7], "bos_token_id": None}).eos_token_ids == (5, 7)
    assert spec_from_config(
        {**LLAMA, "torch_dtype": "bfloat16", "_name_or_path": "x", "new_flag": False, "unk_token_id": 3}
    )


def test_a_config_that_is_not_an_object() -> None:
    with pytest.raises(ModelError, match="JSON object"):
        spec_from_config([])  # type: ignore[arg-type]
