"""Imports run one way, the core needs no tensors, files stay readable, the public names are sorted and complete."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import octavo

SOURCE = Path(octavo.__file__).parent
MODULES = sorted(p for p in SOURCE.rglob("*.py"))

#: part -> the parts it may import at run time. A part is a package, or the modules named after it.
WORDS = {"errors", "config", "sampling_params"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "config": {"errors"},
    "sampling_params": {"errors"},
    "outputs": set(),
    "logs": {"errors"},
    "interrupts": set(),
    "devices": {"errors"},
    "core": WORDS,
    "inspect": {"core", "errors"},
    "planning": {"core", *WORDS},
    "kernels": {"devices", "core", "errors"},
    "models": {"devices", "kernels", "logs", *WORDS},
    "text": {"outputs", "errors", "sampling_params"},
    "runner": {"devices", "core", "kernels", "models", "logs", *WORDS},
    "grammar": {"models", "text", *WORDS},
    "engine": {"devices", "core", "kernels", "models", "runner", "grammar", "text", "outputs", "logs", *WORDS},
    "llm": {"engine", "text", "outputs", "logs", "interrupts", *WORDS},
    "attention": {"core", "kernels", "models", "runner", "inspect", "devices", *WORDS},
    "integrations": {"attention", "core", "errors"},
    "server": {
        "llm", "engine", "grammar", "inspect", "core", "models", "text", "outputs", "logs", "interrupts", "package",
        *WORDS,
    },
    "bench": {
        "llm", "engine", "inspect", "planning", "attention", "integrations", "core", "runner", "kernels", "models",
        "text", "outputs", "logs", "package", "devices", *WORDS,
    },
    "cli": {
        "llm", "engine", "server", "inspect", "planning", "bench", "core", "models", "text", "outputs", "logs",
        "interrupts", "package", "devices", *WORDS,
    },
}  # fmt: skip
#: Modules at the top of the package that belong to a larger part.
PART_OF = {
    "attention_settings": "engine", "builder": "engine", "sizing": "engine", "lora": "engine", "speculation": "engine",
    "door": "engine", "starting": "engine",
    "engine_stats": "engine", "overlapping": "engine", "device_setup": "engine", "request_text": "engine",
    "async_command": "llm", "async_engine": "llm", "async_request": "llm", "latency": "llm",
    "turns": "interrupts", "driver": "llm", "streaming": "llm", "progress": "llm", "vllm_names": "llm",
    "paged": "attention", "functional": "attention", "host_memory": "devices", "host_room": "devices",
    "npu_device": "devices", "__init__": "package", "__main__": "cli",
}  # fmt: skip
#: Single imports against the direction, with their reasons.
ALLOWED = {
    ("kernels", "octavo.models.spec"): "plain numbers of a model, no code",
    ("config", "octavo.core.speculative_setting"): "what speculative may be, refused where it is given; plain values",
    ("config", "octavo.core.lora_setting"): "what lora may be, refused where it is given; plain values",
    ("config", "octavo.core.kv_format"): "what kv_cache_dtype may be, refused where it is given; plain numbers",
    ("config", "octavo.core.weight_format"): "what quantization may be, refused where it is given; plain numbers",
    ("models", "octavo.core.weight_format"): "what quantization may be and the bytes it makes; plain numbers",
    ("models", "octavo.core.weight_recipe"): "which matrix gets which format; plain numbers",
    ("cli", "octavo.progress"): "the progress bar of loading",
    ("bench", "octavo.cli.options"): "its subcommands take the options of an engine as the others do",
    ("bench", "octavo.server.app"): "what watching the block map costs is measured on the real server",
    ("bench", "octavo.server.settings"): "the same",
}
#: Files over 400 lines, with their reasons.
LONG_FILES: dict[str, str] = {}


def part_of(module: str) -> str:
    """octavo.core.memory -> core; octavo.door -> engine; octavo -> package."""
    names = module.split(".")[1:]
    if not names:
        return "package"
    return PART_OF.get(names[0], names[0])


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of everything imported at run time, also inside functions; what only types need is left out."""

    def walk(node: ast.AST) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for other in node.orelse:
                yield from walk(other)
            return
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            base = node.module or ""
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if base.startswith("octavo") and is_module(inner) else base
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")))


def is_module(name: str) -> bool:
    at = SOURCE.parent.joinpath(*name.split("."))
    return at.with_suffix(".py").exists() or (at / "__init__.py").exists()


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    own = (
        PART_OF.get(path.stem, "package")
        if path.parent == SOURCE and path.stem == "__init__"
        else part_of(module_name(path))
    )
    if own == "package":
        return  # octavo/__init__ names everything, lazily
    assert own in MAY_IMPORT, f"{path.name}: give the part {own!r} a place in MAY_IMPORT"
    for line, module in imports_of(path):
        if module.split(".")[0] != "octavo":
            continue
        other = part_of(module)
        if other == own or other in MAY_IMPORT[own] or (own, module) in ALLOWED:
            continue
        raise AssertionError(f"{path.relative_to(SOURCE)}:{line}: {own} must not import {module}")


def test_the_order_has_no_circle() -> None:
    settled: set[str] = {"package"}
    rest = dict(MAY_IMPORT)
    while rest:
        ready = [part for part, others in rest.items() if others <= settled]
        assert ready, f"these import each other: {sorted(rest)}"
        for part in ready:
            settled.add(part)
            del rest[part]


@pytest.mark.parametrize("path", sorted((SOURCE / "core").glob("*.py")), ids=lambda p: p.name)
def test_the_core_imports_nothing_but_the_standard_library(path: Path) -> None:
    for line, module in imports_of(path):
        top = module.split(".")[0]
        assert top == "octavo" or top in sys.stdlib_module_names, f"{path.name}:{line} imports {module}"


def run_python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout.strip()


def test_the_core_runs_where_there_are_no_tensors() -> None:
    names = [module_name(p) for p in sorted((SOURCE / "core").glob("*.py"))]
    program = "import sys, importlib\nfor n in ('torch', 'numpy', 'transformers', 'rich'): sys.modules[n] = None\n"
    program += f"for n in {names}: importlib.import_module(n)\nimport octavo.inspect.terminal\nprint('fine')"
    assert run_python(program) == "fine"


def test_importing_the_package_is_light() -> None:
    program = (
        "import sys, octavo, octavo.config, octavo.sampling_params, octavo.outputs\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'tokenizers', 'rich'} & set(sys.modules)))"
    )
    assert run_python(program) == "[]"


def test_files_are_short_or_have_a_reason() -> None:
    long = {str(p.relative_to(SOURCE)) for p in MODULES if len(p.read_text(encoding="utf-8").splitlines()) > 400}
    assert long == set(LONG_FILES), "over 400 lines without a reason, or a reason for a file that is short"


def test_public_names_are_sorted_complete_and_there() -> None:
    assert octavo.__all__ == sorted(octavo.__all__) == sorted({*octavo._HOME, "__version__"})
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    assert dir(octavo) == octavo.__all__
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'; it has AuditError"):
        _ = octavo.Nothing


def test_every_error_and_every_public_value_class_is_exported() -> None:
    from octavo import errors, outputs, sampling_params

    ours = [
        name
        for module in (outputs, sampling_params)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert set(ours) <= set(octavo.__all__)
    # The two causes of an InternalError that no caller can act on stay where they are.
    raised = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert raised - set(octavo.__all__) == {"BoundsError", "OutOfBlocksError"}


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(p.relative_to(SOURCE))
        for p in MODULES
        if p.read_text().strip() and not ast.get_docstring(ast.parse(p.read_text()))
    ]
    assert silent == []
