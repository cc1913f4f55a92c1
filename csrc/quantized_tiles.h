// What products over quantised panels share, whatever the inputs are rounded to: the rows of a tile, prefetch, and what
// becomes of the sums.
#pragma once

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
