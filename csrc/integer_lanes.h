// Sums of products of small integers in vectors of 32-bit lanes, a lane per output: pairs of 16-bit integers, and fours
// of bytes. Included by the products over quantised panels.
//
// Where the instruction for fours sums pairs only (`kPairSums`), a sum is kept as two 16-bit halves: the products with
// inputs 4i and 4i + 1 low, the others high. Whoever sums sees to it that the halves fit in the end; on the way they may
// wrap. `sum_of` adds the halves; elsewhere a sum is a lane.
//
// Invariant: all of it is exact.
#pragma once

#include "register_tile.h"
#include "simd.h"

namespace {

#if defined(__AVX2__) && !(defined(OCTAVO_WIDE) && defined(__AVX512VNNI__))
constexpr bool kPairSums = true;
#else
constexpr bool kPairSums = false;
#endif

#if defined(OCTAVO_WIDE) && defined(__AVX2__) && !defined(__AVX512BW__)
union HalfLanes {  // for builds that emulate wide vectors
  veci whole;
  __m256i half[2];
};
#define OCTAVO_IN_HALVES(expression)                                          \
  HalfLanes r;                                                                \
  for (int h = 0; h < 2; ++h) r.half[h] = expression;                         \
  return r.whole
#endif

// acc, computed here: left alone, compilers turn chains of integer sums into trees and run out of registers.
OCTAVO_INLINE void pin(veci& acc) {
#if defined(__AVX512BW__) && defined(OCTAVO_WIDE)
  __asm__("" : "+v"(acc));
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  __asm__("" : "+x"(acc));
#else
  (void)acc;
#endif
}

OCTAVO_INLINE veci splat_lanes(int32_t x) {
#if defined(OCTAVO_WIDE) && defined(__AVX512F__)
  return (veci)_mm512_set1_epi32(x);
#elif defined(OCTAVO_WIDE)
  const i8 half = splat_int(x);
  union {
    i8 half[2];
    veci whole;
  } both = {{half, half}};
  return both.whole;
#else
  return splat_int(x);
#endif
}

// Two 16-bit integers, or four bytes, over and over.
OCTAVO_INLINE veci input_lanes(const void* p) {
  int32_t lane;
  memcpy(&lane, p, 4);
  return splat_lanes(lane);
}

OCTAVO_INLINE veci lanes_at(const void* p) {
  veci v;
  memcpy(&v, p, sizeof v);
  return v;
}

OCTAVO_INLINE vec float_of(veci v) {
#if defined(OCTAVO_WIDE) && defined(__AVX512F__)
  return (vec)_mm512_cvtepi32_ps((__m512i)v);
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  return (vec)_mm256_cvtepi32_ps((__m256i)v);
#else
  return __builtin_convertvector(v, vec);
#endif
}

// Per lane: a.low * b.low + a.high * b.high of signed 16-bit halves.
OCTAVO_INLINE veci pair_products(veci a, veci b) {
#if defined(OCTAVO_WIDE) && defined(__AVX512BW__)
  return (veci)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  return (veci)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__AVX2__)
  const HalfLanes x = {a}, y = {b};
  OCTAVO_IN_HALVES(_mm256_madd_epi16(x.half[h], y.half[h]));
#else
  return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// acc + v, in this order.
OCTAVO_INLINE void add_to(veci& acc, veci v) {
  acc += v;
  pin(acc);
}

// ---- Fours of bytes -------------------------------------------------------------------------------------------------

// What a sum starts from, given that of its low and of its high half.
OCTAVO_INLINE int32_t quad_start(int32_t low, int32_t high) {
  return kPairSums ? (int32_t)(((uint32_t)low & 0xFFFF) | (uint32_t)high << 16) : low + high;
}

// sum + the products of four codes (0 … 255) and four inputs (-128 … 127) per lane. Two products must fit 16 bits.
OCTAVO_INLINE void add_quads(veci& sum, veci codes, veci inputs) {
#if defined(OCTAVO_WIDE) && defined(__AVX512VNNI__)
  sum = (veci)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)inputs);
#elif defined(OCTAVO_WIDE) && defined(__AVX512BW__)
  sum = (veci)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, (__m512i)inputs));
#elif defined(__AVX2__) && !defined(OCTAVO_WIDE)
  sum = (veci)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)inputs));
#elif defined(__AVX2__)
  HalfLanes s = {sum}, x = {codes}, y = {inputs};
  for (int h = 0; h < 2; ++h) s.half[h] = _mm256_add_epi16(s.half[h], _mm256_maddubs_epi16(x.half[h], y.half[h]));
  sum = s.whole;
#else
  for (int i = 0; i < 32; i += 8) sum += (codes >> i & 255) * (inputs << (24 - i) >> 24);
#endif
  pin(sum);
}

// Unsigned bytes below 128 less `middle`, as signed bytes.
OCTAVO_INLINE veci bytes_less(veci codes, int middle) {
  typedef int8_t bytes __attribute__((vector_size(sizeof(veci))));
  return (veci)((bytes)codes - (int8_t)middle);
}

// The sum as 32-bit integers.
OCTAVO_INLINE veci sum_of(veci sum) { return kPairSums ? pair_products(sum, splat_lanes(0x00010001)) : sum; }

// The same times a factor of each lane, which stands there twice, as 16-bit halves.
OCTAVO_INLINE veci times_factor(veci sum, veci twice) {
  return kPairSums ? pair_products(sum, twice) : sum * (twice << 16 >> 16);
}

}  // namespace
