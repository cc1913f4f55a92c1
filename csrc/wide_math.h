// Elementary functions of sixteen lanes: those of simd.h, lane by lane the same operations, in one vector where the
// processor has them. Included by instruction sets with wide vectors.
//
// Invariant: a lane has the bits that the function of eight lanes gives it.
#pragma once

#include "elementwise.h"
#include "linear.h"
#include "register_tile.h"

namespace {

#if defined(__AVX512F__)

OCTAVO_INLINE vec select_wide(__mmask16 mask, vec yes, vec no) {
  return (vec)_mm512_mask_blend_ps(mask, (__m512)no, (__m512)yes);
}
OCTAVO_INLINE vec round_wide(vec x) {
  return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
OCTAVO_INLINE __mmask16 below(vec a, vec b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }

OCTAVO_INLINE vec exp_rest(vec n, vec x) {
  return exp_rest(n, x, [](float c) __attribute__((always_inline)) { return splat_wide(c); },
                  [](vec a, vec b, vec c) __attribute__((always_inline)) { return fma(a, b, c); });
}

// The scaling instruction does what exp8 needs several for, and what lies outside of its range needs no clamping: it is
// replaced at the end.
OCTAVO_INLINE vec exp_wide(vec x) {
  const __mmask16 under = below(x, splat_wide(-87.336544f)), over = below(splat_wide(88.72283f), x);
  const vec n = round_wide(x * splat_wide(1.44269504088896341f));
  const vec p = (vec)_mm512_maskz_scalef_ps((__mmask16)~under, (__m512)exp_rest(n, x), (__m512)n);
  return select_wide(over, splat_wide(__builtin_inff()), p);
}

OCTAVO_INLINE vec exp_down_wide(vec x) {
  const __mmask16 under = below(x, splat_wide(-87.336544f));
  const vec n = round_wide(x * splat_wide(1.44269504088896341f));
  return (vec)_mm512_maskz_scalef_ps((__mmask16)~under, (__m512)exp_rest(n, x), (__m512)n);
}

OCTAVO_INLINE vec activate_wide(vec x, Activation kind) {
  const vec one = splat_wide(1.0f);
  if (kind == Activation::silu) return x / (one + exp_wide(splat_wide(0.0f) - x));
  if (kind == Activation::gelu) {
    return join_halves(activate(low_half(&x), kind), activate(high_half(&x), kind));
  }
  return x / (one + exp_wide(splat_wide(-2.0f * 0.79788456080286536f) * fma(splat_wide(0.044715f) * x * x, x, x)));
}

OCTAVO_INLINE vec larger_wide(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }

// Lanes [low, high) of v, minus infinity elsewhere.
OCTAVO_INLINE vec masked(vec v, int low, int high) {
  const unsigned from = low < 0 ? 0 : (unsigned)low, to = high > 16 ? 16 : (unsigned)high;
  return select_wide((__mmask16)((1u << to) - (1u << from)), v, splat_wide(-__builtin_inff()));
}

// Whether any lane is greater than `best`, or a NaN.
OCTAVO_INLINE bool any_above_wide(vec v, float best) {
  return _mm512_cmp_ps_mask((__m512)v, (__m512)splat_wide(best), _CMP_NLE_UQ) != 0;
}

#else

OCTAVO_INLINE bool any_above_wide(vec v, float best) {
  return any_above(low_half(&v), best) || any_above(high_half(&v), best);
}
OCTAVO_INLINE vec larger_wide(vec a, vec b) {
  return join_halves(larger(low_half(&a), low_half(&b)), larger(high_half(&a), high_half(&b)));
}
OCTAVO_INLINE vec masked(vec v, int low, int high) {
  for (int i = 0; i < 16; ++i) v[i] = i >= low && i < high ? v[i] : -__builtin_inff();
  return v;
}
OCTAVO_INLINE vec exp_down_wide(vec x) {
  return join_halves(exp_down(low_half(&x)), exp_down(high_half(&x)));
}
OCTAVO_INLINE vec activate_wide(vec x, Activation kind) {
  return join_halves(activate(low_half(&x), kind), activate(high_half(&x), kind));
}

#endif

OCTAVO_INLINE float largest_wide(vec v) { return largest(larger(low_half(&v), high_half(&v))); }
OCTAVO_INLINE vec capped(vec x, float cap) {
  const f8 c = splat(cap);
  return join_halves(tanh8(low_half(&x) / c) * c, tanh8(high_half(&x) / c) * c);
}

}  // namespace
