// Stored weights -> float32 -> panels: plain floats and the quantised blocks of GGUF files. Included by each
// instruction set's file. Kinds are GGUF's own type numbers.
//
// The value of a quantised number is defined by the format, in float32: scale * integer, or (scale * sub-scale) * integer
// - (minimum * sub-minimum). Multiplications and the subtraction are rounded one by one (no contraction), so the bits
// are those of the gguf package. Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
#pragma once

#include "kernels.h"
#include "panels.h"
#include "simd.h"

namespace {

using octavo::LoadArgs;

OCTAVO_INLINE float half_at(const uint8_t* p) {
  f16 h;
  memcpy(&h, p, 2);
  return widen(h);
}

void q4_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * (float)((b[2 + j] & 15) - 8);
    out[j + 16] = d * (float)((b[2 + j] >> 4) - 8);
  }
}

void q5_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  uint32_t fifth;
  memcpy(&fifth, b + 2, 4);
  for (int j = 0; j < 16; ++j) {
    out[j] = d * (float)((int)((b[6 + j] & 15) | (fifth >> j & 1) << 4) - 16);
    out[j + 16] = d * (float)((int)((b[6 + j] >> 4) | (fifth >> (j + 16) & 1) << 4) - 16);
  }
}

void q8_0(const uint8_t* b, float* out) {
  const float d = half_at(b);
  const int8_t* q = (const int8_t*)(b + 2);
  for (int j = 0; j < 32; ++j) out[j] = d * (float)q[j];
}

// Six-bit scales and minima of eight sub-blocks in twelve bytes.
OCTAVO_INLINE void scale_and_min(const uint8_t* p, int sub, int* scale, int* min) {
  if (sub < 4) {
    *scale = p[sub] & 63, *min = p[sub + 4] & 63;
  } else {
    *scale = (p[sub + 4] & 15) | (p[sub - 4] >> 2 & 48), *min = (p[sub + 4] >> 4) | (p[sub] >> 2 & 48);
  }
}

// Q4_K and Q5_K: d, dmin, scales, (fifth bits,) 128 bytes of low bits; sub-blocks 2c and 2c + 1 share 32 bytes.
template <bool Fifth>
void qx_k(const uint8_t* b, float* out) {
  const float d = half_at(b), dmin = half_at(b + 2);
  const uint8_t *fifth = b + 16, *low = b + 16 + (Fifth ? 32 : 0);
  for (int sub = 0; sub < 8; ++sub) {
    int scale, min;
    scale_and_min(b + 4, sub, &scale, &min);
    const float s = d * (float)scale, m = dmin * (float)min;
    const uint8_t* q = low + sub / 2 * 32;
    for (int j = 0; j < 32; ++j) {
      int v = sub % 2 ? q[j] >> 4 : q[j] & 15;
      if (Fifth) v |= (fifth[j] >> sub & 1) << 4;
      out[sub * 32 + j] = s * (float)v - m;
    }
  }
}

void q6_k(const uint8_t* b, float* out) {
  const float d = half_at(b + 208);
  const int8_t* scales = (const int8_t*)(b + 192);
  for (int sub = 0; sub < 8; ++sub) {  // 32 numbers: half sub / 4 of the block, low or high nibbles of 32 bytes
    const uint8_t *q = b + sub / 4 * 64 + sub % 2 * 32, *high = b + 128 + sub / 4 * 32;
    const int shift = sub % 4 * 2, nibble = sub % 4 / 2 * 4;
    for (int j = 0; j < 32; ++j) {
      const int v = ((q[j] >> nibble & 15) | (high[j] >> shift & 3) << 4) - 32;
      out[sub * 32 + j] = d * (float)scales[sub * 2 + j / 16] * (float)v;
    }
  }
}

template <int Size, int Bytes, void (*Unpack)(const uint8_t*, float*)>
void blocks(const uint8_t* from, int64_t count, float* out) {
  for (int64_t i = 0; i < count; i += Size, from += Bytes) Unpack(from, out + i);
}

template <class W>
void widen_run(const uint8_t* from, int64_t count, float* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, load((const W*)from + i));
  for (; i < count; ++i) out[i] = widen(((const W*)from)[i]);
}

// `count` numbers (whole blocks).
void dequantize(const void* source, int kind, int64_t count, float* out) {
  const uint8_t* from = (const uint8_t*)source;
  switch (kind) {
    case 0: return widen_run<float>(from, count, out);
    case 1: return widen_run<f16>(from, count, out);
    case 2: return blocks<32, 18, q4_0>(from, count, out);
    case 6: return blocks<32, 22, q5_0>(from, count, out);
    case 8: return blocks<32, 34, q8_0>(from, count, out);
    case 12: return blocks<256, 144, qx_k<false>>(from, count, out);
    case 13: return blocks<256, 176, qx_k<true>>(from, count, out);
    case 14: return blocks<256, 210, q6_k>(from, count, out);
    case 30: return widen_run<bf16>(from, count, out);
  }
}

template <class W>
void narrow_run(const float* from, int64_t count, W* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store(out + i, load(from + i));
  for (; i < count; ++i) narrow(from[i], out + i);
}

// A few rows at a time, so that what lies between the file and the panels stays in the cache.
template <class W>
void load_typed(const LoadArgs& a) {
  float* wide = a.scratch;
  W* narrowed = (W*)(a.scratch + kPanel * a.k);
  for (int64_t row = a.first; row < a.first + a.count;) {
    const int64_t rows = least(kPanel - row % kPanel, a.first + a.count - row);
    dequantize((const char*)a.source + (row - a.first) * a.row_bytes, a.kind, rows * a.k, wide);
    const W* ready = (const W*)wide;
    if (!__is_same(W, float)) narrow_run(wide, rows * a.k, narrowed), ready = narrowed;
    pack_rows_typed(ready, a.k, row, rows, a.n, a.k, (W*)a.panels);
    row += rows;
  }
}

void load_float_rows(const LoadArgs& a) {
  const bool plain = (a.kind == 0 && a.type == DType::f32) || (a.kind == 1 && a.type == DType::f16) ||
                     (a.kind == 30 && a.type == DType::bf16);
  if (plain) return pack_rows(a.source, a.type, a.k, a.first, a.count, a.n, a.k, a.panels);
  switch (a.type) {
    case DType::f32: return load_typed<float>(a);
    case DType::bf16: return load_typed<bf16>(a);
    case DType::f16: return load_typed<f16>(a);
  }
}

}  // namespace
