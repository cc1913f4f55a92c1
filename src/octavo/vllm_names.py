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
    "enable_lora": False,
    "fully_sharded_loras": False,
    "lora_dtype": "auto",
    "max_cpu_loras": None,
    "max_lora_rank": None,
    "pipeline_parallel_size": 1,
    "revision": None,
    "tensor_parallel_size": 1,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "trust_remote_code": False,
}
#: What to do instead, where leaving a setting out is not all there is to say.
_ADAPTERS = "adapters of any rank may be loaded at any time: with lora={name: directory}, load_lora(), or lora_request="
REMEDIES = dict.fromkeys(("enable_lora", "max_lora_rank", "max_cpu_loras"), _ADAPTERS)


def config_from(**given: Any) -> EngineConfig:
    """`EngineConfig` from settings of ours or of vLLM's that ask for nothing; raises ConfigError for all others."""
    for name in sorted(set(given) & set(NEUTRAL)):
        value = given.pop(name)
        if value != NEUTRAL[name]:
            instead = REMEDIES.get(name, f"or give {name}={NEUTRAL[name]!r}")
            raise ConfigError(f"{name}={value!r} would have no effect here; leave it out ({instead})")
    if "speculative_config" in given:
        if "speculative" in given:
            raise ConfigError("speculative and speculative_config are the same setting; give one of them")
        given["speculative"] = given.pop("speculative_config")
    return make_config(**given)
