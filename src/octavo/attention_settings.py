"""On an NPU: the attention backend and the block size that goes with it, before the pool is laid out.

Used by the builder only. A block size that was asked for is never changed: where the operators of the device cannot
read it, that is an error with the remedy.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from octavo.config import Choice, EngineConfig
from octavo.devices import Device
from octavo.errors import ConfigError
from octavo.logs import logger
from octavo.models.spec import ModelSpec


def settle_blocks(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: Device
) -> tuple[EngineConfig, tuple[Choice, ...]]:
    """The config with backend and block size where the device is an NPU, and what was chosen. Raises `ConfigError`."""
    if config.attention_backend == "ascend" and device.kind != "npu":
        raise ConfigError(
            f"attention_backend='ascend' calls operators of an NPU, and the device is {device.kind}; "
            "use attention_backend='auto', or device='npu'"
        )
    if device.kind != "npu" or config.attention_backend not in ("auto", "ascend"):
        return config, ()
    from octavo.kernels import ascend  # for NPUs alone

    config, choices = _settle_npu(config, spec, dtype, device)
    if config.attention_backend == "ascend" and config.block_size is None:
        why = "what torch_npu's fused attention is made for"
        choices.append(Choice("block_size", None, ascend.DEFAULT_BLOCK_SIZE, why))
        config = replace(config, block_size=ascend.DEFAULT_BLOCK_SIZE)
    return config, tuple(choices)


def _settle_npu(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: Device
) -> tuple[EngineConfig, list[Choice]]:
    """torch_npu's operators where they can run this model, else plain torch, said with the reason."""
    from octavo.kernels import ascend

    asked = config.attention_backend
    reason = ascend.chip_mismatch(device.name) or ascend.model_mismatch(spec, dtype, config.kv_cache_dtype)
    if reason and asked == "ascend":
        raise ConfigError(
            f"attention_backend='ascend' cannot be used: {reason}; attention_backend='reference' can (plain torch "
            "operations, slower)"
        )
    if reason:
        logger.warning("attention runs as plain torch operations, slowly: %s", reason)
        chosen = replace(config, attention_backend="reference")
        return chosen, [Choice("attention_backend", asked, "reference", reason)]
    if config.block_size is not None and (problem := ascend.block_size_mismatch(config.block_size)):
        raise ConfigError(problem)
    choices = []
    if asked == "auto":
        choices.append(Choice("attention_backend", asked, "ascend", "torch_npu's fused attention can run this model"))
    longest = config.max_model_len or spec.max_position_embeddings
    if longest > ascend.MAX_CONTEXT:
        if config.max_model_len is not None:
            raise ConfigError(
                f"max_model_len={longest}: torch_npu's fused attention reads {ascend.MAX_CONTEXT} tokens at most; use "
                "that, or attention_backend='reference' (plain torch operations, slower)"
            )
        why = f"torch_npu's fused attention reads no more of the model's {longest} positions"
        choices.append(Choice("max_model_len", None, ascend.MAX_CONTEXT, why))
        config = replace(config, max_model_len=ascend.MAX_CONTEXT)
    return replace(config, attention_backend="ascend"), choices
