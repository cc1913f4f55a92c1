// Floats -> int4 codes with a scale and a zero per group: the search that kernels/grid_search.py defines, to the bit.
// Included by quantize.h.
//
// Eight rows are searched at once, a lane each: what a group needs (its range, sums, the best grid so far) is then a
// vector, no sum goes across lanes, and a row's codes do not depend on the rows beside it. Every multiplication and
// addition is rounded by itself; sums run over the inputs in order.
#pragma once

#include "simd.h"

namespace {

constexpr int kMostGroup = 256;
constexpr int kSearchedRows = 8;
constexpr float kZeroSteps = 16;           // zeros are multiples of 1 / 16 …
constexpr float kMostZero = 255.0f / 16;   // … that fit a byte
constexpr double kShares[] = {1.0, 0.93, 0.86, 0.79, 0.72};
constexpr int kRefits = 2;
constexpr float kDoubt = 1.0f / 16384;
constexpr float kOnGrid = 0.04f;           // of a step

OCTAVO_INLINE f8 smaller(f8 a, f8 b) {
#if defined(__AVX2__)
  return (f8)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}
OCTAVO_INLINE f8 between(f8 x, float low, float high) { return smaller(larger(x, splat(low)), splat(high)); }

OCTAVO_INLINE f8 inverse_of(f8 scale) {
  const f8 tiny = splat(1.17549435e-38f);
  return select(scale > splat(0), splat(1) / larger(scale, tiny), splat(0));
}

// A step as it is stored: a float16 number.
OCTAVO_INLINE f8 half_step(f8 step) {
  f16 half[8];
  store(half, smaller(step, splat(65504)));
  return load(half);
}
OCTAVO_INLINE f8 zero_step(f8 zero) {
  return round_small(between(zero, 0, kMostZero) * splat(kZeroSteps)) / splat(kZeroSteps);
}

OCTAVO_INLINE f8 code_of(f8 x, f8 inverse, f8 zero) { return between(round_small(x * inverse + zero), 0, 15); }

// A group of each row. values [count][lanes]; `total` of them. The grid so far: scale, zero, and its squared error.
struct Int4Group {
  f8 values[kMostGroup];
  int count;
  f8 low, high;  // at most 0, at least 0
  f8 scale, zero, error;
};

void gather_group(const float* x, int64_t stride, int rows, int count, Int4Group& g) {
  for (int i = 0; i < count; ++i) g.values[i] = splat(0);
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < count; ++i) g.values[i][r] = x[r * stride + i];
  g.count = count;
  g.low = g.high = splat(0);
  for (int i = 0; i < count; ++i) {
    const f8 v = g.values[i];
    g.low = smaller(v, g.low), g.high = larger(v, g.high);
  }
}

OCTAVO_INLINE bool any_of(i8 mask) {
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask);
#else
  int any = 0;
  for (int j = 0; j < 8; ++j) any |= mask[j];
  return any;
#endif
}

OCTAVO_INLINE void take_better(Int4Group& g, i8 allowed, f8 scale, f8 zero, f8 error) {
  const i8 better = allowed & (error < g.error);
  g.scale = select(better, scale, g.scale), g.zero = select(better, zero, g.zero);
  g.error = select(better, error, g.error);
}

f8 error_of(const Int4Group& g, f8 scale, f8 zero) {
  const f8 inverse = inverse_of(scale);
  f8 error = splat(0);
  for (int i = 0; i < g.count; ++i) {
    const f8 off = g.values[i] - (code_of(g.values[i], inverse, zero) - zero) * scale;
    error = error + off * off;
  }
  return error;
}

// Consider a grid, and the one that fits the codes it gives best: zero and scale of least squares, each rounded as it
// is stored, the scale after the zero and for it. Its error is worked out from what the first leaves over, for the same
// codes, which is no less than what new ones leave; how far rounding may put it off is added.
void consider_grid(Int4Group& g, f8 scale, f8 zero) {
  const f8 inverse = inverse_of(scale), n = splat((float)g.count), two = splat(2);
  f8 error = splat(0), codes = error, squares = error, rests = error, products = error;
  for (int i = 0; i < g.count; ++i) {
    const f8 v = g.values[i], c = code_of(v, inverse, zero), rest = v - (c - zero) * scale;
    error = error + rest * rest, rests = rests + rest, products = products + rest * c;
    codes = codes + c, squares = squares + c * c;
  }
  take_better(g, splat_int(-1), scale, zero, error);
  const f8 spread = n * squares - codes * codes, per = splat(1) / select(spread > splat(0), spread, splat(1));
  const f8 slope = scale + (n * products - codes * rests) * per;
  const f8 offset = zero * scale - (squares * rests - codes * products) * per;
  i8 fits = (spread > splat(0)) & (slope > splat(0));
  const f8 fitted = zero_step(offset / select(fits, slope, splat(1)));
  const f8 below = (squares - two * fitted * codes) + n * fitted * fitted;
  const f8 above = (products - fitted * rests) + scale * ((squares - (zero + fitted) * codes) + n * zero * fitted);
  fits = fits & (above > splat(0)) & (below > splat(0));
  const f8 step = half_step(select(fits, above / select(fits, below, splat(1)), splat(0)));
  const f8 ds = step - scale, dm = zero * scale - fitted * step;
  const f8 gained = two * (ds * products + dm * rests);
  const f8 spent = (ds * ds * squares + two * ds * dm * codes) + n * dm * dm;
  take_better(g, fits, step, fitted, larger((error - gained) + spent, splat(0)) + error * splat(kDoubt));
}

// Rows whose numbers lie on a grid already: whole steps over the range, this many.
void consider_exact(Int4Group& g, int steps) {
  const f8 scale = half_step((g.high - g.low) / splat((float)steps)), inverse = inverse_of(scale);
  const f8 zero = zero_step(splat(0) - g.low * inverse);
  i8 on_grid = scale > splat(0);
  for (int i = 0; i < g.count; ++i) {
    const f8 at = g.values[i] * inverse + zero, off = at - round_small(at);
    on_grid = on_grid & (off <= splat(kOnGrid)) & (off >= splat(-kOnGrid));
    if (i % 4 == 3 || i + 1 == g.count) {
      if (!any_of(on_grid)) return;
    }
  }
  take_better(g, on_grid, scale, zero, error_of(g, scale, zero));
}

void search_grid(Int4Group& g) {
  const f8 range = g.high - g.low, middle = (g.low + g.high) * splat(0.5f);
  g.scale = half_step(range * splat((float)(1.0 / 15)));
  g.zero = zero_step(splat(7.5f) - middle * inverse_of(g.scale));
  g.error = error_of(g, g.scale, g.zero);
  for (int steps = 15; steps > 0; --steps) consider_exact(g, steps);
  for (double share : kShares) {
    // In double and then to float, as Python hands a number to torch.
    const f8 scale = half_step(range * splat((float)(share / 15)));
    consider_grid(g, scale, zero_step(splat(7.5f) - middle * inverse_of(scale)));
  }
  const f8 largest = larger(g.high, splat(0) - g.low);
  consider_grid(g, half_step(largest / splat(8)), select(g.high >= splat(0) - g.low, splat(7), splat(8)));
  consider_grid(g, half_step(largest / splat(7)), splat(8));
  for (int i = 0; i < kRefits; ++i) consider_grid(g, g.scale, g.zero);
}

// x [rows][stride], at most eight rows, `count` inputs of each: codes likewise, scale and zero by row.
void int4_groups(const float* x, int64_t stride, int rows, int count, uint8_t* codes, f8* scale, f8* zero) {
  Int4Group g;
  gather_group(x, stride, rows, count, g);
  search_grid(g);
  *scale = g.scale, *zero = g.zero;
  const f8 inverse = inverse_of(g.scale);
  for (int i = 0; i < count; ++i) {
    const i8 whole = to_int(code_of(g.values[i], inverse, g.zero));
    for (int r = 0; r < rows; ++r) codes[r * stride + i] = (uint8_t)whole[r];
  }
}

}  // namespace
