"""Conversations as JSON lines, one conversation a line:

    {"arrival": 0.0,
     "system": {"name": "helpdesk", "tokens": 1200},
     "turns": [{"user": 35, "assistant": 210},
               {"user": 18, "assistant": 160, "wait": 6.5}]}

arrival   seconds since the beginning of the trace (default 0)
system    optional: what the first prompt begins with. Systems of one name are the same text in every conversation.
turns     in order. The prompt of turn k is the system, every earlier user and assistant text, and this user's: so a
          prefix cache finds all of it but `user` tokens. `wait`: seconds between the answer before and this turn (0).

Numbers of tokens are at least 1. Unknown keys are refused, since nobody can tell what they were meant to do.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.planning.trace import MOST_TOKENS, SYSTEM, Run, TraceRequest


def jsonl_requests(path: Path, lines: Iterator[str]) -> list[TraceRequest]:
    """Every turn as a request, first turns in order of arrival, later ones behind the turn that they follow."""
    conversations: list[tuple[float, int, list[TraceRequest]]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"trace {path}, line {number}"
        try:
            given = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: is no JSON ({error.msg} at column {error.colno})") from None
        turns = conversation_requests(given, f"conversation {number}", where)
        conversations.append((turns[0].arrival, number, turns))
    conversations.sort(key=lambda c: c[:2])
    requests: list[TraceRequest] = []
    for _, _, turns in conversations:
        first = len(requests)
        for turn in turns:
            after = None if turn.after is None else first + turn.after
            requests.append(
                TraceRequest(turn.arrival, turn.prompt_tokens, turn.output_tokens, turn.runs, turn.output_name, after)
            )
    return requests


def conversation_requests(given: Any, name: str, where: str) -> list[TraceRequest]:
    """The turns of one conversation; `after` counts from its first turn. Raises `ConfigError`."""
    known = _object(given, {"arrival", "system", "turns"}, where, "a conversation")
    arrival = _seconds(known.get("arrival", 0.0), "arrival", where)
    turns = known.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f'{where}: "turns" must be a non-empty list of {{"user": tokens, "assistant": tokens}}')
    runs: list[Run] = []
    if (system := known.get("system")) is not None:
        runs.append(_system(system, where))
    requests = []
    for index, turn in enumerate(turns):
        here = f"{where}, turn {index}"
        values = _object(turn, {"user", "assistant", "wait"}, here, "a turn")
        if index == 0 and "wait" in values:
            raise ConfigError(f'{here}: "wait" has no effect in the first turn; use the "arrival" of the conversation')
        runs.append((f"{name}, user {index}", _count(values.get("user"), "user", here)))
        output = _count(values.get("assistant"), "assistant", here)
        answer = f"{name}, assistant {index}"
        prompt = sum(tokens for _, tokens in runs)
        wait = _seconds(values.get("wait", 0.0), "wait", here)
        after = index - 1 if index else None
        requests.append(TraceRequest(wait if index else arrival, prompt, output, tuple(runs), answer, after))
        runs.append((answer, output))
    return requests


def _system(given: Any, where: str) -> Run:
    values = _object(given, {"name", "tokens"}, where, '"system"')
    name = values.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f'{where}: "system" needs a "name": systems of one name are the same text')
    return f"{SYSTEM} {name}", _count(values.get("tokens"), "tokens", where)


def _object(given: Any, keys: set[str], where: str, what: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: {what} must be an object with {', '.join(sorted(keys))}, not {given!r:.60}")
    unknown = sorted(set(given) - keys)
    if unknown:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r} in {what}; known are {', '.join(sorted(keys))}")
    return given


def _count(value: Any, name: str, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise ConfigError(f'{where}: "{name}" is {value!r}; a whole number from 1 to {MOST_TOKENS} is needed')
    return value


def _seconds(value: Any, name: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ConfigError(f'{where}: "{name}" is {value!r}; a number of seconds of at least 0 is needed')
    return float(value)
