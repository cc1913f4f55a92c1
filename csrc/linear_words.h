// y = x W^T + b over panels of eight-bit codes. Included by linear_quantized.h.
//
// Inputs are 16-bit integers, a step per span of 256 (integer_rows.h): the products of a fold (the units of a span that
// share a scale) are an exact sum of integers.
//
// Invariant: an output is a chain over spans in order, total = fma(step, part, total), and a part one over the folds of
// its span, part = fma(factor, sum, part) and, with zeros, part = fma(-offset, sum of inputs, part). Sums of a fold are
// exact, so no tile, row count or thread changes a bit.
#pragma once

#include "integer_lanes.h"
#include "integer_rows.h"
#include "linear.h"
#include "quantized_panels.h"
#include "quantized_tiles.h"

namespace {

// ---- A few rows: panels go from memory straight into registers ------------------------------------------------------

// The pairs from P on.
template <int MR, int P>
OCTAVO_INLINE void pairs_from(const int16_t* x, const uint8_t* unit, veci (&acc)[MR][kParts]) {
  veci w[kParts];
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) w[v] = pair_codes<P>(unit, v);
#pragma GCC unroll 5
  for (int r = 0; r < MR; ++r) {
    const veci a = input_lanes(x + r * kSpan + 2 * P);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) add_to(acc[r][v], pair_products(a, w[v]));
  }
  if constexpr (P != 15) pairs_from<MR, P + 1>(x, unit, acc);
}

template <Scales S, int MR>
OCTAVO_INLINE void add_fold(const uint8_t* header, const float* sums, int64_t folds, const veci (&acc)[MR][kParts],
                            vec (&part)[MR][kParts]) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    const vec factor = factor_at<S>(header, 0, v);
#pragma GCC unroll 5
    for (int r = 0; r < MR; ++r) part[r][v] = fma(factor, float_of(acc[r][v]), part[r][v]);
    if constexpr (kHasOffset<S>) {
      const vec offset = splat_wide(0) - offset_at<8, S>(header, 0, v);
#pragma GCC unroll 5
      for (int r = 0; r < MR; ++r) part[r][v] = fma(offset, splat_wide(sums[r * folds]), part[r][v]);
    }
  }
}

// MR rows from `row` on. A panel at a time: then memory is read in one go from front to back, and sums of integers take
// a cycle each, so two chains of them are enough.
template <Scales S, int MR>
void straight_words(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows x, int64_t row, int64_t panel) {
  vec total[MR][kParts];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) total[r][v] = splat_wide(0);
  const int64_t per = f.group / kUnit;
  const uint8_t *at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k), *header = at;
  const float* sums = x.sums + row * x.folds;
  int64_t sub = per;  // unit within its group
  for (int64_t span = 0, u = 0; span < x.spans; ++span) {
    const int16_t* codes = x.at(row, span);
    vec part[MR][kParts];
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kParts; ++v) part[r][v] = splat_wide(0);
    for (const int64_t end = least(x.units, u + kSpanUnits); u < end; ++sums) {
      if (sub == per) header = at, at += octavo::header_bytes(S), sub = 0;
      veci acc[MR][kParts];
      for (int v = 0; v < kParts; ++v)
        for (int r = 0; r < MR; ++r) acc[r][v] = (veci)splat_wide(0);
      for (const int64_t last = least(end, u + x.fold); u < last; ++u, ++sub, codes += kUnit) {
        fetch_unit<8>(at);
        pairs_from<MR, 0>(codes, at, acc);
        at += octavo::unit_bytes(8);
      }
      add_fold<S, MR>(header, sums, x.folds, acc, part);
    }
    for (int r = 0; r < MR; ++r) {
      const vec step = splat_wide(x.steps[(row + r) * x.spans + span]);
      for (int v = 0; v < kParts; ++v) total[r][v] = fma(step, part[r][v], total[r][v]);
    }
  }
  put_totals(a, row, panel * kPanel, total);
}

// ---- More rows: a span of a panel is unpacked once, for all of them -------------------------------------------------

struct WordSlice {  // a span of a panel: 8 KiB of words, in the first-level cache with a tile of x
  alignas(64) int16_t words[kSpan * kPanel];
  alignas(64) float factors[kSpanUnits * kPanel], offsets[kSpanUnits * kPanel];
};

template <int P>
OCTAVO_INLINE void widen_pairs(const uint8_t* unit, int16_t* to) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    const veci w = pair_codes<P>(unit, v);
    memcpy(to + P * 2 * kPanel + v * 2 * kLanes, &w, sizeof w);
  }
  if constexpr (P != 15) widen_pairs<P + 1>(unit, to);
}

// Units [first, first + count) of a panel.
template <Scales S>
void widen_words(const uint8_t* panel, const QuantizedFormat& f, int64_t fold, int64_t first, int64_t count,
                 WordSlice& to) {
  UnitPlace place(panel, f, first);
  for (int64_t i = 0; i < count; ++i, place.next(f)) {
    fetch_unit<8>(place.unit);
    widen_pairs<0>(place.unit, to.words + i * kUnit * kPanel);
    if (i % fold) continue;
    const int64_t at = i / fold * kPanel;
    for (int v = 0; v < kParts; ++v) {
      store_wide(to.factors + at + v * kLanes, factor_at<S>(place.header, place.sub, v));
      if constexpr (kHasOffset<S>)
        store_wide(to.offsets + at + v * kLanes, splat_wide(0) - offset_at<8, S>(place.header, place.sub, v));
    }
  }
}

// `count` units of MR rows. `x` by value: as a reference it could alias the totals, and every store would mean loading
// its pointers again.
template <int MR, bool Offset>
void word_tile(const IntegerRows x, int64_t row, int64_t span, int64_t count, const WordSlice& slice,
               float* __restrict totals) {
  const int64_t folds = x.folds, fold = x.fold;
  const int16_t *__restrict codes = x.at(row, span), *__restrict words = slice.words;
  const float* __restrict sums = x.sums + row * folds + span * kSpanUnits / fold;
  const float *__restrict factors = slice.factors, *__restrict offsets = slice.offsets;
  alignas(64) float part[MR * kPanel] = {};
  for (int64_t done = 0; done < count; done += fold, ++sums, factors += kPanel, offsets += kPanel) {
    const int64_t inputs = least(fold, count - done) * kUnit;
    veci acc[MR][kParts];
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) acc[r][v] = (veci)splat_wide(0);
    pair_tile<MR, kSpan>(codes, words, inputs / 2, acc);
    codes += inputs, words += inputs * kPanel;
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      const vec factor = load_wide(factors + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) {
        float* to = part + r * kPanel + v * kLanes;
        vec sum = fma(factor, float_of(acc[r][v]), load_wide(to));
        if constexpr (Offset) sum = fma(load_wide(offsets + v * kLanes), splat_wide(sums[r * folds]), sum);
        store_wide(to, sum);
      }
    }
  }
  for (int r = 0; r < MR; ++r, totals += kPanel) {
    const vec step = splat_wide(x.steps[(row + r) * x.spans + span]);
    for (int v = 0; v < kParts; ++v)
      store_wide(totals + v * kLanes,
                 fma(step, load_wide(part + r * kPanel + v * kLanes), load_wide(totals + v * kLanes)));
  }
}

template <Scales S>
void many_words(const LinearArgs& a, const QuantizedFormat& f, const IntegerRows& x, int64_t row, int64_t rows,
                int64_t panel) {
  WordSlice slice;
  alignas(64) float totals[kRowBlock * kPanel];
  memset(totals, 0, (size_t)rows * kPanel * sizeof(float));
  const uint8_t* at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k);
  for (int64_t span = 0; span < x.spans; ++span) {
    const int64_t first = span * kSpanUnits, count = least(kSpanUnits, x.units - first);
    widen_words<S>(at, f, x.fold, first, count, slice);
    in_tiles(rows, [&](auto height, int64_t from) {
      word_tile<decltype(height)::value, kHasOffset<S>>(x, row + from, span, count, slice, totals + from * kPanel);
    });
  }
  put_totals(a, row, rows, panel * kPanel, totals);
}

// Products of codes of eight bits with 16-bit inputs, for `quantized_tasks`.
template <Scales S>
struct WordProducts {
  static constexpr int kStraightRows = 5;
  IntegerRows x;
  void* prepare(const LinearArgs& a, const QuantizedFormat& f) { return integer_rows(a, f.group / kUnit, x); }
  template <int MR>
  void straight(const LinearArgs& a, const QuantizedFormat& f, int64_t panel) const {
    straight_words<S, MR>(a, f, x, 0, panel);
  }
  void many(const LinearArgs& a, const QuantizedFormat& f, int64_t row, int64_t rows, int64_t panel) const {
    many_words<S>(a, f, x, row, rows, panel);
  }
};

}  // namespace
