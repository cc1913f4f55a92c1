"""Models that transformers knows and Octavo's own decoder does not: configuration, strict loading, the spec.

Refused before a weight is read: encoder-decoders, code from the repository, quantised weights, layers with another
state than keys and values, and whatever `transformers_probe.examine` finds. The weights are the library's to place,
ours to check: only safetensors, only the files an index names, nothing missing, left over or mis-shaped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.logs import logger
from octavo.models.config_reader import spec_from_config
from octavo.models.safetensors_loader import SafetensorsFiles, read_json
from octavo.models.spec import ModelSpec
from octavo.models.transformers_keys import refuse_unread_keys
from octavo.models.transformers_probe import PROBE, AttentionCall, Examined, examine, register

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.kernels.ops import Ops
    from octavo.models.resolve import ModelFiles
    from octavo.models.transformers_decoder import TransformersDecoder

_LAYERS = {"full_attention", "sliding_attention"}
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
LISTED = 12


def require_transformers() -> Any:
    """The library, or `ModelError` with what to install."""
    try:
        import transformers
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: F401
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"running a model through transformers needs that library, 5.0 or later: pip install "
            f"'octavo[transformers]' ({error})"
        ) from error
    return transformers


class TransformersModel:
    """One model directory, examined. `spec` and `calls` come from the meta device where that is possible.

    examined is None where the model's forward pass needs real numbers (data-dependent routing): then `spec` can only
    be had from `load`.
    """

    def __init__(self, directory: Path, *, dummy: bool = False) -> None:
        self.directory = directory
        self.files = None if dummy else SafetensorsFiles(directory)
        self.library = require_transformers()
        from octavo.models.transformers_decoder import attention

        register(attention)
        self.config = self._read_config()
        self.positions = positions_of(self.config)
        self.why_not_examined = ""
        self.spec: ModelSpec | None = None
        self.num_parameters = 0
        with torch.device("meta"):
            shell = self._shell(torch.bfloat16)
        self.num_parameters = sum(p.numel() for p in shell.parameters())
        try:
            self.spec = self.spec_of(shell, examine(shell, self.positions).calls)
        except ModelError:
            raise
        except Exception as error:  # whatever the library's code raises on tensors without data
            self.why_not_examined = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"

    def announce(self, config: EngineConfig, why: str) -> None:
        """Say in the log whose code will compute. Raises `ConfigError` for what only the own decoder can do."""
        if config.quantization not in (None, "auto"):
            raise ConfigError(
                f"quantization={config.quantization!r} needs Octavo's own decoder, and {config.model} runs through "
                f"transformers ({why}); leave quantization out"
            )
        logger.warning("%s runs through transformers, slower than Octavo's own decoder: %s", config.model, why)

    def _read_config(self) -> Any:
        raw = read_json(self.directory / "config.json")
        where = self.directory / "config.json"
        if not isinstance(raw, dict):
            raise ModelError(f"{where}: must be a JSON object")
        if raw.get("quantization_config"):
            raise ModelError(f"{where}: quantization_config: quantised weights do not run through transformers here")
        kind = raw.get("model_type")
        mapping = self.library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if kind not in mapping:
            note = "; code from the repository (auto_map) is never run" if raw.get("auto_map") else ""
            raise ModelError(f"{where}: model_type={kind!r} is no causal language model that transformers knows{note}")
        known = mapping[kind]
        known = {known} if isinstance(known, str) else set(known)
        foreign = [name for name in raw.get("architectures") or [] if name not in known]
        if foreign:
            raise ModelError(
                f"{where}: architectures={foreign!r}: for {kind} the causal language model of transformers is "
                f"{', '.join(sorted(known))}"
            )
        try:
            config = self.library.AutoConfig.from_pretrained(
                str(self.directory), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library's own checks
            raise ModelError(f"{where}: transformers refuses it: {error}") from error
        refuse_unread_keys(raw, type(config), str(where))
        refuse_config(config, str(where))
        return config

    def _shell(self, dtype: torch.dtype) -> Any:
        """The model without its weights, ready to be examined."""
        try:
            model = self.library.AutoModelForCausalLM.from_config(
                self.config, dtype=dtype, attn_implementation=PROBE, trust_remote_code=False
            )
        except Exception as error:
            why = "it has no place for another attention" if PROBE in str(error) else f"transformers: {error}"
            raise ModelError(f"{self.directory}: the model cannot be built: {why}") from error
        return check_kind(model.eval())

    def load(self, dtype: torch.dtype, device: torch.device | str, seed: int | None) -> Any:
        """The model with its weights (seed: random ones, for a dummy), its attention implementation still `PROBE`."""
        if self.files is None:
            model = self._shell(dtype)
            randomise(model, 0 if seed is None else seed)
        else:
            with _quiet(self.library):
                try:
                    model, report = self.library.AutoModelForCausalLM.from_pretrained(
                        str(self.directory), config=self.config, dtype=dtype, attn_implementation=PROBE,
                        local_files_only=True, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                        ignore_mismatched_sizes=True,  # reported with the others, below
                    )  # fmt: skip
                except Exception as error:
                    raise ModelError(f"{self.directory}: transformers cannot load the weights: {error}") from error
            check_report(str(self.directory), report)
        return check_kind(model.eval().to(device))

    def spec_of(self, model: Any, calls: tuple[AttentionCall, ...]) -> ModelSpec:
        """What the engine must know. One number of heads, one head size and one soft cap for all layers."""
        text = self.config.get_text_config()
        for what in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "softcap"):
            values = sorted({getattr(call, what) for call in calls}, key=str)
            if len(values) > 1:
                raise ModelError(
                    f"{type(model).__name__}: its layers differ in {what} ({', '.join(map(str, values))}); blocks hold "
                    "keys and values of one shape"
                )
        first = calls[0]
        rows, head = model.get_input_embeddings().weight.shape[0], model.get_output_embeddings()
        if head is not None and head.weight.shape[0] != rows:
            raise ModelError(
                f"{type(model).__name__}: the output head has {head.weight.shape[0]} rows, the embedding {rows}"
            )
        hidden = int(text.hidden_size)
        inner = getattr(text, "intermediate_size", None)
        tied = head is not None and head.weight is model.get_input_embeddings().weight
        return ModelSpec(
            architecture=str(self.config.model_type),
            vocab_size=int(rows),
            hidden_size=hidden,
            intermediate_size=inner if isinstance(inner, int) else 4 * hidden,
            num_layers=len(calls),
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=max(first.key_dim, first.value_dim),
            max_position_embeddings=self.positions,
            rms_norm_eps=1e-6,
            windows=tuple(None if c.window is None or c.window >= self.positions else c.window for c in calls),
            rotaries=(),
            rotary=(),
            attention_scale=first.scale,
            attention_softcap=first.softcap,
            tied_head=bool(tied or getattr(text, "tie_word_embeddings", False)),
            bos_token_id=text.bos_token_id if isinstance(text.bos_token_id, int) else None,
            eos_token_ids=_ids(text.eos_token_id),
            extra={"model_impl": "transformers", "num_parameters": self.num_parameters},
        )


def positions_of(config: Any) -> int:
    """Longest sequence, under whichever name the family keeps it."""
    text = config.get_text_config()
    for name in _POSITIONS:
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(
        f"config: model_type={config.model_type!r}: none of {', '.join(_POSITIONS)} says how long it may be"
    )


def refuse_config(config: Any, where: str) -> None:
    """Kinds of models that no forward pass would give away."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False) or getattr(text, "add_cross_attention", False):
        raise ModelError(f"{where}: an encoder-decoder (or cross-attention); only decoders are supported")
    other = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - _LAYERS)
    if other:
        raise ModelError(
            f"{where}: layer_types holds {', '.join(other)}; supported: {', '.join(sorted(_LAYERS))} (others "
            "keep another state than keys and values, or another mask)"
        )
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelError(
            f"{where}: num_kv_shared_layers={text.num_kv_shared_layers}: layers that share keys and values"
        )


def check_kind(model: Any) -> Any:
    """The model, unless the library says that it keeps a state of another kind."""
    if getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{type(model).__name__} keeps a recurrent state (Mamba, linear attention); only keys and values fit blocks"
        )
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{type(model).__name__} computes attention by itself (not through transformers' AttentionInterface), so "
            "nothing can take its place"
        )
    return model


def check_report(where: str, report: Any) -> None:
    """Stop unless every weight was found and used."""
    lists = {
        "missing": sorted(report["missing_keys"]),
        "not used by this model": sorted(report["unexpected_keys"]),
        "with another shape": sorted(_mismatch(key) for key in report["mismatched_keys"]),
        "in error": sorted(report.get("error_msgs") or ()),
    }
    problems = [
        f"{len(names)} tensor{'s' * (len(names) > 1)} {label}: "
        f"{', '.join(names[:LISTED])}{', …' if len(names) > LISTED else ''}"
        for label, names in lists.items()
        if names
    ]
    if problems:
        raise ModelError(f"{where}: the weights do not fit the configuration: {'; '.join(problems)}")


def _mismatch(key: Any) -> str:
    """(name, shape in the file, shape of the model) in words; some versions of the library give only the name."""
    if not isinstance(key, tuple):
        return str(key)
    name, *shapes = key
    return f"{name} is {list(shapes[0])}, expected {list(shapes[1])}" if len(shapes) == 2 else str(name)


def randomise(model: Any, seed: int) -> None:
    """Random weights in place, never zero and never degenerate, as `models/dummy_loader.py` makes them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.empty(weight.shape, dtype=weight.dtype).normal_(generator=generator)
            if weight.dim() > 1:
                embedding = "embed" in name or name.endswith("wte.weight")
                weight.copy_(noise if embedding else noise * 1.5 * weight.shape[-1] ** -0.5)
            else:
                weight.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))


def examine_loaded(model: Any, positions: int) -> Examined:
    """`examine` on real weights. Whatever the library raises becomes a `ModelError`."""
    try:
        return examine(model, positions)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__} cannot run with another attention in its place: {type(error).__name__}: {error}"
        ) from error


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(i for i in values if isinstance(i, int) and not isinstance(i, bool))


@contextmanager
def _quiet(library: Any) -> Iterator[None]:
    """No progress bar and no report of the library's while it loads: both are ours to give."""
    logging = library.utils.logging
    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def build_decoder(
    source: TransformersModel, ops: Ops, dtype: torch.dtype, device: torch.device | str, seed: int | None
) -> TransformersDecoder:
    """Weights into a decoder, checked. Raises `ModelError`.

    Where rotary frequencies change with the longest sequence (longrope), rows would depend on their neighbours; then
    positions are kept to the length the model was first trained for, below which nothing changes.
    """
    from octavo.models.transformers_decoder import TransformersDecoder

    model = source.load(dtype, device, seed)
    examined = examine_loaded(model, source.positions)
    spec = source.spec or source.spec_of(model, examined.calls)
    if spec.windows != source.spec_of(model, examined.calls).windows:
        raise ModelError(f"{source.directory}: its layers ask for other windows with weights than without")
    shorter = _first_length(source.config)
    if shorter is not None and shorter < spec.max_position_embeddings:
        logger.warning(
            "%s: rotary frequencies that follow the longest sequence: at most %d of %d positions through transformers",
            source.directory, shorter, spec.max_position_embeddings,
        )  # fmt: skip
        spec = replace(spec, max_position_embeddings=shorter)
    source.spec = spec
    try:
        return TransformersDecoder(model, spec, examined, ops, dtype, device)
    except OctavoError:
        raise
    except Exception as error:  # the library's code, in a place it was not written for
        what = f"{type(error).__name__}: {error}"
        raise ModelError(f"{type(model).__name__} does not run with paged attention: {what}") from error


def _first_length(config: Any) -> int | None:
    """`original_max_position_embeddings` of a longrope model."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [rope] if "rope_type" in rope else [v for v in rope.values() if isinstance(v, dict)]
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            value = kind.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            return int(value) if value else None
    return None


def choose_impl(files: ModelFiles, load_format: str, asked: str) -> tuple[TransformersModel | None, str]:
    """Whose code runs a model, and why: None for Octavo's own decoder, else the examined model.

    asked: "octavo", "transformers", or "auto": the own decoder where it knows the architecture. Raises `ModelError`,
    with both reasons where neither can run it.
    """
    if asked == "octavo":
        return None, "as asked"
    if files.kind == "gguf":
        if asked == "transformers":
            raise ModelError(f"{files.path}: model_impl='transformers' needs a directory with config.json, not GGUF")
        return None, "a GGUF file"
    if asked == "transformers":
        return TransformersModel(files.path, dummy=load_format == "dummy"), "as asked"
    reason = _not_supported(read_json(files.path / "config.json"))
    if reason is None:
        return None, "its own decoder covers the model"
    try:
        model = TransformersModel(files.path, dummy=load_format == "dummy")
    except ModelError as other:
        raise ModelError(f"{files.path / 'config.json'}: {reason}; nor through transformers: {other}") from other
    return model, f"Octavo's own decoder does not cover it: {reason.partition(';')[0]}"


def _not_supported(config: Any) -> str | None:
    """Why the own decoder does not cover a config; None if it does, or if the config is wrong for anybody.

    A key that nobody knows is wrong: transformers would ignore it, which only the owner of the file can decide.
    """
    try:
        spec_from_config(config)
    except ModelError as error:
        reason = str(error).removeprefix("config: ")
        return reason.partition("; model_impl=")[0] if "is not supported" in reason else None
    return None
