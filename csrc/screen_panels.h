// The panels of a screen: an output head once more, in six bits a weight, and how far each panel is from the original.
// Included by each instruction set's file; screen.h multiplies them, head_screen.h says what they are for.
//
//   panel:  f32 scale[16], then half units of 16 inputs, two per unit of 32 (zeros beyond the last input)
//   half:   u8 factor[16], then three blocks [16 outputs][4] bytes: byte i of block t holds input 4t + i in its low six
//           bits, and above them bits 2t and 2t + 1 of input 12 + i
//   value = scale * factor * (code - 32), code 1 … 63
//
// Invariant: `error` and `size` are never less than the Euclidean norms they stand for.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "quantized_panels.h"
#include "screen_peaks.h"
#include "simd.h"

#include <math.h>

namespace {

constexpr int kScreenHalf = 16;  // inputs that share a factor
constexpr int64_t kScreenHalfBytes = kPanel + 3 * 4 * kPanel;
int64_t screen_panel_bytes(int64_t k) { return 4 * kPanel + 2 * octavo::units_of(k) * kScreenHalfBytes; }

constexpr int kScreenMiddle = 32, kScreenMost = 31;  // of the codes; of their distance from it

OCTAVO_INLINE i8 fours_of(const i8* c) { return c[0] | c[1] << 8 | c[2] << 16 | c[3] << 24; }

// Sixteen inputs of outputs 8v to 8v + 7 into a half unit, in multiples of their scales.
OCTAVO_INLINE void put_half(const f8 (&x)[kScreenHalf], f8 scale, uint8_t* half, int v, ScreenSquares& squares) {
  const f8 zero = splat(0), one = splat(1), most = splat(kScreenMost);
  f8 top = zero;
  for (int i = 0; i < kScreenHalf; ++i) top = larger(magnitude(x[i]), top);
  const f8 wanted = select(scale > zero, top / (scale * most), zero), whole = round_small(wanted);
  f8 factor = select(whole < wanted, whole + one, whole);
  factor = select(factor > splat(255), splat(255), factor);
  const f8 step = scale * factor, inverse = select(factor > zero, one / step, zero);
  i8 codes[kScreenHalf];
  for (int i = 0; i < kScreenHalf; ++i) {
    f8 q = round_small(x[i] * inverse);
    q = select(q > most, most, select(q < zero - most, zero - most, q));
    const f8 value = q * step, left = x[i] - value;
    squares.stored = fma(value, value, squares.stored), squares.over = fma(left, left, squares.over);
    codes[i] = to_int(q) + splat_int(kScreenMiddle);
  }
  const i8 factors = to_int(factor), last = fours_of(codes + 12);
  for (int j = 0; j < 8; ++j) half[8 * v + j] = (uint8_t)factors[j];
  for (int t = 0; t < 3; ++t) {
    const i8 block = fours_of(codes + 4 * t) | (last >> 2 * t & splat_int(0x03030303)) << 6;
    memcpy(half + kPanel + 64 * t + 32 * v, &block, sizeof block);
  }
}

// Eight outputs of a panel; returns whether all of their weights are finite.
template <class W>
bool screen_outputs(const W* panel, int64_t k, int v, uint8_t* to, ScreenSquares& squares) {
  f8 top = splat(0);
  i8 finite = splat_int(-1);
  for (int64_t i = 0; i < k; ++i) {
    const f8 size = magnitude(input_of(panel, i, v));
    finite &= size <= splat(3.0e38f);
    top = larger(size, top);
  }
  const f8 scale = select(top > splat(1e-30f), top / splat(kScreenMost * 255.0f), splat(0));
  memcpy(to + 32 * v, &scale, sizeof scale);
  uint8_t* half = to + 4 * kPanel;
  for (int64_t h = 0; h < 2 * octavo::units_of(k); ++h, half += kScreenHalfBytes) {
    f8 x[kScreenHalf];
    for (int i = 0; i < kScreenHalf; ++i) {
      const int64_t input = h * kScreenHalf + i;
      x[i] = input < k ? input_of(panel, input, v) : splat(0);
    }
    put_half(x, scale, half, v, squares);
  }
  for (int i = 0; i < 8; ++i)
    if (!finite[i]) return false;
  return true;
}

template <class W>
void screen_panel_of(const octavo::ScreenPanelArgs& a) {
  // The sums of squares are good to a part in 2^24 per term; scale, factor and code are multiplied as good as exactly.
  const float slack = 1.0001f + (float)a.k * 0x1p-24f;
  *a.size = *a.error = 0;
  for (int v = 0; v < 2; ++v) {
    ScreenSquares squares = {splat(0), splat(0)};
    if (!screen_outputs((const W*)a.weights, a.k, v, (uint8_t*)a.panel, squares)) *a.error = __builtin_inff();
    const float size = sqrtf(largest(squares.stored)) * slack;
    const float error = sqrtf(largest(squares.over)) * slack + size * 1e-6f;
    *a.size = size > *a.size ? size : *a.size;
    *a.error = error > *a.error ? error : *a.error;
  }
}

// One panel of floats; outputs that do not exist are zeros there.
void screen_panel(const octavo::ScreenPanelArgs& a) {
  switch (a.type) {
    case DType::f32: return screen_panel_of<float>(a);
    case DType::bf16: return screen_panel_of<bf16>(a);
    case DType::f16: return screen_panel_of<f16>(a);
  }
}

// Fours 0 to 3 of a half unit, part `v` of the panel: unsigned bytes, four inputs of an output side by side.
OCTAVO_INLINE void screen_quads(const uint8_t* half, int v, veci (&w)[4]) {
  const uint8_t* at = half + kPanel + v * (int)sizeof(vec);
  const vecw a = words_at(at), b = words_at(at + 64), c = words_at(at + 128);
  const uint16_t low = 0x3F3F;
  w[0] = (veci)(a & low), w[1] = (veci)(b & low), w[2] = (veci)(c & low);
  w[3] = (veci)((a >> 6 & (uint16_t)0x0303) | (b >> 4 & (uint16_t)0x0C0C) | (c >> 2 & (uint16_t)0x3030));
}

// Factors of a half unit, twice in a lane, as 16-bit integers.
OCTAVO_INLINE veci screen_factors(const uint8_t* half, int v) {
  const uint8_t* p = half + v * kLanes;
#if defined(__AVX512F__) && defined(OCTAVO_WIDE)
  const veci w = (veci)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  const veci w = (veci)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
  veci w;
  for (int i = 0; i < kLanes; ++i) w[i] = p[i];
#endif
  return w | w << 16;
}

}  // namespace
