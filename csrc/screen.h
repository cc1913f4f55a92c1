// Products over a screen (screen_panels.h): of each panel of 16 outputs only the largest, and of each row how large it
// is and how far from what the products took it for. Included by each instruction set's file.
//
// Inputs are bytes (byte_rows.h); sums of a half unit are integers, exact, and so are they as floats: 16 products below
// 127 * 31, times a factor below 256, are less than 2^24.
//
// Invariant: an output is a chain over half units, total = fma(step, sum, total), times its scale, plus the bias.
#pragma once

#include "byte_rows.h"
#include "integer_lanes.h"
#include "linear.h"
#include "screen_panels.h"

namespace {

constexpr int64_t kScreenStraight = 4;  // rows whose sums stay in registers
constexpr int64_t kScreenRows = octavo::kScreenRows;

// Half unit `h` of unit `u` of a span, times MR rows.
template <int MR>
OCTAVO_INLINE void add_half(const ByteSpan* x, int64_t u, int h, const veci (&w)[kParts][4],
                            const veci (&factors)[kParts], vec (&total)[MR][kParts]) {
#pragma GCC unroll 4
  for (int r = 0; r < MR; ++r) {
    veci acc[kParts];
    const veci start = input_lanes(x[r].starts + 2 * u + h);
    for (int v = 0; v < kParts; ++v) acc[v] = start;
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      const veci a = input_lanes(x[r].codes + u * kUnit + h * kScreenHalf + 4 * q);
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) add_quads(acc[v], w[v][q], a);
    }
    const vec step = splat_wide(x[r].steps[u]);
#pragma GCC unroll 2
    for (int v = 0; v < kParts; ++v) total[r][v] = fma(step, float_of(times_factor(acc[v], factors[v])), total[r][v]);
  }
}

OCTAVO_INLINE void fetch_half(const uint8_t* at) {
  for (int64_t b = 0; b < kScreenHalfBytes; b += 64) __builtin_prefetch(at + 4 * kAhead + b, 0, 3);
}

OCTAVO_INLINE void unpack_half(const uint8_t* half, veci (&w)[kParts][4], veci (&factors)[kParts]) {
#pragma GCC unroll 2
  for (int v = 0; v < kParts; ++v) screen_quads(half, v, w[v]), factors[v] = screen_factors(half, v);
}

// The largest of a panel's outputs of one row, [16] sums.
OCTAVO_INLINE float peak_of(const ScreenArgs& a, int64_t panel, const float* totals) {
  const float* scales = (const float*)((const uint8_t*)a.panels + panel * screen_panel_bytes(a.k));
  f8 low = load(totals) * load(scales), high = load(totals + 8) * load(scales + 8);
  const int64_t column = panel * kPanel, columns = a.n - column;
  if (a.bias) low = low + bias_at(a.bias, column, a.n), high = high + bias_at(a.bias, column + 8, a.n);
  if (columns >= kPanel) return largest(larger(low, high));
  float best = -__builtin_inff();
  for (int64_t j = 0; j < columns; ++j) {
    const float value = j < 8 ? low[j] : high[j - 8];
    best = value > best ? value : best;
  }
  return best;
}

// One panel times MR rows, which are all there are.
template <int MR>
void screen_straight(const ScreenArgs& a, const ByteRows& x, int64_t panel) {
  vec total[MR][kParts];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) total[r][v] = splat_wide(0);
  const uint8_t* at = (const uint8_t*)a.panels + panel * screen_panel_bytes(a.k) + 4 * kPanel;
  for (int64_t span = 0, left = x.units; span < x.spans; ++span, left -= kUnitsOfRecord) {
    const ByteSpan* codes = x.at(0, span);
    for (int64_t u = 0; u < least(kUnitsOfRecord, left); ++u) {
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h, at += kScreenHalfBytes) {
        fetch_half(at);
        veci w[kParts][4], factors[kParts];
        unpack_half(at, w, factors);
        add_half<MR>(codes, u, h, w, factors, total);
      }
    }
  }
  alignas(64) float totals[kPanel];
  for (int r = 0; r < MR; ++r) {
    for (int v = 0; v < kParts; ++v) store_wide(totals + v * kLanes, total[r][v]);
    peak_at(a, r, panel) = peak_of(a, panel, totals);
  }
}

// MR rows from sums in memory, and back.
template <int MR>
OCTAVO_INLINE void add_half_to(const ByteSpan* x, int64_t u, int h, const veci (&w)[kParts][4],
                               const veci (&factors)[kParts], float* totals) {
  vec total[MR][kParts];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) total[r][v] = load_wide(totals + r * kPanel + v * kLanes);
  add_half<MR>(x, u, h, w, factors, total);
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) store_wide(totals + r * kPanel + v * kLanes, total[r][v]);
}

// One panel times all rows: a half unit is unpacked once and stays in registers while the rows pass.
void screen_many(const ScreenArgs& a, const ByteRows& x, int64_t panel) {
  alignas(64) float totals[kScreenRows * kPanel];
  memset(totals, 0, (size_t)a.m * kPanel * sizeof(float));
  const uint8_t* at = (const uint8_t*)a.panels + panel * screen_panel_bytes(a.k) + 4 * kPanel;
  for (int64_t span = 0, left = x.units; span < x.spans; ++span, left -= kUnitsOfRecord) {
    const ByteSpan* codes = x.at(0, span);
    for (int64_t i = 0; i < 2 * least(kUnitsOfRecord, left); ++i, at += kScreenHalfBytes) {
      fetch_half(at);
      veci w[kParts][4], factors[kParts];
      unpack_half(at, w, factors);
      int64_t r = 0;
      for (; r + 2 <= a.m; r += 2) add_half_to<2>(codes + r, i / 2, (int)(i % 2), w, factors, totals + r * kPanel);
      if (r < a.m) add_half_to<1>(codes + r, i / 2, (int)(i % 2), w, factors, totals + r * kPanel);
    }
  }
  for (int64_t r = 0; r < a.m; ++r) peak_at(a, r, panel) = peak_of(a, panel, totals + r * kPanel);
}

// What a row's integers leave over; never too small.
template <class In>
void row_norms(const ScreenArgs& a, const ByteRows& rows, int64_t row, RowSlack& slack) {
  const In* x = (const In*)a.x + row * a.ldx;
  double squares = 0, over = 0;
  for (int64_t u = 0; u < rows.units; ++u) {
    const ByteSpan& span = rows.memory[u / kUnitsOfRecord * rows.rows + row];
    const double step = span.steps[u % kUnitsOfRecord];
    const int8_t* codes = span.codes + u % kUnitsOfRecord * kUnit;
    for (int64_t i = 0; i < least(kUnit, a.k - u * kUnit); ++i) {
      const double value = widen(x[u * kUnit + i]), left = value - step * codes[i];
      squares += value * value, over += left * left;
    }
  }
  slack.set(a, row, (float)(sqrt(squares) * 1.00001), (float)(sqrt(over) * 1.00001));
}

// False: out of memory.
bool screen(const ScreenArgs& a) {
  octavo::LinearArgs rows{};
  rows.x = a.x, rows.x_type = a.x_type, rows.ldx = a.ldx, rows.m = a.m, rows.k = a.k, rows.threaded = a.threaded;
  ByteRows x;
  void* memory = byte_rows<true>(rows, kScreenMiddle, x);
  if (!memory) return false;
  const int64_t panels = (a.n + kPanel - 1) / kPanel, blocks = octavo::screen_blocks(panels);
  const int64_t task = a.m > kScreenStraight ? 1 : 4, tasks = (blocks + task - 1) / task;
  RowSlack slack;
#pragma omp parallel if (a.threaded)
  {
#pragma omp for schedule(static)
    for (int64_t r = 0; r < a.m; ++r) {
      switch (a.x_type) {
        case DType::f32: row_norms<float>(a, x, r, slack); break;
        case DType::bf16: row_norms<bf16>(a, x, r, slack); break;
        case DType::f16: row_norms<f16>(a, x, r, slack); break;
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t t = 0; t < tasks; ++t) {
      const int64_t end = least(blocks, (t + 1) * task);
      for (int64_t p = t * task * kScreenBlock; p < end * kScreenBlock; ++p) {
        if (p >= panels) {
          for (int64_t r = 0; r < a.m; ++r) peak_at(a, r, p) = -__builtin_inff();
          continue;
        }
        switch (a.m) {
          case 1: screen_straight<1>(a, x, p); break;
          case 2: screen_straight<2>(a, x, p); break;
          case 3: screen_straight<3>(a, x, p); break;
          case 4: screen_straight<4>(a, x, p); break;
          default: screen_many(a, x, p);
        }
      }
      for (int64_t b = t * task; b < end; ++b) raise_block(a, b, slack);
    }
  }
  free(memory);
  return true;
}

}  // namespace
