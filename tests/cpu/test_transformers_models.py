"""Models that run through transformers with paged attention behind it: the library's own answers, whatever the batch.

The oracle is the same class with its own eager attention. Six of the families here are none that Octavo's own decoder
knows; llama and gemma3 are asked for by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.dense_attention import run_chunks
from helpers.oracle import Model, assert_greedy, random_ids
from helpers.tiny_models import tiny_config, tiny_oracle, write_tokenizer
from octavo import LLM, ModelError, SamplingParams
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.kernels.cpu import make_ops
from octavo.kernels.ops import TorchOps
from octavo.models.load import load_model, read_spec
from octavo.models.transformers_probe import window_of

_SHAPE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 256, "eos_token_id": 257,
    "pad_token_id": 258,
}  # fmt: skip
#: family -> settings of its configuration
FOREIGN: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 16, "logit_scale": 0.5, "num_hidden_layers": 4},
    "diffllama": {},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
                    "qk_nope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 8,
                    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    "exaone4": {"sliding_window": 16, "num_hidden_layers": 4},
    "glm4": {"head_dim": 16, "pad_token_id": 258},
    "nemotron": {},
    "starcoder2": {"sliding_window": 16},
}  # fmt: skip
ENGINE_FAMILIES = ("cohere2", "exaone4", "glm4", "deepseek_v3")
PROMPTS = [random_ids(length, 3) for length in (1, 5, 16, 33, 70)]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def foreign(family: str, path: Path, **settings: Any) -> Model:
    """A tiny random model of a family, written to `path`."""
    if family in FOREIGN:
        config = transformers.AutoConfig.for_model(family, **{**_SHAPE, **FOREIGN[family], **settings})
    else:
        config = tiny_config(family, **settings)
    oracle = tiny_oracle(config)
    oracle.save_pretrained(path)
    write_tokenizer(path)
    return Model(path, oracle)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            made[family] = foreign(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([list(p) for p in prompts], params, use_tqdm=False)
    assert llm.pool_view().num_used == 0
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.mark.parametrize("family", [*FOREIGN, "llama", "gemma3"])
def test_logits_equal_in_one_piece_and_in_chunks(family: str, models: Any) -> None:
    model = models(family)
    config = EngineConfig(model=str(model.path), model_impl="transformers")
    ids = random_ids(60, 5)
    with torch.no_grad():
        expected = model.oracle(torch.tensor([ids]), use_cache=False).logits[0].float()
    for ops, chunks in ((TorchOps(), (60,)), (make_ops(torch.float32), (60, 7))):
        loaded = load_model(config, dtype=torch.float32, device="cpu", ops=ops)
        assert loaded.impl == "transformers"
        for chunk in chunks:
            torch.testing.assert_close(run_chunks(loaded.decoder, ids, chunk), expected, atol=1e-4, rtol=1e-4)
        assert loaded.spec.num_heads % loaded.spec.num_kv_heads == 0
        assert loaded.decoder.parameter_count() == sum(p.numel() for p in model.oracle.parameters())


@pytest.mark.parametrize("family", ENGINE_FAMILIES)
def test_greedy_with_chunks_cache_samples_and_preemption(family: str, models: Any) -> None:
    """Chosen by itself, and the answers are the oracle's whatever the engine does."""
    model = models(family)
    with model.engine(max_num_batched_tokens=24, max_num_seqs=4) as llm:
        setting = llm.settings()["model_impl"]
        assert setting["asked"] == "auto" and setting["chosen"] == "transformers"
        assert f"model_type='{family}'" in setting["why"]
        found = answers(llm, PROMPTS)
        for prompt, answer in zip(PROMPTS, found, strict=True):
            assert_greedy(model.oracle, prompt, answer)
        assert len({tuple(a) for a in found}) == len(PROMPTS)
        again = llm.generate([PROMPTS[4]], GREEDY, use_tqdm=False)[0]
        assert again.num_cached_tokens >= 64
        assert list(again.outputs[0].token_ids) == found[4]
        several = llm.generate(
            [PROMPTS[3]], SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=12), use_tqdm=False
        )
        alone = llm.generate([PROMPTS[3]], SamplingParams(n=1, temperature=0.9, seed=5, max_tokens=12), use_tqdm=False)
        assert list(several[0].outputs[0].token_ids) == list(alone[0].outputs[0].token_ids)
        assert len({tuple(o.token_ids) for o in several[0].outputs}) == 3
    with model.engine(num_blocks=34 if "window" in str(FOREIGN[family]) else 12, max_model_len=100) as llm:
        assert answers(llm, [*PROMPTS, *PROMPTS[::-1]]) == [*found, *found[::-1]]
        assert llm.stats().preemptions > 0


def test_windows_free_blocks_through_transformers_too(models: Any) -> None:
    model = models("cohere2")
    with model.engine() as llm:
        assert [w for w in llm.spec.windows if w is not None] == [16, 16, 16]
        assert len(llm._live().scheduler.memory.layout.groups) > 1
    spec = read_spec(str(model.path))
    assert spec.extra["model_impl"] == "transformers" and spec.windows == (16, 16, 16, None)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_both_implementations_say_the_same(family: str, models: Any) -> None:
    with models(family).engine() as own, models(family).engine(model_impl="transformers") as other:
        assert own.settings()["model_impl"]["chosen"] == "octavo"
        assert answers(own, PROMPTS) == answers(other, PROMPTS)
        assert own.spec.windows == other.spec.windows


def test_info_and_plan_count_as_transformers_does(models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = models("glm4")
    count = sum(p.numel() for p in model.oracle.parameters())
    assert main(["info", str(model.path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model_impl"] == "transformers" and facts["num_parameters"] == count
    assert facts["weight_bytes"]["float32"] == 4 * count and "int8" not in facts["weight_bytes"]
    assert main(["info", str(model.path)]) == 0
    assert "transformers (its code around Octavo's paged attention)" in capsys.readouterr().out
    assert main(["plan", str(model.path), "--memory", "8GiB", "--device", "cpu", "--dtype", "float32"]) == 0
    assert main(["info", str(model.path), "--quantization", "int8"]) == 2
    assert "needs Octavo's own decoder" in capsys.readouterr().err


def test_bfloat16_runs_wide_over_packed_weights(models: Any) -> None:
    model = models("cohere")
    config = EngineConfig(model=str(model.path))
    loaded = load_model(config, dtype=torch.bfloat16, device="cpu", ops=make_ops(torch.bfloat16))
    ids = random_ids(40, 8)
    with torch.no_grad():
        expected = model.oracle(torch.tensor([ids]), use_cache=False).logits[0].float()
    cosine = torch.nn.functional.cosine_similarity(run_chunks(loaded.decoder, ids, 40), expected, dim=-1)
    assert float(cosine.min()) > 0.98
    assert loaded.weight_bytes < 2.2 * sum(p.numel() for p in model.oracle.parameters())


def test_random_weights_from_a_configuration_alone(models: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((models("glm4").path / "config.json").read_text())
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "num_blocks": 64, "dtype": "float32"}
    texts = []
    for seed in (1, 1, 2):
        with LLM(model=str(tmp_path), seed=seed, **settings) as llm:
            texts.append(answers(llm, PROMPTS[1:3]))
    assert texts[0] == texts[1] != texts[2]


# ---- refusals ---------------------------------------------------------------------------------------------------


def config_only(path: Path, **config: Any) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


REFUSED = {
    "t5": ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "no causal language model"),
    "bloom": ({"model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 2, "vocab_size": 320},
              "none of max_position_embeddings|computes attention by itself"),
    "mamba": ({"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 320},
              "none of max_position|recurrent state|layer_types holds"),
    "falcon_h1": ({"model_type": "falcon_h1", "vocab_size": 320}, "layer_types holds|recurrent"),
    "bert": ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 320}, "neither causal nor a sliding"),
    "gpt_oss": ({"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
                 "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
                 "vocab_size": 320}, "s_aux"),
    "doge": ({"model_type": "doge", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}, "attention mask itself"),
    "llama4_text": ({"model_type": "llama4_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
                     "intermediate_size_mlp": 64, "num_local_experts": 2}, "chunked_attention|mask"),
    "custom": ({"model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}, "never run"),
    "classifier": ({"model_type": "cohere", "architectures": ["CohereForSequenceClassification"]},
                   "for cohere the causal language model"),
    "quantised": ({"model_type": "cohere", "architectures": ["CohereForCausalLM"],
                   "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
                  "quantization_config|quantised"),
}  # fmt: skip


def test_keys_that_nobody_reads_are_refused(models: Any, tmp_path: Path) -> None:
    for family in ("cohere", "llama"):
        path = tmp_path / family
        settings = (
            tiny_config(family).to_dict()
            if family == "llama"
            else json.loads((models("cohere").path / "config.json").read_text())
        )
        config_only(path, **settings)
        for impl in ("auto", "transformers"):
            assert read_spec(str(path), "dummy", impl).num_layers == settings["num_hidden_layers"]
            config_only(path, **settings, magic_scale=3, rope_theta=10000.0, _note="x", unset=None)
            with pytest.raises(ModelError, match=r"magic_scale=3: ") as caught:
                read_spec(str(path), "dummy", impl)
            assert "model_impl" not in str(caught.value) and "rope_theta" not in str(caught.value)
            config_only(path, **settings)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    path = config_only(tmp_path, **config)
    with pytest.raises(ModelError, match=reason):
        LLM(model=path, model_impl="transformers", load_format="dummy", skip_tokenizer_init=True, num_blocks=16)
    if name not in ("quantised",):
        with pytest.raises(ModelError, match="nor through transformers"):
            LLM(model=path, load_format="dummy", skip_tokenizer_init=True, num_blocks=16)


def test_layers_that_look_at_their_neighbours_are_found(models: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """A convolution over the tokens beside attention has no state in blocks; the check on rows sees it."""
    from transformers.models.cohere import modeling_cohere

    plain = modeling_cohere.CohereMLP.forward
    monkeypatch.setattr(modeling_cohere.CohereMLP, "forward", lambda self, x: plain(self, x + x.roll(1, dims=1)))
    with pytest.raises(ModelError, match="depends on the other tokens"):
        models("cohere").engine()


def test_weights_are_strict(models: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = models("cohere").path
    tensors = load_file(source / "model.safetensors")
    path = tmp_path / "broken"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text((source / name).read_text())

    def refused(changed: dict[str, torch.Tensor], reason: str) -> None:
        save_file(changed, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=reason):
            LLM(model=str(path), num_blocks=16)

    name = "model.layers.1.mlp.up_proj.weight"
    refused({k: v for k, v in tensors.items() if k != name}, f"1 tensor missing: {name}")
    refused({**tensors, "model.layers.1.mlp.extra.weight": torch.zeros(3)}, "not used by this model: .*extra")
    refused({**tensors, name: torch.zeros(5, 5)}, r"up_proj\.weight is \[5, 5\], expected \[\d+, \d+\]")
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(b"no")
    with pytest.raises(ModelError, match="pickled weights are never read"):
        LLM(model=str(path), num_blocks=16)


def test_what_only_the_own_decoder_does_is_refused(models: Any) -> None:
    with pytest.raises(ValueError, match=r"quantization='int8' needs Octavo's own decoder"):
        models("cohere").engine(quantization="int8")
    with pytest.raises(ModelError, match="not supported"):
        models("cohere").engine(model_impl="octavo")
    with pytest.raises(ValueError, match="model_impl='vllm'"):
        models("cohere").engine(model_impl="vllm")


def test_windows_are_read_from_the_mask_itself() -> None:
    from transformers import masking_utils as masks

    assert window_of(masks.causal_mask_function, 5000, "x") is None
    assert window_of(masks.sliding_window_causal_mask_function(100), 5000, "x") == 100
    assert window_of(masks.sliding_window_causal_mask_function(5000), 5000, "x") is None
    for other in (masks.bidirectional_mask_function, masks.chunked_causal_mask_function(64, torch.zeros(1))):
        with pytest.raises(ModelError, match="neither causal nor a sliding window"):
            window_of(other, 5000, "x")
