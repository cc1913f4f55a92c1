"""The `ModelSpec` that kernels are built from, when there is no model: only what attention looks at is meant."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.errors import ConfigError
from octavo.models.spec import ModelSpec


def attention_spec(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_layers: int = 1,
    scale: float | None = None,
    sliding_window: int | Sequence[int | None] | None = None,
    softcap: float | None = None,
) -> ModelSpec:
    """Checked numbers as a spec; `ConfigError` names the one that does not fit."""
    numbers = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "num_layers": num_layers}
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"{name}={number!r}: must be a whole number of at least 1")
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"softcap={softcap!r}: must be above 0, or None for no cap")
    one = sliding_window is None or isinstance(sliding_window, int)
    windows = (sliding_window,) * num_layers if one else tuple(sliding_window)  # type: ignore[arg-type]
    if len(windows) != num_layers:
        raise ConfigError(f"sliding_window has {len(windows)} entries for num_layers={num_layers}; one per layer")
    for window in windows:
        if window is not None and (not isinstance(window, int) or window < 1):
            raise ConfigError(f"sliding_window={window!r}: must be at least 1, or None for a layer that sees all")
    return ModelSpec(
        architecture="attention",
        vocab_size=1,
        hidden_size=num_heads * head_dim,
        intermediate_size=1,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1,
        rms_norm_eps=1e-6,
        windows=windows,  # type: ignore[arg-type]
        rotaries=(),
        rotary=(None,) * num_layers,
        attention_scale=scale,
        attention_softcap=softcap,
    )
