// y = x W^T + b over packed panels. Included by each instruction set's file; everything has internal linkage.
//
// Invariant: every output is ((0 + s0) + s1) + … + bias, where a slice s is one chain acc = fma(x[i], w[i], acc) from 0
// over 256 consecutive i. (Slices keep the rounding error of long sums down.) No shape, tile or thread changes that
// order, so one row alone and the same row among 512 have the same bits.
#pragma once

#include "elementwise.h"
#include "kernels.h"
#include "panels.h"
#include "register_tile.h"
#include "shares.h"
#include "simd.h"

#include <stdlib.h>

namespace {

using octavo::LinearArgs;

constexpr int kRowTile = 12 / kParts;   // rows of a register tile: 12 sums in 16 registers, or in 32
constexpr int64_t kDepth = 256;         // k of a slice: 16 KiB of weights, in the first-level cache
constexpr int64_t kRowBlock = 96;       // rows whose slice of x stays in the second-level cache
constexpr int64_t kCached = 128 << 10;  // bytes of weights that stay there for several tiles of few rows
constexpr int64_t kRun = octavo::panels_of_a_run(octavo::kFewRows + 1, 1, DType::f32);

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

OCTAVO_INLINE void add_bias(const LinearArgs& a, int64_t panel, f8& low, f8& high) {
  if (!a.bias) return;
  low = low + bias_at(a.bias, panel * kPanel, a.n), high = high + bias_at(a.bias, panel * kPanel + 8, a.n);
}

// A few rows, from `row` on, times a panel that is read straight into registers.
template <int MR, Fetch F, class W>
void few_rows(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t panel, Upcoming ahead) {
  vec total[MR][kParts];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) total[r][v] = splat_wide(0);
  const W* w = (const W*)a.weight + panel * panel_size<W>(a.k);
  for (int64_t i = 0; i < a.k; i += kDepth) {
    const int64_t depth = least(kDepth, a.k - i);
    vec acc[MR][kParts];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) acc[r][v] = splat_wide(0);
    tile<MR, F, false>(x + row * ldx + i, ldx, w + i * kPanel, nullptr, depth, ahead, acc);
    ahead.at += depth * kPanel * (int64_t)sizeof(W) / 64 * ahead.step;
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) total[r][v] = total[r][v] + acc[r][v];
  }
  const int64_t column = panel * kPanel;
  f8 low = splat(0), high = splat(0);
  if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
  for (int r = 0; r < MR; ++r) {
    const f8 l = a.bias ? low_half(total[r]) + low : low_half(total[r]);
    const f8 h = a.bias ? high_half(total[r]) + high : high_half(total[r]);
    put(a, row + r, column, l, h);
  }
}

template <Fetch F, class W>
void few_rows_of(int64_t height, const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t panel,
                 Upcoming ahead) {
  switch (height) {
    case 1: return few_rows<1, F, W>(a, x, ldx, row, panel, ahead);
    case 2: return few_rows<2, F, W>(a, x, ldx, row, panel, ahead);
    case 3: return few_rows<3, F, W>(a, x, ldx, row, panel, ahead);
    case 4: return few_rows<4, F, W>(a, x, ldx, row, panel, ahead);
    case 5: return few_rows<5, F, W>(a, x, ldx, row, panel, ahead);
    case 6: return few_rows<6, F, W>(a, x, ldx, row, panel, ahead);
#if defined(OCTAVO_WIDE)
    case 7: return few_rows<7, F, W>(a, x, ldx, row, panel, ahead);
    case 8: return few_rows<8, F, W>(a, x, ldx, row, panel, ahead);
    case 9: return few_rows<9, F, W>(a, x, ldx, row, panel, ahead);
    case 10: return few_rows<10, F, W>(a, x, ldx, row, panel, ahead);
    case 11: return few_rows<11, F, W>(a, x, ldx, row, panel, ahead);
    default: return few_rows<12, F, W>(a, x, ldx, row, panel, ahead);
#endif
  }
}

// Up to kFewRows rows in equal tiles over a run of panels. One tile asks for the weights a little ahead of itself. With
// several, all but the first find a part of the run in the second-level cache, and each asks for its share of the next
// part, so that memory is read all the time.
template <class W>
void few_rows_run(const LinearArgs& a, const float* x, int64_t ldx, int64_t begin, int64_t end) {
  const int64_t tiles = (a.m + kRowTile - 1) / kRowTile, bytes = panel_size<W>(a.k) * (int64_t)sizeof(W);
  const char* weight = (const char*)a.weight;
  for (; a.m <= 2 && begin < end; ++begin)
    few_rows_of<Fetch::near, W>(a.m, a, x, ldx, 0, begin, {weight + begin * bytes + kAheadNear, 64});
  for (; tiles == 1 && begin < end; ++begin)
    few_rows_of<Fetch::far, W>(a.m, a, x, ldx, 0, begin, {weight + begin * bytes + kAheadFar, 64});
  const int64_t part = bytes < kCached ? kCached / bytes : 1;
  for (; begin < end; begin += part) {
    const int64_t to = least(end, begin + part);
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t row = a.m * t / tiles, height = a.m * (t + 1) / tiles - row;
      for (int64_t p = begin; p < to; ++p) {
        const int64_t asked = (t * (to - begin) + (p - begin)) * bytes / tiles;
        few_rows_of<Fetch::far, W>(height, a, x, ldx, row, p, {weight + to * bytes + asked, 64 / tiles});
      }
    }
  }
}

// Many rows, one slice of k: c[MR][16] (+)= x w. `c` is dense scratch: a column of y would hit one cache set.
// Weights that are not float32 are widened into `wide` on the way, for the tiles that follow.
template <int MR, class W>
void slice_tile(const float* x, int64_t ldx, const W* w, float* wide, int64_t depth, bool first, float* c) {
  vec acc[MR][kParts];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) acc[r][v] = splat_wide(0);
  tile<MR, Fetch::nothing, !__is_same(W, float)>(x, ldx, w, wide, depth, {}, acc);
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      float* to = c + r * kPanel + v * kLanes;
      store_wide(to, (first ? splat_wide(0) : load_wide(to)) + acc[r][v]);
    }
  }
}

template <class W>
void slice_tile_of(int64_t height, const float* x, int64_t ldx, const W* w, float* wide, int64_t depth, bool first,
                   float* c) {
  switch (height) {
    case 1: return slice_tile<1>(x, ldx, w, wide, depth, first, c);
    case 2: return slice_tile<2>(x, ldx, w, wide, depth, first, c);
    case 3: return slice_tile<3>(x, ldx, w, wide, depth, first, c);
    case 4: return slice_tile<4>(x, ldx, w, wide, depth, first, c);
    case 5: return slice_tile<5>(x, ldx, w, wide, depth, first, c);
    case 6: return slice_tile<6>(x, ldx, w, wide, depth, first, c);
#if defined(OCTAVO_WIDE)
    case 7: return slice_tile<7>(x, ldx, w, wide, depth, first, c);
    case 8: return slice_tile<8>(x, ldx, w, wide, depth, first, c);
    case 9: return slice_tile<9>(x, ldx, w, wide, depth, first, c);
    case 10: return slice_tile<10>(x, ldx, w, wide, depth, first, c);
    case 11: return slice_tile<11>(x, ldx, w, wide, depth, first, c);
    default: return slice_tile<12>(x, ldx, w, wide, depth, first, c);
#endif
  }
}

// One slice of a panel for all rows of a block, in equal tiles (13 rows are not 6, 6 and 1: that one would wait for its
// own sums), while the slice that comes next is on its way from memory.
template <class W>
void slice_rows(const float* x, int64_t ldx, const W* w, const W* next, float* wide, int64_t depth, bool first,
                int64_t rows, float* c) {
  const int64_t tiles = (rows + kRowTile - 1) / kRowTile, bytes = kDepth * kPanel * (int64_t)sizeof(W);
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t row = rows * t / tiles, height = rows * (t + 1) / tiles - row;
    for (int64_t at = bytes * t / tiles & ~int64_t{63}; at < bytes * (t + 1) / tiles; at += 64)
      __builtin_prefetch((const char*)next + at, 0, 2);
    if (__is_same(W, float) || t == 0)
      slice_tile_of(height, x + row * ldx, ldx, w, wide, depth, first, c + row * kPanel);
    else
      slice_tile_of(height, x + row * ldx, ldx, (const float*)wide, nullptr, depth, first, c + row * kPanel);
  }
}

// The panels that a block multiplies: `count` from `begin` on and, of a gated product, as many from `twin` on.
struct PanelRun {
  int64_t begin, count, twin;
  OCTAVO_INLINE int64_t size() const { return twin ? 2 * count : count; }
  OCTAVO_INLINE int64_t at(int64_t i) const { return i < count ? begin + i : twin + i - count; }
};

// What a block does with its sums: keeps them, or gates the first half of them by the second.
struct Plain {
  OCTAVO_INLINE void operator()(const LinearArgs& a, int64_t row, const PanelRun& run, int64_t i, const float* c) const {
    f8 low = load(c), high = load(c + 8);
    add_bias(a, run.at(i), low, high);
    put(a, row, run.at(i) * kPanel, low, high);
  }
};
struct Gated {
  octavo::Activation kind;
  OCTAVO_INLINE void operator()(const LinearArgs& a, int64_t row, const PanelRun& run, int64_t i, const float* c) const {
    const float* twin = c + run.count * kRowBlock * kPanel;
    f8 low = load(c), high = load(c + 8), low_up = load(twin), high_up = load(twin + 8);
    add_bias(a, run.at(i), low, high);
    add_bias(a, run.at(run.count + i), low_up, high_up);
    float* y = (float*)a.y + row * a.ldy + run.at(i) * kPanel;
    store(y, activate(low, kind) * low_up), store(y + 8, activate(high, kind) * high_up);
  }
};

// Sums c [panels of the run][kRowBlock][kPanel]. Row by row: neighbouring outputs of a row share pages, those of a column
// do not.
template <class Finish>
void finish_rows(const LinearArgs& a, int64_t row, int64_t rows, const PanelRun& run, const float* c,
                 const Finish& finish) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t p = 0; p < run.count; ++p) finish(a, row + r, run, p, c + (p * kRowBlock + r) * kPanel);
}

template <class W, class Finish>
void block(const LinearArgs& a, const float* x, int64_t ldx, int64_t row, int64_t rows, const PanelRun& run,
           const Finish& finish) {
  alignas(64) float c[kRun * kRowBlock * kPanel];  // 48 KiB
  alignas(64) float wide[kDepth * kPanel];         // 16 KiB
  const auto weights = [&](int64_t i) { return (const W*)a.weight + run.at(i) * panel_size<W>(a.k); };
  for (int64_t i = 0; i < a.k; i += kDepth) {
    const int64_t depth = least(kDepth, a.k - i);
    for (int64_t p = 0; p < run.size(); ++p) {
      const W* next = p + 1 < run.size() ? weights(p + 1) + i * kPanel : weights(0) + (i + depth) * kPanel;
      slice_rows(x + row * ldx + i, ldx, weights(p) + i * kPanel, next, wide, depth, i == 0, rows,
                 c + p * kRowBlock * kPanel);
    }
  }
  finish_rows(a, row, rows, run, c, finish);
}

// Many rows: run(row, rows, panels) for blocks of rows times runs of panels, of which the outputs from `twin` panels on
// are a second half (0: there is none). tile: rows that are multiplied together.
template <class Run>
void in_blocks(const LinearArgs& a, int64_t twin, int64_t tile, const Run& run) {
  const int64_t panels = twin ? twin : (a.n + kPanel - 1) / kPanel, longest = twin ? kRun / 2 : kRun;
  const int64_t blocks = (a.m + kRowBlock - 1) / kRowBlock;
  // Equal row blocks, in whole register tiles: 97 rows are not 96 and 1.
  int64_t height = (a.m + blocks - 1) / blocks;
  height = least(kRowBlock, (height + tile - 1) / tile * tile);
  // Runs of half the size where there are few: five of them would keep one of two threads waiting for a fifth.
  const int64_t length = a.best || blocks * panels >= 16 * longest ? longest : longest / 2;
  const int64_t runs = (panels + length - 1) / length;
  share_out(blocks * runs, a.threaded, [&](int64_t i) {
    const int64_t begin = i / blocks * length, row = i % blocks * height;  // blocks of a run share its weights
    const int64_t rows = least(height, a.m - row);
    if (rows > 0) run(row, rows, PanelRun{begin, least(length, panels - begin), twin ? twin + begin : 0});
  });
}

template <class W, class Finish>
void many_rows(const LinearArgs& a, const float* x, int64_t ldx, int64_t twin, const Finish& finish) {
  in_blocks(a, twin, kRowTile, [&](int64_t row, int64_t rows, const PanelRun& run) {
    block<W>(a, x, ldx, row, rows, run, finish);
  });
}

template <class W>
void linear_typed(const LinearArgs& a, const float* x, int64_t ldx) {
  if (a.m > octavo::kFewRows) return many_rows<W>(a, x, ldx, 0, Plain());
  const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
  share_out((panels + run - 1) / run, a.threaded,
            [&](int64_t i) { few_rows_run<W>(a, x, ldx, i * run, least(panels, (i + 1) * run)); });
}

// Where the rows of a register tile lie a multiple of a KiB apart, they fall on a few sets of the first-level cache and
// push each other out.
OCTAVO_INLINE bool crowded(const LinearArgs& a) { return a.m > 4 && a.ldx % 256 == 0; }

template <class In>
void copy_rows(const LinearArgs& a, float* to, int64_t stride) {
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 32768)
  for (int64_t r = 0; r < a.m; ++r)
    for (int64_t i = 0; i < a.k; ++i) to[r * stride + i] = widen(((const In*)a.x)[r * a.ldx + i]);
}

// Calls f with x as float32 and its row stride, copied where it is something else or crowded. False: out of memory.
template <class F>
bool with_floats(const LinearArgs& a, F f) {
  if (a.x_type == DType::f32 && !crowded(a)) return f((const float*)a.x, a.ldx), true;
  const int64_t stride = ((a.k + 15) / 16 | 1) * 16;  // an odd number of cache lines
  float* copy = (float*)malloc((size_t)(a.m * stride) * sizeof(float));
  if (!copy) return false;
  switch (a.x_type) {
    case DType::f32: copy_rows<float>(a, copy, stride); break;
    case DType::bf16: copy_rows<bf16>(a, copy, stride); break;
    case DType::f16: copy_rows<f16>(a, copy, stride); break;
  }
  f(copy, stride);
  free(copy);
  return true;
}

bool linear(const LinearArgs& a) {
  return with_floats(a, [&](const float* x, int64_t ldx) {
    switch (a.weight_type) {
      case DType::f32: return linear_typed<float>(a, x, ldx);
      case DType::bf16: return linear_typed<bf16>(a, x, ldx);
      case DType::f16: return linear_typed<f16>(a, x, ldx);
    }
  });
}

OCTAVO_INLINE bool can_gate(const LinearArgs& a) {
  return a.m > octavo::kFewRows && a.n % (2 * kPanel) == 0 && a.y_type == DType::f32 && !a.best;
}

// Sums are gated while they are in the caches: written and read again, they would cost as much as the activation.
bool gated_linear(const LinearArgs& a, octavo::Activation kind) {
  if (!can_gate(a)) return false;
  const int64_t twin = a.n / kPanel / 2;
  const Gated gated = {kind};
  return with_floats(a, [&](const float* x, int64_t ldx) {
    switch (a.weight_type) {
      case DType::f32: return many_rows<float>(a, x, ldx, twin, gated);
      case DType::bf16: return many_rows<bf16>(a, x, ldx, twin, gated);
      case DType::f16: return many_rows<f16>(a, x, ldx, twin, gated);
    }
  });
}

bool takes_no_tiles(DType, int64_t) { return false; }

}  // namespace
