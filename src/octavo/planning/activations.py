"""What the largest step takes above weights and KV: an estimate from a model's sizes. Pure."""

from __future__ import annotations

from octavo.planning.shapes import ModelShape, dtype_bytes

LOGITS_BYTES = 64 << 20  # the runner computes at most so many bytes of float32 logits at once


def activation_bytes(shape: ModelShape, dtype: str, *, device: str, tokens: int, sequences: int) -> int:
    """Bytes that the largest step takes above weights and KV: the widest moment of a layer, and the logits.

    tokens, sequences: of that step. On a CPU activations are float32 whatever the weights, and the C allocator keeps
    what the layers took while the sampler works, so both count; a caching GPU allocator takes the larger of the two.
    """
    width = 4 if device == "cpu" else dtype_bytes(dtype)
    sequences = min(sequences, tokens)
    heads, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention = heads + 2 * kv + heads + kv + heads  # fused product, rotated q and k, mixed heads
    mlp = 3 * shape.intermediate_size  # gate and up, their product
    layer = tokens * width * (3 * shape.hidden_size + max(attention, mlp))
    rows = min(sequences, max(1, LOGITS_BYTES // (4 * shape.vocab_size)))
    logits, hidden = rows * shape.vocab_size * 4, tokens * shape.hidden_size * width
    # A GPU's sampler sorts into a second copy; on a CPU it works in place.
    return layer + hidden + logits if device == "cpu" else max(layer, hidden + 2 * logits)


def rotary_bytes(shape: ModelShape, device: str, longest: int) -> int:
    """cos and sin tables, float32, a pair for each kind of layer. On a CPU they grow as positions come."""
    positions = shape.max_position_embeddings if device != "cpu" else min(longest, 4096)
    return (len({w is None for w in shape.windows}) or 1) * 2 * positions * shape.head_dim * 4
