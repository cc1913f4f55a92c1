"""A model by name: files found, spec read, weights built into a decoder, tokenizer beside it.

`read_spec` does the first half without touching weights, for `octavo info` and the planner.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.config import EngineConfig
from octavo.core.weight_format import worth_screening
from octavo.devices import device_of
from octavo.errors import ConfigError, ModelError
from octavo.host_memory import give_memory_back
from octavo.models.config_reader import spec_from_config
from octavo.models.decoder import Decoder
from octavo.models.dummy_loader import open_dummy
from octavo.models.quantized_files.entries import refuse_idle_quantization
from octavo.models.resolve import ModelFiles, resolve_model
from octavo.models.rope_reader import for_length
from octavo.models.safetensors_loader import (
    SafetensorsFiles,
    head_state,
    open_safetensors,
    quantization_of,
    read_json,
)
from octavo.models.spec import ModelSpec
from octavo.models.staging import StagedWeights
from octavo.models.transformers_decoder import TransformersDecoder
from octavo.models.transformers_loader import choose_impl
from octavo.models.weight_size import StoredSizes
from octavo.models.weights import LazyWeights, Progress

if TYPE_CHECKING:
    from octavo.kernels.ops import Ops
    from octavo.models.gguf_file import GGUFFile
    from octavo.models.quantized_files import Scheme
    from octavo.models.tokenizer import Tokenizer

AnyDecoder = Decoder | TransformersDecoder
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """What the engine needs of a model. weight_bytes: in memory, a tied head once. source: the file or directory.

    screen_bytes: of `weight_bytes` those of the output head's screen (`EngineConfig.screen_head`), 0 without one; why.
    """

    spec: ModelSpec
    decoder: AnyDecoder
    tokenizer: Tokenizer | None
    weight_bytes: int
    source: Path
    impl: str = "octavo"
    impl_why: str = "its own decoder covers the model"
    screen_bytes: int = 0
    screen_why: str = "not asked for"


def pick_dtype(spec_dtype: str, device: str) -> torch.dtype:
    """`EngineConfig.dtype` -> torch dtype. auto: bfloat16 where the device multiplies it natively, else float32.

    A CPU without bfloat16 arithmetic widens every weight, or with AVX2 multiplies integers (docs/fixed-point.md), which
    is faster and takes half the memory. auto keeps float32 there, whose text equals the reference's.
    """
    if spec_dtype != "auto":
        return DTYPES[spec_dtype]
    where = device_of(device)
    if where.supports_bfloat16():
        return torch.bfloat16
    return torch.float32 if where.kind == "cpu" else torch.float16


def _open_gguf_file(path: Path) -> GGUFFile:
    """The package that knows the format takes a tenth of a second to import, which other files do without."""
    from octavo.models.gguf_file import GGUFFile

    return GGUFFile(path)


class _Source:
    """The opened files of one model: its spec, and weights on demand."""

    def __init__(self, files: ModelFiles, load_format: str, model_impl: str = "octavo") -> None:
        self.files, self._dummy = files, load_format == "dummy"
        self.foreign, self.impl_why = choose_impl(files, load_format, model_impl)
        self._gguf = _open_gguf_file(files.path) if files.kind == "gguf" else None
        self._tensors: SafetensorsFiles | None = None
        self.scheme: Scheme | None = None
        if self._gguf is not None:
            from octavo.models.gguf_reader import spec_from_gguf

            self.spec = spec_from_gguf(self._gguf)
            return
        if self.foreign is not None:
            if self.foreign.spec is not None:
                self.spec = self._with_ends(self.foreign.spec)
            return
        if not self._dummy:
            self._tensors = SafetensorsFiles(files.path)
        path = files.path / "config.json"
        try:
            config = read_json(path)
            self.scheme = quantization_of(files.path, config)
            head = None if self._tensors is None else head_state(self._tensors, self.scheme)
            spec = spec_from_config(config, head)
        except ModelError as error:
            raise ModelError(f"{path}: {str(error).removeprefix('config: ').removeprefix(f'{path}: ')}") from error
        self.spec = self._with_ends(spec)

    @property
    def is_gguf(self) -> bool:
        return self._gguf is not None

    def _with_ends(self, spec: ModelSpec) -> ModelSpec:
        return replace(spec, eos_token_ids=_generation_ends(self.files.path) or spec.eos_token_ids)

    def decoder(
        self, dtype: torch.dtype, device: torch.device | str, ops: Ops, seed: int | None, on_progress: Progress | None
    ) -> tuple[AnyDecoder, LazyWeights | None]:
        """The decoder, and the weights it is still being filled from."""
        if self.foreign is None:
            weights = self.weights(dtype, seed, on_progress, device)
            if self.scheme is not None:
                refuse_idle_quantization(str(self.files.path), self.scheme, weights, getattr(ops, "quantization", None))
            where = device_of(device)
            staged = StagedWeights(weights, where) if where.kind == "cuda" else weights
            return Decoder(self.spec, staged, ops, dtype, device, defer=True), weights
        from octavo.models.transformers_loader import build_decoder

        decoder = build_decoder(self.foreign, ops, dtype, device, seed)
        decoder.spec = self.spec = self._with_ends(decoder.spec)
        if on_progress is not None:
            on_progress(decoder.weight_bytes, decoder.weight_bytes)
        return decoder, None

    def weights(
        self, dtype: torch.dtype, seed: int | None, on_progress: Progress | None, device: torch.device | str = "cpu"
    ) -> LazyWeights:
        if self._dummy:
            if self.scheme is not None:
                raise ModelError(
                    f"{self.files.path}: load_format='dummy' makes no {self.scheme.describe()} weights; "
                    "remove quantization_config from a copy of config.json, and give quantization= instead"
                )
            return open_dummy(self.spec, dtype, seed, on_progress, device)
        if self._gguf is not None:
            from octavo.models.gguf_loader import open_gguf

            return open_gguf(self._gguf, self.spec, dtype, on_progress)
        assert self._tensors is not None
        return open_safetensors(self._tensors, self.spec, on_progress, self.scheme)

    def tokenizer(self) -> Tokenizer:
        from octavo.models.tokenizer_files import load_tokenizer_directory, load_tokenizer_gguf

        if self._gguf is not None:
            return load_tokenizer_gguf(self._gguf)
        return load_tokenizer_directory(self.files.path, self.spec.eos_token_ids, self.spec.bos_token_id)


def _generation_ends(directory: Path) -> tuple[int, ...]:
    """End-of-text ids of generation_config.json, which lists more of them than config.json does."""
    path = directory / "generation_config.json"
    given: Any = read_json(path) if path.is_file() else {}
    ids = given.get("eos_token_id") if isinstance(given, Mapping) else None
    ids = ids if isinstance(ids, list) else [ids]
    return tuple(i for i in ids if isinstance(i, int))


def read_spec(name: str, load_format: str = "auto", model_impl: str = "auto") -> ModelSpec:
    """The spec of a model from headers alone; `extra["model_impl"]` says "transformers" where that library will run it.

    Raises `ModelError`.
    """
    return _examined(name, load_format, model_impl).spec


def read_sizes(name: str, load_format: str = "auto", model_impl: str = "auto") -> StoredSizes:
    """What a model's files say of the size of its weights, from headers alone. Raises `ModelError`."""
    source = _examined(name, load_format, model_impl)
    packed: dict[str, int] = {}
    if source.scheme is not None and load_format != "dummy":
        weights = source.weights(torch.float32, None, None)
        packed = {name: weights.num_bytes(name) for name in weights if weights.is_quantized(name)}
    elif source.is_gguf:
        weights = source.weights(torch.float32, None, None)
        packed = {name: weights.num_bytes(name) for name in weights if weights.is_matrix(name)}
    kind = None if source.scheme is None else source.scheme.describe()
    return StoredSizes(source.spec, packed, kind, source.is_gguf, str(source.files.path))


def _examined(name: str, load_format: str, model_impl: str) -> _Source:
    source = _Source(resolve_model(name, load_format), load_format, model_impl)
    if source.foreign is not None and source.foreign.spec is None:
        raise ModelError(
            f"{source.files.path}: runs through transformers, where its layers are known only with its weights "
            f"({source.foreign.why_not_examined}); load it to see them in the settings report"
        )
    return source


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer on its own: from a model name, a directory with tokenizer.json, or a GGUF file."""
    from octavo.models.tokenizer_files import load_tokenizer_directory, load_tokenizer_gguf

    path = Path(name).expanduser()
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return load_tokenizer_directory(path)
    files = resolve_model(name, "auto" if path.exists() else "dummy")
    return (
        load_tokenizer_gguf(_open_gguf_file(files.path))
        if files.kind == "gguf"
        else load_tokenizer_directory(files.path)
    )


def load_model(
    config: EngineConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    on_progress: Progress | None = None,
    texts: bool = False,
) -> LoadedModel:
    """Everything named by `config.model`, `tokenizer`, `load_format`, `skip_tokenizer_init` and `seed` (dummy weights).

    on_progress(done_bytes, total_bytes) counts bytes of the files. texts: the tokenizer gets ready to encode, beside
    the weights. Raises `ModelError`.
    """
    source = _Source(resolve_model(config.model, config.load_format), config.load_format, config.model_impl)
    if config.quantization == "gguf" and source.files.kind != "gguf":
        raise ModelError(f"quantization='gguf' needs a GGUF file, {source.files.path} is none; use int8 or int4")
    if source.foreign is None:
        source.spec = for_length(source.spec, config.max_model_len)
    else:
        source.foreign.announce(config, source.impl_why)
    decoder, weights = source.decoder(dtype, device, ops, config.seed, on_progress)
    with _loading(decoder, weights):
        tokenizer = None if config.skip_tokenizer_init else _tokenizer_of(config, source)
        if texts and tokenizer is not None:
            tokenizer.prepare()
    _check_vocabulary(source, tokenizer)
    before = decoder.weight_bytes
    screen_why = _screen_head(config.screen_head, decoder)
    return LoadedModel(
        source.spec,
        decoder,
        tokenizer,
        decoder.weight_bytes,
        source.files.path,
        impl="octavo" if source.foreign is None else "transformers",
        impl_why=source.impl_why,
        screen_bytes=decoder.weight_bytes - before,
        screen_why=screen_why,
    )


def _screen_head(asked: bool | None, decoder: AnyDecoder) -> str:
    """Do what `EngineConfig.screen_head` asks; returns why it came so. Raises `ConfigError`: True has no effect."""
    if asked is False:
        return "as asked"
    if asked is None and not worth_screening(decoder.spec.vocab_size, decoder.spec.hidden_size):
        return "its output head is read in no time"
    before = decoder.weight_bytes
    why = decoder.screen_head() if isinstance(decoder, Decoder) else "the model runs through transformers"
    if why and asked:
        raise ConfigError(f"screen_head=True has no effect: {why}; leave it out")
    size = f"{(decoder.weight_bytes - before) / (1 << 20):.0f} MiB more, "
    return why or f"{size}for greedy tokens that read less of the output head; the same tokens"


@contextmanager
def _loading(decoder: AnyDecoder, weights: LazyWeights | None) -> Iterator[None]:
    """Fill the decoder's weights beside the body, which holds the interpreter lock (the tokenizer), then together."""
    queue = decoder.queue
    if queue is None or weights is None:
        yield
        return
    # Half of it: reading a tokenizer's file takes hundreds of MiB for a moment, which must not come on top of it all.
    helper = threading.Thread(target=queue.run, args=(False, 0.5), name="octavo-load")
    helper.start()
    try:
        yield
    finally:
        give_memory_back()
        weights.report(queue.done)
        decoder.finish_loading()
        while helper.is_alive():
            weights.report(queue.done)
            helper.join(0.05)
        weights.report(queue.done)
        queue.check()


def _tokenizer_of(config: EngineConfig, source: _Source) -> Tokenizer:
    if config.tokenizer is None:
        return source.tokenizer()
    try:
        return load_tokenizer(config.tokenizer)
    except ModelError as error:
        raise ModelError(f"tokenizer: {error}") from error


def _check_vocabulary(source: _Source, tokenizer: Tokenizer | None) -> None:
    """A tokenizer that can produce ids without an embedding row belongs to another model."""
    if tokenizer is not None and tokenizer.vocab_size > source.spec.vocab_size:
        raise ModelError(
            f"{source.files.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model only "
            f"{source.spec.vocab_size} embedding rows; they do not belong together"
        )
