"""Hugging Face `config.json` -> `ModelSpec`.

Every key that changes the mathematics is read, or refused by name; a key that is neither known nor empty is refused
too, since nobody can tell what it does. Defaults are those of each family's configuration class, see
`models/families/`. What only the weight files can decide (is the head tied?) is passed in as `head`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from octavo.errors import ModelError
from octavo.models.families import FAMILIES
from octavo.models.families.base import ACTIVATIONS, SHARED, Activation, Family, Reader, words
from octavo.models.families.windows import layer_types
from octavo.models.rope_reader import rotary_specs
from octavo.models.spec import ModelSpec, RotarySpec

__all__ = ["FAMILIES", "HeadState", "family_of", "is_supported", "spec_from_config"]

#: The output head in the weight files: not there; there without an embedding; a copy of it; something of its own.
HeadState = Literal["absent", "only", "equal", "own"]

#: Keys that do not change what a forward pass computes: training, bookkeeping, sampling defaults, older libraries.
HARMLESS = words("""
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
    attn_pdrop dropout activation_dropout layerdrop classifier_dropout init_std
    summary_type summary_use_proj summary_activation
    summary_proj_to_labels summary_first_dropout task_specific_params reorder_and_upcast_attn n_ctx
    output_router_logits router_aux_loss_coef router_jitter_noise gradient_checkpointing prefix
    is_llama_config transformers.js_config
    quantization_config
""")
#: Keys with one value that changes nothing; any other value is refused, unless the family reads the key.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "rope_interleaved": (False,),
    "is_decoder": (False, True),
    "rotary_scaling_factor": (1, 1.0),
    "full_attn_mod": (1,),
    "interpolate_factor": (1, 1.0),
}
#: Class names in `architectures` that load as these families.
CLASSES = {name: kind for kind, family in FAMILIES.items() for name in family.classes}
FALLBACK = "model_impl='transformers' may run it"


def is_supported(config: Mapping[str, Any]) -> str | None:
    """None when the one decoder covers the config; else the reason why not, one sentence."""
    try:
        spec_from_config(config)
    except ModelError as error:
        return str(error)
    return None


def family_of(config: Mapping[str, Any]) -> str:
    """The name in `FAMILIES`, from `model_type` and `architectures`; anything else is refused with the list."""
    kind, classes = config.get("model_type"), config.get("architectures") or []
    supported = f"supported: {', '.join(FAMILIES)}"
    foreign = [name for name in classes if name not in CLASSES]
    if kind not in FAMILIES:
        raise ModelError(
            f"config: model_type={kind!r} (architectures={list(classes)!r}) is not supported; {supported}; {FALLBACK}"
        )
    if foreign or any(CLASSES[name] != kind for name in classes):
        raise ModelError(
            f"config: architectures={list(classes)!r} with model_type={kind!r} is not supported; "
            f"{supported}, each with its ForCausalLM class; {FALLBACK}"
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
    read = Reader(config, family)
    settings = family.settings(read)
    fields = _sizes(read, settings)
    layers = fields["num_layers"]
    types, window = layer_types(read, layers)
    rotaries: tuple[RotarySpec, ...] = ()
    rotary: tuple[int | None, ...] = (None,) * layers
    if family.rotary is not None:
        if fields["head_dim"] % 2:
            raise ModelError(f"config: head_dim={fields['head_dim']} must be even for rotary positions")
        rotaries, rotary = rotary_specs(config, types, family.rotary, fields["head_dim"], read.positive(_LONGEST))
    positions = _positions(read, rotaries)
    fields |= {
        "architecture": kind,
        "max_position_embeddings": positions,
        "rms_norm_eps": read.real(family.epsilon, 1e-6) or 1e-6,
        # A window that no sequence can outgrow is full attention, and full attention needs no second block table.
        "windows": tuple(
            window if t == "sliding_attention" and window is not None and window < positions else None for t in types
        ),
        "rotaries": rotaries,
        "rotary": rotary,
        "activation": settings.get("activation") or _activation(read),
        "tied_head": _tied(config, family, head),
        "bos_token_id": next(iter(_ids("bos_token_id", read.get("bos_token_id"))), None),
        "eos_token_ids": _ids("eos_token_id", read.get("eos_token_id")),
    }
    spec = ModelSpec(**{**fields, **settings})
    _check_heads(spec)
    return spec


_LONGEST = "max_position_embeddings"


def _sizes(read: Reader, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that every family has, under the names of `ModelSpec`."""
    layers, heads, hidden = (read.positive(k) for k in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    head_dim = read.get("head_dim") if "head_dim" in read.family.keys else None
    if head_dim is None and hidden % heads and "head_dim" not in read.family.keys:
        raise ModelError(f"config: hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    return {
        "vocab_size": read.positive("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": settings.get("intermediate_size") or read.positive("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": read.positive("num_key_value_heads", heads),
        "head_dim": hidden // heads if head_dim is None else read.positive("head_dim"),
    }


def _check_heads(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(
            f"config: num_attention_heads={spec.num_heads} is not a multiple of num_key_value_heads={spec.num_kv_heads}"
        )
    experts = spec.experts
    if experts is not None and experts.per_token > experts.count:
        raise ModelError(
            f"config: num_experts_per_tok={experts.per_token} exceeds the {experts.count} experts there are"
        )


def _refuse_unknown(config: Mapping[str, Any], family: Family, kind: str) -> None:
    """Refuse keys with a value that would be ignored, and keys nobody here knows.

    quantization_config says nothing of the mathematics: `models/quantized_files` reads it.
    """
    own = SHARED | family.keys | set(family.aliases)
    for key, allowed in NEUTRAL.items():
        if key not in own and config.get(key) is not None and config[key] not in allowed:
            raise ModelError(f"config: {key}={config[key]!r} is not supported; only {allowed[0]!r}; {FALLBACK}")
    known = HARMLESS | own | set(NEUTRAL)
    empty: tuple[Any, ...] = (None, False, "", [], {})
    # A leading underscore marks the library's own notes (_name_or_path, _attn_implementation, …), not settings.
    unknown = [k for k, value in config.items() if k not in known and value not in empty and not k.startswith("_")]
    if unknown:
        listed = ", ".join(f"{key}={config[key]!r}" for key in unknown)
        raise ModelError(
            f"config: {listed}: not known for {kind}, so it may change what the model computes; "
            "remove the key from config.json if it does not"
        )


def _positions(read: Reader, rotaries: tuple[RotarySpec, ...]) -> int:
    """Longest sequence. YaRN configs keep the original length in max_position_embeddings: the factor extends it."""
    positions = read.positive(_LONGEST)
    for rotary in rotaries:
        if rotary.kind == "yarn":
            parameters: dict[str, Any] = dict(rotary.parameters)
            positions = max(positions, int(parameters["factor"] * parameters["original_max_position_embeddings"]))
    return positions


def _activation(read: Reader) -> Activation:
    name = read.get(read.family.activation)
    if name is None:
        return "silu"
    if name not in ACTIVATIONS:
        raise ModelError(f"config: activation {name!r} is not supported; known: {', '.join(ACTIVATIONS)}; {FALLBACK}")
    return ACTIVATIONS[name]


def _tied(config: Mapping[str, Any], family: Family, head: HeadState | None) -> bool:
    """Flag and files together: a head that differs from the embedding is used, one that is missing must be tied."""
    flag = config.get("tie_word_embeddings", family.tied)
    flag = family.tied if flag is None else flag
    if not isinstance(flag, bool):
        raise ModelError(f"config: tie_word_embeddings={flag!r}: must be true or false")
    if head == "absent" and not flag:
        raise ModelError(
            f"config: tie_word_embeddings is false but the weight files hold no {family.names.heads[0]}.weight; "
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
