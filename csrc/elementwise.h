// The small operations between the products: norms, rotary positions, gated activation, argmax.
// Each row is computed by one thread in one order, in float32, so a row's bits do not depend on its neighbours.
#pragma once

#include "kernels.h"
#include "register_tile.h"
#include "simd.h"

#include <math.h>

namespace {

using octavo::Activation;
using octavo::ArgmaxArgs;
using octavo::DType;
using octavo::GateArgs;
using octavo::NormArgs;
using octavo::RotaryArgs;

// Calls f(p + i) eight values at a time; the tail goes through a padded copy. D need not be a multiple of eight.
template <class T>
OCTAVO_INLINE f8 load_some(const T* p, int64_t count) {
  if (count >= 8) return load(p);
  float part[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int64_t i = 0; i < count; ++i) part[i] = widen(p[i]);
  return load(part);
}
template <class T>
OCTAVO_INLINE void store_some(T* p, f8 v, int64_t count) {
  if (count >= 8) return store(p, v);
  for (int64_t i = 0; i < count; ++i) narrow(v[i], p + i);
}

// The value as it reads back from memory of type T: sums are normalised as stored.
template <class T>
OCTAVO_INLINE f8 rounded(f8 v) {
  T part[8];
  store(part, v);
  return load(part);
}
template <>
OCTAVO_INLINE f8 rounded<float>(f8 v) { return v; }

// Four running sums, so that the additions do not wait for each other; f(j) is the vector at value j.
template <class F>
OCTAVO_INLINE void sum_squares(int64_t dim, f8 (&squares)[4], F f) {
  for (f8& s : squares) s = splat(0);
  int64_t j = 0;
  for (; j + 32 <= dim; j += 32) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const f8 v = f(j + 8 * i);
      squares[i] = fma(v, v, squares[i]);
    }
  }
  for (; j < dim; j += 8) {
    const f8 v = f(j);
    squares[0] = fma(v, v, squares[0]);
  }
}

OCTAVO_INLINE float inverse_rms(const f8* squares, int64_t dim, float eps) {
  const f8 total = (squares[0] + squares[1]) + (squares[2] + squares[3]);
  return 1.0f / sqrtf(sum(total) / (float)dim + eps);
}

// What a row's norm multiplies its values by.
template <class T>
OCTAVO_INLINE f8 row_scale(const T* x, int64_t dim, float eps) {
  f8 squares[4];
  sum_squares(dim, squares, [&](int64_t j) __attribute__((always_inline)) { return load_some(x + j, dim - j); });
  return splat(inverse_rms(squares, dim, eps));
}

template <class T, bool First, bool Residual>
OCTAVO_INLINE void norm_row(const NormArgs& a, int64_t r) {
  const T* x = (const T*)a.x + r * a.x_stride;
  const T* residual = Residual ? (const T*)a.residual + r * a.dim : nullptr;
  T* total = Residual ? (T*)a.sum + r * a.dim : nullptr;
  T* out = (T*)a.out + r * a.dim;
  const f8 first = First ? row_scale(x, a.dim, a.eps) : splat(1);
  f8 squares[4];
  sum_squares(a.dim, squares, [&](int64_t j) __attribute__((always_inline)) {
    f8 v = load_some(x + j, a.dim - j);
    if (First) v = rounded<T>(v * first * load_some(a.first + j, a.dim - j));
    if (Residual) {
      v = rounded<T>(load_some(residual + j, a.dim - j) + v);
      store_some(total + j, v, a.dim - j);
    }
    return v;
  });
  const f8 scale = splat(inverse_rms(squares, a.dim, a.eps));
  const T* from = Residual ? total : x;
  for (int64_t j = 0; j < a.dim; j += 8) {
    const f8 v = load_some(from + j, a.dim - j) * scale * load_some(a.weight + j, a.dim - j);
    store_some(out + j, v, a.dim - j);
  }
}

#if defined(OCTAVO_WIDE)

// 32 numbers rounded to bfloat16. The instruction makes subnormal numbers zeros, as products of tiles do.
OCTAVO_INLINE void store_pair(bf16* to, vec first, vec second) {
#if defined(__AVX512BF16__)
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
  memcpy(to, &both, sizeof both);
#else
  store(to, low_half(&first)), store(to + 8, high_half(&first));
  store(to + 16, low_half(&second)), store(to + 24, high_half(&second));
#endif
}

// `inverse_rms` of floats f(j), a vector of them at value j; dim is a multiple of 32. The sums are those of `sum_squares`,
// two of them side by side, so the bits are too.
template <class F>
OCTAVO_INLINE float inverse_rms_wide(int64_t dim, float eps, F f) {
  vec first = splat_wide(0), second = splat_wide(0);
  for (int64_t j = 0; j < dim; j += 32) {
    const vec v = f(j), w = f(j + 16);
    first = fma(v, v, first), second = fma(w, w, second);
  }
  const f8 squares[4] = {low_half(&first), high_half(&first), low_half(&second), high_half(&second)};
  return inverse_rms(squares, dim, eps);
}
OCTAVO_INLINE vec row_scale_wide(const float* x, int64_t dim, float eps) {
  return splat_wide(inverse_rms_wide(dim, eps, [&](int64_t j) __attribute__((always_inline)) { return load_wide(x + j); }));
}

// `norm_row` of floats.
template <bool First, bool Residual>
OCTAVO_INLINE void norm_row_wide(const NormArgs& a, int64_t r) {
  const float* x = (const float*)a.x + r * a.x_stride;
  const float* residual = Residual ? (const float*)a.residual + r * a.dim : nullptr;
  float* total = Residual ? (float*)a.sum + r * a.dim : nullptr;
  float* out = (float*)a.out + r * a.dim;
  const vec first = First ? row_scale_wide(x, a.dim, a.eps) : splat_wide(1);
  const float inverse = inverse_rms_wide(a.dim, a.eps, [&](int64_t j) __attribute__((always_inline)) {
    vec v = load_wide(x + j);
    if (First) v = v * first * load_wide(a.first + j);
    if (Residual) {
      v = load_wide(residual + j) + v;
      store_wide(total + j, v);
    }
    return v;
  });
  const float* from = Residual ? total : x;
  const auto value = [&](int64_t j) __attribute__((always_inline)) {
    return load_wide(from + j) * splat_wide(inverse) * load_wide(a.weight + j);
  };
  if (a.tiles) {
    for (int64_t j = 0; j < a.dim; j += 32)
      store_pair((bf16*)a.out + octavo::place_in_tiles(r, j, a.dim), value(j), value(j + 16));
  } else {
    for (int64_t j = 0; j < a.dim; j += 16) store_wide(out + j, value(j));
  }
}

template <class T, bool First, bool Residual>
OCTAVO_INLINE void norm_one(const NormArgs& a, int64_t r) {
  if constexpr (__is_same(T, float))
    if (a.dim % 32 == 0) return norm_row_wide<First, Residual>(a, r);
  norm_row<T, First, Residual>(a, r);
}

#else

template <class T, bool First, bool Residual>
OCTAVO_INLINE void norm_one(const NormArgs& a, int64_t r) {
  norm_row<T, First, Residual>(a, r);
}

#endif

template <class T>
void norm_typed(const NormArgs& a) {
#pragma omp parallel for schedule(dynamic, 8) if (a.threaded)
  for (int64_t r = 0; r < a.rows; ++r) {
    if (!a.residual)
      norm_one<T, false, false>(a, r);
    else if (!a.first)
      norm_one<T, false, true>(a, r);
    else
      norm_one<T, true, true>(a, r);
  }
}

void norm(const NormArgs& a) {
  switch (a.type) {
    case DType::bf16: return norm_typed<bf16>(a);
    case DType::f16: return norm_typed<f16>(a);
    default: return norm_typed<float>(a);
  }
}

#if defined(OCTAVO_WIDE)
// `rotary_head` of floats; half is a multiple of 16.
OCTAVO_INLINE void rotary_head_wide(const float* x, float* out, int64_t half, const float* cos, const float* sin,
                                    const float* weight, float eps) {
  const vec scale = weight ? row_scale_wide(x, 2 * half, eps) : splat_wide(1);
  for (int64_t j = 0; j < half; j += 16) {
    vec a = load_wide(x + j), b = load_wide(x + half + j);
    if (weight) a = a * scale * load_wide(weight + j), b = b * scale * load_wide(weight + half + j);
    store_wide(out + j, a * load_wide(cos + j) - b * load_wide(sin + j));
    store_wide(out + half + j, b * load_wide(cos + half + j) + a * load_wide(sin + half + j));
  }
}
#endif

// One head: optional norm, then (x1, x2) -> (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2), the halves of Su et al. 2021.
template <class T>
void rotary_head(const T* x, T* out, int64_t dim, const float* cos, const float* sin, const float* weight, float eps) {
  const int64_t half = dim / 2;
#if defined(OCTAVO_WIDE)
  if constexpr (__is_same(T, float))
    if (dim % 32 == 0) return rotary_head_wide(x, out, half, cos, sin, weight, eps);
#endif
  const f8 scale = weight ? row_scale(x, dim, eps) : splat(1);
  for (int64_t j = 0; j < half; j += 8) {
    const int64_t count = half - j;
    f8 a = load_some(x + j, count), b = load_some(x + half + j, count);
    if (weight) {
      a = rounded<T>(a * scale * load_some(weight + j, count));
      b = rounded<T>(b * scale * load_some(weight + half + j, count));
    }
    const f8 c1 = load_some(cos + j, count), s1 = load_some(sin + j, count);
    const f8 c2 = load_some(cos + half + j, count), s2 = load_some(sin + half + j, count);
    store_some(out + j, a * c1 - b * s1, count);
    store_some(out + half + j, b * c2 + a * s2, count);
  }
}

template <class T>
void rotary_typed(const RotaryArgs& a) {
#pragma omp parallel for schedule(static) if (a.threaded)
  for (int64_t t = 0; t < a.tokens; ++t) {
    for (int64_t h = 0; h < a.heads; ++h) {
      rotary_head((const T*)a.x + t * a.x_stride + h * a.dim, (T*)a.out + (t * a.heads + h) * a.dim, a.dim,
                  a.cos + a.turn(t), a.sin + a.turn(t), a.norm, a.eps);
    }
  }
}

void rotary(const RotaryArgs& a) {
  switch (a.type) {
    case DType::bf16: return rotary_typed<bf16>(a);
    case DType::f16: return rotary_typed<f16>(a);
    default: return rotary_typed<float>(a);
  }
}

OCTAVO_INLINE f8 activate(f8 x, Activation kind) {
  const f8 one = splat(1.0f);
  if (kind == Activation::silu) return x / (one + exp8(splat(0.0f) - x));
  if (kind == Activation::gelu) return splat(0.5f) * x * (one + erf8(x * splat(0.70710678118654752f)));
  // (1 + tanh u) / 2 = 1 / (1 + e^(-2u)): half the work, and no cancellation where tanh comes close to -1.
  return x / (one + exp8(splat(-2.0f * 0.79788456080286536f) * fma(splat(0.044715f) * x * x, x, x)));
}

template <class T>
void gate_typed(const GateArgs& a) {
#pragma omp parallel for schedule(static) if (a.threaded)
  for (int64_t r = 0; r < a.rows; ++r) {
    const T* x = (const T*)a.x + r * a.x_stride;
    T* out = (T*)a.out + r * a.dim;
    for (int64_t j = 0; j < a.dim; j += 8) {
      const int64_t count = a.dim - j;
      const f8 gate = rounded<T>(activate(load_some(x + j, count), a.kind));
      store_some(out + j, gate * load_some(x + a.dim + j, count), count);
    }
  }
}

void gate(const GateArgs& a) {
  switch (a.type) {
    case DType::bf16: return gate_typed<bf16>(a);
    case DType::f16: return gate_typed<f16>(a);
    default: return gate_typed<float>(a);
  }
}

// First index of the largest value; NaN counts as largest, as in torch.
int64_t argmax_row(const float* x, int64_t dim) {
  constexpr int64_t kStep = 2048;
  int64_t best_start = 0;
  float best = -__builtin_inff();
  for (int64_t start = 0; start < dim; start += kStep) {
    const int64_t end = start + kStep < dim ? start + kStep : dim;
    f8 top[4] = {splat(best), splat(best), splat(best), splat(best)};
    i8 nan = splat_int(0);
    int64_t j = start;
    for (; j + 32 <= end; j += 32) {
      for (int v = 0; v < 4; ++v) {
        const f8 value = load(x + j + 8 * v);
        nan |= value != value;
        top[v] = larger(value, top[v]);
      }
    }
    float local = largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
    bool any_nan = largest(as_float(nan & splat_int(0x3F800000))) > 0;
    for (; j < end; ++j) {
      any_nan |= x[j] != x[j];
      local = x[j] > local ? x[j] : local;
    }
    if (any_nan) {
      for (j = start; x[j] == x[j];) ++j;
      return j;
    }
    if (local > best) best = local, best_start = start;
  }
  int64_t j = best_start;
  while (x[j] != best) ++j;
  return j;
}

void argmax(const ArgmaxArgs& a) {
#pragma omp parallel for schedule(dynamic, 1) if (a.threaded)
  for (int64_t r = 0; r < a.rows; ++r) a.out[r] = argmax_row(a.x + r * a.x_stride, a.dim);
}

}  // namespace
