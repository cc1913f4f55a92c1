// Eight float32 lanes, on any processor: GCC/Clang vectors, with AVX2 + FMA + F16C instructions where the file that
// includes this is compiled for them. Lane i of a vector is element i of memory.
//
// The lane count and the order inside `sum` are part of the kernels' contract (they fix the bits of every dot product).
// Functions have internal linkage, for the reason given in kernels.h.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define OCTAVO_INLINE inline __attribute__((always_inline))

namespace {

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

OCTAVO_INLINE f8 splat(float x) { return f8{x, x, x, x, x, x, x, x}; }
OCTAVO_INLINE i8 splat_int(int32_t x) { return i8{x, x, x, x, x, x, x, x}; }
OCTAVO_INLINE i8 lanes() { return i8{0, 1, 2, 3, 4, 5, 6, 7}; }

OCTAVO_INLINE f8 load(const float* p) {
  f8 v;
  memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE void store(float* p, f8 v) { memcpy(p, &v, sizeof v); }
// Keep v in a register: left alone, compilers fold one load into each of its uses and run out of load ports.
OCTAVO_INLINE void keep(f8& v) {
#if defined(__AVX2__)
  __asm__("" : "+x"(v));
#else
  (void)v;
#endif
}
OCTAVO_INLINE f8 as_float(i8 v) { return (f8)v; }
OCTAVO_INLINE i8 as_int(f8 v) { return (i8)v; }
OCTAVO_INLINE f8 select(i8 mask, f8 yes, f8 no) {
#if defined(__AVX2__)
  return (f8)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
  return as_float((as_int(yes) & mask) | (as_int(no) & ~mask));
#endif
}

// a * b + c. Rounded once with FMA; the portable path rounds twice, so its bits differ from AVX2's.
OCTAVO_INLINE f8 fma(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
  return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

OCTAVO_INLINE f8 larger(f8 a, f8 b) {
#if defined(__AVX2__)
  return (f8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

// Sum of the lanes: ((0 + 2) + (1 + 3)) + ((4 + 6) + (5 + 7)), the order that `sum8` follows too.
OCTAVO_INLINE float sum(f8 v) {
  return ((v[0] + v[2]) + (v[1] + v[3])) + ((v[4] + v[6]) + (v[5] + v[7]));
}

OCTAVO_INLINE float largest(f8 v) {
#if defined(__AVX2__)
  __m128 m = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
#else
  float best = v[0];
  for (int i = 1; i < 8; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

// Lane i of the result is sum(v[i]).
OCTAVO_INLINE f8 sum8(const f8* v) {
#if defined(__AVX2__)
  __m256 t[4];
  for (int i = 0; i < 4; ++i) {  // pairs (2i, 2i + 1): lanes {a0+a2, b0+b2, a1+a3, b1+b3} in each half
    const __m256 a = (__m256)v[2 * i], b = (__m256)v[2 * i + 1];
    t[i] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
  const __m256 lo = _mm256_add_ps(_mm256_shuffle_ps(t[0], t[1], 0x44), _mm256_shuffle_ps(t[0], t[1], 0xEE));
  const __m256 hi = _mm256_add_ps(_mm256_shuffle_ps(t[2], t[3], 0x44), _mm256_shuffle_ps(t[2], t[3], 0xEE));
  return (f8)_mm256_add_ps(_mm256_permute2f128_ps(lo, hi, 0x20), _mm256_permute2f128_ps(lo, hi, 0x31));
#else
  return f8{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3]), sum(v[4]), sum(v[5]), sum(v[6]), sum(v[7])};
#endif
}

// ---- 16-bit types: exact when widened, nearest-even when narrowed ---------------------------------------------------

OCTAVO_INLINE float widen(float x) { return x; }
OCTAVO_INLINE float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
OCTAVO_INLINE float widen(f16 x) {
#if defined(__F16C__)
  return _cvtsh_ss(x.bits);
#else
  // Moving the 15 magnitude bits up makes a float32 that is 2^112 too small, subnormals included.
  uint32_t bits = (uint32_t)(x.bits & 0x7FFF) << 13;
  float y;
  if ((x.bits & 0x7C00) == 0x7C00) {
    bits |= 0x7F800000u;
    memcpy(&y, &bits, 4);
  } else {
    memcpy(&y, &bits, 4);
    y *= 0x1p112f;
  }
  return (x.bits & 0x8000) ? -y : y;
#endif
}

OCTAVO_INLINE void narrow(float x, float* out) { *out = x; }
OCTAVO_INLINE void narrow(float x, bf16* out) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x)
    out->bits = (uint16_t)((bits >> 16) | 0x40);
  else
    out->bits = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
OCTAVO_INLINE void narrow(float x, f16* out) {
#if defined(__F16C__)
  out->bits = _cvtss_sh(x, 0);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint16_t sign = (uint16_t)((bits >> 16) & 0x8000);
  bits &= 0x7FFFFFFFu;
  uint16_t half;
  if (bits > 0x7F800000u) {
    half = 0x7E00;
  } else if (bits >= 0x477FF000u) {  // rounds to 65536 or more
    half = 0x7C00;
  } else if (bits < 0x38800000u) {  // subnormal: let a float32 addition do the rounding
    float magnitude, shifted;
    memcpy(&magnitude, &bits, 4);
    shifted = magnitude + 0.5f;
    uint32_t s;
    memcpy(&s, &shifted, 4);
    half = (uint16_t)(s - 0x3F000000u);
  } else {
    half = (uint16_t)((bits - 0x38000000u + 0xFFF + ((bits >> 13) & 1)) >> 13);
  }
  out->bits = (uint16_t)(sign | half);
#endif
}

OCTAVO_INLINE f8 load(const bf16* p) {
#if defined(__AVX2__)
  return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  f8 v;
  for (int i = 0; i < 8; ++i) v[i] = widen(p[i]);
  return v;
#endif
}
OCTAVO_INLINE f8 load(const f16* p) {
#if defined(__F16C__)
  return (f8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
  f8 v;
  for (int i = 0; i < 8; ++i) v[i] = widen(p[i]);
  return v;
#endif
}
template <class T>
OCTAVO_INLINE void store(T* p, f8 v) {
  for (int i = 0; i < 8; ++i) narrow(v[i], p + i);
}
#if defined(__F16C__)
OCTAVO_INLINE void store(f16* p, f8 v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, 0)); }
#endif
#if defined(__AVX2__)
OCTAVO_INLINE void store(bf16* p, f8 v) {
  const __m256i bits = (__m256i)v;
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = (__m256i)_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q);
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
  _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
#endif

// Sixteen values in the order that is cheapest to widen; `Order<T>::lane` says which value lane i of (a, b) holds.
// bfloat16: the low and high halves of each 32-bit word, so a shift and a mask do it.
template <class T>
struct Order {
  static int lane(int i) { return i; }
};
template <>
struct Order<bf16> {
  static int lane(int i) { return i < 8 ? 2 * i : 2 * (i - 8) + 1; }
};
template <class T>
OCTAVO_INLINE void load16(const T* p, f8& a, f8& b) {
  a = load(p);
  b = load(p + 8);
}
OCTAVO_INLINE void load16(const bf16* p, f8& a, f8& b) {
  i8 words;
  memcpy(&words, p, sizeof words);
  a = as_float(words << 16);
  b = as_float(words & splat_int((int32_t)0xFFFF0000));
}

// ---- Elementary functions, about one unit in the last place or two, NaN in gives NaN out ----------------------------

// Nearest integer for |x| < 2^22, by the constant that pushes the fraction out of the mantissa.
OCTAVO_INLINE f8 round_small(f8 x) {
#if defined(__AVX2__)
  return (f8)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const f8 magic = splat(12582912.0f);  // 1.5 * 2^23
  return (x + magic) - magic;
#endif
}

OCTAVO_INLINE i8 to_int(f8 x) {
#if defined(__AVX2__)
  return (i8)_mm256_cvtps_epi32((__m256)x);
#else
  return __builtin_convertvector(x, i8);
#endif
}

// p * 2^n for integers n in [-126, 127].
OCTAVO_INLINE f8 scale_by_power(f8 p, f8 n) { return p * as_float((to_int(n) + splat_int(127)) << 23); }

// e^(x - n ln 2) for x within ln 2 / 2 of n ln 2, in vectors of any width: all(c) is one of c, add(a, b, c) is a * b + c.
template <class V, class All, class Add>
OCTAVO_INLINE V exp_rest(V n, V x, All all, Add add) {
  V r = add(n, all(-0.693145751953125f), x);  // ln 2 in two parts, the first with few enough bits to be exact
  r = add(n, all(-1.42860682030941723212e-6f), r);
  V p = all(1.9875691500e-4f);  // Cephes' polynomial for (e^r - 1 - r) / r^2 on [-ln 2 / 2, ln 2 / 2]
  p = add(p, r, all(1.3981999507e-3f));
  p = add(p, r, all(8.3334519073e-3f));
  p = add(p, r, all(4.1665795894e-2f));
  p = add(p, r, all(1.6666665459e-1f));
  p = add(p, r, all(5.0000001201e-1f));
  return add(p, r * r, r) + all(1.0f);
}
OCTAVO_INLINE f8 exp_rest(f8 n, f8 x) {
  return exp_rest(n, x, [](float c) __attribute__((always_inline)) { return splat(c); },
                  [](f8 a, f8 b, f8 c) __attribute__((always_inline)) { return fma(a, b, c); });
}

// e^x. exp(0) is exactly 1; below -87.3 exactly 0 (the results would be subnormal); above 88.7 infinity.
OCTAVO_INLINE f8 exp8(f8 x) {
  const f8 low = splat(-87.336544f), high = splat(88.72283f);
  const f8 y = select(x < low, low, select(x > high, high, x));
  const f8 n = round_small(select(y == y, y, splat(0)) * splat(1.44269504088896341f));
  f8 p = exp_rest(n, y);
  // 2^n in two factors: n = 128 is out of range for one.
  const i8 whole = to_int(n), half = whole >> 1;
  p = p * as_float((half + splat_int(127)) << 23) * as_float((whole - half + splat_int(127)) << 23);
  p = select(x < low, splat(0.0f), p);
  return select(x > high, splat(__builtin_inff()), p);
}

// e^x for x <= 0 (or NaN), the range of a softmax: no overflow, so one scaling factor. Same limits as exp8 below.
OCTAVO_INLINE f8 exp_down(f8 x) {
  const f8 low = splat(-87.336544f);
  const i8 under = x < low;
  const f8 y = select(under, low, x);
  const f8 n = round_small(y * splat(1.44269504088896341f));
  const f8 p = exp_rest(n, y);
  // NaN: p is NaN already and stays one when scaled; the integer it converts to is only added to bits.
  return select(under, splat(0.0f), scale_by_power(p, n));
}

OCTAVO_INLINE f8 tanh8(f8 x) {
  const f8 size = as_float(as_int(x) & splat_int(0x7FFFFFFF));
  const f8 s = x * x;
  f8 p = splat(-5.70498872745e-3f);  // Cephes: tanh x = x + x^3 p(x^2) for |x| < 0.625
  p = fma(p, s, splat(2.06390887954e-2f));
  p = fma(p, s, splat(-5.37397155531e-2f));
  p = fma(p, s, splat(1.33314422036e-1f));
  p = fma(p, s, splat(-3.33332819422e-1f));
  p = fma(p * s, x, x);
  const f8 large = splat(1.0f) - splat(2.0f) / (exp8(size + size) + splat(1.0f));
  const f8 signed_large = as_float(as_int(large) | (as_int(x) & splat_int((int32_t)0x80000000)));
  return select(size < splat(0.625f), p, select(x == x, signed_large, x));
}

// erf: x p(x^2) below 1, 1 - exp(-q(x)) above; p and q are minimax fits of our own (relative error 2e-7, 1e-7).
OCTAVO_INLINE f8 erf8(f8 x) {
  const f8 size = as_float(as_int(x) & splat_int(0x7FFFFFFF));
  const f8 s = x * x;
  f8 p = splat(8.9484450514e-05f);
  p = fma(p, s, splat(-8.2943713378e-04f));
  p = fma(p, s, splat(5.2150877453e-03f));
  p = fma(p, s, splat(-2.6865011866e-02f));
  p = fma(p, s, splat(1.1283789158e-01f));
  p = fma(p, s, splat(-3.7612638892e-01f));
  p = fma(p, s, splat(1.1283791671e+00f)) * x;
  const f8 t = select(size > splat(4.0f), splat(4.0f), size);
  f8 q = splat(1.8275158093e-05f);
  q = fma(q, t, splat(-3.9687821626e-04f));
  q = fma(q, t, splat(3.9628866478e-03f));
  q = fma(q, t, splat(-2.4497711653e-02f));
  q = fma(q, t, splat(1.0719789190e-01f));
  q = fma(q, t, splat(6.3444590277e-01f));
  q = fma(q, t, splat(1.1289114226e+00f));
  q = fma(q, t, splat(-3.6279310837e-05f));
  const f8 large = splat(1.0f) - exp8(splat(0.0f) - q);
  const f8 signed_large = as_float(as_int(large) | (as_int(x) & splat_int((int32_t)0x80000000)));
  return select(size < splat(1.0f), p, select(x == x, signed_large, x));
}

}  // namespace
