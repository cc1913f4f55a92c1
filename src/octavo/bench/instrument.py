"""`StepProfile`: where the time of a step goes, section by section, each moment counted once.

The runner names the sections of a step (prepare, model, head, sample); this class also stands in front of the dense
operations and the attention backend, so that the model's share splits into products, attention, KV writes and small
operations. Time in an inner section is taken off the outer one. Where all layers run in one native call, that call
counts the same parts itself.
On a GPU every section waits for the device, which costs overlap: shares are right, the total is longer than that of
an unwatched step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from octavo.config import make_config
from octavo.kernels.quantized_weights import JoinedLinear
from octavo.progress import LoadProgress

if TYPE_CHECKING:
    from octavo.engine import Engine
    from octavo.kernels.interface import AttentionBackend
    from octavo.kernels.layer_stack import StackParts
    from octavo.kernels.ops import Ops

Result = TypeVar("Result")

PRODUCTS, ATTENTION, SMALL, HEAD = "products", "attention", "small operations", "head"
KV_WRITE = "KV write"  # and rotation, where a backend does both in one pass
_STACK_SECTIONS = {"products": PRODUCTS, "attention": ATTENTION, "rotation": KV_WRITE, "small": SMALL}
_BACKEND_SECTIONS = {"attend": ATTENTION, "write": KV_WRITE, "rotate_and_write": KV_WRITE}


@dataclass(slots=True)
class _Frame:
    """An open section and the seconds spent in sections inside it."""

    name: str
    inner: float = 0.0


class StepProfile:
    """Sums of seconds per section since `reset`. Implements the builder's `Instrument`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.entries = 0  # sections entered, to estimate what watching costs
        self.wait: Callable[[], None] = lambda: None  # until the device has done what it was given
        self._open: list[_Frame] = []

    def reset(self) -> None:
        self.seconds.clear()
        self.entries = 0

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Count the body to `name`, but for the sections inside it."""
        frame = _Frame(name)
        self._open.append(frame)
        self.entries += 1
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.wait()
            spent = time.perf_counter() - begin
            self._open.pop()
            self.seconds[name] += spent - frame.inner
            if self._open:
                self._open[-1].inner += spent

    def timed(self, name: str, act: Callable[..., Result]) -> Callable[..., Result]:
        """`act`, counted to `name`. Inside the head everything is the head's."""

        def run(*args: Any, **kwargs: Any) -> Result:
            if self._open and self._open[-1].name == HEAD:
                return act(*args, **kwargs)
            with self.section(name):
                return act(*args, **kwargs)

        return run

    def ops(self, inner: Ops) -> Ops:
        return cast("Ops", _TimedOps(self, inner))

    def backend(self, inner: AttentionBackend) -> AttentionBackend:
        return cast("AttentionBackend", _TimedCalls(self, inner, _BACKEND_SECTIONS, None))

    def add(self, parts: dict[str, float]) -> None:
        """Count seconds that others measured inside the open section. Taken for as dear as a section each."""
        for name, seconds in parts.items():
            self.seconds[name] += seconds
            self._open[-1].inner += seconds
            self.entries += 1

    def cost_of_watching(self) -> float:
        """Seconds that the sections entered since `reset` added, by timing empty ones."""
        entries, count = self.entries, 2000
        probe = StepProfile()
        begin = time.perf_counter()
        for _ in range(count):
            with probe.section(""):
                pass
        return entries * (time.perf_counter() - begin) / count


class _TimedCalls:
    """Stands in front of an object: calls of methods named in `sections` are timed, the others by `default` or not."""

    def __init__(self, profile: StepProfile, inner: Any, sections: dict[str, str], default: str | None) -> None:
        self._profile = profile
        self._inner = inner
        self._sections = sections
        self._default = default

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        section = self._sections.get(name, self._default)
        if section is None or not callable(value):
            return value
        timed = self._profile.timed(section, value)
        self.__dict__[name] = timed  # the next look-up does not come here
        return timed


class _TimedOps(_TimedCalls):
    """Products get their own section, all other operations are small."""

    def __init__(self, profile: StepProfile, inner: Any) -> None:
        super().__init__(profile, inner, {}, SMALL)

    def linear(self, *args: Any, **kwargs: Any) -> _TimedLinear:
        return _TimedLinear(self._profile, self._inner.linear(*args, **kwargs))

    def quantized_linear(self, *args: Any, **kwargs: Any) -> _TimedLinear:
        return _TimedLinear(self._profile, self._inner.quantized_linear(*args, **kwargs))

    def queued_linear(self, *args: Any, **kwargs: Any) -> _TimedLinear:
        return _TimedLinear(self._profile, self._inner.queued_linear(*args, **kwargs))

    def layer_stack(self, parts: StackParts) -> _TimedStack | str:
        """The one that runs unwatched, which counts its own parts."""
        make = getattr(self._inner, "layer_stack", None)
        if make is None:
            return f"the {self._inner.name} operations have none"
        names = ("qkv", "out", "gate_up", "down")
        layers = [replace(layer, **{name: _bare(getattr(layer, name)) for name in names}) for layer in parts.layers]
        stack = make(replace(parts, layers=tuple(layers)))
        return stack if isinstance(stack, str) else _TimedStack(self._profile, stack)


class _TimedStack:
    """Layers that run in one call: the seconds of its parts go where those of single operations would."""

    def __init__(self, profile: StepProfile, inner: Any) -> None:
        self._profile, self._inner = profile, inner

    def serves(self, attention: Any) -> bool:
        return bool(self._inner.serves(_bare(attention)))

    def run(self, residual: Any, positions: Any, tables: Any, attention: Any) -> Any:
        self._inner.watch()
        hidden = self._inner.run(residual, positions, tables, _bare(attention))
        self._profile.add({_STACK_SECTIONS[part]: seconds for part, seconds in self._inner.seconds().items()})
        return hidden


def _bare(watched: Any) -> Any:
    """What a timed object stands in front of; others as they are. Of products side by side: of each."""
    if isinstance(watched, JoinedLinear):
        return JoinedLinear([_bare(part) for part in watched.parts])
    return watched._inner if isinstance(watched, (_TimedCalls, _TimedLinear)) else watched


class _TimedLinear:
    """One product. Everything else about the packed weight is asked of the inner one."""

    def __init__(self, profile: StepProfile, inner: Any) -> None:
        self._inner = inner
        self._timed = profile.timed(PRODUCTS, inner)

    def __call__(self, x: Any) -> Any:
        return self._timed(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def build_profiled(settings: dict[str, Any], **more: Any) -> tuple[Engine, StepProfile]:
    """An engine that is watched from inside."""
    from octavo.builder import build_engine
    from octavo.devices import find_device

    profile, progress = StepProfile(), LoadProgress()
    try:
        engine = build_engine(make_config(**{**settings, **more}), progress, profile)
    finally:
        progress.close()
    profile.wait = find_device(engine.config.device).synchronize
    profile.reset()
    return engine, profile
