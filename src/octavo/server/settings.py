"""`ServerSettings`: what the server was told, from flags, environment and a file; and the report of what is in force.

A flag wins over `OCTAVO_<NAME>` in the environment, which wins over the TOML file (`--config`, `OCTAVO_CONFIG`), which
wins over the default. The engine's own settings come the same ways. Nothing is silently ignored: an unknown name in
the file is an error, an unknown OCTAVO_ variable a warning. No FastAPI here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError

PREFIX = "OCTAVO_"
#: OCTAVO_ variables that belong to others.
FOREIGN = {"OCTAVO_LOG", "OCTAVO_DEBUG", "OCTAVO_CACHE", "OCTAVO_TOKENIZER_CACHE", "OCTAVO_ISA", "OCTAVO_CONFIG"}
#: Settings of the engine that the server does not take, with the reason.
NOT_HERE = {
    "debug": "use OCTAVO_DEBUG=blocks, or --debug",
    "max_queue": "the server sheds load itself: use max_waiting",
}
#: An origin: scheme, host and perhaps port, nothing after it.
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\sA-Z/?#@]+")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server; every one has a default.

    api_keys: who may come in (none: everybody who can reach the port). served_model_name: names that requests may use
    (none: the model's own). chat_template: a Jinja file, or "plain", instead of the model's own. max_waiting: requests
    that may wait before new ones get 429. max_body_bytes, max_header_bytes, max_json_depth, max_prompts, max_n,
    max_schema_bytes, max_connections: refused beyond. receive_seconds: a request must have come in whole by then.
    stall_seconds: a reader who takes nothing for so long loses its request. drain_seconds: what runs at SIGTERM may
    finish for so long. default_deadline_ms: for requests without one. cors_origins: pages that may call ("*": all).
    access_log: a line per HTTP request. request_log: file for one JSON line per finished request ("-": stderr).
    blocks: serve the block map; show_tokens: with texts in it.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    served_model_name: tuple[str, ...] = ()
    chat_template: str | None = None
    max_waiting: int = 512
    max_connections: int = 2048
    max_body_bytes: int = 4 << 20
    max_header_bytes: int = 32 << 10
    max_json_depth: int = 64
    max_prompts: int = 256
    max_n: int = 32
    max_schema_bytes: int = 64 << 10
    receive_seconds: float = 30.0
    stall_seconds: float = 60.0
    drain_seconds: float = 30.0
    default_deadline_ms: float | None = None
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False
    request_log: str | None = None
    blocks: bool = True
    show_tokens: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, _typed(f.name, str(f.type), getattr(self, f.name)))
        self._range("port", 0, 65535)
        for name in ("max_waiting", "max_connections", "max_prompts", "max_n", "max_json_depth"):
            self._range(name, 1, 10**6)
        for name in ("max_body_bytes", "max_header_bytes", "max_schema_bytes"):
            self._range(name, 256, 1 << 31)
        for name in ("receive_seconds", "stall_seconds"):
            self._range(name, 0.05, 86400.0)
        self._range("drain_seconds", 0.0, 86400.0)
        if self.default_deadline_ms is not None:
            self._range("default_deadline_ms", 1.0, 1e12)
        if not self.host:
            raise ConfigError("host='': give an address, such as 127.0.0.1 (this machine only) or 0.0.0.0 (everybody)")
        for origin in self.cors_origins:
            if origin != "*" and ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"cors_origins: {origin!r} is no origin as browsers send it; give https://host[:port], in small "
                    "letters and without a path, or *"
                )
        for number, key in enumerate(self.api_keys, 1):
            _check_key(key, f"api_keys: key {number}")

    def _range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ConfigError(f"{name}={value!r}: must lie between {low} and {high}")

    def all_keys(self) -> tuple[str, ...]:
        """Keys given outright and those in the file: one a line, empty lines and lines that begin with # skipped."""
        if self.api_key_file is None:
            return self.api_keys
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file={self.api_key_file}: {error}") from error
        keys = {
            n: line.strip() for n, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")
        }
        if not keys:
            raise ConfigError(f"api_key_file={self.api_key_file}: no key in it")
        for number, key in keys.items():
            _check_key(key, f"api_key_file={self.api_key_file}, line {number}")
        return (*self.api_keys, *keys.values())


@dataclass(frozen=True)
class Loaded:
    """Settings and where each came from: "flag", "environment", "file" or "default"."""

    server: ServerSettings
    engine: dict[str, Any]  # of EngineConfig, those that were given
    sources: Mapping[str, str]
    warnings: tuple[str, ...]

    def report(self, engine: Mapping[str, Mapping[str, Any]] | None = None) -> list[str]:
        """One line per setting in force, keys hidden. engine: `Engine.settings()`, once it is known."""
        rows = [(f.name, _shown(f.name, getattr(self.server, f.name))) for f in fields(self.server)]
        lines = [f"{name} = {value}  ({self.sources.get(name, 'default')})" for name, value in rows]
        for name, row in (engine or {}).items():
            source = self.sources.get(name)
            why = f"{source}; {row['why']}" if source and row["why"] != "as asked" else source or row["why"]
            lines.append(f"{name} = {row['chosen']}  ({why})")
        return lines


def load(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None, file: str | None = None) -> Loaded:
    """Settings from flags that were given, the environment (None: this process's), and a TOML file.

    The file holds names of settings, of both kinds at its top, each of its own kind in the tables [server] and
    [engine]. Raises `ConfigError`.
    """
    environment = os.environ if environment is None else environment
    known = {f.name: str(f.type) for f in fields(ServerSettings)}
    engine_types = {f.name: str(f.type) for f in fields(EngineConfig) if f.name not in NOT_HERE}
    file = file or environment.get("OCTAVO_CONFIG") or None
    given: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in (_read_file(file, known, engine_types) if file else {}).items():
        given[name], sources[name] = value, "file"
    warnings = []
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable in FOREIGN:
            continue
        name = variable.removeprefix(PREFIX).lower()
        name = {"api_key": "api_keys"}.get(name, name)
        if name in known or name in engine_types:
            given[name], sources[name] = _parse(name, (known | engine_types)[name], text, variable), "environment"
        else:
            warnings.append(f"{variable} is set, but there is no setting {name}; it has no effect")
    for name, value in flags.items():
        given[name], sources[name] = value, "flag"
    server = ServerSettings(**{n: v for n, v in given.items() if n in known})
    engine = {n: v for n, v in given.items() if n not in known}
    return Loaded(server, engine, sources, tuple(warnings))


def _read_file(path: str, server: Mapping[str, str], engine: Mapping[str, str]) -> dict[str, Any]:
    """The settings in the file, checked. server, engine: name -> type of what may stand in the table of that name."""
    try:
        with open(path, "rb") as file:
            content = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {error}") from error
    tables = {"server": server, "engine": engine}
    top = {n: v for n, v in content.items() if not isinstance(v, dict) or n in engine}
    for table in content:
        if table not in top and table not in tables:
            raise ConfigError(f"config file {path}: unknown table [{table}]; known: [server], [engine]")
    found: dict[str, Any] = {}
    for table, types in {"": {**server, **engine}, **tables}.items():
        for name, value in (content.get(table, {}) if table else top).items():
            where = f"config file {path}: " + (f"[{table}] " if table else "")
            if name in found:
                raise ConfigError(f"{where}{name} is there twice, at the top and in a table; give it once")
            _check_name(where, name, types, tables)
            try:
                found[name] = _typed(name, types[name], value)
            except ConfigError as error:
                raise ConfigError(f"{where}{error}") from None
    return found


def _check_name(where: str, name: str, types: Mapping[str, str], tables: Mapping[str, Mapping[str, str]]) -> None:
    if name in types:
        return
    if name in NOT_HERE:
        raise ConfigError(f"{where}{name} is no setting of the server; {NOT_HERE[name]}")
    for other, names in tables.items():
        if name in names:
            raise ConfigError(f"{where}{name} belongs into [{other}]")
    raise ConfigError(f"{where}unknown setting {name}; known: {', '.join(sorted(types))}")


def _parse(name: str, kind: str, text: str, variable: str) -> Any:
    """The value of an environment variable."""
    if "tuple" in kind:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    try:
        if "bool" in kind:
            return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False,
                    "off": False}[text.strip().lower()]  # fmt: skip
        if "int" in kind:
            return int(text)
        if "float" in kind:
            return float(text)
    except (KeyError, ValueError):
        wanted = "true or false" if "bool" in kind else "a number"
        raise ConfigError(f"{variable}={text!r}: must be {wanted}") from None
    return text


def _typed(name: str, kind: str, value: Any) -> Any:
    """The value in the type of its field; a TOML file, say, has lists where a tuple is meant."""
    if "tuple" in kind:
        value = (value,) if isinstance(value, str) else value
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"{name}: must be a list of strings")
        return tuple(value)
    if value is None and "None" in kind:
        return None
    wanted: tuple[type, ...] = (str,)
    if "Mapping" in kind:
        wanted = (dict, str)
    elif "bool" in kind:
        wanted = (bool,)
    elif "float" in kind:
        wanted = (int, float)
    elif "int" in kind:
        wanted = (int,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise ConfigError(f"{name}={value!r}: must be of type {wanted[-1].__name__}")
    return value


def _check_key(key: str, where: str) -> None:
    """Raises `ConfigError` that says where the key stands, never what it is."""
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{where}: a key has at least 8 printable ASCII characters and no blank")


def _shown(name: str, value: Any) -> str:
    if name == "api_keys":
        return f"{len(value)} given" if value else "none"
    return repr(value) if not isinstance(value, tuple) else ", ".join(value) or "none"
