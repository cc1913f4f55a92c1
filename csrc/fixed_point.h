// Weights and inputs as fixed-point numbers: 16-bit integers with a step that 128 of them share. Included by the products
// over them (linear_fixed.h) and by what makes panels of them (quantize.h).
//
// A weight is an integer of 14 bits times a power of two, so a bfloat16 weight (8 significant bits) loses nothing as long
// as it is at least a 32nd of the largest of its 128; smaller ones move by at most 2^-13 of that. Inputs have all 16 bits,
// as far as the sum of their magnitudes leaves 32-bit sums of products room: they move by 1/4000 of their norm at most,
// where rounding to bfloat16, as processors with bfloat16 arithmetic do it, moves a number by up to 1/512.
//
// Invariant: 128 products of a weight's and an input's integers fit 31 bits and a sign; integers and steps are the same
// on every instruction set.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "simd.h"

namespace {

using octavo::kFixedSpan;  // numbers that share a step

constexpr int kFixedMost = 8191;           // of a weight's integers
constexpr float kFixedInputs = 262000.0f;  // most that the magnitudes of a span's inputs may sum up to, in steps
// Each input is rounded by up to a half, and their floating-point sum by a little.
static_assert((262000 + kFixedSpan / 2 + 8) * int64_t{kFixedMost} <= INT32_MAX);

struct FixedScale {
  float step, inverse;
};

// Of 128 weights. Not finite: a step of NaN, and zeros. Where the step would be subnormal: zeros.
OCTAVO_INLINE FixedScale fixed_scale(float largest) {
  if (!(largest <= 3.4028235e38f)) return {__builtin_nanf(""), 0};
  int32_t bits;
  memcpy(&bits, &largest, 4);
  const int32_t exponent = bits >> 23;
  if (exponent <= 12) return {0, 0};
  const int32_t step_bits = (exponent - 12) << 23, inverse_bits = (266 - exponent) << 23;
  FixedScale scale;
  memcpy(&scale.step, &step_bits, 4);
  memcpy(&scale.inverse, &inverse_bits, 4);
  return scale;
}

// Sixteen numbers times `inverse` as integers, of which none is beyond kFixedMost where Clamp says so.
template <bool Clamp>
OCTAVO_INLINE void put_words(const float* x, f8 inverse, int16_t* to) {
  f8 parts[2];
  for (int i = 0; i < 2; ++i) {
    const f8 most = splat(kFixedMost), q = round_small(load(x + 8 * i) * inverse);
    parts[i] = !Clamp ? q : select(q > most, most, select(q < splat(0) - most, splat(0) - most, q));
  }
  const i8 low = to_int(parts[0]), high = to_int(parts[1]);
#if defined(__AVX2__)
  const __m256i both = _mm256_packs_epi32((__m256i)low, (__m256i)high);
  _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(both, 0xD8));
#else
  for (int i = 0; i < 8; ++i) to[i] = (int16_t)low[i], to[i + 8] = (int16_t)high[i];
#endif
}

// codes [spans][rows][kFixedSpan], so that the rows of a tile lie together; steps [spans][rows].
struct FixedRows {
  int16_t* codes;
  float* steps;
  int64_t rows, spans;

  const int16_t* at(int64_t row, int64_t span) const { return codes + (span * rows + row) * kFixedSpan; }
};

// 128 numbers as integers; their step.
float fix_span(const float* x, int16_t* to) {
  i8 most = splat_int(0);
  f8 total = splat(0);
  for (int64_t i = 0; i < kFixedSpan; i += 8) {
    const i8 size = as_int(load(x + i)) & splat_int(0x7FFFFFFF);  // as integers: a NaN is larger than infinity
    most = most > size ? most : size;
    total = total + as_float(size);
  }
  int32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits = most[i] > bits ? most[i] : bits;
  float largest;
  memcpy(&largest, &bits, 4);
  if (bits >= 0x7F800000 || largest < 1e-30f) {
    memset(to, 0, kFixedSpan * sizeof *to);
    return bits >= 0x7F800000 ? __builtin_nanf("") : 0;  // NaN: the whole row
  }
  const float by_size = largest / 32767.0f, by_sum = sum(total) / kFixedInputs;
  const float step = by_size > by_sum ? by_size : by_sum;
  const f8 inverse = splat(1.0f / step);
  for (int64_t i = 0; i < kFixedSpan; i += 16) put_words<false>(x + i, inverse, to + i);
  return step;
}

template <class In>
void fix_input(const In* x, int64_t k, const FixedRows& to, int64_t row) {
  float part[kFixedSpan];
  for (int64_t s = 0; s < to.spans; ++s) {
    const int64_t from = s * kFixedSpan, inputs = least(kFixedSpan, k - from);
    const bool whole = inputs == kFixedSpan && __is_same(In, float);
    for (int64_t i = 0; !whole && i < kFixedSpan; ++i) part[i] = i < inputs ? widen(x[from + i]) : 0;
    const int64_t at = s * to.rows + row;
    to.steps[at] = fix_span(whole ? (const float*)x + from : part, to.codes + at * kFixedSpan);
  }
}

// The rows of a.x; null: out of memory. Else what is to be freed.
void* fixed_rows(const octavo::LinearArgs& a, FixedRows& to) {
  to.rows = a.m, to.spans = (a.k + kFixedSpan - 1) / kFixedSpan;
  char* memory = (char*)malloc((size_t)(a.m * to.spans * (kFixedSpan * 2 + 4)) + 64);
  if (!memory) return nullptr;
  to.codes = (int16_t*)(((uintptr_t)memory + 63) / 64 * 64);
  to.steps = (float*)(to.codes + a.m * to.spans * kFixedSpan);
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 65536)
  for (int64_t r = 0; r < a.m; ++r) {
    switch (a.x_type) {
      case DType::f32: fix_input((const float*)a.x + r * a.ldx, a.k, to, r); break;
      case DType::bf16: fix_input((const bf16*)a.x + r * a.ldx, a.k, to, r); break;
      case DType::f16: fix_input((const f16*)a.x + r * a.ldx, a.k, to, r); break;
    }
  }
  return memory;
}

}  // namespace
