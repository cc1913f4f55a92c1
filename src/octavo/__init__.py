"""Octavo: a PagedAttention inference engine.

    from octavo import LLM, SamplingParams
    llm = LLM()
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Names are loaded on first use (PEP 562), so `import octavo` costs neither torch nor a tokenizer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.attention import PagedAttention, PagedStats
    from octavo.config import EngineConfig
    from octavo.engine import Engine
    from octavo.errors import (
        AuditError,
        CapacityError,
        ConfigError,
        InternalError,
        ModelError,
        OctavoError,
        PromptError,
        RequestError,
        SamplingError,
        UnavailableError,
    )
    from octavo.functional import copy_blocks, paged_attention, slot_mapping, write_kv
    from octavo.llm import LLM
    from octavo.outputs import (
        BeamSearchOutput,
        BeamSequence,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        RequestOutput,
        StreamDelta,
    )
    from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputs

__version__ = "0.1.0"

_HOME = {
    "AuditError": "errors",
    "BeamSearchOutput": "outputs",
    "BeamSearchParams": "sampling_params",
    "BeamSequence": "outputs",
    "CapacityError": "errors",
    "CompletionOutput": "outputs",
    "ConfigError": "errors",
    "EmbeddingOutput": "outputs",
    "Engine": "engine",
    "EngineConfig": "config",
    "InternalError": "errors",
    "LLM": "llm",
    "Logprob": "outputs",
    "ModelError": "errors",
    "OctavoError": "errors",
    "PagedAttention": "attention",
    "PagedStats": "attention",
    "PoolingParams": "sampling_params",
    "PromptError": "errors",
    "RequestError": "errors",
    "RequestOutput": "outputs",
    "SamplingError": "errors",
    "SamplingParams": "sampling_params",
    "StreamDelta": "outputs",
    "StructuredOutputs": "sampling_params",
    "UnavailableError": "errors",
    "copy_blocks": "functional",
    "paged_attention": "functional",
    "slot_mapping": "functional",
    "write_kv": "functional",
}

__all__ = [  # noqa: RUF022 (plain sorted order, as the test asks)
    "AuditError",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSequence",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "Engine",
    "EngineConfig",
    "InternalError",
    "LLM",
    "Logprob",
    "ModelError",
    "OctavoError",
    "PagedAttention",
    "PagedStats",
    "PoolingParams",
    "PromptError",
    "RequestError",
    "RequestOutput",
    "SamplingError",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutputs",
    "UnavailableError",
    "__version__",
    "copy_blocks",
    "paged_attention",
    "slot_mapping",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"octavo.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
