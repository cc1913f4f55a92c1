"""Memory for weights that is cleared before torch is there: never more than they take, used by them, and given back."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.tiny_models import write_tiny
from octavo import starting
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.host_memory import status_bytes
from octavo.host_room import HUGE, SLACK, Room
from octavo.kernels import cpu
from octavo.models.least_bytes import least_bytes
from octavo.models.load import load_model

MIB = 1 << 20
linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux clears memory early")
built = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")


def mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)


def filled(size: int) -> Room:
    """A room whose memory is there."""
    room = Room(size)
    room.__enter__()
    assert room._thread is not None
    room._thread.join()
    return room


@linux
def test_its_bytes_are_there_and_nothing_of_it_afterwards() -> None:
    before = status_bytes("VmRSS")
    room = filled(64 * MIB + 12345)
    assert status_bytes("VmRSS") - before > 60 * MIB
    begin = room._begin
    assert begin % HUGE == 0 and mapped(begin) and mapped(begin + 64 * MIB + SLACK - 1)
    room.__exit__(None, None, None)
    assert not mapped(begin) and not mapped(begin + 64 * MIB + SLACK - 1)
    assert room.take() == (0, 0)


@linux
def test_a_room_that_is_stopped_at_once_is_given_back() -> None:
    with Room(256 * MIB) as room:
        room.stop()
        begin = room._begin
    assert not mapped(begin)


def test_no_bytes_are_no_room() -> None:
    for size in (0, HUGE - 1):
        with Room(size) as room:
            assert room.take() == (0, 0)


def test_files_that_are_not_there_do_not_matter(tmp_path: Path) -> None:
    with Room(HUGE, [tmp_path / "absent"]) as room:
        if room._thread is not None:
            room._thread.join()


@linux
@built
def test_weights_lie_in_it_and_outlive_it() -> None:
    weight = torch.randn(16384, 1024)
    room = filled(96 * MIB)
    begin = room._begin
    before = status_bytes("VmRSS")
    with cpu.weights_in(room):
        large = cpu.NativeOps(torch.float32).linear(weight)
        small = [cpu.NativeOps(torch.float32).linear(weight[:100]) for _ in range(3)]
        assert status_bytes("VmRSS") - before < 16 * MIB  # its pages were there
    assert mapped(begin) and not mapped(begin + 96 * MIB + SLACK - 1)
    x = torch.randn(2, 1024)
    torch.testing.assert_close(large(x), x @ weight.T, rtol=1e-4, atol=1e-3)
    for one in small:
        torch.testing.assert_close(one(x), x @ weight[:100].T, rtol=1e-4, atol=1e-3)
    after = status_bytes("VmRSS")
    del large
    assert after - status_bytes("VmRSS") > 60 * MIB


@linux
@built
def test_what_does_not_fit_is_taken_elsewhere_and_an_error_gives_the_rest_back() -> None:
    room = filled(2 * MIB)
    begin = room._begin
    weight = torch.randn(128 * 1024, 1024)  # 512 MiB: more than the room with its slack
    linears = []
    with suppress(ConfigError), cpu.weights_in(room):
        linears.append(cpu.NativeOps(torch.float32).linear(weight))
        raise ConfigError("stop")
    assert not mapped(begin)
    x = torch.randn(1, 1024)
    torch.testing.assert_close(linears[0](x), x @ weight.T, rtol=1e-4, atol=1e-3)


# ---- How much it is to be ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3", "mixtral", "phi3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_never_more_than_the_weights_take(family: str, dtype: str, tmp_path: Path) -> None:
    write_tiny(family, tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype=dtype, device="cpu")
    size, files = least_bytes(config)
    where = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    model = load_model(config, dtype=where, device="cpu", ops=cpu.make_ops(where))
    assert files == (tmp_path / "model.safetensors",)
    assert model.weight_bytes / 4 < size <= model.weight_bytes


def save(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> EngineConfig:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config or {}))
    save_file(tensors, directory / "model.safetensors")
    return EngineConfig(model=str(directory))


def test_what_may_be_left_out_does_not_count(tmp_path: Path) -> None:
    matrix = torch.zeros(64, 64, dtype=torch.bfloat16)
    names = ("model.layers.0.mlp.up_proj.weight", "lm_head.weight", "vision_tower.a.weight")
    config = save(tmp_path, {**{name: matrix.clone() for name in names}, "codes": torch.zeros(4096, dtype=torch.int32)})
    assert least_bytes(config)[0] == 64 * 64 * 2
    assert least_bytes(EngineConfig(model=str(tmp_path), dtype="float32"))[0] == 64 * 64 * 2
    wide = save(tmp_path, {names[0]: matrix.float()})
    assert least_bytes(wide)[0] == 64 * 64 * 2
    assert least_bytes(EngineConfig(model=str(tmp_path), dtype="float32"))[0] == 64 * 64 * 4


def test_only_files_of_the_index_count(tmp_path: Path) -> None:
    config = save(tmp_path, {"old": torch.zeros(1000)})
    save_file({"a": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(20, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert least_bytes(config) == (60, (tmp_path / "one.safetensors", tmp_path / "two.safetensors"))


def test_a_gguf_file_counts_half(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(1000))
    assert least_bytes(EngineConfig(model=str(path))) == (500, (path,))


@pytest.mark.parametrize("broken", [b"", b"\x00" * 7, b"\xff" * 16, b"\x02" + b"\x00" * 7 + b"[]", b"\x02" + bytes(9)])
def test_broken_files_are_left_to_whoever_loads_them(broken: bytes, tmp_path: Path) -> None:
    config = save(tmp_path, {"a": torch.zeros(10)})
    (tmp_path / "model.safetensors").write_bytes(broken)
    assert least_bytes(config) == (0, ())


def test_what_is_not_certain_is_nothing(tmp_path: Path) -> None:
    config = save(tmp_path, {"a": torch.zeros(10)})
    assert least_bytes(config)[0] == 20
    for given in ({"load_format": "dummy"}, {"quantization": "int8"}, {"model_impl": "transformers"}):
        assert least_bytes(EngineConfig(model=str(tmp_path), **given)) == (0, ())
    assert least_bytes(EngineConfig(model="owner/name")) == (0, ())
    assert least_bytes(EngineConfig(model=str(tmp_path / "absent"))) == (0, ())
    save(tmp_path, {"a": torch.zeros(10)}, {"quantization_config": {"quant_method": "gptq"}})
    assert least_bytes(config) == (0, ())


def test_it_is_for_wide_cpus_with_room_and_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"a": torch.zeros(4 * MIB, dtype=torch.bfloat16)})

    def size(**given: object) -> int:
        return starting.room_for(EngineConfig(model=str(tmp_path), device="cpu", **given))._size  # type: ignore[arg-type]

    monkeypatch.delenv("OCTAVO_ISA", raising=False)
    if "avx512f" not in Path("/proc/cpuinfo").read_text():
        assert size() == 0
        return
    monkeypatch.setattr(starting.os, "sched_getaffinity", lambda process: {0, 1})
    assert size() == 8 * MIB
    assert size(attention_backend="reference") == size(fixed_point=True) == 0
    monkeypatch.setattr(starting, "available_cpu_bytes", lambda: 16 * MIB - 1)
    assert size() == 0
    monkeypatch.setattr(starting, "available_cpu_bytes", lambda: 16 * MIB)
    assert size() == 8 * MIB
    monkeypatch.setattr(starting.os, "sched_getaffinity", lambda process: {0})
    assert size() == 0
    monkeypatch.setattr(starting.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("OCTAVO_ISA", "avx2")
    assert size() == 0
    assert starting.room_for(EngineConfig(model=str(tmp_path), device="cuda"))._size == 0
