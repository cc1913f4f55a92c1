"""Names to files: the embedded default, directories, files, hub ids, and what is said when there is nothing."""

from __future__ import annotations

import hashlib
import sys
import types
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from octavo.errors import ModelError
from octavo.models.cache import cache_dir, write_atomically
from octavo.models.resolve import DEFAULT_MODEL, DEMO_PACKAGE, resolve_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakePackage(types.ModuleType):
    """The demo package with a few bytes instead of a model."""

    MODEL_NAME = "m.gguf"
    content = b"GGUF demo"
    EXPECTED_SHA256 = hashlib.sha256(content).hexdigest()
    calls = 0
    fail = False

    def __init__(self, part: Path) -> None:
        super().__init__(DEMO_PACKAGE)
        part.write_bytes(self.content)
        self.part = part

    def chunk_paths(self) -> list[Path]:
        return [self.part]

    def assemble(self, path: Path, overwrite: bool) -> Path:
        self.calls += 1
        path.write_bytes(self.content[:4])
        if self.fail:
            raise ValueError("sha256 did not match")
        path.write_bytes(self.content)
        return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage(tmp_path / "part")
    monkeypatch.setitem(sys.modules, DEMO_PACKAGE, fake)
    return fake


def test_default_is_assembled_once(package: FakePackage, own_cache: Path) -> None:
    first, second = resolve_model(DEFAULT_MODEL), resolve_model(DEFAULT_MODEL)
    assert first == second
    assert first.path.read_bytes() == package.content
    assert own_cache in first.path.parents
    assert package.calls == 1
    first.path.write_bytes(b"GG")  # damaged: made again
    assert resolve_model(DEFAULT_MODEL).path.read_bytes() == package.content


def test_failed_assembly_leaves_nothing(package: FakePackage, own_cache: Path) -> None:
    package.fail = True
    with pytest.raises(ModelError, match=r"sha256 did not match.*OCTAVO_CACHE"):
        resolve_model(DEFAULT_MODEL)
    assert [p for p in own_cache.rglob("*") if p.is_file()] == []


def test_default_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, DEMO_PACKAGE, None)
    with pytest.raises(ModelError, match=r"pip install 'octavo\[demo\]'"):
        resolve_model(DEFAULT_MODEL)


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("OCTAVO_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "octavo"


def test_interrupted_write_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")

    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, interrupted)
    assert target.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".x")] == []


def make(path: Path, *names: str) -> Path:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).write_text("{}")
    return path


def test_directories_and_files(tmp_path: Path) -> None:
    both = make(tmp_path / "both", "config.json", "model.gguf")
    assert resolve_model(str(both)).kind == "directory"
    assert resolve_model(str(both), "gguf").path == both / "model.gguf"
    alone = make(tmp_path / "alone", "model.gguf")
    assert resolve_model(str(alone)).kind == "gguf"
    assert resolve_model(str(alone / "model.gguf")).path == alone / "model.gguf"


@pytest.mark.parametrize(
    ("names", "target", "load_format", "message"),
    [
        ((), "", "auto", r"config\.json: no such file"),
        (("a.gguf", "b.gguf"), "", "auto", r"several GGUF files \(a\.gguf, b\.gguf\)"),
        (("config.json",), "", "gguf", "load_format='gguf'"),
        (("a.gguf",), "a.gguf", "safetensors", "load_format='safetensors'"),
        (("config.json",), "config.json", "auto", "not a .gguf file"),
        (("config.json",), "absent/deeper/still", "auto", "no such file or directory"),
        (("config.json",), "absent.gguf", "auto", "no such file or directory"),
    ],
)
def test_names_that_are_refused(
    names: tuple[str, ...], target: str, load_format: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(str(make(tmp_path / "m", *names) / target), load_format)
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve_model("no spaces in hub ids/x y")


def test_hub_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise OSError("connection refused")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"(?s)some/model.*connection refused.*local directory"):
        resolve_model("some/model")


def test_hub_copy_in_the_cache_is_used_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = make(tmp_path / "snapshot", "config.json")

    def offline(name: str, allow_patterns: list[str], local_files_only: bool = False) -> str:
        if not local_files_only:
            raise OSError("offline")
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="incomplete"):
        resolve_model("some/model")
    make(snapshot, "model.safetensors")
    assert resolve_model("some/model").path == snapshot


def test_hub_never_fetches_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(make(tmp_path / "s", "config.json"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("some/model")
    resolve_model("some/model", "dummy")
    assert not any("bin" in p or p in ("*", "*.safetensors") for p in asked[0])
    assert any("safetensors" in p for p in asked[0])
    assert not any("safetensors" in p for p in asked[1])
