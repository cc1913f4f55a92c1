"""Random weights from a config alone (`load_format="dummy"`): to test and measure a shape nobody has downloaded.

Never zero and never degenerate: the scales keep activations near one and spread the logits, so that greedy text varies
with the prompt. The same seed, spec and library give the same weights; each tensor has a stream of its own, so the
order of reading does not matter. On a GPU large tensors are drawn there, by its own generator: numbers of the same
distribution, but not those of a CPU. Small tensors are the same everywhere.
"""

from __future__ import annotations

import zlib

import torch

from octavo.models.names import Shape, is_float32, is_norm, weight_shapes
from octavo.models.spec import ModelSpec
from octavo.models.weights import Entry, LazyWeights, Progress

DEFAULT_SEED = 0
LARGE = 1 << 20  # numbers


def open_dummy(
    spec: ModelSpec,
    dtype: torch.dtype,
    seed: int | None = None,
    on_progress: Progress | None = None,
    device: torch.device | str = "cpu",
) -> LazyWeights:
    """Random canonical weights in `dtype` (norms float32). device: where large ones are drawn, if it is a GPU."""
    base = DEFAULT_SEED if seed is None else seed
    where = torch.device(device)
    entries = {}
    for name, shape in weight_shapes(spec).items():
        size = 4 if is_float32(name) else dtype.itemsize
        for side in shape:
            size *= side
        entries[name] = Entry(name, shape, size, lambda n=name, s=shape: _draw(n, s, dtype, base, spec, where))  # type: ignore[misc]
    return LazyWeights(entries, on_progress)


def _draw(
    name: str, shape: Shape, dtype: torch.dtype, seed: int, spec: ModelSpec, device: torch.device
) -> torch.Tensor:
    """Norms about 1; linears about 1 / sqrt(inputs); embeddings of unit size after the embedding scale."""
    there = device.type == "cuda" and torch.Size(shape).numel() >= LARGE
    stream = (seed * 0x9E3779B1 + zlib.crc32(name.encode())) % (1 << 63)
    generator = torch.Generator(device if there else "cpu").manual_seed(stream)
    if name.endswith("norm.bias"):
        return 0.1 * torch.randn(shape, generator=generator)
    if is_norm(name):
        return 1.0 + 0.1 * torch.randn(shape, generator=generator)
    kind = torch.float32 if is_float32(name) else dtype
    noise = torch.empty(shape, dtype=kind, device=generator.device).normal_(generator=generator)
    if name == "embedding.weight":
        # A tied head reads the same rows: 3 / sqrt(D) would do for the logits, unit size is needed for the input;
        # the final norm evens out the first, so only the embedding scale has to be undone.
        return noise.mul_(1.0 / spec.embedding_scale)
    if name == "positions.weight":
        return noise.mul_(0.3)
    return noise.mul_(0.1 if name.endswith(".bias") else shape[-1] ** -0.5 * (3.0 if name == "head.weight" else 1.0))
