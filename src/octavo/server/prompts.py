"""Prompts of requests: conversations through the model's chat template, texts, token ids. Long ones off the loop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from octavo.async_engine import AsyncEngine
from octavo.errors import ConfigError, PromptError
from octavo.llm import LLM
from octavo.server.errors import ApiError
from octavo.server.protocol.chat import Message
from octavo.text.prompts import Prompt

#: Templates by name, for models without one.
TEMPLATES = {
    "plain": (
        "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    )
}


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """What is wrong with a prompt is refused under the name of the field that it came in."""
    try:
        yield
    except PromptError as error:
        raise ApiError(400, str(error), param=field, code="invalid_prompt") from error
    except ApiError as error:
        if error.param == "prompt":  # the name for those who know no route
            error.param = field
        raise


def read_template(given: str | None) -> str | None:
    """The Jinja source of a name in `TEMPLATES` or of a file. Raises `ConfigError`."""
    if given is None or given in TEMPLATES:
        return None if given is None else TEMPLATES[given]
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={given}: {error}; give a file, or one of {', '.join(TEMPLATES)}") from error


def as_template_message(message: Message) -> dict[str, Any]:
    """The message as chat templates expect it: plain text, arguments of calls as objects."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.role not in ("assistant", "tool") and content is None:
        raise ApiError(400, f"messages: one of role {message.role!r} has no content", param="messages", code="missing")
    if message.tool_calls is not None:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
        plain["content"] = content or ""
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ApiError(
            400, f"messages: the arguments of a tool call are no JSON: {text[:80]!r}", param="messages"
        ) from None


async def conversation(
    engine: AsyncEngine,
    messages: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Prompt:
    """A conversation as a prompt, exactly as `LLM.chat` makes it. template: the server's own, if it was given one."""
    tokenizer = engine.engine.tokenizer
    if template is None and tokenizer is not None and not tokenizer.has_chat_template:
        raise ApiError(
            400,
            "this model has no chat template (a base model continues text rather than answering): use /v1/completions, "
            "or start the server with --chat-template FILE (or `plain`)",
            param="messages",
            code="no_chat_template",
        )
    reserved = {"messages", "tools", "add_generation_prompt", "template", "self", "documents"} & set(variables or {})
    if reserved:
        message = f"chat_template_kwargs: {', '.join(sorted(reserved))} cannot be given here"
        raise ApiError(400, message, param="chat_template_kwargs")
    llm = LLM.from_engine(engine.engine)  # for its chat_prompt, which touches the tokenizer alone

    def work() -> Prompt:
        return llm.chat_prompt(
            messages,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            chat_template_kwargs=variables,
        )

    length = sum(len(str(m.get("content") or "")) for m in messages) + (len(str(tools)) if tools else 0)
    return await engine.off_loop(work, length)


async def texts(engine: AsyncEngine, prompt: Any, *, add_special_tokens: bool = True) -> list[Prompt]:
    """OpenAI's `prompt`: a text, token ids, or a list of either; all encoded."""
    if isinstance(prompt, str):
        return [await _encoded(engine, prompt, add_special_tokens)]
    if not prompt:
        raise PromptError("the list is empty: give at least one text or one token")
    if isinstance(prompt[0], int):
        return [Prompt(token_ids=tuple(prompt))]
    return [
        await _encoded(engine, each, add_special_tokens) if isinstance(each, str) else Prompt(token_ids=tuple(each))
        for each in prompt
    ]


async def _encoded(engine: AsyncEngine, text: str, add_special_tokens: bool) -> Prompt:
    if not text or add_special_tokens:
        return await engine.encode(Prompt(text))
    tokenizer = engine.engine.tokenizer
    if tokenizer is None:
        raise PromptError("the engine has no tokenizer; give token ids")
    ids = await engine.off_loop(lambda: tokenizer.encode(text, add_special_tokens=False), len(text))
    return Prompt(text, tuple(ids))
