"""`Tokenizer`: text <-> token ids with the model's own files, over the `tokenizers` library.

Built from a directory (tokenizer.json, tokenizer_config.json, chat template, generation_config.json) or from a GGUF
header. It knows which ids begin and end a text and how a conversation is written; it does not know the model's
embedding, so an id below `vocab_size` of the model may have no token here (then it decodes to nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError, PromptError
from octavo.models.chat_template import render_chat
from octavo.models.safetensors_loader import read_json

if TYPE_CHECKING:
    from octavo.models.gguf_file import GGUFFile

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class Tokenizer:
    """Immutable; safe to share between threads. `backend` is the `tokenizers.Tokenizer` underneath.

    special_tokens: role ("bos_token", …) -> text, as chat templates see them. chat_templates: name -> Jinja source;
    "default" is the one used unless tools are given and "tool_use" exists.
    """

    backend: Backend
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()
        special = {i for i, token in self.backend.get_added_tokens_decoder().items() if token.special}
        object.__setattr__(self, "special_ids", frozenset(special))

    @property
    def vocab_size(self) -> int:
        """One more than the largest id with a token."""
        added = self.backend.get_added_tokens_decoder()
        return max(self.backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with the begin (and end) tokens the model's files ask for, unless switched off."""
        if not isinstance(text, str):
            raise PromptError(f"prompt of type {type(text).__name__}: must be a string")
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            lone = next((c for c in text if "\ud800" <= c <= "\udfff"), None)
            if lone is None:
                raise
            raise PromptError(
                f"the text is no valid Unicode: it holds U+{ord(lone):04X}, one half of a surrogate pair; "
                "give the whole character, or leave it out"
            ) from error
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids without a token give nothing."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it (not decoded); None for an id without one."""
        text: str | None = self.backend.id_to_token(token_id) if token_id >= 0 else None
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token spelled as in the vocabulary."""
        found: int | None = self.backend.token_to_id(token)
        return found

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_templates)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as one text. Encode it with `add_special_tokens=False`: templates write their own.

        template: the name of one of `chat_templates`, or Jinja source. variables: passed to the template.
        Raises `PromptError`: no template, or messages that the template refuses.
        """
        return render_chat(
            self._template(template, tools is not None),
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            special_tokens=self.special_tokens,
            variables=variables,
        )

    def _template(self, asked: str | None, with_tools: bool) -> str:
        if asked is not None:
            return self.chat_templates.get(asked, asked)
        if not self.chat_templates:
            raise PromptError(
                "this model has no chat template (a base model?); "
                "give one as chat_template, or use generate with a prompt"
            )
        if with_tools and "tool_use" in self.chat_templates:
            return self.chat_templates["tool_use"]
        if "default" not in self.chat_templates:
            raise PromptError(f"several chat templates and no default; name one of {', '.join(self.chat_templates)}")
        return self.chat_templates["default"]


# From a directory


def load_tokenizer_directory(directory: Path, fallback_eos: tuple[int, ...] = (), bos: int | None = None) -> Tokenizer:
    """From Hugging Face files. fallback_eos, bos: the model config's ids, where the tokenizer's files name none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: no such file; give a directory that has it as `tokenizer`, or use skip_tokenizer_init=True "
            "and token ids"
        )
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a broken file
        raise ModelError(f"{path}: broken tokenizer file: {error}") from error
    config = _optional_json(directory / "tokenizer_config.json")
    named = _special_tokens(_optional_json(directory / "special_tokens_map.json"), config)
    _add_configured_tokens(backend, config)
    missing = [AddedToken(t, special=True, normalized=False) for t in named.values() if backend.token_to_id(t) is None]
    backend.add_special_tokens(missing)
    # add_bos_token / add_eos_token of tokenizer_config.json speak to classes without a tokenizer.json: the
    # post-processor inside this one decides, as in the transformers library.
    bos_id = backend.token_to_id(named["bos_token"]) if "bos_token" in named else bos
    return Tokenizer(
        backend,
        bos_id,
        _end_ids(directory, backend, named, fallback_eos),
        named,
        _chat_templates(directory, config),
    )


def _optional_json(path: Path) -> dict[str, Any]:
    content = read_json(path) if path.exists() else {}
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return content


def _special_tokens(mapping: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, str]:
    """Role -> text; tokenizer_config.json wins. A token may be a string or an object with `content`."""
    named: dict[str, str] = {}
    for role in _NAMED:
        token = config[role] if role in config else mapping.get(role)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            named[role] = content
    return named


def _add_configured_tokens(backend: Backend, config: Mapping[str, Any]) -> None:
    """`added_tokens_decoder` of tokenizer_config.json, for tokens that tokenizer.json lacks, in the order of ids."""
    decoder = config.get("added_tokens_decoder") or {}
    for key in sorted(decoder, key=int):
        token = decoder[key]
        if backend.token_to_id(token["content"]) is None:
            flags = {f: bool(token.get(f, False)) for f in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            backend.add_tokens([AddedToken(token["content"], **flags)])


def _end_ids(directory: Path, backend: Backend, named: Mapping[str, str], fallback: tuple[int, ...]) -> tuple[int, ...]:
    """generation_config.json (often a list: end of text and end of turn), then the tokenizer's, then the model's."""
    given = _optional_json(directory / "generation_config.json").get("eos_token_id")
    ids: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
    if "eos_token" in named:
        ids = [*ids, backend.token_to_id(named["eos_token"])]
    ids = [i for i in ids if isinstance(i, int)]
    return tuple(dict.fromkeys(ids)) or fallback


def _chat_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template.jinja wins over the template inside tokenizer_config.json; further ones lie in a folder."""
    templates: dict[str, str] = {}
    inside = config.get("chat_template")
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, list):
        templates = {entry["name"]: entry["template"] for entry in inside}
    legacy = directory / "chat_template.json"
    if legacy.is_file() and isinstance(_optional_json(legacy).get("chat_template"), str):
        templates["default"] = _optional_json(legacy)["chat_template"]
    try:
        if (directory / "chat_template.jinja").is_file():
            templates["default"] = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{directory}: a chat template cannot be read: {error}") from error
    return templates


# From a GGUF header


def load_tokenizer_gguf(file: GGUFFile) -> Tokenizer:
    """From GGUF metadata. Raises `ModelError` for a kind that is not supported."""
    from octavo.models.gguf_reader import end_ids
    from octavo.models.gguf_tokenizer import tokenizer_from_gguf

    backend = tokenizer_from_gguf(file)
    named = {}
    for role, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        token = None if token_id is None else backend.id_to_token(token_id)
        if token is not None:
            named[role] = token
    templates = {}
    if isinstance(template := file.get("tokenizer.chat_template"), str):
        templates["default"] = template
    for name in file.get("tokenizer.chat_templates", ()):
        if isinstance(template := file.get(f"tokenizer.chat_template.{name}"), str):
            templates[name] = template
    return Tokenizer(backend, file.get("tokenizer.ggml.bos_token_id"), end_ids(file), named, templates)
