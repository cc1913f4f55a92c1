// y = x W^T + b over panels of fixed-point weights (fixed_point.h). Included by linear_quantized.h.
//
// The products of a span are an exact sum of integers: `vpmaddwd` and an addition take sixteen of them where a fused
// multiply-add of floats takes eight.
//
// Invariant: an output is a chain over spans in order, total = fma(step of the inputs, step of the weights * sum, total);
// the inner product is exact, for weights' steps are powers of two. No tile, row count or thread changes a bit.
#pragma once

#include "fixed_point.h"
#include "integer_lanes.h"
#include "linear.h"
#include "quantized_panels.h"
#include "quantized_tiles.h"

namespace {

constexpr int64_t kFixedStraight = 5;  // rows whose sums stay in registers while panels come from memory
constexpr int64_t kFixedHeader = octavo::header_bytes(Scales::wide);
constexpr int64_t kFixedSlice = kFixedHeader + kFixedSpan * kPanel * 2;  // bytes of a whole span of a panel

// totals [MR][kPanel] += a span of MR rows. inputs: how many the slice has, a multiple of kUnit.
template <int MR, Fetch F>
OCTAVO_INLINE void fixed_tile(const FixedRows& x, int64_t row, int64_t span, const uint8_t* slice, int64_t inputs,
                              float* totals) {
  veci acc[MR][kParts];
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) acc[r][v] = (veci)splat_wide(0);
  if (F != Fetch::nothing) __builtin_prefetch(slice + (F == Fetch::near ? kAheadNear : kAheadFar), 0, 3);
  pair_tile<MR, kFixedSpan, F>(x.at(row, span), slice + kFixedHeader, inputs / 2, acc);
  const float* steps = x.steps + span * x.rows + row;
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    const vec step = load_wide((const float*)slice + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r) {
      float* to = totals + r * kPanel + v * kLanes;
      store_wide(to, fma(splat_wide(steps[r]), step * float_of(acc[r][v]), load_wide(to)));
    }
  }
}

// Inputs of a span, as far as its panel has units for them.
OCTAVO_INLINE int64_t fixed_inputs(int64_t k, int64_t span) {
  return least(kFixedSpan, octavo::units_of(k) * kUnit - span * kFixedSpan);
}

OCTAVO_INLINE const uint8_t* fixed_panel(const LinearArgs& a, int64_t panel) {
  return (const uint8_t*)a.weight + panel * octavo::panel_bytes({16, Scales::wide, kFixedSpan}, a.k);
}

// All rows, MR of them: panels go from memory straight into registers.
template <int MR, Fetch F>
void straight_fixed(const LinearArgs& a, const FixedRows x, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; ++p) {
    alignas(64) float totals[MR * kPanel] = {};
    const uint8_t* at = fixed_panel(a, p);
    for (int64_t span = 0; span < x.spans; ++span, at += kFixedSlice)
      fixed_tile<MR, F>(x, 0, span, at, fixed_inputs(a.k, span), totals);
    put_totals(a, 0, MR, p * kPanel, totals);
  }
}

// A block of rows: a span of a panel stays in the first-level cache for all of them, while the next one is on its way
// from memory.
template <class Finish>
void fixed_block(const LinearArgs& a, const FixedRows x, int64_t row, int64_t rows, const PanelRun& run,
                 const Finish& finish) {
  alignas(64) float c[kRun * kRowBlock * kPanel];
  const int64_t tiles = (rows + kIntegerTile - 1) / kIntegerTile, share = (kFixedSlice / tiles + 63) / 64 * 64;
  for (int64_t p = 0; p < run.size(); ++p) {
    const uint8_t *at = fixed_panel(a, run.at(p)), *next = fixed_panel(a, run.at(p + 1 < run.size() ? p + 1 : p));
    float* totals = c + p * kRowBlock * kPanel;
    memset(totals, 0, (size_t)rows * kPanel * sizeof(float));
    for (int64_t span = 0; span < x.spans; ++span, at += kFixedSlice) {
      const uint8_t* ahead = span + 1 < x.spans ? at + kFixedSlice : next;
      const int64_t inputs = fixed_inputs(a.k, span);
      int64_t asked = 0;
      in_tiles(rows, [&](auto height, int64_t from) {
        for (const int64_t end = least(kFixedSlice, asked + share); asked < end; asked += 64)
          __builtin_prefetch(ahead + asked, 0, 2);
        fixed_tile<decltype(height)::value, Fetch::nothing>(x, row + from, span, at, inputs, totals + from * kPanel);
      });
    }
  }
  finish_rows(a, row, rows, run, c, finish);
}

template <class Finish>
void many_fixed(const LinearArgs& a, const FixedRows& x, int64_t twin, const Finish& finish) {
  in_blocks(a, twin, kIntegerTile, [&](int64_t row, int64_t rows, const PanelRun& run) {
    fixed_block(a, x, row, rows, run, finish);
  });
}

// Panels of a run, for up to kFewRows rows.
void few_fixed(const LinearArgs& a, const FixedRows& x, int64_t begin, int64_t end) {
  for (int64_t p = begin; a.m > kFixedStraight && p < end; p += kRun)
    fixed_block(a, x, 0, a.m, {p, least(kRun, end - p), 0}, Plain());
  switch (a.m) {
    case 1: return straight_fixed<1, Fetch::near>(a, x, begin, end);
    case 2: return straight_fixed<2, Fetch::near>(a, x, begin, end);
    case 3: return straight_fixed<3, Fetch::far>(a, x, begin, end);
    case 4: return straight_fixed<4, Fetch::far>(a, x, begin, end);
    case 5: return straight_fixed<5, Fetch::far>(a, x, begin, end);
  }
}

// False: out of memory.
bool fixed_linear(const LinearArgs& a) {
  FixedRows x;
  void* memory = fixed_rows(a, x);
  if (!memory) return false;
  if (a.m > octavo::kFewRows) {
    many_fixed(a, x, 0, Plain());
  } else {
    const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
    share_out((panels + run - 1) / run, a.threaded,
              [&](int64_t i) { few_fixed(a, x, i * run, least(panels, (i + 1) * run)); });
  }
  free(memory);
  return true;
}

// As `gated_linear`, of panels that may be quantised.
bool gated_quantized(const LinearArgs& a, const QuantizedFormat& f, octavo::Activation kind) {
  if (f.bits != 16 || !can_gate(a)) return false;
  FixedRows x;
  void* memory = fixed_rows(a, x);
  if (!memory) return false;
  many_fixed(a, x, a.n / kPanel / 2, Gated{kind});
  free(memory);
  return true;
}

}  // namespace
