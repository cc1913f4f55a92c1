"""Hugging Face `config.json` -> `ModelSpec`.

Every key that changes the mathematics is read, or refused by name; a key that is neither known nor empty is refused
too, since nobody can tell what it does. Defaults are those of each family's configuration class. What only the weight
files can decide (is the head tied?) is passed in as `head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.rope_reader import rotary_specs
from octavo.models.spec import ModelSpec

Activation = Literal["silu", "gelu_tanh", "gelu"]
#: The output head in the weight files: not there; there without an embedding; a copy of it; something of its own.
HeadState = Literal["absent", "only", "equal", "own"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
}  # fmt: skip


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Keys that do not change what a forward pass computes: training, bookkeeping, sampling defaults, older libraries.
HARMLESS = _words("""
    architectures model_type torch_dtype dtype transformers_version use_cache initializer_range
    attention_dropout pretraining_tp name_or_path pad_token_id unk_token_id sep_token_id cls_token_id
    mask_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids
    cache_implementation auto_map id2label label2id return_dict output_hidden_states output_attentions
    torchscript max_length min_length do_sample temperature top_k top_p typical_p num_beams num_beam_groups
    num_return_sequences repetition_penalty length_penalty diversity_penalty encoder_no_repeat_ngram_size
    no_repeat_ngram_size early_stopping remove_invalid_values output_scores return_dict_in_generate
    chunk_size_feed_forward begin_suppress_tokens suppress_tokens unsloth_version unsloth_fixed eos_token
    pad_token bos_token use_flash_attn attn_implementation hidden_dropout resid_pdrop embd_pdrop problem_type
    max_sequence_length model_max_length
""")
#: Keys with one value that changes nothing; any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
}
#: Keys every family reads.
COMMON = _words("""
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings rms_norm_eps bos_token_id eos_token_id tie_word_embeddings rope_theta rope_scaling
    rope_parameters""")


@dataclass(frozen=True)
class Family:
    """What sets one architecture apart. `defaults` are its configuration class's values for absent keys."""

    keys: frozenset[str]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tied: bool = False
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: attention_bias decides
    out_bias: bool | None = None  # None: attention_bias decides
    mlp_bias: bool = False  # True: the key mlp_bias decides
    gemma: bool = False
    sandwich: bool = False
    windows: Literal["none", "all", "qwen", "pattern"] = "none"
    pattern: int = 1
    local_key: str | None = None
    bases: Mapping[str, float] = field(
        default_factory=lambda: {"full_attention": 10000.0, "sliding_attention": 10000.0}
    )


_QWEN_KEYS = _words("hidden_act use_sliding_window sliding_window max_window_layers layer_types")
_GEMMA_KEYS = _words("hidden_act hidden_activation attention_bias")
_GEMMA2_KEYS = _GEMMA_KEYS | _words(
    "query_pre_attn_scalar sliding_window layer_types final_logit_softcapping attn_logit_softcapping"
)
_QWEN_DEFAULTS = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
                  "sliding_window": 4096, "max_window_layers": 28}  # fmt: skip
_LLAMA_DEFAULTS = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
                   "num_attention_heads": 32, "max_position_embeddings": 2048, "bos_token_id": 1,
                   "eos_token_id": 2}  # fmt: skip
_GEMMA_IDS = {"bos_token_id": 2, "eos_token_id": 1, "head_dim": 256}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        keys=frozenset(("hidden_act", "attention_bias", "mlp_bias")), defaults=_LLAMA_DEFAULTS, mlp_bias=True
    ),
    "mistral": Family(
        keys=frozenset(("hidden_act", "sliding_window", "layer_types")),
        defaults={**_LLAMA_DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8,
                  "max_position_embeddings": 131072, "sliding_window": 4096},
        qkv_bias=False, out_bias=False, windows="all",
    ),
    "qwen2": Family(keys=_QWEN_KEYS, defaults=_QWEN_DEFAULTS, qkv_bias=True, out_bias=False, windows="qwen"),
    "qwen3": Family(
        keys=_QWEN_KEYS | {"attention_bias"}, defaults={**_QWEN_DEFAULTS, "head_dim": 128}, qk_norm=True, windows="qwen"
    ),
    "gemma": Family(
        keys=_GEMMA_KEYS,
        defaults={**_GEMMA_IDS, "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576,
                  "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
                  "max_position_embeddings": 8192},
        tied=True, gemma=True,
    ),
    "gemma2": Family(
        keys=_GEMMA2_KEYS,
        defaults={**_GEMMA_IDS, "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                  "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                  "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        tied=True, gemma=True, sandwich=True, windows="pattern", pattern=2,
    ),
    "gemma3_text": Family(
        keys=_GEMMA2_KEYS | {"rope_local_base_freq", "sliding_window_pattern"},
        defaults={**_GEMMA_IDS, "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
                  "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "max_position_embeddings": 131072, "query_pre_attn_scalar": 256, "sliding_window": 4096,
                  "final_logit_softcapping": None, "attn_logit_softcapping": None},
        tied=True, gemma=True, sandwich=True, qk_norm=True, windows="pattern", pattern=6,
        local_key="rope_local_base_freq", bases={"full_attention": 1_000_000.0, "sliding_attention": 10000.0},
    ),
}  # fmt: skip

#: Class names in `architectures` that load as these families.
CLASSES = {
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3", "GemmaForCausalLM": "gemma", "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
}  # fmt: skip


class _Reader:
    """Typed access to one config with the family's defaults; errors name the key and the value."""

    def __init__(self, config: Mapping[str, Any], family: Family) -> None:
        self._config, self._family = config, family

    def get(self, key: str) -> Any:
        """The config's value (also a null), or the class default when the key is absent."""
        return self._config[key] if key in self._config else self._family.defaults.get(key)

    def positive(self, key: str, fallback: int | None = None) -> int:
        value = self.get(key)
        value = fallback if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"config: {key}={value!r}: must be an integer of at least 1")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._config.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"config: {key}={value!r}: must be true or false")
        return value

    def real(self, key: str, default: float | None = None) -> float | None:
        """A positive number, or None when the value is null (softcaps: off)."""
        value = self._config[key] if key in self._config else self._family.defaults.get(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value <= 0):
            raise ModelError(f"config: {key}={value!r}: must be a positive number or null")
        return None if value is None else float(value)


def family_of(config: Mapping[str, Any]) -> str:
    """The name in `FAMILIES`, from `model_type` and `architectures`; anything else is refused with the list."""
    kind, classes = config.get("model_type"), config.get("architectures") or []
    supported = f"supported: {', '.join(FAMILIES)}"
    foreign = [name for name in classes if name not in CLASSES]
    if kind not in FAMILIES:
        raise ModelError(f"config: model_type={kind!r} (architectures={list(classes)!r}) is not supported; {supported}")
    if foreign or any(CLASSES[name] != kind for name in classes):
        raise ModelError(
            f"config: architectures={list(classes)!r} with model_type={kind!r} is not supported; "
            f"{supported}, each with its ForCausalLM class"
        )
    return str(kind)


def spec_from_config(config: Mapping[str, Any], head: HeadState | None = None) -> ModelSpec:
    """The spec of a Hugging Face config.

    head: what the weight files hold as output head. None: unknown, believe the flag. Raises ModelError.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"config: must be a JSON object, got {type(config).__name__}")
    kind = family_of(config)
    family = FAMILIES[kind]
    _refuse_unknown(config, family, kind)
    read = _Reader(config, family)
    layers, heads, hidden = (read.positive(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    kv_heads = read.positive("num_key_value_heads", heads)
    head_dim = read.positive("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"config: num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise ModelError(f"config: head_dim={head_dim} must be even for rotary positions")
    types, window = _layer_types(config, read, family, layers)
    rotaries, rotary = rotary_specs(config, types, family.bases, family.local_key)
    attention_bias = read.flag("attention_bias") if "attention_bias" in family.keys else False
    pre_scalar = read.real("query_pre_attn_scalar") if "query_pre_attn_scalar" in family.keys else None
    positions = _positions(read, rotaries)
    return ModelSpec(
        architecture=kind,
        vocab_size=read.positive("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.positive("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=read.real("rms_norm_eps", 1e-6) or 1e-6,
        # A window that no sequence can outgrow is full attention, and full attention needs no second block table.
        windows=tuple(
            window if t == "sliding_attention" and window is not None and window < positions else None for t in types
        ),
        rotaries=rotaries,
        rotary=rotary,
        activation=_activation(config, family),
        attention_scale=None if pre_scalar is None else pre_scalar**-0.5,
        embedding_scale=hidden**0.5 if family.gemma else 1.0,
        norm_offset=family.gemma,
        sandwich_norms=family.sandwich,
        qk_norm=family.qk_norm,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=read.flag("mlp_bias") if family.mlp_bias else False,
        tied_head=_tied(config, family, head),
        attention_softcap=read.real("attn_logit_softcapping") if "attn_logit_softcapping" in family.keys else None,
        logit_softcap=read.real("final_logit_softcapping") if "final_logit_softcapping" in family.keys else None,
        bos_token_id=next(iter(_ids("bos_token_id", read.get("bos_token_id"))), None),
        eos_token_ids=_ids("eos_token_id", read.get("eos_token_id")),
    )


def _refuse_unknown(config: Mapping[str, Any], family: Family, kind: str) -> None:
    """Refuse keys with a value that would be ignored, and keys nobody here knows.

    quantization_config says nothing of the mathematics: `models/quantized_files` reads it.
    """
    for key, allowed in NEUTRAL.items():
        if config.get(key) is not None and config[key] not in allowed:
            raise ModelError(f"config: {key}={config[key]!r} is not supported; only {allowed[0]!r}")
    known = HARMLESS | COMMON | family.keys | set(NEUTRAL) | {"quantization_config"}
    empty: tuple[Any, ...] = (None, False, "", [], {})
    # A leading underscore marks the library's own notes (_name_or_path, _attn_implementation, …), not settings.
    unknown = [k for k, value in config.items() if k not in known and value not in empty and not k.startswith("_")]
    if unknown:
        listed = ", ".join(f"{key}={config[key]!r}" for key in unknown)
        raise ModelError(
            f"config: {listed}: not known for {kind}, so it may change what the model computes; "
            "remove the key from config.json if it does not"
        )


def _layer_types(
    config: Mapping[str, Any], read: _Reader, family: Family, layers: int
) -> tuple[tuple[str, ...], int | None]:
    """Layer type of each layer and the window of the sliding ones. A list in the config decides, never the number."""
    full = ("full_attention",) * layers
    if family.windows == "none":
        return full, None
    window = None if read.get("sliding_window") is None else read.positive("sliding_window")
    if family.windows == "qwen" and not read.flag("use_sliding_window"):
        window = None
    given = config.get("layer_types")
    if given is not None:
        return _given_types(given, layers, window), window
    if window is None:
        return full, None
    if family.windows == "all":
        return ("sliding_attention",) * layers, window
    if family.windows == "qwen":
        first = read.get("max_window_layers")
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"config: max_window_layers={first!r}: must be an integer of at least 0")
        return tuple("sliding_attention" if i >= first else "full_attention" for i in range(layers)), window
    pattern = config.get("sliding_window_pattern", family.pattern)
    if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
        raise ModelError(f"config: sliding_window_pattern={pattern!r}: must be an integer of at least 1")
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)), window


def _given_types(given: Any, layers: int, window: int | None) -> tuple[str, ...]:
    if not isinstance(given, list) or len(given) != layers:
        raise ModelError(f"config: layer_types={given!r}: must be a list of {layers} entries, one per layer")
    unknown = sorted({str(t) for t in given} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(
            f"config: layer_types holds {', '.join(unknown)}; supported: full_attention, sliding_attention"
        )
    if "sliding_attention" in given and window is None:
        raise ModelError("config: layer_types has sliding_attention but sliding_window is missing")
    return tuple(given)


def _positions(read: _Reader, rotaries: tuple[Any, ...]) -> int:
    """Longest sequence. YaRN configs keep the original length in max_position_embeddings: the factor extends it."""
    positions = read.positive("max_position_embeddings")
    for rotary in rotaries:
        if rotary.kind == "yarn":
            parameters = dict(rotary.parameters)
            positions = max(positions, int(parameters["factor"] * parameters["original_max_position_embeddings"]))
    return positions


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
    name = config.get("hidden_activation") or config.get("hidden_act")
    if name is None:
        return "gelu_tanh" if family.gemma else "silu"
    if name not in ACTIVATIONS:
        raise ModelError(f"config: activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}")
    # The first Gemma releases said "gelu" and meant the tanh form; no Gemma uses the exact one.
    return "gelu_tanh" if family.gemma and name == "gelu" else ACTIVATIONS[name]


def _tied(config: Mapping[str, Any], family: Family, head: HeadState | None) -> bool:
    """Flag and files together: a head that differs from the embedding is used, one that is missing must be tied."""
    flag = config.get("tie_word_embeddings", family.tied)
    flag = family.tied if flag is None else flag
    if not isinstance(flag, bool):
        raise ModelError(f"config: tie_word_embeddings={flag!r}: must be true or false")
    if head == "absent" and not flag:
        raise ModelError(
            "config: tie_word_embeddings is false but the weight files hold no lm_head.weight; "
            "the file is incomplete, or the flag should be true"
        )
    return {None: flag, "absent": True, "only": flag, "equal": True, "own": False}[head]


def _ids(name: str, value: Any) -> tuple[int, ...]:
    """One id or a list of ids."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise ModelError(f"config: {name}={value!r}: must be a token id or a list of them")
    return tuple(ids)
