"""Adapters by name: which are loaded, who uses them, and when their memory is free again.

An adapter is known by the hash of its content (`key`), which is also its part of the prefix cache's keys; a name only
points at one. Two names may share one adapter, and a name may be given to another after it was dropped. Dropping takes
the name away at once; requests that run with the adapter finish with it, and its memory goes with the last of them.

Knows no tensors: the bank in the runner holds those. One thread at a time, the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError, RequestError
from octavo.text.prompts import Prompt, one_each

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.devices import Device
    from octavo.engine import Engine
    from octavo.models.load import LoadedModel
    from octavo.models.lora_reader import AdapterFiles
    from octavo.runner.lora import LoraBank
    from octavo.runner.model_runner import ModelRunner

Lora = str | Sequence[str | None] | None  # one adapter's name for all prompts, or one each


@dataclass(frozen=True)
class LoRARequest:
    """vLLM's way of naming an adapter: loaded from `lora_path` when its name is used first. The number is not used."""

    lora_name: str
    lora_int_id: int
    lora_path: str


@dataclass(frozen=True)
class LoadedAdapter:
    """What callers see of a loaded adapter. key: hash of its content; loaded_at: Unix time in seconds."""

    name: str
    path: str
    key: str
    max_rank: int
    loaded_at: int


class Adapters:
    """One per engine. bank: made when the first adapter comes. max_loras: adapters of different content at once."""

    def __init__(self, make_bank: Callable[[], LoraBank] | None, max_loras: int) -> None:
        self._make_bank = make_bank
        self._max_loras = max_loras
        self._bank: Any = None
        self._names: dict[str, LoadedAdapter] = {}
        self.dropped = False  # is there an adapter in memory without a name?

    def __iter__(self) -> Iterator[LoadedAdapter]:
        return iter(list(self._names.values()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    @property
    def nbytes(self) -> int:
        """Bytes that adapters take."""
        return 0 if self._bank is None else int(self._bank.nbytes)

    def key_of(self, name: str | None) -> str | None:
        """The key that a request for the adapter `name` gets; None for the model itself. Raises `RequestError`."""
        if name is None:
            return None
        if not isinstance(name, str) or name not in self._names:
            loaded = ", ".join(map(repr, self._names)) or "none"
            raise RequestError(f"lora={name!r}: no adapter of this name is loaded; loaded: {loaded}")
        return self._names[name].key

    def load(self, name: str, files: AdapterFiles) -> LoadedAdapter:
        """Give an adapter a name. Raises `RequestError` for a name in use or an adapter too many, else `ModelError`."""
        if not name or not isinstance(name, str):
            raise RequestError(f"lora name {name!r}: must be a non-empty string")
        if (there := self._names.get(name)) is not None:
            same = " with the same content" if there.key == files.key else ""
            raise RequestError(f"lora {name!r} is loaded already{same}, from {there.path}; drop it first")
        if self._bank is None:
            if self._make_bank is None:
                raise ConfigError("this engine has no model that adapters could change")
            self._bank = self._make_bank()
        if files.key not in self._bank:
            if len(self._bank) >= self._max_loras:
                raise RequestError(
                    f"lora {name!r}: {len(self._bank)} adapters are in memory, max_loras={self._max_loras}; drop one "
                    "(and let its requests finish), or raise max_loras"
                )
            self._bank.add(files)
        self._names[name] = LoadedAdapter(name, str(files.path), files.key, files.max_rank, int(time.time()))
        return self._names[name]

    def drop(self, name: str) -> None:
        """Take a name away; `sweep` frees the memory. Raises `RequestError` for one that is not there."""
        self.key_of(name)
        del self._names[name]
        self.dropped = True

    def sweep(self, in_use: Callable[[str], bool]) -> None:
        """Free adapters that have no name any more and that no request uses. No step may be in flight."""
        if self._bank is None:
            return
        named = {adapter.key for adapter in self._names.values()}
        nameless = [key for key in self._bank.keys() if key not in named]  # noqa: SIM118
        for key in nameless:
            if not in_use(key):
                self._bank.remove(key)
        self.dropped = any(key in self._bank for key in nameless)


def load_adapters(config: EngineConfig, model: LoadedModel, runner: ModelRunner, device: Device) -> Adapters:
    """The adapters of an engine, with those of `config.lora` loaded. Raises `ConfigError`."""
    from octavo.kernels import cpu
    from octavo.kernels.ops import TorchOps
    from octavo.models.lora_reader import read_adapter
    from octavo.runner.lora import LoraBank

    def make_bank() -> LoraBank:
        native = device.kind == "cpu" and config.attention_backend != "reference"
        dtype = model.decoder.activation_dtype
        bank = LoraBank(model.decoder, cpu.make_ops(dtype) if native else TorchOps(), dtype)
        runner.watch_batches(bank.select, bank.recordable)
        return bank

    adapters = Adapters(make_bank, config.max_loras)
    assert config.lora is None or not isinstance(config.lora, str)
    for name, path in (config.lora or {}).items():
        adapters.load(name, read_adapter(path))
    return adapters


def with_adapters(engine: Engine, prompts: list[Prompt], lora: Lora, lora_request: Any = None) -> list[Prompt]:
    """The prompts with the adapters they run with; a `lora_request` is loaded first where its name is not.

    Raises `RequestError` for a name that is not loaded, one that contradicts the prompt's own, or a request whose name
    stands for another directory.
    """
    if lora_request is not None:
        if lora is not None:
            raise RequestError("lora and lora_request say the same thing; give one of them")
        wanted = one_each(lora_request, len(prompts), "lora requests")
        for request in wanted:
            if request is not None:
                _load_request(engine, request)
        lora = [None if request is None else request.lora_name for request in wanted]
    if lora is not None:
        names = one_each(lora, len(prompts), "lora names")
        prompts = [_adapted(*each) for each in zip(range(len(prompts)), prompts, names, strict=True)]
    for name in dict.fromkeys(prompt.lora for prompt in prompts if prompt.lora is not None):
        engine.adapters.key_of(name)
    return prompts


def _adapted(index: int, prompt: Prompt, name: str | None) -> Prompt:
    if name is None:
        return prompt
    if prompt.lora not in (None, name):
        raise RequestError(f"prompt {index}: its own lora={prompt.lora!r} contradicts lora={name!r}; give one of them")
    return replace(prompt, lora=name)


def _load_request(engine: Engine, request: Any) -> None:
    there = next((a for a in engine.adapters if a.name == request.lora_name), None)
    if there is None:
        engine.load_lora(request.lora_name, request.lora_path)
    elif there.path != str(Path(request.lora_path).expanduser()):
        raise RequestError(
            f"lora {there.name!r} is loaded from {there.path}, not from {request.lora_path}; drop it first"
        )
