"""vLLM's engine settings: names that differ, and those that have no counterpart here.

The latter may only be given the value that asks for nothing.
"""

from __future__ import annotations

from typing import Any

from octavo.config import EngineConfig, make_config
from octavo.errors import ConfigError

NEUTRAL: dict[str, Any] = {
    "cpu_offload_gb": 0,
    "data_parallel_size": 1,
    "disable_log_stats": True,
    "enable_chunked_prefill": True,
    "pipeline_parallel_size": 1,
    "revision": None,
    "tensor_parallel_size": 1,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "trust_remote_code": False,
}


def config_from(**given: Any) -> EngineConfig:
    """`EngineConfig` from settings of ours or of vLLM's that ask for nothing; raises ConfigError for all others."""
    for name in sorted(set(given) & set(NEUTRAL)):
        value = given.pop(name)
        if value != NEUTRAL[name]:
            raise ConfigError(
                f"{name}={value!r} would have no effect here; leave it out (or give {name}={NEUTRAL[name]!r})"
            )
    if "speculative_config" in given:
        if "speculative" in given:
            raise ConfigError("speculative and speculative_config are the same setting; give one of them")
        given["speculative"] = given.pop("speculative_config")
    return make_config(**given)
