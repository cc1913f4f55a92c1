"""Pieces that the answers of several routes share: ids, token counts, finish reasons."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from octavo.outputs import RequestOutput

#: What the OpenAPI document says of answers that may be streamed.
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/json": {}, "text/event-stream": {}}, "description": "whole, or with stream: events"}
}


def new_id(prefix: str) -> str:
    """Such as "chatcmpl-6b0c…": unguessable, so that nobody can name another's answer."""
    return f"{prefix}-{secrets.token_hex(12)}"


def now() -> int:
    return int(time.time())


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens really computed for: prompts once each, all samples; what the prefix cache gave is counted apart."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
