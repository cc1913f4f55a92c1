"""Tokenizers from files: a directory in Hugging Face's form, or a GGUF header.

A directory has tokenizer.json, and beside it tokenizer_config.json, special_tokens_map.json, generation_config.json and
chat templates. Large vocabularies come from the user's cache when they have been loaded before, see
`kept_tokenizer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import ModelError
from octavo.models.kept_tokenizer import WORTH_KEEPING, kept_or_made
from octavo.models.safetensors_loader import read_json
from octavo.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.models.gguf_file import GGUFFile

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEMPLATE, OLD_TEMPLATE, TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"

# From a directory


def load_tokenizer_directory(directory: Path, fallback_eos: tuple[int, ...] = (), bos: int | None = None) -> Tokenizer:
    """From Hugging Face files. fallback_eos, bos: the model config's ids, where the tokenizer's files name none."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError(
            f"{path}: no such file; give a directory that has it as `tokenizer`, or use skip_tokenizer_init=True "
            "and token ids"
        )

    def load() -> Tokenizer:
        return _from_directory(directory, fallback_eos, bos)

    if path.stat().st_size < WORTH_KEEPING:
        return load()
    return kept_or_made(load, lambda: (repr((fallback_eos, bos)).encode(), *_contents(directory)), str(directory))


def _contents(directory: Path) -> Iterator[bytes]:
    """Every file that `_from_directory` looks at: its name and what is in it."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    more = sorted((directory / TEMPLATES).glob("*.jinja"))
    for path in (*(directory / name for name in names), directory / OLD_TEMPLATE, directory / TEMPLATE, *more):
        if path.is_file():
            yield path.name.encode()
            with path.open("rb", buffering=0) as file:
                while part := file.read(1 << 20):  # megabytes in one piece would be cleared by the system first
                    yield part


def _from_directory(directory: Path, fallback_eos: tuple[int, ...], bos: int | None) -> Tokenizer:
    path = directory / "tokenizer.json"
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
    legacy = directory / OLD_TEMPLATE
    if legacy.is_file() and isinstance(_optional_json(legacy).get("chat_template"), str):
        templates["default"] = _optional_json(legacy)["chat_template"]
    try:
        if (directory / TEMPLATE).is_file():
            templates["default"] = (directory / TEMPLATE).read_text(encoding="utf-8")
        for path in sorted((directory / TEMPLATES).glob("*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{directory}: a chat template cannot be read: {error}") from error
    return templates


# From a GGUF header


def load_tokenizer_gguf(file: GGUFFile) -> Tokenizer:
    """From GGUF metadata. Raises `ModelError` for a kind that is not supported."""
    header = file.header()
    if len(header) < WORTH_KEEPING:
        return _from_gguf(file)
    return kept_or_made(lambda: _from_gguf(file), lambda: (header,), str(file.path))


def _from_gguf(file: GGUFFile) -> Tokenizer:
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
