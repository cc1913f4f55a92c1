"""Which layers of a config have a sliding window, and how wide it is. A list in the config decides, not the number."""

from __future__ import annotations

from typing import Any

from octavo.errors import ModelError
from octavo.models.families.base import Reader

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(read: Reader, layers: int) -> tuple[tuple[str, ...], int | None]:
    """Layer type of each layer and the window of the sliding ones."""
    family, full = read.family, (FULL,) * layers
    if family.windows == "none":
        return full, None
    off = "use_sliding_window" in family.keys and not read.flag("use_sliding_window")
    window = None if off or read.get("sliding_window") is None else read.positive("sliding_window")
    given = read.config.get("layer_types")
    if given is not None:
        return _given(given, layers, window), window
    if window is None or family.windows == "given":
        return full, None
    if family.windows == "all":
        return (SLIDING,) * layers, window
    if family.windows == "qwen":
        first = read.count("max_window_layers")
        return tuple(SLIDING if i >= first else FULL for i in range(layers)), window
    if family.windows == "qwen_moe":
        last = read.count("max_window_layers")
        return tuple(SLIDING if i % 2 == 0 and i < last else FULL for i in range(layers)), window
    pattern = read.config.get("sliding_window_pattern", family.pattern)
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise read.refused("sliding_window_pattern", pattern, "an integer of at least 1")
    return tuple(SLIDING if (i + 1) % pattern else FULL for i in range(layers)), window


def _given(given: Any, layers: int, window: int | None) -> tuple[str, ...]:
    if not isinstance(given, list) or len(given) != layers:
        raise ModelError(f"config: layer_types={given!r}: must be a list of {layers} entries, one per layer")
    unknown = sorted({str(t) for t in given} - {FULL, SLIDING})
    if unknown:
        raise ModelError(f"config: layer_types holds {', '.join(unknown)}; supported: {FULL}, {SLIDING}")
    if SLIDING in given and window is None:
        raise ModelError("config: layer_types has sliding_attention but sliding_window is missing")
    return tuple(given)
