// A screen on the byte tiles of AMX: panels of 8-bit codes with one scale an output, and products over them. screen.h for
// what a screen is; head_screen.h for what it is for.
//
// Both sides are rotated first, every 128 inputs by a Hadamard matrix: products stay what they are, and the few large
// inputs that hidden states have are spread over all, so that one step a row and one scale an output leave little over.
//
//   panel:  f32 scale[16], then a KiB for each 64 rotated inputs: [16 outputs][64] int8
//   value = scale * code, code -127 … 127
//
// Outputs are the rows of a product's tiles and rows of x its columns: the largest of 16 outputs is then that of 16
// vectors, lane by lane, and no sum across lanes is needed.
//
// Invariant: `error` and `size` of panels and rows are never less than the Euclidean norms they stand for, rows being
// taken as `linear_amx` takes them.
#pragma once

#include "amx.h"
#include "linear_amx.h"
#include "screen_peaks.h"

#include <math.h>

namespace {

constexpr int64_t kRotated = 128;    // inputs that are rotated together
constexpr int64_t kByteInputs = 64;  // inputs of a tile of bytes
constexpr int kByteMost = 127;
constexpr float kRotationSlack = 1e-6f;  // what eight roundings of a rotation may move, relative to the norm

inline int64_t rotated_inputs(int64_t k) { return (k + kRotated - 1) / kRotated * kRotated; }
int64_t screen_panel_bytes_amx(int64_t k) { return 4 * kPanel + rotated_inputs(k) * kPanel; }

// 128 vectors of eight numbers, each lane multiplied by the orthogonal Hadamard matrix.
OCTAVO_INLINE void rotate_lanes(f8* x) {
  for (int i = 0; i < kRotated; ++i) x[i] = x[i] * splat(0.08838834764831845f);  // 128 ** -0.5
  for (int h = 1; h < kRotated; h *= 2) {
    for (int i = 0; i < kRotated; i += 2 * h) {
      for (int j = i; j < i + h; ++j) {
        const f8 a = x[j], b = x[j + h];
        x[j] = a + b, x[j + h] = a - b;
      }
    }
  }
}

// The same of 128 numbers that lie side by side.
OCTAVO_INLINE void rotate_row(float* x) {
  f8 v[kRotated / 8];
  for (int i = 0; i < kRotated / 8; ++i) {
    f8 a = load(x + 8 * i) * splat(0.08838834764831845f);
    a = __builtin_shuffle(a, i8{1, 0, 3, 2, 5, 4, 7, 6}) + a * f8{1, -1, 1, -1, 1, -1, 1, -1};
    a = __builtin_shuffle(a, i8{2, 3, 0, 1, 6, 7, 4, 5}) + a * f8{1, 1, -1, -1, 1, 1, -1, -1};
    v[i] = __builtin_shuffle(a, i8{4, 5, 6, 7, 0, 1, 2, 3}) + a * f8{1, 1, 1, 1, -1, -1, -1, -1};
  }
  for (int h = 1; h < kRotated / 8; h *= 2) {
    for (int i = 0; i < kRotated / 8; ++i) {
      if (i & h) continue;
      const f8 a = v[i], b = v[i + h];
      v[i] = a + b, v[i + h] = a - b;
    }
  }
  for (int i = 0; i < kRotated / 8; ++i) store(x + 8 * i, v[i]);
}

OCTAVO_INLINE f8 byte_codes(f8 x, f8 inverse) {
  const f8 most = splat(kByteMost), q = round_small(x * inverse);
  return select(q > most, most, select(q < splat(0) - most, splat(0) - most, q));
}

// ---- Panels ------------------------------------------------------------------------------------------------------------

// Outputs 8v to 8v + 7 of a panel of floats; returns whether all of their weights are finite. room: [rotated inputs] f8.
template <class W>
bool byte_outputs(const W* panel, int64_t k, int v, f8* room, int8_t* codes, float* scales, ScreenSquares& squares) {
  const int64_t inputs = rotated_inputs(k);
  f8 top = splat(0);
  i8 finite = splat_int(-1);
  for (int64_t i = 0; i < inputs; ++i) {
    room[i] = i < k ? input_of(panel, i, v) : splat(0);
    finite &= magnitude(room[i]) <= splat(3.0e38f);
  }
  for (int64_t i = 0; i < inputs; i += kRotated) rotate_lanes(room + i);
  for (int64_t i = 0; i < inputs; ++i) top = larger(magnitude(room[i]), top);
  const f8 scale = select(top > splat(1e-30f), top / splat(kByteMost), splat(0));
  const f8 inverse = select(scale > splat(0), splat(1) / scale, splat(0));
  store(scales + 8 * v, scale);
  for (int64_t i = 0; i < inputs; ++i) {
    const f8 q = byte_codes(room[i], inverse), value = q * scale, left = room[i] - value;
    squares.stored = fma(value, value, squares.stored), squares.over = fma(left, left, squares.over);
    const i8 code = to_int(q);
    int8_t* to = codes + i / kByteInputs * kByteInputs * kPanel + i % kByteInputs;
    for (int j = 0; j < 8; ++j) to[(8 * v + j) * kByteInputs] = (int8_t)code[j];
  }
  for (int i = 0; i < 8; ++i)
    if (!finite[i]) return false;
  return true;
}

template <class W>
void byte_panel(const octavo::ScreenPanelArgs& a) {
  const int64_t inputs = rotated_inputs(a.k);
  f8* room = (f8*)scratch().take((size_t)inputs * sizeof(f8));
  *a.size = 0, *a.error = __builtin_inff();  // so that nobody relies on it
  if (!room) return;
  const float slack = 1.0001f + (float)inputs * 0x1p-24f;
  float most = 0, left = 0;
  for (int v = 0; v < 2; ++v) {
    ScreenSquares squares = {splat(0), splat(0)};
    if (!byte_outputs((const W*)a.weights, a.k, v, room, (int8_t*)a.panel + 4 * kPanel, (float*)a.panel, squares)) left = __builtin_inff();
    const float size = sqrtf(largest(squares.stored)) * slack;
    const float error = sqrtf(largest(squares.over)) * slack + size * 2 * kRotationSlack;
    most = size > most ? size : most;
    left = error > left ? error : left;
  }
  *a.size = most, *a.error = left;
}

// One panel of floats; outputs that do not exist are zeros there.
void screen_panel_amx(const octavo::ScreenPanelArgs& a) {
  switch (a.type) {
    case DType::f32: return byte_panel<float>(a);
    case DType::bf16: return byte_panel<bf16>(a);
    case DType::f16: return byte_panel<f16>(a);
  }
}

// ---- Rows --------------------------------------------------------------------------------------------------------------

// Rotated rows as tiles of bytes, [blocks of 16][depth][16 fours of inputs][16 rows][4]; steps [blocks * 16]. Zeros below
// the last row.
struct ByteTiles {
  int8_t* codes;
  float* steps;
  int64_t blocks, depth;
  OCTAVO_INLINE const int8_t* at(int64_t block) const { return codes + block * depth * 1024; }
};

// Row `r` of a.x into its tile, and what its codes leave over into `slack`. part: [rotated inputs].
template <class In>
void byte_tile_row(const ScreenArgs& a, int64_t r, bool rounded, float* part, const ByteTiles& to, RowSlack& slack) {
  const In* x = (const In*)a.x + r * a.ldx;
  const int64_t inputs = rotated_inputs(a.k);
  double squares = 0, over = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    part[i] = i < a.k ? widen(x[i]) : 0;
    if (rounded) {
      bf16 half;
      narrow(part[i], &half);
      part[i] = widen(half);
    }
    squares += (double)part[i] * part[i];
  }
  for (int64_t i = 0; i < inputs; i += kRotated) rotate_row(part + i);
  f8 top = splat(0);
  for (int64_t i = 0; i < inputs; i += 8) top = larger(magnitude(load(part + i)), top);
  const float most = largest(top);
  const bool finite = squares < 1e76, some = finite && most > 1e-30f;  // squares: not a number where an input is none
  const float step = some ? most / kByteMost : 0, inverse = some ? kByteMost / most : 0;
  int8_t* tile = to.codes + r / 16 * to.depth * 1024 + r % 16 * 4;
  for (int64_t i = 0; i < inputs; i += 8) {
    const f8 q = some ? byte_codes(load(part + i), splat(inverse)) : splat(0);
    const i8 code = to_int(q);
    for (int j = 0; j < 8; ++j) {
      const double left = part[i + j] - (double)step * code[j];
      over += left * left;
      tile[i / kByteInputs * 1024 + (i + j) % kByteInputs / 4 * 64 + j % 4] = (int8_t)code[j];
    }
  }
  to.steps[r] = step;
  const float size = finite ? (float)(sqrt(squares) * 1.00001) : __builtin_nanf("");
  slack.set(a, r, size, (float)(sqrt(over) * 1.00001) + size * 2 * kRotationSlack);
}

// ---- Products ------------------------------------------------------------------------------------------------------------

// Two panels times a tile of rows: sums [2 panels][16 outputs][16 rows]. Two tiles of sums and not four, see `Pairs`.
template <int Lines>
OCTAVO_INLINE void byte_pair(const int8_t* codes, const int8_t* codes2, const int8_t* x, int64_t depth, Coming& coming,
                             int32_t* sums) {
  zero_tile(0);
  zero_tile(1);
  for (int64_t s = 0; s < depth * 1024; s += 1024) {
    load_tile(6, x + s, 64);
    coming.ask<Lines>();
    load_tile(4, codes + s, 64);
    coming.ask<Lines>();
    load_tile(5, codes2 + s, 64);
    coming.ask<Lines>();
    multiply_byte_tiles(0, 4, 6);
    multiply_byte_tiles(1, 5, 6);
    coming.ask<Lines>();
  }
  store_tile(0, sums, 64);
  store_tile(1, sums + 256, 64);
}

// The largest of a panel's outputs for each of 16 rows, [16 outputs][16 rows] sums.
OCTAVO_INLINE vec peaks_of(const ScreenArgs& a, int64_t panel, const float* scales, vec steps, const int32_t* sums) {
  const int64_t column = panel * kPanel, columns = least(kPanel, a.n - column);
  vec best = splat_wide(-__builtin_inff());
  for (int64_t o = 0; o < columns; ++o) {
    vec value = float_of(lanes_at(sums + o * 16)) * splat_wide(scales[o]);
    if (a.bias) value = fma(value, steps, splat_wide(a.bias[column + o]));
    best = value > best ? value : best;
  }
  return a.bias ? best : best * steps;
}

// Peaks of a panel for tile `block` of rows, from its sums.
OCTAVO_INLINE void put_peaks(const ScreenArgs& a, const ByteTiles& x, int64_t block, int64_t panel, const float* scales,
                             const int32_t* sums) {
  alignas(64) float peaks[16];
  store_wide(peaks, peaks_of(a, panel, scales, load_wide(x.steps + block * 16), sums));
  for (int64_t r = 0; r < least(16, a.m - block * 16); ++r) peak_at(a, block * 16 + r, panel) = peaks[r];
}

// Panels [begin, end), of one block of peaks.
template <int Lines>
void byte_panels(const ScreenArgs& a, const ByteTiles& x, int64_t begin, int64_t end) {
  const int64_t bytes = screen_panel_bytes_amx(a.k);
  alignas(64) int32_t sums[2 * 256];
  Coming coming;
  coming.at = (const char*)a.panels + (begin + 2) * bytes;
  for (int64_t p = begin; p < end; p += 2) {
    const char *panel = (const char*)a.panels + p * bytes, *panel2 = p + 1 < end ? panel + bytes : panel;
    const auto codes = [](const char* at) { return (const int8_t*)at + 4 * kPanel; };
    coming.end = panel + 4 * bytes;
    for (int64_t b = 0; b < x.blocks; ++b) {
      byte_pair<Lines>(codes(panel), codes(panel2), x.at(b), x.depth, coming, sums);
      put_peaks(a, x, b, p, (const float*)panel, sums);
      if (panel2 != panel) put_peaks(a, x, b, p + 1, (const float*)panel2, sums + 256);
    }
  }
}

// False: out of memory.
bool screen_amx(const ScreenArgs& a) {
  const int64_t inputs = rotated_inputs(a.k);
  ByteTiles x;
  x.blocks = (a.m + 15) / 16, x.depth = inputs / kByteInputs;
  const size_t codes = (size_t)(x.blocks * x.depth) * 1024, steps = (size_t)x.blocks * 64;
  char* memory = (char*)scratch().take(codes + steps + (size_t)(a.m * inputs) * sizeof(float));
  if (!memory) return false;
  x.codes = (int8_t*)memory, x.steps = (float*)(memory + codes);
  memset(memory, 0, codes + steps);
  float* parts = (float*)(memory + codes + steps);
  const bool rounded = rounds_inputs_amx(a.type, a.k);
  RowSlack slack;
#pragma omp parallel for schedule(static) if (a.threaded && a.m > 1)
  for (int64_t r = 0; r < a.m; ++r) {
    switch (a.x_type) {
      case DType::f32: byte_tile_row<float>(a, r, rounded, parts + r * inputs, x, slack); break;
      case DType::bf16: byte_tile_row<bf16>(a, r, rounded, parts + r * inputs, x, slack); break;
      case DType::f16: byte_tile_row<f16>(a, r, rounded, parts + r * inputs, x, slack); break;
    }
  }
  const int64_t panels = (a.n + kPanel - 1) / kPanel, blocks = octavo::screen_blocks(panels);
  share_out<TileScope>(blocks, a.threaded, [&](int64_t i) {
    const int64_t begin = i * kScreenBlock, end = least(panels, begin + kScreenBlock);
    if (x.blocks >= 4)
      byte_panels<2>(a, x, begin, end);
    else if (x.blocks >= 2)
      byte_panels<4>(a, x, begin, end);
    else
      byte_panels<8>(a, x, begin, end);
    for (int64_t p = end; p < begin + kScreenBlock; ++p)
      for (int64_t r = 0; r < a.m; ++r) peak_at(a, r, p) = -__builtin_inff();
    raise_block(a, i, slack);
  });
  return true;
}

}  // namespace
