// Weights on their way into quantised panels: rows of floats are quantised, the blocks of GGUF files keep their integers
// and scales and only change places. Included by each instruction set's file, after dequantize.h.
//
// What is chosen is defined by kernels/quantized_weights.py (`quantize_rows`); for int8 bit by bit, for int4 up to the
// order in which squared errors are summed.
#pragma once

#include "dequantize.h"
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

OCTAVO_INLINE float inverse_of(float scale) {
  constexpr float kTiny = 1.17549435e-38f;
  return scale > 0 ? 1 / (scale < kTiny ? kTiny : scale) : 0;
}

// One scale for the whole row.
bool int8_row(const float* x, int64_t k, uint8_t* codes, float* scale) {
  const float largest = largest_magnitude(x, k);
  if (!(largest <= 3.4028235e38f)) return false;
  *scale = largest / 127;
  const f8 inverse = splat(inverse_of(*scale)), most = splat(127);
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

constexpr int kMostGroup = 256;
constexpr double kShares[] = {1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7};

// x [size], size a multiple of 8 and at most kMostGroup: codes 0 … 15 with an integer zero and a float16 scale.
void int4_group(const float* x, int size, uint8_t* codes, float* best_scale, float* best_zero) {
  f8 low = splat(0), high = splat(0);
  for (int i = 0; i < size; i += 8) {
    const f8 v = load(x + i);
    low = select(v < low, v, low), high = larger(v, high);
  }
  float least_of = 0, most_of = 0;
  for (int j = 0; j < 8; ++j) {
    least_of = low[j] < least_of ? low[j] : least_of;
    most_of = high[j] > most_of ? high[j] : most_of;
  }
  float best = __builtin_inff();
  *best_scale = 0, *best_zero = 8;
  for (double share : kShares) {
    // In double and then to float, as Python hands a number to torch.
    float scale = (most_of - least_of) * (float)(share / 15);
    if (scale > 65504) scale = 65504;
    f16 half;
    narrow(scale, &half);
    scale = widen(half);
    const float inverse = inverse_of(scale);
    float zero = round_small(splat(-least_of * (float)share * inverse))[0];
    zero = zero < 0 ? 0 : zero > 15 ? 15 : zero;
    f8 error = splat(0);
    for (int i = 0; i < size; i += 8) {
      const f8 v = load(x + i);
      f8 q = round_small(v * splat(inverse)) + splat(zero);
      q = select(q > splat(15), splat(15), select(q < splat(0), splat(0), q));
      const f8 off = (q - splat(zero)) * splat(scale) - v;
      error = error + off * off;
    }
    const float squared = sum(error);
    if (squared < best) best = squared, *best_scale = scale, *best_zero = zero;
  }
  const f8 inverse = splat(inverse_of(*best_scale)), zero = splat(*best_zero);
  for (int i = 0; i < size; i += 8) {
    f8 q = round_small(load(x + i) * inverse) + zero;
    q = select(q > splat(15), splat(15), select(q < splat(0), splat(0), q));
    const i8 whole = to_int(q);
    for (int j = 0; j < 8; ++j) codes[i + j] = (uint8_t)whole[j];
  }
}

// One row of floats into its place. codes: room for k + kMostGroup bytes.
bool quantize_row(const LoadArgs& a, const float* x, int64_t row, uint8_t* codes) {
  if (a.format.bits == 8) {
    float scale;
    if (!int8_row(x, a.k, codes, &scale)) return false;
    put_scale(a.format, a.panels, row, a.k, 0, scale, 0);
  } else {
    if (!(largest_magnitude(x, a.k) <= 3.4028235e38f)) return false;
    const int64_t size = a.format.group;
    float last[kMostGroup] = {};
    for (int64_t g = 0; g * size < a.k; ++g) {
      const int64_t count = least(size, a.k - g * size);
      float scale, zero;
      const float* from = x + g * size;
      if (count < size) memcpy(last, from, (size_t)count * 4), from = last;
      int4_group(from, (int)size, codes + g * size, &scale, &zero);
      put_scale(a.format, a.panels, row, a.k, g, scale, zero);
    }
  }
  put_codes(a.format, (char*)a.panels, row, a.k, codes);
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
  const bool keep = a.format.scales != Scales::wide && a.format.scales != Scales::half_zero;
  uint8_t* codes = (uint8_t*)(a.scratch + kPanel * a.k);
  for (int64_t row = a.first; row < a.first + a.count; ++row) {
    const uint8_t* from = (const uint8_t*)a.source + (row - a.first) * a.row_bytes;
    if (keep) {
      repack_row(a, from, row, codes);
      continue;
    }
    dequantize(from, a.kind, a.k, a.scratch);
    if (!quantize_row(a, a.scratch, row, codes)) return false;
  }
  return true;
}

bool load_rows(const LoadArgs& a) {
  if (a.format.bits) return load_quantized(a);
  load_float_rows(a);
  return true;
}

}  // namespace
