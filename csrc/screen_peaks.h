// What the screens of all instruction sets share: reading a panel of floats, and what is done with the peaks, the largest
// output of each panel as a screen has it. screen.h and screen_amx.h make them. Included by each instruction set's file.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "simd.h"

namespace {

using octavo::kScreenBlock;
using octavo::ScreenArgs;

// Input `i` of outputs 8v to 8v + 7 of a panel of floats.
OCTAVO_INLINE f8 input_of(const float* panel, int64_t i, int v) { return load(panel + i * kPanel + 8 * v); }
OCTAVO_INLINE f8 input_of(const f16* panel, int64_t i, int v) { return load(panel + i * kPanel + 8 * v); }
OCTAVO_INLINE f8 input_of(const bf16* panel, int64_t i, int v) {
  i8 pairs;
  memcpy(&pairs, panel + (i / 2 * kPanel + 8 * v) * 2, sizeof pairs);
  return as_float(i % 2 ? pairs & splat_int((int32_t)0xFFFF0000) : pairs << 16);
}

OCTAVO_INLINE f8 magnitude(f8 x) { return as_float(as_int(x) & splat_int(0x7FFFFFFF)); }

// Squares of what is stored of eight outputs, and of what that leaves over.
struct ScreenSquares {
  f8 stored, over;
};

OCTAVO_INLINE float& peak_at(const ScreenArgs& a, int64_t row, int64_t panel) {
  return a.peaks[(panel / kScreenBlock * a.m + row) * kScreenBlock + panel % kScreenBlock];
}

// Peaks of a row become ceilings: none of the panel's outputs is above. Returns the panel of the highest peak.
int64_t raise_peaks(const octavo::RaiseArgs& a) {
  f8 best = splat(-__builtin_inff());
  i8 where = splat_int(0);
  for (int64_t p = 0; p < a.panels; p += 8) {
    float* at = a.peaks + p / kScreenBlock * a.stride + p % kScreenBlock;
    const f8 peak = load(at);
    const i8 higher = peak > best;
    best = select(higher, peak, best);
    where = (higher & (lanes() + splat_int((int32_t)p))) | (~higher & where);
    store(at, fma(load(a.errors + p), splat(a.by_error), fma(load(a.sizes + p), splat(a.by_size), peak)));
  }
  int lane = 0;
  for (int i = 1; i < 8; ++i) lane = best[i] > best[lane] ? i : lane;
  return where[lane];
}

// The panels of a row whose ceiling is not below `least_value`, as far as there is room; returns how many there are.
int64_t panels_above(const octavo::RaiseArgs& a, float least_value, int32_t* found, int64_t room) {
  int64_t count = 0;
  const f8 bar = splat(least_value);
  for (int64_t p = 0; p < a.panels; p += 8) {
    const f8 ceilings = load(a.peaks + p / kScreenBlock * a.stride + p % kScreenBlock);
    const i8 below = ceilings < bar;
#if defined(__AVX2__)
    if (_mm256_movemask_ps((__m256)below) == 0xFF) continue;
#endif
    for (int i = 0; i < 8; ++i) {
      if (below[i] || p + i >= a.panels) continue;
      if (count < room) found[count] = (int32_t)(p + i);
      ++count;
    }
  }
  return count;
}

}  // namespace
