// The heart of a product: a few rows of x times a panel, held in registers. Sixteen outputs of a panel are one vector
// of sixteen lanes (AVX-512) or two of eight. Included by each instruction set's file.
//
// Panels go one by one: a row or two then wait for their own sums, at 22 GB/s a thread still faster than memory, which
// gives a single run of addresses a seventh more than several side by side.
//
// Invariant: each output is one chain of fused multiply-adds in the order of the inputs, however wide the vectors are.
#pragma once

#include "panels.h"
#include "simd.h"

namespace {

#if defined(OCTAVO_WIDE)
typedef float vec __attribute__((vector_size(64)));
typedef int32_t veci __attribute__((vector_size(64)));
#else
typedef f8 vec;
typedef i8 veci;
#endif
constexpr int kLanes = sizeof(vec) / 4, kParts = kPanel / kLanes;  // lanes of a vector, vectors of a panel
// Bytes of prefetch: far enough to cover memory. A row or two stay in the first-level cache beside them; more are
// multiplied for longer than a line there lasts.
constexpr int kAhead = 1024, kAheadNear = 2048, kAheadFar = 4096;

#if defined(OCTAVO_WIDE)
#if defined(__AVX512F__)
// By name: what goes through a union is written in halves and read whole, which waits for the halves to reach the cache.
OCTAVO_INLINE vec splat_wide(float x) { return (vec)_mm512_set1_ps(x); }
OCTAVO_INLINE vec fma(vec a, vec b, vec c) { return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
OCTAVO_INLINE vec join_halves(f8 low, f8 high) {
  return (vec)_mm512_insertf32x8(_mm512_castps256_ps512((__m256)low), (__m256)high, 1);
}
OCTAVO_INLINE f8 low_half(const vec* parts) { return (f8)_mm512_castps512_ps256((__m512)parts[0]); }
OCTAVO_INLINE f8 high_half(const vec* parts) { return (f8)_mm512_extractf32x8_ps((__m512)parts[0], 1); }
#else
union Halves {
  vec whole;
  f8 half[2];
};
OCTAVO_INLINE vec join_halves(f8 low, f8 high) {
  const Halves h = {.half = {low, high}};
  return h.whole;
}
OCTAVO_INLINE vec splat_wide(float x) { return join_halves(splat(x), splat(x)); }
OCTAVO_INLINE f8 low_half(const vec* parts) { return Halves{parts[0]}.half[0]; }
OCTAVO_INLINE f8 high_half(const vec* parts) { return Halves{parts[0]}.half[1]; }
OCTAVO_INLINE vec fma(vec a, vec b, vec c) {
  return join_halves(fma(low_half(&a), low_half(&b), low_half(&c)), fma(high_half(&a), high_half(&b), high_half(&c)));
}
#endif
#else
OCTAVO_INLINE vec splat_wide(float x) { return splat(x); }
OCTAVO_INLINE f8 low_half(const vec* parts) { return parts[0]; }
OCTAVO_INLINE f8 high_half(const vec* parts) { return parts[1]; }
#endif

OCTAVO_INLINE void store_wide(float* p, vec v) { memcpy(p, &v, sizeof v); }
OCTAVO_INLINE vec load_wide(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE vec load_wide(const f16* p) {
#if defined(OCTAVO_WIDE)
  return join_halves(load(p), load(p + 8));
#else
  return load(p);
#endif
}
OCTAVO_INLINE veci load_words(const bf16* p) {
  veci v;
  memcpy(&v, p, sizeof v);
  return v;
}
OCTAVO_INLINE vec even_of(veci words) { return (vec)(words << 16); }  // of a pair: the first input
OCTAVO_INLINE vec odd_of(veci words) { return (vec)(words & (int32_t)0xFFFF0000); }

// Memory to ask for during a product: `step` bytes on for every cache line of weights multiplied.
struct Upcoming {
  const char* at = nullptr;
  int64_t step = 0;
};
enum class Fetch { nothing, near, far };  // towards the first-level cache, the second-level cache
template <Fetch F>
OCTAVO_INLINE void fetch_ahead(Upcoming& ahead) {
  if (F == Fetch::nothing) return;
  __builtin_prefetch(ahead.at, 0, F == Fetch::near ? 3 : 2);
  ahead.at += ahead.step;
}

// The same pointer, of which the compiler knows no more: what is read through it is read again, from the first-level
// cache, instead of being kept in a register that the sums need.
template <class W>
OCTAVO_INLINE const W* afresh(const W* w) {
#if defined(__AVX2__)
  __asm__("" : "+r"(w));
#endif
  return w;
}

// acc[r][.] += a column of MR rows of x times the weights `b`.
template <int MR>
OCTAVO_INLINE void add_products(const float* x, int64_t ldx, const vec (&b)[kParts], vec (&acc)[MR][kParts]) {
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
    const vec a = splat_wide(x[r * ldx]);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) acc[r][v] = fma(a, b[v], acc[r][v]);
  }
}

// Sixteen weights, which are left in `wide` as float32 where a tile is to do that.
template <bool Widen>
OCTAVO_INLINE void leave(const vec (&b)[kParts], float* wide) {
#pragma GCC unroll 2
  for (int v = 0; Widen && v < kParts; ++v) store_wide(wide + kLanes * v, b[v]);
}

// acc[r][.] over `depth` values of k for MR rows and a panel of pairs: the first input of a pair is a shift away, the
// second a mask. Twelve sums, two weights, an input and the mask are sixteen registers.
template <int MR, Fetch F, bool Widen>
OCTAVO_INLINE void tile(const float* x, int64_t ldx, const bf16* w, float* wide, int64_t depth, Upcoming ahead,
                        vec (&acc)[MR][kParts]) {
  for (int64_t i = 0; i < depth; i += 2) {
    vec b[kParts];
    fetch_ahead<F>(ahead);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) b[v] = even_of(load_words(w + 2 * kLanes * v));
    leave<Widen>(b, wide + i * kPanel);
    add_products<MR>(x + i, ldx, b, acc);
    if (i + 1 == depth) return;
    w = afresh(w);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) b[v] = odd_of(load_words(w + 2 * kLanes * v));
    leave<Widen>(b, wide + (i + 1) * kPanel);
    add_products<MR>(x + i + 1, ldx, b, acc);
    w += 2 * kPanel;
  }
}

// The same from a panel of single inputs.
template <int MR, Fetch F, bool Widen, class W>
OCTAVO_INLINE void tile(const float* x, int64_t ldx, const W* w, float* wide, int64_t depth, Upcoming ahead,
                        vec (&acc)[MR][kParts]) {
  constexpr int kStep = 64 / (kPanel * (int)sizeof(W));  // inputs in a cache line
  for (int64_t i = 0; i < depth; ++i, w += kPanel) {
    if (kStep == 1 || i % kStep == 0) fetch_ahead<F>(ahead);
    vec b[kParts];
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) b[v] = load_wide(w + kLanes * v);
    leave<Widen>(b, wide + i * kPanel);
    add_products<MR>(x + i, ldx, b, acc);
  }
}

}  // namespace
