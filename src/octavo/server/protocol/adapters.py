"""Bodies of /v1/load_lora_adapter and /v1/unload_lora_adapter, under vLLM's names."""

from __future__ import annotations

from pydantic import Field

from octavo.server.protocol.common import Body


class LoadAdapterBody(Body):
    lora_name: str = Field(min_length=1, max_length=256, description="what requests will give as their model")
    lora_path: str = Field(min_length=1, max_length=4096, description="a directory on the server's machine")


class UnloadAdapterBody(Body):
    lora_name: str = Field(min_length=1, max_length=256)
