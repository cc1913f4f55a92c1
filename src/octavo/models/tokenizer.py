"""`Tokenizer`: text <-> token ids with the model's own files, over the `tokenizers` library.

Built by `tokenizer_files.py`. It knows which ids begin and end a text and how a conversation is written; it does not
know the model's embedding, so an id below the model's `vocab_size` may have no token here (it decodes to nothing).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer as Backend

from octavo.errors import PromptError


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

    def prepare(self) -> None:
        """Load now what encoding needs, where that was put off."""

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
        from octavo.models.chat_template import render_chat  # the template language is imported by those who use it

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
