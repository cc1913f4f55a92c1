// What products over quantised panels share, whatever the inputs are rounded to: the rows of a tile, prefetch, and what
// becomes of the sums.
#pragma once

#include "integer_lanes.h"
#include "linear.h"
#include "quantized_panels.h"

namespace {

// Sums of integers, two vectors of codes, one of x and a product must fit 16 registers (or 32).
constexpr int kIntegerTile = kParts == 1 ? 12 : 5;

// Memory ahead of a unit at `at`, and the line after it: a header may follow.
template <int Bits>
OCTAVO_INLINE void fetch_unit(const uint8_t* at) {
  for (int b = 0; b <= octavo::unit_bytes(Bits); b += 64) __builtin_prefetch(at + 4 * kAhead + b, 0, 3);
}

template <int N>
struct Height {
  static constexpr int value = N;
};

// tile(Height<rows of it>, first row), for tiles of equal heights: six rows are three and three, not five and one.
template <class Tile>
OCTAVO_INLINE void in_tiles(int64_t rows, Tile tile) {
  const int64_t tiles = (rows + kIntegerTile - 1) / kIntegerTile;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t from = rows * t / tiles;
    switch (rows * (t + 1) / tiles - from) {
      case 1: tile(Height<1>{}, from); break;
      case 2: tile(Height<2>{}, from); break;
      case 3: tile(Height<3>{}, from); break;
      case 4: tile(Height<4>{}, from); break;
      case 5: tile(Height<5>{}, from); break;
#if defined(OCTAVO_WIDE)
      case 6: tile(Height<6>{}, from); break;
      case 7: tile(Height<7>{}, from); break;
      case 8: tile(Height<8>{}, from); break;
      case 9: tile(Height<9>{}, from); break;
      case 10: tile(Height<10>{}, from); break;
      case 11: tile(Height<11>{}, from); break;
      default: tile(Height<12>{}, from);
#endif
    }
  }
}

// `pairs` (a multiple of four) pairs of MR rows, which lie Stride integers apart, times 16-bit words of 16 outputs, two
// inputs side by side. Sums start as they are.
template <int MR, int64_t Stride, Fetch F = Fetch::nothing>
OCTAVO_INLINE void pair_tile(const int16_t* x, const void* words, int64_t pairs, veci (&acc)[MR][kParts]) {
  constexpr int kStep = 4;  // pairs
  constexpr int64_t kDistance = F == Fetch::near ? kAheadNear : kAheadFar;
  const char* at = (const char*)words;
  for (const int16_t* end = x + 2 * pairs; x < end; x += 2 * kStep) {
#pragma GCC unroll 4
    for (int p = 0; p < kStep; ++p, at += 4 * kPanel) {
      if (F != Fetch::nothing) __builtin_prefetch(at + kDistance, 0, F == Fetch::near ? 3 : 2);
      veci w[kParts];
#pragma GCC unroll 2
      for (int v = 0; v < kParts; ++v) w[v] = lanes_at(at + v * 4 * kLanes), pin(w[v]);  // or each row loads them anew
#pragma GCC unroll 12
      for (int r = 0; r < MR; ++r) {
        const veci a = input_lanes(x + r * Stride + 2 * p);
#pragma GCC unroll 2
        for (int v = 0; v < kParts; ++v) add_to(acc[r][v], pair_products(a, w[v]));
      }
    }
  }
}

// The sums of `rows` rows, [rows][kPanel], become outputs from `column` on.
OCTAVO_INLINE void put_totals(const LinearArgs& a, int64_t row, int64_t rows, int64_t column, const float* totals) {
  f8 low = splat(0), high = splat(0);
  if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
  for (int64_t r = 0; r < rows; ++r, totals += kPanel)
    put(a, row + r, column, a.bias ? load(totals) + low : load(totals), a.bias ? load(totals + 8) + high : load(totals + 8));
}

// The same from registers.
template <int MR>
OCTAVO_INLINE void put_totals(const LinearArgs& a, int64_t row, int64_t column, const vec (&total)[MR][kParts]) {
  alignas(64) float totals[MR * kPanel];
  for (int r = 0; r < MR; ++r)
    for (int v = 0; v < kParts; ++v) store_wide(totals + r * kPanel + v * kLanes, total[r][v]);
  put_totals(a, row, MR, column, totals);
}

}  // namespace
