"""A fake torch_npu: the operators the Ascend backend calls, as the public documentation describes them, on the CPU.

The operators are registered with torch under the names and schemas they are published with, so torch itself checks the
kinds of arguments as it does on a device. What they do is written from the pages of Ascend Extension for PyTorch
(custom APIs `npu_fused_infer_attention_score` and `npu_scatter_nd_update_`), not from the backend: every argument is
checked for what those pages demand (types, shapes, contiguity, layouts, block sizes, lengths, masks), what they forbid
is an error, and so is what they allow but nothing here computes, so that a call outside of what was understood cannot
pass. Arithmetic is float32, rounded at the end.

Rows of an output that the lengths leave out are NaN. A masked key still meets its value with weight 0, as in a product
of whole tiles, so a NaN behind a mask is a NaN in the result.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.utils

from helpers import npu_device

GIB = 1 << 30
INT_MAX = 2147483647
LAYOUTS = (
    "BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND", "TND_NTD", "NTD_TND",
)  # fmt: skip
#: As torch_npu declares them to torch.
SCHEMAS = (
    "npu_scatter_nd_update_(Tensor(a!) self, Tensor indices, Tensor updates) -> Tensor(a!)",
    "npu_fused_infer_attention_score(Tensor query, Tensor key, Tensor value, *, Tensor? pse_shift=None, "
    "Tensor? atten_mask=None, SymInt[]? actual_seq_lengths=None, SymInt[]? actual_seq_lengths_kv=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, "
    "Tensor? key_antiquant_scale=None, Tensor? key_antiquant_offset=None, Tensor? value_antiquant_scale=None, "
    "Tensor? value_antiquant_offset=None, Tensor? block_table=None, Tensor? query_padding_size=None, "
    "Tensor? kv_padding_size=None, Tensor? key_shared_prefix=None, Tensor? value_shared_prefix=None, "
    "SymInt[]? actual_shared_prefix_len=None, Tensor? query_rope=None, Tensor? key_rope=None, "
    "Tensor? key_rope_antiquant_scale=None, int num_heads=1, float scale=1.0, int pre_tokens=2147483647, "
    'int next_tokens=2147483647, str input_layout="BSH", int num_key_value_heads=0, int sparse_mode=0, '
    "int inner_precise=0, int block_size=0, int antiquant_mode=0, int key_antiquant_mode=0, "
    "int value_antiquant_mode=0, bool softmax_lse_flag=False) -> (Tensor, Tensor)",
)
SCATTER_DTYPES = (torch.float32, torch.float16, torch.bool, torch.bfloat16, torch.int64, torch.int8)


class OperatorError(RuntimeError):
    """What the device would refuse, or worse, not refuse."""


def _demand(holds: object, what: str) -> None:
    if not holds:
        raise OperatorError(what)


def _whole(tensor: Any, name: str, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """A tensor that must be contiguous, of one of some dtypes."""
    _demand(tensor.is_contiguous(), f"{name}: non-contiguous tensors are not supported")
    _demand(tensor.dtype in dtypes, f"{name}: {tensor.dtype} is not among {dtypes}")
    whole: torch.Tensor = tensor
    return whole


def npu_scatter_nd_update_(target: Any, index: Any, new: Any) -> Any:
    """input[indices[i]] = updates[i], in place. input may be non-contiguous, indices int32 or int64.

    A place that is written twice has no defined value afterwards: NaN.
    """
    _demand(1 <= target.dim() <= 8, f"input: {target.dim()} dimensions, 1 to 8 are supported")
    _demand(target.dtype in SCATTER_DTYPES, f"input: {target.dtype} is not among {SCATTER_DTYPES}")
    _demand(new.dtype == target.dtype, f"updates: {new.dtype}, input: {target.dtype}; they must be equal")
    _demand(index.dtype in (torch.int32, torch.int64), f"indices: {index.dtype}, must be int32 or int64")
    _demand(index.dim() >= 2, "indices: at least two dimensions")
    depth = index.shape[-1]
    _demand(depth <= target.dim(), "indices: the last dimension exceeds the dimensions of input")
    expected = (*index.shape[:-1], *target.shape[depth:])
    _demand(tuple(new.shape) == expected, f"updates: shape {tuple(new.shape)}, must be {expected}")
    flat = index.reshape(-1, depth).long()
    limits = torch.tensor(target.shape[:depth])
    _demand(bool(((flat >= 0) & (flat < limits)).all()), "indices: outside of input")
    target[flat.unbind(1)] = new.reshape(-1, *target.shape[depth:])
    places, times = flat.unique(dim=0, return_counts=True)
    if int(times.max()) > 1 and target.is_floating_point():
        target[places[times > 1].unbind(1)] = float("nan")
    return target


def npu_fused_infer_attention_score(
    query: Any,
    key: Any,
    value: Any,
    *,
    pse_shift: Any = None,
    atten_mask: Any = None,
    actual_seq_lengths: Any = None,
    actual_seq_lengths_kv: Any = None,
    dequant_scale1: Any = None,
    quant_scale1: Any = None,
    dequant_scale2: Any = None,
    quant_scale2: Any = None,
    quant_offset2: Any = None,
    antiquant_scale: Any = None,
    antiquant_offset: Any = None,
    key_antiquant_scale: Any = None,
    key_antiquant_offset: Any = None,
    value_antiquant_scale: Any = None,
    value_antiquant_offset: Any = None,
    block_table: Any = None,
    query_padding_size: Any = None,
    kv_padding_size: Any = None,
    key_shared_prefix: Any = None,
    value_shared_prefix: Any = None,
    actual_shared_prefix_len: Any = None,
    query_rope: Any = None,
    key_rope: Any = None,
    key_rope_antiquant_scale: Any = None,
    num_heads: int = 1,
    scale: float = 1.0,
    pre_tokens: int = INT_MAX,
    next_tokens: int = INT_MAX,
    input_layout: str = "BSH",
    num_key_value_heads: int = 0,
    sparse_mode: int = 0,
    inner_precise: int = 0,
    block_size: int = 0,
    antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
    key_antiquant_mode: int = 0,
    value_antiquant_mode: int = 0,
) -> tuple[Any, Any]:
    """Paged attention in layout BNSD: query [B, N, S, D], key and value [blocks, KV_N, block_size, D] ("BnNBsD")."""
    given = {k: v for k, v in locals().items() if v is not None and k not in _USED}
    changed = sorted(k for k, v in given.items() if v != _DEFAULTS.get(k))
    _demand(not changed, f"not emulated: {', '.join(changed)}")
    _demand(input_layout in LAYOUTS, f"input_layout: {input_layout!r} does not exist")
    _demand(input_layout == "BNSD" and block_table is not None, "emulated: BNSD through a block table")
    dtypes = (torch.float16, torch.bfloat16)
    q, k, v = _whole(query, "query", dtypes), _whole(key, "key", dtypes), _whole(value, "value", dtypes)
    _check_shapes(q, k, v, num_heads, num_key_value_heads, block_size)
    batch, _, queries, _ = q.shape
    table = _whole(block_table, "block_table", (torch.int32,))
    lengths = _check_lengths(table, actual_seq_lengths_kv, batch, queries, block_size, k.shape[0])
    own = _check_lengths_q(actual_seq_lengths, batch, queries)
    positions = table.shape[1] * block_size
    hidden = _hidden(atten_mask, sparse_mode, batch, queries, positions, lengths)
    own = (
        lengths
        if actual_seq_lengths is None
        else list(actual_seq_lengths) * (batch if len(actual_seq_lengths) == 1 else 1)
    )
    out = torch.full(q.shape, float("nan"), dtype=torch.float32)
    for b in range(batch):
        n = own[b]
        blocks = table[b, : -(-lengths[b] // block_size)].long()
        keys, values = (t[blocks].transpose(0, 1).flatten(1, 2)[:, : lengths[b]].float() for t in (k, v))
        scores = torch.einsum("hgsd,hkd->hgsk", q[b, :, :n].float().unflatten(0, (k.shape[1], -1)), keys) * scale
        scores = scores.masked_fill(hidden[b][:n, : lengths[b]], float("-inf"))
        out[b, :, :n] = torch.einsum("hgsk,hkd->hgsd", scores.softmax(-1), values).flatten(0, 1)
    return out.to(q.dtype), torch.zeros(1)


_USED = {
    "query", "key", "value", "atten_mask", "actual_seq_lengths", "actual_seq_lengths_kv", "block_table", "num_heads",
    "scale", "input_layout", "num_key_value_heads", "sparse_mode", "block_size",
}  # fmt: skip
_DEFAULTS: dict[str, object] = {
    "pre_tokens": INT_MAX, "next_tokens": INT_MAX, "inner_precise": 0, "antiquant_mode": 0, "softmax_lse_flag": False,
    "key_antiquant_mode": 0, "value_antiquant_mode": 0,
}  # fmt: skip


def _check_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, kv_heads: int, block_size: int
) -> None:
    _demand(q.dim() == 4 and q.numel(), f"query: shape {tuple(q.shape)}, must be (B, N, S, D)")
    batch, n, queries, dim = q.shape
    kv_heads = kv_heads or heads
    _demand(q.dtype == k.dtype == v.dtype, "query, key and value: one dtype")
    _demand(k.shape == v.shape, f"key {tuple(k.shape)} and value {tuple(v.shape)}: one shape")
    _demand(n == heads, f"num_heads: {heads}, query has {n}")
    _demand(
        k.dim() == 4 and tuple(k.shape[1:]) == (kv_heads, block_size, dim),
        f"key: shape {tuple(k.shape)}, must be (blocks, {kv_heads}, {block_size}, {dim})",
    )
    _demand(heads % kv_heads == 0 and heads // kv_heads <= 64, f"{heads} heads on {kv_heads}")
    _demand(heads <= 256 and batch <= 65536 and dim <= 512 and queries <= 20971520, "B, N, S or D is too large")
    _demand(dim % 16 == 0, f"D: {dim} is no multiple of 16")
    if queries > 1:
        _demand(128 <= block_size <= 512 and block_size % 128 == 0, f"block_size: {block_size} with several queries")
    else:
        _demand(0 < block_size <= 512 and block_size % 16 == 0, f"block_size: {block_size}")


def _check_lengths(
    table: torch.Tensor, lengths: Any, batch: int, queries: int, block_size: int, num_blocks: int
) -> list[int]:
    _demand(table.dim() == 2 and table.shape[0] == batch, f"block_table: shape {tuple(table.shape)}, B is {batch}")
    _demand(isinstance(lengths, list), "actual_seq_lengths_kv: a list is needed with a block table")
    _demand(all(type(n) is int and n >= 0 for n in lengths), "actual_seq_lengths_kv: integers of at least 0")
    _demand(len(lengths) == 1 or len(lengths) >= batch, f"actual_seq_lengths_kv: {len(lengths)} for B = {batch}")
    lengths = lengths * batch if len(lengths) == 1 else lengths[:batch]
    _demand(queries > 1 or max(lengths) <= 262144, "actual_seq_lengths_kv: over 262144 with one query")
    blocks = [-(-n // block_size) for n in lengths]
    _demand(max(blocks) <= table.shape[1], f"block_table: {table.shape[1]} columns, {max(blocks)} are needed")
    _demand(sum(blocks) <= num_blocks, f"key: {num_blocks} blocks, the batch's lengths need {sum(blocks)}")
    for b, n in enumerate(blocks):
        read = table[b, :n]
        _demand(bool(((read >= 0) & (read < num_blocks)).all()), f"block_table: row {b} leaves the cache: {read}")
    return list(lengths)


def _check_lengths_q(lengths: Any, batch: int, queries: int) -> list[int]:
    """Queries that count, per row."""
    if lengths is None:
        return [queries] * batch
    _demand(isinstance(lengths, list) and all(type(n) is int for n in lengths), "actual_seq_lengths: a list of int")
    _demand(len(lengths) == 1 or len(lengths) >= batch, f"actual_seq_lengths: {len(lengths)} for B = {batch}")
    _demand(all(0 <= n <= queries for n in lengths), f"actual_seq_lengths: {lengths} for S = {queries}")
    if queries == 1:  # "Q_S = 1: this argument is without effect"
        return [1] * batch
    return lengths * batch if len(lengths) == 1 else lengths[:batch]


def _hidden(mask: Any, mode: int, batch: int, queries: int, positions: int, lengths: list[int]) -> list[torch.Tensor]:
    """Per row bool [queries, positions]: what must not be seen."""
    _demand(mode in (0, 1, 2, 3, 4), f"sparse_mode: {mode} does not exist")
    if queries == 1:
        mode = 0  # "Q_S = 1: this argument is without effect"
    inner = None if mask is None else _whole(mask, "atten_mask", (torch.bool, torch.int8, torch.uint8)).bool()
    if mode in (2, 4):
        raise OperatorError(f"not emulated: sparse_mode={mode}")
    if mode == 3:
        shape = None if inner is None else tuple(inner.shape)
        _demand(shape in ((2048, 2048), (1, 2048, 2048), (1, 1, 2048, 2048)), f"atten_mask: {shape} for sparse_mode=3")
        assert inner is not None
        _demand(
            inner.view(2048, 2048).equal(torch.ones(2048, 2048, dtype=torch.bool).triu(1)), "atten_mask: a triangle"
        )
        key = torch.arange(positions)
        # Aligned at the lower right corner: the last query sees every key of its row.
        return [key > (torch.arange(queries)[:, None] + n - queries) for n in lengths]
    if inner is None:
        _demand(mode == 0, "atten_mask: needed for sparse_mode=1")
        return [torch.zeros(queries, positions, dtype=torch.bool)] * batch
    if inner.dim() == 2:
        inner = inner[:, None, None] if queries == 1 else inner[None, None]
    elif inner.dim() == 3:
        inner = inner[None]
    _demand(
        inner.dim() == 4 and inner.shape[0] in (1, batch) and inner.shape[1] == 1 and inner.shape[2] == queries,
        f"atten_mask: shape {tuple(inner.shape)} for B = {batch}, S = {queries}",
    )
    _demand(inner.shape[3] >= positions, f"atten_mask: {inner.shape[3]} keys, the table reaches {positions}")
    return [inner[b if inner.shape[0] > 1 else 0, 0, :, :positions] for b in range(batch)]


_libraries: list[torch.library.Library] = []


def register() -> None:
    """The device and `torch.ops.npu.*`, once in a process."""
    npu_device.register()
    if not _libraries:
        library = torch.library.Library("npu", "FRAGMENT")
        for schema, compute in zip(SCHEMAS, (npu_scatter_nd_update_, npu_fused_infer_attention_score), strict=True):
            library.define(schema)
            # A device tensor's shell hands the tensors it holds to the operator: they are the CPU's.
            library.impl(compute.__name__, compute, "CPU")
        _libraries.append(library)


class _Work:
    """Streams and events of a device that is never behind."""

    def __init__(self, *args: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def query(self) -> bool:
        return True


def fake_torch_npu(name: str, *, bf16: bool, count: int, free: int, total: int) -> ModuleType:
    """The module, with the functions of `torch_npu.npu` that the package may call and no others."""
    module = ModuleType("torch_npu")
    module.__spec__ = importlib.machinery.ModuleSpec("torch_npu", None)
    contents: dict[str, Any] = {
        "npu_scatter_nd_update_": torch.ops.npu.npu_scatter_nd_update_,
        "npu_fused_infer_attention_score": torch.ops.npu.npu_fused_infer_attention_score,
        "npu": SimpleNamespace(
            is_available=lambda: count > 0,
            device_count=lambda: count,
            get_device_name=lambda device=None: name,
            is_bf16_supported=lambda: bf16,
            mem_get_info=lambda device=None: (free, total),
            memory_reserved=lambda device=None: 3 << 20,
            memory_allocated=lambda device=None: 1 << 20,
            max_memory_allocated=lambda device=None: 9 << 20,
            reset_peak_memory_stats=lambda device=None: None,
            empty_cache=lambda: None,
            synchronize=lambda device=None: None,
            Stream=_Work,
            Event=_Work,
            current_stream=lambda device=None: _Work(),
            stream=lambda stream: nullcontext(),
        ),
    }
    vars(module).update(contents)
    return module


def install(
    monkeypatch: pytest.MonkeyPatch,
    *,
    name: str = "Ascend910B3",
    bf16: bool = True,
    count: int = 1,
    free: int = 2 * GIB,
    total: int = 4 * GIB,
) -> ModuleType:
    """Give this process an NPU until the test ends. Pinned memory is not emulated: it is plain host memory."""
    # That library remembers its answer for the rest of the process, and would call operators that are not here.
    if "torch_npu" not in sys.modules:
        assert not transformers.utils.is_torch_npu_available()
    register()
    monkeypatch.setattr(npu_device, "visible", True)
    monkeypatch.setattr(torch, "tensor", npu_device.tensor)
    module = fake_torch_npu(name, bf16=bf16, count=count, free=free, total=total)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    from octavo.npu_device import NpuDevice

    monkeypatch.setattr(NpuDevice, "pinned", lambda self, shape, dtype: torch.empty(shape, dtype=dtype))
    return module
