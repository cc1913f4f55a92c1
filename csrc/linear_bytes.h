// y = x W^T + b over panels of codes of four to six bits. Included by linear_quantized.h.
//
// Inputs are 8-bit integers, a step per unit of 32 (byte_rows.h); codes are unsigned bytes, less their middle from the
// start of a sum on. Sums of a unit are exact, and in halves of 16 bits where the instructions want that: each half takes
// 16 products below 127 * 16 (four bits, or less a middle of 8 or 16), or with six bits, less 32, eight of half a unit.
//
// Invariant: an output is a chain over units in order, total = fma(factor * step, sum, total) and, with offsets,
// total = fma(-offset, sum of the unit's inputs, total). No tile, row count or thread changes a bit.
#pragma once

#include "byte_rows.h"
#include "integer_lanes.h"
#include "linear.h"
#include "quantized_panels.h"
#include "quantized_tiles.h"

namespace {

// Sums of unit `u` of a span start here; of its half `h`, where halves have factors of their own.
template <int Bits, Scales S, int MR>
OCTAVO_INLINE void start_sums(const ByteSpan* x, int64_t u, int h, veci (&acc)[MR][kParts]) {
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
    veci start = (veci)splat_wide(0);
    if constexpr (kCentre<Bits, S> != 0) start = input_lanes(x[r].starts + 2 * u + h);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) acc[r][v] = start;
  }
}

// acc += the products of one four of inputs of MR rows with codes of 16 outputs.
template <int MR>
OCTAVO_INLINE void add_four(const ByteSpan* x, int64_t input, const veci (&w)[kParts], veci (&acc)[MR][kParts]) {
#pragma GCC unroll 12
  for (int r = 0; r < MR; ++r) {
    const veci a = input_lanes(x[r].codes + input);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) add_quads(acc[r][v], w[v], a);
  }
}

// total + factor * step * sum, less the offset: the part of a unit.
template <bool Offset>
OCTAVO_INLINE vec add_unit(vec total, veci sum, vec factor, vec offset, const ByteSpan& x, int64_t u) {
  total = fma(factor * splat_wide(x.steps[u]), float_of(sum), total);
  if constexpr (Offset) total = fma(offset, splat_wide(x.sums[u]), total);
  return total;
}

// ---- A few rows: panels go from memory straight into registers ------------------------------------------------------

// Fours of a unit in the order in which they are taken: both of a byte in turn, unless half units have factors.
template <Scales S>
constexpr int quad_at(int i) { return S == Scales::k_signed ? i : i % 2 * 4 + i / 2; }

// Fours number I to End of a unit `u` of a span.
template <int Bits, Scales S, int MR, int I, int End>
OCTAVO_INLINE void fours_from(const ByteSpan* x, int64_t u, const uint8_t* unit, veci (&acc)[MR][kParts]) {
  constexpr int kQuad = quad_at<S>(I);
  veci w[kParts];
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) w[v] = quad_codes<Bits, kQuad>(unit, v);
  add_four<MR>(x, u * kUnit + 4 * kQuad, w, acc);
  if constexpr (I + 1 != End) fours_from<Bits, S, MR, I + 1, End>(x, u, unit, acc);
}

// The sums of a unit of MR rows, as 32-bit integers.
template <int Bits, Scales S, int MR>
OCTAVO_INLINE void unit_sums(const ByteSpan* x, int64_t u, const uint8_t* header, int64_t sub, const uint8_t* unit,
                             veci (&sums)[MR][kParts]) {
  start_sums<Bits, S, MR>(x, u, 0, sums);
  if constexpr (S != Scales::k_signed) {
    fours_from<Bits, S, MR, 0, kQuads>(x, u, unit, sums);
    for (int r = 0; r < MR; ++r)
      for (int v = 0; v < kParts; ++v) sums[r][v] = sum_of(sums[r][v]);
  } else {
    veci second[MR][kParts];
    fours_from<Bits, S, MR, 0, kQuads / 2>(x, u, unit, sums);
    start_sums<Bits, S, MR>(x, u, 1, second);
    fours_from<Bits, S, MR, kQuads / 2, kQuads>(x, u, unit, second);
    for (int v = 0; v < kParts; ++v) {
      const veci f = half_factors_at(header, sub, 0, v), g = half_factors_at(header, sub, 1, v);
      for (int r = 0; r < MR; ++r) sums[r][v] = times_factor(sums[r][v], f) + times_factor(second[r][v], g);
    }
  }
}

// MR rows from `row` on. A panel at a time: then memory is read in one go from front to back.
template <int Bits, Scales S, int MR>
void straight_bytes(const LinearArgs& a, const QuantizedFormat& f, const ByteRows x, int64_t row, int64_t panel) {
  vec total[MR][kParts];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) total[r][v] = splat_wide(0);
  const int64_t per = f.group / kUnit;
  const uint8_t *at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k), *header = at;
  int64_t sub = per;  // unit within its group
  for (int64_t span = 0, left = x.units; span < x.spans; ++span, left -= kUnitsOfRecord) {
    const ByteSpan* codes = x.at(row, span);
    const int64_t count = least(kUnitsOfRecord, left);
    for (int64_t u = 0; u < count; ++u, ++sub, at += octavo::unit_bytes(Bits)) {
      if (sub == per) header = at, at += octavo::header_bytes(S), sub = 0;
      fetch_unit<Bits>(at);
      veci sums[MR][kParts];
      unit_sums<Bits, S, MR>(codes, u, header, sub, at, sums);
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) {
        const vec factor = factor_at<S>(header, sub, v);
        vec offset = splat_wide(0);
        if constexpr (kHasOffset<S>) offset = offset - offset_at<Bits, S>(header, sub, v);
#pragma GCC unroll 4
        for (int r = 0; r < MR; ++r)
          total[r][v] = add_unit<kHasOffset<S>>(total[r][v], sums[r][v], factor, offset, codes[r], u);
      }
    }
  }
  put_totals(a, row, panel * kPanel, total);
}

// ---- More rows: a span of a panel is unpacked once, for all of them -------------------------------------------------

struct ByteSlice {  // a span of a panel: 4 KiB of bytes, in the first-level cache with a tile of x
  alignas(64) uint8_t codes[kRecord * kPanel];
  alignas(64) float factors[kUnitsOfRecord * kPanel], offsets[kUnitsOfRecord * kPanel];
  alignas(64) int32_t half_factors[2 * kUnitsOfRecord * kPanel];  // see `half_factors_at`
};

// Less: what is taken off each code, which then is a signed byte.
template <int Bits, int Less, int Q>
OCTAVO_INLINE void widen_quads(const uint8_t* unit, uint8_t* to) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) {
    const veci codes = quad_codes<Bits, Q>(unit, v), w = Less ? bytes_less(codes, Less) : codes;
    memcpy(to + (Q * kPanel + v * kLanes) * 4, &w, sizeof w);
  }
  if constexpr (Q != kQuads - 1) widen_quads<Bits, Less, Q + 1>(unit, to);
}

// Units [first, first + count) of a panel. Centred: the middle of the codes is taken off them, not off sums.
template <int Bits, Scales S, bool Centred = false>
void widen_bytes(const uint8_t* panel, const QuantizedFormat& f, int64_t first, int64_t count, ByteSlice& to) {
  UnitPlace place(panel, f, first);
  for (int64_t i = 0; i < count; ++i, place.next(f)) {
    const uint8_t* header = place.header;
    const int64_t sub = place.sub;
    fetch_unit<Bits>(place.unit);
    widen_quads<Bits, Centred ? kCentre<Bits, S> : 0, 0>(place.unit, to.codes + i * kUnit * kPanel);
    for (int v = 0; v < kParts; ++v) {
      const int64_t at = i * kPanel + v * kLanes;
      store_wide(to.factors + at, factor_at<S>(header, sub, v));
      if constexpr (kHasOffset<S>) store_wide(to.offsets + at, splat_wide(0) - offset_at<Bits, S>(header, sub, v));
      for (int h = 0; h < 2 && S == Scales::k_signed; ++h) {
        const veci twice = half_factors_at(header, sub, h, v);
        memcpy(to.half_factors + (2 * i + h) * kPanel + v * kLanes, &twice, sizeof twice);
      }
    }
  }
}

// `Count` fours of MR rows from `input` on.
template <int MR, int Count>
OCTAVO_INLINE void byte_tile(const ByteSpan* x, int64_t input, const uint8_t* codes, veci (&acc)[MR][kParts]) {
#pragma GCC unroll 8
  for (int q = 0; q < Count; ++q) {
    veci w[kParts];
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) w[v] = lanes_at(codes + (q * kPanel + v * kLanes) * 4);
    add_four<MR>(x, input + 4 * q, w, acc);
  }
}

// The sums of unit `u` of MR rows, as 32-bit integers.
template <int Bits, Scales S, int MR>
OCTAVO_INLINE void slice_sums(const ByteSpan* __restrict x, int64_t u, const ByteSlice& slice,
                              veci (&sums)[MR][kParts]) {
  const uint8_t* codes = slice.codes + u * kUnit * kPanel;
  start_sums<Bits, S, MR>(x, u, 0, sums);
  if constexpr (S != Scales::k_signed) {
    byte_tile<MR, kQuads>(x, u * kUnit, codes, sums);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) sums[r][v] = sum_of(sums[r][v]);
  } else {
    const int32_t* twice = slice.half_factors + 2 * u * kPanel;
    alignas(64) int32_t first[MR * kPanel];
    byte_tile<MR, kQuads / 2>(x, u * kUnit, codes, sums);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) {
        const veci part = times_factor(sums[r][v], lanes_at(twice + v * kLanes));
        memcpy(first + r * kPanel + v * kLanes, &part, sizeof part);
      }
    start_sums<Bits, S, MR>(x, u, 1, sums);
    byte_tile<MR, kQuads / 2>(x, u * kUnit + kUnit / 2, codes + kUnit / 2 * kPanel, sums);
#pragma GCC unroll 12
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v)
        sums[r][v] = times_factor(sums[r][v], lanes_at(twice + kPanel + v * kLanes)) + lanes_at(first + r * kPanel + v * kLanes);
  }
}

// `count` units of MR rows.
template <int Bits, Scales S, int MR>
void slice_rows(const ByteSpan* __restrict x, int64_t count, const ByteSlice& slice, float* __restrict totals) {
  for (int64_t u = 0; u < count; ++u) {
    veci sums[MR][kParts];
    slice_sums<Bits, S, MR>(x, u, slice, sums);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) {
      const vec factor = load_wide(slice.factors + u * kPanel + v * kLanes);
      vec offset = splat_wide(0);
      if constexpr (kHasOffset<S>) offset = load_wide(slice.offsets + u * kPanel + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) {
        float* to = totals + r * kPanel + v * kLanes;
        store_wide(to, add_unit<kHasOffset<S>>(load_wide(to), sums[r][v], factor, offset, x[r], u));
      }
    }
  }
}

template <int Bits, Scales S>
void many_bytes(const LinearArgs& a, const QuantizedFormat& f, const ByteRows& x, int64_t row, int64_t rows,
                int64_t panel) {
  ByteSlice slice;
  alignas(64) float totals[kRowBlock * kPanel];
  memset(totals, 0, (size_t)rows * kPanel * sizeof(float));
  const uint8_t* at = (const uint8_t*)a.weight + panel * octavo::panel_bytes(f, a.k);
  for (int64_t span = 0; span < x.spans; ++span) {
    const int64_t first = span * kUnitsOfRecord, count = least(kUnitsOfRecord, x.units - first);
    widen_bytes<Bits, S>(at, f, first, count, slice);
    in_tiles(rows, [&](auto height, int64_t from) {
      slice_rows<Bits, S, decltype(height)::value>(x.at(row + from, span), count, slice, totals + from * kPanel);
    });
  }
  put_totals(a, row, rows, panel * kPanel, totals);
}

// Products of codes of four to six bits with 8-bit inputs, for `quantized_tasks`.
template <int Bits, Scales S>
struct ByteProducts {
  static constexpr int kStraightRows = 4;  // a unit's sums take more registers than those of words
  ByteRows x;
  void* prepare(const LinearArgs& a, const QuantizedFormat&) { return byte_rows<S == Scales::k_signed>(a, kCentre<Bits, S>, x); }
  template <int MR>
  void straight(const LinearArgs& a, const QuantizedFormat& f, int64_t panel) const {
    straight_bytes<Bits, S, MR>(a, f, x, 0, panel);
  }
  void many(const LinearArgs& a, const QuantizedFormat& f, int64_t row, int64_t rows, int64_t panel) const {
    many_bytes<Bits, S>(a, f, x, row, rows, panel);
  }
};

}  // namespace
