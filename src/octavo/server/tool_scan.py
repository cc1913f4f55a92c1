"""`CallScanner`: one call, {"name": …, "arguments": {…}}, read character by character while it is being written.

The arguments are passed on as they come, as the text they are, so that what a client joins is exactly what the model
wrote. It knows no format around the call and no tools; what is no such object is `broken`, and what was read of it can
be had back as text.
"""

from __future__ import annotations

import json
from collections.abc import Collection

ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"
_HEAD = '{"arguments":'


class CallScanner:
    """Feed it with `take`. name: once known. done: the object is complete. broken: it is no call.

    fresh: characters of the arguments that have come since it was last emptied; only once the name is known.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.name: str | None = None
        self.done = False
        self.broken = False
        self.started = False  # something of the arguments has been given out
        self.raw = ""  # everything taken, and what is implied before it
        self._implied = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._value_at: int | None = None  # where in `raw` the current value of the outer object begins
        self._expect_key = True
        self._colon = False
        self._arguments: str | None = None  # complete
        self._streaming = False
        self._given = 0  # characters of the arguments' text given out

    def begin_named(self, name: str) -> None:
        """The name stood before the object, which is the arguments alone."""
        self.name = name
        self.take(_HEAD)
        self._implied = len(_HEAD)

    @property
    def written(self) -> str:
        """The text that was taken."""
        return self.raw[self._implied :]

    def take(self, text: str) -> int:
        """Take characters until the call is complete or broken; returns how many were taken."""
        for place, character in enumerate(text):
            self.raw += character
            self._step(character)
            if self.done or self.broken:
                return place + 1
        return len(text)

    def fresh(self) -> str:
        """Arguments that have come since the last call of this; "" while the name is not known."""
        if self.name is None or self.broken:
            return ""
        if self._arguments is not None:
            text = self._arguments
        elif self._streaming and self._value_at is not None:
            text = self.raw[self._value_at :]
        else:
            text = "{}" if self.done else ""
        new, self._given = text[self._given :], len(text)
        self.started = self.started or bool(new)
        return new

    def _step(self, character: str) -> None:
        if self._in_string:
            self._string(character)
        elif character == '"':
            self._in_string = True
            if self._depth == 1:
                self._begin_value()
            self.broken = self.broken or self._depth == 0
        elif character in "{[":
            if self._depth == 1:
                self._begin_value(streams=character == "{")
            self._depth += 1
            self.broken = self.broken or (self._depth == 1 and character == "[")
        elif character in "}]":
            self._close(character)
        elif self._depth == 1 and character == ",":
            self._end_value(1)
        elif self._depth == 0 and character not in _SPACE:
            self.broken = True
        elif self._depth == 1 and character == ":":
            self.broken = self.broken or self._colon or self._expect_key
            self._colon = True
        elif self._depth == 1 and character not in _SPACE:
            self._begin_value()

    def _string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and self._expect_key and self._value_at is not None:
                self._key = self._text(self.raw[self._value_at :])
                self._value_at, self._expect_key, self._colon = None, False, False

    def _begin_value(self, streams: bool = False) -> None:
        if self._value_at is None:
            self._value_at = len(self.raw) - 1
            self.broken = self.broken or (self.raw[-1] != '"' if self._expect_key else not self._colon)
            # The name must be known before anything of the call is given out.
            self._streaming = streams and self._key in ARGUMENTS

    def _end_value(self, closing: int) -> None:
        """A value of the outer object ends before the last `closing` characters of `raw`."""
        if self._key is None or self._value_at is None:
            self.broken = self.broken or self._key is not None or self.raw[-1] == ","
            return
        value = self.raw[self._value_at : len(self.raw) - closing].strip()
        if self._key == "name":
            self.name = self._text(value)
            self.broken = self.broken or self.name not in self._names
        elif self._key in ARGUMENTS and self._arguments is None:
            self._end_arguments(value)
        self._key, self._value_at, self._expect_key, self._streaming = None, None, True, False

    def _end_arguments(self, value: str) -> None:
        """Complete; some models write the object as a string."""
        text = self._text(value) if value.startswith('"') else value
        try:
            parsed = json.loads(text or "")
        except (ValueError, RecursionError):
            self.broken = True
            return
        if parsed is None:
            text = "{}"
        self.broken = self.broken or not isinstance(parsed, dict | None)
        self._arguments = text

    def _close(self, character: str) -> None:
        self._depth -= 1
        if self._depth < 0:
            self.broken = True
        elif self._depth == 0:
            self._end_value(1)
            self._finish(character)
        elif self._depth == 1 and self._streaming and self._value_at is not None:
            self._end_arguments(self.raw[self._value_at :])
            self._streaming = False
            if self._implied:
                self._finish(character)

    def _finish(self, character: str) -> None:
        self.done = not self.broken and character == "}" and self.name is not None
        self.broken = not self.done

    def _text(self, quoted: str) -> str | None:
        try:
            value = json.loads(quoted)
        except ValueError:
            return None
        return value if isinstance(value, str) else None
