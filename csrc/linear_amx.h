// y = x W^T + b on the tiles of AMX, for bfloat16 weights whose input size is a multiple of 32; linear.h for the rest.
//
// x is rounded to bfloat16 once. A pair panel (kernels.h) is a run of B tiles as it lies: 16 pairs of inputs times 16
// outputs are one KiB in a row. Registers: two A tiles of 16 rows, two B tiles, four sums; for up to 16 rows one A tile
// and four panels, which then come from memory, so the tiles to come are asked for two steps ahead.
//
// Invariant: every output is one sum, tile step by tile step in the order of the inputs, whatever the number of rows,
// blocks or threads: a row alone and the same row among 512 have the same bits. (They differ from those of the other
// instruction sets, which do not round x.)
#pragma once

#include "amx.h"
#include "linear.h"

namespace {

constexpr int64_t kStepInputs = 32;                      // inputs of a tile step
constexpr int64_t kStepWeights = kStepInputs * kPanel;   // weights of a panel in it: one KiB
constexpr int64_t kAmxRows = 128;                        // rows that pass a pair of panels in one go

struct AmxBlock {
  const LinearArgs* args;
  const bf16* x;  // [rows, k], rows padded with zeros to whole tiles
  int64_t row, rows;
};

OCTAVO_INLINE const bf16* panel_at(const LinearArgs& a, int64_t p) {
  return (const bf16*)a.weight + p * panel_size<bf16>(a.k);
}

// Lines of the KiB at `p`, towards the second-level cache.
OCTAVO_INLINE void ask_step(const bf16* p) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; ++line) __builtin_prefetch((const char*)p + 64 * line, 0, 2);
}

// `count` panels from `panel` on, sums in c: [rows][stride].
void put_sums(const AmxBlock& b, int64_t first, int64_t rows, int64_t panel, int count, const float* c, int64_t stride) {
  const LinearArgs& a = *b.args;
  for (int p = 0; p < count; ++p) {
    const int64_t column = (panel + p) * kPanel;
    f8 low = splat(0), high = splat(0);
    if (a.bias) low = bias_at(a.bias, column, a.n), high = bias_at(a.bias, column + 8, a.n);
    for (int64_t r = 0; r < rows; ++r) {
      const float* from = c + r * stride + p * kPanel;
      const f8 l = a.bias ? load(from) + low : load(from), h = a.bias ? load(from + 8) + high : load(from + 8);
      put(a, b.row + first + r, column, l, h);
    }
  }
}

// 32 rows times two panels. Fetch: the next two panels, meanwhile.
template <bool Fetch>
void amx_square(const AmxBlock& b, int64_t first, int64_t panel) {
  const LinearArgs& a = *b.args;
  alignas(64) float c[32 * 32];
  const bf16 *x = b.x + first * a.k, *w = panel_at(a, panel), *w2 = panel_at(a, panel + 1);
  const bf16 *next = panel_at(a, panel + 2), *next2 = panel_at(a, panel + 3);
  const int64_t stride = a.k * 2;
  zero_tile(0);
  zero_tile(1);
  zero_tile(2);
  zero_tile(3);
  for (int64_t i = 0; i < a.k; i += kStepInputs) {
    load_tile(4, x + i, stride);
    load_tile(6, w + i * kPanel, 64);
    multiply_tiles(0, 4, 6);
    load_tile(7, w2 + i * kPanel, 64);
    multiply_tiles(1, 4, 7);
    load_tile(5, x + 16 * a.k + i, stride);
    multiply_tiles(2, 5, 6);
    multiply_tiles(3, 5, 7);
    if (Fetch) ask_step(next + i * kPanel), ask_step(next2 + i * kPanel);
  }
  store_tile(0, c, 128);
  store_tile(1, c + 16, 128);
  store_tile(2, c + 16 * 32, 128);
  store_tile(3, c + 16 * 32 + 16, 128);
  put_sums(b, first, least(32, b.rows - first), panel, 2, c, 32);
}

// 16 rows times four panels.
void amx_wide(const AmxBlock& b, int64_t first, int64_t panel) {
  const LinearArgs& a = *b.args;
  alignas(64) float c[16 * 64];
  const bf16 *x = b.x + first * a.k, *w[4];
  for (int p = 0; p < 4; ++p) w[p] = panel_at(a, panel + p);
  const int64_t ahead = 4 * panel_size<bf16>(a.k);  // the same place in the next four panels
  zero_tile(0);
  zero_tile(1);
  zero_tile(2);
  zero_tile(3);
  for (int64_t i = 0; i < a.k; i += kStepInputs) {
    const int64_t at = i * kPanel, then = i + 2 * kStepInputs;
    const int64_t later = then < a.k ? then * kPanel : (then - a.k) * kPanel + ahead;
    load_tile(4, x + i, a.k * 2);
    for (int p = 0; p < 4; ++p) ask_step(w[p] + later);
    load_tile(5, w[0] + at, 64);
    multiply_tiles(0, 4, 5);
    load_tile(6, w[1] + at, 64);
    multiply_tiles(1, 4, 6);
    load_tile(7, w[2] + at, 64);
    multiply_tiles(2, 4, 7);
    load_tile(5, w[3] + at, 64);
    multiply_tiles(3, 4, 5);
  }
  store_tile(0, c, 256);
  store_tile(1, c + 16, 256);
  store_tile(2, c + 32, 256);
  store_tile(3, c + 48, 256);
  put_sums(b, first, least(16, b.rows - first), panel, 4, c, 64);
}

// 16 rows times one panel.
void amx_single(const AmxBlock& b, int64_t first, int64_t panel) {
  const LinearArgs& a = *b.args;
  alignas(64) float c[16 * 16];
  const bf16 *x = b.x + first * a.k, *w = panel_at(a, panel);
  zero_tile(0);
  for (int64_t i = 0; i < a.k; i += kStepInputs) {
    load_tile(4, x + i, a.k * 2);
    load_tile(5, w + i * kPanel, 64);
    multiply_tiles(0, 4, 5);
  }
  store_tile(0, c, 64);
  put_sums(b, first, least(16, b.rows - first), panel, 1, c, 16);
}

void amx_block(const AmxBlock& b, int64_t begin, int64_t end) {
  int64_t p = begin;
  if (b.rows <= 16) {
    for (; p + 4 <= end; p += 4) amx_wide(b, 0, p);
  } else {
    for (; p + 2 <= end; p += 2) {
      const bool more = p + 4 <= end;
      int64_t r = 0;
      for (; b.rows - r > 16; r += 32) more && r == 0 ? amx_square<true>(b, r, p) : amx_square<false>(b, r, p);
      if (r < b.rows) amx_single(b, r, p), amx_single(b, r, p + 1);
    }
  }
  for (; p < end; ++p)
    for (int64_t r = 0; r < b.rows; r += 16) amx_single(b, r, p);
}

// x as bfloat16 [m rounded up to 32, k], zeros below.
template <class In>
void round_rows(const LinearArgs& a, int64_t padded, bf16* to) {
#pragma omp parallel for schedule(static) if (a.threaded && a.m * a.k > 65536)
  for (int64_t r = 0; r < padded; ++r) {
    const In* from = (const In*)a.x + r * a.ldx;
    if (r >= a.m) {
      memset(to + r * a.k, 0, (size_t)a.k * 2);
      continue;
    }
    for (int64_t i = 0; i < a.k; i += 8) store(to + r * a.k + i, load(from + i));
  }
}

bool linear_amx(const LinearArgs& a) {
  if (a.weight_type != DType::bf16 || a.k % kStepInputs) return linear(a);
  const int64_t padded = (a.m + 31) / 32 * 32;
  bf16* x = (bf16*)aligned_alloc(64, (size_t)(padded * a.k) * 2);
  if (!x) return false;
  switch (a.x_type) {
    case DType::f32: round_rows<float>(a, padded, x); break;
    case DType::bf16: round_rows<bf16>(a, padded, x); break;
    case DType::f16: round_rows<f16>(a, padded, x); break;
  }
  const int64_t panels = (a.n + kPanel - 1) / kPanel, run = octavo::panels_of_a_run(a.m, a.k, a.weight_type);
  const int64_t blocks = (a.m + kAmxRows - 1) / kAmxRows, items = blocks * ((panels + run - 1) / run);
#pragma omp parallel if (a.threaded && items > 1)
  {
    TileConfig config;
    for (int t = 0; t < 8; ++t) config.rows[t] = 16, config.bytes[t] = 64;
    load_config(config);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < items; ++i) {
      const int64_t begin = i / blocks * run, row = i % blocks * kAmxRows;
      amx_block({&a, x + row * a.k, row, least(kAmxRows, a.m - row)}, begin, least(panels, begin + run));
    }
    release_tiles();
  }
  free(x);
  return true;
}

bool gated_linear_amx(const LinearArgs& a, octavo::Activation kind) {
  return (a.weight_type != DType::bf16 || a.k % kStepInputs) && gated_linear(a, kind);
}

// Inputs of bfloat16 products are rounded to bfloat16.
float input_rounding_amx(DType weight_type, int64_t k) {
  return weight_type != DType::bf16 || k % kStepInputs ? 0 : 0x1p-8f;
}

}  // namespace
