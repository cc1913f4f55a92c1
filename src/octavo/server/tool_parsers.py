"""Readers: from the text of a sample to the pieces of a chat message, content and tool calls, as they come.

One for each way in which models write calls: between marks, as one JSON object, or after a mark as a list. Text that is
no call of a known tool is content, in full. What `push` and `finish` return, joined, is exactly `message`.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from octavo.server.tool_scan import CallScanner

Delta = dict[str, Any]


class Reader:
    """Of one sample. limit: calls that are taken; text after the last of them is dropped (None: no limit)."""

    def __init__(self, names: Collection[str], limit: int | None = None) -> None:
        self._names = names
        self._limit = limit
        self._held = ""  # not decided yet
        self._call: CallScanner | None = None
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._deltas: list[Delta] = []

    @property
    def called(self) -> bool:
        """Was a tool called?"""
        return bool(self._calls)

    def push(self, text: str) -> list[Delta]:
        """More text; the deltas that are certain now."""
        self._held += text
        while self._held and self._advance():
            pass
        return self._take()

    def finish(self) -> list[Delta]:
        """The text has ended: what was held back is what it is."""
        if self._call is not None:
            self._give_arguments(self._call)
            if not self._call.started:
                self._give_content(self._opened() + self._call.written)
                self._broke()
            self._call = None
        self._give_content(self._leftover())
        self._held = ""
        return self._take()

    def message(self) -> dict[str, Any]:
        """After `finish`: the whole message."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self._calls else "")}
        if self._calls:
            message["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": "".join(c["text"])}}
                for c in self._calls
            ]
        return message

    # -- what the formats differ in --------------------------------------------------------------------------------

    def _advance(self) -> bool:
        """Use something of what is held; False when more text must come first."""
        raise NotImplementedError

    def _opened(self) -> str:
        """What stood before a call that turned out to be none."""
        raise NotImplementedError

    def _leftover(self) -> str:
        """What of the held text is content, at the end."""
        return self._held

    # -- pieces ----------------------------------------------------------------------------------------------------

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    @property
    def _full(self) -> bool:
        return self._limit is not None and len(self._calls) >= self._limit

    def _give_content(self, text: str) -> None:
        if self.called and not self._content:
            text = text.lstrip()  # a message does not begin with the line break after a call
        if text and not self._full:
            self._content.append(text)
            self._deltas.append({"content": text})

    def _give_arguments(self, call: CallScanner) -> None:
        first = not call.started
        text = call.fresh()
        if not text:
            return
        if first:
            self._calls.append({"id": f"call_{secrets.token_hex(12)}", "name": call.name, "text": []})
            made, function = self._calls[-1], {"name": call.name, "arguments": ""}
            self._piece({"id": made["id"], "type": "function", "function": function})
        self._calls[-1]["text"].append(text)
        self._piece({"function": {"arguments": text}})

    def _piece(self, call: dict[str, Any]) -> None:
        self._deltas.append({"tool_calls": [{"index": len(self._calls) - 1, **call}]})

    def _scan(self) -> bool:
        """Feed the open call; True when it is over, one way or the other."""
        assert self._call is not None
        taken = self._call.take(self._held)
        self._held = self._held[taken:]
        self._give_arguments(self._call)
        if self._call.broken:
            rest = "" if self._call.started else self._opened() + self._call.written
            self._call = None
            self._give_content(rest)
            self._broke()
            return True
        if self._call.done:
            self._call = None
            self._ended()
            return True
        return False

    def _broke(self) -> None:
        """A call was none."""

    def _ended(self) -> None:
        """A call is complete."""


class MarkedReader(Reader):
    """Content, and calls between marks: <tool_call>{…}</tool_call> (Hermes, Qwen, and this server's own convention).

    White space before a call is dropped, and after one unless text follows it.
    """

    def __init__(
        self, names: Collection[str], limit: int | None = None, *, begin: str = "<tool_call>", end: str = "</tool_call>"
    ) -> None:
        super().__init__(names, limit)
        self._begin, self._end = begin, end
        self._closing = False
        self._mark = ""  # the opening mark of the call, and the white space around it

    def _advance(self) -> bool:
        if self._call is not None:
            if not self._call.raw:
                stripped = self._held.lstrip()
                self._mark += self._held[: len(self._held) - len(stripped)]
                self._held = stripped
                if not stripped:
                    return False
            return self._scan()
        if self._closing:
            return self._close()
        at = self._held.find(self._begin)
        if at >= 0:
            content = self._held[:at].rstrip()
            self._give_content(content)
            self._mark = self._held[len(content) : at] + self._begin
            self._held = self._held[at + len(self._begin) :]
            self._call = None if self._full else CallScanner(self._names)
            return True
        certain = self._held[: len(self._held) - _overlap(self._held, self._begin)].rstrip()
        self._give_content(certain)
        self._held = self._held[len(certain) :]
        return False

    def _ended(self) -> None:
        self._closing = True

    def _close(self) -> bool:
        """The closing mark, if it is there."""
        text = self._held.lstrip()
        if text.startswith(self._end):
            self._held = text[len(self._end) :]
        elif self._end.startswith(text):
            return False
        self._closing = False
        return True

    def _opened(self) -> str:
        return self._mark

    def _leftover(self) -> str:
        if self._closing and self._end.startswith(self._held.strip()):
            return ""
        return self._held.rstrip() if self.called else self._held


class ObjectReader(Reader):
    """The whole text is a call, {"name": …, "parameters": {…}}, or several with ";" between, or content (Llama 3)."""

    MARK = "<|python_tag|>"

    def __init__(self, names: Collection[str], limit: int | None = None) -> None:
        super().__init__(names, limit)
        self._plain = False
        self._before = ""

    def _advance(self) -> bool:
        if self._plain:
            self._give_content(self._held)
            self._held = ""
            return False
        if self._call is None:
            return self._open()
        return self._scan()

    def _broke(self) -> None:
        self._plain = True

    def _open(self) -> bool:
        text = self._held.lstrip(" \t\r\n;" if self.called else " \t\r\n")
        if not text or (self.MARK.startswith(text) and not self.called):
            return False
        if text.startswith(self.MARK):
            text = text[len(self.MARK) :].lstrip()
            if not text:
                return False
        if text.startswith("{") and not self._full:
            self._before = self._held[: len(self._held) - len(text)]
            self._held = text
            self._call = CallScanner(self._names)
        else:
            self._plain = True
        return True

    def _opened(self) -> str:
        return self._before

    def _leftover(self) -> str:
        return "" if self.called and not self._held.strip(" \t\r\n;") else self._held


class ListReader(Reader):
    """Content, then a mark and a list of calls: [TOOL_CALLS][{…}, {…}] (Mistral); newer: [TOOL_CALLS]name[ARGS]{…}."""

    def __init__(self, names: Collection[str], limit: int | None = None, *, begin: str = "[TOOL_CALLS]") -> None:
        super().__init__(names, limit)
        self._begin = begin
        self._inside = False
        self._before = ""

    def _advance(self) -> bool:
        if self._call is not None:
            return self._scan()
        if self._inside:
            return self._open()
        at = self._held.find(self._begin)
        if at >= 0:
            content = self._held[:at].rstrip()
            self._give_content(content)
            self._before = self._held[len(content) : at] + self._begin
            self._held = self._held[at + len(self._begin) :]
            self._inside = True
            return True
        certain = self._held[: len(self._held) - _overlap(self._held, self._begin)].rstrip()
        self._give_content(certain)
        self._held = self._held[len(certain) :]
        return False

    def _open(self) -> bool:
        """The next call of the list, in either form."""
        if self._full:
            self._held = ""
            return False
        text = self._held
        while (rest := self._separated(text)) is not None:
            text = rest
        if not text or self._begin.startswith(text):
            return False
        if not self.called:
            self._before += self._held[: len(self._held) - len(text)]
        self._held = text
        if text.startswith("{"):
            self._call = CallScanner(self._names)
            return True
        name, mark, rest = text.partition("[ARGS]")
        if not mark and any(f"{known}[ARGS]".startswith(text) for known in self._names):
            return False
        if mark and name.strip() in self._names:
            self._before += name + mark
            self._call = CallScanner(self._names)
            self._call.begin_named(name.strip())
            self._held = rest.lstrip()
            return bool(self._held)
        self._give_content(("" if self.called else self._before) + self._held)
        self._held = ""
        self._broke()
        return False

    def _separated(self, text: str) -> str | None:
        """The text without a separator at its head; None if there is none."""
        if text.startswith(self._begin):
            return text[len(self._begin) :]
        if text[:1] in tuple(" \t\r\n,]") or (text.startswith("[") and not self._begin.startswith(text)):
            return text[1:]
        return None

    def _broke(self) -> None:
        self._inside, self._before = False, ""

    def _opened(self) -> str:
        return self._before

    def _leftover(self) -> str:
        if not self._inside:
            return self._held
        return "" if not self._held.strip(" \t\r\n[,]") and self.called else self._before + self._held


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
