// The heart of a product: a few rows of x times a few panels, held in registers. Sixteen outputs of a panel are one
// vector of sixteen lanes (AVX-512) or two of eight. Included by each instruction set's file.
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
constexpr int kAhead = 1024;  // bytes of prefetch: far enough to cover memory, near enough for the first-level cache

#if defined(OCTAVO_WIDE)
union Halves {
  vec whole;
  f8 half[2];
};
OCTAVO_INLINE vec splat_wide(float x) {
  const Halves h = {.half = {splat(x), splat(x)}};
  return h.whole;
}
OCTAVO_INLINE vec fma(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  const Halves x = {a}, y = {b}, z = {c};
  const Halves h = {.half = {fma(x.half[0], y.half[0], z.half[0]), fma(x.half[1], y.half[1], z.half[1])}};
  return h.whole;
#endif
}
OCTAVO_INLINE f8 low_half(const vec* parts) { return Halves{parts[0]}.half[0]; }
OCTAVO_INLINE f8 high_half(const vec* parts) { return Halves{parts[0]}.half[1]; }
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
  const Halves h = {.half = {load(p), load(p + 8)}};
  return h.whole;
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

// acc[r][.] over `depth` values of k for MR rows and NP panels (panel_stride apart), from pairs: the first input of a
// pair is a shift away, the second a mask.
template <int MR, int NP, bool Prefetch>
OCTAVO_INLINE void tile_pairs(const float* x, int64_t ldx, const bf16* w, int64_t panel_stride, int64_t depth,
                              vec (&acc)[MR][kParts * NP]) {
  for (int64_t i = 0; i < depth; i += 2) {
    veci words[kParts * NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      if (Prefetch) __builtin_prefetch((const char*)(w + p * panel_stride) + kAhead, 0, 3);
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) words[p * kParts + v] = load_words(w + p * panel_stride + 2 * kLanes * v);
    }
    w += 2 * kPanel;
    vec b[kParts * NP];
#pragma GCC unroll 8
    for (int c = 0; c < kParts * NP; ++c) b[c] = even_of(words[c]);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const vec a = splat_wide(x[r * ldx + i]);
#pragma GCC unroll 8
      for (int c = 0; c < kParts * NP; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
    if (i + 1 == depth) return;
#pragma GCC unroll 8
    for (int c = 0; c < kParts * NP; ++c) b[c] = odd_of(words[c]);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const vec a = splat_wide(x[r * ldx + i + 1]);
#pragma GCC unroll 8
      for (int c = 0; c < kParts * NP; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
  }
}

// The same from panels of single inputs.
template <int MR, int NP, bool Prefetch, class W>
OCTAVO_INLINE void tile_singles(const float* x, int64_t ldx, const W* w, int64_t panel_stride, int64_t depth,
                                vec (&acc)[MR][kParts * NP]) {
  constexpr int kStep = 64 / (kPanel * (int)sizeof(W));  // rows of a panel in a cache line
  for (int64_t i = 0; i < depth; ++i) {
    if (Prefetch && (kStep <= 1 || i % kStep == 0)) {
#pragma GCC unroll 4
      for (int p = 0; p < NP; ++p) __builtin_prefetch((const char*)(w + p * panel_stride) + kAhead, 0, 3);
    }
    vec b[kParts * NP];
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) b[p * kParts + v] = load_wide(w + p * panel_stride + kLanes * v);
    w += kPanel;
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      const vec a = splat_wide(x[r * ldx + i]);
#pragma GCC unroll 8
      for (int c = 0; c < kParts * NP; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
    }
  }
}

template <int MR, int NP, bool Prefetch, class W>
OCTAVO_INLINE void tile(const float* x, int64_t ldx, const W* w, int64_t panel_stride, int64_t depth,
                        vec (&acc)[MR][kParts * NP]) {
  if constexpr (__is_same(W, bf16))
    tile_pairs<MR, NP, Prefetch>(x, ldx, w, panel_stride, depth, acc);
  else
    tile_singles<MR, NP, Prefetch>(x, ldx, w, panel_stride, depth, acc);
}

}  // namespace
