"""The search for the grid of an int4 group: a scale and a zero whose 16 values lie near the group's numbers.

What `quantize_rows` (quantized_weights.py) does for int4; csrc/quantize_int4.h does the same at load, to the bit: every
operation is rounded by itself, and sums have one order. It knows numbers only, nothing of a model's activations.

Invariant: a group whose numbers lie on such a grid already keeps its codes.
"""

from __future__ import annotations

import torch

#: Shares of the full range that are tried for the scale of an int4 group: a smaller step for most numbers can be worth
#: cutting the largest ones off.
SHARES = (1.0, 0.93, 0.86, 0.79, 0.72)
#: How often the best grid found is fitted again.
REFITS = 2
#: Of the error of a grid: what may be wrong with the error of the one that is fitted to it.
DOUBT = 2**-14
#: Zeros are multiples of 1 / ZERO_STEPS below 16: a byte. With whole zeros the squared error is some 30 % larger.
ZERO_STEPS = 16
#: A number this near to a point of a grid, in steps, counts as lying on it: half a step of a zero, and some rounding.
ON_GRID = 0.04


def inverse(scales: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 for 0."""
    return torch.where(scales > 0, 1 / scales.clamp(min=torch.finfo(torch.float32).tiny), 0.0)


def int4_groups(groups: torch.Tensor, zero_steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, groups, size] -> codes 0 … 15, float16 scales and zeros in 1 / zero_steps with little squared error.

    Tried are: the range (with 0) as 15, 14, … 1 steps where all numbers lie on that grid already; the range about its
    middle, cut to each of SHARES; the largest magnitude as 8 steps, and as 7; the best of all these again. Each but the
    first kind is also fitted to the codes it gives.
    """
    columns = groups.reshape(-1, groups.shape[-1]).t().contiguous()  # a group down a column: sums then go row by row
    search = _GridSearch(columns, zero_steps)
    for steps in range(15, 0, -1):
        search.consider_exact(steps)
    for share in SHARES:
        scale = half_step(search.span * (share / 15))
        search.consider(scale, search.centred(scale))
    largest = torch.maximum(search.high, -search.low)
    search.consider(half_step(largest / 8), torch.where(search.high >= -search.low, 7.0, 8.0))
    search.consider(half_step(largest / 7), torch.full_like(largest, 8.0))
    for _ in range(REFITS):
        search.consider(search.scale, search.zero)
    codes = _codes_on(columns, search.scale, search.zero).to(torch.uint8)
    shape = groups.shape[:2]
    return codes.t().reshape(groups.shape), search.scale.view(shape), search.zero.view(shape)


class _GridSearch:
    """The best grid so far of each column of `numbers` [size, n]: value = scale * (code - zero)."""

    def __init__(self, numbers: torch.Tensor, zero_steps: int) -> None:
        self._numbers, self._steps = numbers, zero_steps
        self.low, self.high = numbers.amin(0).clamp(max=0), numbers.amax(0).clamp(min=0)
        self.span = self.high - self.low
        self.scale = half_step(self.span * (1 / 15))
        self.zero = self.centred(self.scale)
        self._error = _sum(_rest(numbers, _codes_on(numbers, self.scale, self.zero), self.scale, self.zero).square_())

    def zero_step(self, zero: torch.Tensor) -> torch.Tensor:
        """The nearest zero that can be stored."""
        most = 255 / 16 if self._steps == ZERO_STEPS else 15
        return (zero.clamp(0, most) * self._steps).round() / self._steps

    def centred(self, scale: torch.Tensor) -> torch.Tensor:
        """The zero that puts the middle of the range in the middle of the codes."""
        return self.zero_step(7.5 - (self.low + self.high) * 0.5 * inverse(scale))

    def _take(self, better: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, error: torch.Tensor) -> None:
        self.scale, self.zero = torch.where(better, scale, self.scale), torch.where(better, zero, self.zero)
        self._error = torch.where(better, error, self._error)

    def consider(self, scale: torch.Tensor, zero: torch.Tensor) -> None:
        """A grid, and the one that fits the codes it gives best. Both as they can be stored.

        The error of the second is worked out from what the first leaves over, for the same codes, which is no less than
        what new ones leave. How far rounding may put it off is added, so a grid is never taken for better than it is.
        """
        n = self._numbers.shape[0]
        c = _codes_on(self._numbers, scale, zero)
        rest = _rest(self._numbers, c, scale, zero)
        codes, rests, products = _sum(c), _sum(rest), _sum(rest * c)
        squares, error = _sum(c.square_()), _sum(rest.square_())
        self._take(error < self._error, scale, zero, error)
        spread = n * squares - codes * codes
        per = 1 / torch.where(spread > 0, spread, 1.0)
        slope = scale + (n * products - codes * rests) * per
        offset = zero * scale - (squares * rests - codes * products) * per
        fits = (spread > 0) & (slope > 0)
        fitted = self.zero_step(offset / torch.where(fits, slope, 1.0))
        below = (squares - 2 * fitted * codes) + n * fitted * fitted
        above = (products - fitted * rests) + scale * ((squares - (zero + fitted) * codes) + n * zero * fitted)
        fits &= (above > 0) & (below > 0)
        step = half_step(torch.where(fits, above / torch.where(fits, below, 1.0), 0.0))
        ds, dm = step - scale, zero * scale - fitted * step
        gained, spent = 2 * (ds * products + dm * rests), (ds * ds * squares + 2 * ds * dm * codes) + n * dm * dm
        error = ((error - gained) + spent).clamp(min=0) + error * DOUBT
        self._take(fits & (error < self._error), step, fitted, error)

    def consider_exact(self, steps: int) -> None:
        """The range as `steps` steps, for groups whose numbers all lie on that grid."""
        scale = half_step(self.span / steps)
        zero = self.zero_step(-self.low * inverse(scale))
        some = _on_grid(self._numbers[:4], scale, zero)  # nearly none, so the other numbers are seldom looked at
        at = torch.nonzero(some & (scale > 0))[:, 0]
        at = at[_on_grid(self._numbers[:, at], scale[at], zero[at])]
        if not len(at):
            return
        numbers, scale, zero = self._numbers[:, at], scale[at], zero[at]
        error = _sum(_rest(numbers, _codes_on(numbers, scale, zero), scale, zero).square_())
        better = error < self._error[at]
        at = at[better]
        self.scale[at], self.zero[at], self._error[at] = scale[better], zero[better], error[better]


def _codes_on(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The nearest codes 0 … 15, in float32."""
    return (numbers * inverse(scale)).add_(zero).round_().clamp_(0, 15)


def _rest(numbers: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """What the grid leaves over."""
    return numbers - (codes - zero).mul_(scale)


def _on_grid(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    places = numbers * inverse(scale) + zero
    return ((places - places.round()).abs() <= ON_GRID).all(0)


def _sum(numbers: torch.Tensor) -> torch.Tensor:
    """Of each column, from the top down: the order of the native kernels, which have the same bits therefore."""
    total = numbers[0].clone()
    for row in numbers[1:]:
        total += row
    return total


def half_step(step: torch.Tensor) -> torch.Tensor:
    """A step as it is stored: the nearest float16 number."""
    return step.clamp(max=65504).half().float()
