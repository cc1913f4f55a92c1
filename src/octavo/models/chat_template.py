"""Rendering of chat templates: untrusted Jinja from model files, in a sandbox without attribute mutation.

Offers what templates written for the transformers library expect: `raise_exception`, `strftime_now`, a `tojson` that
does not escape HTML, loop controls, and the `{% generation %}` block (which renders as its content).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import PromptError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str],
    variables: Mapping[str, Any],
) -> str:
    """The prompt text. Raises `PromptError`: an empty conversation, a malformed message, what a template refuses."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise PromptError(f"messages={messages!r}: must be a non-empty list of messages")
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise PromptError(
                f"message {position} is {message!r}: must be a mapping with a 'role' and usually a 'content'"
            )
    # A null (content of a tool call) is left out: templates test for absence, not for None.
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    context = {
        "documents": None,
        **special_tokens,
        **variables,
        "messages": plain,
        "tools": list(tools) if tools is not None else None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compiled(template).render(**context)
    except jinja2.TemplateSyntaxError as error:
        raise PromptError(f"the chat template is broken at line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise PromptError(f"the chat template refuses these messages: {error}") from error
