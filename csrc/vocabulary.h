// Passes over a row of logits for sampling: maxima and sums of exponentials by blocks of the vocabulary. Included by
// each instruction set's file; sampling.h decides what to do with them.
//
// Invariant: the result for a block depends on that block alone, in one order of sums, so it does not matter how blocks
// are dealt to threads. e^0 is exactly 1; a value of -inf weighs exactly 0.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace {

using octavo::kVocabBlock;

// Largest of up to kVocabBlock values; NaN if there is one.
OCTAVO_INLINE float block_largest(const float* x, int64_t n) {
  f8 top[4] = {splat(-__builtin_inff()), splat(-__builtin_inff()), splat(-__builtin_inff()), splat(-__builtin_inff())};
  i8 nan = splat_int(0);
  int64_t j = 0;
  for (; j + 32 <= n; j += 32) {
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const f8 value = load(x + j + 8 * v);
      nan |= value != value;
      top[v] = larger(value, top[v]);
    }
  }
  float best = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
  bool any_nan = largest(as_float(nan & splat_int(0x3F800000))) > 0;
  for (; j < n; ++j) {
    any_nan |= x[j] != x[j];
    best = x[j] > best ? x[j] : best;
  }
  return any_nan ? __builtin_nanf("") : best;
}

void block_max(const float* x, int64_t n, float* maxima) {
  for (int64_t i = 0; i < n; i += kVocabBlock)
    *maxima++ = block_largest(x + i, n - i < kVocabBlock ? n - i : kVocabBlock);
}

OCTAVO_INLINE f8 weight_of(f8 x, f8 highest, f8 temperature, bool plain) {
  const f8 down = x - highest;
  return exp_down(plain ? down : down / temperature);
}

void exps(const float* x, int64_t n, float highest, float temperature, float* out) {
  const f8 top = splat(highest), heat = splat(temperature);
  const bool plain = temperature == 1.0f;
  int64_t j = 0;
  for (; j + 8 <= n; j += 8) store(out + j, weight_of(load(x + j), top, heat, plain));
  if (j == n) return;
  float part[8];
  for (int i = 0; i < 8; ++i) part[i] = j + i < n ? x[j + i] : highest;
  const f8 last = weight_of(load(part), top, heat, plain);
  for (int i = 0; j + i < n; ++i) out[j + i] = last[i];
}

void exp_sums(const float* x, int64_t n, float highest, float temperature, float* sums) {
  const f8 top = splat(highest), heat = splat(temperature);
  const bool plain = temperature == 1.0f;
  for (int64_t i = 0; i < n; i += kVocabBlock) {
    const int64_t count = n - i < kVocabBlock ? n - i : kVocabBlock;
    f8 part[4] = {splat(0), splat(0), splat(0), splat(0)};
    int64_t j = 0;
    for (; j + 32 <= count; j += 32)
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) part[v] = part[v] + weight_of(load(x + i + j + 8 * v), top, heat, plain);
    for (; j < count; j += 8) {
      float tail[8];
      exps(x + i + j, count - j < 8 ? count - j : 8, highest, temperature, tail);
      for (int64_t v = count - j; v < 8; ++v) tail[v] = 0;
      part[0] = part[0] + load(tail);
    }
    *sums++ = sum((part[0] + part[1]) + (part[2] + part[3]));
  }
}

}  // namespace
