"""Native CPU kernels. None are built in this installation; the reference backend runs instead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.kernels.interface import AttentionBackend, KVCache
    from octavo.models.spec import ModelSpec


def supports(cache: KVCache, spec: ModelSpec) -> bool:
    """Whether the native kernels can run this model."""
    return False


def why_unavailable(cache: KVCache, spec: ModelSpec) -> str:
    """The reason `supports` is false."""
    return "this installation was built without the native kernels"


def NativeAttention(cache: KVCache, spec: ModelSpec) -> AttentionBackend:  # noqa: N802
    """Refused: see `why_unavailable`."""
    raise ConfigError(why_unavailable(cache, spec))
