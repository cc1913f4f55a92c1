"""The KV store's moves and refusals, and how memory is counted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.paged import tiny_spec
from octavo.core.kv_layout import build_layout
from octavo.core.step import BlockTransfer, TransferKind
from octavo.devices import CudaDevice
from octavo.errors import BoundsError, ConfigError
from octavo.host_memory import reset_peak
from octavo.kernels.reference import ReferenceAttention
from octavo.runner import kv_store, memory
from octavo.runner.kv_store import KVStore

OUT, IN, COPY = TransferKind.SWAP_OUT, TransferKind.SWAP_IN, TransferKind.COPY
SPEC = tiny_spec([None, None], head_dim=8)
LAYOUT = build_layout(SPEC.windows, block_size=4, bytes_per_token_layer=2 * 2 * 8 * 4)


def numbered_store():
    store = KVStore.allocate(LAYOUT, SPEC, 8, dtype=torch.float32, num_host_blocks=4)
    store.cache.kv[:] = torch.arange(8.0).view(-1, 1, 1, 1, 1, 1)
    store.host[:] = -torch.arange(1.0, 5.0).view(-1, 1, 1, 1, 1, 1)
    return store, ReferenceAttention(store.cache, SPEC)


def one_by_one(transfers):
    device, host = list(range(8)), [-1, -2, -3, -4]
    for t in transfers:
        source, destination = {COPY: (device, device), OUT: (device, host), IN: (host, device)}[t.kind]
        destination[t.destination] = source[t.source]
    return device, host


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_transfers_equals_doing_them_one_by_one(seed):
    g = torch.Generator().manual_seed(seed)

    def below(n):
        return int(torch.randint(0, n, (), generator=g))

    transfers = []
    for _ in range(30):
        kind = (COPY, OUT, IN)[below(3)]
        sizes = {COPY: (8, 8), OUT: (8, 4), IN: (4, 8)}[kind]
        transfers.append(BlockTransfer(kind, below(sizes[0]), below(sizes[1])))
    store, backend = numbered_store()
    store.transfer(transfers, backend)
    device, host = one_by_one(transfers)
    assert store.cache.kv.amax((1, 2, 3, 4, 5)).tolist() == store.cache.kv.amin((1, 2, 3, 4, 5)).tolist() == device
    assert store.host.amax((1, 2, 3, 4, 5)).tolist() == host


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (BlockTransfer(COPY, 8, 0), r"transfer 1 \(copy\): source block 8 is not in its pool of 8"),
        (BlockTransfer(COPY, 0, -1), r"destination block -1 is not in its pool of 8"),
        (BlockTransfer(OUT, 0, 4), r"transfer 1 \(swap_out\): destination block 4 is not in its pool of 4"),
        (BlockTransfer(IN, 4, 0), r"source block 4 is not in its pool of 4"),
    ],
)
def test_a_bad_transfer_is_refused_before_anything_moves(bad, message):
    store, backend = numbered_store()
    before = store.cache.kv.clone()
    with pytest.raises(BoundsError, match=message):
        store.transfer([BlockTransfer(COPY, 1, 2), bad], backend)
    assert torch.equal(store.cache.kv, before)


def test_swapping_without_a_host_pool_is_refused():
    store = KVStore.allocate(LAYOUT, SPEC, 2, dtype=torch.float32)
    with pytest.raises(BoundsError, match="pool of 0"):
        store.transfer([BlockTransfer(OUT, 0, 0)], ReferenceAttention(store.cache, SPEC))


def test_bytes_are_what_the_layout_says():
    store, _ = numbered_store()
    assert store.device_bytes == 8 * LAYOUT.bytes_per_block
    assert store.host_bytes == 4 * LAYOUT.bytes_per_block
    assert (store.num_blocks, store.num_host_blocks) == (8, 4)
    half = KVStore.allocate(LAYOUT, SPEC, 8, dtype=torch.bfloat16)
    assert half.device_bytes == store.device_bytes // 2 and half.host_bytes == 0


def test_too_little_memory_is_refused_with_the_numbers(monkeypatch):
    monkeypatch.setattr(kv_store, "available_bytes", lambda device: 10 * LAYOUT.bytes_per_block + 5)
    with pytest.raises(ConfigError, match=r"num_blocks: 11 blocks of 0.001 MiB .* at most 10 blocks fit"):
        KVStore.allocate(LAYOUT, SPEC, 11, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"swap_bytes: 12 blocks"):
        KVStore.allocate(LAYOUT, SPEC, 1, dtype=torch.float32, num_host_blocks=12)


def test_an_allocator_that_refuses_is_a_config_error(monkeypatch):
    def refuse(*args, **kwargs):
        raise MemoryError("not enough memory: you tried to allocate")

    monkeypatch.setattr(kv_store.np, "zeros", refuse)
    with pytest.raises(ConfigError, match=r"allocator refused .* 3 blocks .* you tried"):
        KVStore.allocate(LAYOUT, SPEC, 3, dtype=torch.float32)


# -- budgets --------------------------------------------------------------------------------------------------------


def host(tmp_path: Path, available_kib=8 << 20, cgroup="", files=None):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_available_memory_without_limits(tmp_path):
    assert memory.available_cpu_bytes(host(tmp_path)) == 8 << 30


def test_the_tightest_cgroup_of_the_chain_counts_and_page_cache_is_not_use(tmp_path):
    root = host(
        tmp_path,
        cgroup="0::/a/b\n",
        files={
            "a/b/memory.max": "max\n",
            "a/b/memory.current": "1000\n",
            "a/memory.max": str(2 << 30),
            "a/memory.current": str(1 << 30),
            "a/memory.stat": f"anon 1\ninactive_file {256 << 20}\n",
        },
    )
    assert memory.available_cpu_bytes(root) == (1 << 30) + (256 << 20)


def test_version_1_cgroups_and_a_path_that_is_not_mounted(tmp_path):
    files = {"memory/memory.limit_in_bytes": "5000", "memory/memory.usage_in_bytes": "1500"}
    root = host(tmp_path, cgroup="4:cpu,memory:/docker/x\n3:pids:/y\n", files=files)
    assert memory.available_cpu_bytes(root) == 3500


def test_an_unlimited_version_1_cgroup_limits_nothing(tmp_path):
    files = {"memory/memory.limit_in_bytes": str(2**63 - 4096), "memory/memory.usage_in_bytes": "1500"}
    assert memory.available_cpu_bytes(host(tmp_path, cgroup="4:memory:/\n", files=files)) == 8 << 30


def test_a_cgroup_over_its_limit_leaves_nothing_rather_than_less(tmp_path):
    files = {"memory.max": "1000", "memory.current": "1500"}
    assert memory.available_cpu_bytes(host(tmp_path, cgroup="0::/\n", files=files)) == 0


def test_this_machine_has_memory():
    assert 1 << 20 < memory.available_cpu_bytes() < 1 << 50


def test_cpu_budget_is_four_gib_or_forty_percent():
    assert memory.cpu_budget(1.0, 100 << 30, 128 << 30).bytes == 4 << 30
    tight = memory.cpu_budget(0.24, 100 << 30, 128 << 30)
    assert 0 < tight.bytes < 4 << 30 and "gpu_memory_utilization=0.24" in tight.reason
    assert memory.cpu_budget(0.1, 100 << 30, 128 << 30).bytes == 0
    small = memory.cpu_budget(1.0, 5 << 30, 8 << 30)
    assert small.bytes == int(0.4 * (5 << 30)) and "40% of the 5.0 GiB" in small.reason


def test_cuda_budget_subtracts_what_is_taken_and_the_peak(monkeypatch):
    card = CudaDevice.__new__(CudaDevice)
    card.torch = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 6 << 30)
    budget = memory.cuda_budget(0.9, 2 << 30, card)
    assert budget.bytes == (72 - 10 - 2) << 30
    assert "0.9 of 80.0 GiB, minus 10.00 GiB in use (4.00 GiB not by this engine) and 2.00 GiB" in budget.reason
    assert memory.cuda_budget(0.1, 2 << 30, card).bytes == 0
    graphs = memory.cuda_budget(0.9, 2 << 30, card, 3 << 30)
    assert graphs.bytes == budget.bytes - (3 << 30) and "3.00 GiB for graphs" in graphs.reason
    assert memory.available_bytes(card) == 70 << 30


def test_cuda_peak_is_the_allocators_high_water_mark(monkeypatch):
    calls = []
    card = CudaDevice.__new__(CudaDevice)
    card.torch = torch.device("cuda")
    for name, value in (("synchronize", None), ("empty_cache", None), ("reset_peak_memory_stats", None)):
        monkeypatch.setattr(torch.cuda, name, lambda *a, name=name, value=value: calls.append(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 350)
    assert memory.measure_activation_peak(lambda: calls.append("run"), card) == 250
    assert calls.index("reset_peak_memory_stats") < calls.index("run") < len(calls) - 1


def test_host_peak_sees_memory_that_is_gone_again():
    if not reset_peak():
        pytest.skip("this system cannot reset VmHWM")
    peak = memory.measure_activation_peak(lambda: torch.ones(64 << 20, dtype=torch.uint8).amax(), "cpu")
    assert 60 << 20 < peak < 200 << 20


def test_huge_pages_are_advised_for_large_tensors_only():
    assert not memory.advise_huge_pages(torch.zeros(10))
    assert memory.advise_huge_pages(torch.zeros(8 << 20)) in (True, False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((6, 2048, 10**7, 2048), "=10000000: so many block tables of 2048 blocks in 6 groups need .* lower"),
        ((1, 8, 10**30, 1), "max_num_seqs=1000000000000000000000000000000: so many"),
        ((6, 2048, 64, 10**12), "=1000000000000: so many tokens of a step need .* lower max_num_batched_tokens$"),
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_had_are_refused(given: tuple[int, int, int, int], message: str) -> None:
    memory.check_host_arrays(6, 2048, 64, 2048)
    with pytest.raises(ConfigError, match=message):
        memory.check_host_arrays(*given)
