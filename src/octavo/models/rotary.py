"""Rotary position embedding: inverse frequencies per kind, and cos/sin tables that grow on demand.

RoPE: Su et al. 2021 (arXiv 2104.09864), half-split layout. linear: position interpolation, Chen et al. 2023 (arXiv
2306.15595). yarn: Peng et al. 2023 (arXiv 2309.00071). llama3: the piecewise scaling of the Llama 3.1 release.
longrope: Ding et al. 2024 (arXiv 2402.13753). dynamic: NTK scaling by length, which begins after the model's own
limit and is plain rotary before it.
Everything is computed in float32 in the order the transformers library uses, so that tables are equal to its bits.

This module does not know layers or models; `RotarySpec` was checked when it was read.
"""

from __future__ import annotations

import math

import torch

from octavo.models.spec import RotarySpec

#: Rows a table starts with and grows by doubling; a row of head_dim 256 is 2 KiB for cos and sin.
FIRST_ROWS = 1024


def inverse_frequencies(spec: RotarySpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """([rotated / 2] float32 radians per position, factor on cos and sin); rotated: `spec.dim` or head_dim."""
    parameters = dict(spec.parameters)
    dim = spec.dim or head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / (spec.base**exponents)
    number = {name: value for name, value in parameters.items() if not isinstance(value, tuple)}
    if spec.kind in ("default", "dynamic"):
        return plain, 1.0
    if spec.kind == "divided":
        return plain / torch.tensor(parameters["factors"], dtype=torch.float32), 1.0
    if spec.kind == "linear":
        return plain / number["factor"], 1.0
    if spec.kind == "llama3":
        return _llama3(plain, number), 1.0
    if spec.kind == "yarn":
        return _yarn(spec.base, exponents, dim, number), float(number["attention_factor"])
    if spec.kind == "longrope":
        divisors = torch.tensor(parameters["long_factor" if number["long"] else "short_factor"], dtype=torch.float32)
        return 1.0 / (divisors * spec.base**exponents), float(number["attention_factor"])
    if spec.kind == "proportional":
        turning = int(number["share"] * head_dim // 2)  # the slowest pairs do not turn at all
        return torch.where(torch.arange(dim // 2) < turning, plain, 0.0) / number["factor"], 1.0
    raise ValueError(f"rotary kind {spec.kind!r} is not one of those that `rope_reader.KINDS` lists, or divided")


def _llama3(plain: torch.Tensor, p: dict[str, float | bool]) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    low, high, context = p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > context / low, plain / p["factor"], plain)
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * stretched / p["factor"] + smooth * stretched
    between = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(between, blended, stretched)


def _yarn(base: float, exponents: torch.Tensor, dim: int, p: dict[str, float | bool]) -> torch.Tensor:
    """NTK-by-parts: a ramp over dimensions from extrapolation (fast waves) to interpolation (slow waves)."""

    def dimension_of(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context (paper, section 3.2)."""
        context = p["original_max_position_embeddings"]
        return (dim * math.log(context / (rotations * 2 * math.pi))) / (2 * math.log(base))

    low, high = dimension_of(p["beta_fast"]), dimension_of(p["beta_slow"])
    if p["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = base**exponents
    extrapolated, interpolated = 1.0 / frequencies, 1.0 / (p["factor"] * frequencies)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep


class RotaryTable:
    """cos and sin of one `RotarySpec`, float32 [rows, rotated], rows added when a larger position is asked for."""

    def __init__(self, spec: RotarySpec, head_dim: int, device: torch.device | str = "cpu") -> None:
        frequencies, self._factor = inverse_frequencies(spec, head_dim)
        self._frequencies = frequencies.to(device)
        self._cos = self._sin = torch.empty(0, spec.dim or head_dim, device=device)

    @property
    def rows(self) -> int:
        return self._cos.shape[0]

    @property
    def cos_sin(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [rows, rotated] each, of the positions from 0 on; new ones once the table grows."""
        return self._cos, self._sin

    def reserve(self, rows: int) -> None:
        """Make positions below `rows` available; at least doubles, so that growth costs O(1) per position."""
        if rows <= self.rows:
            return
        rows = max(rows, 2 * self.rows, FIRST_ROWS)
        positions = torch.arange(rows, dtype=torch.float32, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        angles = torch.cat((angles, angles), dim=-1)
        self._cos, self._sin = angles.cos() * self._factor, angles.sin() * self._factor

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T], all below `rows` -> cos, sin float32 [T, rotated]."""
        return self._cos[positions], self._sin[positions]
