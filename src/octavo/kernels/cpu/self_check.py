"""Whether an instruction set computes what the portable kernels do, on small random input, before it is used.

The kernels for AVX-512 and AMX are tested in emulation and can meet a processor nobody has run them on. A few hundred
microseconds at start are cheap against wrong answers: what differs is not used, and the caller says so. The inputs are
bfloat16 numbers, so that tiles, which round to bfloat16, have nothing to round. It picks nothing itself.
"""

from __future__ import annotations

from typing import Any

import torch

#: Sums of 64 products of numbers near one, in float32, in two orders.
TOLERANCE = 1e-4
#: Attention over bfloat16 on tiles rounds the weights of its softmax to bfloat16.
TILES_TOLERANCE = 1e-2


def differs(module: Any, name: str) -> str:
    """What `name` gets wrong, or "". Leaves `name` in use."""
    generator = torch.Generator().manual_seed(20)
    for kind in (_products, _quantized, _screen, _attention, _weights):
        module.use("portable")
        state = generator.get_state()
        right = kind(module, generator)
        module.use(name)
        generator.set_state(state)
        found = kind(module, generator)
        for what, expected in right.items():
            on_tiles = name == "amx" and what.startswith("attention over torch.bfloat16")
            tolerance = TILES_TOLERANCE if on_tiles else TOLERANCE
            if not torch.allclose(found[what], expected, rtol=tolerance, atol=tolerance):
                return what
    return ""


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator).bfloat16().float()


def _products(module: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Three weight types, from one row to more than a tile of them, two sizes of panels."""
    results = {}
    for code, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        weight = _random(generator, 150, 64).to(dtype)
        packed = module.PackedWeight(code, 150, 64)
        packed.pack(weight.data_ptr(), 64)
        for rows in (1, 5, 16, 17, 40):
            x, out = _random(generator, rows, 64), torch.full((rows, 150), float("nan"))
            packed.run(x.data_ptr(), 0, 64, rows, out.data_ptr(), 0, 0)
            results[f"a product of {rows} rows with {dtype} weights"] = out
    return results


def _quantized(module: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Codes of eight and of four bits, a scale and a zero per 32 inputs, one row and more than a tile of them."""
    results = {}
    for bits, scales in ((8, 2), (4, 1), (4, 6)):  # csrc/kernels.h: wide, half_zero, half_fine
        codes = torch.randint(0, 16, (150, 64), generator=generator, dtype=torch.uint8)
        steps = torch.full((150, 2), 0.25)
        zeros = torch.randint(0, 16, (150, 2), generator=generator).float() if bits == 4 else None
        packed = module.PackedWeight(bits, scales, 32, 150, 64)
        packed.pack_codes(codes.data_ptr(), steps.data_ptr(), 0 if zeros is None else zeros.data_ptr(), 32, 0, 150)
        for rows in (1, 3, 17):
            x, out = _random(generator, rows, 64), torch.full((rows, 150), float("nan"))
            packed.run(x.data_ptr(), 0, 64, rows, out.data_ptr(), 0, 0)
            results[f"a product of {rows} rows with weights of {bits} bits and scales {scales}"] = out
    return results | _fixed_point(module, generator)


def _fixed_point(module: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Fixed-point weights of two spans, the second cut off; few rows and many."""
    results = {}
    weight = _random(generator, 150, 150)
    packed, queue = module.PackedWeight(16, 2, 128, 150, 150), module.LoadQueue()
    queue.add(packed, weight.data_ptr(), 0, 0, 150, False)
    queue.run(False, 1.0)
    for rows in (1, 7, 50):
        x, out = _random(generator, rows, 150), torch.full((rows, 150), float("nan"))
        packed.run(x.data_ptr(), 0, 150, rows, out.data_ptr(), 0, 0)
        results[f"a product of {rows} rows with fixed-point weights"] = out
    return results


def _screen(module: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Largest outputs, found with a screen: one row and more than stay in registers; the first index of equal ones."""
    results = {}
    for code, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        weight = _random(generator, 150, 64).to(dtype)
        weight[140] = weight[3]
        packed = module.PackedWeight(code, 150, 64)
        packed.pack(weight.data_ptr(), 64)
        screen = module.HeadScreen(packed, 0)
        for rows in (1, 7):
            x, ids, values = _random(generator, rows, 64), torch.full((rows,), -1), torch.full((rows,), float("nan"))
            x[0] = weight[3].float()
            screen.argmax(x.data_ptr(), 0, 64, rows, ids.data_ptr(), values.data_ptr())
            results[f"the largest outputs of {rows} rows with {dtype} weights"] = torch.stack((ids.float(), values))
    return results


def _attention(module: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A prompt and a decoding row over blocks of 16, two query heads to a key head."""
    results = {}
    for code, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        kv = _random(generator, 8, 1, 2, 1, 16, 32).to(dtype)
        attention = module.Attention(kv.data_ptr(), code, 8, 1, 1, 16, 32, 2, 0.2, 0.0, [0], 0, 0)
        start, context = torch.tensor([0, 20, 21], dtype=torch.int32), torch.tensor([20, 70], dtype=torch.int32)
        table = torch.tensor([[3, 1, 0, 0, 0], [7, 2, 5, 0, 4]], dtype=torch.int32)
        query, out = _random(generator, 21, 2, 32), torch.full((21, 2, 32), float("nan"))
        attention.plan(start.data_ptr(), context.data_ptr(), 2, 80, 0)
        attention.attend(0, 0, table.data_ptr(), 5, query.data_ptr(), 64, out.data_ptr(), 0)
        results[f"attention over {dtype} keys and values"] = out
    return results


def _weights(module: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Norm, gated activation, and the draws and log-probabilities of a row of logits."""
    x, out, weight = _random(generator, 3, 80), torch.full((3, 80), float("nan")), _random(generator, 80)
    module.norm(x.data_ptr(), 80, 0, 0, out.data_ptr(), 3, 80, weight.data_ptr(), 1e-6, 0)
    results = {"a norm": out}
    for kind, name in enumerate(("silu", "gelu_tanh", "gelu")):
        gated = torch.full((3, 40), float("nan"))
        module.gate(x.data_ptr(), 80, gated.data_ptr(), 3, 40, kind, 0)
        results[name] = gated
    logits = _random(generator, 1300)
    sampling = module.Sampling(1300)
    sampling.scan([logits.data_ptr()])
    draws = sampling.draw([(0, 1.0, 0, 1.0, 0.0, 0.3), (0, 0.7, 0, 0.9, 0.0, 0.6), (0, 1.0, 50, 1.0, 0.01, 0.9)])
    results["a draw"] = torch.tensor(draws, dtype=torch.float32)
    results["log-probabilities"] = torch.tensor(sampling.logprobs([0], [5], [4])[0][1])
    return results
