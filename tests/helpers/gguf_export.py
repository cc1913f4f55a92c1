"""Writes a transformers model to GGUF with the `gguf` package, as llama.cpp's converter lays it out.

Own knowledge of the format, apart from the engine's reader: names, the interleaving of q and k rows in `llama` files,
the +1 inside Gemma's norms.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3",
    "gemma": "gemma", "gemma2": "gemma2", "phi3": "phi3", "mixtral": "llama", "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}  # fmt: skip
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


def gguf_name(name: str, sandwich: bool) -> str:
    """GGUF name of a transformers parameter."""
    stem, kind = name.rsplit(".", 1)
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    if rest == "post_attention_layernorm":
        return f"blk.{layer}.{'post_attention_norm' if sandwich else 'ffn_norm'}.{kind}"
    return f"blk.{layer}.{_NAMES[rest]}.{kind}"


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from (half, pair) to (pair, half) order."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def write_gguf(
    oracle: Any,
    path: Path,
    kind: str = "f32",
    *,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
) -> Path:
    """kind: f32, f16, bf16, q8_0, q5_0 or q4_0 (matrices; vectors stay float32). metadata: extra keys after the
    architecture's name, or full names with a leading "/"; None removes a default one. drop: tensor names left out."""
    config = oracle.config
    architecture = ARCHITECTURES[config.model_type]
    gemma, sandwich = architecture.startswith("gemma"), architecture in ("gemma2", "gemma3")
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in _header(config, architecture, metadata or {}).items():
        full = key[1:] if key.startswith("/") else f"{architecture}.{key}"
        _add(writer, full, value)
    for name, parameter in oracle.named_parameters():
        weight = parameter.detach().float()
        if ".experts." in name:
            layer = name.split(".")[2]
            for part, stack in _stacks(name, weight).items():
                _add_tensor(writer, f"blk.{layer}.ffn_{part}_exps.weight", stack.numpy(), kind)
            continue
        target = gguf_name(name, sandwich)
        if target in drop:
            continue
        if "shared_expert_gate" in name:
            weight = weight[0]
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            weight = interleaved(weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        if gemma and "norm" in name:
            weight = weight + 1.0
        _add_tensor(writer, target, weight.numpy(), kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _stacks(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The experts' matrices [E, out, in] of one parameter."""
    if name.endswith("gate_up_proj"):
        gate, up = weight.chunk(2, dim=1)
        return {"gate": gate, "up": up}
    return {"down": weight}


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    array = np.ascontiguousarray(array)
    if array.ndim == 1 or kind == "f32":
        writer.add_tensor(name, array)
        return
    wanted = {"f16": gguf.GGMLQuantizationType.F16, "bf16": gguf.GGMLQuantizationType.BF16,
              "q8_0": gguf.GGMLQuantizationType.Q8_0, "q5_0": gguf.GGMLQuantizationType.Q5_0,
              "q4_0": gguf.GGMLQuantizationType.Q4_0}[kind]  # fmt: skip
    if kind.endswith("_0") and array.shape[-1] % 32:
        wanted = gguf.GGMLQuantizationType.F16  # as the converter does for rows that do not divide
    writer.add_tensor(name, gguf.quants.quantize(array, wanted), raw_dtype=wanted)


def _header(config: Any, architecture: str, metadata: dict[str, Any]) -> dict[str, Any]:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    base = rope["full_attention"]["rope_theta"] if architecture == "gemma3" else rope["rope_theta"]
    header: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(base),
    }
    if architecture in ("gemma2", "gemma3", "phi3"):
        header["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "gemma2":
        header["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        header["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if architecture == "phi3":
        header["rope.dimension_count"] = int(head_dim * rope["partial_rotary_factor"])
    if (experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)) is not None:
        header["expert_count"], header["expert_used_count"] = experts, config.num_experts_per_tok
    if "moe" in architecture:
        header["expert_feed_forward_length"] = config.moe_intermediate_size
    if architecture == "qwen2moe":
        header["expert_shared_feed_forward_length"] = config.shared_expert_intermediate_size
    header.update(metadata)
    return {key: value for key, value in header.items() if value is not None}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
