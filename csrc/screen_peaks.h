// What the screens of all instruction sets share: reading a panel of floats, and what is done with the peaks, the largest
// output of each panel as a screen has it. screen.h and screen_amx.h make them. Included by each instruction set's file.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "simd.h"

#include <math.h>

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

// Where the largest output of a panel goes that a screen has found; `raise_block` makes it a ceiling.
OCTAVO_INLINE float& peak_at(const ScreenArgs& a, int64_t row, int64_t panel) {
  return a.ceilings[(panel / kScreenBlock * a.m + row) * kScreenBlock + panel % kScreenBlock];
}

// How far an output may be from what the screen has: by_size times the panel's size plus by_error times its error.
struct RowSlack {
  float by_size[octavo::kScreenRows], by_error[octavo::kScreenRows];

  static float up(double v) { return nextafterf((float)v, __builtin_inff()); }
  // size, error: the norm of row `r`, and of what the screen takes it for less by.
  void set(const ScreenArgs& a, int64_t r, float size, float error) {
    a.sizes[r] = size;
    by_size[r] = up((double)error + a.rounding * size), by_error[r] = up((double)size * (1 + a.rounding));
  }
};

// Peaks of a block become ceilings while the thread that has found them still has them at hand.
void raise_block(const ScreenArgs& a, int64_t block, const RowSlack& slack) {
  const int64_t blocks = octavo::screen_blocks((a.n + kPanel - 1) / kPanel);
  const float *sizes = a.panel_sizes + block * kScreenBlock, *errors = a.panel_errors + block * kScreenBlock;
  for (int64_t r = 0; r < a.m; ++r) {
    float* at = a.ceilings + (block * a.m + r) * kScreenBlock;
    f8 top = splat(-__builtin_inff());
    for (int i = 0; i < kScreenBlock; i += 8) {
      const f8 ceiling = fma(load(errors + i), splat(slack.by_error[r]),
                             fma(load(sizes + i), splat(slack.by_size[r]), load(at + i)));
      store(at + i, ceiling);
      top = larger(ceiling, top);
    }
    a.tops[r * blocks + block] = largest(top);
  }
}

}  // namespace
