// y = x W^T + b over packed panels. Included by each instruction set's file; everything has internal linkage.
//
// Invariant: every output is ((0 + s0) + s1) + … + bias, where a slice s is one chain acc = fma(x[i], w[i], acc) from 0
// over 256 consecutive i. (Slices keep the rounding error of long sums down.) No shape, tile or thread changes that
// order, so one row alone and the same row among 512 have the same bits.
#pragma once

#include "kernels.h"
#include "panels.h"
#include "register_tile.h"
#include "simd.h"

#include <stdlib.h>

namespace {

using octavo::LinearArgs;

constexpr int kRowTile = 12 / kParts;  // rows of a register tile: 12 sums in 16 registers, or in 32
// Rows that stay in registers with a panel or more. Pairs of bfloat16 need registers of their own: six rows would spill.
template <class W>
constexpr int64_t kTileRows = __is_same(W, bf16) && kParts == 2 ? 5 : 6;
constexpr int64_t kRowBlock = 96;  // rows whose slice of x stays in the second-level cache
constexpr int64_t kRun = octavo::panels_of_a_run(octavo::kFewRows + 1, 1, DType::f32);
constexpr int64_t kDepth = 256;    // k of a slice: 16 KiB of weights, in the first-level cache

template <class Out>
OCTAVO_INLINE void put_typed(Out* y, int64_t columns, f8 low, f8 high) {
  if (columns >= kPanel) {
    store(y, low);
    store(y + 8, high);
    return;
  }
  for (int j = 0; j < columns; ++j) narrow(j < 8 ? low[j] : high[j - 8], y + j);
}

// Whether any lane is greater than `best`, or a NaN.
OCTAVO_INLINE bool any_above(f8 v, float best) {
  const i8 not_above = v <= splat(best);
#if defined(__AVX2__)
  return _mm256_movemask_ps((__m256)not_above) != 0xFF;
#else
  int32_t all = -1;
  for (int i = 0; i < 8; ++i) all &= not_above[i];
  return all != -1;
#endif
}

// Keeps the best of a row up to date with sixteen more outputs, of which `columns` exist.
OCTAVO_INLINE void keep_best(octavo::Best& best, int64_t column, int64_t columns, f8 low, f8 high) {
  if (best.value != best.value || (!any_above(low, best.value) && !any_above(high, best.value))) return;
  for (int j = 0; j < kPanel && j < columns; ++j) {
    const float v = j < 8 ? low[j] : high[j - 8];
    if (v <= best.value) continue;
    best.value = v, best.index = (int32_t)(column + j);
    if (v != v) return;
  }
}

// Sixteen outputs of a row from `column` on, as far as there are that many. The type is looked up here, once per
// sixteen sums, so that the products need no variant for each.
OCTAVO_INLINE void put(const LinearArgs& a, int64_t row, int64_t column, f8 low, f8 high) {
  const int64_t at = row * a.ldy + column, columns = a.n - column;
  if (a.best) {
    const int64_t run = column / kPanel / octavo::panels_of_a_run(a.m, a.k, a.weight_type);
    return keep_best(a.best[run * a.m + row], column, columns, low, high);
  }
  switch (a.y_type) {
    case DType::f32: return put_typed((float*)a.y + at, columns, low, high);
    case DType::bf16: return put_typed((bf16*)a.y + at, columns, low, high);
    case DType::f16: return put_typed((f16*)a.y + at, columns, low, high);
  }
}

OCTAVO_INLINE f8 bias_at(const float* bias, int64_t column, int64_t n) {
  if (column + 8 <= n) return load(bias + column);
  f8 v = splat(0);
  for (int64_t j = column; j < n; ++j) v[j - column] = bias[j];
  return v;
}

// A few rows, from `row` on: each panel is read straight into registers.
template <int MR, int NP, class W>
OCTAVO_INLINE void few_rows(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t panel) {
  vec total[MR][kParts * NP];
  for (int r = 0; r < MR; ++r)
    for (int c = 0; c < kParts * NP; ++c) total[r][c] = splat_wide(0);
  const int64_t panel_stride = panel_size<W>(a.k);
  const W* w = (const W*)a.weight + panel * panel_stride;
  for (int64_t i = 0; i < a.k; i += kDepth) {
    vec acc[MR][kParts * NP];
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kParts * NP; ++c) acc[r][c] = splat_wide(0);
    tile<MR, NP, true>(x + row * ldx + i, ldx, w + i * kPanel, panel_stride, least(kDepth, a.k - i), acc);
#pragma GCC unroll 6
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 8
      for (int c = 0; c < kParts * NP; ++c) total[r][c] = total[r][c] + acc[r][c];
  }
  for (int p = 0; p < NP; ++p) {
    const int64_t column = (panel + p) * kPanel;
    f8 low = splat(0), high = splat(0);
    if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
    for (int r = 0; r < MR; ++r) {
      const vec* parts = total[r] + kParts * p;
      const f8 l = a.bias ? low_half(parts) + low : low_half(parts);
      const f8 h = a.bias ? high_half(parts) + high : high_half(parts);
      put(a, row + r, column, l, h);
    }
  }
}

template <int MR, int NP, class W>
void few_rows_range(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t begin, int64_t end) {
  int64_t p = begin;
  for (; p + NP <= end; p += NP) few_rows<MR, NP, W>(a, x, ldx, row, p);
  for (; p < end; ++p) few_rows<MR, 1, W>(a, x, ldx, row, p);
}

// Registers: rows x panels x parts sums, where there are enough at least 8 (two FMA units, four cycles), at most 12.
// One row of bfloat16 goes panel by panel: its sums then wait for each other, at 22 GB/s a thread still faster than
// memory, which gives a single run of addresses a seventh more than several at once.
template <class W>
void few_rows_dispatch(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t rows, int64_t begin,
                       int64_t end) {
  switch (rows) {
    case 1: return few_rows_range<1, __is_same(W, bf16) ? 1 : 4, W>(a, x, ldx, row, begin, end);
    case 2: return few_rows_range<2, kParts == 1 ? 4 : 2, W>(a, x, ldx, row, begin, end);
    case 3: return few_rows_range<3, kParts == 1 ? 4 : __is_same(W, bf16) ? 1 : 2, W>(a, x, ldx, row, begin, end);
    case 4: return few_rows_range<4, 2 / kParts, W>(a, x, ldx, row, begin, end);
    case 5: return few_rows_range<5, 2 / kParts, W>(a, x, ldx, row, begin, end);
    default: return few_rows_range<6, 2 / kParts, W>(a, x, ldx, row, begin, end);
  }
}

// Up to kFewRows rows in equal tiles over a run of panels: the first tile brings the run from memory into the
// second-level cache, the others find it there.
template <class W>
void few_rows_run(const LinearArgs& a, const float* x, int64_t ldx, int64_t begin, int64_t end) {
  const int64_t tiles = (a.m + kTileRows<W> - 1) / kTileRows<W>;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = a.m * t / tiles;
    few_rows_dispatch<W>(a, x, ldx, row, a.m * (t + 1) / tiles - row, begin, end);
  }
}

// Many rows, one slice of k: c[MR][16] (+)= x w. `c` is dense scratch: a column of y would hit one cache set.
template <int MR>
void slice_tile(const float* x, int64_t ldx, const float* w, int64_t depth, bool first, float* c) {
  vec acc[MR][kParts];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) acc[r][v] = splat_wide(0);
  tile<MR, 1, false>(x, ldx, w, 0, depth, acc);
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      float* to = c + r * kPanel + v * kLanes;
      store_wide(to, (first ? splat_wide(0) : load_wide(to)) + acc[r][v]);
    }
  }
}

void slice_rows(const float* x, int64_t ldx, const float* w, int64_t depth, bool first, int64_t rows, float* c) {
  for (int64_t r = 0; r < rows;) {
    const int64_t left = rows - r;
    // One to two tiles of rows are cut in halves: a tile of one row or two would wait for its own sums.
    const int64_t height = left <= kRowTile ? left : left < 2 * kRowTile ? (left + 1) / 2 : kRowTile;
    switch (height) {
      case 1: slice_tile<1>(x, ldx, w, depth, first, c); break;
      case 2: slice_tile<2>(x, ldx, w, depth, first, c); break;
      case 3: slice_tile<3>(x, ldx, w, depth, first, c); break;
      case 4: slice_tile<4>(x, ldx, w, depth, first, c); break;
      case 5: slice_tile<5>(x, ldx, w, depth, first, c); break;
      case 6: slice_tile<6>(x, ldx, w, depth, first, c); break;
#if defined(OCTAVO_WIDE)
      case 7: slice_tile<7>(x, ldx, w, depth, first, c); break;
      case 8: slice_tile<8>(x, ldx, w, depth, first, c); break;
      case 9: slice_tile<9>(x, ldx, w, depth, first, c); break;
      case 10: slice_tile<10>(x, ldx, w, depth, first, c); break;
      case 11: slice_tile<11>(x, ldx, w, depth, first, c); break;
      default: slice_tile<12>(x, ldx, w, depth, first, c);
#endif
    }
    r += height, x += height * ldx, c += height * kPanel;
  }
}

OCTAVO_INLINE const float* widen_slice(const float* w, int64_t, float*) { return w; }
template <class W>
OCTAVO_INLINE const float* widen_slice(const W* w, int64_t depth, float* to) {
  for (int64_t i = 0; i < depth * kPanel; i += 8) store(to + i, load(w + i));
  return to;
}
OCTAVO_INLINE const float* widen_slice(const bf16* w, int64_t depth, float* to) {
  for (int64_t i = 0; i < depth; i += 2, w += 2 * kPanel) {
    i8 low, high;
    memcpy(&low, w, 32), memcpy(&high, w + 16, 32);
    float* even = to + i * kPanel;
    store(even, as_float(low << 16)), store(even + 8, as_float(high << 16));
    if (i + 1 == depth) break;
    store(even + kPanel, as_float(low & splat_int((int32_t)0xFFFF0000)));
    store(even + kPanel + 8, as_float(high & splat_int((int32_t)0xFFFF0000)));
  }
  return to;
}

template <class W>
void block(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t rows, int64_t begin, int64_t end) {
  alignas(64) float c[kRun * kRowBlock * kPanel];  // 48 KiB
  alignas(64) float wide[kDepth * kPanel];                // 16 KiB
  for (int64_t i = 0; i < a.k; i += kDepth) {
    const int64_t depth = least(kDepth, a.k - i);
    for (int64_t p = begin; p < end; ++p) {
      const W* w = (const W*)a.weight + p * panel_size<W>(a.k) + i * kPanel;
      slice_rows(x + row * ldx + i, ldx, widen_slice(w, depth, wide), depth, i == 0, rows,
                 c + (p - begin) * kRowBlock * kPanel);
    }
  }
  for (int64_t p = begin; p < end; ++p) {
    const int64_t column = p * kPanel;
    f8 low = splat(0), high = splat(0);
    if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = c + ((p - begin) * kRowBlock + r) * kPanel;
      const f8 l = a.bias ? load(from) + low : load(from), h = a.bias ? load(from + 8) + high : load(from + 8);
      put(a, row + r, column, l, h);
    }
  }
}

template <class W>
void linear_typed(const LinearArgs& a, const float* x, int64_t ldx) {
  const int64_t panels = (a.n + kPanel - 1) / kPanel;
  if (a.m <= octavo::kFewRows) {
    const int64_t chunk = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
    const int64_t chunks = (panels + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic, 1) if (a.threaded && chunks > 1)
    for (int64_t i = 0; i < chunks; ++i)
      few_rows_run<W>(a, x, ldx, i * chunk, least(panels, (i + 1) * chunk));
    return;
  }
  const int64_t blocks = (a.m + kRowBlock - 1) / kRowBlock, groups = (panels + kRun - 1) / kRun;
  // Equal row blocks, in whole register tiles: 97 rows are not 96 and 1.
  int64_t height = (a.m + blocks - 1) / blocks;
  height = least(kRowBlock, (height + kRowTile - 1) / kRowTile * kRowTile);
#pragma omp parallel for schedule(dynamic, 1) if (a.threaded && blocks * groups > 1)
  for (int64_t i = 0; i < blocks * groups; ++i) {
    const int64_t begin = i / blocks * kRun, row = i % blocks * height;  // blocks of a group share its weights
    const int64_t rows = least(height, a.m - row);
    if (rows > 0) block<W>(a, x, ldx, row, rows, begin, least(panels, begin + kRun));
  }
}

template <class In>
void widen_rows(const LinearArgs& a, float* to) {
  for (int64_t r = 0; r < a.m; ++r)
    for (int64_t i = 0; i < a.k; ++i) to[r * a.k + i] = widen(((const In*)a.x)[r * a.ldx + i]);
}

bool linear(const LinearArgs& a) {
  const float* x = (const float*)a.x;
  int64_t ldx = a.ldx;
  float* copy = nullptr;
  if (a.x_type != DType::f32) {
    copy = (float*)malloc((size_t)(a.m * a.k) * sizeof(float));
    if (!copy) return false;
    if (a.x_type == DType::bf16)
      widen_rows<bf16>(a, copy);
    else
      widen_rows<f16>(a, copy);
    x = copy, ldx = a.k;
  }
  switch (a.weight_type) {
    case DType::f32: linear_typed<float>(a, x, ldx); break;
    case DType::bf16: linear_typed<bf16>(a, x, ldx); break;
    case DType::f16: linear_typed<f16>(a, x, ldx); break;
  }
  free(copy);
  return true;
}

}  // namespace
