"""The products of a decoder by name: listed, and replaced one at a time."""

from __future__ import annotations

import pytest
import torch

from helpers.dense_attention import run_chunks
from helpers.tiny_models import tiny_config
from octavo.kernels.ops import TorchOps
from octavo.models.config_reader import spec_from_config
from octavo.models.decoder import Decoder
from octavo.models.dummy_loader import open_dummy


def tiny_decoder(family: str) -> Decoder:
    spec = spec_from_config(tiny_config(family).to_dict() | {"architectures": None})
    return Decoder(spec, open_dummy(spec, torch.float32), TorchOps(), torch.float32)


def test_every_product_is_listed_and_can_be_wrapped() -> None:
    decoder, ids = tiny_decoder("qwen2"), [5, 6, 7, 8]
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("qkv", "out", "gate_up", "down")]
    assert list(decoder.linears()) == names
    before = run_chunks(decoder, ids, 4)
    calls: list[str] = []
    for name, linear in decoder.linears().items():
        decoder.replace_linear(name, lambda x, name=name, linear=linear: (calls.append(name), linear(x))[1])
    assert torch.equal(run_chunks(decoder, ids, 4), before)
    assert calls == names  # each once per step, in the order of the layers
    down = decoder.linears()["layers.1.down"]
    decoder.replace_linear("layers.1.down", lambda x: down(x) + 1.0)
    assert not torch.allclose(run_chunks(decoder, ids, 4), before)


@pytest.mark.parametrize("name", ["layers.3.qkv", "layers.0.q", "layers.-1.out", "layers.x.out", "head", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(KeyError, match="no product of this model"):
        tiny_decoder("qwen2").replace_linear(name, lambda x: x)
