"""`octavo.PagedAttention` and its functions: exact, copy-on-write, refusing misuse, safe from several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo import CapacityError, ConfigError, PagedAttention, RequestError
from octavo.kernels.interface import make_backend

HEADS, KV_HEADS, DIM = 4, 2, 16


def attention(**settings: Any) -> PagedAttention:
    return PagedAttention(**{"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "block_size": 4,
                             "num_blocks": 32, "dtype": torch.float32, **settings})  # fmt: skip


def tokens(count: int, seed: int, lead: tuple[int, ...] = ()) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM))
    query, key, value = (torch.randn(*lead, count, *shape, generator=generator) for shape in shapes)
    return query, key, value


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """The last len(query) of len(key) tokens, in float64, from the definition."""
    repeat = query.shape[1] // key.shape[1]
    q, k, v = query.double(), key.double().repeat_interleave(repeat, 1), value.double().repeat_interleave(repeat, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (behind < 0) | (behind >= (window or len(k) + 1))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).float()


class Contexts:
    """What each request wrote, beside the pool: the truth to compare with."""

    def __init__(self, attn: PagedAttention, **options: Any) -> None:
        self.attn, self.options = attn, options
        self.keys: dict[Any, torch.Tensor] = {}
        self.values: dict[Any, torch.Tensor] = {}
        self.seed = 0

    def step(self, counts: dict[Any, int], **how: Any) -> None:
        self.seed += 1
        query, key, value = tokens(sum(counts.values()), self.seed)
        out = self.attn.forward(query, key, value, request_ids=list(counts), query_lens=list(counts.values()), **how)
        for request, q, k, v, o in zip(counts, *(x.split(list(counts.values())) for x in (query, key, value, out))):
            none = key.new_zeros(0, KV_HEADS, DIM)
            self.keys[request] = torch.cat([self.keys.get(request, none), k])
            self.values[request] = torch.cat([self.values.get(request, none), v])
            expected = dense(q, self.keys[request], self.values[request], **self.options)
            torch.testing.assert_close(o, expected, rtol=2e-5, atol=2e-5)
        self.attn.audit()

    def fork(self, source: Any, destination: Any) -> None:
        self.attn.fork(source, destination)
        self.keys[destination], self.values[destination] = self.keys[source], self.values[source]

    def cut(self, request: Any, length: int) -> None:
        self.attn.truncate(request, length)
        self.keys[request], self.values[request] = self.keys[request][:length], self.values[request][:length]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("options", [{}, {"window": 6}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
def test_the_story_of_the_issue(backend: str, options: dict[str, Any]) -> None:
    attn = attention(backend=backend, sliding_window=options.get("window"), softcap=options.get("softcap"))
    seen = Contexts(attn, **options)
    assert attn.allocate(request_id=1, seq_len=10) == [0, 1, 2]
    seen.step({1: 10})
    seen.fork(1, 2)
    assert attn.append(1, 3) == [3]
    seen.step({1: 1, 2: 1})  # both write into the shared last block: one of them gets a copy
    assert attn.stats().copies == 1 and attn.stats().forks == 1
    seen.step({1: 3, 2: 1})
    seen.cut(1, 12)
    seen.step({2: 2, 1: 1})
    assert (attn.context_len(1), attn.context_len(2)) == (13, 14)
    attn.free(1), attn.free(2)
    assert attn.num_free == 32 and attn.request_ids == []


@settings(max_examples=25, deadline=None)
@given(
    window=st.sampled_from([None, 5, 9]),
    steps=st.lists(st.tuples(st.dictionaries(st.integers(0, 3), st.integers(1, 9), min_size=1), st.integers(0, 9)),
                   min_size=1, max_size=6),
)  # fmt: skip
def test_any_batch_of_any_requests_is_exact(window: int | None, steps: list[tuple[dict[int, int], int]]) -> None:
    attn = attention(num_blocks=120, sliding_window=window)
    seen = Contexts(attn, window=window)
    for request in range(4):
        attn.allocate(request, 0)
    for counts, number in steps:
        seen.step(counts)
        source, destination = number % 4, (number + 1) % 4
        if source in seen.keys and attn.context_len(source):
            attn.reorder([destination], [source])
            seen.keys[destination], seen.values[destination] = seen.keys[source], seen.values[source]


def test_dense_and_ragged_calls_are_one() -> None:
    query, key, value = tokens(3, 1, (2,))
    dense_attn, ragged = attention(), attention()
    for attn in (dense_attn, ragged):
        attn.allocate(1, 3), attn.allocate(2, 3)
    full = dense_attn.forward(query, key, value, request_ids=[1, 2])
    flat = ragged.forward(query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1), request_ids=[1, 2])
    assert full.shape == query.shape and torch.equal(full.flatten(0, 1), flat)
    one = [x[:, :1] for x in tokens(1, 2, (2,))]
    decode = dense_attn.forward(*one, request_ids=[1, 2])
    assert torch.equal(decode[:, 0], ragged.forward(*(x[:, 0] for x in one), request_ids=[1, 2]))


def test_padding_of_a_dense_call_is_neither_written_nor_computed() -> None:
    query, key, value = tokens(5, 1, (2,))
    key[1, 2:] = float("nan")
    attn = attention()
    attn.allocate("a", 5), attn.allocate("b", 2)
    out = attn.forward(query, key, value, request_ids=["a", "b"], query_lens=[5, 2])
    assert attn.context_len("b") == 2 and not out[1, 2:].any()
    torch.testing.assert_close(out[1, :2], dense(query[1, :2], key[1, :2], value[1, :2]))
    torch.testing.assert_close(out[0], dense(query[0], key[0], value[0]))


def test_how_many_tokens_are_whose_follows_from_the_shape_or_is_asked_for() -> None:
    attn = attention()
    attn.allocate(1, 5), attn.allocate(2, 3)
    attn.forward(*tokens(8, 1), request_ids=[1, 2])  # what was allocated
    assert (attn.context_len(1), attn.context_len(2)) == (5, 3)
    attn.forward(*tokens(2, 2), request_ids=[1, 2])  # one each
    attn.forward(*tokens(7, 3), request_ids=[2])  # all of one
    assert (attn.context_len(1), attn.context_len(2)) == (6, 11)
    with pytest.raises(RequestError, match=r"5 tokens for 2 requests: how many are whose\?.*give query_lens"):
        attn.forward(*tokens(5, 4), request_ids=[1, 2])


def test_requests_by_the_block_ids_that_allocate_returned() -> None:
    attn, other = attention(), attention()
    first, second = attn.allocate(1, 6), attn.allocate(2, 3)
    other.allocate(1, 6), other.allocate(2, 3)
    query, key, value = tokens(6, 1)
    out = attn.forward(query, key, value, first)
    assert torch.equal(out, other.forward(query, key, value, request_ids=[1]))
    attn.forward(*tokens(3, 2), torch.tensor(second))
    attn.forward(*tokens(2, 3), [first, second])  # a table's beginning will do
    assert (attn.context_len(1), attn.context_len(2)) == (7, 4)
    with pytest.raises(RequestError, match="no request's table begins with them"):
        attn.forward(*tokens(1, 4), [5])
    attn.fork(1, 3)
    with pytest.raises(RequestError, match="shared by requests 1, 3: give request_ids"):
        attn.forward(*tokens(1, 4), first)


def test_layers_of_a_step_share_their_blocks_and_contexts_grow_once() -> None:
    attn = attention(num_layers=3)
    singles = [attention() for _ in range(3)]
    attn.allocate(1, 4)
    for single in singles:
        single.allocate(1, 4)
    for count in (4, 1, 3):
        for layer, single in enumerate(singles):
            inputs = tokens(count, 10 * layer + count)
            before = attn.context_len(1)
            out = attn.forward(*inputs, request_ids=[1], layer=layer)
            torch.testing.assert_close(out, single.forward(*inputs, request_ids=[1]))
            assert attn.context_len(1) == (before if layer < 2 else before + count)
    assert attn.block_table(1) == singles[0].block_table(1) and attn.stats().steps == 3


def test_layers_of_different_windows_have_tables_of_their_own() -> None:
    attn = attention(num_layers=2, sliding_window=[None, 4], num_blocks=64)
    assert attn.num_groups == 2
    attn.allocate(1, 0)
    kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for count in (9, 1, 1, 5):
        for layer, window in enumerate((None, 4)):
            query, key, value = tokens(count, 10 * layer + count)
            kept[layer].append((key, value))
            out = attn.forward(query, key, value, request_ids=[1], layer=layer)
            keys, values = (torch.cat(parts) for parts in zip(*kept[layer]))
            torch.testing.assert_close(out, dense(query, keys, values, window=window), rtol=2e-5, atol=2e-5)
    assert attn.block_table(1, 1)[:2] == [-1, -1] and -1 not in attn.block_table(1, 0)
    assert "·×2" in str(attn.view()) and "window 4" in str(attn.view())


def test_a_step_out_of_turn_is_an_error_and_can_be_forgotten() -> None:
    attn = attention(num_layers=2)
    attn.allocate(1, 2), attn.allocate(2, 2)
    inputs = tokens(2, 1)
    with pytest.raises(RequestError, match="no step is open"):
        attn.forward(*inputs, request_ids=[1], layer=1)
    attn.forward(*inputs, request_ids=[1], layer=0)
    cases: list[tuple[str, Callable[[], object]]] = [
        ("a step of request 1 is open", lambda: attn.forward(*inputs, request_ids=[2], layer=0)),
        ("layer=1 of other requests", lambda: attn.forward(*inputs, request_ids=[2], layer=1)),
        ("layer=2: there are 2", lambda: attn.forward(*inputs, request_ids=[1], layer=2)),
        ("2 tokens|1 tokens", lambda: attn.forward(*tokens(1, 1), request_ids=[1], layer=1)),
        ("1 of 2 layers are written; a step ends after its last", attn.end),
        ("write\\(layer\\) comes first", lambda: attn.attend(1, inputs[0])),
        ("request 1 is in the step that is open", lambda: attn.free(1)),
    ]
    for message, call in cases:
        with pytest.raises(RequestError, match=message):
            call()
    attn.abort()
    assert attn.context_len(1) == 0
    for layer in (0, 1):
        attn.forward(*inputs, request_ids=[1], layer=layer)
    assert attn.context_len(1) == 2


def test_a_refused_call_changes_nothing() -> None:
    attn = attention(num_blocks=4)
    attn.allocate(1, 8), attn.allocate(2, 4)
    attn.forward(*tokens(8, 1), request_ids=[1])
    query, key, value = tokens(3, 2)
    before = (attn.stats(), attn.block_table(1), attn.block_table(2))
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (CapacityError, "2 blocks are needed, 1 of 4 are free", lambda: attn.forward(*tokens(9, 3), request_ids=[2])),
        (CapacityError, "num_blocks=7 or more", lambda: attn.allocate(3, 16)),
        (RequestError, "key of shape", lambda: attn.forward(query, key[:2], value, request_ids=[1])),
        (RequestError, "query of shape", lambda: attn.forward(query[:, :1], key, value, request_ids=[1])),
        (RequestError, "query_lens=\\[2\\] come to 2",
         lambda: attn.forward(query, key, value, request_ids=[1], query_lens=[2])),
        (RequestError, "one number per request", lambda: attn.begin([1], [1, 2])),
        (RequestError, "one number per request", lambda: attn.blocks_needed([1, 2], [1])),
        (RequestError, "float type", lambda: attn.forward(query, key.int(), value, request_ids=[1])),
        (RequestError, "give either request_ids", lambda: attn.forward(query, key, value)),
        (RequestError, "request 9 is unknown", lambda: attn.forward(query, key, value, request_ids=[9])),
        (RequestError, "twice in one step", lambda: attn.forward(query[:2], key[:2], value[:2], request_ids=[1, 1])),
        (RequestError, "positions 0 to 8 have room", lambda: attn.slots(1, 0, 9)),
    ]  # fmt: skip
    for kind, message, call in cases:
        with pytest.raises(kind, match=message):
            call()
        attn.audit()
        assert (attn.stats(), attn.block_table(1), attn.block_table(2)) == before


def test_numbers_that_are_not_whole_are_refused_by_name() -> None:
    attn = attention()
    attn.allocate(1, 8), attn.allocate(2, 4)
    attn.forward(*tokens(12, 1), request_ids=[1, 2])
    one, two = tokens(1, 2), tokens(2, 2)
    before = (attn.stats(), attn.block_table(1), attn.seq_len(1))
    cases: list[tuple[str, Callable[[], object]]] = [
        ("seq_len=1.5: must be a whole number", lambda: attn.allocate(3, 1.5)),  # type: ignore[arg-type]
        ("seq_len='8'", lambda: attn.allocate(3, "8")),  # type: ignore[arg-type]
        ("seq_len=True", lambda: attn.allocate(3, True)),
        (r"seq_len=tensor\(8\.\)", lambda: attn.allocate(3, torch.tensor(8.0))),  # type: ignore[arg-type]
        (r"seq_len=tensor\(True\)", lambda: attn.allocate(3, torch.tensor(True))),  # type: ignore[arg-type]
        ("request_id=1.5: must be an int or a string", lambda: attn.allocate(1.5, 1)),  # type: ignore[arg-type]
        ("num_tokens=1.5", lambda: attn.append(1, 1.5)),  # type: ignore[arg-type]
        ("seq_len=9.25", lambda: attn.truncate(1, 9.25)),  # type: ignore[arg-type]
        ("start=0.5", lambda: attn.slots(1, 0.5)),  # type: ignore[arg-type]
        ("end=2.0", lambda: attn.read([1], 0, 2.0)),  # type: ignore[arg-type]
        ("layer=0.0", lambda: attn.block_table(1, 0.0)),  # type: ignore[arg-type]
        ("layer=False", lambda: attn.forward(*one, request_ids=[1], layer=False)),
        ("request_id=1.0", lambda: attn.forward(*one, request_ids=[1.0])),  # type: ignore[list-item]
        ("request_id=True", lambda: attn.free(True)),
        ("request_ids=1: must be a list", lambda: attn.forward(*one, request_ids=1)),  # type: ignore[arg-type]
        ("request_ids='12': must be a list", lambda: attn.forward(*two, request_ids="12")),
        (r"query_lens\[0\]=2.0", lambda: attn.forward(*two, request_ids=[1], query_lens=[2.0])),  # type: ignore[list-item]
        (r"query_lens\[1\]=1.0", lambda: attn.begin([1, 2], [1, 1.0])),  # type: ignore[list-item]
        ("query_lens=2: must be a list", lambda: attn.blocks_needed([1], 2)),  # type: ignore[arg-type]
        (r"block_ids\[0\]=0.5", lambda: attn.forward(*one, [0.5])),  # type: ignore[list-item]
        ("query is a list", lambda: attn.forward([1.0], *one[1:], request_ids=[1])),  # type: ignore[arg-type]
        ("key is a list", lambda: attn.forward(one[0], [1.0], one[2], request_ids=[1])),  # type: ignore[arg-type]
        ("block_ids=0: must be a list", lambda: attn.forward(*one, 0)),  # type: ignore[arg-type]
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(RequestError, match=message):
            call()
        attn.audit()
        assert (attn.stats(), attn.block_table(1), attn.seq_len(1)) == before
    assert attn.allocate(np.int64(3), torch.tensor(8)) == [3, 4]  # type: ignore[arg-type]
    attn.forward(*one, request_ids=torch.tensor([3]), query_lens=np.array([1]))  # type: ignore[arg-type]
    assert attn.request_ids == [1, 2, 3] and attn.context_len(3) == 1 and type(attn.request_ids[2]) is int
    attn.free(3), attn.truncate(1, 5), attn.append(1, 0)


def test_one_is_one_block() -> None:
    attn = attention(num_blocks=1)
    attn.allocate(1, 4)
    with pytest.raises(CapacityError, match=r"^append\(1, 1\): 1 block is needed, 0 of 1 are free"):
        attn.append(1, 1)
    with pytest.raises(CapacityError, match=r"^a step of 1 request and 5 tokens: 1 block is needed"):
        attn.forward(*tokens(5, 1), request_ids=[1])


def test_a_step_that_fails_in_its_kernels_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = attention()
    attn.allocate(1, 2)

    def broken(layer: int, query: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no luck")

    monkeypatch.setattr(attn._backend, "attend", broken)
    with pytest.raises(RuntimeError, match="no luck"):
        attn.forward(*tokens(2, 1), request_ids=[1])
    monkeypatch.undo()
    assert attn.context_len(1) == 0
    Contexts(attn).step({1: 2})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3"),
        ({"num_blocks": 0}, "num_blocks=0"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"sliding_window": [4, 4]}, "2 entries for num_layers=1"),
        ({"sliding_window": 0}, "sliding_window=0"),
        ({"softcap": 0.0}, "softcap"),
        ({"backend": "fastest"}, "backend='fastest': must be one of"),
        ({"dtype": torch.int8}, "kv_cache_dtype quantises"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3'"),
        ({"num_blocks": 10**12}, "Lower num_blocks"),
        ({"num_blocks": True}, "num_blocks=True: must be a whole number"),
        ({"block_size": 4.0}, "block_size=4.0: must be a whole number"),
        ({"num_heads": "4"}, "num_heads='4': must be a whole number"),
        ({"sliding_window": 4.5}, "sliding_window=4.5"),
        ({"sliding_window": True}, "sliding_window=True"),
        ({"scale": float("nan")}, "scale=nan: must be a number above 0, or None"),
        ({"scale": 0}, "scale=0: "),
        ({"scale": -1.0}, "scale=-1.0: "),
        ({"softcap": float("inf")}, "softcap=inf: "),
        ({"dtype": "foo"}, "dtype='foo': must be one of auto, float32, bfloat16, float16"),
        ({"dtype": "bf16"}, "dtype='bf16': must be one of"),
        ({"dtype": 32}, "dtype=32: must be one of"),
        ({"dtype": torch.float8_e4m3fn}, "16 bits or more; kv_cache_dtype quantises"),
        ({"device": "xyz"}, "device='xyz': must be auto, cpu, cuda or npu"),
        ({"device": None}, "device=None: must be a torch.device or a name"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attention(**wrong)


def test_names_and_numpy_numbers_are_settings_too() -> None:
    attn = attention(dtype="bfloat16", num_blocks=np.int64(8), block_size=np.int32(4), device=torch.device("cpu", 0))
    assert attn.kv_blocks.dtype == torch.bfloat16 and attn.kv_blocks.shape[0] == 8
    attn.allocate(1, 3)
    assert attn.forward(*(x.bfloat16() for x in tokens(3, 1)), request_ids=[1]).dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available() or find_spec("torch_npu") is not None, reason="there is such a device")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "npu"])
def test_a_device_that_is_not_there_is_an_error_of_settings(device: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{device[:3]}.*use device='cpu'"):
        attention(device=device)


def test_modes_of_torch_do_not_matter_and_gradients_are_refused() -> None:
    with torch.inference_mode():
        attn = attention(backend="reference")
        attn.allocate(1, 0)
        attn.forward(*tokens(3, 1), request_ids=[1])
    seen = Contexts(attn)
    _, seen.keys[1], seen.values[1] = tokens(3, 1)
    seen.seed = 1
    seen.step({1: 2})
    with torch.inference_mode():
        seen.step({1: 1})
    query, key, value = tokens(1, 9)
    with pytest.raises(RequestError, match="query requires a gradient, and paged attention has none"):
        attn.forward(query.requires_grad_(), key, value, request_ids=[1])
    with torch.no_grad():
        attn.forward(query, key, value, request_ids=[1])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "int4"])
def test_what_was_written_can_be_read_back(kv_cache_dtype: str) -> None:
    attn = PagedAttention(4, 2, 32, block_size=4, num_blocks=16, num_layers=2, kv_cache_dtype=kv_cache_dtype)
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 2, 7, 2, 32, generator=generator).unbind(0)
    attn.allocate(1, 7)
    for layer in (0, 1):
        attn.forward(torch.randn(7, 4, 32, generator=generator), key[layer], value[layer], request_ids=[1], layer=layer)
    tolerance = {"auto": 0.0, "int8": 0.03, "int4": 0.5}[kv_cache_dtype]
    for layer in (0, 1):
        keys, values = attn.read([1, 1], 2, 7, layer)
        assert keys.shape == (2, 5, 2, 32)
        torch.testing.assert_close(keys[1], key[layer, 2:], rtol=0, atol=tolerance)
        torch.testing.assert_close(values[0], value[layer, 2:], rtol=0, atol=tolerance)
    with pytest.raises(RequestError, match="0 to 7 is written"):
        attn.read([1], 0, 8)


def test_the_view_prints_the_tables() -> None:
    attn = attention(num_blocks=8)
    attn.allocate("chat", 10)
    attn.forward(*tokens(10, 1), request_ids=["chat"])
    attn.fork("chat", "twin")
    attn.forward(*tokens(2, 2), request_ids=["chat", "twin"])
    lines = str(attn.view()).splitlines()
    assert lines[0] == "request chat: [0*, 1*, 3]" and lines[1] == "request twin: [0*, 1*, 2]"
    assert "4 of 8 blocks used (50.0%), 2 of them shared" in lines[3]
    assert "1 forks, 1 copies on write" in lines[4]


# -- functions -----------------------------------------------------------------------------------------------------


def softmax_of_each_block(
    query: torch.Tensor, kv: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, size: int
) -> torch.Tensor:
    """The mistake: results of blocks are added up as if each block's softmax were the whole one."""
    out = torch.zeros_like(query)
    for b in range(len(query)):
        for i in range(-(-int(contexts[b]) // size)):
            kept = min(size, int(contexts[b]) - i * size)
            key, value = kv[tables[b, i], :, :kept]
            scores = torch.einsum("hd,khd->hk", query[b], key) * query.shape[-1] ** -0.5
            out[b] += torch.einsum("hk,khd->hd", scores.softmax(-1), value)
    return out


@pytest.mark.parametrize("layout", ["tokens", "engine"])
def test_functions_write_attend_and_copy_in_both_layouts(layout: str) -> None:
    size, contexts, counts = 4, [9, 3, 6], [9, 1, 2]
    tables = torch.tensor([[5, 0, 3], [1, -1, -1], [2, 6, -1]])
    shape = (8, 2, size, KV_HEADS, DIM) if layout == "tokens" else (8, 3, 2, KV_HEADS, size, DIM)
    kv = torch.full(shape, float("nan"))
    rows = [tokens(c, i) for i, c in enumerate(contexts)]
    layer = {} if layout == "tokens" else {"layer": 2}
    past = octavo.slot_mapping(tables, contexts, size, contexts)
    octavo.write_kv(kv, *(torch.cat([r[i] for r in rows]) for i in (1, 2)), past, **layer)
    query = torch.cat([r[0][c - n :] for r, c, n in zip(rows, contexts, counts)])
    expected = torch.cat([dense(r[0][c - n :], r[1], r[2]) for r, c, n in zip(rows, contexts, counts)])
    out = octavo.paged_attention(query, kv, tables, contexts, size, query_lens=counts, layout=layout, **layer)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    octavo.copy_blocks(kv, [(0, 4), (4, 7)])
    moved = torch.tensor([[5, 7, 3], [1, -1, -1], [2, 6, -1]])
    assert torch.equal(octavo.paged_attention(query, kv, moved, contexts, size, query_lens=counts, **layer), out)


def test_a_softmax_for_each_block_is_something_else() -> None:
    size, contexts = 4, torch.tensor([11, 4])
    tables = torch.tensor([[0, 1, 2], [3, -1, -1]])
    kv = torch.randn(4, 2, size, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    query = tokens(2, 3)[0]
    right = octavo.paged_attention(query, kv, tables, contexts, size)
    wrong = softmax_of_each_block(query, kv, tables, contexts, size)
    keys, values = (kv[:3, half].flatten(0, 1)[:11] for half in (0, 1))
    torch.testing.assert_close(right[:1], dense(query[:1], keys, values), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(right[1], wrong[1])  # one block: the same
    assert (right[0] - wrong[0]).abs().max() > 0.3


def test_the_functions_read_the_pool_of_the_object() -> None:
    attn = attention(num_layers=2, sliding_window=6)
    attn.allocate(1, 9), attn.allocate(2, 5)
    for layer in (0, 1):
        last = attn.forward(*tokens(14, layer), request_ids=[1, 2], layer=layer)
    tables, contexts = attn.tables([1, 2])
    query = tokens(14, 1)[0]
    out = octavo.paged_attention(
        query, attn.kv_blocks, tables, contexts, 4, query_lens=[9, 5], layer=1, sliding_window=6
    )
    assert torch.equal(out, last)


def test_functions_refuse_what_does_not_fit() -> None:
    query, key, value = tokens(2, 1)
    kv = torch.zeros(4, 2, 8, KV_HEADS, DIM)
    tables, contexts = torch.tensor([[0, 1], [2, 3]]), torch.tensor([9, 8])
    slots = torch.tensor([3, 4])
    cases: list[tuple[str, Callable[[], object]]] = [
        ("has 8 tokens a block, not 4", lambda: octavo.paged_attention(query, kv, tables, contexts, 4)),
        ("looks head by head: give kv_blocks.unsqueeze\\(1\\)",
         lambda: octavo.paged_attention(query, kv.transpose(2, 3), tables, contexts, 8)),
        ("as 'engine'", lambda: octavo.paged_attention(query, kv, tables, contexts, 8, layout="engine")),
        ("layout='rows'", lambda: octavo.paged_attention(query, kv, tables, contexts, 8, layout="rows")),
        ("kv_blocks of shape", lambda: octavo.write_kv(kv[0], key, value, slots)),
        ("needs 3 blocks, block_tables has 2", lambda: octavo.paged_attention(query, kv, tables, [17, 8], 8)),
        ("block_tables\\[1, 0\\] is 4", lambda: octavo.paged_attention(query, kv, tables + 2, [7, 8], 8)),
        ("do not include", lambda: octavo.paged_attention(query, kv, tables, [0, 8], 8)),
        ("a block of this pool holds 1", lambda: octavo.paged_attention(query, kv, tables, contexts, 8, layer=1)),
        ("the pool has slots 0 to 31", lambda: octavo.write_kv(kv, key, value, torch.tensor([3, 32]))),
        ("two tokens have the same slot", lambda: octavo.write_kv(kv, key, value, torch.tensor([3, 3]))),
        ("needed are", lambda: octavo.write_kv(kv, key, value[:1], slots)),
        ("is not a \\(source, destination\\)", lambda: octavo.copy_blocks(kv, [(0, 4)])),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises(RequestError, match=message):
            call()
    octavo.write_kv(kv, key, value, torch.tensor([3, -1]))  # -1 is padding
    assert torch.equal(kv[0, 0, 3], key[0]) and kv.count_nonzero() == 2 * KV_HEADS * DIM


def test_functions_refuse_types_that_do_not_fit() -> None:
    query, key, value = tokens(2, 1)
    kv = torch.zeros(4, 2, 8, KV_HEADS, DIM)
    tables, contexts, slots = torch.tensor([[0, 1], [2, 3]]), torch.tensor([9, 8]), torch.tensor([3, 4])

    def bad(value: Any) -> Any:
        return value

    cases: list[tuple[str, Callable[[], object]]] = [
        ("slots is torch.float32: an int type", lambda: octavo.write_kv(kv, key, value, slots.float())),
        ("slots is torch.bool", lambda: octavo.write_kv(kv, key, value, slots > 0)),
        ("slots is a list", lambda: octavo.write_kv(kv, key, value, bad([3, 4]))),
        ("key is torch.complex64: a float", lambda: octavo.write_kv(kv, key.to(torch.complex64), value, slots)),
        ("value is torch.int64", lambda: octavo.write_kv(kv, key, value.long(), slots)),
        ("layer=0.5", lambda: octavo.write_kv(kv, key, value, slots, layer=bad(0.5))),
        ("query is a list", lambda: octavo.paged_attention(bad([1]), kv, tables, contexts, 8)),
        ("query is torch.int64", lambda: octavo.paged_attention(query.long(), kv, tables, contexts, 8)),
        ("kv_blocks is a list", lambda: octavo.paged_attention(query, bad([]), tables, contexts, 8)),
        ("block_tables is torch.bool", lambda: octavo.paged_attention(query, kv, tables > 0, contexts, 8)),
        ("block_tables is a list", lambda: octavo.slot_mapping(bad([[0]]), [1], 8)),
        (r"context_lens\[0\]=8.7", lambda: octavo.paged_attention(query, kv, tables, bad([8.7, 7]), 8)),
        (r"query_lens\[0\]=1.0",
         lambda: octavo.paged_attention(query, kv, tables, contexts, 8, query_lens=bad([1.0, 1]))),
        ("block_size=0: ", lambda: octavo.slot_mapping(tables, contexts, 0)),
        ("block_size=True", lambda: octavo.paged_attention(query, kv, tables, contexts, True)),
        (r"block_tables\[1, 0\] is 4: blocks 0 to 3 are",
         lambda: octavo.paged_attention(query, kv, tables + 2, [7, 8], 8)),
        (r"block_tables\[0, 1\] is -1: a block id is 0 or more",
         lambda: octavo.slot_mapping(torch.tensor([[0, -1]]), [9], 8)),
        ("1 is not a .source, destination", lambda: octavo.copy_blocks(kv, bad((1, 2)))),
        (r"pair\[0\]=0.0: must be a whole", lambda: octavo.copy_blocks(kv, [bad((0.0, 1))])),
        ("pairs=3", lambda: octavo.copy_blocks(kv, bad(3))),
        ("^backend='fastest'", lambda: octavo.paged_attention(query, kv, tables, contexts, 8, backend="fastest")),
        (r"sliding_window=\[4\]: must be a whole",
         lambda: octavo.paged_attention(query, kv, tables, contexts, 8, sliding_window=bad([4]))),
        ("needs 1 block, block_tables has 0", lambda: octavo.paged_attention(query, kv, tables[:, :0], [3, 4], 8)),
        ("scale=0", lambda: octavo.paged_attention(query, kv, tables, contexts, 8, scale=0)),
    ]  # fmt: skip
    for message, call in cases:
        with pytest.raises((RequestError, ConfigError), match=message):
            call()
    assert not kv.any()
    octavo.copy_blocks(kv, np.array([[0, 1]]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["triton", "ascend"])
def test_a_backend_that_cannot_be_used_is_an_error_of_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on this machine outside the tests, where nothing interprets the kernels.
    monkeypatch.setattr("octavo.kernels.triton.why_unavailable", lambda cache, spec: "a GPU is needed")
    attn = attention()
    with pytest.raises(ConfigError, match=f"^attention_backend='{name}' cannot be used: "):
        make_backend(name, attn._store.cache, attn._spec)
    with pytest.raises(ConfigError, match=f"^backend='{name}' cannot be used: "):
        octavo.paged_attention(tokens(1, 1)[0], attn.kv_blocks, torch.tensor([[0]]), [1], 4, backend=name)


def test_functions_do_nothing_for_an_empty_batch() -> None:
    kv, tables = torch.zeros(4, 2, 8, KV_HEADS, DIM), torch.zeros(0, 2, dtype=torch.int32)
    assert octavo.paged_attention(torch.zeros(0, HEADS, DIM), kv, tables, [], 8).shape == (0, HEADS, DIM)
    dense_query = torch.zeros(0, 1, HEADS, DIM)
    assert octavo.paged_attention(dense_query, kv, tables, [], 8).shape == dense_query.shape
    slots = octavo.slot_mapping(tables, [], 8)
    octavo.write_kv(kv, torch.zeros(0, KV_HEADS, DIM), torch.zeros(0, KV_HEADS, DIM), slots)
    octavo.copy_blocks(kv, [])


def test_the_functions_have_no_gradient() -> None:
    query, key, value = tokens(1, 1)
    kv, tables, slots = torch.zeros(2, 2, 8, KV_HEADS, DIM), torch.tensor([[0]]), torch.tensor([0])
    trained = torch.nn.Linear(DIM, DIM)(key)
    for call in (
        lambda: octavo.write_kv(kv, trained, value, slots),
        lambda: octavo.write_kv(kv, key, trained, slots),
        lambda: octavo.paged_attention(query, kv.clone().requires_grad_(), tables, [1], 8),
        lambda: octavo.copy_blocks(kv.clone().requires_grad_(), [(0, 1)]),
    ):
        with pytest.raises(RequestError, match="requires a gradient, and paged attention has none: call it under"):
            call()
    assert not kv.requires_grad and not kv.any()
    with torch.no_grad():
        octavo.write_kv(kv, trained, value, slots)
    assert not kv.requires_grad and torch.equal(kv[0, 0, 0], trained[0])


# -- threads -------------------------------------------------------------------------------------------------------


def run_threads(*works: Callable[[], None]) -> None:
    """All at once from a barrier; the first failure is raised here."""
    barrier, failures = threading.Barrier(len(works)), []

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def test_threads_share_a_pool_of_one_layer() -> None:
    attn = attention(num_blocks=400)
    attn.allocate("prompt", 10)
    first = tokens(10, 99)
    attn.forward(*first, request_ids=["prompt"])

    def serve(name: int) -> Callable[[], None]:
        def work() -> None:
            for turn in range(8):
                request = f"{name}.{turn}"
                attn.fork("prompt", request)
                keys, values = [first[1]], [first[2]]
                for seed in range(3):
                    query, key, value = tokens(1, 100 * name + seed)
                    keys.append(key), values.append(value)
                    out = attn.forward(query, key, value, request_ids=[request])
                    expected = dense(query, torch.cat(keys), torch.cat(values))
                    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
                attn.truncate(request, 11)
                attn.free(request)

        return work

    def look() -> None:
        for _ in range(20):
            view, stats = attn.view(), attn.stats()
            assert view.num_used + view.num_free == 400 and stats.used + stats.free == 400
            attn.audit()

    run_threads(*(serve(i) for i in range(4)), look)
    attn.audit()
    assert attn.request_ids == ["prompt"] and attn.stats().used == 3
    assert attn.stats().forks == 32 and attn.stats().copies == 32


def test_bookkeeping_goes_on_while_another_thread_is_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    attn = attention(num_layers=2)
    attn.allocate(1, 4), attn.allocate(2, 4)
    inside, go_on = threading.Event(), threading.Event()
    attend = attn._backend.attend

    def slow(layer: int, query: torch.Tensor) -> torch.Tensor:
        if layer == 0:
            inside.set()
            assert go_on.wait(30)
        return attend(layer, query)

    monkeypatch.setattr(attn._backend, "attend", slow)

    def step() -> None:
        for layer in (0, 1):
            attn.forward(*tokens(4, layer), request_ids=[1], layer=layer)

    def others() -> None:
        try:
            assert inside.wait(30)
            assert attn.allocate(3, 8) and attn.free(2) == 1 and attn.context_len(1) == 0
            with pytest.raises(RequestError, match="a step of request 1 is open"):
                attn.forward(*tokens(8, 5), request_ids=[3], layer=0)
            with pytest.raises(RequestError, match="request 1 is in the step that is open"):
                attn.free(1)
            attn.audit()
        finally:
            go_on.set()

    run_threads(step, others)
    assert attn.context_len(1) == 4 and attn.stats().used == 3
    attn.audit()
