"""All layers in one native call: the bits of the decoder's own path, in every format, and the same refusals.

The other path is the same decoder with a backend that a stack does not know: a subclass of the native one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from helpers.native_support import instruction_sets, instructions, threads
from helpers.tiny_models import tiny_config
from octavo.bench.instrument import StepProfile
from octavo.core.kv_format import kv_bytes_per_token_layer
from octavo.core.kv_layout import build_layout
from octavo.core.weight_format import parse_weight_format
from octavo.errors import BoundsError
from octavo.kernels import cpu
from octavo.kernels.cpu import NativeOps
from octavo.kernels.interface import AttentionBatch
from octavo.kernels.ops import TorchOps
from octavo.kernels.quantized_weights import JoinedLinear, QuantizedWeight, quantize_rows
from octavo.models.config_reader import spec_from_config
from octavo.models.decoder import Decoder
from octavo.models.dummy_loader import open_dummy
from octavo.models.spec import ModelSpec
from octavo.runner.kv_store import KVStore

pytestmark = pytest.mark.skipif(bool(cpu.why_unavailable()), reason=cpu.why_unavailable() or "built")

#: Each has something that the others have not: biases, head norms, sandwich norms, windows, soft caps, two tables,
#: layers without positions, a residual scale, norms only after, norms over all heads.
SERVED = ("llama", "llama-bias", "qwen3", "gemma", "gemma2", "gemma3", "smollm3", "granite", "olmo2", "mistral")
BLOCK = 8


def spec_of(family: str, **settings: Any) -> ModelSpec:
    return spec_from_config(tiny_config(family, **settings).to_dict() | {"architectures": None})


def decoder_of(spec: ModelSpec, dtype: torch.dtype = torch.float32, quantization: str | None = None) -> Decoder:
    ops = NativeOps(dtype, parse_weight_format(quantization))
    return Decoder(spec, open_dummy(spec, dtype, seed=5), ops, dtype)


class Separate(cpu.NativeAttention):
    """As the native backend, but not the one that a stack may be given."""


class Pool:
    """A pool of its own under one of the two backends; sequence s has the blocks s, s + 4, s + 8, … of each group."""

    def __init__(self, spec: ModelSpec, kind: type[cpu.NativeAttention], kv_dtype: str = "auto") -> None:
        size = kv_bytes_per_token_layer(
            kv_dtype, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, itemsize=torch.bfloat16.itemsize
        )
        self.layout = build_layout(spec.windows, block_size=BLOCK, bytes_per_token_layer=size, kv_dtype=kv_dtype)
        store = KVStore.allocate(self.layout, spec, 64 * self.layout.num_groups, dtype=torch.bfloat16)
        self.kv = store.cache.kv
        self.kv.fill_(0)
        self.backend = kind(store.cache, spec)

    def step(
        self, decoder: Decoder, parts: list[tuple[int, int, int]], wanted: Sequence[int] | None = None
    ) -> torch.Tensor:
        """parts: (sequence, first new position, one past the last), a row each -> hidden."""
        starts, tables, slots = [0], [], []
        tokens = [(s, p) for s, low, high in parts for p in range(low, high)]
        for group in range(self.layout.num_groups):
            blocks = {s: [(group * 64) + s + 4 * i for i in range(16)] for s, _, _ in parts}
            tables.append(torch.tensor([blocks[s] for s, _, _ in parts], dtype=torch.int32))
            slots.append(torch.tensor([blocks[s][p // BLOCK] * BLOCK + p % BLOCK for s, p in tokens]))
        for _, low, high in parts:
            starts.append(starts[-1] + high - low)
        batch = AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor([high for _, _, high in parts], dtype=torch.int32),
            block_tables=tables,
            slots=slots,
            max_query=max(high - low for _, low, high in parts),
            max_context=max(high for _, _, high in parts),
            wanted=None if wanted is None else torch.tensor(wanted),
        )
        self.backend.plan(batch)
        ids = torch.tensor([(p * 37 + s) % 256 for s, p in tokens])
        return decoder.forward(ids, torch.tensor([p for _, p in tokens]), self.backend)


#: Prompts of two sequences, then one decoding beside a prompt, then all of them, then one alone.
STEPS = (
    [(0, 0, 37), (1, 0, 5)],
    [(1, 5, 6), (2, 0, 70)],
    [(0, 37, 38), (1, 6, 7), (2, 70, 73)],
    [(2, 73, 74)],
)
#: Of how many of each row's last tokens the state is read: all, none, many, a few, nothing at all.
WANTED = ((37, 0), (1, 50), (1, 0, 2), (0,))


def assert_same(decoder: Decoder, spec: ModelSpec, kv_dtype: str = "auto") -> None:
    one, other = (Pool(spec, kind, kv_dtype) for kind in (cpu.NativeAttention, Separate))
    partly = Pool(spec, cpu.NativeAttention, kv_dtype)
    for parts, wanted in zip(STEPS, WANTED, strict=True):
        hidden = one.step(decoder, parts)
        assert_wanted(partly.step(decoder, parts, wanted), hidden, parts, wanted)
        assert decoder.why_no_stack(one.backend) == ""
        assert decoder.why_no_stack(other.backend) == "Separate has no such call"
        assert torch.isfinite(hidden).all()
        assert torch.equal(hidden, other.step(decoder, parts))
    for pool in (one, partly):
        assert torch.equal(pool.kv.view(torch.uint8), other.kv.view(torch.uint8))


def assert_wanted(
    hidden: torch.Tensor, full: torch.Tensor, parts: list[tuple[int, int, int]], wanted: Sequence[int]
) -> None:
    """The wanted rows are those of the whole computation, and none of the others can be taken for one."""
    end = 0
    for (_, low, high), count in zip(parts, wanted, strict=True):
        end += high - low
        assert torch.equal(hidden[end - count : end], full[end - count : end])
        assert torch.isnan(hidden[end - high + low : end - count]).all()


@pytest.mark.parametrize("family", SERVED)
def test_the_bits_of_single_operations(family: str) -> None:
    spec = spec_of(family)
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 2)):
        with threads(count):
            assert_same(decoder_of(spec, dtype), spec)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_every_instruction_set_quantised_weights_and_caches(isa: str, quantization: str | None) -> None:
    spec = spec_of("gemma3")
    with instructions(isa), threads(2):
        decoder = decoder_of(spec, torch.bfloat16, quantization)
        assert isinstance(decoder.linears()["layers.0.qkv"], JoinedLinear) == (quantization == "int4")
        for kv_dtype in ("auto", "int8", "int4"):
            assert_same(decoder, spec, kv_dtype)


class Mixed(Mapping[str, torch.Tensor]):
    """Weights of which a file keeps one part in another format: v and up in int4, all others in int8."""

    def __init__(self, inner: Mapping[str, torch.Tensor]) -> None:
        self.inner = inner

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.inner[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def quantized(self, name: str) -> QuantizedWeight | None:
        kind = "int4" if name.endswith((".v.weight", ".up.weight")) else "int8"
        return quantize_rows(self.inner[name], kind) if name.startswith("layers.") else None


@pytest.mark.parametrize("family", ["gemma3", "llama-bias"])
def test_parts_in_different_formats(family: str) -> None:
    spec = spec_of(family)
    decoder = Decoder(spec, Mixed(open_dummy(spec, torch.bfloat16, seed=5)), NativeOps(torch.bfloat16), torch.bfloat16)
    assert isinstance(decoder.linears()["layers.0.qkv"], JoinedLinear)
    assert isinstance(decoder.linears()["layers.1.gate_up"], JoinedLinear)
    with threads(2):
        assert_same(decoder, spec)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("heads", [1, 3])
def test_queries_that_end_inside_a_panel(heads: int, quantization: str | None) -> None:
    """Panels have 16 outputs: keys of the last layer begin in the middle of one."""
    spec = spec_of("qwen3", num_attention_heads=heads, num_key_value_heads=1, head_dim=8)
    assert_same(decoder_of(spec, torch.bfloat16, quantization), spec)


def test_gemma_270m_shapes() -> None:
    """Two layers of Gemma 3 270M, one windowed: the sizes at which products and norms go to several threads."""
    spec = spec_of("gemma3", hidden_size=640, intermediate_size=2048, head_dim=256, num_attention_heads=4,
                   num_key_value_heads=1, num_hidden_layers=2)  # fmt: skip
    with threads(2):
        assert_same(decoder_of(spec, torch.bfloat16), spec)


#: 400 tokens are enough for strips; then as many are wanted of them, a few, and in a last step nobody sees any.
MANY = [(s, 0, 100) for s in range(4)]
MANY_WANTED = ((100, 100, 100, 90), (0, 1, 100, 100), (0, 2, 0, 0), (0, 0, 0, 0))


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_many_tokens_go_through_in_strips(family: str, quantization: str | None) -> None:
    spec = spec_of(family)
    decoder = decoder_of(spec, torch.bfloat16, quantization)
    for count in (1, 2):
        with threads(count):
            one, other = (Pool(spec, kind) for kind in (cpu.NativeAttention, Separate))
            hidden = one.step(decoder, MANY)
            assert torch.equal(hidden, other.step(decoder, MANY))
            for wanted in MANY_WANTED:
                partly = Pool(spec, cpu.NativeAttention)
                assert_wanted(partly.step(decoder, MANY, wanted), hidden, MANY, wanted)
                assert torch.equal(partly.kv.view(torch.uint8), other.kv.view(torch.uint8))
            following = [(s, 100, 101) for s in range(4)]
            assert torch.equal(one.step(decoder, following), other.step(decoder, following))


def test_what_goes_wrong_in_a_strip_is_said_and_leaves_nothing_behind() -> None:
    spec = spec_of("qwen3")
    decoder, pool = decoder_of(spec), Pool(spec, cpu.NativeAttention)
    with threads(2):
        expected = pool.step(decoder, MANY)
        slots, blocks = pool.backend._slots[0], pool.kv.shape[0]
        for token in (0, 399):  # of the first strip and of the last
            kept, slots[token] = int(slots[token]), blocks * BLOCK
            with pytest.raises(BoundsError, match=f"layer 0: slot {blocks * BLOCK} of token {token} lies outside"):
                decoder.forward(torch.zeros(400, dtype=torch.int64), torch.arange(400), pool.backend)
            slots[token] = kept
        assert torch.equal(pool.step(decoder, MANY), expected)


def test_positions_past_the_first_tables() -> None:
    spec = spec_of("gemma3", max_position_embeddings=4096)
    decoder = decoder_of(spec)
    one, other = (Pool(spec, kind) for kind in (cpu.NativeAttention, Separate))
    for pool in (one, other):
        pool.step(decoder, [(0, 0, 3)])
    results = []
    for pool in (one, other):
        pool.step(decoder, [(0, 3, 4)])
        results.append(decoder.forward(torch.tensor([7]), torch.tensor([1500]), pool.backend))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("mixtral", "layer 0: its MLP is a MixtureOfExperts"),
        ("phi3", "only a part of each head is rotated"),
        ("gpt2", "its norms are layer norms"),
        ("falcon", "its norms are layer norms"),
    ],
)
def test_other_layers_stay_with_the_decoder(family: str, reason: str) -> None:
    spec = spec_of(family)
    decoder = decoder_of(spec)
    pool = Pool(spec, cpu.NativeAttention)
    hidden = pool.step(decoder, STEPS[0])
    assert decoder.why_no_stack(pool.backend) == reason
    assert torch.isfinite(hidden).all()


def test_other_operations_stay_with_the_decoder() -> None:
    spec = spec_of("llama")
    decoder = Decoder(spec, open_dummy(spec, torch.float32, seed=5), TorchOps(), torch.float32)
    pool = Pool(spec, cpu.NativeAttention)
    pool.step(decoder, STEPS[0])
    assert decoder.why_no_stack(pool.backend) == "the torch operations have none"


def test_a_replaced_product_is_used_and_one_put_back_too() -> None:
    spec = spec_of("qwen3")
    decoder = decoder_of(spec)
    pool = Pool(spec, cpu.NativeAttention)
    before = pool.step(decoder, STEPS[0])
    plain = decoder.linears()["layers.1.down"]
    decoder.replace_linear("layers.1.down", lambda x: plain(x) + 1.0)
    assert not torch.allclose(pool.step(decoder, STEPS[0]), before)
    assert decoder.why_no_stack(pool.backend) == "layer 1: down is a function, not one packed weight"
    decoder.replace_linear("layers.1.down", plain)
    assert torch.equal(pool.step(decoder, STEPS[0]), before)
    assert not decoder.why_no_stack(pool.backend)


def test_wanted_tokens_are_checked() -> None:
    spec = spec_of("llama")
    decoder, pool = decoder_of(spec), Pool(spec, cpu.NativeAttention)
    with pytest.raises(BoundsError, match="wanted tokens of 1 rows for 2"):
        pool.step(decoder, STEPS[0], [1])
    for count in (6, -1):
        with pytest.raises(BoundsError, match=f"row 1: {count} of 5 new tokens are wanted"):
            pool.step(decoder, STEPS[0], [1, count])
    full = Pool(spec, cpu.NativeAttention).step(decoder, STEPS[0])
    assert torch.equal(pool.step(decoder, STEPS[0]), full)  # nothing is left of what was wanted before


def test_refusals_are_those_of_the_backend() -> None:
    spec = spec_of("gemma3")
    decoder = decoder_of(spec)
    pool = Pool(spec, cpu.NativeAttention)
    pool.step(decoder, [(0, 0, 20)])
    ids, backend = torch.tensor([3] * 20), pool.backend
    positions = torch.arange(20)
    with pytest.raises(BoundsError, match="19 tokens in a step planned for 20"):
        decoder.forward(ids[:19], positions[:19], backend)
    with pytest.raises(BoundsError, match="position -1 of token 0"):
        decoder.forward(ids, positions - 1, backend)
    blocks = pool.kv.shape[0]
    kept, backend._slots[-1][4] = int(backend._slots[-1][4]), blocks * BLOCK
    first = min(i for i, place in enumerate(backend._places) if place[0] == len(backend._slots) - 1)
    with pytest.raises(BoundsError, match=f"layer {first}: slot {blocks * BLOCK} of token 4 lies outside"):
        decoder.forward(ids, positions, backend)
    backend._slots[-1][4] = kept
    backend._tables[-1][0, 1] = blocks
    with pytest.raises(BoundsError, match=f"layer {first}: block table row 0 names a block outside the pool"):
        decoder.forward(ids, positions, backend)
    backend._tables[-1][0, 1] = -1
    with pytest.raises(BoundsError, match="block table row 0 names a block outside the pool"):
        decoder.forward(ids, positions, backend)
    # What went wrong leaves nothing behind: the same step again, right, gives what it gave.
    again = Pool(spec, cpu.NativeAttention)
    assert torch.equal(pool.step(decoder, [(0, 0, 20)]), again.step(decoder, [(0, 0, 20)]))


def test_a_nan_stays_in_its_row() -> None:
    spec = spec_of("llama")
    decoder = decoder_of(spec)
    pool, other = (Pool(spec, kind) for kind in (cpu.NativeAttention, Separate))
    for p in (pool, other):
        p.step(decoder, [(0, 0, 9), (1, 0, 9)])
        block = 1  # the first of sequence 1
        p.kv[block].fill_(math.nan)
    hidden, expected = (p.step(decoder, [(0, 9, 10), (1, 9, 10)]) for p in (pool, other))
    assert torch.isfinite(hidden[0]).all() and torch.isnan(hidden[1]).all()
    assert torch.equal(hidden[0], expected[0]) and torch.isnan(expected[1]).all()


def test_the_profile_reads_what_the_stack_counts() -> None:
    spec, profile = spec_of("gemma3"), StepProfile()
    decoder = Decoder(spec, open_dummy(spec, torch.float32, seed=5), profile.ops(NativeOps()), torch.float32)
    pool, plain = (Pool(spec, cpu.NativeAttention) for _ in range(2))
    bare = pool.backend
    expected = plain.step(decoder_of(spec), STEPS[0])
    pool.backend = profile.backend(bare)  # type: ignore[assignment]
    with profile.section("model"):
        hidden = pool.step(decoder, STEPS[0])
    assert torch.equal(hidden, expected)
    assert set(profile.seconds) >= {"products", "attention", "KV write", "small operations", "model"}
    assert all(seconds > 0 for seconds in profile.seconds.values())
    assert profile.entries < 12  # not one for each operation of each layer
