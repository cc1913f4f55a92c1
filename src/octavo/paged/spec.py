"""What kernels are built from when there is no model: a `ModelSpec`, of which only what attention looks at is meant.

And the checks of settings that `PagedAttention`, its functions and the transformers cache share. Every one of them
raises `ConfigError` with the name and the value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from octavo.core.whole_numbers import whole
from octavo.devices import Device, device_of
from octavo.errors import ConfigError
from octavo.kernels.interface import BACKENDS
from octavo.models.spec import ModelSpec

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def at_least_one(name: str, value: Any) -> int:
    """`value` as an int of at least 1."""
    number = whole(name, value, ConfigError)
    if number < 1:
        raise ConfigError(f"{name}={number}: must be a whole number of at least 1")
    return number


def float_dtype(dtype: Any) -> torch.dtype:
    """A torch dtype, or its name as in the engine's settings; None and "auto": torch's default."""
    if dtype is None or (isinstance(dtype, str) and dtype == "auto"):
        return torch.get_default_dtype()
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ConfigError(
            f"dtype={dtype!r}: must be one of auto, {', '.join(DTYPES)}, a torch.dtype of floats, or None"
        )
    if not found.is_floating_point or found.itemsize < 2:
        raise ConfigError(
            f"dtype={found}: keys and values are floats of 16 bits or more; kv_cache_dtype quantises them"
        )
    return found


def pool_device(device: Any) -> Device:
    """The device of a name or a torch.device, if torch sees it."""
    if not isinstance(device, str | torch.device):
        raise ConfigError(f"device={device!r}: must be a torch.device or a name: cpu, cuda, cuda:1, npu, or auto")
    name = str(device)
    return device_of("cpu" if name.startswith("cpu:") and name[4:].isdecimal() else device)


def check_backend(backend: Any) -> None:
    """Is there one of this name? Whether it can be used shows when it is made."""
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")


def _positive(name: str, value: Any, otherwise: str) -> float | None:
    if value is None:
        return None
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number < math.inf:
        raise ConfigError(f"{name}={value!r}: must be a number above 0, or None for {otherwise}")
    return number


def _windows(sliding_window: Any, num_layers: int) -> tuple[int | None, ...]:
    """One per layer."""
    if hasattr(sliding_window, "tolist"):
        sliding_window = sliding_window.tolist()
    if isinstance(sliding_window, Sequence) and not isinstance(sliding_window, str):
        if len(sliding_window) != num_layers:
            raise ConfigError(
                f"sliding_window has {len(sliding_window)} entries for num_layers={num_layers}; one per layer"
            )
        return tuple(window_of(window) for window in sliding_window)
    return (window_of(sliding_window),) * num_layers


def window_of(window: Any) -> int | None:
    """Of one layer: what a query sees, itself included; None sees all."""
    if window is None:
        return None
    number = whole("sliding_window", window, ConfigError)
    if number < 1:
        raise ConfigError(f"sliding_window={window!r}: must be at least 1, or None for a layer that sees all")
    return number


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
    num_heads, num_kv_heads, head_dim, num_layers = (at_least_one(name, given) for name, given in numbers.items())
    if num_heads % num_kv_heads:
        raise ConfigError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
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
        windows=_windows(sliding_window, num_layers),
        rotaries=(),
        rotary=(None,) * num_layers,
        attention_scale=_positive("scale", scale, "head_dim ** -0.5"),
        attention_softcap=_positive("softcap", softcap, "no cap"),
    )
