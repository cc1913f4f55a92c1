"""Tiny random-weight models of each family, written by the transformers library, and that library as the oracle.

Weights are scaled up so that logits are far apart and greedy text varies with the prompt. `write_tiny(family, path)`
makes a directory like any on the hub: config.json, model.safetensors, tokenizer.json (byte-level, 259 tokens and more
than that in the embedding), tokenizer_config.json with a small chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM

VOCABULARY = 320
POSITIONS = 256
BEGIN, END, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258, "tie_word_embeddings": False,
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64, "rope_theta": 10000.0}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
_LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
_GEMMA3 = {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 16, "sliding_window_pattern": 2,
           "query_pre_attn_scalar": 24, "tie_word_embeddings": True}  # fmt: skip

_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 6}
_QWEN_EXPERTS = {"num_experts_per_tok": 3, "num_experts": 8, "moe_intermediate_size": 48}
_LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0 + 0.05 * i for i in range(6)],
         "long_factor": [1.5 + 0.5 * i for i in range(6)]}  # fmt: skip
#: Families without grouped heads, and without keys of their own for what others call so.
_PLAIN = {"num_key_value_heads": ...}
_GPT = {**_PLAIN, "intermediate_size": ...}

#: family -> (transformers configuration class, settings; ... removes a key of the shared shape)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True, "head_dim": 32}),
    "llama-bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("LlamaConfig", {"rope_parameters": _LLAMA3}),
    "llama-linear": ("LlamaConfig", {"rope_parameters": _LINEAR}),
    "llama-yarn": ("LlamaConfig", {"rope_parameters": _YARN}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
    "gemma": ("GemmaConfig", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {"head_dim": 32, "sliding_window": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", _GEMMA3),
    "gemma3-untied": (
        "Gemma3TextConfig", {**_GEMMA3, "tie_word_embeddings": False, "final_logit_softcapping": 20.0}
    ),
    "llama-dynamic": ("LlamaConfig", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama-proportional": ("LlamaConfig", {
        "rope_parameters": {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "mixtral": ("MixtralConfig", {**_EXPERTS, "sliding_window": 16}),
    "qwen2_moe": ("Qwen2MoeConfig", {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3_moe": ("Qwen3MoeConfig", {
        **_QWEN_EXPERTS, "num_experts": ..., "num_local_experts": 8, "head_dim": 32, "norm_topk_prob": True,
        "mlp_only_layers": [1]}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.75, "sliding_window": 20}),
    "phi3-short": ("Phi3Config", {"partial_rotary_factor": 0.75, "rope_parameters": _LONG,
                                  "original_max_position_embeddings": POSITIONS}),
    "smollm3": ("SmolLM3Config", {"no_rope_layer_interval": 3}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 6.0, "residual_multiplier": 0.7,
                                  "attention_multiplier": 0.2, "logits_scaling": 3.0}),
    "olmo2": ("Olmo2Config", {}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLmConfig", {"partial_rotary_factor": 0.5, "use_parallel_residual": True,
                                             "qk_layernorm": True}),
    "gpt2": ("GPT2Config", {**_GPT, "tie_word_embeddings": True, "n_inner": 112}),
    "opt": ("OPTConfig", {**_GPT, "tie_word_embeddings": True, "ffn_dim": 112, "word_embed_proj_dim": 64}),
    "gpt_neox": ("GPTNeoXConfig", _PLAIN),
    "gpt_neox-serial": ("GPTNeoXConfig", {**_PLAIN, "use_parallel_residual": False, "attention_bias": False}),
    "falcon": ("FalconConfig", {**_GPT, "tie_word_embeddings": True, "ffn_hidden_size": 112}),
    "falcon-new": ("FalconConfig", {**_GPT, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
                                    "ffn_hidden_size": 112}),
    "falcon-serial": ("FalconConfig", {**_GPT, "multi_query": False, "parallel_attn": False,
                                       "ffn_hidden_size": 112}),
}  # fmt: skip

#: The families that came first, which more tests go through.
FIRST = tuple(FAMILIES)[:16]


def tiny_config(family: str, **settings: Any) -> Any:
    """The transformers configuration of a family, with further settings laid over it."""
    kind, own = FAMILIES[family]
    given = {**_SHAPE, **own, **settings}
    return getattr(transformers, kind)(**{key: value for key, value in given.items() if value is not ...})


def tiny_oracle(config: Any, seed: int = 0) -> Any:
    """A transformers model in float32 with eager attention and weights that make greedy text vary."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    gemma = config.model_type.startswith("gemma")
    columns_last = config.model_type != "gpt2"  # whose weights are [in, out]
    plain = config.model_type in ("gpt2", "opt", "gpt_neox", "falcon")  # biases everywhere: large ones drown the rest
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            # Gemma's norms add 1 themselves. Sharp attention (a factor on q and k) keeps its text from looping.
            looks = gemma and any(part in name for part in ("q_proj", "k_proj", "q_norm", "k_norm"))
            looks |= plain and any(part in name for part in ("q_proj", "k_proj", "c_attn", "query_key_value"))
            fan_in = weight.shape[-1] if columns_last else weight.shape[0]
            if name == "model.norm.weight":
                weight.copy_(0.2 * noise + ((3.0 if config.tie_word_embeddings else 0.5) if gemma else 1.5))
            elif name.endswith("bias"):
                weight.copy_((0.1 if is_norm_name(name) or plain else 0.5) * noise)
            elif is_norm_name(name):
                weight.copy_(0.2 * noise + (0.0 if gemma else 1.0) + (1.2 if looks else 0.0))
            elif any(part in name for part in ("embed", "wte", "wpe")):
                # Small: with a tied head the residual of the input token would otherwise predict itself for ever.
                weight.copy_(0.3 * noise * (config.hidden_size**-0.5 if gemma else 1.0))
            else:
                weight.copy_(noise * ((2.2 if plain else 3.0) if looks else 1.5) * fan_in**-0.5)
    return model


def is_norm_name(name: str) -> bool:
    """Whether a transformers parameter is a norm's."""
    return "norm" in name or ".ln_" in name


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: one token per byte, and begin, end and padding tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in (BEGIN, END, PAD)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=None, special_tokens=[(BEGIN, 256)]
    )
    return tokenizer


def write_tokenizer(path: Path, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json of the byte tokenizer."""
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def write_tiny(family: str, path: Path, *, seed: int = 0, **settings: Any) -> Any:
    """Write a model of a family into `path` (made if needed); returns the oracle."""
    path.mkdir(parents=True, exist_ok=True)
    oracle = tiny_oracle(tiny_config(family, **settings), seed)
    oracle.save_pretrained(path)
    write_tokenizer(path)
    return oracle


def oracle_logits(oracle: Any, token_ids: list[int]) -> torch.Tensor:
    """Raw logits float32 [T, V] of one prompt."""
    with torch.no_grad():
        logits: torch.Tensor = oracle(torch.tensor([token_ids]), use_cache=False).logits[0].float()
    return logits


def oracle_greedy(oracle: Any, token_ids: list[int], count: int) -> list[int]:
    """`count` greedy tokens, end of text ignored."""
    with torch.no_grad():
        out = oracle.generate(
            torch.tensor([token_ids]), max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    greedy: list[int] = out[0, len(token_ids) :].tolist()
    return greedy
