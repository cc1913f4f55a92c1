"""How a family of models writes tool calls: the reader that understands it, and the grammar that enforces it.

The family is recognised by its chat template. A model whose template knows no tools is told the `marked` form in the
system message (`tool_messages.py`), so every model has one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.grammar.compiler import WHITE_SPACE
from octavo.server.tool_parsers import ListReader, MarkedReader, ObjectReader, Reader

if TYPE_CHECKING:
    from octavo.models.tokenizer import Tokenizer

MAX_CALLS = 8  # in one answer that must call
BEGIN, END, LIST_MARK, ARGS_MARK = "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"


@dataclass(frozen=True)
class CallableFunction:
    """A function that may be called. schema: of its arguments; strict: they are held to it."""

    name: str
    schema: dict[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """marks: texts that may be special tokens of the tokenizer; then they are kept in the text."""

    name: str
    reader: Callable[[Collection[str], int | None], Reader]
    forced: Callable[[Sequence[CallableFunction], bool, Callable[[str], str]], list[str]]
    free: Callable[[Callable[[str], str]], list[str]]
    marks: tuple[str, ...]

    def has_special_mark(self, tokenizer: Tokenizer) -> bool:
        """Would a mark vanish from a text without special tokens?"""
        return any(tokenizer.token_id(mark) in tokenizer.special_ids for mark in self.marks)

    def forced_grammar(self, functions: Sequence[CallableFunction], many: bool, tokenizer: Tokenizer) -> str:
        """The whole answer is a call of one of `functions`, or several where `many`."""
        return "\n".join([*self.forced(functions, many, _speller(tokenizer)), *_arguments(functions, strict=True)])

    def free_grammar(self, functions: Sequence[CallableFunction], tokenizer: Tokenizer) -> str:
        """Any text, but what looks like a call is one, with arguments that fit where the function is strict."""
        spell = _speller(tokenizer)
        lines = [*self.free(spell), f"call: {_any_of(functions)}", *_functions(self, functions, spell)]
        return "\n".join([*lines, *_arguments(functions, strict=False)])


def _speller(tokenizer: Tokenizer) -> Callable[[str], str]:
    """A mark as a grammar writes it: a special token by its id, other text in quotes."""

    def spell(mark: str) -> str:
        token = tokenizer.token_id(mark)
        return f"<[{token}]>" if token is not None and token in tokenizer.special_ids else json.dumps(mark)

    return spell


def _rule(place: int, function: CallableFunction) -> str:
    return f"{place}_" + re.sub(r"[^a-z0-9_]", "_", function.name.lower())


def _any_of(functions: Sequence[CallableFunction]) -> str:
    return " | ".join(f"call_{_rule(i, f)}" for i, f in enumerate(functions))


def _arguments(functions: Sequence[CallableFunction], *, strict: bool) -> list[str]:
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": False, "coerce_one_of": False}
    return [
        f"arguments_{_rule(i, f)}: %json "
        + json.dumps({**(f.schema if strict or f.strict else {"type": "object"}), "x-guidance": options})
        for i, f in enumerate(functions)
    ]


def _functions(form: ToolFormat, functions: Sequence[CallableFunction], spell: Callable[[str], str]) -> list[str]:
    """One rule for each function: its call as this family writes it, without what stands around."""
    lines = []
    for i, function in enumerate(functions):
        if form.name == "mistral_args":
            head, tail = f"{json.dumps(function.name)} {spell(ARGS_MARK)}", ""
        else:
            key = "parameters" if form.name == "llama3" else "arguments"
            head = json.dumps(f'{{"name": {json.dumps(function.name)}, "{key}": ')
            tail = json.dumps("}")
        lines.append(f"call_{_rule(i, function)}: {head} arguments_{_rule(i, function)} {tail}")
    return lines


def _repeated(item: str, separator: str, many: bool) -> str:
    return f"{item} ({separator} {item})~0..{MAX_CALLS - 1}" if many else item


def _forced(name: str, start: Callable[[bool, Callable[[str], str]], str]) -> Any:
    def lines(functions: Sequence[CallableFunction], many: bool, spell: Callable[[str], str]) -> list[str]:
        rules = [f"start: {start(many, spell)}", f"call: {_any_of(functions)}"]
        return [*rules, *_functions(FORMATS[name], functions, spell)]

    return lines


TEXT = r"TEXT: /(.|\n)*/"
NEWLINE, COMMA, SPACE = json.dumps("\n"), json.dumps(", "), r"SPACE: /[ \n]{1,4}/"


def _lazy(spell: Callable[[str], str], mark: str) -> str:
    """The rule "text up to a mark". A special token needs no laziness: it is never part of a text."""
    spelled = spell(mark)
    return f"head: TEXT {spelled}" if spelled.startswith("<") else f"head[lazy]: TEXT {spelled}"


FORMATS: dict[str, ToolFormat] = {
    "marked": ToolFormat(
        "marked",
        MarkedReader,
        _forced(
            "marked",
            lambda many, spell: (
                f"{_repeated('item', NEWLINE, many)}\nitem: {spell(BEGIN)} {NEWLINE} call {NEWLINE} {spell(END)}"
            ),
        ),
        lambda spell: ["start: (head SPACE? call SPACE? " + spell(END) + ")* TEXT", _lazy(spell, BEGIN), TEXT, SPACE],
        (BEGIN, END),
    ),
    "llama3": ToolFormat(
        "llama3",
        ObjectReader,
        _forced("llama3", lambda many, spell: "call"),
        lambda spell: ["start: call | OTHER", r"OTHER: /([^{ \t\r\n](.|\n)*)?/"],
        (),
    ),
    "mistral": ToolFormat(
        "mistral",
        ListReader,
        _forced("mistral", lambda many, spell: f'{spell(LIST_MARK)} " "? "[" {_repeated("call", COMMA, many)} "]"'),
        lambda spell: ['start: TEXT | head " "? "[" call (", " call)* "]"', _lazy(spell, LIST_MARK), TEXT],
        (LIST_MARK,),
    ),
    "mistral_args": ToolFormat(
        "mistral_args",
        ListReader,
        _forced("mistral_args", lambda many, spell: f"{_repeated('item', '', many)}\nitem: {spell(LIST_MARK)} call"),
        lambda spell: ["start: (head call)* TEXT", _lazy(spell, LIST_MARK), TEXT],
        (LIST_MARK, ARGS_MARK),
    ),
}


def takes_tools(template: str) -> bool:
    """Does a chat template write tools itself?"""
    return re.search(r"\{[%{][^}]*?\btools\b", template) is not None


def format_of(template: str | None) -> ToolFormat:
    """The family that a chat template belongs to."""
    if template is None or not takes_tools(template):
        return FORMATS["marked"]
    if LIST_MARK in template:
        return FORMATS["mistral_args" if ARGS_MARK in template else "mistral"]
    if BEGIN in template:
        return FORMATS["marked"]
    return FORMATS["llama3" if '"parameters"' in template or "python_tag" in template else "marked"]
