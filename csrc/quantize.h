// Weights on their way into quantised panels: rows of floats are quantised, the blocks of GGUF files keep their integers
// and scales and only change places. Included by each instruction set's file, after dequantize.h.
//
// What is chosen is defined by kernels/quantized_weights.py (`quantize_rows`), bit by bit.
#pragma once

#include "dequantize.h"
#include "fixed_point.h"
#include "quantize_int4.h"
#include "quantized_panels.h"

namespace {

// Largest magnitude of a row, as bits: infinities and NaNs are the largest of all.
OCTAVO_INLINE float largest_magnitude(const float* x, int64_t n) {
  i8 most = splat_int(0);
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const i8 size = as_int(load(x + i)) & splat_int(0x7FFFFFFF);
    most = most > size ? most : size;
  }
  int32_t bits = 0;
  for (int j = 0; j < 8; ++j) bits = most[j] > bits ? most[j] : bits;
  for (; i < n; ++i) {
    int32_t size;
    memcpy(&size, x + i, 4);
    size &= 0x7FFFFFFF;
    bits = size > bits ? size : bits;
  }
  float largest;
  memcpy(&largest, &bits, 4);
  return largest;
}

// One scale for the whole row.
bool int8_row(const float* x, int64_t k, uint8_t* codes, float* scale) {
  const float largest = largest_magnitude(x, k);
  if (!(largest <= 3.4028235e38f)) return false;
  *scale = largest / 127;
  const f8 inverse = inverse_of(splat(*scale)), most = splat(127);
  for (int64_t i = 0; i < k; i += 8) {
    f8 v = splat(0);
    if (i + 8 <= k) v = load(x + i);
    else memcpy(&v, x + i, (size_t)(k - i) * 4);
    f8 q = round_small(v * inverse);
    q = select(q > most, most, select(q < splat(0) - most, splat(0) - most, q));
    const i8 whole = to_int(q);
    for (int64_t j = 0; j < least(8, k - i); ++j) codes[i + j] = (uint8_t)whole[j];
  }
  return true;
}

// One row of floats as fixed-point numbers (linear_fixed.h) into its place. What is not finite makes its group NaN.
void fix_row(const LoadArgs& a, const float* x, int64_t row, int16_t* codes) {
  int16_t fixed[kFixedSpan];
  for (int64_t from = 0; from < a.k; from += kFixedSpan) {
    const int64_t count = least(kFixedSpan, a.k - from);
    const FixedScale scale = fixed_scale(largest_magnitude(x + from, count));
    float part[kFixedSpan] = {};  // where the step is not a number, zeros
    if (scale.inverse) memcpy(part, x + from, (size_t)count * sizeof(float));
    for (int64_t i = 0; i < kFixedSpan; i += 16) put_words<true>(part + i, splat(scale.inverse), fixed + i);
    memcpy(codes + from, fixed, (size_t)count * sizeof *codes);
    put_scale(a.format, a.panels, row, a.k, from / kFixedSpan, scale.step, 0);
  }
  put_codes(a.format, (char*)a.panels, row, a.k, (const uint8_t*)codes);
}

// One row of floats as int8, or as fixed-point numbers, into its place.
bool quantize_row(const LoadArgs& a, const float* x, int64_t row, uint8_t* codes) {
  if (a.format.bits == 16) return fix_row(a, x, row, (int16_t*)codes), true;
  float scale;
  if (!int8_row(x, a.k, codes, &scale)) return false;
  put_scale(a.format, a.panels, row, a.k, 0, scale, 0);
  put_codes(a.format, (char*)a.panels, row, a.k, codes);
  return true;
}

// Up to kSearchedRows rows of floats as int4 into their places. codes: room for as many bytes as x has numbers.
bool quantize_rows(const LoadArgs& a, const float* x, int64_t row, int rows, uint8_t* codes) {
  if (!(largest_magnitude(x, rows * a.k) <= 3.4028235e38f)) return false;
  const int64_t size = a.format.group;
  for (int64_t g = 0; g * size < a.k; ++g) {
    f8 scale, zero;
    int4_groups(x + g * size, a.k, rows, (int)least(size, a.k - g * size), codes + g * size, &scale, &zero);
    for (int r = 0; r < rows; ++r) put_scale(a.format, a.panels, row + r, a.k, g, scale[r], zero[r]);
  }
  for (int r = 0; r < rows; ++r) put_codes(a.format, (char*)a.panels, row + r, a.k, codes + r * a.k);
  return true;
}

// ---- GGUF blocks ------------------------------------------------------------------------------------------------------

// Codes of one block, in order.
void block_codes(int kind, const uint8_t* b, uint8_t* c) {
  if (kind == 8) {
    memcpy(c, b + 2, 32);
  } else if (kind == 2 || kind == 6) {
    uint32_t fifth = 0;
    if (kind == 6) memcpy(&fifth, b + 2, 4);
    const uint8_t* low = b + (kind == 6 ? 6 : 2);
    for (int j = 0; j < 16; ++j) {
      c[j] = (uint8_t)((low[j] & 15) | (fifth >> j & 1) << 4);
      c[j + 16] = (uint8_t)((low[j] >> 4) | (fifth >> (j + 16) & 1) << 4);
    }
  } else if (kind == 12 || kind == 13) {
    const uint8_t *fifth = b + 16, *low = b + 16 + (kind == 13 ? 32 : 0);
    for (int sub = 0; sub < 8; ++sub) {
      for (int j = 0; j < 32; ++j) {
        const int q = low[sub / 2 * 32 + j], high = kind == 13 ? (fifth[j] >> sub & 1) << 4 : 0;
        c[sub * 32 + j] = (uint8_t)((sub % 2 ? q >> 4 : q & 15) | high);
      }
    }
  } else {
    for (int sub = 0; sub < 8; ++sub) {
      const uint8_t *q = b + sub / 4 * 64 + sub % 2 * 32, *high = b + 128 + sub / 4 * 32;
      const int shift = sub % 4 * 2, nibble = sub % 4 / 2 * 4;
      for (int j = 0; j < 32; ++j) c[sub * 32 + j] = (uint8_t)((q[j] >> nibble & 15) | (high[j] >> shift & 3) << 4);
    }
  }
}

// The scales of block `group` of a row into its header.
void block_scales(const LoadArgs& a, int64_t row, int64_t group, const uint8_t* b) {
  uint8_t* h = header_of(a.format, a.panels, row, a.k, group);
  const int64_t j = row % kPanel;
  if (a.kind == 14) {
    memcpy(h + 2 * j, b + 208, 2);
    for (int sub = 0; sub < 16; ++sub) h[32 + sub * 16 + j] = b[192 + sub];
    return;
  }
  memcpy(h + 2 * j, b, 2);
  if (a.kind != 12 && a.kind != 13) return;
  memcpy(h + 32 + 2 * j, b + 2, 2);
  for (int sub = 0; sub < 8; ++sub) {
    int scale, low;
    scale_and_min(b + 4, sub, &scale, &low);
    h[64 + sub * 16 + j] = (uint8_t)scale, h[192 + sub * 16 + j] = (uint8_t)low;
  }
}

void repack_row(const LoadArgs& a, const uint8_t* from, int64_t row, uint8_t* codes) {
  const int64_t blocks = a.k / a.format.group, bytes = a.row_bytes / blocks;
  for (int64_t g = 0; g < blocks; ++g, from += bytes) {
    block_codes(a.kind, from, codes + g * a.format.group);
    block_scales(a, row, g, from);
  }
  put_codes(a.format, (char*)a.panels, row, a.k, codes);
}

bool load_quantized(const LoadArgs& a) {
  const bool keep = a.format.scales != Scales::wide && a.format.scales != Scales::half_fine;
  uint8_t* codes = (uint8_t*)(a.scratch + kPanel * a.k);
  const int64_t end = a.first + a.count, step = !keep && a.format.bits == 4 ? kSearchedRows : 1;
  for (int64_t row = a.first; row < end; row += step) {
    const int rows = (int)least(step, end - row);
    const uint8_t* from = (const uint8_t*)a.source + (row - a.first) * a.row_bytes;
    if (keep) {
      repack_row(a, from, row, codes);
      continue;
    }
    for (int r = 0; r < rows; ++r) dequantize(from + r * a.row_bytes, a.kind, a.k, a.scratch + r * a.k);
    const bool done = step == 1 ? quantize_row(a, a.scratch, row, codes) : quantize_rows(a, a.scratch, row, rows, codes);
    if (!done) return false;
  }
  return true;
}

bool load_rows(const LoadArgs& a) {
  if (a.format.bits) return load_quantized(a);
  load_float_rows(a);
  return true;
}

}  // namespace
